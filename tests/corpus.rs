//! Files that once did more to a reader than to be refused, and others like them: each is read or
//! refused, and nothing panics, overflows or goes on for long. `corpus/READER/` holds them;
//! `crates/draftsmith/benches/fuzz/` finds them, and has the readers.

#[path = "../crates/draftsmith/benches/fuzz/readers.rs"]
mod readers;

use std::path::Path;
use std::time::{Duration, Instant};

use self::readers::READERS;

/// No reader takes a hundredth of it on a machine that does nothing else.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn what_was_found_is_read_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus");
    let mut num_read = 0;
    for reader in &READERS {
        let Ok(files) = std::fs::read_dir(corpus.join(reader.name)) else { continue };
        let place = reader.place().expect("what stands beside can be written");
        for file in files {
            let path = file.expect("the corpus can be read").path();
            let input = std::fs::read(&path).expect("the corpus can be read");
            let begun = Instant::now();
            // The message of a panic does not name the file.
            println!("{}", path.display());
            let _ = reader.read(&place, &input);
            assert!(begun.elapsed() < LONG, "`{}` took {:?}", path.display(), begun.elapsed());
            num_read += 1;
        }
    }
    assert!(num_read > 0, "the corpus is not empty");
    for dir in std::fs::read_dir(corpus).expect("the corpus can be read") {
        let name = dir.expect("the corpus can be read").file_name();
        assert!(READERS.iter().any(|reader| name == reader.name), "{name:?} is no reader's");
    }
}

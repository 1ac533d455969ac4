//! Files that once made a reader panic, overflow or run for long, and similar ones. Each must now be
//! read or refused quickly. They are in `corpus/READER/`; `crates/xtask/benches/fuzz/` found them
//! and has the readers.

#[path = "../crates/xtask/benches/fuzz/readers.rs"]
mod readers;

use std::path::Path;
use std::time::{Duration, Instant};

use draftsmith_recipe::kinds::{KindEntry, Kinds};

use self::readers::READERS;

/// The time limit per file. On an idle machine, every reader needs less than a hundredth of it.
const MAX_TIME: Duration = Duration::from_secs(60);

#[test]
fn hostile_files_are_read_or_refused_quickly() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus");
    let mut num_read = 0;
    for reader in &READERS {
        let Ok(files) = std::fs::read_dir(corpus.join(reader.name)) else { continue };
        let place = reader.place().expect("files that the reader needs can be written");
        for file in files {
            let path = file.expect("the corpus can be read").path();
            let input = std::fs::read(&path).expect("the corpus can be read");
            let begun = Instant::now();
            // A panic message does not name the file.
            println!("{}", path.display());
            let _ = reader.read(&place, &input);
            assert!(begun.elapsed() < MAX_TIME, "`{}` took {:?}", path.display(), begun.elapsed());
            num_read += 1;
        }
    }
    assert!(num_read > 0, "the corpus is not empty");
    for dir in std::fs::read_dir(corpus).expect("the corpus can be read") {
        let name = dir.expect("the corpus can be read").file_name();
        assert!(READERS.iter().any(|reader| name == reader.name), "no reader is named {name:?}");
    }
}

#[test]
fn the_files_of_every_kind_that_is_trained_have_a_reader() {
    for kind in Kinds::default().iter().filter(|kind: &&KindEntry| kind.is_trained()) {
        assert!(READERS.iter().any(|reader| reader.name == kind.name), "`{}`", kind.name);
    }
}

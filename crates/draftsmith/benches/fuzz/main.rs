//! Whether any file, however broken or hostile, can do more to a reader than to be refused: valid
//! inputs are mutated, the same for the same seed, and each is read under a bound on time and memory.
//!
//! ```text
//! cargo bench --workspace --bench fuzz -- --reader template --inputs 1000000 --seed 1 --jobs 2
//! ```
//!
//! A reader works in processes of its own, which put down the number of an input before they read
//! it: what ends one, an overflowing stack or an allocation that is too large, is told by that
//! number, and the next process goes on behind it. Each input that fails is kept, in
//! `target/fuzz/READER/`; what was mended goes into `tests/corpus/READER/`, which `tests/corpus.rs`
//! reads in every run of the tests. `--input FILE` reads one file.
//!
//! `readers.rs` is the readers, `seeds.rs` the valid inputs, `mutation.rs` what is done to them;
//! `worker.rs` is the process that reads, `overseer.rs` what starts it.

mod allocator;
mod mutation;
mod overseer;
#[path = "readers.rs"]
mod readers;
mod seeds;
mod worker;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;

use self::overseer::Overseen;
use self::readers::{READERS, Reader};
use self::worker::Work;

/// Mutated inputs for every reader.
#[derive(Debug, Parser)]
struct Arguments {
    /// Which readers; all, one after the other, if absent.
    #[arg(long = "reader", value_name = "NAME", value_parser = reader)]
    readers: Vec<&'static Reader>,
    /// Inputs for each.
    #[arg(long, default_value_t = 10_000)]
    inputs: u64,
    /// Which inputs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Processes at a time.
    #[arg(long, default_value_t = 1)]
    jobs: u64,
    #[command(flatten)]
    limits: Limits,
    /// Reads this one file with `--reader` instead.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// The first input of a worker.
    #[arg(long, hide = true)]
    from: Option<u64>,
    /// Where a worker puts down which input it reads.
    #[arg(long, hide = true)]
    progress: Option<PathBuf>,
    /// What cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What one input may cost.
#[derive(Debug, Clone, Copy, clap::Args)]
struct Limits {
    /// Seconds that one input may take.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Megabytes that may be held while one is read.
    #[arg(long, default_value_t = 256)]
    megabytes: usize,
}

fn reader(name: &str) -> Result<&'static Reader, String> {
    let names = || READERS.iter().map(|reader| reader.name).collect::<Vec<_>>().join(", ");
    let found = READERS.iter().find(|reader| reader.name == name);
    found.ok_or_else(|| format!("expected one of {}", names()))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let readers = match &arguments.readers[..] {
        [] => READERS.iter().collect(),
        given => given.to_vec(),
    };
    if let Some(file) = &arguments.input {
        let [reader] = readers[..] else { bail!("`--input` needs one `--reader`") };
        return read_one(reader, file);
    }
    let work = |reader, from| {
        let (seed, limits) = (arguments.seed, arguments.limits);
        Work { reader, seed, from, end: arguments.inputs, limits }
    };
    if let (Some(from), Some(progress)) = (arguments.from, &arguments.progress) {
        let [reader] = readers[..] else { bail!("a worker has one reader") };
        return worker::run(work(reader, from), progress);
    }
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz");
    let mut num_findings = 0;
    for reader in readers {
        let begun = Instant::now();
        let overseen = overseer::run(&work(reader, 0), arguments.jobs, &out)?;
        num_findings += overseen.findings.len();
        tell(reader, arguments.inputs, &overseen, begun.elapsed().as_secs_f64());
    }
    if num_findings > 0 {
        bail!("{num_findings} kinds of failure; inputs are in `{}`", out.display());
    }
    Ok(())
}

/// Reads one file, and says what became of it.
fn read_one(reader: &Reader, file: &Path) -> Result<()> {
    let input = std::fs::read(file).with_context(|| format!("cannot read `{}`", file.display()))?;
    let place = reader.place()?;
    let begun = Instant::now();
    let (most_held, read) = allocator::peak(|| reader.read(&place, &input));
    match read {
        Ok(()) => println!("read"),
        Err(error) => println!("refused: {error:#}"),
    }
    println!("{:.3} s, {:.1} MB at most", begun.elapsed().as_secs_f64(), most_held as f64 / 1e6);
    Ok(())
}

fn tell(reader: &Reader, num_inputs: u64, overseen: &Overseen, seconds: f64) {
    let Overseen { counts, findings } = overseen;
    println!(
        "{}: {num_inputs} inputs in {seconds:.0} s ({:.0} a second), {:.1} % read; at most {:.2} s and \
         {:.1} MB; {} kinds of failure",
        reader.name,
        num_inputs as f64 / seconds,
        100.0 * counts.num_read as f64 / (counts.num_read + counts.num_refused).max(1) as f64,
        counts.most_seconds,
        counts.most_held as f64 / 1e6,
        findings.len()
    );
    for (kind, finding) in findings {
        println!("  {} times, first at {}: {kind}", finding.num_times, finding.number);
    }
}

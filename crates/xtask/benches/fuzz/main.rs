//! Looks for files that make a reader crash, hang or exhaust memory: mutates valid inputs, the same way for
//! the same seed, and reads each under a bound on time and memory.
//!
//! ```text
//! cargo bench -p xtask --bench fuzz -- --reader template --inputs 1000000 --seed 1 --jobs 2
//! ```
//!
//! Readers run in worker processes, which write down the number of an input before they read it. If a stack
//! overflow or an oversized allocation ends a worker, that number identifies the input, and the next worker
//! continues after it. Failing inputs are kept in `target/fuzz/READER/`. After a fix they go into
//! `tests/corpus/READER/`, which `tests/corpus.rs` reads in every test run. `--input FILE` reads one file.
//!
//! `readers.rs` has the readers, `seeds.rs` the valid inputs and `mutation.rs` the mutations; `worker.rs` is
//! the process that reads, and `overseer.rs` starts it.

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

/// Reads mutated inputs with every reader.
#[derive(Debug, Parser)]
struct Arguments {
    /// Readers to run [default: all, one after the other].
    #[arg(long = "reader", value_name = "NAME", value_parser = reader)]
    readers: Vec<&'static Reader>,
    /// Inputs for each reader.
    #[arg(long, default_value_t = 10_000)]
    inputs: u64,
    /// Seed of the mutations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of worker processes.
    #[arg(long, default_value_t = 1)]
    jobs: u64,
    #[command(flatten)]
    limits: Limits,
    /// Read only this file, with `--reader`.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// The first input of a worker.
    #[arg(long, hide = true)]
    from: Option<u64>,
    /// The file in which a worker writes the number of its input.
    #[arg(long, hide = true)]
    progress: Option<PathBuf>,
    /// An argument that cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The bounds for one input.
#[derive(Debug, Clone, Copy, clap::Args)]
struct Limits {
    /// Seconds for one input.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Megabytes for one input.
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

/// Reads one file and prints the outcome.
fn read_one(reader: &Reader, file: &Path) -> Result<()> {
    let input = std::fs::read(file).with_context(|| format!("cannot read `{}`", file.display()))?;
    let place = reader.place()?;
    let begun = Instant::now();
    let (most_held, read) = allocator::peak(|| reader.read(&place, &input));
    match read {
        Ok(()) => println!("read"),
        Err(error) => println!("refused: {error:#}"),
    }
    println!(
        "{:.3} s, {:.1} MB at the peak",
        begun.elapsed().as_secs_f64(),
        most_held as f64 / 1e6
    );
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

//! The process that reads inputs: prints failures on stdout and ends if an input does not end.

use std::fs::File;
use std::ops::AddAssign;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::readers::Reader;
use crate::seeds::Seeds;
use crate::{Limits, allocator, mutation};

/// A worker's exit code when it cannot continue.
pub(crate) const FAILED: i32 = 1;
/// A worker's exit code when an input takes too long.
pub(crate) const HUNG: i32 = 3;
/// The factor on the time limit after which a worker ends.
const PATIENCE: f64 = 4.0;
/// The factor on the memory limit beyond which allocations fail.
const MEMORY_BOUND: usize = 4;

/// The inputs of a reader.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) reader: &'static Reader,
    pub(crate) seed: u64,
    pub(crate) from: u64,
    pub(crate) end: u64,
    pub(crate) limits: Limits,
}

impl Work {
    /// The input with a number: the unchanged seeds first, then mutations.
    pub(crate) fn input(&self, seeds: &Seeds, number: u64) -> Vec<u8> {
        match seeds.all.get(number as usize) {
            Some(seed) => seed.bytes.clone(),
            None => mutation::input(self.reader.name, self.seed, number, &seeds.all, &seeds.words),
        }
    }
}

/// The outcome of inputs.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) num_read: u64,
    pub(crate) num_refused: u64,
    pub(crate) most_seconds: f64,
    pub(crate) most_held: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.num_read += other.num_read;
        self.num_refused += other.num_refused;
        self.most_seconds = self.most_seconds.max(other.most_seconds);
        self.most_held = self.most_held.max(other.most_held);
    }
}

/// A line on a worker's stdout.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Told {
    /// An input failed: the message, and the message that equal failures share.
    Failed { number: u64, kind: String, how: String },
    /// The outcome of all inputs since the last line of this kind.
    Counted(Counts),
}

/// Reads inputs from `work.from` on. Before each one it writes the number to `progress` and the input beside
/// it. A failing input is kept under its number if the worker can continue.
pub(crate) fn run(work: Work, progress: &Path) -> Result<()> {
    // Readers also run on pools, whose stacks are this small. The main thread's is larger.
    let worker = thread::Builder::new().stack_size(2 << 20);
    let input = progress.with_extension("input");
    let progress = File::create(progress).context("cannot put down progress")?;
    let begun = Instant::now();
    let millis = AtomicU64::new(0);
    thread::scope(|scope| {
        let watch = || {
            let patience = Duration::from_secs_f64(work.limits.seconds * PATIENCE);
            loop {
                thread::sleep(Duration::from_millis(100));
                let since = Duration::from_millis(millis.load(Ordering::Relaxed));
                if begun.elapsed().saturating_sub(since) > patience {
                    std::process::exit(HUNG);
                }
            }
        };
        scope.spawn(watch);
        let read = worker.spawn_scoped(scope, || {
            let done = read_all(work, &progress, &input, || {
                millis.store(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
            });
            // The watching thread does not end by itself.
            if let Err(error) = done {
                eprintln!("{error:#}");
                std::process::exit(FAILED);
            }
            std::process::exit(0)
        });
        read.map(drop).context("cannot start a thread")
    })
}

/// The interval between printed counts.
const TOLD_EVERY: u64 = 1000;

fn read_all(work: Work, progress: &File, kept: &Path, begin: impl Fn()) -> Result<()> {
    static PANIC: Mutex<(String, String)> = Mutex::new((String::new(), String::new()));
    std::panic::set_hook(Box::new(|info| {
        if let (Ok(mut panic), Some(place)) = (PANIC.lock(), info.location()) {
            // The registry's path carries no information.
            let file =
                place.file().rsplit_once("/registry/src/").map_or(place.file(), |(_, at)| at);
            *panic = (format!("panicked at {file}:{}", place.line()), info.to_string());
        }
    }));
    let Limits { seconds, megabytes } = work.limits;
    let (place, seeds) = (work.reader.place()?, crate::seeds::of(work.reader)?);
    allocator::bound(megabytes * MEMORY_BOUND * 1_000_000);
    let mut counts = Counts::default();
    for number in work.from..work.end {
        progress.write_all_at(&number.to_le_bytes(), 0)?;
        begin();
        let input = work.input(&seeds, number);
        std::fs::write(kept, &input)?;
        let begun = Instant::now();
        let (most_held, read) =
            allocator::peak(|| catch_unwind(AssertUnwindSafe(|| work.reader.read(&place, &input))));
        let taken = begun.elapsed().as_secs_f64();
        match &read {
            Ok(Ok(())) => counts.num_read += 1,
            Ok(Err(error)) if number < seeds.num_valid as u64 => {
                bail!("seed {number} is refused: {error:#}")
            }
            Ok(Err(_)) => counts.num_refused += 1,
            Err(_) => {}
        }
        counts.most_seconds = counts.most_seconds.max(taken);
        counts.most_held = counts.most_held.max(most_held);
        let twice = |how: String| Some((how.clone(), how));
        let failed = match read {
            Err(_) => PANIC.lock().map(|panic| panic.clone()).ok(),
            Ok(_) if taken > seconds => twice(format!("it took more than {seconds} s")),
            Ok(_) if most_held > megabytes * 1_000_000 => {
                twice(format!("it held more than {megabytes} MB"))
            }
            Ok(_) => None,
        };
        if let Some((kind, how)) = failed {
            std::fs::rename(kept, kept.with_extension(number.to_string()))?;
            tell(&Told::Failed { number, kind, how })?;
        }
        if (number + 1).is_multiple_of(TOLD_EVERY) || number + 1 == work.end {
            tell(&Told::Counted(std::mem::take(&mut counts)))?;
        }
    }
    Ok(())
}

fn tell(told: &Told) -> Result<()> {
    println!("{}", serde_json::to_string(told)?);
    Ok(())
}

//! Starts workers, continues after inputs that end a worker, and keeps the inputs that failed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::worker::{Counts, FAILED, HUNG, Told, Work};

/// The number of inputs kept for each kind of failure.
const NUM_KEPT: u64 = 3;

/// The outcome of a reader's inputs.
#[derive(Debug, Default)]
pub(crate) struct Overseen {
    pub(crate) counts: Counts,
    /// Failures by their message without numbers.
    pub(crate) findings: BTreeMap<String, Finding>,
}

/// Inputs that failed in the same way.
#[derive(Debug, Default)]
pub(crate) struct Finding {
    pub(crate) number: u64,
    pub(crate) num_times: u64,
}

/// Reads all inputs with `jobs` workers and keeps failing inputs in `out`.
pub(crate) fn run(work: &Work, jobs: u64, out: &Path) -> Result<Overseen> {
    let overseer = Overseer {
        scratch: tempfile::tempdir()?,
        out: out.join(work.reader.name),
        overseen: Mutex::default(),
    };
    let share = work.end.div_ceil(jobs.max(1)).max(1);
    thread::scope(|scope| {
        let jobs = (0..work.end).step_by(share as usize).map(|from| {
            let work = Work { from, end: work.end.min(from + share), ..*work };
            let overseer = &overseer;
            scope.spawn(move || overseer.oversee(work))
        });
        let jobs: Vec<_> = jobs.collect();
        jobs.into_iter().try_for_each(|job| match job.join() {
            Ok(done) => done,
            Err(_) => bail!("an overseer panicked"),
        })
    })?;
    overseer.overseen.into_inner().context("nobody panics while holding it")
}

struct Overseer {
    scratch: TempDir,
    out: PathBuf,
    overseen: Mutex<Overseen>,
}

impl Overseer {
    /// Starts workers until all inputs are read.
    fn oversee(&self, mut work: Work) -> Result<()> {
        let progress = self.scratch.path().join(format!("progress-{}", work.from));
        let stderr = self.scratch.path().join(format!("stderr-{}", work.from));
        while work.from < work.end {
            let mut worker = worker(&work, &progress, self.scratch.path());
            worker.stdout(Stdio::piped()).stderr(std::fs::File::create(&stderr)?);
            let mut worker = worker.spawn().context("cannot start a worker")?;
            let stdout = worker.stdout.take().context("a worker's stdout is piped")?;
            for line in BufReader::new(stdout).lines() {
                let line = line?;
                match serde_json::from_str(&line) {
                    Ok(Told::Failed { number, kind, how }) => self.found(
                        &work,
                        number,
                        kind,
                        &how,
                        &progress.with_extension(number.to_string()),
                    )?,
                    Ok(Told::Counted(counts)) => self.change(|all| all.counts += counts)?,
                    Err(_) => bail!("a reader wrote to stdout: {line}"),
                }
            }
            let status = worker.wait()?;
            if status.success() {
                return Ok(());
            }
            let told = std::fs::read_to_string(&stderr)?;
            let number = std::fs::read(&progress)?;
            let Ok(number) = number.try_into().map(u64::from_le_bytes) else {
                bail!("a worker failed before its first input: {told}")
            };
            if status.code() == Some(FAILED) {
                bail!("{}: {told}", work.reader.name);
            }
            let how = ending(status, &told);
            self.found(
                &work,
                number,
                without_numbers(&how),
                &how,
                &progress.with_extension("input"),
            )?;
            work.from = number + 1;
        }
        Ok(())
    }

    fn found(&self, work: &Work, number: u64, kind: String, how: &str, input: &Path) -> Result<()> {
        let mut num_times = 0;
        self.change(|all| {
            let finding = all.findings.entry(kind).or_default();
            if finding.num_times == 0 {
                finding.number = number;
            }
            finding.num_times += 1;
            num_times = finding.num_times;
        })?;
        if num_times <= NUM_KEPT {
            std::fs::create_dir_all(&self.out)?;
            let path = self.out.join(format!("{}-{number}", work.seed));
            std::fs::copy(input, &path)?;
            eprintln!("{}: {how}: `{}`", work.reader.name, path.display());
        }
        Ok(())
    }

    fn change(&self, change: impl FnOnce(&mut Overseen)) -> Result<()> {
        match self.overseen.lock() {
            Ok(mut overseen) => change(&mut overseen),
            Err(_) => bail!("an overseer panicked"),
        }
        Ok(())
    }
}

fn worker(work: &Work, progress: &Path, scratch: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_default());
    let number = |number: u64| number.to_string();
    command.args(["--reader", work.reader.name, "--seed", &number(work.seed)]);
    command.args(["--from", &number(work.from), "--inputs", &number(work.end)]);
    command.args(["--seconds", &work.limits.seconds.to_string()]);
    command.args(["--megabytes", &work.limits.megabytes.to_string()]);
    command.arg("--progress").arg(progress);
    command.env("TMPDIR", scratch);
    // Backtraces of errors would take most of the time.
    command.env("RUST_BACKTRACE", "0");
    command
}

/// A worker's exit status in words.
fn ending(status: ExitStatus, stderr: &str) -> String {
    if status.code() == Some(HUNG) {
        return "it does not end".to_owned();
    }
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no more is known");
    match status.signal() {
        Some(signal) => format!("ended by signal {signal}: {last}"),
        None => format!("ended with {status}: {last}"),
    }
}

/// A message with `#` for each number, so that equal failures have equal messages.
fn without_numbers(message: &str) -> String {
    let mut plain = String::new();
    for character in message.chars().take(300) {
        if !character.is_ascii_digit() {
            plain.push(character);
        } else if !plain.ends_with('#') {
            plain.push('#');
        }
    }
    plain
}

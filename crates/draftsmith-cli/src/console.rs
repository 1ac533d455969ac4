//! Output and interruption: data goes to stdout, notes and progress to stderr. A signal or deadline
//! stops a job between two units of work.

mod dashboard;
mod epochs;
mod progress;
mod signals;
pub(crate) mod streams;

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use draftsmith_recipe::{Bar, Watch};
use draftsmith_report::wrapped;
use draftsmith_train::renderer::Interrupter;
use draftsmith_tune::training::{ShownTraining, TrainingWatch};
use serde::Serialize;

use self::dashboard::Screen;
use self::epochs::EpochProgress;
use self::progress::TerminalBar;
use self::signals::INTERRUPT;
use self::streams::{eprint_line, put};

/// The output of a job, and whether the job must stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Console {
    /// Whether to write only errors to stderr.
    pub(crate) quiet: bool,
    /// Whether stdout must contain a single JSON document.
    pub(crate) json: bool,
    /// Whether to write to stdout. `run` turns this off for its stages and writes one result itself.
    output: bool,
    /// Whether the reader of stdout has exited.
    reader_gone: Arc<AtomicBool>,
    /// The number of the first signal that asked jobs to stop; 0 if there was none.
    signal: Arc<AtomicU8>,
    screen: Screen,
    /// The time at which jobs must stop; `None` for no deadline.
    pub(crate) deadline: Option<Instant>,
    /// The number of optimizer steps left under `--steps`, over all trainings of a command; `None`
    /// for no limit.
    steps_left: Arc<Mutex<Option<usize>>>,
}

impl Console {
    /// Listens for signals. The first signal asks jobs to stop. Another Ctrl-C ends the process.
    /// Another SIGTERM or SIGHUP does not, because `timeout` and closing terminals send them twice.
    pub(crate) fn new(quiet: bool, json: bool) -> Result<Self> {
        let console = Self { quiet, json, output: true, ..Self::default() };
        let Self { signal, screen, .. } = console.clone();
        signals::listen(move |number| {
            let first = signal.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
            if first.is_err() && number == INTERRUPT {
                screen.give_back();
                std::process::exit(exit_code(number).into());
            }
            // The dashboard would overwrite the note.
            if first.is_ok() && !screen.is_taken() {
                eprint_line("stopping after the current step; press Ctrl-C again to stop at once");
            }
        })
        .context("cannot listen for signals")?;
        Ok(console)
    }

    /// Creates a console that writes nothing and is never interrupted.
    pub(crate) fn silent() -> Self {
        Self { quiet: true, ..Self::default() }
    }

    /// Returns a copy of the console that does not write to stdout.
    pub(crate) fn without_output(&self) -> Self {
        Self { output: false, ..self.clone() }
    }

    /// Writes a line to stderr, unless `quiet` is set.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        self.line(text.as_ref());
    }

    /// Returns the exit code of a stopped job: the signal's, or that of Ctrl-C after a deadline.
    pub(crate) fn stopped_code(&self) -> u8 {
        match self.signal.load(Ordering::SeqCst) {
            0 => exit_code(INTERRUPT),
            number => exit_code(number),
        }
    }

    /// Returns whether the reader of stdout has exited. Jobs that only produce output may then
    /// stop.
    pub(crate) fn is_reader_gone(&self) -> bool {
        self.reader_gone.load(Ordering::SeqCst)
    }

    /// Writes text to stdout, unless `--json` was given.
    pub(crate) fn text(&self, text: impl AsRef<str>) -> Result<()> {
        if self.json || !self.output { Ok(()) } else { self.put(text.as_ref()) }
    }

    /// Writes a paragraph to stdout, wrapped to the terminal's width, unless `--json` was given.
    pub(crate) fn paragraph(&self, text: &str) -> Result<()> {
        self.text(wrapped(text, self.width()).join("\n") + "\n")
    }

    /// Writes the JSON document to stdout if `--json` was given.
    pub(crate) fn document(&self, value: &impl Serialize) -> Result<()> {
        if !self.json || !self.output {
            return Ok(());
        }
        self.put(&(serde_json::to_string_pretty(value)? + "\n"))
    }

    fn put(&self, text: &str) -> Result<()> {
        if !self.is_reader_gone() && !put(text)? {
            self.reader_gone.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Returns the terminal's width in columns. `None` if stdout is not a terminal.
    pub(crate) fn width(&self) -> Option<usize> {
        ::console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns))
    }

    /// Returns whether stdout is a terminal that accepts colours.
    pub(crate) fn colour(&self) -> bool {
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
    }
}

impl TrainingWatch for Console {
    fn steps_left(&self) -> Option<usize> {
        *self.steps_left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limit_steps(&self, num_steps: Option<usize>) {
        *self.steps_left.lock().unwrap_or_else(PoisonError::into_inner) = num_steps;
    }

    /// Shows a training's progress on the dashboard, or as lines of text.
    fn shows(
        &self,
        command: &'static str,
        shown: &'static [&'static str],
        train: ShownTraining<'_>,
    ) -> Result<()> {
        if !dashboard::is_wanted(self) {
            let lines = EpochProgress::new(self, command, shown);
            return train(Box::new(lines), &|| self.is_interrupted());
        }
        let interrupter = Interrupter::new();
        let should_stop = || self.is_interrupted() || interrupter.should_stop();
        dashboard::watched(self, &interrupter, |listener| train(listener, &should_stop))
    }
}

impl Watch for Console {
    fn line(&self, text: &str) {
        if !self.quiet {
            eprint_line(text);
        }
    }

    /// Returns whether a signal has arrived or the deadline has passed.
    fn is_interrupted(&self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    fn bar(&self, name: &'static str, unit: &'static str, total: u64) -> Box<dyn Bar> {
        Box::new(TerminalBar::new(self, name, unit, total))
    }

    fn share(&self) -> Box<dyn Watch> {
        Box::new(self.clone())
    }
}

/// Returns the exit code that shells report for a process that a signal ended.
fn exit_code(signal: u8) -> u8 {
    128 + signal
}

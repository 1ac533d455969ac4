//! Where words go: data to stdout, notes and progress to stderr; and the signal or the deadline
//! that stops a job between two units of work.

pub(crate) mod dashboard;
pub(crate) mod progress;
mod screen;
mod signals;
pub(crate) mod streams;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use self::screen::Screen;
use self::signals::INTERRUPT;
use self::streams::{Reader, put, tell};

/// A job was stopped by a signal, or has done as much as it was asked to. What is left of its work is
/// told by the command.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
pub(crate) struct Interrupted;

/// How a job talks, and whether it was asked to stop.
#[derive(Debug, Clone)]
pub(crate) struct Console {
    quiet: bool,
    json: bool,
    /// Whether data goes to stdout at all: a stage of `run` leaves that to `run`.
    output: bool,
    /// Whether stdout's reader has gone.
    reader_gone: Arc<AtomicBool>,
    /// The number of the first signal that asked to stop; 0 before there was one.
    signal: Arc<AtomicU8>,
    screen: Screen,
    deadline: Option<Instant>,
}

impl Console {
    /// Listens for signals: the first asks jobs to stop, and a Ctrl-C after it ends the process.
    /// Others are sent twice without meaning it, by `timeout` or by a terminal that is closed.
    pub(crate) fn new(quiet: bool, json: bool) -> Result<Self> {
        let console = Self::unheard(quiet, json);
        let Self { signal, screen, .. } = console.clone();
        signals::listen(move |number| {
            let first = signal.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
            if first.is_err() && number == INTERRUPT {
                screen.give_back();
                std::process::exit(exit_code(number).into());
            }
            // The dashboard would draw over it.
            if first.is_ok() && !screen.is_taken() {
                tell("stopping after the work in hand; Ctrl-C again to stop at once");
            }
        })
        .context("cannot listen for signals")?;
        Ok(console)
    }

    /// A console that writes nothing and is never interrupted.
    pub(crate) fn silent() -> Self {
        Self { output: false, ..Self::unheard(true, false) }
    }

    /// A console that no signal reaches.
    fn unheard(quiet: bool, json: bool) -> Self {
        Self {
            quiet,
            json,
            output: true,
            reader_gone: Arc::default(),
            signal: Arc::default(),
            screen: Screen::default(),
            deadline: None,
        }
    }

    /// The same console without stdout.
    pub(crate) fn without_output(&self) -> Self {
        Self { output: false, ..self.clone() }
    }

    /// The same console, on which jobs are asked to stop after a time. One too long for the clock
    /// is none.
    pub(crate) fn stopping_after(self, time: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(time), ..self }
    }

    /// Whether stdout is to be one JSON document.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Whether the dashboard has the terminal.
    pub(crate) fn screen(&self) -> &Screen {
        &self.screen
    }

    /// Whether only errors go to stderr.
    pub(crate) fn quiet(&self) -> bool {
        self.quiet
    }

    /// Whether a signal asked to stop, or the deadline is past.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The exit code of a job that was stopped: that of the signal, or Ctrl-C's where it was none.
    pub(crate) fn stopped_code(&self) -> u8 {
        match self.signal.load(Ordering::SeqCst) {
            0 => exit_code(INTERRUPT),
            number => exit_code(number),
        }
    }

    /// Whether the reader of stdout has gone: more of what is written for its own sake is for nobody.
    /// Other work goes on.
    pub(crate) fn is_reader_gone(&self) -> bool {
        self.reader_gone.load(Ordering::SeqCst)
    }

    /// A line on stderr, unless quiet.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            tell(text.as_ref());
        }
    }

    /// Text on stdout, unless stdout is to be JSON.
    pub(crate) fn text(&self, text: impl AsRef<str>) -> Result<()> {
        if self.json || !self.output { Ok(()) } else { self.put(text.as_ref()) }
    }

    /// The JSON document on stdout, if asked for.
    pub(crate) fn document(&self, value: &impl Serialize) -> Result<()> {
        if !self.json || !self.output {
            return Ok(());
        }
        self.put(&(serde_json::to_string_pretty(value)? + "\n"))
    }

    fn put(&self, text: &str) -> Result<()> {
        if !self.is_reader_gone() && put(text)? == Reader::Gone {
            self.reader_gone.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// The columns of the terminal that stdout is, if it is one.
    pub(crate) fn width(&self) -> Option<usize> {
        ::console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns))
    }

    /// Whether stdout is a terminal that colours may be sent to.
    pub(crate) fn colour(&self) -> bool {
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
    }
}

/// The exit code that shells give to a process that a signal ended.
fn exit_code(signal: u8) -> u8 {
    128 + signal
}

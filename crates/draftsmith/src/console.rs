//! Where words go: data to stdout, notes and progress to stderr; and the Ctrl-C or the deadline
//! that stops a job between two units of work.

pub(crate) mod dashboard;
pub(crate) mod progress;
mod screen;

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use self::screen::Screen;

/// A job was stopped by Ctrl-C, or has done as much as it was asked to; what is done is kept.
#[derive(Debug, thiserror::Error)]
#[error("stopped; what is done is kept: run the same command again to resume")]
pub(crate) struct Interrupted;

/// How a job talks, and whether it was asked to stop.
#[derive(Debug, Clone)]
pub(crate) struct Console {
    quiet: bool,
    json: bool,
    /// Whether data goes to stdout at all: a stage of `run` leaves that to `run`.
    output: bool,
    interrupted: Arc<AtomicBool>,
    screen: Screen,
    deadline: Option<Instant>,
}

impl Console {
    /// Installs the Ctrl-C handler: the first asks jobs to stop, the second ends the process.
    pub(crate) fn new(quiet: bool, json: bool) -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&interrupted);
        let screen = Screen::default();
        let shown = screen.clone();
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::SeqCst) {
                shown.give_back();
                std::process::exit(130);
            }
            // The dashboard would not draw over it.
            if !shown.is_taken() {
                eprintln!("stopping after the work in hand; Ctrl-C again to stop at once");
            }
        })
        .context("cannot listen for Ctrl-C")?;
        Ok(Self { quiet, json, output: true, interrupted, screen, deadline: None })
    }

    /// A console that writes nothing and is never interrupted.
    pub(crate) fn silent() -> Self {
        let interrupted = Arc::new(AtomicBool::new(false));
        let screen = Screen::default();
        Self { quiet: true, json: false, output: false, interrupted, screen, deadline: None }
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

    /// Whether Ctrl-C was pressed, or the deadline is past.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// A line on stderr, unless quiet.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            eprintln!("{}", text.as_ref());
        }
    }

    /// Text on stdout, unless stdout is to be JSON.
    pub(crate) fn text(&self, text: impl AsRef<str>) -> Result<()> {
        if self.json || !self.output {
            return Ok(());
        }
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_ref().as_bytes())?;
        stdout.flush()?;
        Ok(())
    }

    /// The JSON document on stdout, if asked for.
    pub(crate) fn document(&self, value: &impl Serialize) -> Result<()> {
        if !self.json || !self.output {
            return Ok(());
        }
        let mut stdout = std::io::stdout().lock();
        serde_json::to_writer_pretty(&mut stdout, value)?;
        stdout.write_all(b"\n")?;
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

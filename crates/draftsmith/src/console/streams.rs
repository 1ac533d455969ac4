//! Stdout and stderr, which others may close or fill.
//!
//! Notes and progress are for whoever looks on: where stderr is closed or its disk is full they are
//! lost, and the work goes on. Data is what stdout is for: a full disk is an error. A reader who went
//! away, as in `draftsmith … | head`, has had enough, and nobody is told.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

use anyhow::{Context, Result};

/// Whether someone reads stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    Listening,
    Gone,
}

/// A line on stderr.
pub(crate) fn tell(line: impl Display) {
    // Formatted first: a write of several parts could be cut by another thread's.
    let line = format!("{line}\n");
    let _ = stderr().lock().write_all(line.as_bytes());
}

/// Text on stdout, at once.
///
/// # Errors
/// If it cannot be written, but for a reader who has gone.
pub(crate) fn put(text: &str) -> Result<Reader> {
    let mut stdout = stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    reader_of(written)
}

/// Has what goes to a terminal that was closed go nowhere. Libraries print too: ratatui does so while
/// it unwinds, and a panic there, because it cannot, would end the process before its work is saved.
pub(crate) fn leave_closed_terminals() {
    #[cfg(unix)]
    {
        use nix::errno::Errno;
        use nix::sys::termios::tcgetattr;
        use nix::unistd::{dup2_stderr, dup2_stdout};

        let Ok(nowhere) = std::fs::File::options().write(true).open("/dev/null") else { return };
        if matches!(tcgetattr(stdout()), Err(Errno::EIO)) {
            let _ = dup2_stdout(&nowhere);
        }
        if matches!(tcgetattr(stderr()), Err(Errno::EIO)) {
            let _ = dup2_stderr(&nowhere);
        }
    }
}

/// What came of writing to stdout.
///
/// # Errors
/// What went wrong, but for a reader who has gone.
pub(crate) fn reader_of(written: std::io::Result<()>) -> Result<Reader> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Reader::Gone),
        written => written.map(|()| Reader::Listening).context("cannot write to stdout"),
    }
}

//! Writing to stdout and stderr, which may be closed or full.
//!
//! Notes and progress are optional: if stderr is closed or its disk is full, they are lost and the job
//! continues. Data on stdout is not: a full disk is an error. When the reader of stdout exits early, as
//! in `draftsmith … | head`, we stop writing and report nothing.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

use anyhow::{Context, Result};

/// Whether anything still reads stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    Listening,
    Gone,
}

/// Writes a line to stderr.
pub(crate) fn eprint_line(line: impl Display) {
    // One write, so that lines of several threads do not interleave.
    let line = format!("{line}\n");
    let _ = stderr().lock().write_all(line.as_bytes());
}

/// Writes text to stdout and flushes it.
///
/// # Errors
/// If it cannot be written, except because the reader has exited.
pub(crate) fn put(text: &str) -> Result<Reader> {
    let mut stdout = stdout().lock();
    reader_after(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Sends output meant for a closed terminal to `/dev/null`. ratatui prints while it unwinds, and would
/// panic again if it could not, which would end the process before its work is saved.
pub(crate) fn leave_closed_terminals() {
    #[cfg(unix)]
    {
        use nix::errno::Errno;
        use nix::sys::termios::tcgetattr;
        use nix::unistd::{dup2_stderr, dup2_stdout};

        let Ok(null) = std::fs::File::options().write(true).open("/dev/null") else { return };
        if matches!(tcgetattr(stdout()), Err(Errno::EIO)) {
            let _ = dup2_stdout(&null);
        }
        if matches!(tcgetattr(stderr()), Err(Errno::EIO)) {
            let _ = dup2_stderr(&null);
        }
    }
}

/// Whether the reader is still there after a write to stdout.
///
/// # Errors
/// The write's error, unless it is a broken pipe.
pub(crate) fn reader_after(written: std::io::Result<()>) -> Result<Reader> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Reader::Gone),
        written => written.map(|()| Reader::Listening).context("cannot write to stdout"),
    }
}

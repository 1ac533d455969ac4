//! Writes to stdout and stderr, which may be closed or full. No other file writes to them.
//!
//! Notes and progress are optional: if stderr is closed or its disk is full, they are lost and the
//! job continues. Data on stdout is required, so a full disk is an error. If the reader of stdout
//! exits early, as in `draftsmith … | head`, we stop writing without an error.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

use anyhow::{Context, Result};

/// Writes a line to stderr.
pub(crate) fn eprint_line(line: impl Display) {
    // A single write keeps the lines of several threads separate.
    let line = format!("{line}\n");
    let _ = stderr().lock().write_all(line.as_bytes());
}

/// Writes text to stdout and flushes it. Returns whether stdout still has a reader.
///
/// # Errors
/// If the write fails for another reason than an exited reader.
pub(crate) fn put(text: &str) -> Result<bool> {
    let mut stdout = stdout().lock();
    is_read_after(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Redirects output for a closed terminal to `/dev/null`. ratatui prints while a panic unwinds. If
/// that failed, a second panic would end the process before its work is saved.
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

/// Returns whether stdout still has a reader after a write.
///
/// # Errors
/// If the write failed, except with a broken pipe.
pub(crate) fn is_read_after(written: std::io::Result<()>) -> Result<bool> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true).context("cannot write to stdout"),
    }
}

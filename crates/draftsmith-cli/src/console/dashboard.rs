//! burn-train's dashboard: when to show it, and how to restore the terminal afterwards.
//!
//! The dashboard draws on stdout and reads keys on a separate thread. The key `q` offers to stop
//! the training, as Ctrl-C does elsewhere, or to kill it, which the listener turns into a stop. In raw
//! mode Ctrl-C is a key that burn-train ignores, so we turn it into an interrupt again.

use std::io::{IsTerminal, stdin, stdout};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use crossterm::cursor::Show;
use crossterm::event::DisableMouseCapture;
use crossterm::execute;
use crossterm::terminal::{LeaveAlternateScreen, disable_raw_mode};
use draftsmith_train::renderer::{Dashboard, Interrupter, Listener, RenderingListener};

use crate::console::Console;

/// The time between two checks whether a closing dashboard has finished.
const TICK: Duration = Duration::from_millis(5);

/// A flag for whether the dashboard currently owns the terminal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Screen(Arc<AtomicBool>);

impl Screen {
    pub(crate) fn is_taken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Restores the terminal if the dashboard owns it. Called just before the process exits.
    pub(crate) fn give_back(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // The process exits now, so a failure has no consequence.
            let _ = disable_raw_mode();
            let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
        }
    }
}

/// Returns whether to show the dashboard. It needs stdin and stdout to be a terminal in the
/// foreground, without `--json` or `--quiet`.
pub(crate) fn is_wanted(console: &Console) -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let wanted = !console.quiet && !console.json && !dumb;
    wanted && stdin().is_terminal() && stdout().is_terminal() && keys::are_ours()
}

/// Runs `train` with the dashboard as its listener. Restores the terminal in every case.
///
/// # Errors
/// Any error of `train`.
pub(crate) fn watched<T>(
    console: &Console,
    interrupter: &Interrupter,
    train: impl FnOnce(Box<dyn Listener + '_>) -> Result<T>,
) -> Result<T> {
    let Screen(is_taken) = &console.screen;
    is_taken.store(true, Ordering::SeqCst);
    let mut dashboard = Dashboard::new(interrupter.clone(), None);
    keys::restore_interrupt();
    let trained = train(Box::new(RenderingListener::new(&mut dashboard, interrupter.clone())));
    end(dashboard);
    is_taken.store(false, Ordering::SeqCst);
    // A dashboard that panicked restores everything except the cursor.
    let _ = execute!(stdout(), Show);
    trained
}

/// Drops the dashboard of a finished training. If the terminal was closed, we do not wait for the
/// dashboard, because crossterm would read the closed terminal forever.
fn end(dashboard: Dashboard) {
    let ending = thread::spawn(move || drop(dashboard));
    while !ending.is_finished() {
        if keys::are_gone() {
            return;
        }
        thread::sleep(TICK);
    }
    if let Err(panic) = ending.join() {
        resume_unwind(panic);
    }
}

#[cfg(unix)]
mod keys {
    use std::io::stdin;
    use std::thread::sleep;
    use std::time::Duration;

    use nix::libc::_POSIX_VDISABLE;
    use nix::sys::termios::{LocalFlags, SetArg, SpecialCharacterIndices, tcgetattr, tcsetattr};
    use nix::unistd::{getpgrp, tcgetpgrp};

    /// The maximum number of waits for the dashboard to enter raw mode, and the time of each.
    const WAITS: (u32, Duration) = (200, Duration::from_millis(5));

    /// Returns whether the process runs in the foreground. A background job that reads keys is
    /// suspended.
    pub(super) fn are_ours() -> bool {
        tcgetpgrp(stdin()) == Ok(getpgrp())
    }

    /// Returns whether the terminal of stdin was closed, so that no key can arrive.
    pub(super) fn are_gone() -> bool {
        tcgetattr(stdin()).is_err()
    }

    /// Waits for raw mode, then makes Ctrl-C interrupt again. Ctrl-Z and Ctrl-\ remain plain keys,
    /// because suspending would leave the terminal in raw mode.
    pub(super) fn restore_interrupt() {
        for _ in 0..WAITS.0 {
            match tcgetattr(stdin()) {
                Ok(mut mode) if !mode.local_flags.contains(LocalFlags::ICANON) => {
                    mode.local_flags.insert(LocalFlags::ISIG);
                    for key in [SpecialCharacterIndices::VSUSP, SpecialCharacterIndices::VQUIT] {
                        mode.control_chars[key as usize] = _POSIX_VDISABLE;
                    }
                    // If this fails, the key `q` still stops the training.
                    let _ = tcsetattr(stdin(), SetArg::TCSANOW, &mode);
                    return;
                }
                _ => sleep(WAITS.1),
            }
        }
    }
}

#[cfg(not(unix))]
mod keys {
    pub(super) fn are_ours() -> bool {
        true
    }

    pub(super) fn are_gone() -> bool {
        false
    }

    /// Does nothing on this system: Ctrl-C remains a key, and `q` stops the training.
    pub(super) fn restore_interrupt() {}
}

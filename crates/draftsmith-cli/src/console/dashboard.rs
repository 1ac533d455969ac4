//! burn-train's dashboard: when it is shown, and how the terminal is restored after it.
//!
//! The dashboard draws on stdout and reads keys on a separate thread. `q` asks whether to stop, which
//! does what Ctrl-C does elsewhere, or to kill, which makes burn-train panic and ends here as a second
//! Ctrl-C does. Raw mode would turn Ctrl-C into a key that burn-train ignores, so we make it interrupt
//! again.

use std::io::{IsTerminal, stdin, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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
use draftsmith_recipe::watch::Interrupted;

/// burn-train's panic message when the user kills the training.
const KILLED: &str = "Killing training from user input.";

/// How often to check whether a closing dashboard has finished.
const TICK: Duration = Duration::from_millis(5);

/// Whether the dashboard currently owns the terminal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Screen(Arc<AtomicBool>);

impl Screen {
    pub(crate) fn is_taken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Restores the terminal if the dashboard owns it. Called just before the process exits.
    pub(crate) fn give_back(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // The process exits now, so there is nobody to report a failure to.
            let _ = disable_raw_mode();
            let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
        }
    }
}

/// Returns whether to show the dashboard: stdin and stdout are a terminal in the foreground, and the user asked for
/// neither JSON nor quiet.
pub(crate) fn is_wanted(console: &Console) -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let wanted = !console.quiet && !console.json && !dumb;
    wanted && stdin().is_terminal() && stdout().is_terminal() && keys::are_ours()
}

/// Runs `train` with the dashboard as its listener, and restores the terminal however it ends.
///
/// # Errors
/// What `train` returns; [`Interrupted`] if the user killed it.
pub(crate) fn watched<T>(
    console: &Console,
    interrupter: &Interrupter,
    train: impl FnOnce(Box<dyn Listener + '_>) -> Result<T>,
) -> Result<T> {
    let Screen(is_taken) = &console.screen;
    is_taken.store(true, Ordering::SeqCst);
    let mut dashboard = Dashboard::new(interrupter.clone(), None);
    keys::restore_interrupt();
    // Nothing uses the training's state after a panic.
    let outcome = catch_unwind(AssertUnwindSafe(move || {
        let trained = train(Box::new(RenderingListener::new(&mut dashboard)));
        end(dashboard);
        trained
    }));
    is_taken.store(false, Ordering::SeqCst);
    let panic = match outcome {
        Ok(done) => return done,
        Err(panic) => panic,
    };
    // burn-train's panic hook restores everything but the cursor.
    let _ = execute!(stdout(), Show);
    match panic.downcast_ref::<&str>() {
        Some(&KILLED) => Err(Interrupted.into()),
        _ => resume_unwind(panic),
    }
}

/// Drops the dashboard of a finished training. We don't wait for it once the terminal is closed, because
/// crossterm reads a closed terminal forever.
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

    /// How many times, and for how long each time, we wait for the dashboard to enter raw mode.
    const WAITS: (u32, Duration) = (200, Duration::from_millis(5));

    /// Returns whether we run in the foreground. A background job that reads keys is suspended.
    pub(super) fn are_ours() -> bool {
        tcgetpgrp(stdin()) == Ok(getpgrp())
    }

    /// Returns whether the terminal of stdin was closed, so that no key can arrive.
    pub(super) fn are_gone() -> bool {
        tcgetattr(stdin()).is_err()
    }

    /// Waits for raw mode, then lets Ctrl-C interrupt in it. Ctrl-Z and Ctrl-\ stay keys, because they
    /// would leave the terminal in raw mode.
    pub(super) fn restore_interrupt() {
        for _ in 0..WAITS.0 {
            match tcgetattr(stdin()) {
                Ok(mut mode) if !mode.local_flags.contains(LocalFlags::ICANON) => {
                    mode.local_flags.insert(LocalFlags::ISIG);
                    for key in [SpecialCharacterIndices::VSUSP, SpecialCharacterIndices::VQUIT] {
                        mode.control_chars[key as usize] = _POSIX_VDISABLE;
                    }
                    // If this fails, `q` still stops the training.
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

    /// Does nothing: Ctrl-C stays a key on this system, and `q` stops the training.
    pub(super) fn restore_interrupt() {}
}

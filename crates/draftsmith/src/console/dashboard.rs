//! burn-train's dashboard: when it is shown, and how the terminal comes back from it.
//!
//! It draws on stdout and reads keys on a thread of its own. `q` asks: to stop is what Ctrl-C is
//! elsewhere, to kill is a panic in burn-train, which ends here as the second Ctrl-C does. Raw mode
//! would make Ctrl-C a key that burn-train does not know, so it is given back its meaning.

mod keys;

use std::io::{IsTerminal, stdin, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use crossterm::cursor::Show;
use crossterm::execute;
use draftsmith_train::Interrupter;
use draftsmith_train::renderer::{Dashboard, EndRenderer, MetricsRenderer};

use crate::console::{Console, Interrupted};

/// What burn-train panics with when it is told to kill the training.
const KILLED: &str = "Killing training from user input.";

/// How often an ending dashboard is asked whether it has ended.
const TICK: Duration = Duration::from_millis(5);

/// Whether a training is to be watched there: someone is at the terminal that stdout is, and wants
/// text.
pub(crate) fn is_wanted(console: &Console) -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let wanted = !console.quiet() && !console.json() && !dumb;
    wanted && stdin().is_terminal() && stdout().is_terminal() && keys::are_ours()
}

/// Runs `train` with the dashboard as its renderer. However it ends, the terminal is as it was.
///
/// # Errors
/// What `train` returns; [`Interrupted`] if the user killed it.
pub(crate) fn watched<T>(
    console: &Console,
    interrupter: &Interrupter,
    train: impl FnOnce(Box<dyn MetricsRenderer>, EndRenderer) -> Result<T>,
) -> Result<T> {
    let screen = console.screen();
    screen.take();
    let dashboard = Box::new(Dashboard::new(interrupter.clone(), None));
    keys::restore_interrupt();
    // A training that panicked is not looked at again.
    let outcome = catch_unwind(AssertUnwindSafe(|| train(dashboard, end)));
    screen.leave();
    let panic = match outcome {
        Ok(done) => return done,
        Err(panic) => panic,
    };
    // burn-train's panic hook has left its screen, but for what it does to the cursor.
    let _ = execute!(stdout(), Show);
    match panic.downcast_ref::<&str>() {
        Some(&KILLED) => Err(Interrupted.into()),
        _ => resume_unwind(panic),
    }
}

/// Drops the renderer of a training that is through. One whose terminal was closed is not waited
/// for: crossterm reads a closed terminal for ever.
fn end(renderer: Box<dyn MetricsRenderer>) {
    let ending = thread::spawn(move || drop(renderer));
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

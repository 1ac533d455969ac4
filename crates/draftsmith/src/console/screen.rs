//! Who has the terminal: text, or burn-train's dashboard.

use std::io::stdout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::cursor::Show;
use crossterm::event::DisableMouseCapture;
use crossterm::execute;
use crossterm::terminal::{LeaveAlternateScreen, disable_raw_mode};

/// Whether the dashboard has the terminal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Screen(Arc<AtomicBool>);

impl Screen {
    /// Whether it does.
    pub(crate) fn is_taken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Notes that the dashboard takes the terminal.
    pub(crate) fn take(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Notes that the dashboard has left the terminal by itself.
    pub(crate) fn leave(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Gives the terminal back, if it is taken, where the process is about to end.
    pub(crate) fn give_back(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // There is nowhere left to tell of a failure.
            let _ = disable_raw_mode();
            let _ = execute!(stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
        }
    }
}

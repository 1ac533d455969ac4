//! What both trainers' commands share: the built data, progress on the console, Ctrl-C.

mod show;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, bail};
use draftsmith_data::{Provenance, ResponseRow, read_dir};
use draftsmith_train::Interrupter;

pub(super) use self::show::EpochProgress;
use crate::console::Console;
use crate::recipe::Recipe;

/// The rows that build-data left, and where they came from.
pub(super) fn built_rows(recipe: &Recipe) -> Result<(Vec<ResponseRow>, Provenance)> {
    let data_dir = recipe.data_dir();
    if !data_dir.is_dir() {
        bail!(
            "there is no data in `{}`; hint: run `draftsmith build-data` with this recipe first",
            data_dir.display()
        );
    }
    Ok(read_dir(&data_dir)?)
}

/// Passes Ctrl-C on to the trainer, as long as it lives.
pub(super) struct Watch {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(console: &Console, interrupter: &Interrupter) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let (flag, console, interrupter) = (done.clone(), console.clone(), interrupter.clone());
        let thread = thread::spawn(move || {
            while !flag.load(Ordering::SeqCst) {
                if console.is_interrupted() {
                    interrupter.stop(Some("stopped by Ctrl-C"));
                    break;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        Self { done, thread: Some(thread) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // The thread only reads flags: it cannot have panicked.
            let _ = thread.join();
        }
    }
}

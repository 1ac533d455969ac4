//! Test helpers: a listener that stops a training, and the files that a training leaves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::log::renderer::{Half, Interrupter, Listener};
use crate::run::Ending;

/// The files of an export: the weights, and `config.json` with every epoch's scores and losses.
pub(crate) type Export = [Vec<u8>; 2];

/// The files of an export that `write` writes.
pub(crate) fn exported(write: impl FnOnce(&Path)) -> Export {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    ["model.safetensors", "config.json"].map(|name| std::fs::read(dir.path().join(name)).unwrap())
}

/// The result of a training that was not stopped.
#[track_caller]
pub(crate) fn finished<T>(ending: Ending<T>) -> T {
    match ending {
        Ending::Finished(trained) => trained,
        Ending::Stopped { num_steps, .. } => panic!("stopped after step {num_steps}"),
    }
}

/// The single result of a training that was not stopped.
#[track_caller]
pub(crate) fn only<T>(ending: Ending<Vec<T>>) -> T {
    let mut all = finished(ending);
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// Checks that a message contains every part.
#[track_caller]
pub(crate) fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Every file under a directory, relative to it.
pub(crate) fn files_under(dir: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                files.insert(path.strip_prefix(dir).unwrap().to_path_buf());
            }
        }
    }
    files
}

/// Stops the run after a number of batches, and counts batches and validation scores.
pub(crate) struct Watcher {
    pub(crate) interrupter: Interrupter,
    pub(crate) stop_after: usize,
    pub(crate) num_updates: Arc<AtomicUsize>,
    pub(crate) num_final_scores: Arc<AtomicUsize>,
}

impl Listener for Watcher {
    fn processed(&mut self, _num_rows: usize) {
        if self.num_updates.fetch_add(1, Ordering::SeqCst) + 1 == self.stop_after {
            self.interrupter.stop(Some("enough"));
        }
    }

    fn number(&mut self, half: Half, name: &'static str, number: f64) {
        if half == Half::Validation && name != "Loss" && number.is_finite() {
            self.num_final_scores.fetch_add(1, Ordering::SeqCst);
        }
    }
}

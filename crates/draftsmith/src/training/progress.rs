//! Training progress on the console: a bar an epoch, and a line with its losses at its end.

use std::collections::BTreeMap;

use draftsmith_train::renderer::{Extent, Half, Listener};

use crate::console::Console;
use crate::console::progress::Progress;

/// Shows it on stderr.
pub(crate) struct EpochProgress {
    console: Console,
    /// The command, which bars and lines begin with.
    command: &'static str,
    /// The validation scores in an epoch's line.
    shown: &'static [&'static str],
    num_epochs: usize,
    epoch: usize,
    bar: Option<Progress>,
    /// The scores of the epoch.
    scores: BTreeMap<String, f64>,
    processed: usize,
}

impl EpochProgress {
    pub(crate) fn new(
        console: &Console,
        command: &'static str,
        shown: &'static [&'static str],
        num_epochs: usize,
    ) -> Self {
        Self {
            console: console.clone(),
            command,
            shown,
            num_epochs,
            epoch: 1,
            bar: None,
            scores: BTreeMap::new(),
            processed: 0,
        }
    }
}

impl Listener for EpochProgress {
    fn start(&mut self, epoch: usize) {
        self.epoch = epoch.max(1);
    }

    fn start_half(&mut self, half: Half, num_rows: usize) {
        let name = if half == Half::Training { self.command } else { "validate" };
        self.bar = Some(Progress::new(&self.console, name, "rows", num_rows as u64));
        self.processed = 0;
    }

    fn processed(&mut self, num_rows: usize) {
        if let Some(bar) = &self.bar {
            bar.advance(num_rows.saturating_sub(self.processed) as u64);
        }
        self.processed = num_rows;
    }

    fn number(&mut self, half: Half, name: &str, number: f64, _extent: Extent) {
        if half == Half::Validation {
            self.scores.insert(name.to_owned(), number);
        } else if name == "Loss"
            && let Some(bar) = &self.bar
        {
            bar.message(format!("epoch {}, loss {number:.4}", self.epoch));
        }
    }

    fn end_half(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.clear();
        }
    }

    fn end_epoch(&mut self, epoch: usize) {
        let score = |name: &&str| self.scores.get(*name).map(|value| format!("{name} {value:.4}"));
        let scores: Vec<String> = self.shown.iter().filter_map(score).collect();
        self.console.note(format!(
            "{}: epoch {epoch}/{}, training loss {}; validation {}",
            self.command,
            self.num_epochs,
            self.scores.get("training loss").map_or_else(|| "-".to_owned(), |l| format!("{l:.4}")),
            scores.join(", "),
        ));
        self.scores.clear();
        self.epoch = epoch + 1;
    }
}

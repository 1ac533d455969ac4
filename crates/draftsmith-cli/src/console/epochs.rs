//! Shows a training's progress on the console, as a bar and a line of losses after each epoch.

use std::collections::BTreeMap;

use draftsmith_train::renderer::{Half, Listener, RunStart};

use crate::console::Console;
use draftsmith_recipe::{Bar, Watch};

/// A training listener that shows progress on stderr. Bars are cleared when dropped.
#[derive(Default)]
pub(super) struct EpochProgress {
    console: Console,
    /// The command's name in bars and lines.
    command: &'static str,
    /// The names of the validation scores to show after each epoch.
    shown: &'static [&'static str],
    num_epochs: usize,
    epoch: usize,
    /// The progress bar over all epochs.
    bar: Option<Box<dyn Bar>>,
    validating: Option<Box<dyn Bar>>,
    /// The current epoch's scores by name.
    scores: BTreeMap<&'static str, f64>,
    /// The number of training rows per epoch.
    num_rows: usize,
    /// The number of rows done in the current phase, which is training or validation.
    processed: usize,
    /// Whether this run has yet to train its first batch.
    is_new: bool,
}

impl EpochProgress {
    pub(super) fn new(
        console: &Console,
        command: &'static str,
        shown: &'static [&'static str],
    ) -> Self {
        Self { console: console.clone(), command, shown, is_new: true, ..Self::default() }
    }
}

impl Listener for EpochProgress {
    fn start(&mut self, start: &RunStart) {
        (self.epoch, self.num_epochs) = (start.epoch, start.num_epochs);
    }

    fn start_half(&mut self, half: Half, num_rows: usize) {
        self.processed = 0;
        let progress = |name, total| self.console.bar(name, "rows", total);
        if half == Half::Validation {
            self.validating = Some(progress("validate", num_rows as u64));
        } else {
            self.num_rows = num_rows;
            let total = (num_rows * self.num_epochs) as u64;
            self.bar.get_or_insert_with(|| progress(self.command, total));
        }
    }

    fn processed(&mut self, num_rows: usize) {
        let new = num_rows.saturating_sub(self.processed) as f64;
        self.processed = num_rows;
        if let Some(validating) = &self.validating {
            validating.advance(new);
        } else if let Some(bar) = &self.bar {
            if std::mem::take(&mut self.is_new) {
                // Earlier runs and the slow first batch do not count towards the speed.
                bar.skip_to((self.num_rows * (self.epoch - 1) + num_rows) as u64);
            } else {
                bar.advance(new);
            }
        }
    }

    fn number(&mut self, half: Half, name: &'static str, number: f64) {
        if half == Half::Validation {
            self.scores.insert(name, number);
        } else if name == "Loss"
            && let Some(bar) = &self.bar
        {
            bar.message(&format!("epoch {}/{}, loss {number:.4}", self.epoch, self.num_epochs));
        }
    }

    fn end_half(&mut self) {
        self.validating = None;
    }

    fn end_epoch(&mut self, epoch: usize) {
        let score = |name: &&str| self.scores.get(name).map(|value| format!("{name} {value:.4}"));
        let scores: Vec<String> = self.shown.iter().filter_map(score).collect();
        // Scores with an accepted length are of drafters that are trained on all steps of a round, while the
        // validation's cross-entropy is that of the first step.
        let summed = match self.shown.contains(&"accepted length") {
            true => " (a sum over the steps of a round)",
            false => "",
        };
        let line = format!(
            "{}: epoch {epoch}/{}, training loss {}{summed}; validation {}",
            self.command,
            self.num_epochs,
            self.scores.get("training loss").map_or_else(|| "-".to_owned(), |l| format!("{l:.4}")),
            scores.join(", "),
        );
        match &self.bar {
            Some(bar) => bar.print(&line),
            None => self.console.note(line),
        }
        self.scores.clear();
        self.epoch = epoch + 1;
    }
}

//! What a long job shows its user, and how the user stops it.
//!
//! Libraries print nothing: a command implements [`Watch`] with its console.

use std::fmt::Debug;

/// A job was stopped by its user or its time limit.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
pub struct Interrupted;

/// Shows what a job does, and says when to stop. By default it shows nothing and never stops one.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Watch: Debug + Send + Sync {
    /// Shows a line.
    fn line(&self, text: &str) {}

    /// Returns whether to stop before the next unit of work.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Shows the progress of a stage of `total` units.
    fn bar(&self, name: &'static str, unit: &'static str, total: u64) -> Box<dyn Bar> {
        Box::new(Silent)
    }

    /// Shows that an input is being read or hashed.
    fn reads(&self, what: &str) {}

    /// Returns another handle to the same user.
    fn share(&self) -> Box<dyn Watch>;

    /// Checks that the job may continue.
    ///
    /// # Errors
    /// If the job is to stop.
    fn check_interrupted(&self) -> Result<(), Interrupted> {
        if self.is_interrupted() { Err(Interrupted) } else { Ok(()) }
    }
}

impl dyn Watch + '_ {
    /// Shows a line.
    pub fn note(&self, text: impl AsRef<str>) {
        self.line(text.as_ref());
    }
}

/// The progress of a stage as its user sees it. It disappears when dropped. By default nothing is shown.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Bar: Debug + Send + Sync {
    /// Counts some more units, perhaps parts of one.
    fn advance(&self, units: f64) {}

    /// Continues from another position, whose units say nothing about the pace.
    fn skip_to(&self, position: u64) {}

    /// Returns the number of whole units done.
    fn position(&self) -> u64 {
        0
    }

    /// Changes the number of units.
    fn set_total(&self, total: u64) {}

    /// Shows a short text at the end of the bar.
    fn message(&self, text: String) {}

    /// Shows a line above the bar.
    fn print(&self, line: &str) {}

    /// Shows what was done and how long it took.
    fn finish(&self) {}
}

/// A user who sees nothing and never stops a job.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Default for Box<dyn Watch> {
    fn default() -> Self {
        Box::new(Silent)
    }
}

impl Watch for Silent {
    fn share(&self) -> Box<dyn Watch> {
        Box::new(*self)
    }
}

impl Bar for Silent {}

/// The progress of a stage.
#[derive(Debug)]
pub struct Progress(Box<dyn Bar>);

impl Progress {
    /// Begins a stage of `total` units and shows its progress.
    pub fn new(watch: &dyn Watch, name: &'static str, unit: &'static str, total: u64) -> Self {
        Self(watch.bar(name, unit, total))
    }

    /// Shows a short text at the end of the bar.
    pub fn message(&self, text: impl Into<String>) {
        self.0.message(text.into());
    }

    /// Shows a line above the bar.
    pub fn print(&self, line: &str) {
        self.0.print(line);
    }

    /// Counts some more units.
    pub fn advance(&self, units: u64) {
        self.0.advance(units as f64);
    }

    /// Counts a part of a unit, so that units processed in parallel show their pace before the first is done.
    pub fn advance_part(&self, units: f64) {
        self.0.advance(units);
    }

    /// Moves to a position, perhaps backwards.
    pub fn move_to(&self, position: u64) {
        match position.checked_sub(self.0.position()) {
            Some(units) => self.advance(units),
            None => self.skip_to(position),
        }
    }

    /// Continues from another position, whose units say nothing about the pace.
    pub fn skip_to(&self, position: u64) {
        self.0.skip_to(position);
    }

    /// Changes the number of units.
    pub fn set_total(&self, total: u64) {
        self.0.set_total(total);
    }

    /// Begins pieces of work that are done side by side, each worth some units.
    pub fn side_by_side(&self, worth: Vec<f64>) -> SideBySide<'_> {
        SideBySide { progress: self, done: vec![0.0; worth.len()], worth }
    }

    /// Removes the bar.
    pub fn clear(self) {}

    /// Shows what was done and how long it took.
    pub fn finish(self) {
        self.0.finish();
    }
}

/// Pieces of work done side by side.
#[derive(Debug)]
pub struct SideBySide<'a> {
    progress: &'a Progress,
    /// The units of each piece.
    worth: Vec<f64>,
    /// The share done of each.
    done: Vec<f64>,
}

impl SideBySide<'_> {
    /// Advances a piece to this share of its work, unless it is already further.
    pub fn reach(&mut self, nth: usize, share: f64) {
        let more = share.min(1.0) - self.done[nth];
        if more > 0.0 {
            self.done[nth] += more;
            self.progress.0.advance(more * self.worth[nth]);
        }
    }

    /// Advances all pieces to their end.
    pub fn finish(mut self) {
        (0..self.worth.len()).for_each(|nth| self.reach(nth, 1.0));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Adds up what it is advanced by.
    #[derive(Debug, Default)]
    struct Sum(Arc<Mutex<f64>>);

    impl Bar for Sum {
        fn advance(&self, units: f64) {
            *self.0.lock().expect("nobody panics") += units;
        }

        fn skip_to(&self, position: u64) {
            *self.0.lock().expect("nobody panics") = position as f64;
        }

        fn position(&self) -> u64 {
            *self.0.lock().expect("nobody panics") as u64
        }
    }

    #[test]
    fn parallel_pieces_advance_by_their_shares() {
        let sum = Arc::new(Mutex::new(0.0));
        let progress = Progress(Box::new(Sum(Arc::clone(&sum))));
        let position = || *sum.lock().expect("nobody panics");
        let mut pieces = progress.side_by_side(vec![1.0, 1.0, 0.5]);
        pieces.reach(0, 0.25);
        pieces.reach(1, 0.5);
        assert_eq!(position(), 0.75);
        pieces.reach(0, 0.75);
        // A share below the last one is ignored, and one above 1 is clamped.
        pieces.reach(0, 0.5);
        pieces.reach(2, 3.0);
        assert_eq!(position(), 1.75);
        pieces.finish();
        assert_eq!(position(), 2.5);
        progress.move_to(4);
        assert_eq!(position(), 4.5);
        progress.move_to(1);
        assert_eq!(position(), 1.0);
    }
}

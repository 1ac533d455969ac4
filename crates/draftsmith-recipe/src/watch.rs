//! The interface through which a long job shows progress and learns that the user stops it.
//!
//! Libraries print nothing. A command implements [`Watch`] with its console.

use std::fmt::Debug;
use std::ops::ControlFlow;

/// The error of a job that its user or time limit stopped.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
pub struct Interrupted;

/// An observer that shows what a job does and can stop it. The default does neither.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Watch: Debug + Send + Sync {
    /// Shows a line.
    fn line(&self, text: &str) {}

    /// Returns whether to stop before the next unit of work.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Shows a progress bar for a stage of `total` units.
    fn bar(&self, name: &'static str, unit: &'static str, total: u64) -> Box<dyn Bar> {
        Box::new(Silent)
    }

    /// Shows that an input is being read or hashed.
    fn reads(&self, what: &str) {}

    /// Returns another handle to the same observer.
    fn share(&self) -> Box<dyn Watch>;

    /// Checks that the job may continue.
    ///
    /// # Errors
    /// If the job must stop.
    fn check_interrupted(&self) -> Result<(), Interrupted> {
        if self.is_interrupted() { Err(Interrupted) } else { Ok(()) }
    }
}

impl dyn Watch + '_ {
    /// Tells a decoder whether to go on.
    pub fn goes_on(&self) -> ControlFlow<()> {
        if self.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Shows a line of text.
    pub fn note(&self, text: impl AsRef<str>) {
        self.line(text.as_ref());
    }
}

/// The progress bar of a stage. It disappears when dropped. By default, nothing is shown.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Bar: Debug + Send + Sync {
    /// Advances by some units, which may be fractional.
    fn advance(&self, units: f64) {}

    /// Jumps to another position. The skipped units do not count towards the speed.
    fn skip_to(&self, position: u64) {}

    /// Returns the number of whole units done.
    fn position(&self) -> u64 {
        0
    }

    /// Changes the total number of units.
    fn set_total(&self, total: u64) {}

    /// Shows a short text at the end of the bar.
    fn message(&self, text: &str) {}

    /// Shows a line above the bar.
    fn print(&self, line: &str) {}

    /// Shows what was done and how long it took, and removes the bar.
    fn finish(&self) {}
}

/// An observer that shows nothing and never stops a job.
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

impl dyn Bar + '_ {
    /// Moves to a position, which may be an earlier one.
    pub fn move_to(&self, position: u64) {
        match position.checked_sub(self.position()) {
            Some(units) => self.advance(units as f64),
            None => self.skip_to(position),
        }
    }

    /// Advances by some units that an earlier run has done.
    pub fn skip(&self, units: u64) {
        self.skip_to(self.position() + units);
    }

    /// Starts tasks that run in parallel, each of which counts as `worth` units.
    pub fn side_by_side(&self, worth: Vec<f64>) -> SideBySide<'_> {
        SideBySide { progress: self, done: vec![0.0; worth.len()], worth }
    }
}

/// Tasks that run in parallel and share a progress bar.
#[derive(Debug)]
pub struct SideBySide<'a> {
    progress: &'a dyn Bar,
    /// The number of units of each task.
    worth: Vec<f64>,
    /// The completed share of each task, from 0 to 1.
    done: Vec<f64>,
}

impl SideBySide<'_> {
    /// Advances the task with index `nth` to this share of its work. A smaller share has no effect.
    pub fn reach(&mut self, nth: usize, share: f64) {
        let more = share.min(1.0) - self.done[nth];
        if more > 0.0 {
            self.done[nth] += more;
            self.progress.advance(more * self.worth[nth]);
        }
    }

    /// Advances all tasks to their end.
    pub fn finish(mut self) {
        (0..self.worth.len()).for_each(|nth| self.reach(nth, 1.0));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A bar that adds up its units.
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
        let progress: Box<dyn Bar> = Box::new(Sum(Arc::clone(&sum)));
        let position = || *sum.lock().expect("nobody panics");
        let mut pieces = progress.side_by_side(vec![1.0, 1.0, 0.5]);
        pieces.reach(0, 0.25);
        pieces.reach(1, 0.5);
        assert_eq!(position(), 0.75);
        pieces.reach(0, 0.75);
        // A share below the last one has no effect, and one above 1 counts as 1.
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

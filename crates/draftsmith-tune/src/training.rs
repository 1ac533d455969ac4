//! Trains the heads and drafters of a recipe: finds what exists, trains what is missing, and writes the exports.
//!
//! Nothing here knows a kind of drafter: each says by its
//! [`KindTraining`](draftsmith_recipe::kinds::KindTraining) how it is trained.

mod drafters;
mod export_job;
mod head_trainer;
mod heads;
mod outcomes;
mod sweep;

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_recipe::device::{DtypeSource, require_dtype};
use draftsmith_recipe::watch::{Silent, Watch};
use draftsmith_recipe::workspace::Models;
use draftsmith_train::renderer::Listener;
use draftsmith_train::{OptimizerSettings, Section};

pub use self::drafters::train_drafters;
pub use self::heads::train_head;
pub use self::outcomes::{DrafterOutcome, HeadOutcome};

/// Runs a training that is shown by a listener, and asks the function whether to stop.
pub type ShownTraining<'t> =
    &'t mut dyn FnMut(Box<dyn Listener + '_>, &dyn Fn() -> bool) -> Result<()>;

/// Shows trainings, and limits their steps. By default nothing is shown and nothing limited.
pub trait TrainingWatch: Watch {
    /// Returns the optimizer steps that the command's trainings may still take; `None` for no limit.
    fn steps_left(&self) -> Option<usize> {
        None
    }

    /// Sets the number of optimizer steps that the command's trainings may still take.
    fn limit_steps(&self, _num_steps: Option<usize>) {}

    /// Calls `train` once with what shows it. `command` names the stage, and `shown` the validation scores to show.
    ///
    /// # Errors
    /// What `train` returns.
    fn shows(
        &self,
        _command: &'static str,
        _shown: &'static [&'static str],
        train: ShownTraining<'_>,
    ) -> Result<()> {
        train(Box::new(()), &|| self.is_interrupted())
    }
}

impl TrainingWatch for Silent {}

/// Checks that the devices of a training suit its settings, and notes idle ones.
///
/// # Errors
/// If a device cannot compute in the dtype.
fn check_devices(
    (watch, command): (&dyn Watch, &str),
    section: Section,
    Models { devices, .. }: &Models,
    dtype: WeightDtype,
    optimizer: &OptimizerSettings,
) -> Result<()> {
    let source = DtypeSource::Key(section);
    devices.iter().try_for_each(|device| require_dtype(device, source, dtype))?;
    if let Some(note) = idle_devices(section, devices.len(), optimizer.gradient_accumulation) {
        watch.note(format!("{command}: {note}"));
    }
    Ok(())
}

/// Describes the devices that get no batch in a training step. `None` if all get one.
fn idle_devices(section: Section, num_devices: usize, num_batches: usize) -> Option<String> {
    let num_idle = num_devices.checked_sub(num_batches).filter(|num_idle| *num_idle > 0)?;
    Some(format!(
        "{num_idle} of {num_devices} devices stay idle, because a step has too few batches; hint: set \
         `{section}.optimizer.gradient_accumulation` (now {num_batches}) to a multiple of {num_devices}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_devices_are_noted() {
        for (num_devices, num_batches) in [(1, 1), (1, 8), (2, 2), (4, 9)] {
            assert_eq!(idle_devices("head", num_devices, num_batches), None);
        }
        let note = idle_devices("adapter", 4, 3).expect("one is idle");
        assert!(note.starts_with("1 of 4 devices stay idle"), "{note}");
        assert!(
            note.ends_with("`adapter.optimizer.gradient_accumulation` (now 3) to a multiple of 4"),
            "{note}"
        );
    }
}

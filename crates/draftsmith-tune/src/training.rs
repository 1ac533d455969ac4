//! Training of a recipe's heads and drafters. Existing exports are kept, and missing ones are
//! trained and written.
//!
//! Nothing here depends on a kind of drafter. Each kind defines its training by
//! [`KindTraining`](draftsmith_recipe::kinds::KindTraining).

mod drafters;
mod export_job;
mod head_trainer;
mod heads;
mod outcomes;
mod sweep;

use anyhow::Result;
use draftsmith_data::DataSet;
use draftsmith_model::WeightDtype;
use draftsmith_recipe::{DtypeSource, Recipe, Silent, Watch, Workspace, require_dtype};
use draftsmith_train::renderer::Listener;
use draftsmith_train::{OptimizerSettings, Section};

pub use self::drafters::train_drafters;
pub use self::heads::train_head;
pub use self::outcomes::{DrafterOutcome, HeadOutcome};

/// A training to run. Its arguments are the listener that shows the training, and a function that
/// returns whether to stop.
pub type ShownTraining<'t> =
    &'t mut dyn FnMut(Box<dyn Listener + '_>, &dyn Fn() -> bool) -> Result<()>;

/// A caller's interface to trainings: it shows progress and limits optimizer steps. The default
/// methods do neither.
pub trait TrainingWatch: Watch {
    /// Returns the optimizer steps that the command's trainings may still take; `None` for no limit.
    fn steps_left(&self) -> Option<usize> {
        None
    }

    /// Sets the number of optimizer steps that the command's trainings may still take.
    fn limit_steps(&self, _num_steps: Option<usize>) {}

    /// Calls `train` once with a listener that shows it. `command` is the command's name, and
    /// `shown` names the validation scores to show.
    ///
    /// # Errors
    /// The error that `train` returns.
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

/// The inputs that all trainings of a command share.
#[derive(Clone, Copy)]
struct TrainingStage<'a> {
    recipe: &'a Recipe,
    workspace: &'a Workspace,
    data: &'a DataSet,
    watch: &'a dyn TrainingWatch,
    /// The command's name in messages.
    command: &'static str,
}

impl TrainingStage<'_> {
    /// Shows the user a line that begins with the command's name.
    fn note(&self, text: &str) {
        self.watch.line(&format!("{}: {text}", self.command));
    }

    /// Tells the user about devices that get no batch.
    fn note_idle_devices(&self, section: Section, optimizer: &OptimizerSettings) {
        let num_devices = self.workspace.models.devices.len();
        let idle = idle_devices(section, num_devices, optimizer.gradient_accumulation);
        idle.iter().for_each(|note| self.note(note));
    }
}

/// Checks that all devices support the dtype of a training.
///
/// # Errors
/// If a device cannot compute in the dtype.
fn check_dtype(workspace: &Workspace, section: Section, dtype: WeightDtype) -> Result<()> {
    let (source, mut devices) = (DtypeSource::Key(section), workspace.models.devices.iter());
    devices.try_for_each(|device| require_dtype(device, source, dtype))
}

/// Describes the devices that get no batch in a training step; `None` if all get one.
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

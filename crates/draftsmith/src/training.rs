//! Training heads and adapters: what the commands `train-head` and `train-adapter` share.

mod drafter;
pub(crate) mod export_job;
pub(crate) mod head_outcome;
pub(crate) mod heads;
mod progress;
pub(crate) mod resumable;
pub(crate) mod sweep;

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_train::{OptimizerSettings, Section};

use crate::console::Console;
use crate::device::{DtypeSource, require_dtype};
use crate::devices::note_idle_devices;

/// Checks that devices are for the settings of a section, and tells of those that would be idle.
///
/// # Errors
/// If one cannot compute in the type.
pub(crate) fn check_devices(
    console: &Console,
    command: &str,
    section: Section,
    devices: &[Device],
    dtype: WeightDtype,
    optimizer: &OptimizerSettings,
) -> Result<()> {
    let source = DtypeSource::Key(section);
    devices.iter().try_for_each(|device| require_dtype(device, source, dtype))?;
    note_idle_devices(console, command, section, devices, optimizer.gradient_accumulation);
    Ok(())
}

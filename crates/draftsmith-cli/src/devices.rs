//! Opens the devices of a command, and checks those of a training.

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_recipe::workspace::Models;
use draftsmith_train::{OptimizerSettings, Section};

use crate::console::Console;
use draftsmith_recipe::device::{DeviceChoice, DtypeSource, kernel_cache, require_dtype};

/// Parses the devices of a training as the command line names them: one device, or several of one kind that
/// split the batches: CUDA GPUs, or the CPU more than once.
///
/// # Errors
/// If a name is not a device's, a GPU is repeated, or kinds differ.
pub(crate) fn parse_devices(text: &str) -> Result<Vec<DeviceChoice>, String> {
    let mut choices: Vec<DeviceChoice> = Vec::new();
    for name in text.split(',') {
        let choice = name.parse()?;
        if choice != DeviceChoice::Cpu && choices.contains(&choice) {
            return Err(format!("`{name}` is named twice"));
        }
        choices.push(choice);
    }
    let kind = |choice: &DeviceChoice| std::mem::discriminant(choice);
    if choices.iter().any(|choice| kind(choice) != kind(&choices[0])) {
        return Err("several devices must be of one kind, as in `cuda:0,cuda:1`".to_owned());
    }
    Ok(choices)
}

/// Opens a device, and notes that a GPU's first run compiles kernels.
///
/// # Errors
/// As [`DeviceChoice::open`].
pub(crate) fn open(choice: DeviceChoice, console: &Console) -> Result<Device> {
    let device = choice.open()?;
    if !DeviceChoice::is_cpu(&device) {
        let name = DeviceChoice::name(&device);
        let kept = kernel_cache(&device).map(|path| format!(" and kept in `{}`", path.display()));
        console.note(format!(
            "kernels for `{name}` are compiled when first needed{}",
            kept.unwrap_or_default()
        ));
    }
    Ok(device)
}

/// Checks that the devices of a training suit the settings of its section, and notes idle ones.
///
/// # Errors
/// If a device cannot compute in the dtype.
pub(crate) fn check_devices(
    console: &Console,
    command: &str,
    section: Section,
    Models { devices, .. }: &Models,
    dtype: WeightDtype,
    optimizer: &OptimizerSettings,
) -> Result<()> {
    let source = DtypeSource::Key(section);
    devices.iter().try_for_each(|device| require_dtype(device, source, dtype))?;
    if let Some(note) = idle_devices(section, devices.len(), optimizer.gradient_accumulation) {
        console.note(format!("{command}: {note}"));
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
    use draftsmith_recipe::device::DeviceChoice::{Cpu, Cuda, Wgpu};
    use draftsmith_recipe::device::name_of_gpu;

    #[test]
    fn several_devices_are_distinct_gpus_or_the_cpu() {
        let devices = parse_devices;
        assert_eq!(devices("cpu"), Ok(vec![Cpu]));
        assert_eq!(devices("wgpu"), Ok(vec![Wgpu]));
        assert_eq!(devices("cpu,cpu"), Ok(vec![Cpu, Cpu]));
        assert_eq!(devices("cuda,cuda:1"), Ok(vec![Cuda(0), Cuda(1)]));
        assert_eq!(devices("cuda:3,cuda:0,cuda:1"), Ok(vec![Cuda(3), Cuda(0), Cuda(1)]));
        for (text, said) in [
            ("cuda,cuda:1,cuda:0", "`cuda:0` is named twice"),
            ("cpu,cuda:0", "several devices must be of one kind, as in `cuda:0,cuda:1`"),
            ("wgpu,wgpu", "`wgpu` is named twice"),
            ("cuda:0,wgpu", "several devices must be of one kind"),
            ("cuda:0,", "expected `cpu`, `cuda`, `cuda:N` or `wgpu`"),
            ("", "expected `cpu`"),
            ("cuda:0,cuda:x", "`x` is not a GPU's number"),
        ] {
            let message = devices(text).unwrap_err();
            assert!(message.contains(said), "{text}: {message}");
        }
    }

    #[test]
    fn device_names_parse_on_the_command_line() {
        assert_eq!(DeviceChoice::name(&Device::flex()), "cpu");
        for (debug, name) in [
            ("Device<Cube(Cuda(Cuda(1)))>", "cuda:1"),
            ("Device<Cuda(0)>", "cuda:0"),
            ("Device<Cube(Wgpu(WgpuDevice { kind: DefaultDevice, backend: Auto }))>", "wgpu"),
        ] {
            assert_eq!(name_of_gpu(debug), name);
            name.parse::<DeviceChoice>().expect("the command line takes it");
        }
    }

    #[test]
    fn idle_devices_are_noted() {
        for (num_devices, num_batches) in [(1, 1), (1, 8), (2, 2), (4, 9)] {
            assert_eq!(idle_devices(Section::Head, num_devices, num_batches), None);
        }
        let note = idle_devices(Section::Adapter, 4, 3).unwrap();
        assert!(note.starts_with("1 of 4 devices stay idle"), "{note}");
        assert!(
            note.ends_with("`adapter.optimizer.gradient_accumulation` (now 3) to a multiple of 4"),
            "{note}"
        );
    }
}

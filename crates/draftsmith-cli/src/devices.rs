//! Opens the devices of a command, and checks the list of devices for a training.

use anyhow::Result;
use burn::tensor::Device;

use crate::console::Console;
use draftsmith_recipe::DeviceChoice;
use draftsmith_recipe::device::kernel_cache;

/// Parses the devices of a training from the command line: one device, or several of one kind that
/// split the batches. Only CUDA GPUs, or the CPU several times, can be combined.
///
/// # Errors
/// If a name is invalid, a GPU is repeated, or the devices are of different kinds.
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

/// Opens a device. For a GPU, shows a note that the first run compiles kernels.
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
}

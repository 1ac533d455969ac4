//! Devices: opens them, checks their dtypes and counts their kernels.
//!
//! Only this file has a `cfg` for a backend. It also caches kernel tuning results in the user's cache
//! directory. Decoding on the CPU runs inside rayon's pool (`on_pool`), because a call from outside wakes the
//! second thread too late.

use std::str::FromStr;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_train::{OptimizerSettings, Section};

use crate::console::Console;

/// A device as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The CPU, through burn's flex backend.
    Cpu,
    /// The CUDA GPU with this index.
    Cuda(usize),
    /// The default GPU of Vulkan, Metal or DirectX.
    Wgpu,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "wgpu" => Ok(Self::Wgpu),
            Some(("cuda", index)) => index
                .parse()
                .map(Self::Cuda)
                .map_err(|_| format!("`{index}` is not a GPU's number, as in `cuda:1`")),
            _ => Err("expected `cpu`, `cuda`, `cuda:N` or `wgpu`".to_owned()),
        }
    }
}

impl DeviceChoice {
    /// Opens the device and checks that it works. Notes that a GPU's first run compiles kernels.
    ///
    /// # Errors
    /// If this build lacks the backend, or this machine lacks the device.
    pub(crate) fn open(self, console: &Console) -> Result<Device> {
        let device = match self {
            Self::Cpu => return Ok(Device::flex()),
            Self::Cuda(index) => cuda(index)?,
            Self::Wgpu => wgpu()?,
        };
        console.note(format!(
            "compiling kernels for `{}` when first needed; the first run takes longer",
            Self::name(&device)
        ));
        Ok(device)
    }

    /// The device's name on the command line.
    pub(crate) fn name(device: &Device) -> String {
        if Self::is_cpu(device) { "cpu".to_owned() } else { name_of_gpu(&format!("{device:?}")) }
    }

    /// Whether this is the CPU, where several sequences decode fastest with one thread each.
    pub(crate) fn is_cpu(device: &Device) -> bool {
        *device == Device::flex()
    }
}

/// The devices of a training as the command line names them: one device, or several CUDA GPUs that split
/// the batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceChoices(Vec<DeviceChoice>);

impl FromStr for DeviceChoices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut choices: Vec<DeviceChoice> = Vec::new();
        for name in text.split(',') {
            let choice = name.parse()?;
            if choices.contains(&choice) {
                return Err(format!("`{name}` is named twice"));
            }
            choices.push(choice);
        }
        let are_gpus = choices.iter().all(|choice| matches!(choice, DeviceChoice::Cuda(_)));
        if choices.len() > 1 && !are_gpus {
            return Err("several devices must be CUDA GPUs, as in `cuda:0,cuda:1`".to_owned());
        }
        Ok(Self(choices))
    }
}

impl DeviceChoices {
    /// Opens every device.
    ///
    /// # Errors
    /// As [`DeviceChoice::open`].
    pub(crate) fn open(&self, console: &Console) -> Result<Vec<Device>> {
        self.0.iter().map(|choice| choice.open(console)).collect()
    }
}

/// Checks that the devices of a training suit the settings of its section, and notes idle ones.
///
/// # Errors
/// If a device cannot compute in the dtype.
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
    if let Some(note) = idle_devices(section, devices.len(), optimizer.gradient_accumulation) {
        console.note(format!("{command}: {note}"));
    }
    Ok(())
}

/// The note about devices that get no batch in a training step.
fn idle_devices(section: Section, num_devices: usize, num_batches: usize) -> Option<String> {
    let num_idle = num_devices.checked_sub(num_batches).filter(|num_idle| *num_idle > 0)?;
    Some(format!(
        "{num_idle} of {num_devices} devices stay idle, because a step has too few batches; hint: set \
         `{section}.optimizer.gradient_accumulation` (now {num_batches}) to a multiple of {num_devices}"
    ))
}

/// A GPU's name on the command line, parsed from its `Debug` text, as burn offers no other access.
fn name_of_gpu(debug: &str) -> String {
    let index = debug.rsplit_once("Cuda(").and_then(|(_, rest)| rest.split_once(')'));
    match index {
        Some((index, _)) => format!("cuda:{index}"),
        None if debug.contains("Wgpu") => "wgpu".to_owned(),
        None => debug.to_owned(),
    }
}

/// Where the compute dtype was set.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DtypeSource {
    /// The flag `--dtype`.
    Flag,
    /// The key `dtype` in this section of the recipe.
    Key(Section),
}

/// Parses the dtype that models compute in.
///
/// # Errors
/// If it is neither `f32` nor `bf16`.
pub(crate) fn parse_dtype(text: &str) -> Result<WeightDtype, String> {
    let all = [WeightDtype::F32, WeightDtype::Bf16];
    let found = all.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| "expected `f32` or `bf16`".to_owned())
}

/// Checks that a device can compute in a dtype at a useful speed. On the CPU bf16 takes some 70 times as
/// long as f32, because there are no bf16 products.
///
/// # Errors
/// If it cannot; the message names the flag or key.
pub(crate) fn require_dtype(
    device: &Device,
    source: DtypeSource,
    dtype: WeightDtype,
) -> Result<()> {
    let (dtype_name, is_cpu) = (dtype.name(), DeviceChoice::is_cpu(device));
    if dtype.is_f32() || (!is_cpu && device.supports_dtype(dtype.float_dtype())) {
        return Ok(());
    }
    let device_name = DeviceChoice::name(device);
    match source {
        DtypeSource::Flag if is_cpu => bail!(
            "`--dtype {dtype_name}`: the CPU keeps weights in the format of their files and computes \
             in f32, which is faster there; hint: leave `--dtype` out, or use `--device cuda`"
        ),
        DtypeSource::Flag => bail!(
            "`--dtype {dtype_name}`: `--device {device_name}` cannot compute in it; \
             hint: leave `--dtype` out, or use a CUDA GPU"
        ),
        DtypeSource::Key(section) => bail!(
            "key `{section}.dtype` is `{dtype_name}`, but `--device {device_name}` {}; \
             hint: leave the key out, or use `--device cuda`",
            if is_cpu {
                "is many times slower with it than with f32"
            } else {
                "cannot compute in it"
            }
        ),
    }
}

/// Counts the distinct kernels that devices launch. Each was compiled or read from a cache.
pub(crate) struct Kernels {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    launched: cubecl::launched::LaunchedKernels,
}

impl Kernels {
    /// Starts counting on all devices, which slows each launch a little.
    pub(crate) fn count() -> Self {
        Self {
            #[cfg(any(feature = "cuda", feature = "wgpu"))]
            launched: cubecl::launched::LaunchedKernels::new(),
        }
    }

    /// The number of distinct kernels launched; 0 on the CPU.
    pub(crate) fn num_distinct(self) -> usize {
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        return self.launched.finish().len();
        #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
        0
    }
}

/// Caches tuning results and compiled kernels in the user's cache directory, unless a `cubecl.toml` names
/// another. CubeCL's environment variables still apply.
#[cfg(feature = "tuned")]
fn keep_kernels() {
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    if let CacheConfig::Target = config.environment.path {
        config.environment.path = CacheConfig::Global;
    }
    // Only the first device opened sets the configuration; later calls have no effect.
    let _ = CubeClRuntimeConfig::try_set(config);
}

/// Runs `work` on a thread of the pool. From there a forward hands rows to a second thread much faster
/// than from outside the pool.
pub(crate) fn on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| work())
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device> {
    probe("cuda", move || Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_index: usize) -> Result<Device> {
    bail!(
        "`--device cuda`: this build has no CUDA; \
         hint: build with `cargo build --release --features cuda`, or use `--device cpu`"
    )
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Device> {
    probe("wgpu", || Device::wgpu(burn::tensor::DeviceKind::DefaultDevice))
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Device> {
    bail!(
        "`--device wgpu`: this build has no wgpu; \
         hint: build with `cargo build --release --features wgpu`, or use `--device cpu`"
    )
}

/// Multiplies two small matrices on a device. Without a driver or card, backends panic at first use; we
/// turn that into an error before any other work is done.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn probe(name: &str, open: impl FnOnce() -> Device + std::panic::UnwindSafe) -> Result<Device> {
    #[cfg(feature = "tuned")]
    keep_kernels();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = std::panic::catch_unwind(|| {
        let device = open();
        let ones = burn::tensor::Tensor::<2>::ones([4, 4], &device);
        ones.clone().matmul(ones).sum().try_into_data().map(|_| device).map_err(|e| e.to_string())
    });
    std::panic::set_hook(hook);
    match outcome {
        Ok(Ok(device)) => Ok(device),
        Ok(Err(message)) => bail!("`--device {name}` does not work on this machine: {message}"),
        Err(_) => bail!(
            "`--device {name}` does not work on this machine: no driver or card was found; \
             hint: check the driver, or use `--device cpu`"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceChoice::{Cpu, Cuda, Wgpu};
    use super::*;

    #[test]
    fn several_devices_must_be_distinct_gpus() {
        let devices = |text: &str| text.parse().map(|DeviceChoices(choices)| choices);
        assert_eq!(devices("cpu"), Ok(vec![Cpu]));
        assert_eq!(devices("wgpu"), Ok(vec![Wgpu]));
        assert_eq!(devices("cuda,cuda:1"), Ok(vec![Cuda(0), Cuda(1)]));
        assert_eq!(devices("cuda:3,cuda:0,cuda:1"), Ok(vec![Cuda(3), Cuda(0), Cuda(1)]));
        for (text, said) in [
            ("cpu,cpu", "`cpu` is named twice"),
            ("cuda,cuda:1,cuda:0", "`cuda:0` is named twice"),
            ("cpu,cuda:0", "several devices must be CUDA GPUs, as in `cuda:0,cuda:1`"),
            ("cuda:0,wgpu", "several devices must be CUDA GPUs"),
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

//! Opens compute devices, checks their dtypes, and counts the kernels that they launch.
//!
//! Only this file has a `cfg` for a backend. It also caches compiled kernels in the user's cache
//! directory. Decoding on the CPU runs inside rayon's thread pool (`on_pool`), because calls from
//! outside the pool wake its second thread too late.

#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod kernels;

use std::str::FromStr;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_train::Section;

/// A compute device, as named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
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
    /// Opens the device and checks that it works.
    ///
    /// # Errors
    /// If this build lacks the backend, or this machine lacks the device.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::flex()),
            Self::Cuda(index) => cuda(index),
            Self::Wgpu => wgpu(),
        }
    }

    /// Returns the device's name on the command line.
    pub fn name(device: &Device) -> String {
        if Self::is_cpu(device) { "cpu".to_owned() } else { name_of_gpu(&format!("{device:?}")) }
    }

    /// Returns whether the device is the CPU, where each sequence decodes best on its own thread.
    pub fn is_cpu(device: &Device) -> bool {
        *device == Device::flex()
    }
}

/// Parses a GPU's command-line name from the `Debug` text of a burn device, because burn offers no
/// other access. Returns unknown text unchanged.
pub fn name_of_gpu(debug: &str) -> String {
    let index = debug.rsplit_once("Cuda(").and_then(|(_, rest)| rest.split_once(')'));
    match index {
        Some((index, _)) => format!("cuda:{index}"),
        None if debug.contains("Wgpu") => "wgpu".to_owned(),
        None => debug.to_owned(),
    }
}

/// Where the user set the compute dtype.
#[derive(Debug, Clone, Copy)]
pub enum DtypeSource {
    /// The flag `--dtype`.
    Flag,
    /// The key `dtype` in this section of the recipe.
    Key(Section),
}

/// Parses the name of the dtype that models compute in.
///
/// # Errors
/// If the name is neither `f32` nor `bf16`.
pub fn parse_dtype(text: &str) -> Result<WeightDtype, String> {
    let all = [WeightDtype::F32, WeightDtype::Bf16];
    let found = all.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| "expected `f32` or `bf16`".to_owned())
}

/// Checks that a device can compute in a dtype at a useful speed. On the CPU, bf16 is about 70
/// times slower than f32, because our CPU backend has no bf16 matrix product.
///
/// # Errors
/// If the device cannot. The message names the flag or key that asked for the dtype.
pub fn require_dtype(device: &Device, source: DtypeSource, dtype: WeightDtype) -> Result<()> {
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

/// A counter of the GPU kernels that are launched during its lifetime.
pub struct KernelWatch {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    watching: kernels::Watching,
}

/// Numbers of kernels and of kernel launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumKernels {
    /// Number of distinct kernels, each compiled or read from the cache; 0 if not counted.
    pub distinct: usize,
    /// Number of launches of all kernels together.
    pub launches: usize,
}

impl KernelWatch {
    /// Starts counting. `say` receives a progress line every few seconds while new kernels appear.
    /// If `counts` is true, we count distinct kernels until the end, which slows launches a little.
    pub fn begin(counts: bool, say: impl Fn(String) + Send + 'static) -> Self {
        #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
        let _ = (counts, say);
        Self {
            #[cfg(any(feature = "cuda", feature = "wgpu"))]
            watching: kernels::Watching::begin(counts, say),
        }
    }

    /// Stops counting and returns the numbers since the start. Both are 0 on the CPU.
    pub fn num(self) -> NumKernels {
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        return self.watching.end();
        #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
        NumKernels { distinct: 0, launches: 0 }
    }
}

/// Returns the path at which compiled CUDA kernels are kept; `None` for other devices.
pub fn kernel_cache(device: &Device) -> Option<std::path::PathBuf> {
    #[cfg(feature = "cuda")]
    if DeviceChoice::name(device).starts_with("cuda") {
        return Some(cubecl::environment::path());
    }
    let _ = device;
    None
}

/// Caches compiled kernels and autotuning results in the user's cache directory, unless a
/// `cubecl.toml` names another directory. CubeCL's environment variables still apply.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
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

/// Runs `work` on a thread of rayon's pool. Inside the pool, a forward hands rows to a second
/// thread much faster than from outside.
pub fn on_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
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

/// Opens a device and multiplies two small matrices on it. Without a driver or card, backends panic
/// at first use, some on their own thread. We turn such a panic into an error before other work
/// starts.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn probe(name: &str, open: impl FnOnce() -> Device + std::panic::UnwindSafe) -> Result<Device> {
    use std::sync::{Arc, Mutex, PoisonError};
    keep_kernels();
    let panics = Arc::new(Mutex::new(String::new()));
    let (hook, noted) = (std::panic::take_hook(), panics.clone());
    std::panic::set_hook(Box::new(move |panic| {
        let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.push_str(&format!("{panic}\n"));
    }));
    let outcome = std::panic::catch_unwind(|| {
        let device = open();
        let ones = burn::tensor::Tensor::<2>::ones([4, 4], &device);
        ones.clone().matmul(ones).sum().try_into_data().map(|_| device).map_err(|e| e.to_string())
    });
    std::panic::set_hook(hook);
    let panics = panics.lock().unwrap_or_else(PoisonError::into_inner);
    let message = match outcome {
        Ok(Ok(device)) => return Ok(device),
        Ok(Err(message)) => message,
        Err(_) => "no driver or card was found".to_owned(),
    };
    if let Some(missing) = missing_part(&format!("{panics}{message}")) {
        bail!("`--device {name}`: {missing}; hint: install it, or use `--device cpu`");
    }
    bail!(
        "`--device {name}` does not work on this machine: {message}; \
         hint: check the driver, or use `--device cpu`"
    )
}

/// Finds the missing part of a CUDA installation in a backend's messages, and says where that part
/// is expected. `None` if the messages report no missing part.
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
fn missing_part(messages: &str) -> Option<&'static str> {
    let has = |text: &str| messages.contains(text);
    if has("load the \"cuda\" shared library") {
        Some(
            "NVIDIA's driver is not installed: its library `libcuda.so.1` is in no directory of `LD_LIBRARY_PATH` or the \
             system's",
        )
    } else if has("load the \"nvrtc\" shared library") {
        Some(
            "CUDA's compiler NVRTC is not installed: its library `libnvrtc.so` is in no directory of `LD_LIBRARY_PATH` or \
             the system's",
        )
    } else if has("CUDA installation not found") || has("could not open source file") {
        Some(
            "CUDA's headers, such as `cuda_fp16.h`, are not installed: they are looked for in `include` below `CUDA_PATH`, \
             or below `/usr/local/cuda`",
        )
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::missing_part;

    #[test]
    fn a_missing_part_of_cuda_is_named() {
        // The messages are worded as cudarc, CubeCL and NVRTC word them.
        for (said, named) in [
            (
                "panicked at lib.rs: Unable to dynamically load the \"cuda\" shared library - searched for library names",
                "libcuda.so.1",
            ),
            ("Unable to dynamically load the \"nvrtc\" shared library - searched", "libnvrtc.so"),
            (
                "kernel.cu(2): catastrophic error: could not open source file \"cuda_fp16.h\"",
                "CUDA_PATH",
            ),
            ("\n        CUDA installation not found.", "CUDA_PATH"),
        ] {
            assert!(missing_part(said).is_some_and(|part| part.contains(named)), "{said}");
        }
        assert_eq!(missing_part("out of memory"), None);
    }
}

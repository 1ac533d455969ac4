//! The machine that numbers were measured on, in words.

use crate::results::Version;

/// Processor, cores and operating system.
pub(super) fn describe() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let processor = processor().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{processor}, {cores} cores, {}", std::env::consts::OS)
}

/// The processor's name, where the system tells it in a file.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The libraries that decide the speed.
pub(super) fn versions() -> Vec<Version> {
    vec![Version { name: "burn".to_owned(), version: "0.22.1".to_owned() }]
}

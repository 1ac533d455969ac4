//! The machine that this program runs on.

/// Describes the machine in one line: processor, cores and operating system.
pub(crate) fn machine_text() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let processor = line.and_then(|line| Some(line.split_once(':')?.1.trim()));
    format!(
        "{}, {cores} cores, {}",
        processor.unwrap_or(std::env::consts::ARCH),
        std::env::consts::OS
    )
}

//! The peak memory of the process, for tests that bound the memory of a reader.

/// The peak resident memory of this process in bytes; `None` if the system does not report it.
pub(crate) fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kilobytes| kilobytes << 10)
}

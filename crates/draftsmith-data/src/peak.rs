//! How much memory the tests took, for those that hold a reader to a bound.

/// The most memory that this process had, in bytes, where the system tells.
pub(crate) fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kilobytes| kilobytes << 10)
}

//! How much memory a process took, for tests that hold a reader to a bound and for the bench beside
//! peers.

/// The most memory that this process had, in bytes, where the system tells.
pub(crate) fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kilobytes| kilobytes << 10)
}

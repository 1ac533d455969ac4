//! Checks for free disk space before large writes.

use std::path::{Path, PathBuf};

/// A disk has too little free space.
#[derive(Debug, thiserror::Error)]
#[error(
    "no room for {what} in `{dir}`: up to {} needed, {} free; hint: free disk space, or work in a \
     directory on another disk",
    in_bytes(*.needed),
    in_bytes(*.free)
)]
pub struct NoRoom {
    /// The data to be written.
    pub what: String,
    /// The directory of the data.
    pub dir: PathBuf,
    /// The maximum size of the data in bytes.
    pub needed: u64,
    /// The free space in bytes.
    pub free: u64,
}

/// Checks that the disk of a directory has room for `needed` bytes. The directory need not exist yet.
/// The check passes on systems that do not report free space.
///
/// # Errors
/// If fewer bytes are free.
pub fn check_room(what: &str, dir: &Path, needed: u64) -> Result<(), NoRoom> {
    match free_bytes(dir) {
        Some(free) if free < needed => {
            Err(NoRoom { what: what.to_owned(), dir: dir.to_path_buf(), needed, free })
        }
        _ => Ok(()),
    }
}

/// Returns the number of bytes that this user may still write to the disk of a directory, which need not exist.
#[cfg(unix)]
fn free_bytes(dir: &Path) -> Option<u64> {
    let existing = |dir: &&Path| dir.as_os_str().is_empty() || dir.exists();
    let dir = dir.ancestors().find(existing)?;
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let disk = nix::sys::statvfs::statvfs(dir).ok()?;
    #[allow(clippy::useless_conversion, reason = "these types are narrower on some systems")]
    let (blocks, size) = (u64::from(disk.blocks_available()), u64::from(disk.fragment_size()));
    Some(blocks.saturating_mul(size))
}

#[cfg(not(unix))]
fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

/// Formats a number of bytes, such as `1.5 GB`.
pub fn in_bytes(bytes: u64) -> String {
    let units = ["kB", "MB", "GB", "TB", "PB", "EB"];
    let mut size = bytes as f64;
    let mut unit = "bytes";
    for next in units {
        if size < 1000.0 {
            break;
        }
        (size, unit) = (size / 1000.0, next);
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{size:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_is_an_error_before_anything_is_written() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let later = dir.path().join("not/there/yet");
        check_room("data", &later, 1).expect("there is room for a byte");
        if cfg!(unix) {
            let message = check_room("data", &later, u64::MAX).unwrap_err().to_string();
            let expected =
                format!("no room for data in `{}`: up to 18.4 EB needed, ", later.display());
            assert!(message.starts_with(&expected), "{message}");
            assert!(check_room("data", Path::new("neither"), u64::MAX).is_err());
        }
    }

    #[test]
    fn bytes_are_formatted_in_a_fitting_unit() {
        let cases =
            [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2_450_000_000, "2.5 GB")];
        for (bytes, expected) in cases {
            assert_eq!(in_bytes(bytes), expected);
        }
    }
}

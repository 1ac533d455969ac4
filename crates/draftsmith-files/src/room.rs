//! Whether a disk has room for what is about to be written.

use std::path::{Path, PathBuf};

/// What is to be written does not fit its disk.
#[derive(Debug, thiserror::Error)]
#[error(
    "{what} takes up to {} in `{dir}`, whose disk has {} left; hint: make room there, or work in a \
     directory on another disk",
    in_bytes(*.needed),
    in_bytes(*.free)
)]
pub struct NoRoom {
    /// What was to be written.
    pub what: String,
    /// Where.
    pub dir: PathBuf,
    /// Bytes that it may take.
    pub needed: u64,
    /// Bytes that are left.
    pub free: u64,
}

/// Sees that a directory, there already or not, has room for so many bytes. Where the system does
/// not say how many are left, it passes.
///
/// # Errors
/// If there are fewer.
pub fn check_room(what: &str, dir: &Path, needed: u64) -> Result<(), NoRoom> {
    match free_bytes(dir) {
        Some(free) if free < needed => {
            Err(NoRoom { what: what.to_owned(), dir: dir.to_path_buf(), needed, free })
        }
        _ => Ok(()),
    }
}

/// Bytes that this user may still write where a directory is or would be made.
#[cfg(unix)]
fn free_bytes(dir: &Path) -> Option<u64> {
    let existing = |dir: &&Path| dir.as_os_str().is_empty() || dir.exists();
    let dir = dir.ancestors().find(existing)?;
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let disk = nix::sys::statvfs::statvfs(dir).ok()?;
    // Their types are not the same everywhere.
    #[allow(clippy::useless_conversion, reason = "narrower on some systems")]
    let (blocks, size) = (u64::from(disk.blocks_available()), u64::from(disk.fragment_size()));
    Some(blocks.saturating_mul(size))
}

#[cfg(not(unix))]
fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

/// A number of bytes, to read: `1.5 GB`.
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
    fn what_does_not_fit_is_told_before_it_is_written() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let later = dir.path().join("not/there/yet");
        check_room("data", &later, 1).expect("there is room for a byte");
        if cfg!(unix) {
            let message = check_room("data", &later, u64::MAX).unwrap_err().to_string();
            let expected =
                format!("data takes up to 18.4 EB in `{}`, whose disk has", later.display());
            assert!(message.starts_with(&expected), "{message}");
            assert!(check_room("data", Path::new("neither"), u64::MAX).is_err());
        }
    }

    #[test]
    fn bytes_are_told_in_a_unit_of_their_size() {
        let told =
            [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2_450_000_000, "2.5 GB")];
        for (bytes, expected) in told {
            assert_eq!(in_bytes(bytes), expected);
        }
    }
}

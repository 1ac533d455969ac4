//! SHA-256 hashes as lower-case hex.

use std::fmt::Write as _;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{FileError, open_file};

/// Bytes read at a time while hashing a file.
const CHUNK_BYTES: usize = 1 << 16;

/// Computes the SHA-256 of `bytes`, as 64 lower-case hex digits.
pub fn hash_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Computes the SHA-256 of a file's bytes, as 64 lower-case hex digits, in constant memory.
///
/// # Errors
/// If the file cannot be read.
pub fn hash_file(path: &Path) -> Result<String, FileError> {
    let read_error = |e| FileError::new("read", path, e);
    let mut file = open_file(path)?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hex(&hasher.finalize())),
            Ok(num_bytes) => hasher.update(&chunk[..num_bytes]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(read_error(e)),
        }
    }
}

/// Formats bytes as lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn the_digest_equals_the_published_one() {
        assert_eq!(hash_bytes(b"abc"), ABC);
    }

    #[test]
    fn a_file_and_its_bytes_have_the_same_hash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        for num_bytes in [0, 3, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7] {
            let bytes: Vec<u8> = (0..num_bytes).map(|i| (i * 7 % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(hash_file(&path).unwrap(), hash_bytes(&bytes), "{num_bytes}");
        }
    }

    #[test]
    fn an_error_names_the_missing_file() {
        let error = hash_file(Path::new("nowhere/file")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read `nowhere/file`"), "{error}");
    }
}

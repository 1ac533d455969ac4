//! Atomic file writes, free-space checks, JSON parsing whose errors name the key, and hashes.
//!
//! This is a separate crate because models and datasets both have files but must not see each other.
//! It knows nothing about the contents of the files.
//!
//! ```
//! use draftsmith_files::{parse_json, read_file, write_whole};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! let path = dir.path().join("settings.json");
//! write_whole(&path, r#"{"lengths": [1, "two"]}"#)?; // whole or absent, even if the machine stops
//! let read = parse_json::<std::collections::BTreeMap<String, Vec<u32>>>(&path, &read_file(&path)?);
//! let message = read.unwrap_err().to_string();
//! assert!(message.contains("settings.json") && message.contains("lengths[1]"), "{message}");
//! # Ok(())
//! # }
//! ```

mod error;
mod hash;
mod json;
mod room;
mod temporary;
mod whole;

pub use error::{FileError, if_present, open_file, open_regular, read_bytes, read_file, read_text};
pub use hash::{hash_bytes, hash_file, hex};
pub use json::{
    JsonError, Notation, merged, parse_json, parse_json_value, parse_toml, plain_problem,
    with_finite_numbers,
};
pub use room::{NoRoom, check_room, in_bytes};
pub use temporary::remove_abandoned;
pub use whole::{check_place, paths_in, write_json, write_whole, write_whole_with};

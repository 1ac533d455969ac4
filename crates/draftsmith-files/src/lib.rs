//! Files: written whole or not at all, on disks with room for them; JSON read with errors that name
//! the key; hashes.
//!
//! This is a separate crate, because models and datasets both have files and must not depend on each
//! other.

mod file_error;
mod hash;
mod json;
mod room;
mod temporary;
mod whole;

pub use file_error::FileError;
pub use hash::{hash_bytes, hash_file, hex};
pub use json::{JsonError, Notation, parse_json, parse_json_value, plain_problem};
pub use room::{NoRoom, check_room, in_bytes};
pub use whole::{remove_abandoned, write_new, write_whole, write_whole_with};

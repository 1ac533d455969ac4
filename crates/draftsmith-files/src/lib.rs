//! Files: whole or absent where they are written, on disks that have room for them, and where they are
//! JSON, read with errors that name the key.
//!
//! A crate of its own, because models and datasets both have files and must not see each other.

mod file_error;
mod json;
mod room;
mod temporary;
mod whole;

pub use file_error::FileError;
pub use json::{JsonError, Notation, parse_json, parse_json_value, plain_problem};
pub use room::{NoRoom, check_room, in_bytes};
pub use whole::{remove_abandoned, write_new, write_whole, write_whole_with};

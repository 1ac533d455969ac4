//! Files: whole or absent where they are written, and where they are JSON, read with errors that name
//! the key.
//!
//! A crate of its own, because models and datasets both have files and must not see each other.

mod json;
mod whole;

pub use json::{JsonError, Notation, parse_json, parse_json_value, plain_problem};
pub use whole::{FileError, write_whole, write_whole_with};

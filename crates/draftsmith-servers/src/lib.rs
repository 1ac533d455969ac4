//! Tools for existing inference servers. They time a server's rounds, choose its speculation
//! settings, predict its behaviour with a drafter's files, and test whether its output is the
//! target's. A survey estimates without a server whether speculation pays for a pair of models.
//!
//! This crate prints nothing and parses no command-line arguments.

pub mod certify;
pub mod costs;
pub mod doctor;
pub mod explain;
pub mod settings;
pub mod survey;

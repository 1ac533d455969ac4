//! The server you already have: what its rounds cost, which settings and drafter pay on it, what it does with a
//! drafter's files, and whether its output is the target's. A survey says the same of a pair of models without a
//! server.
//!
//! This crate prints nothing and reads no arguments.

pub mod certify;
pub mod costs;
pub mod doctor;
pub mod settings;
pub mod survey;

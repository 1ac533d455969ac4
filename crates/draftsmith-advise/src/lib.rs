//! What pays for a pair of models and a server, and whether it holds: the survey of a pair, the costs and settings of a
//! server, what a server does with a drafter, and whether its output is the target's.
//!
//! This crate prints nothing and reads no arguments.

pub mod doctor;
pub mod server_certify;
pub mod server_costs;
pub mod server_settings;
pub mod survey;

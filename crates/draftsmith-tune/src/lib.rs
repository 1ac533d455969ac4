//! The offline work on drafters: building labelled data, training, recording, measuring costs,
//! choosing stop rules and evaluating them.
//!
//! This crate prints nothing and reads no command-line arguments. Callers pass a recipe and a
//! [`draftsmith_recipe::watch::Watch`], which reports progress.

pub mod agreement;
pub mod answers;
pub mod build_data;
pub mod check;
pub mod confidence;
pub mod conversation;
pub mod costs;
pub mod decoders;
pub mod evaluate;
pub mod heads;
pub mod judging;
pub mod labels;
mod machine;
pub mod over_online;
mod race;
pub mod record;
pub mod recorder;
pub mod replay;
pub mod responses;
pub mod rollouts;
pub mod served_states;
pub mod server_access;
pub mod serving;
pub mod sweep;
pub mod training;
pub mod tuner;
pub mod tuning;

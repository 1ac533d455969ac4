//! Everything that is computed about drafters: labels, recordings, costs, the choice of a rule, and how it
//! is judged.
//!
//! This crate prints nothing and reads no arguments; it takes recipes and a [`draftsmith_recipe::watch::Watch`].

pub mod agreement;
pub mod answers;
pub mod build_data;
pub mod check;
pub mod conversation;
pub mod costs;
pub mod decoders;
pub mod evaluate;
pub mod heads;
pub mod judging;
pub mod labels;
pub mod over_online;
pub mod record;
pub mod recorder;
pub mod replay;
pub mod responses;
pub mod rollouts;
pub mod server_access;
pub mod sweep;
pub mod training;
pub mod tuner;
pub mod tuning;

//! Tests of both trainers, and what tests train on.

mod both;
pub(crate) mod pair;
mod reduced_precision;
mod resuming;
pub(crate) mod runs;

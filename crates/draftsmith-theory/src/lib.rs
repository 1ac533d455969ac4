//! The numbers of speculative decoding: draws, verification, stop rules, mixing, rates and costs, on plain slices.
//!
//! Everything here is a pure function of its arguments: no tensors, no files, no clocks, no global randomness.
//! The crates above bring tensors and files to these functions; exactness tests bring probability tables.
//!
//! | module | what it owns |
//! |---|---|
//! | `draws` | the only door randomness enters by, and its seeded form |
//! | `enumerate` | the other form of `Draws`: every outcome with its exact chance |
//! | `distribution` | softmax, overlap, entropies |
//! | `sampling` | temperature, top-k and top-p, as served (`select`: without sorting) |
//! | `verify` | which candidates stand, and what comes after them |
//! | `stop_rule` | when a draft phase ends |
//! | `trace` | what happened in each round, and the rates that follow from it |
//! | `cost` | seconds from counts, fitted (by `least_squares`) |
//! | `closed_forms` | expected tokens a round and speed-ups under independent acceptance |
//! | `mixing` | the training input's mixture of target and draft tokens, and its label |
//! | `head_metrics` | how good an acceptance head's predictions are |
//! | `split` | training or validation, by row id |

mod closed_forms;
mod cost;
mod distribution;
mod draws;
mod enumerate;
mod error;
mod head_metrics;
mod least_squares;
mod mixing;
mod sampling;
mod select;
mod split;
mod stop_rule;
mod trace;
mod verify;

pub use closed_forms::{expected_tokens_per_round, expected_walltime_improvement};
pub use cost::{CostModel, Fit, Observation};
pub use distribution::{argmax, cross_entropy, entropy_of_log_probs, log_softmax, overlap};
pub use draws::{Draws, SeededDraws};
pub use enumerate::{Enumerator, enumerate, law};
pub use error::TheoryError;
pub use head_metrics::{HeadMetrics, HeadScores};
pub use mixing::{acceptance_prob, keep_target};
pub use sampling::{Decoding, Sampling};
pub use split::in_validation;
pub use stop_rule::{
    Bounds, ConfidenceThreshold, DraftSignals, FixedLength, RejectionThreshold, SignalNeeds,
    StopRule,
};
pub use trace::{Counts, Round, Trace};
pub use verify::{Verdict, verify_greedy, verify_sampled};

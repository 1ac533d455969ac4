//! The numbers of speculative decoding: draws, verification, stop rules, mixing, rates and costs,
//! on plain slices.
//!
//! Everything here is a pure function of its arguments: no tensors, no files, no clocks, no global
//! randomness. The crates above bring tensors and files to these functions; exactness tests bring
//! probability tables.
//!
//! | module | what it owns |
//! |---|---|
//! | `draws` | the only door randomness enters by, and its seeded form |
//! | `enumerate` | the other form of `Draws`: every outcome with its exact chance |
//! | `distribution` | softmax, overlap, entropies |
//! | `exponentials` | e^logit over rows, vectorised |
//! | `acceptance_bounds` | bounds and estimates of the overlap from KL and entropy |
//! | `decoding` | how the next token is chosen: the repetition penalty, then greedily or by a draw |
//! | `sampling` | temperature, top-k, top-p and min-p, as served (`select`: without sorting) |
//! | `draft_phase` | which questions a stop rule is asked, and when another candidate is drawn |
//! | `drafter_id` | what drafters are called, and how often each ran in a round |
//! | `proposal` | the tree of tokens that a drafter proposes |
//! | `max_gram` | a draft without a model: how a sequence went on where it looked like this before |
//! | `verify` | which candidates stand, and what comes after them |
//! | `review` | the same inside a cascade, where a drafter's model reviews a cheaper one and may be lenient |
//! | `stop_rule` | when a draft phase ends |
//! | `threshold_policy` | the best stop decisions by exact solution, for tests |
//! | `trace` | what happened in each round, and the rates that follow from it |
//! | `replay` | what any rule would have done, from recordings |
//! | `cost` | seconds from counts, fitted (by `least_squares`) |
//! | `round_costs` | the same, where rows cost in steps |
//! | `closed_forms` | expected tokens a round and speed-ups under independent acceptance |
//! | `cascade` | the same for drafts that draft for drafts or take turns: CS-Drafting's formulas and best plans |
//! | `mixing` | the training input's mixture of target and draft tokens, and its label |
//! | `intervals` | how sure a number over prompts is: the bootstrap, and whether two numbers agree |
//! | `losslessness` | whether sampled output has the target's distribution, tested; which greedy mismatches are rounding |
//! | `head_metrics` | how good an acceptance head's predictions are |
//! | `calibration` | what a head's prediction is worth as a chance, fitted (by `isotonic`, or scale and bias) |
//! | `ridge` | the linear map that says one set of vectors from another |
//! | `split` | training or validation, by row id |

mod acceptance_bounds;
mod calibration;
mod cascade;
mod closed_forms;
mod cost;
mod decoding;
mod distribution;
mod draft_phase;
mod drafter_id;
mod draws;
mod enumerate;
mod error;
mod exponentials;
mod head_metrics;
mod intervals;
mod isotonic;
mod least_squares;
mod losslessness;
mod max_gram;
mod mixing;
mod proposal;
mod replay;
mod review;
mod ridge;
mod round_costs;
mod sampling;
mod select;
mod split;
mod stop_rule;
#[cfg(test)]
mod threshold_policy;
mod top_probs;
mod trace;
mod tree;
mod verify;

pub use acceptance_bounds::{entropy_overlap_estimate, overlap_lower_bound};
pub use calibration::{
    Calibration, CalibrationKind, CalibrationTrial, JudgedPrediction, PiecewiseLinear, Platt,
    preferred_calibration, try_calibrations,
};
pub use cascade::{
    DraftProfile, HorizontalPlan, VerticalPlan, best_horizontal_cascade, best_vertical_cascade,
    horizontal_cascade_improvement, step_tokens_generating_function, vertical_cascade_improvement,
};
pub use closed_forms::{expected_tokens_per_round, expected_walltime_improvement};
pub use cost::{CostModel, Fit, Observation};
pub use decoding::{Decoding, TokenChoice};
pub use distribution::{argmax, cross_entropy, entropy_of_log_probs, log_softmax, overlap};
pub use draft_phase::{CandidateSource, DraftLimits, DraftPhase, Drawn, EndBehind, TextEnd};
pub use drafter_id::{DrafterId, Forwards, MAX_DRAFTERS};
pub use draws::{Draws, SeededDraws};
pub use enumerate::{Enumerator, distribution_of, enumerate};
pub use error::TheoryError;
pub use head_metrics::{HeadMetrics, HeadScores, ReliabilityBin};
pub use intervals::{Interval, bootstrap};
pub use losslessness::{LosslessnessTest, Rounding};
pub use max_gram::{
    BigramCounts, Bigrams, Continuation, LookupFirst, MaxGram, MaxGramConfig, SearchedText,
};
pub use mixing::{acceptance_prob, keep_target};
pub use proposal::{DrawnFrom, Node, Proposal};
pub use replay::{
    CostOptimum, RecordedCandidate, RecordedPlace, Recording, Recordings, Spending, cost_optimal,
    seconds_per_token,
};
pub use review::{CascadeCandidate, Lenience, review_greedy, review_sampled};
pub use ridge::ridge;
pub use round_costs::{DraftSeconds, RoundCosts};
pub use sampling::Sampling;
pub use split::in_validation;
pub use stop_rule::{
    AcceptanceSignal, Bounds, CandidateProbThreshold, CandidateProbThresholdConfig,
    ConfidenceThreshold, ConfidenceThresholdConfig, CostOptimal, CostOptimalConfig, DraftSignals,
    EntropyThreshold, EntropyThresholdConfig, FixedLength, FixedLengthConfig, Grid, HeadEstimate,
    HeadTiming, Heuristic, HeuristicConfig, JointConfidence, JointConfidenceConfig, KeyValues,
    Oracle, RecipeKey, RejectionThreshold, RejectionThresholdConfig, RoundEnd, RuleFamily,
    RuleSettings, SignalNeeds, SoftmaxSummary, StepFunction, StopRule, StopRuleConfig,
    StopRuleEntry, StopRuleName, Sweep, largest_prob, setting_text, stop_rules,
};
pub use top_probs::TopProbs;
pub use trace::{Counts, Round, Trace};
pub use tree::{Children, MAX_CHILDREN, TreeChildren, TreeGrowth, TreeShape, child_rank};
pub use verify::{Commit, verify_greedy, verify_sampled};

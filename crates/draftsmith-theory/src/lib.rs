//! The arithmetic of speculative decoding on plain slices: draws, verification, stop rules, costs.
//!
//! Everything here is a pure function of its arguments: no tensors, no files, no clocks, no global
//! randomness. Other crates apply these functions to tensors and files. Exactness tests apply them
//! to small probability tables.
//!
//! ```
//! use draftsmith_theory::{Proposal, verify_greedy};
//! let proposal = Proposal::certain_chain(&[5, 8, 2]);
//! let target_tokens = [5, 8, 7, 1]; // the target's own, before and after each candidate
//! let commit = verify_greedy(&proposal, |row| target_tokens[row]);
//! assert_eq!((commit.path, commit.next_token), (vec![0, 1], 7)); // 2 is rejected
//! ```
//!
//! | module | what it owns |
//! |---|---|
//! | `drafting` | the settings with which inference servers draft |
//! | `draws` | randomness: the trait `Draws` and its seeded generator |
//! | `enumerate` | an implementation of `Draws` that visits every outcome with its exact probability |
//! | `distribution` | softmax, entropies, the overlap and bounds on it |
//! | `exponentials` | e^logit over whole rows of logits, vectorised |
//! | `decoding` | the choice of the next token: repetition penalty, then argmax or a draw |
//! | `sampling` | temperature, top-k, top-p and min-p (`select`: without sorting) |
//! | `top_probs` | distributions known only by their most probable tokens |
//! | `drafting` | the settings with which inference servers draft |
//! | `draft_phase` | when the stop rule is asked, and when another candidate is drawn |
//! | `drafter_id` | names of drafters, and the draft forwards of a round |
//! | `proposal` | the tree of tokens that a drafter proposes |
//! | `tree` | how trees of candidates grow, and their shapes |
//! | `max_gram` | prompt lookup, and a table of bigrams |
//! | `verify` | which candidates the target accepts, and the token that follows |
//! | `review` | verification inside a cascade, where a drafter's model reviews a cheaper drafter's candidates |
//! | `stop_rule` | when a draft phase ends |
//! | `threshold_policy` | optimal stop decisions, solved exactly for tests |
//! | `trace` | traces of decoding, counts and rates |
//! | `replay` | what decoding under any stop rule would have done, from recordings |
//! | `cost` | SpecDec++'s cost model, fitted by `least_squares` |
//! | `round_costs` | measured costs of rounds, which may rise in steps with the number of rows |
//! | `server_costs` | times of a server's rounds by batch size, and the throughput that follows |
//! | `closed_forms` | expected tokens and speed-ups under independent acceptance |
//! | `names` | names of drafters, decodings and sources of costs, in files and messages |
//! | `mixing` | the validation split, the mixture of a head's training input, and its labels |
//! | `estimate` | statistics over prompts with bootstrap confidence intervals |
//! | `losslessness` | a statistical test of sampled output, and the rounding errors that excuse greedy mismatches |
//! | `head_metrics` | scores of an acceptance head's predictions |
//! | `ridge` | ridge regression with many outputs |
//! | `serialized` | serde implementations that check values |

mod closed_forms;
mod cost;
mod decoding;
mod distribution;
mod draft_phase;
mod drafter_id;
mod drafting;
mod draws;
mod enumerate;
mod error;
mod estimate;
mod exponentials;
mod head_metrics;
mod least_squares;
mod losslessness;
mod max_gram;
mod mixing;
mod names;
mod proposal;
mod replay;
mod review;
mod ridge;
mod round_costs;
mod sampling;
mod select;
mod serialized;
mod server_costs;
mod stop_rule;
#[cfg(test)]
mod threshold_policy;
mod top_probs;
mod trace;
mod tree;
mod verify;

pub use closed_forms::{
    DraftProfile, expected_tokens_per_round, horizontal_cascade_improvement,
    vertical_cascade_improvement,
};
pub use cost::{CostFit, CostModel, TimedCounts};
pub use decoding::{Decoding, TokenChoice};
pub use distribution::{
    argmax, bretagnolle_huber_bound, cross_entropy, entropy_of_log_probs, entropy_overlap_estimate,
    log_softmax, overlap, overlap_lower_bound, pinsker_bound,
};
pub use draft_phase::{CandidateSource, DraftLimits, DraftPhase, DrawnToken, EndAfter, TextEnd};
pub use drafter_id::{DrafterId, Forwards, MAX_DRAFTERS, RoundForwards};
pub use drafting::Drafting;
pub use draws::{Draws, SeededDraws};
pub use enumerate::{distribution_of, enumerate};
pub(crate) use error::Result;
pub use error::TheoryError;
pub use estimate::{Estimate, bootstrap, least_by};
pub use head_metrics::{HeadMetrics, HeadScores, ReliabilityBin};
pub use losslessness::{LosslessnessTest, Rounding};
pub use max_gram::{
    BigramCounts, Bigrams, Continuations, LookupFirst, MaxGram, MaxGramConfig, SearchedText,
    StoredAnswers, SuffixSettings,
};
pub use mixing::{acceptance_prob, in_validation, keep_target};
pub use names::{CostSource, DecodingName, DrafterName, ModelSummary, Road, rule_label};
pub use proposal::{DrawnFrom, Node, Proposal};
pub use replay::{
    CostOptimum, JudgedPrediction, NgramSimple, RecordedCandidate, RecordedPlace, Recording,
    Recordings, RoundLengths, RoundPrediction, cost_optimal, seconds_per_token,
};
pub use review::{CascadeCandidate, Lenience, review_greedy, review_sampled};
pub use ridge::ridge;
pub use round_costs::RoundCosts;
pub use sampling::Sampling;
pub use server_costs::{DraftedBy, RoundTable, ServerCell, ServerCosts, Work};
pub use stop_rule::{
    AcceptanceModel, AcceptanceSignal, Bounds, CandidateProbThresholdConfig, ConfidenceHeadConfig,
    ConfidenceThresholdConfig, CostOptimalConfig, DraftSignals, EntropyThresholdConfig,
    FixedLengthConfig, Grid, HeadEstimate, HeadTiming, HeuristicConfig, JointConfidenceConfig,
    NamedRule, OnlineAcceptanceConfig, Oracle, RejectionThresholdConfig, RoundEnd, RuleFamily,
    RuleOption, RuleSettings, SettingKind, SignalNeeds, SoftmaxSummary, StepFunction, StopRule,
    StopRuleConfig, StopRuleEntry, StopRuleName, Sweep, confidence_logit, setting_text, stop_rules,
};
pub use top_probs::TopProbs;
pub use trace::{Counts, Round, Trace};
pub use tree::{Children, TreeChildren, TreeGrowth, TreeShape};
pub use verify::{Commit, verify_greedy, verify_sampled};

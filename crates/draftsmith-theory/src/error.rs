//! Errors about settings, measurements and recordings.
//!
//! They come from outside the program, so bad values are errors. A slice of the wrong length is a
//! bug in the caller and panics instead.

use crate::{Counts, DrafterId};

/// An invalid setting, or measurements that do not determine the answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TheoryError {
    /// A string that is not a valid drafter name.
    #[error(
        "`{0}` is not a drafter's name, which has 1 to 32 letters, digits, `-` and `_`, begins with a letter \
         and is not `look-up`"
    )]
    DrafterName(String),
    /// A number outside its range.
    #[error("{name} must {range}, not `{value}`")]
    Setting {
        /// The setting's key.
        name: &'static str,
        /// The requirement on the value, such as `lie between 0 and 1`.
        range: &'static str,
        /// The invalid value.
        value: f64,
    },
    /// A malformed tree shape.
    #[error(
        "a tree is written as its widths by depth, the nodes that a draft forward reads and the most \
         nodes beside the chain, as in `3-2-1x4x12`: at most eight widths, none of them 0, and a node \
         to read"
    )]
    TreeShape,
    /// A malformed [`LookupFirst`](crate::LookupFirst).
    #[error(
        "`{0}` does not say when to look up, as in `2x4`: the minimum match length and the maximum \
         number of candidates, in tokens, both at least 1"
    )]
    LookupFirst(String),
    /// A text that does not name a stop rule with its setting.
    #[error("`{text}` does not name a stop rule with its setting: {problem}")]
    NamedRule {
        /// The text.
        text: String,
        /// The reason why the text is invalid.
        problem: String,
    },
    /// Bounds on the candidate length that no round can satisfy.
    #[error(
        "candidate length bounds must satisfy min <= max and 1 <= max, not min `{min}`, max `{max}`"
    )]
    Bounds {
        /// The minimum number of candidates.
        min: usize,
        /// The maximum number of candidates.
        max: usize,
    },
    /// Round costs without the time of a verification, or with a negative or non-finite time.
    #[error("costs of rounds need a verification, and times that are finite and not negative")]
    RoundCosts,
    /// A replay whose rounds may be longer than the recorded ones.
    #[error(
        "the rule may draft `{longest}` candidates a round, but `{recorded}` were recorded: \
         record longer rollouts"
    )]
    NotRecorded {
        /// The rule's maximum number of candidates.
        longest: usize,
        /// The maximum number of recorded candidates.
        recorded: usize,
    },
    /// Costs that lack the time of a drafter's forward.
    #[error("the cost of a forward of the drafter `{0}` is unknown")]
    UnknownCost(DrafterId),
    /// A replay of a rule that reads an acceptance head, from recordings without one.
    #[error("the rule reads an acceptance head, but the rollouts were recorded without one")]
    NoHeadRecorded,
    /// A cell of a server's cost table that occurs twice, has no measured block, or has a time or
    /// batch size that is not positive.
    #[error(
        "the cell of batch size {batch_size} and {num_candidates} candidates is there twice, has no block, or has \
         a time or batch size that is not above 0"
    )]
    ServerCell {
        /// The number of sequences in the batch.
        batch_size: usize,
        /// The number of candidates per sequence and round.
        num_candidates: usize,
    },
    /// A server's cost table without a cell for plain decoding.
    #[error(
        "no cell is of a server without speculation, which every speed-up is over; hint: start the server without \
         it and run `draftsmith server costs` with `--candidates 0`"
    )]
    NoPlainServer,
    /// Recordings without any candidate, to which no rule can be fitted.
    #[error(
        "no candidate was recorded, so no rule can be fitted; hint: allow more new tokens: the last \
         token of a response is the target's and has no candidate"
    )]
    NothingRecorded,
    /// An initial candidate length outside its bounds.
    #[error("initial_length `{initial_length}` must lie within the bounds, `{min}` to `{max}`")]
    InitialLength {
        /// The initial candidate length.
        initial_length: usize,
        /// The lower bound.
        min: usize,
        /// The upper bound.
        max: usize,
    },
    /// A malformed step function.
    #[error(
        "a step function needs ascending finite edges and one value more than edges, \
         not `{num_edges}` edges and `{num_values}` values"
    )]
    Steps {
        /// The number of edges.
        num_edges: usize,
        /// The number of values.
        num_values: usize,
    },
    /// A run whose time is not a positive finite number of seconds.
    #[error("run `{index}` must have a positive finite time, not `{seconds}` seconds")]
    RunTime {
        /// The run's index in the slice.
        index: usize,
        /// The run's time in seconds.
        seconds: f64,
    },
    /// Runs that all have nearly the same ratio of draft to target forwards, so that the costs of
    /// the two cannot be told apart. Holds the number of runs.
    #[error(
        "`{0}` runs do not separate the draft's cost from the target's: \
         pool runs of several candidate lengths"
    )]
    Collinear(usize),
    /// A confidence interval that is not finite or does not contain its value.
    #[error("an interval must be finite and hold its value, not `{value}` in `{low}` to `{high}`")]
    Estimate {
        /// The number.
        value: f64,
        /// The lower end.
        low: f64,
        /// The upper end.
        high: f64,
    },
    /// Counts for which N_draft + N_target = N + N_discarded does not hold, so that Eq. 2.3 does
    /// not apply.
    #[error(
        "draft and target forwards do not add up to tokens kept and discarded: `{}` + `{}` != `{}` + `{}`",
        .0.num_draft_forwards, .0.num_target_forwards, .0.num_tokens, .0.num_discarded
    )]
    ForwardIdentity(Counts),
}

impl TheoryError {
    /// Checks that a setting is in its range.
    pub(crate) fn check(
        is_valid: bool,
        name: &'static str,
        range: &'static str,
        value: f64,
    ) -> Result<(), Self> {
        if is_valid { Ok(()) } else { Err(Self::Setting { name, range, value }) }
    }

    /// Checks that a setting is a probability.
    pub(crate) fn check_probability(name: &'static str, value: f64) -> Result<(), Self> {
        Self::check((0.0..=1.0).contains(&value), name, "lie between 0 and 1", value)
    }
}

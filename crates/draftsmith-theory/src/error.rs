//! What can be wrong with the numbers this crate is given.
//!
//! Settings and measurements come from outside and are answered with an error; slices of the wrong
//! length are bugs of the caller and panic where they are met.

/// An invalid setting, or measurements that do not determine the answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TheoryError {
    /// A string that names no drafter.
    #[error(
        "unknown drafter `{0}`, expected `none`, `draft`, `small_draft`, `max_gram`, `self_draft_` \
         and an exit layer, or `cascade_` and a number"
    )]
    UnknownDrafter(String),
    /// A sampling temperature that is not a positive finite number.
    #[error(
        "temperature must be positive and finite, not `{0}`; for temperature 0 decode greedily"
    )]
    Temperature(f64),
    /// A tree of candidates that could not grow.
    #[error(
        "a tree is written as its widths by depth, the nodes that a draft forward reads and the most \
         nodes beside the chain, as in `3-2-1x4x12`: at most eight widths, none of them 0, and a node \
         to read; or as the children of every node, level by level, as in `3-2.0.1`: at most 64 nodes"
    )]
    TreeShape,
    /// A path that belongs to no tree.
    #[error(
        "the path {path:?} of a tree {problem}: every path is a node's, by the ranks of children from 0 \
         on, and its parent and the siblings before it are listed too"
    )]
    TreePaths {
        /// The path.
        path: Vec<u8>,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// What is no [`LookupFirst`](crate::LookupFirst).
    #[error(
        "`{0}` is not what a look-up must find, such as `2x4`: the fewest tokens of a match and the \
         most candidates, both 1 or more"
    )]
    LookupFirst(String),
    /// A nucleus mass outside (0, 1].
    #[error("top_p must be above 0 and at most 1, not `{0}`")]
    TopP(f64),
    /// A top-k of zero tokens.
    #[error("top_k must be at least 1; leave it out to keep every token")]
    TopK,
    /// A repetition penalty out of its range.
    #[error("repetition_penalty must lie between 0.01 and 100, not be `{0}`; 1 changes nothing")]
    RepetitionPenalty(f64),
    /// A min-p that is no share.
    #[error("min_p must lie between 0 and 1, not be `{0}`; leave it out to keep every token")]
    MinP(f64),
    /// Bounds on the candidate length that no round can satisfy.
    #[error(
        "candidate length bounds must satisfy min <= max and 1 <= max, not min `{min}`, max `{max}`"
    )]
    Bounds {
        /// The least number of candidates asked for.
        min: usize,
        /// The greatest number of candidates asked for.
        max: usize,
    },
    /// A lenience that is below 1 or not finite.
    #[error("lenience must be 1 or more and finite, not `{0}`; 1 reviews exactly")]
    Lenience(f64),
    /// A stop threshold that is not a probability.
    #[error("stop_threshold must lie between 0 and 1, not `{0}`")]
    StopThreshold(f64),
    /// Costs of rounds that are no times.
    #[error("costs of rounds need a verification, and times that are finite and not negative")]
    RoundCosts,
    /// A replay of rounds that are longer than what was recorded.
    #[error(
        "the rule may draft `{longest}` candidates a round, but `{recorded}` were recorded: \
         record longer rollouts"
    )]
    NotRecorded {
        /// The rule's greatest number of candidates.
        longest: usize,
        /// The greatest number recorded.
        recorded: usize,
    },
    /// Costs that do not say what a drafter's forwards take.
    #[error("what a forward of the drafter `{drafter}` costs is not known")]
    NoDraftPrice {
        /// The drafter's name.
        drafter: String,
    },
    /// A replay of a rule that reads an acceptance head, from recordings without one.
    #[error("the rule reads an acceptance head, but the rollouts were recorded without one")]
    NoHeadRecorded,
    /// A replay of a tree of which what is read or proposed depends on more than its shape.
    #[error(
        "the tree `{0}` is not replayed: what is proposed of it depends on probabilities that are not \
         recorded; list its nodes, as in `2-1.1`"
    )]
    NoStaticTree(String),
    /// A replay of a static tree along responses without the ranks of their tokens.
    #[error(
        "a static tree is replayed by the ranks of a response's tokens among the drafter's, which were \
         not recorded: record greedy responses again; sampled ones are not replayed in trees"
    )]
    NoRanksRecorded,
    /// Nothing to fit a rule to.
    #[error(
        "no candidate was recorded: there is nothing to fit a rule to; hint: allow more new tokens, since \
         the last one is the target's own"
    )]
    NothingRecorded,
    /// A first candidate length outside its bounds.
    #[error("initial_length `{initial_length}` must lie within the bounds, `{min}` to `{max}`")]
    InitialLength {
        /// The length asked for.
        initial_length: usize,
        /// The lower bound given.
        min: usize,
        /// The upper bound given.
        max: usize,
    },
    /// An entropy threshold that is negative or not a number.
    #[error("entropy_threshold must be 0 or more and finite, not `{0}`")]
    EntropyThreshold(f64),
    /// A scale of the entropy that is not positive.
    #[error("entropy_scale must be positive and finite, not `{0}`")]
    EntropyScale(f64),
    /// An entropy that is never looked at.
    #[error("check_interval must be at least 1")]
    CheckInterval,
    /// A least worth of a draft forward that is negative or not a number.
    #[error("least_worth must be 0 or more tokens and finite, not `{0}`")]
    LeastWorth(f64),
    /// Steps that make no function.
    #[error(
        "a step function needs ascending finite edges and one value more than edges, \
         not `{num_edges}` edges and `{num_values}` values"
    )]
    Steps {
        /// The number of edges given.
        num_edges: usize,
        /// The number of values given.
        num_values: usize,
    },
    /// A scale and bias that make no calibration.
    #[error(
        "a calibration's `scale` must be 0 or more and finite, and its `bias` finite, \
         not `{scale}` and `{bias}`"
    )]
    Platt {
        /// The scale given.
        scale: f64,
        /// The bias given.
        bias: f64,
    },
    /// Knots that make no calibration.
    #[error(
        "a calibration needs as many `calibrated` as `predicted` values, one at least, all between \
         0 and 1, `predicted` ascending and `calibrated` not descending"
    )]
    Knots,
    /// A confidence threshold that is not a probability.
    #[error("confidence_threshold must lie between 0 and 1, not `{0}`")]
    ConfidenceThreshold(f64),
    /// An observation whose time is not a positive finite number of seconds.
    #[error("observation `{index}` must have a positive finite time, not `{seconds}` seconds")]
    ObservationTime {
        /// The observation's place in the slice given.
        index: usize,
        /// Its time in seconds.
        seconds: f64,
    },
    /// Draft and target forwards stand in (nearly) one proportion throughout, so their costs cannot
    /// be told apart.
    #[error(
        "`{num_observations}` observations do not separate the draft's cost from the target's: \
         pool runs of several candidate lengths"
    )]
    Collinear {
        /// How many observations were given.
        num_observations: usize,
    },
    /// A number outside its own interval.
    #[error("an interval must be finite and hold its value, not `{value}` in `{low}` to `{high}`")]
    Interval {
        /// The number.
        value: f64,
        /// The lower end.
        low: f64,
        /// The upper end.
        high: f64,
    },
    /// Counts for which N_draft + N_target = N + N_discarded does not hold, so that Eq. 2.3 must
    /// not be used.
    #[error(
        "draft and target forwards do not add up to tokens kept and discarded: \
         `{num_draft_forwards}` + `{num_target_forwards}` != `{num_tokens}` + `{num_discarded}`"
    )]
    ForwardIdentity {
        /// N_draft.
        num_draft_forwards: usize,
        /// N_target.
        num_target_forwards: usize,
        /// N.
        num_tokens: usize,
        /// N_discarded.
        num_discarded: usize,
    },
}

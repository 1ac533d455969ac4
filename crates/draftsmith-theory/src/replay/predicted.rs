//! What an acceptance head predicts of a recorded candidate.

/// The chance that a candidate is accepted, as a head predicts it.
///
/// A head may read where its round began: what the target left behind there, or how many candidates
/// lie between. A candidate can be met in several rounds, which have accepted none, one or more of
/// the response's tokens before they leave it or get to the candidate.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum PredictedProb {
    /// There is no head, or nobody asks it.
    #[default]
    Nothing,
    /// The same, wherever the round began.
    InAnyRound(f64),
    /// By the number of the response's tokens that the round has accepted before the place at which
    /// the candidate is drafted, or its rollout begins; more than one.
    ByRound(Box<[f64]>),
}

impl PredictedProb {
    /// From predictions by the number of tokens before, which may be none.
    pub fn by_round(probs: Vec<f64>) -> Self {
        match probs[..] {
            [] => Self::Nothing,
            [prob] => Self::InAnyRound(prob),
            _ => Self::ByRound(probs.into()),
        }
    }

    /// That of a round which has accepted `num_before` of the response's tokens before the place;
    /// of one that has accepted more than was recorded, the last.
    pub fn in_round(&self, num_before: usize) -> Option<f64> {
        match self {
            Self::Nothing => None,
            Self::InAnyRound(prob) => Some(*prob),
            Self::ByRound(probs) => probs.get(num_before).or(probs.last()).copied(),
        }
    }

    /// All of them.
    pub fn all(&self) -> &[f64] {
        match self {
            Self::Nothing => &[],
            Self::InAnyRound(prob) => std::slice::from_ref(prob),
            Self::ByRound(probs) => probs,
        }
    }

    /// Changes each of them.
    pub(super) fn map(&mut self, change: impl Fn(f64) -> f64) {
        match self {
            Self::Nothing => (),
            Self::InAnyRound(prob) => *prob = change(*prob),
            Self::ByRound(probs) => probs.iter_mut().for_each(|prob| *prob = change(*prob)),
        }
    }
}

impl From<Option<f64>> for PredictedProb {
    fn from(prob: Option<f64>) -> Self {
        prob.map_or(Self::Nothing, Self::InAnyRound)
    }
}

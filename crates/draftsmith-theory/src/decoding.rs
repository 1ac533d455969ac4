//! How a model's next token is chosen: the repetition penalty first, then the most probable token or
//! a draw.
//!
//! The order is that of HF transformers, where the penalty is a processor of logits, for greedy
//! decoding too, and temperature, top-k, top-p and min-p are warpers behind it. A penalty makes a
//! token's chance depend on which tokens stand before it: of a node in a tree that is its own path,
//! for target and drafter alike.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::distribution::argmax;
use crate::{Sampling, TheoryError};

/// Penalties within these bounds make no logit infinite.
const PENALTIES: RangeInclusive<f64> = 0.01..=100.0;

/// How a model's next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Decoding {
    /// How a token is chosen from logits, behind the penalty.
    pub choice: TokenChoice,
    /// Divides the logits of all tokens that stand before, in prompt and answer, where they are
    /// positive, and multiplies them where they are negative (Keskar et al. 2019). 1 changes nothing.
    pub repetition_penalty: f64,
}

/// How a token is chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenChoice {
    /// The most probable token, the first of equals.
    Greedy,
    /// A token drawn from the warped distribution.
    Sampled(Sampling),
}

/// As it stands in files, which name a penalty where there is one.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    Choice(TokenChoice),
    Penalised { choice: TokenChoice, repetition_penalty: f64 },
}

impl From<Stored> for Decoding {
    fn from(stored: Stored) -> Self {
        match stored {
            Stored::Choice(choice) => Self { choice, repetition_penalty: 1.0 },
            Stored::Penalised { choice, repetition_penalty } => Self { choice, repetition_penalty },
        }
    }
}

impl From<Decoding> for Stored {
    fn from(decoding: Decoding) -> Self {
        let Decoding { choice, repetition_penalty } = decoding;
        match decoding.is_penalised() {
            false => Self::Choice(choice),
            true => Self::Penalised { choice, repetition_penalty },
        }
    }
}

impl Decoding {
    /// The most probable token, always, without a penalty.
    pub const GREEDY: Self = Self { choice: TokenChoice::Greedy, repetition_penalty: 1.0 };

    /// Draws, without a penalty.
    pub const fn sampled(sampling: Sampling) -> Self {
        Self { choice: TokenChoice::Sampled(sampling), repetition_penalty: 1.0 }
    }

    /// The same under a penalty.
    #[must_use]
    pub const fn penalising(self, repetition_penalty: f64) -> Self {
        Self { repetition_penalty, ..self }
    }

    /// Whether nothing is drawn.
    pub fn is_greedy(&self) -> bool {
        self.choice == TokenChoice::Greedy
    }

    /// Whether a token's chance depends on which tokens stand before it, besides the model's logits.
    pub fn is_penalised(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// Checks penalty and sampling settings.
    ///
    /// # Errors
    /// Names the first setting that is out of its range.
    pub fn validate(&self) -> Result<(), TheoryError> {
        if !PENALTIES.contains(&self.repetition_penalty) {
            return Err(TheoryError::RepetitionPenalty(self.repetition_penalty));
        }
        match self.choice {
            TokenChoice::Greedy => Ok(()),
            TokenChoice::Sampled(sampling) => sampling.validate(),
        }
    }

    /// The logits that a token is chosen by, which stands behind the tokens `before`, in any order:
    /// the model's own where there is no penalty. In f32, as transformers computes them.
    pub fn penalised<'l>(
        &self,
        logits: &'l [f32],
        before: impl IntoIterator<Item = u32>,
    ) -> Cow<'l, [f32]> {
        if !self.is_penalised() {
            return Cow::Borrowed(logits);
        }
        let penalty = self.repetition_penalty as f32;
        let mut penalised = logits.to_vec();
        // From the model's own, so that a token that stands there twice is penalised once.
        for token in before {
            if let Some(logit) = logits.get(token as usize) {
                penalised[token as usize] =
                    if *logit < 0.0 { logit * penalty } else { logit / penalty };
            }
        }
        Cow::Owned(penalised)
    }

    /// The probabilities a token is chosen with, as served: of one token 1 when greedy, else
    /// [`Sampling::probs`]. `logits` are [penalised](Self::penalised).
    ///
    /// # Panics
    /// As [`Sampling::probs`].
    pub fn probs(&self, logits: &[f32]) -> Vec<f64> {
        self.sampled_probs(logits).unwrap_or_else(|| {
            let mut probs = vec![0.0; logits.len()];
            probs[argmax(logits) as usize] = 1.0;
            probs
        })
    }

    /// What a token is drawn from; None when greedy, where nothing is drawn. `logits` are
    /// [penalised](Self::penalised).
    ///
    /// # Panics
    /// As [`Sampling::probs`].
    pub fn sampled_probs(&self, logits: &[f32]) -> Option<Vec<f64>> {
        match self.choice {
            TokenChoice::Greedy => None,
            TokenChoice::Sampled(sampling) => Some(sampling.probs(logits)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_penalty_moves_what_was_met_towards_less_and_each_token_once() {
        let logits = [2.0, -2.0, 0.0, f32::NEG_INFINITY, 1.5];
        let penalised = |penalty| {
            let decoding = Decoding::GREEDY.penalising(penalty);
            decoding.penalised(&logits, [0, 1, 0, 2, 3, 0, 77]).into_owned()
        };
        assert_eq!(penalised(2.0), [1.0, -4.0, 0.0, f32::NEG_INFINITY, 1.5]);
        assert_eq!(penalised(0.5), [4.0, -1.0, 0.0, f32::NEG_INFINITY, 1.5]);
        assert!(matches!(Decoding::GREEDY.penalised(&logits, [0]), Cow::Borrowed(_)));
        // It changes the argmax, and with it what greedy decoding gives.
        let decoding = Decoding::GREEDY.penalising(2.0);
        assert_eq!(decoding.probs(&logits), [1.0, 0.0, 0.0, 0.0, 0.0]);
        let after = decoding.penalised(&logits, [0]);
        assert_eq!(decoding.probs(&after), [0.0, 0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for penalty in [0.01, 1.0, 1.3, 100.0] {
            assert_eq!(Decoding::GREEDY.penalising(penalty).validate(), Ok(()));
        }
        for penalty in [-1.0, 0.0, 1e-9, 101.0, f64::NAN, f64::INFINITY] {
            let refused = Decoding::GREEDY.penalising(penalty).validate();
            assert!(matches!(refused, Err(TheoryError::RepetitionPenalty(_))));
        }
        let bad = Sampling { temperature: 0.0, ..Sampling::default() };
        assert!(Decoding::sampled(bad).validate().is_err());
    }
}

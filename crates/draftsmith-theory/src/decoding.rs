//! How a model's next token is chosen: first the repetition penalty, then the argmax or a draw.
//!
//! The order is that of HF transformers: the penalty comes first, in greedy decoding too, and
//! temperature, top-k, top-p and min-p follow. The penalty depends on all earlier tokens. For a
//! candidate in a tree these include its ancestors, both for the target and for the drafter.
//!
//! Signals for stop rules are computed from penalised logits. Acceptance heads get logits without
//! the penalty, as in training.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::distribution::argmax;
use crate::{Result, Sampling, TheoryError};

/// The allowed repetition penalties, small enough to keep every logit finite.
const PENALTIES: RangeInclusive<f64> = 0.01..=100.0;

/// The settings by which a model's next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "StoredDecoding", into = "StoredDecoding")]
pub struct Decoding {
    /// The choice of a token from the penalised logits.
    pub choice: TokenChoice,
    /// The repetition penalty (Keskar et al. 2019). For every token in the prompt and the response
    /// so far, it divides a positive logit and multiplies a negative one. 1 changes nothing.
    pub repetition_penalty: f64,
}

/// A way to choose a token from logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenChoice {
    /// The most probable token is chosen; among equals, the one with the lowest id.
    Greedy,
    /// A token is drawn from the distribution after temperature and filters.
    Sampled(Sampling),
}

/// The form of [`Decoding`] in files, where a penalty of 1 is omitted.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum StoredDecoding {
    Choice(TokenChoice),
    Penalised { choice: TokenChoice, repetition_penalty: f64 },
}

impl From<StoredDecoding> for Decoding {
    fn from(stored: StoredDecoding) -> Self {
        let (choice, repetition_penalty) = match stored {
            StoredDecoding::Choice(choice) => (choice, 1.0),
            StoredDecoding::Penalised { choice, repetition_penalty: penalty } => (choice, penalty),
        };
        Self { choice, repetition_penalty }
    }
}

impl From<Decoding> for StoredDecoding {
    fn from(decoding: Decoding) -> Self {
        let Decoding { choice, repetition_penalty } = decoding;
        if decoding.is_penalised() {
            Self::Penalised { choice, repetition_penalty }
        } else {
            Self::Choice(choice)
        }
    }
}

impl From<Sampling> for Decoding {
    fn from(sampling: Sampling) -> Self {
        Self::sampled(sampling)
    }
}

impl Decoding {
    /// Greedy decoding without a penalty.
    pub const GREEDY: Self = Self { choice: TokenChoice::Greedy, repetition_penalty: 1.0 };

    /// Returns sampled decoding without a penalty.
    pub const fn sampled(sampling: Sampling) -> Self {
        Self { choice: TokenChoice::Sampled(sampling), repetition_penalty: 1.0 }
    }

    /// Returns the same decoding with this repetition penalty.
    #[must_use]
    pub const fn penalising(self, repetition_penalty: f64) -> Self {
        Self { repetition_penalty, ..self }
    }

    /// Returns the sampling settings; greedy decoding has temperature 0.
    pub fn sampling(&self) -> Sampling {
        match self.choice {
            TokenChoice::Greedy => Sampling { temperature: 0.0, ..Sampling::default() },
            TokenChoice::Sampled(sampling) => sampling,
        }
    }

    /// Returns the sampling settings under which labels compare the models: those of decoding, or
    /// temperature 1 if greedy.
    pub fn sampling_of_labels(&self) -> Sampling {
        if self.is_greedy() { Sampling::default() } else { self.sampling() }
    }

    /// Returns whether decoding is greedy.
    pub fn is_greedy(&self) -> bool {
        self.choice == TokenChoice::Greedy
    }

    /// Returns whether there is a repetition penalty.
    pub fn is_penalised(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// Lists the filters and the penalty in words, such as `top-p 0.9`.
    pub fn filters_text(&self) -> Vec<String> {
        let Sampling { top_p, top_k, min_p, .. } = self.sampling();
        let penalty = self.repetition_penalty;
        let parts = [
            (top_p < 1.0).then(|| format!("top-p {top_p}")),
            top_k.map(|top_k| format!("top-k {top_k}")),
            min_p.map(|min_p| format!("min-p {min_p}")),
            self.is_penalised().then(|| format!("repetition penalty {penalty}")),
        ];
        parts.into_iter().flatten().collect()
    }

    /// Checks the penalty and the sampling settings.
    ///
    /// # Errors
    /// If a setting is outside its range. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        TheoryError::check(
            PENALTIES.contains(&self.repetition_penalty),
            "repetition_penalty",
            "lie between 0.01 and 100 (1 changes nothing)",
            self.repetition_penalty,
        )?;
        match self.choice {
            TokenChoice::Greedy => Ok(()),
            TokenChoice::Sampled(sampling) => sampling.validate(),
        }
    }

    /// Applies the repetition penalty to `logits`, in f32 as HF transformers does. `before` yields
    /// the tokens of the prompt and the response so far, in any order. A repeated token is
    /// penalised once. Without a penalty the result borrows `logits`.
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
        // Read from the unpenalised logits, so that a token that occurs twice is penalised once.
        for token in before {
            if let Some(logit) = logits.get(token as usize) {
                penalised[token as usize] =
                    if *logit < 0.0 { logit * penalty } else { logit / penalty };
            }
        }
        Cow::Owned(penalised)
    }

    /// Returns the probability with which each token is chosen: [`Sampling::probs`], or 1 for the
    /// argmax if decoding is greedy. `logits` must be [penalised](Self::penalised) already.
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

    /// Returns the distribution from which a token is drawn; None if decoding is greedy. `logits`
    /// must be [penalised](Self::penalised) already.
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
    fn a_penalty_lowers_the_logit_of_each_earlier_token_once() {
        let logits = [2.0, -2.0, 0.0, f32::NEG_INFINITY, 1.5];
        let penalised = |penalty| {
            let decoding = Decoding::GREEDY.penalising(penalty);
            decoding.penalised(&logits, [0, 1, 0, 2, 3, 0, 77]).into_owned()
        };
        assert_eq!(penalised(2.0), [1.0, -4.0, 0.0, f32::NEG_INFINITY, 1.5]);
        assert_eq!(penalised(0.5), [4.0, -1.0, 0.0, f32::NEG_INFINITY, 1.5]);
        assert!(matches!(Decoding::GREEDY.penalised(&logits, [0]), Cow::Borrowed(_)));
        // It changes the argmax, and so greedy decoding.
        let decoding = Decoding::GREEDY.penalising(2.0);
        assert_eq!(decoding.probs(&logits), [1.0, 0.0, 0.0, 0.0, 0.0]);
        let after = decoding.penalised(&logits, [0]);
        assert_eq!(decoding.probs(&after), [0.0, 0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn settings_out_of_range_are_errors() {
        for penalty in [0.01, 1.0, 1.3, 100.0] {
            assert_eq!(Decoding::GREEDY.penalising(penalty).validate(), Ok(()));
        }
        for penalty in [-1.0, 0.0, 1e-9, 101.0, f64::NAN, f64::INFINITY] {
            let error = Decoding::GREEDY.penalising(penalty).validate().expect_err("out of range");
            assert!(error.to_string().starts_with("repetition_penalty must lie"), "{error}");
        }
        let bad = Sampling { temperature: 0.0, ..Sampling::default() };
        assert!(Decoding::sampled(bad).validate().is_err());
    }
}

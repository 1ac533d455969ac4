//! The interface between the decoding loop and a stop rule.

use serde::Serialize;

use super::signals::{DraftSignals, SignalNeeds};
use crate::serialized::deserialize_by_new;
use crate::{Result, TheoryError};

/// The minimum and maximum number of candidates in a round, both inclusive; `min` <= `max` and 1 <=
/// `max`.
///
/// The decoding loop applies them. Below `min` it ignores the rule and continues, and at `max` it
/// stops. With a minimum of 0, a rule that stops before a draw can end a round without candidates.
/// For other rules a minimum of 0 acts like 1. The loop also stops at an end token and at the token
/// limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bounds {
    /// The minimum number of candidates.
    pub min: usize,
    /// The maximum number of candidates.
    pub max: usize,
}

deserialize_by_new!(Bounds { min: usize, max: usize });

impl Default for Bounds {
    /// Returns bounds of 1 to 20 candidates. The code of SpecDec++ has 2 to 20, but its minimum has
    /// no effect, because it never stops at step 1.
    fn default() -> Self {
        Self { min: 1, max: 20 }
    }
}

impl Bounds {
    /// Creates bounds of `min` to `max` candidates.
    ///
    /// # Errors
    /// Unless `min` <= `max` and 1 <= `max`.
    pub fn new(min: usize, max: usize) -> Result<Self> {
        TheoryError::ensure(1 <= max && min <= max, || {
            format!(
                "candidate length bounds must satisfy min <= max and 1 <= max, not min `{min}`, max `{max}`"
            )
        })?;
        Ok(Self { min, max })
    }
}

/// The outcome of a round, for rules that adapt to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundEnd {
    /// The number of leading candidates that the target accepted.
    pub num_accepted: usize,
    /// The number of tokens kept, after any cut by an end token or the token limit.
    pub num_kept: usize,
}

/// A rule that decides after each candidate whether the round's draft phase ends.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait StopRule: Send {
    /// Returns the minimum and maximum candidate length that the decoding loop enforces for this
    /// rule.
    fn bounds(&self) -> Bounds;

    /// Forgets the last sequence. Called before a sequence's first round.
    fn begin_sequence(&mut self) {}

    /// Forgets the last round. Called before a round's first candidate, except in looked-up rounds,
    /// to which stop rules do not apply.
    fn begin_round(&mut self) {}

    /// Returns whether this round skips drafting, even if the minimum is above 0. The target then
    /// decodes one token by itself. Called before the round's first draft forward.
    fn skips_drafting(&mut self) -> bool {
        false
    }

    /// Returns whether the round ends after the last of `candidates`, which are the round's
    /// candidates so far.
    ///
    /// Called once after every candidate, because the rule may accumulate signals. Below the
    /// minimum the answer is ignored.
    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool;

    /// Returns whether the round ends after the last of `candidates`. At that time a draft forward
    /// has read this candidate, and no other candidate has been drawn from the forward. Nothing
    /// drawn is withheld, so the output stays lossless.
    ///
    /// `signals` belong to the forward that read the last candidate, so an
    /// [`HeadEstimate::OfRead`](crate::HeadEstimate::OfRead) is about that candidate. Called before
    /// every draw. Below the minimum the answer is ignored.
    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        false
    }

    /// Tells the rule the outcome of the round. Called after looked-up rounds too.
    fn end_round(&mut self, end: RoundEnd) {}

    /// Returns the signals that the rule reads, which are the same in every round.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}

/// Test helpers that ask a rule as the decoding loop does.
#[cfg(test)]
pub(super) mod test_rounds {
    use super::super::signals::HeadEstimate;
    use super::{DraftSignals, StopRule};

    /// Returns the candidate length of a round whose draft forwards give `signals`, the first about
    /// candidate 1; None if the rule never stops.
    pub(in crate::stop_rule) fn round_length(
        rule: &mut dyn StopRule,
        signals: &[DraftSignals],
    ) -> Option<usize> {
        rule.begin_round();
        let mut candidates = Vec::new();
        for signals in signals {
            let of_drawn = |estimate: &HeadEstimate| matches!(estimate, HeadEstimate::OfDrawn(_));
            let of_read = signals.acceptance_prob.filter(|estimate| !of_drawn(estimate));
            let before_draw = DraftSignals { acceptance_prob: of_read, ..*signals };
            if rule.stops_before_draw(&candidates, &before_draw) {
                return Some(candidates.len());
            }
            candidates.push(0);
            if rule.stops(&candidates, signals) {
                return Some(candidates.len());
            }
        }
        None
    }
}

//! The interface between the round loop and a stop rule.

use serde::Serialize;

use super::signals::{DraftSignals, SignalNeeds};
use crate::TheoryError;
use crate::serialized::deserialize_by_new;

/// The minimum and maximum number of candidates in a round, both inclusive; `min` <= `max` and 1 <=
/// `max`.
///
/// The round loop applies them: below `min` it ignores the rule and continues, and at `max` it
/// stops. A minimum of 0 lets a rule that stops before a draw end a round without candidates; for
/// other rules it equals 1. The loop also stops at an end token and at the token limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bounds {
    /// The minimum number of candidates.
    pub min: usize,
    /// The maximum number of candidates.
    pub max: usize,
}

deserialize_by_new!(Bounds { min: usize, max: usize });

impl Default for Bounds {
    /// Returns bounds of 1 to 20 candidates. The authors' code has 2 to 20, but its minimum has no
    /// effect, because step 1 never stops.
    fn default() -> Self {
        Self { min: 1, max: 20 }
    }
}

impl Bounds {
    /// Creates bounds of `min` to `max` candidates.
    ///
    /// # Errors
    /// Unless `min` <= `max` and 1 <= `max`.
    pub fn new(min: usize, max: usize) -> Result<Self, TheoryError> {
        if 1 <= max && min <= max {
            Ok(Self { min, max })
        } else {
            Err(TheoryError::Bounds { min, max })
        }
    }
}

/// How a round went, for rules that adapt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundEnd {
    /// Leading candidates that the target accepted.
    pub num_accepted: usize,
    /// Tokens kept, after any cut by an end token or the limit.
    pub num_kept: usize,
}

/// Decides, after each included candidate, whether the round ends there.
pub trait StopRule {
    /// Returns the minimum and maximum candidate length that the round loop enforces for this rule.
    fn bounds(&self) -> Bounds;

    /// Forgets the last sequence. Called before a sequence's first round.
    fn begin_sequence(&mut self) {}

    /// Forgets the last round. Called before a round's first candidate, except in looked-up rounds,
    /// to which stop rules do not apply.
    fn begin_round(&mut self) {}

    /// Returns whether this round has no candidates, even if that is below the minimum: the target
    /// then decodes one token by itself. Called before the round's first draft forward.
    fn skips_drafting(&mut self) -> bool {
        false
    }

    /// Returns whether the round ends after the last of `candidates`, those of the round so far.
    ///
    /// Called once after every candidate, even below the minimum, where the answer is ignored: the
    /// rule may accumulate.
    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool;

    /// Returns whether the round ends after the last of `candidates`, once the draft has read it
    /// and before another candidate is drawn from that forward. A candidate that was never drawn is
    /// not withheld, so the output stays lossless.
    ///
    /// `signals` belong to the forward that read the last candidate, to which
    /// [`HeadEstimate::OfRead`](crate::HeadEstimate::OfRead) refers. Called before every draw, even
    /// below the minimum, where the answer is ignored.
    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        let _ = (candidates, signals);
        false
    }

    /// Reports how the round went. Called after looked-up rounds too.
    fn end_round(&mut self, end: RoundEnd) {
        let _ = end;
    }

    /// Returns the signals that the rule reads; the same in every round.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}

/// Asks a rule as the round loop does.
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

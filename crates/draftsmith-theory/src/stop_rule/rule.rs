//! What a stop rule is asked.

use super::bounds::Bounds;
use super::signals::{DraftSignals, SignalNeeds};

/// How a round went, as a rule may learn from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundEnd {
    /// Leading candidates the target accepted.
    pub num_accepted: usize,
    /// Tokens kept, after any cut by an end token or the limit.
    pub num_kept: usize,
}

/// Decides, after each included candidate, whether the round ends there.
pub trait StopRule {
    /// The candidate lengths the round loop keeps this rule within.
    fn bounds(&self) -> Bounds;

    /// Forgets the last sequence. Called before a sequence's first round.
    fn begin_sequence(&mut self) {}

    /// Forgets the last round. Called before a round's first candidate, unless candidates are looked
    /// up instead: that round is none of the rule's.
    fn begin_round(&mut self) {}

    /// True makes this a round without candidates, which the bounds do not forbid: the target
    /// decodes alone. Asked before the round's first draft forward.
    fn skips_drafting(&mut self) -> bool {
        false
    }

    /// True ends the round after the last of `candidates`, the round's candidates so far.
    ///
    /// Called once after every candidate, also below the minimum, where the answer is not heeded: a
    /// rule may accumulate.
    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool;

    /// True ends the round after the last of `candidates` although the draft has read it and could
    /// name another: that one is not drawn, so it is not withheld either.
    ///
    /// `signals` are those of the draft forward that read the last candidate, which is the one that
    /// [`HeadEstimate::OfRead`](crate::HeadEstimate::OfRead) is about. Called before every draw, also below the minimum, where
    /// the answer is not heeded.
    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        let _ = (candidates, signals);
        false
    }

    /// How the round went, also one that the rule was not asked about.
    fn end_round(&mut self, end: RoundEnd) {
        let _ = end;
    }

    /// The signals the rule reads; the same in every round.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}

/// Rounds as the round loop asks about them.
#[cfg(test)]
pub(super) mod test_rounds {
    use super::super::signals::HeadEstimate;
    use super::{DraftSignals, StopRule};

    /// The candidate length of a round whose draft forwards give `signals`, the first about
    /// candidate 1; None if the rule would go on.
    pub(in crate::stop_rule) fn round_length(
        rule: &mut dyn StopRule,
        signals: &[DraftSignals],
    ) -> Option<usize> {
        rule.begin_round();
        let mut candidates = Vec::new();
        for signals in signals {
            let of_drawn = |estimate: &HeadEstimate| matches!(estimate, HeadEstimate::OfDrawn(_));
            let told = signals.acceptance_prob.filter(|estimate| !of_drawn(estimate));
            let before_draw = DraftSignals { acceptance_prob: told, ..*signals };
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

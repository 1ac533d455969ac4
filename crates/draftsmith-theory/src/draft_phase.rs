//! The draft phase of a round: when the stop rule is asked, and when another candidate is drawn.
//!
//! Decoding, recording and replay run this one state machine over a [`CandidateSource`], so they
//! ask the rule the same questions and draw in the same order. A step is one draft forward, or a
//! recorded one in replay. The caller takes the steps between calls of [`DraftPhase::advance`], for
//! one sequence or for a batch.
//!
//! The target verifies every drawn candidate. Rules, bounds, end tokens and the remaining number of
//! tokens decide only whether another candidate is drawn.
//!
//! [`TextEnd`] says whether a candidate ends the text, for example by a stop string; decoding
//! itself sees only token ids. A draft phase ends at such a candidate. Look-ups and the inner nodes
//! of a tree may run past it, and the round's tokens are then cut there.

use std::fmt;

use crate::{DraftSignals, HeadEstimate, SignalNeeds, StopRule};

/// The source of a draft phase's candidates.
pub trait CandidateSource {
    /// The error type of the drafter.
    type Error;

    /// Draws a candidate from the distribution of the last step.
    fn draw(&mut self, needs: SignalNeeds) -> DrawnToken;

    /// Returns the acceptance probability of the newly drawn `candidate`, predicted by a head that
    /// needs no further draft forward ([`HeadTiming::AtDraw`](crate::HeadTiming::AtDraw)). None
    /// without such a head.
    ///
    /// # Errors
    /// If the drafter fails.
    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, Self::Error>;
}

/// A candidate that was just drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawnToken {
    /// The candidate's token id.
    pub token_id: u32,
    /// The draft probability [`DraftSignals::candidate_prob`]; None if the rule does not need it.
    pub candidate_prob: Option<f64>,
}

/// A way to end a text without an end token, for example at a stop string.
pub trait TextEnd: fmt::Debug {
    /// Returns whether the response ends at its last token. `last_first` yields the tokens of
    /// prompt and response, the last one first.
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool;
}

/// A [`TextEnd`] for tokens that continue a prefix.
#[derive(Debug, Clone, Copy)]
pub struct EndAfter<'a> {
    /// The condition that ends the whole text.
    pub end: &'a dyn TextEnd,
    /// The first tokens of the text, which come before those of the iterator.
    pub prefix: &'a [u32],
}

impl TextEnd for EndAfter<'_> {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.end.is_reached(&mut last_first.chain(self.prefix.iter().rev().copied()))
    }
}

/// Limits that end a draft phase regardless of the rule.
#[derive(Debug, Clone, Copy)]
pub struct DraftLimits<'a> {
    /// The maximum number of candidates that could be kept before the target's own token.
    pub room: usize,
    /// The ids of tokens that end a response. Nothing after such a token is kept.
    pub eos_token_ids: &'a [u32],
    /// A further condition that ends a response; None if only end tokens do.
    pub text_end: Option<&'a dyn TextEnd>,
}

impl DraftLimits<'_> {
    /// Returns these limits with room for at most `most` candidates.
    #[must_use]
    pub fn upto(self, most: usize) -> Self {
        Self { room: self.room.min(most), ..self }
    }

    /// Returns whether the last of `tokens` ends the response.
    pub fn is_end(&self, tokens: &[u32]) -> bool {
        tokens.last().is_some_and(|last| self.eos_token_ids.contains(last))
            || self.text_end.is_some_and(|end| end.is_reached(&mut tokens.iter().rev().copied()))
    }
}

/// The state of a draft phase, which either waits for a step or is over.
#[derive(Debug, Clone)]
pub struct DraftPhase {
    needs: SignalNeeds,
    /// The minimum number of candidates, below which the rule cannot stop the phase.
    min: usize,
    /// The maximum number of candidates.
    max: usize,
    num_candidates: usize,
    num_steps: usize,
    is_over: bool,
}

impl DraftPhase {
    /// Begins the draft phase of a round.
    pub fn begin(rule: &mut dyn StopRule, limits: DraftLimits<'_>) -> Self {
        let (bounds, needs) = (rule.bounds(), rule.needs());
        rule.begin_round();
        let max = if rule.skips_drafting() { 0 } else { bounds.max.min(limits.room) };
        let (num_candidates, num_steps) = (0, 0);
        Self { needs, min: bounds.min, max, num_candidates, num_steps, is_over: max == 0 }
    }

    /// Returns whether the phase needs another step: a draft forward over the sequence and the
    /// candidates so far.
    pub fn needs_step(&self) -> bool {
        !self.is_over
    }

    /// Returns the signals that the next step must provide.
    pub fn needs(&self) -> SignalNeeds {
        self.needs
    }

    /// Returns the number of candidates so far.
    pub fn num_candidates(&self) -> usize {
        self.num_candidates
    }

    /// Returns the greatest number of candidates that can still be drawn.
    pub fn num_left(&self) -> usize {
        self.max - self.num_candidates
    }

    /// Returns the number of steps so far.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Continues after a step with these `signals`: draws a candidate and appends it to `tokens`,
    /// unless the rule stops before the draw.
    ///
    /// The rule is asked before and after each draw. Below the minimum number of candidates its
    /// answer is ignored. A candidate that ends the response ends the phase unasked.
    ///
    /// # Errors
    /// If the source fails.
    ///
    /// # Panics
    /// If the phase is over.
    pub fn advance<S: CandidateSource>(
        &mut self,
        source: &mut S,
        mut signals: DraftSignals,
        rule: &mut dyn StopRule,
        limits: DraftLimits<'_>,
        tokens: &mut Vec<u32>,
    ) -> Result<(), S::Error> {
        assert!(self.needs_step(), "the draft phase is over");
        let num_before = tokens.len() - self.num_candidates;
        self.num_steps += 1;
        let stops = rule.stops_before_draw(&tokens[num_before..], &signals);
        if stops && self.num_candidates >= self.min {
            self.is_over = true;
            return Ok(());
        }
        let DrawnToken { token_id, candidate_prob } = source.draw(self.needs);
        signals.candidate_prob = candidate_prob;
        tokens.push(token_id);
        self.num_candidates += 1;
        if limits.is_end(tokens) {
            self.is_over = true;
            return Ok(());
        }
        if self.needs.acceptance_prob
            && let Some(prob) = source.predict_acceptance(token_id)?
        {
            signals.acceptance_prob = Some(HeadEstimate::OfDrawn(prob));
        }
        let stops = rule.stops(&tokens[num_before..], &signals);
        let may_stop = self.num_candidates >= self.min;
        self.is_over = (stops && may_stop) || self.num_candidates == self.max;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::Bounds;

    const END: u32 = 9;

    /// A script of candidates, and a log of the calls.
    struct Scripted(Vec<u32>, Vec<String>);

    impl CandidateSource for Scripted {
        type Error = Infallible;

        fn draw(&mut self, _needs: SignalNeeds) -> DrawnToken {
            self.1.push("draw".into());
            DrawnToken { token_id: self.0.remove(0), candidate_prob: Some(0.5) }
        }

        fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, Infallible> {
            self.1.push(format!("predict {candidate}"));
            Ok(Some(0.25))
        }
    }

    /// Stops at a given length, before or after a draw.
    struct Stopping {
        after: Option<usize>,
        before: Option<usize>,
        bounds: Bounds,
        skips: bool,
    }

    impl StopRule for Stopping {
        fn bounds(&self) -> Bounds {
            self.bounds
        }

        fn skips_drafting(&mut self) -> bool {
            self.skips
        }

        fn needs(&self) -> SignalNeeds {
            SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() }
        }

        fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
            assert_eq!(signals.acceptance_prob, Some(HeadEstimate::OfDrawn(0.25)));
            assert_eq!(signals.candidate_prob, Some(0.5));
            self.after == Some(candidates.len())
        }

        fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
            assert_eq!(*signals, DraftSignals::default());
            self.before == Some(candidates.len())
        }
    }

    fn run(mut rule: Stopping, room: usize, script: &[u32]) -> (Vec<u32>, usize, Vec<String>) {
        let mut steps = Scripted(script.to_vec(), Vec::new());
        let mut tokens = vec![7, 8];
        let limits = DraftLimits { room, eos_token_ids: &[END], text_end: None };
        let mut phase = DraftPhase::begin(&mut rule, limits);
        while phase.needs_step() {
            assert_eq!(phase.num_candidates(), tokens.len() - 2);
            assert!(phase.needs().acceptance_prob);
            steps.1.push(format!("step {}", phase.num_candidates()));
            let signals = DraftSignals::default();
            let Ok(()) = phase.advance(&mut steps, signals, &mut rule, limits, &mut tokens);
        }
        (tokens.split_off(2), phase.num_steps(), steps.1)
    }

    fn never() -> Stopping {
        Stopping { after: None, before: None, bounds: Bounds { min: 1, max: 4 }, skips: false }
    }

    #[test]
    fn questions_and_draws_come_in_one_order() {
        let asked = ["step 0", "draw", "predict 1", "step 1", "draw", "predict 2"];
        let (candidates, num_steps, found) =
            run(Stopping { after: Some(2), ..never() }, 9, &[1, 2, 3]);
        assert_eq!((candidates.as_slice(), num_steps), (&[1, 2][..], 2));
        assert_eq!(found, asked);
        // Before the third draw: its forward is taken all the same.
        let (candidates, num_steps, found) =
            run(Stopping { before: Some(2), ..never() }, 9, &[1, 2, 3]);
        assert_eq!((candidates.as_slice(), num_steps), (&[1, 2][..], 3));
        assert_eq!(found, [&asked[..], &["step 2"]].concat());
    }

    #[test]
    fn bounds_room_end_tokens_and_skipping_end_a_phase() {
        let script = [1, 2, 3, 4, 5];
        let len = |rule, room, script: &[u32]| {
            let (candidates, num_steps, _) = run(rule, room, script);
            assert_eq!(candidates.len(), num_steps);
            num_steps
        };
        assert_eq!(len(never(), 9, &script), 4);
        assert_eq!(len(never(), 3, &script), 3);
        assert_eq!(len(never(), 0, &script), 0);
        assert_eq!(len(never(), 9, &[1, END, 3]), 2);
        assert_eq!(len(Stopping { skips: true, ..never() }, 9, &script), 0);
        let late = Bounds { min: 3, max: 4 };
        assert_eq!(len(Stopping { after: Some(1), bounds: late, ..never() }, 9, &script), 4);
        assert_eq!(len(Stopping { after: Some(3), bounds: late, ..never() }, 9, &script), 3);
    }
}

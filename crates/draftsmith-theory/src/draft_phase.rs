//! The draft phase of a round: which questions a stop rule is asked, in which order, and when
//! another candidate is drawn.
//!
//! It is written once, over what candidates are drawn from. Decoding steps a drafter's model,
//! recording lets one draft on from a rejected candidate, and replay reads recorded steps: so all
//! three ask the same questions and draw in the same order, and replay is decoding without models.
//!
//! A [`DraftPhase`] is advanced by a caller, who takes the steps: of one sequence, or of many in one
//! forward.
//!
//! A drawn candidate always goes to the target. Rules, bounds, end tokens and the room left decide
//! only whether another one is drawn.

use std::fmt;

use crate::{DraftSignals, HeadEstimate, SignalNeeds, StopRule};

/// What a draft phase draws its candidates from: the last step.
pub trait CandidateSource {
    /// Why it may fail; `Infallible` where it cannot.
    type Error;

    /// Draws a candidate from the last step.
    fn draw(&mut self, needs: SignalNeeds) -> Drawn;

    /// The acceptance probability that a head which looks ahead predicts for `candidate`, just
    /// drawn; None without such a head.
    ///
    /// # Errors
    /// If the drafter fails.
    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, Self::Error>;
}

/// A candidate, just drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token_id: u32,
    /// [`DraftSignals::candidate_prob`], where the rule needs it.
    pub candidate_prob: Option<f64>,
}

/// Says where a text ends that no end token ends: behind a stop string. Here texts are token ids.
pub trait TextEnd: fmt::Debug {
    /// Whether the last of all tokens that there are of prompt and response ends the response; they come
    /// from the last one back, and are read as far as is needed.
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool;
}

/// Where a text ends whose first tokens are elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct EndBehind<'a> {
    /// Of the whole text.
    pub end: &'a dyn TextEnd,
    /// Its first tokens.
    pub standing: &'a [u32],
}

impl TextEnd for EndBehind<'_> {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.end.is_reached(&mut last_first.chain(self.standing.iter().rev().copied()))
    }
}

/// What ends a draft phase whatever the rule says.
#[derive(Debug, Clone, Copy)]
pub struct DraftLimits<'a> {
    /// The most candidates that could be kept beside the target's own token.
    pub room: usize,
    /// Tokens that end a response: nothing after one can be kept.
    pub eos_token_ids: &'a [u32],
    /// What else ends a response, where whole texts are at hand.
    pub text_end: Option<&'a dyn TextEnd>,
}

impl DraftLimits<'_> {
    /// Whether nothing behind the last of `tokens` can be kept.
    pub fn is_end(&self, tokens: &[u32]) -> bool {
        tokens.last().is_some_and(|last| self.eos_token_ids.contains(last))
            || self.text_end.is_some_and(|end| end.is_reached(&mut tokens.iter().rev().copied()))
    }
}

/// A draft phase on its way: a state machine that waits for a step, or is over.
#[derive(Debug, Clone)]
pub struct DraftPhase {
    needs: SignalNeeds,
    /// The least candidates that a rule may stop at, and the most that are drawn.
    min: usize,
    max: usize,
    num_candidates: usize,
    num_steps: usize,
    is_over: bool,
}

impl DraftPhase {
    /// Begins a round's phase.
    pub fn begin(rule: &mut dyn StopRule, limits: DraftLimits<'_>) -> Self {
        let (bounds, needs) = (rule.bounds(), rule.needs());
        rule.begin_round();
        let max = if rule.skips_drafting() { 0 } else { bounds.max.min(limits.room) };
        let (num_candidates, num_steps) = (0, 0);
        Self { needs, min: bounds.min, max, num_candidates, num_steps, is_over: max == 0 }
    }

    /// Whether a step is to be taken: a draft forward over the sequence with the candidates so far.
    pub fn needs_step(&self) -> bool {
        !self.is_over
    }

    /// The signals that the step must give.
    pub fn needs(&self) -> SignalNeeds {
        self.needs
    }

    /// The candidates so far.
    pub fn num_candidates(&self) -> usize {
        self.num_candidates
    }

    /// The steps so far.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Goes on behind a step that gave `signals`: a candidate is drawn from it and appended to
    /// `tokens`, unless the rule stops before.
    ///
    /// The rule is asked before each draw and after it, also below its minimum, where the answer is
    /// not heeded. It is not asked about a candidate that ends the response, and so ends the phase by itself.
    ///
    /// # Errors
    /// If the source fails.
    ///
    /// # Panics
    /// If no step is to be taken.
    pub fn advance<S: CandidateSource>(
        &mut self,
        source: &mut S,
        mut signals: DraftSignals,
        rule: &mut dyn StopRule,
        limits: DraftLimits<'_>,
        tokens: &mut Vec<u32>,
    ) -> Result<(), S::Error> {
        assert!(self.needs_step(), "the draft phase is over");
        let num_standing = tokens.len() - self.num_candidates;
        self.num_steps += 1;
        let stops = rule.stops_before_draw(&tokens[num_standing..], &signals);
        if stops && self.num_candidates >= self.min {
            self.is_over = true;
            return Ok(());
        }
        let Drawn { token_id, candidate_prob } = source.draw(self.needs);
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
        let stops = rule.stops(&tokens[num_standing..], &signals);
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

    /// Candidates told in advance, whose number is each one's signal.
    struct Scripted(Vec<u32>, Vec<String>);

    impl CandidateSource for Scripted {
        type Error = Infallible;

        fn draw(&mut self, _needs: SignalNeeds) -> Drawn {
            self.1.push("draw".into());
            Drawn { token_id: self.0.remove(0), candidate_prob: Some(0.5) }
        }

        fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, Infallible> {
            self.1.push(format!("predict {candidate}"));
            Ok(Some(0.25))
        }
    }

    /// Stops where it is told to, before or after a draw.
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

//! The draft phase of a round: which questions a stop rule is asked, in which order, and when
//! another candidate is drawn.
//!
//! It is written once, over a source of steps. Decoding steps a drafter's model, recording lets one
//! draft on from a rejected candidate, and replay reads recorded steps: so all three ask the same
//! questions and draw in the same order, and replay is decoding without models.
//!
//! A drawn candidate always goes to the target. Rules, bounds, end tokens and the room left decide
//! only whether another one is drawn.

use crate::{DraftSignals, HeadEstimate, SignalNeeds, StopRule};

/// Where the steps of a draft phase come from.
pub trait DraftSteps {
    /// Why a step may fail; `Infallible` where none can.
    type Error;

    /// A draft forward over all of `tokens`, the sequence with this round's `num_candidates`
    /// candidates at its end: the needed signals there are before a draw.
    ///
    /// # Errors
    /// If the drafter fails.
    fn step(
        &mut self,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<DraftSignals, Self::Error>;

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

/// What ends a draft phase whatever the rule says.
#[derive(Debug, Clone, Copy)]
pub struct DraftLimits<'a> {
    /// The most candidates that could be kept beside the target's own token.
    pub room: usize,
    /// Tokens that end a response: nothing after one can be kept.
    pub eos_token_ids: &'a [u32],
}

/// Appends a round's candidates to `tokens`, the sequence that stands, and returns the number of
/// steps that it took.
///
/// The rule is asked before each draw and after it, also below its minimum, where the answer is not
/// heeded. It is not asked about an end token, which ends the phase by itself.
///
/// # Errors
/// If a step fails.
pub fn draft_phase<S: DraftSteps>(
    steps: &mut S,
    rule: &mut dyn StopRule,
    limits: DraftLimits<'_>,
    tokens: &mut Vec<u32>,
) -> Result<usize, S::Error> {
    let (bounds, needs, num_standing) = (rule.bounds(), rule.needs(), tokens.len());
    rule.begin_round();
    let max = if rule.skips_drafting() { 0 } else { bounds.max.min(limits.room) };
    for num_candidates in 0..max {
        let mut signals = steps.step(tokens, num_candidates, needs)?;
        let stops = rule.stops_before_draw(&tokens[num_standing..], &signals);
        if stops && num_candidates >= bounds.min {
            return Ok(num_candidates + 1);
        }
        let Drawn { token_id, candidate_prob } = steps.draw(needs);
        signals.candidate_prob = candidate_prob;
        tokens.push(token_id);
        if limits.eos_token_ids.contains(&token_id) {
            return Ok(num_candidates + 1);
        }
        if needs.acceptance_prob
            && let Some(prob) = steps.predict_acceptance(token_id)?
        {
            signals.acceptance_prob = Some(HeadEstimate::OfDrawn(prob));
        }
        let stops = rule.stops(&tokens[num_standing..], &signals);
        if stops && num_candidates + 1 >= bounds.min {
            return Ok(num_candidates + 1);
        }
    }
    Ok(max)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::Bounds;

    const END: u32 = 9;

    /// Candidates told in advance, whose number is each one's signal.
    struct Scripted(Vec<u32>, Vec<String>);

    impl DraftSteps for Scripted {
        type Error = Infallible;

        fn step(
            &mut self,
            tokens: &[u32],
            num_candidates: usize,
            _needs: SignalNeeds,
        ) -> Result<DraftSignals, Infallible> {
            assert_eq!(tokens.len(), 2 + num_candidates, "all of the sequence is read");
            self.1.push(format!("step {num_candidates}"));
            Ok(DraftSignals::default())
        }

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
        let limits = DraftLimits { room, eos_token_ids: &[END] };
        let Ok(num_steps) = draft_phase(&mut steps, &mut rule, limits, &mut tokens);
        (tokens.split_off(2), num_steps, steps.1)
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

//! What the drafter, its acceptance head and the target say at a place of a response.

use draftsmith_theory::{
    Bounds, Decoding, DraftSignals, HeadEstimate, RecordedCandidate, Sampling, SignalNeeds,
    StopRule, TokenChoice, argmax, largest_prob,
};

use super::RecordOptions;
use crate::draft_row::{DraftRow, draft_rows};
use crate::drafter::{DraftStep, StepDrafter};
use crate::error::DecodeError;
use crate::target::Target;

/// Target and drafter, and how they are recorded.
pub(super) struct Models<'a, T, D: ?Sized> {
    pub(super) target: &'a mut T,
    pub(super) drafter: &'a mut D,
    pub(super) options: &'a RecordOptions,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> Models<'_, T, D> {
    /// Takes steps of the drafter.
    pub(super) fn step(&mut self, steps: &[DraftStep<'_>]) -> Result<Vec<Step>, DecodeError> {
        let decoding = &self.options.decoding;
        let rows = draft_rows(self.drafter, self.target, steps, steps.iter().map(|_| decoding))?;
        let step_of = |row: DraftRow| Step { probs: decoding.sampled_probs(row.logits()), row };
        Ok(rows.into_iter().map(step_of).collect())
    }

    /// The prediction of a head that looks ahead for a candidate drawn from the logits of the last
    /// draft forward in a slot.
    pub(super) fn predict_of_drawn(
        &mut self,
        slot: usize,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        if !self.options.has_head {
            return Ok(None);
        }
        self.drafter.predict_acceptance(self.target, (slot, 0), logits, candidate)
    }

    /// log p of a candidate; NaN if the target was not asked.
    pub(super) fn target_log_prob(
        &self,
        candidate: &RecordedCandidate,
        target_logits: Option<&[f32]>,
    ) -> f64 {
        target_logits.map_or(f64::NAN, |logits| {
            served(&self.options.decoding).probs(logits)[candidate.token_id as usize].ln()
        })
    }
}

/// Enters a head's prediction for a candidate, if there is one.
pub(super) fn enter(predicted: Option<f64>, candidate: &mut RecordedCandidate) {
    if predicted.is_some() {
        candidate.predicted_acceptance_prob = predicted;
    }
}

/// The distributions that labels are defined by: greedy, the models' at temperature 1.
fn served(decoding: &Decoding) -> Sampling {
    match decoding.choice {
        TokenChoice::Greedy => Sampling::default(),
        TokenChoice::Sampled(sampling) => sampling,
    }
}

/// A rule that never stops and reads every signal.
pub(super) struct EverySignal {
    pub(super) has_head: bool,
}

impl StopRule for EverySignal {
    fn bounds(&self) -> Bounds {
        Bounds { min: 0, max: usize::MAX }
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds {
            acceptance_prob: self.has_head,
            confidence: true,
            confidence_of_ten: true,
            candidate_prob: true,
            entropy: true,
        }
    }

    fn stops(&mut self, _candidates: &[u32], _signals: &DraftSignals) -> bool {
        false
    }
}

/// A draft forward.
pub(super) struct Step {
    pub(super) row: DraftRow,
    /// What a candidate is drawn from; None if decoding is greedy.
    pub(super) probs: Option<Vec<f64>>,
}

impl Step {
    /// The head's prediction for the candidate that this forward has read, if the head predicts then.
    pub(super) fn predicted_of_read(&self) -> Option<f64> {
        match self.row.signals().acceptance_prob {
            Some(HeadEstimate::OfRead(prob)) => Some(prob),
            Some(HeadEstimate::OfDrawn(_)) | None => None,
        }
    }

    /// A token as this forward's candidate, still without log p.
    pub(super) fn candidate(&self, token_id: u32, options: &RecordOptions) -> RecordedCandidate {
        let token = token_id as usize;
        let (logits, signals) = (self.row.logits(), self.row.signals());
        let draft_prob = match &self.probs {
            Some(probs) => probs[token],
            None => served(&options.decoding).probs(logits)[token],
        };
        let given = "a drafter gives the signals that are needed";
        RecordedCandidate {
            token_id,
            // As the round loop has it, to the last bit.
            candidate_prob: match self.probs {
                None if argmax(logits) == token_id => largest_prob(logits),
                _ => draft_prob,
            },
            confidence: signals.confidence.expect(given),
            confidence_of_ten: signals.confidence_of_ten.expect(given),
            entropy: signals.entropy.expect(given),
            predicted_acceptance_prob: None,
            draft_log_prob: draft_prob.ln(),
            target_log_prob: f64::NAN,
        }
    }
}

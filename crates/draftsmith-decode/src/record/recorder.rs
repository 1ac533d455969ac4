//! The draft steps of a recording, and their conversion into recorded candidates.

use draftsmith_theory::{
    Bounds, DraftSignals, HeadEstimate, RecordedCandidate, SignalNeeds, SoftmaxSummary, StopRule,
    argmax,
};

use super::RecordOptions;
use crate::drafter::{DraftRow, DraftStep, StepDrafter};
use crate::error::Result;
use crate::target::Target;

/// The target, the drafter and the options of a recording.
pub(super) struct Recorder<'a, T> {
    pub(super) target: &'a mut T,
    pub(super) drafter: &'a mut dyn StepDrafter<T>,
    pub(super) options: &'a RecordOptions,
}

impl<T: Target> Recorder<'_, T> {
    /// Takes one draft step per sequence in one forward. If decoding is sampled, also computes the
    /// candidates' distributions.
    pub(super) fn step(&mut self, steps: &[DraftStep<'_>]) -> Result<Vec<RecordedStep>> {
        let rows = self.drafter.draft(self.target, steps)?;
        let step_of = |row: DraftRow| RecordedStep {
            probs: self.options.decoding.sampled_probs(row.logits()),
            row,
        };
        Ok(rows.into_iter().map(step_of).collect())
    }

    /// Returns a look-ahead head's prediction for a candidate drawn from the slot's last draft
    /// step; `None` without such a head.
    pub(super) fn predict_of_drawn(
        &mut self,
        slot: usize,
        row: &DraftRow,
        candidate: u32,
    ) -> Result<Option<f64>> {
        if !self.options.has_head {
            return Ok(None);
        }
        self.drafter.predict_acceptance((slot, 0), &row.own_logits, candidate)
    }

    /// Returns the target's log-probability (natural logarithm) of a candidate; NaN without target
    /// logits.
    pub(super) fn target_log_prob(
        &self,
        candidate: &RecordedCandidate,
        target_logits: Option<&[f32]>,
    ) -> f64 {
        target_logits.map_or(f64::NAN, |logits| {
            self.options.decoding.sampling_of_labels().probs(logits)[candidate.token_id as usize]
                .ln()
        })
    }
}

/// Stores a head's prediction in a candidate's record. Does nothing for `None`.
pub(super) fn enter(predicted: Option<f64>, candidate: &mut RecordedCandidate) {
    if predicted.is_some() {
        candidate.predicted_acceptance_prob = predicted;
    }
}

/// A stop rule that never stops and reads every signal, so that all signals are recorded.
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

/// A draft step's row with the distribution of its candidate.
pub(super) struct RecordedStep {
    pub(super) row: DraftRow,
    /// The distribution that the candidate is drawn from; `None` if decoding is greedy.
    pub(super) probs: Option<Vec<f64>>,
}

impl RecordedStep {
    /// Returns the head's prediction for the candidate that this step has read; `None` for a
    /// look-ahead head or without a prediction.
    pub(super) fn predicted_of_read(&self) -> Option<f64> {
        self.row.signals.acceptance_prob.and_then(HeadEstimate::of_read)
    }

    /// Builds the record of `token_id` as this step's candidate. The target's log-probability is
    /// NaN until it is set.
    pub(super) fn candidate(&self, token_id: u32, options: &RecordOptions) -> RecordedCandidate {
        let token = token_id as usize;
        let (logits, signals) = (self.row.logits(), self.row.signals);
        let draft_prob = match &self.probs {
            Some(probs) => probs[token],
            None => options.decoding.sampling_of_labels().probs(logits)[token],
        };
        let given = "a drafter gives the signals it is asked for";
        RecordedCandidate {
            token_id,
            // Computed in the same way as in decoding, so that it is equal bit for bit.
            candidate_prob: match self.probs {
                None if argmax(logits) == token_id => SoftmaxSummary::of(logits).largest_prob,
                _ => draft_prob,
            },
            confidence: signals.confidence.expect(given),
            confidence_of_ten: signals.confidence_of_ten.expect(given),
            entropy: signals.entropy.expect(given),
            predicted_acceptance_prob: signals.acceptance_prob.and_then(HeadEstimate::of_drawn),
            draft_log_prob: draft_prob.ln(),
            target_log_prob: f64::NAN,
        }
    }
}

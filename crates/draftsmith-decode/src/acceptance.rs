//! What an acceptance head predicts of candidates, whichever drafter's hidden state it reads, and a
//! calibration of it.
//!
//! A head of the paper's form predicts in the draft forward that reads the candidate, and its
//! prediction comes to the host with that forward's logits. One that looks ahead predicts once the
//! candidate is drawn: a sync of its own, in place of the draft forward that it may save.

use std::collections::HashMap;

use draftsmith_model::{AcceptanceHead, DrafterModel, DrawnCandidate, Rows};
use draftsmith_theory::{Calibration, HeadEstimate, SoftmaxSummary};

use crate::drafter::DraftStep;
use crate::error::DecodeError;
use crate::session::{check_logits, to_host};

/// The most tokens whose embeddings' products with a head are kept: of a draft of width 4,096, 64
/// MiB.
const MAX_EMBEDDINGS: usize = 4096;

/// A drafter's head, if it has one, and what of the draft forwards it may yet be told.
#[derive(Debug)]
pub(crate) struct Acceptance<'m> {
    head: Option<&'m AcceptanceHead>,
    calibration: Option<&'m Calibration>,
    /// What it may yet be asked about, by slot.
    slots: Vec<Slot>,
    /// What such a head makes of tokens' embeddings, of those that were candidates.
    of_embeddings: HashMap<u32, Rows>,
}

/// The draft forwards over one sequence.
#[derive(Debug, Default)]
struct Slot {
    /// Those whose candidates the head may yet be asked about and told more of than hidden states, in
    /// the order of what they read; of a head that looks ahead, those of the last step.
    forwards: Vec<Forward>,
}

/// A draft forward, as a head is told of it.
#[derive(Debug)]
struct Forward {
    /// The place of the token that it read.
    at: usize,
    /// The round's candidates up to that.
    num_candidates: usize,
    /// The final hidden state, for a head that looks ahead.
    hidden: Option<Rows>,
    /// Of the drafter's own logits, before they are cut to the target's vocabulary: as in training.
    softmax: SoftmaxSummary,
}

impl Forward {
    /// The candidate drawn from it.
    fn candidate(&self, log_prob: Option<f64>) -> DrawnCandidate {
        DrawnCandidate {
            entropy: self.softmax.entropy,
            top_prob: self.softmax.largest_prob,
            log_prob,
            position: self.num_candidates,
        }
    }
}

/// A step's logits, and what the head predicts for the candidate that it has read.
type ReadStep = (Vec<f32>, Option<HeadEstimate>);

impl<'m> Acceptance<'m> {
    /// The predictions of a head, or of none, for candidates in each of so many slots.
    pub(crate) fn new(head: Option<&'m AcceptanceHead>, num_slots: usize) -> Self {
        Self {
            head,
            calibration: None,
            slots: std::iter::repeat_with(Slot::default).take(num_slots).collect(),
            of_embeddings: HashMap::new(),
        }
    }

    /// From now on predictions are calibrated so, or given as they are.
    pub(crate) fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.calibration = calibration;
    }

    /// Forgets all forwards of a slot that read more than the first `len` tokens.
    pub(crate) fn roll_back(&mut self, slot: usize, len: usize) {
        self.slots[slot].forwards.retain(|forward| forward.at < len);
    }

    /// Brings the logits of steps to the host, and with them what the head predicts for the candidates
    /// that they have read, if that is when it predicts: one sync. All that a step's tokens are has
    /// been read.
    ///
    /// # Shapes
    /// - normed: what the LM head reads of each step's rows, one step's behind the other's
    /// - logits: their logits, likewise
    ///
    /// # Errors
    /// If a number is none, or the device fails.
    pub(crate) fn read(
        &mut self,
        model: &DrafterModel,
        normed: Rows,
        logits: Rows,
        steps: &[DraftStep<'_>],
        role: &'static str,
    ) -> Result<Vec<ReadStep>, DecodeError> {
        let steps: Vec<(&DraftStep<'_>, usize)> = steps.iter().flat_map(DraftStep::rows).collect();
        // The last token that a row has read is the candidate before the one now drafted: its own hidden
        // state, hence the head's prediction for it.
        let head = self.head.filter(|head| !head.reads().looks_ahead());
        let predicted_at = |(step, row): (&DraftStep<'_>, usize)| {
            let drawn_from = step.parent_of(step.at(row));
            drawn_from.filter(|_| step.needs.acceptance_prob).map(|at| (step.slot, at))
        };
        let rows: Vec<usize> =
            (0..steps.len()).filter(|row| predicted_at(steps[*row]).is_some()).collect();
        let (logits, predicted) = match head.filter(|_| !rows.is_empty()) {
            Some(head) => {
                let drawn_from = rows.iter().filter_map(|row| predicted_at(steps[*row]));
                let scalars: Vec<f32> =
                    drawn_from.flat_map(|(slot, at)| self.scalars(model, head, slot, at)).collect();
                let acceptance = if rows.len() == steps.len() {
                    head.acceptance_logits(&normed, None, &scalars)
                } else {
                    let hidden = Rows::cat(rows.iter().map(|row| normed.slice(*row..row + 1)));
                    head.acceptance_logits(&hidden, None, &scalars)
                };
                let [logits, acceptance] = to_host([logits, acceptance], role)?;
                (logits, acceptance)
            }
            None => {
                let [logits] = to_host([logits], role)?;
                (logits, Vec::new())
            }
        };
        let mut predicted = rows.into_iter().zip(predicted).peekable();
        let of_rows = match steps[..] {
            [_] => vec![logits],
            _ => logits.chunks_exact(logits.len() / steps.len()).map(<[f32]>::to_vec).collect(),
        };
        let mut all = Vec::with_capacity(steps.len());
        for ((nth, (step, row)), logits) in steps.into_iter().enumerate().zip(of_rows) {
            let num_read = step.at(row) + 1;
            check_logits(&logits, role, num_read)?;
            let estimate = predicted
                .next_if(|(of_row, _)| *of_row == nth)
                .map(|(_, logit)| self.acceptance_prob(logit, num_read))
                .transpose()?
                .map(HeadEstimate::OfRead);
            self.note_forward(step, row, &logits, || normed.slice(nth..nth + 1));
            all.push((logits, estimate));
        }
        Ok(all)
    }

    /// Keeps of a step's row what the head may yet be told.
    fn note_forward(
        &mut self,
        step: &DraftStep<'_>,
        row: usize,
        logits: &[f32],
        hidden: impl FnOnce() -> Rows,
    ) {
        let head = self.head.filter(|_| step.needs.acceptance_prob);
        let Some(head) = head.filter(|head| !head.reads().is_hidden_alone()) else { return };
        let looks_ahead = head.reads().looks_ahead();
        // What came before a round's first candidate is asked about no more, nor what a head that
        // looks ahead has predicted.
        let forwards = &mut self.slots[step.slot].forwards;
        if row == 0 && (step.num_candidates == 0 || looks_ahead) {
            forwards.clear();
        }
        let at = step.at(row);
        let num_candidates = step.num_candidates_to(at);
        let (softmax, hidden) = (SoftmaxSummary::of(logits), looks_ahead.then(hidden));
        forwards.push(Forward { at, num_candidates, hidden, softmax });
    }

    /// What a head that looks ahead predicts for `candidate`, drawn from the `logits` of a row of the
    /// last step in a slot; None of other heads.
    ///
    /// # Errors
    /// If its prediction is not a number, or the device fails.
    ///
    /// # Panics
    /// If the last forward did not ask for the head's prediction.
    pub(crate) fn predict(
        &mut self,
        model: &DrafterModel,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
        role: &'static str,
    ) -> Result<Option<f64>, DecodeError> {
        let Some(head) = self.head.filter(|head| head.reads().looks_ahead()) else {
            return Ok(None);
        };
        let forward = self.slots[slot].forwards.get(row);
        let drawn_from = forward.and_then(|forward| Some((forward, forward.hidden.as_ref()?)));
        let (forward, hidden) =
            drawn_from.expect("the draft step was asked for the head's prediction");
        let log_prob = forward.softmax.log_prob(logits[candidate as usize]);
        let drawn = forward.candidate(Some(log_prob));
        let scalars: Vec<f32> = model.scalars(head.reads(), &drawn).collect();
        if self.of_embeddings.len() >= MAX_EMBEDDINGS
            && !self.of_embeddings.contains_key(&candidate)
        {
            self.of_embeddings.clear();
        }
        let of_embedding = self
            .of_embeddings
            .entry(candidate)
            .or_insert_with(|| head.of_embedding(&model.embed_ids(&[candidate])));
        let acceptance = head.acceptance_logits(hidden, Some(of_embedding), &scalars);
        let [acceptance] = to_host([acceptance], role)?;
        self.acceptance_prob(acceptance[0], forward.at + 1).map(Some)
    }

    /// The numbers that `head` is told of the candidate drawn from the forward that read the token
    /// at `at`.
    fn scalars(
        &self,
        model: &DrafterModel,
        head: &AcceptanceHead,
        slot: usize,
        at: usize,
    ) -> Vec<f32> {
        if head.reads().is_hidden_alone() {
            return Vec::new();
        }
        let drawn_from = self.slots[slot].forwards.iter().rfind(|forward| forward.at == at);
        let drawn_from = drawn_from.expect("a candidate is drawn from a forward");
        model.scalars(head.reads(), &drawn_from.candidate(None)).collect()
    }

    /// What rules are told where the head gives `logit`.
    fn acceptance_prob(&self, logit: f32, num_tokens: usize) -> Result<f64, DecodeError> {
        let prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
        if prob.is_nan() {
            return Err(DecodeError::NotFinite { role: "acceptance head", num_tokens });
        }
        Ok(self.calibration.map_or(prob, |calibration| calibration.apply(prob)))
    }
}

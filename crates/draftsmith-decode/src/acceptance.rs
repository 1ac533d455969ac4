//! What an acceptance head predicts of candidates, whichever drafter's hidden state it reads, and a
//! calibration of it.
//!
//! A head of the paper's form predicts in the draft forward that reads the candidate, and its
//! prediction comes to the host with that forward's logits. One that looks ahead predicts once the
//! candidate is drawn: a sync of its own, in place of the draft forward that it may save.
//!
//! One that reads a hidden state of the target is told of it where a round begins, and its product with
//! that serves the whole round. It is a function of the prefix that stands, as are all others, so that a
//! rule which reads the prediction biases nothing.

mod noted;

use std::collections::HashMap;

use draftsmith_model::{AcceptanceHead, DrafterModel, Rows};
use draftsmith_theory::{Calibration, HeadEstimate, SoftmaxSummary};

use crate::drafter::{AskedOf, DraftStep};
use crate::error::DecodeError;
use crate::session::{check_logits, to_host};
use noted::{Forward, RoundStart, Slot};

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

    /// Whether predictions depend on where a round began.
    pub(crate) fn depends_on_round(&self) -> bool {
        self.head.is_some_and(|head| head.reads().depends_on_round())
    }

    /// Whether the head reads hidden states of the target.
    pub(crate) fn reads_target_hidden(&self) -> bool {
        self.head.is_some_and(|head| head.reads().has_target_hidden())
    }

    /// Forgets what was noted of the sequence in a slot.
    pub(crate) fn begin(&mut self, slot: usize) {
        self.slots[slot] = Slot::default();
    }

    /// Forgets all forwards of a slot that read more than the first `len` tokens.
    pub(crate) fn roll_back(&mut self, slot: usize, len: usize) {
        self.slots[slot].forwards.retain(|forward| forward.at < len);
    }

    /// A round begins behind the first `num_standing` tokens in a slot, with the target's last hidden
    /// state; up to `num_kept` rounds may be asked about from now on.
    pub(crate) fn begin_round(
        &mut self,
        slot: usize,
        num_standing: usize,
        num_kept: usize,
        last_hidden: Option<&Rows>,
    ) {
        let head = self.head.filter(|head| head.reads().has_target_hidden());
        let of_target = head.map(|head| match last_hidden {
            Some(hidden) => head.of_target_hidden(hidden),
            None => head.of_no_target_hidden(),
        });
        self.slots[slot].begin_round(RoundStart { num_standing, of_target }, num_kept);
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
        let depends_on_round = self.depends_on_round();
        let predicted_at = |(step, row): (&DraftStep<'_>, usize)| {
            let at = step.at(row);
            let drawn_from = step.parent_of(at).filter(|_| step.needs.acceptance_prob)?;
            // A response that is recorded is one round to the step, and many to the head.
            let is_in_round = |slot: &Slot| at >= slot.round().num_standing;
            let slot = &self.slots[step.slot];
            (!depends_on_round || is_in_round(slot)).then_some((step.slot, drawn_from))
        };
        let rows: Vec<(usize, (usize, usize))> =
            (0..steps.len()).filter_map(|row| Some((row, predicted_at(steps[row])?))).collect();
        let head = head.filter(|_| !rows.is_empty());
        // A reviewer reads several tokens of a chain at once, each drawn from the row before it.
        let are_own = |(row, _): &(usize, _)| steps[*row].1 > 0 && steps[*row].0.parents.is_empty();
        let needs_logits = |head: &AcceptanceHead| head.reads().num_scalars() > 0;
        let is_noted = head.is_some_and(needs_logits) && rows.iter().any(are_own);
        let acceptance = |noted: &Self, head: &AcceptanceHead| {
            let drawn_from = rows.iter().map(|(_, drawn_from)| *drawn_from);
            let scalars = drawn_from.flat_map(|(slot, at)| noted.scalars(model, head, slot, at));
            let slots = rows.iter().map(|(_, (slot, _))| &noted.slots[*slot]);
            let of_target = of_target(head, slots.map(Slot::round));
            let scalars: Vec<f32> = scalars.collect();
            if rows.len() == steps.len() {
                return head.acceptance_logits(&normed, &of_target, &scalars);
            }
            let hidden = Rows::cat(rows.iter().map(|(row, _)| normed.slice(*row..row + 1)));
            head.acceptance_logits(&hidden, &of_target, &scalars)
        };
        let (logits, predicted) = match head {
            Some(head) if is_noted => {
                let [logits] = to_host([logits], role)?;
                self.note_forwards(&steps, &logits, &normed);
                let [acceptance] = to_host([acceptance(self, head)], role)?;
                (logits, acceptance)
            }
            Some(head) => {
                let [logits, acceptance] = to_host([logits, acceptance(self, head)], role)?;
                (logits, acceptance)
            }
            None => {
                let [logits] = to_host([logits], role)?;
                (logits, Vec::new())
            }
        };
        if !is_noted {
            self.note_forwards(&steps, &logits, &normed);
        }
        let rows = rows.into_iter().map(|(row, _)| row);
        let mut predicted = rows.zip(predicted).peekable();
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
            all.push((logits, estimate));
        }
        Ok(all)
    }

    /// Keeps of rows of steps what the head may yet be told.
    fn note_forwards(&mut self, steps: &[(&DraftStep<'_>, usize)], logits: &[f32], normed: &Rows) {
        let rows = logits.chunks_exact(logits.len() / steps.len());
        for (nth, ((step, row), logits)) in steps.iter().zip(rows).enumerate() {
            self.note_forward(step, *row, logits, || normed.slice(nth..nth + 1));
        }
    }

    /// The same of one row.
    fn note_forward(
        &mut self,
        step: &DraftStep<'_>,
        row: usize,
        logits: &[f32],
        hidden: impl Fn() -> Rows,
    ) {
        let Some(head) = self.head.filter(|_| step.needs.acceptance_prob) else { return };
        let looks_ahead = head.reads().looks_ahead();
        if !looks_ahead && self.slots[step.slot].keeps_rounds {
            self.slots[step.slot].last_read = Some((step.at(row), hidden()));
        }
        if head.reads().is_of_draft_forward() {
            return;
        }
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
        let drawn = forward.candidate(Some(log_prob), forward.num_candidates);
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
        let of_target = of_target(head, std::iter::once(&self.slots[slot]).map(Slot::round));
        let products = std::iter::once(&*of_embedding).chain(&of_target);
        let acceptance = head.acceptance_logits(hidden, products, &scalars);
        let [acceptance] = to_host([acceptance], role)?;
        self.acceptance_prob(acceptance[0], forward.at + 1).map(Some)
    }

    /// What a head that depends on it predicts for a candidate of each of several rounds, by the number
    /// of tokens they began behind; None of other heads. Of chains.
    ///
    /// # Errors
    /// If a prediction is not a number, or the device fails.
    ///
    /// # Panics
    /// If the last forward did not ask for the head's prediction, or a round is not kept.
    pub(crate) fn predict_by_round(
        &self,
        model: &DrafterModel,
        slot: usize,
        asked: AskedOf<'_>,
        starts: &[usize],
        role: &'static str,
    ) -> Result<Option<Vec<f64>>, DecodeError> {
        let Some(head) = self.head.filter(|head| head.reads().depends_on_round()) else {
            return Ok(None);
        };
        let (reads, read) = (head.reads(), &self.slots[slot]);
        let (at, drawn_from, hidden, of_embedding) = match asked {
            AskedOf::Read if reads.looks_ahead() => return Ok(None),
            AskedOf::Drawn { .. } if !reads.looks_ahead() => return Ok(None),
            AskedOf::Read => {
                let (at, hidden) = read.last_read.as_ref().expect("a forward was noted");
                let drawn_from = read.forwards.iter().rfind(|forward| forward.at + 1 == *at);
                (*at, drawn_from.map(|forward| (forward, None)), hidden, None)
            }
            AskedOf::Drawn { logits, candidate } => {
                let forward = read.forwards.last().expect("a forward was noted");
                let log_prob = forward.softmax.log_prob(logits[candidate as usize]);
                let hidden = forward.hidden.as_ref().expect("a head that looks ahead reads it");
                let of_embedding = head.of_embedding(&model.embed_ids(&[candidate]));
                (forward.at + 1, Some((forward, Some(log_prob))), hidden, Some(of_embedding))
            }
        };
        let rounds = starts.iter().map(|start| {
            let mut rounds = read.rounds.iter();
            rounds.find(|round| round.num_standing == *start).expect("the round is kept")
        });
        let of_target = of_target(head, rounds);
        let repeated = |rows: &Rows| Rows::cat(starts.iter().map(|_| rows.clone()));
        let of_embedding = of_embedding.as_ref().map(repeated);
        let scalars = starts.iter().flat_map(|start| {
            let drawn_from = drawn_from.filter(|_| reads.num_scalars() > 0);
            let drawn =
                drawn_from.map(|(forward, log_prob)| forward.candidate(log_prob, at - start));
            drawn.into_iter().flat_map(|drawn| model.scalars(reads, &drawn).collect::<Vec<_>>())
        });
        let scalars: Vec<f32> = scalars.collect();
        let products = of_embedding.iter().chain(&of_target);
        let logits = head.acceptance_logits(&repeated(hidden), products, &scalars);
        let [logits] = to_host([logits], role)?;
        logits
            .into_iter()
            .map(|logit| self.acceptance_prob(logit, at))
            .collect::<Result<_, _>>()
            .map(Some)
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
        if head.reads().is_of_draft_forward() {
            return Vec::new();
        }
        let drawn_from = self.slots[slot].forwards.iter().rfind(|forward| forward.at == at);
        let drawn_from = drawn_from.expect("a candidate is drawn from a forward");
        let drawn = drawn_from.candidate(None, drawn_from.num_candidates);
        model.scalars(head.reads(), &drawn).collect()
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

/// The head's products with what the target left behind for rounds, one after the other; None where
/// the head does not read that.
fn of_target<'s>(
    head: &AcceptanceHead,
    rounds: impl Iterator<Item = &'s RoundStart>,
) -> Option<Rows> {
    let of_round = |round: &RoundStart| round.of_target.clone().expect("the head reads it");
    head.reads().has_target_hidden().then(|| Rows::cat(rounds.map(of_round)))
}

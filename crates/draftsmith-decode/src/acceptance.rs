//! Runs an acceptance head on a drafter's candidates.
//!
//! SpecDec++'s head predicts a candidate's acceptance in the draft forward that reads the
//! candidate. Its prediction is therefore one candidate late, and it is copied to the host together
//! with that forward's logits. A look-ahead head predicts as soon as the candidate is drawn, which
//! costs an extra device sync and may save a draft forward. [`HeadEstimate`] distinguishes the two,
//! so no stop rule can confuse them.
//!
//! A prediction depends only on the prefix up to and including its candidate, so a stop rule that
//! reads predictions does not bias the output.

use std::collections::HashMap;

use draftsmith_model::{AcceptanceHead, DrafterModel, DrawnCandidate, Rows};
use draftsmith_theory::{HeadEstimate, SoftmaxSummary};

use crate::drafter::DraftStep;
use crate::error::Result;
use crate::session::{check_logits, not_finite, to_host};

/// The maximum number of cached embedding projections, one per token: 64 MiB for a drafter of
/// hidden size 4,096.
const MAX_EMBEDDINGS: usize = 4096;

/// A drafter's optional acceptance head, with the data that its next predictions need.
#[derive(Debug)]
pub(crate) struct Acceptance<'m> {
    head: Option<&'m AcceptanceHead>,
    /// For each slot, the stored rows of draft forwards, in the order of the tokens that they read.
    /// A look-ahead head needs only the rows of the last step.
    forwards: Vec<Vec<Forward>>,
    /// A cache of [`AcceptanceHead::of_embedding`], by token id.
    of_embeddings: HashMap<u32, Rows>,
}

/// The head's inputs from one row of a draft forward.
#[derive(Debug)]
struct Forward {
    /// The position in the sequence of the token that the row read.
    at: usize,
    /// The row's normed final hidden state; `None` unless the head looks ahead.
    hidden: Option<Rows>,
    /// A summary of the softmax over the drafter's whole vocabulary, as in training.
    softmax: SoftmaxSummary,
}

impl Forward {
    /// Returns the head's scalar inputs for a candidate drawn from this row.
    fn candidate(&self, log_prob: Option<f64>) -> DrawnCandidate {
        let SoftmaxSummary { entropy, largest_prob: top_prob, .. } = self.softmax;
        DrawnCandidate { entropy, top_prob, log_prob }
    }
}

/// A draft step and the index of one of its rows.
type StepRow<'s> = (&'s DraftStep<'s>, usize);

/// A candidate that a draft forward has read and whose acceptance the head predicts.
struct ReadCandidate {
    /// The index of the candidate's row among all rows of the forward.
    row: usize,
    slot: usize,
    /// The position of the candidate's parent token.
    drawn_from: usize,
}

/// A row's logits, and the head's prediction for the candidate that the row read, if any.
type ReadRow = (Vec<f32>, Option<HeadEstimate>);

impl<'m> Acceptance<'m> {
    /// Creates the state for `num_slots` slots. Without a head, there are no predictions.
    pub(crate) fn new(head: Option<&'m AcceptanceHead>, num_slots: usize) -> Self {
        let forwards = std::iter::repeat_with(Vec::new).take(num_slots).collect();
        Self { head, forwards, of_embeddings: HashMap::new() }
    }

    /// Drops a slot's stored rows that read tokens after the first `len`.
    pub(crate) fn roll_back(&mut self, slot: usize, len: usize) {
        self.forwards[slot].retain(|forward| forward.at < len);
    }

    /// Copies the logits of a forward to the host. A head that does not look ahead also predicts
    /// the acceptance of the candidates that this forward read, in the same sync if possible.
    ///
    /// # Shapes
    /// - normed: `[rows of all steps, hidden]`, the input of the LM head
    /// - logits: `[rows of all steps, drafter's vocabulary]`
    ///
    /// # Errors
    /// If a logit or a prediction is not finite, or the device fails.
    pub(crate) fn read(
        &mut self,
        model: &DrafterModel,
        normed: Rows,
        logits: Rows,
        steps: &[DraftStep<'_>],
        role: &'static str,
    ) -> Result<Vec<ReadRow>> {
        let rows: Vec<StepRow<'_>> = steps.iter().flat_map(DraftStep::rows).collect();
        let read = self.read_candidates(&rows);
        // In a cascade, a reviewing drafter reads several candidates of a chain in one forward. The
        // head's logit inputs for a candidate come from the row before it, so a head that reads
        // logits must wait for this forward's logits.
        let is_drawn_from_this_forward = |read: &ReadCandidate| {
            let (step, row) = rows[read.row];
            row > 0 && step.parents.is_empty()
        };
        let head = self.head.filter(|_| !read.is_empty());
        let in_one_sync = head.filter(|head| {
            head.reads().is_hidden_only() || !read.iter().any(is_drawn_from_this_forward)
        });
        let (logits, predicted) = if let Some(head) = in_one_sync {
            let acceptance = self.logits_of_read(model, head, &normed, &read);
            let [logits, acceptance] = to_host([logits, acceptance], role)?;
            self.note_forwards(&rows, &logits, &normed);
            (logits, acceptance)
        } else {
            let [logits] = to_host([logits], role)?;
            self.note_forwards(&rows, &logits, &normed);
            let [acceptance] = match head {
                Some(head) => to_host([self.logits_of_read(model, head, &normed, &read)], role)?,
                None => [Vec::new()],
            };
            (logits, acceptance)
        };
        let mut predicted = read.iter().map(|read| read.row).zip(predicted).peekable();
        let of_rows = match rows[..] {
            [_] => vec![logits],
            _ => logits.chunks_exact(logits.len() / rows.len()).map(<[f32]>::to_vec).collect(),
        };
        let mut all = Vec::with_capacity(rows.len());
        for ((nth, (step, row)), logits) in rows.into_iter().enumerate().zip(of_rows) {
            let num_read = step.at(row) + 1;
            check_logits(&logits, logits.len(), role, num_read)?;
            let estimate = predicted
                .next_if(|(of_row, _)| *of_row == nth)
                .map(|(_, logit)| Self::acceptance_prob(logit, num_read))
                .transpose()?
                .map(HeadEstimate::OfRead);
            all.push((logits, estimate));
        }
        Ok(all)
    }

    /// Finds the rows that read a candidate for which the stop rule needs a prediction. The result
    /// is empty for a look-ahead head, which predicts when a candidate is drawn.
    fn read_candidates(&self, rows: &[StepRow<'_>]) -> Vec<ReadCandidate> {
        if self.head.is_none_or(|head| head.reads().looks_ahead()) {
            return Vec::new();
        }
        let read = rows.iter().enumerate().filter_map(|(row, (step, of_step))| {
            let parent = step.parent_of(step.at(*of_step));
            let drawn_from = parent.filter(|_| step.needs.acceptance_prob)?;
            Some(ReadCandidate { row, slot: step.slot, drawn_from })
        });
        read.collect()
    }

    /// Computes the head's acceptance logits, one row per candidate in `read`.
    fn logits_of_read(
        &self,
        model: &DrafterModel,
        head: &AcceptanceHead,
        normed: &Rows,
        read: &[ReadCandidate],
    ) -> Rows {
        let mut scalars = Vec::new();
        for ReadCandidate { slot, drawn_from, .. } in read {
            if !head.reads().is_hidden_only() {
                let forward = self.forwards[*slot].iter().rfind(|it| it.at == *drawn_from);
                let forward = forward.expect("a candidate is drawn from a forward");
                scalars.extend(model.scalars(head.reads(), &forward.candidate(None)));
            }
        }
        if read.len() == normed.num_rows() {
            return head.acceptance_logits(normed, None, &scalars);
        }
        let hidden = Rows::cat(read.iter().map(|read| normed.slice(read.row..read.row + 1)));
        head.acceptance_logits(&hidden, None, &scalars)
    }

    /// Stores the values of these rows that later predictions may need.
    fn note_forwards(&mut self, rows: &[StepRow<'_>], logits: &[f32], normed: &Rows) {
        let Some(head) = self.head.filter(|head| !head.reads().is_hidden_only()) else { return };
        let looks_ahead = head.reads().looks_ahead();
        let of_rows = logits.chunks_exact(logits.len() / rows.len());
        for (nth, ((step, row), logits)) in rows.iter().zip(of_rows).enumerate() {
            if !step.needs.acceptance_prob {
                continue;
            }
            let forwards = &mut self.forwards[step.slot];
            // A new round needs no rows of earlier rounds, and a look-ahead head needs only the
            // last step's rows.
            if *row == 0 && (step.num_candidates == 0 || looks_ahead) {
                forwards.clear();
            }
            forwards.push(Forward {
                at: step.at(*row),
                hidden: looks_ahead.then(|| normed.slice(nth..nth + 1)),
                softmax: SoftmaxSummary::of(logits),
            });
        }
    }

    /// Returns a look-ahead head's acceptance probability for `candidate`; `None` for any other
    /// head. The candidate was drawn from `logits`, the logits of the given row of the slot's last
    /// draft step.
    ///
    /// # Errors
    /// If the prediction is NaN, or the device fails.
    ///
    /// # Panics
    /// If the last draft step did not request the head's prediction.
    pub(crate) fn predict(
        &mut self,
        model: &DrafterModel,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
        role: &'static str,
    ) -> Result<Option<f64>> {
        let Some(head) = self.head.filter(|head| head.reads().looks_ahead()) else {
            return Ok(None);
        };
        let forward = self.forwards[slot].get(row);
        let drawn_from = forward.and_then(|forward| Some((forward, forward.hidden.as_ref()?)));
        let (forward, hidden) = drawn_from.expect("the draft step asked for the head's prediction");
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
        Self::acceptance_prob(acceptance[0], forward.at + 1).map(Some)
    }

    /// Converts an acceptance logit into a probability. `num_tokens` only appears in the error.
    pub(crate) fn acceptance_prob(logit: f32, num_tokens: usize) -> Result<f64> {
        let prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
        if prob.is_nan() { Err(not_finite("acceptance head", num_tokens)) } else { Ok(prob) }
    }
}

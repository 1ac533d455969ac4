//! The rows of a drafter's step, as candidates are chosen from them.
//!
//! A drafter gives its model's own logits. Under a repetition penalty candidates are chosen from
//! others, by the tokens that stand before each; so are the signals that stop rules read, while a
//! head is told of the model's own, as it was in training.

use draftsmith_theory::{Decoding, DraftSignals};

use crate::drafter::{DraftStep, Drafted, StepDrafter};
use crate::error::DecodeError;

/// What a row of a step gave.
#[derive(Debug)]
pub(crate) struct DraftRow {
    drafted: Drafted,
    /// Its logits under the penalty, where there is one.
    penalised: Option<Vec<f32>>,
}

impl DraftRow {
    /// The logits that a candidate is chosen by.
    pub(crate) fn logits(&self) -> &[f32] {
        self.penalised.as_deref().unwrap_or(&self.drafted.logits)
    }

    /// The model's own, which heads are told of.
    pub(crate) fn own_logits(&self) -> &[f32] {
        &self.drafted.logits
    }

    /// What stop rules may read.
    pub(crate) fn signals(&self) -> DraftSignals {
        self.drafted.signals
    }

    /// Forwards of the draft that it took.
    pub(crate) fn num_forwards(&self) -> usize {
        self.drafted.num_forwards
    }

    fn new(mut drafted: Drafted, step: &DraftStep<'_>, row: usize, decoding: &Decoding) -> Self {
        let penalised = decoding
            .is_penalised()
            .then(|| decoding.penalised(&drafted.logits, step.tokens_before(row)).into_owned());
        if let Some(logits) = &penalised {
            let acceptance_prob = drafted.signals.acceptance_prob;
            drafted.signals =
                DraftSignals { acceptance_prob, ..step.needs.signals_of_logits(logits) };
        }
        Self { drafted, penalised }
    }
}

/// Takes steps, as [`StepDrafter::draft`] does, each with the way in which its candidates are chosen.
///
/// # Errors
/// As there.
pub(crate) fn draft_rows<'d, T, D: StepDrafter<T> + ?Sized>(
    drafter: &mut D,
    target: &mut T,
    steps: &[DraftStep<'_>],
    decodings: impl IntoIterator<Item = &'d Decoding>,
) -> Result<Vec<DraftRow>, DecodeError> {
    let drafted = drafter.draft(target, steps)?;
    let of_steps = steps.iter().zip(decodings);
    let rows = of_steps
        .flat_map(|(step, decoding)| step.rows().map(move |(step, row)| (step, row, decoding)));
    let rows = rows.zip(drafted);
    Ok(rows.map(|((step, row, decoding), it)| DraftRow::new(it, step, row, decoding)).collect())
}

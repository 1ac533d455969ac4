//! A response as head training sees it: its tokens, its labels, the mixture an epoch makes of
//! them, and the side of the split it falls on.

use std::sync::Arc;

use draftsmith_data::ResponseRow;
use draftsmith_theory::{acceptance_prob, in_validation, keep_target};

use crate::error::TrainError;

/// What training needs of a [`ResponseRow`], cut to the draft's context. There is at least one
/// position.
#[derive(Debug)]
pub(crate) struct TrainingRow {
    id: String,
    prompt_ids: Vec<u32>,
    /// X, the target's tokens; the lists below have its length.
    response_ids: Vec<u32>,
    /// Y, the draft's tokens.
    draft_ids: Vec<u32>,
    /// min(1, p/q) at Y.
    acceptance_probs: Vec<f32>,
}

/// One row's input and labels in one epoch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mixture {
    /// The prompt, then Z: X where it was kept, Y elsewhere.
    pub(crate) input_ids: Vec<u32>,
    /// The positions in `input_ids` of the tokens taken from Y, rising: the head reads the hidden
    /// state at a candidate's own position.
    pub(crate) labelled: Vec<usize>,
    /// The acceptance probabilities at `labelled`.
    pub(crate) labels: Vec<f32>,
}

impl TrainingRow {
    /// Takes what training needs, as far as it fits `context` tokens; `None` if no position does.
    ///
    /// # Errors
    /// If the row has no draft columns, they differ in length, or a log-probability is NaN.
    pub(crate) fn new(row: &ResponseRow, context: usize) -> Result<Option<Self>, TrainError> {
        let Some(draft) = &row.draft else {
            return Err(TrainError::NoDraftColumns { id: row.id.clone() });
        };
        row.validate()?;
        let pairs = draft.target_log_prob.iter().zip(&draft.draft_log_prob);
        if let Some(position) = pairs.clone().position(|(p, q)| p.is_nan() || q.is_nan()) {
            return Err(TrainError::LogProb {
                id: row.id.clone(),
                position,
                target: draft.target_log_prob[position],
                draft: draft.draft_log_prob[position],
            });
        }
        let len = row.response_ids.len().min(context.saturating_sub(row.prompt_ids.len()));
        Ok((len > 0).then(|| Self {
            id: row.id.clone(),
            prompt_ids: row.prompt_ids.clone(),
            response_ids: row.response_ids[..len].to_vec(),
            draft_ids: draft.draft_ids[..len].to_vec(),
            acceptance_probs: pairs.map(|(p, q)| acceptance_prob(*p, *q)).take(len).collect(),
        }))
    }

    /// The row's id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Whether the mixture of an epoch has a label.
    pub(crate) fn has_label(&self, seed: u64, epoch: u64, mixing_ratio: f64) -> bool {
        keep_target(seed, epoch, &self.id, mixing_ratio, self.response_ids.len()).contains(&false)
    }

    /// The mixture of an epoch: a function of the seed, the epoch and the row's id.
    pub(crate) fn mixture(&self, seed: u64, epoch: u64, mixing_ratio: f64) -> Mixture {
        let kept = keep_target(seed, epoch, &self.id, mixing_ratio, self.response_ids.len());
        let mut mixture = Mixture {
            input_ids: self.prompt_ids.clone(),
            labelled: Vec::new(),
            labels: Vec::new(),
        };
        for (i, kept) in kept.into_iter().enumerate() {
            if kept {
                mixture.input_ids.push(self.response_ids[i]);
            } else {
                mixture.labelled.push(mixture.input_ids.len());
                mixture.labels.push(self.acceptance_probs[i]);
                mixture.input_ids.push(self.draft_ids[i]);
            }
        }
        mixture
    }
}

/// The rows of each side, in their order.
pub(crate) struct Split<T> {
    pub(crate) training: Vec<Arc<T>>,
    pub(crate) validation: Vec<Arc<T>>,
    pub(crate) num_unusable: usize,
}

impl<T> Split<T> {
    /// Splits what `usable` takes of each row; `None` counts as unusable.
    ///
    /// # Errors
    /// If `usable` refuses a row.
    pub(crate) fn new(
        rows: &[ResponseRow],
        validation_share: f64,
        usable: impl Fn(&ResponseRow) -> Result<Option<T>, TrainError>,
    ) -> Result<Self, TrainError> {
        let mut split = Self { training: Vec::new(), validation: Vec::new(), num_unusable: 0 };
        for row in rows {
            match usable(row)?.map(Arc::new) {
                None => split.num_unusable += 1,
                Some(usable) if is_held_out(row, validation_share) => {
                    split.validation.push(usable);
                }
                Some(usable) => split.training.push(usable),
            }
        }
        Ok(split)
    }
}

/// Whether training holds a row out for validation: decided by its conversation, so that turns stay
/// together.
pub fn is_held_out(row: &ResponseRow, validation_share: f64) -> bool {
    in_validation(conversation(row), validation_share)
}

/// A row's id without its turn: `source#n` of `source#n#turn`. A source's name may have a `#`.
fn conversation(row: &ResponseRow) -> &str {
    let start = match row.id.strip_prefix(&row.source) {
        Some(rest) if rest.starts_with('#') => row.source.len() + 1,
        _ => row.id.find('#').map_or(row.id.len(), |at| at + 1),
    };
    let turn = row.id[start..].find('#').map_or(row.id.len(), |at| start + at);
    &row.id[..turn]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_pair::{response_row, responses};

    #[test]
    fn a_mixture_takes_labels_where_the_draft_speaks() {
        let row = &responses(1, 40, 11)[0];
        let columns = row.draft.as_ref().unwrap();
        let training = TrainingRow::new(row, 1000).unwrap().unwrap();
        for epoch in 0..4 {
            let mixture = training.mixture(5, epoch, 0.3);
            let kept = keep_target(5, epoch, &row.id, 0.3, row.response_ids.len());
            let prompt = row.prompt_ids.len();
            assert_eq!(mixture.input_ids[..prompt], row.prompt_ids);
            let mut labels = mixture.labelled.iter().zip(&mixture.labels);
            for (i, kept) in kept.iter().enumerate() {
                let token = mixture.input_ids[prompt + i];
                if *kept {
                    assert_eq!(token, row.response_ids[i]);
                    continue;
                }
                assert_eq!(token, columns.draft_ids[i]);
                let expected =
                    acceptance_prob(columns.target_log_prob[i], columns.draft_log_prob[i]);
                assert_eq!(labels.next(), Some((&(prompt + i), &expected)));
            }
            assert_eq!(labels.next(), None);
            assert!(training.has_label(5, epoch, 0.3));
        }
    }

    #[test]
    fn mixtures_differ_by_epoch_and_repeat_for_the_same_one() {
        let rows = responses(2, 60, 3);
        let [first, second] = [0, 1].map(|i| TrainingRow::new(&rows[i], 1000).unwrap().unwrap());
        assert_eq!(first.mixture(1, 1, 0.5), first.mixture(1, 1, 0.5));
        assert_ne!(first.mixture(1, 1, 0.5).labelled, first.mixture(1, 2, 0.5).labelled);
        assert_ne!(first.mixture(1, 1, 0.5).labelled, first.mixture(2, 1, 0.5).labelled);
        assert_ne!(first.mixture(1, 1, 0.5).labelled, second.mixture(1, 1, 0.5).labelled);
    }

    #[test]
    fn a_long_row_is_cut_to_the_context() {
        let row = response_row("set#0", &[1, 2, 3], &[4, 5, 6], &[7, 8, 9], &[0.5; 3]);
        let inputs = |context| {
            TrainingRow::new(&row, context).unwrap().map(|r| r.mixture(0, 0, 0.0).input_ids)
        };
        assert_eq!(inputs(6).unwrap(), [1, 2, 3, 7, 8, 9]);
        assert_eq!(inputs(5).unwrap(), [1, 2, 3, 7, 8]);
        assert_eq!(inputs(4).unwrap(), [1, 2, 3, 7]);
        assert_eq!(inputs(3), None);
        assert_eq!(inputs(1), None);
    }

    #[test]
    fn rows_that_cannot_be_trained_on_are_named() {
        let row = || response_row("set#3", &[1], &[2, 3], &[4, 5], &[0.5; 2]);
        let check = |break_it: fn(&mut ResponseRow), expected: &[&str]| {
            let mut broken = row();
            break_it(&mut broken);
            let message = TrainingRow::new(&broken, 10).unwrap_err().to_string();
            for part in expected {
                assert!(message.contains(part), "{message}");
            }
        };
        check(|r| r.draft = None, &["`set#3`", "without a drafter", "models.draft"]);
        check(|r| r.draft.as_mut().unwrap().draft_ids.push(1), &["`set#3`", "draft_ids"]);
        check(
            |r| r.draft.as_mut().unwrap().target_log_prob[1] = f32::NAN,
            &["`set#3`", "position 1", "NaN"],
        );
    }

    #[test]
    fn turns_of_a_conversation_share_their_side() {
        let named = |id: &str, source: &str| {
            let mut row = response_row(id, &[1], &[2], &[3], &[0.5]);
            row.source = source.to_owned();
            row
        };
        for (id, source, expected) in [
            ("set#4", "set", "set#4"),
            ("set#4#1", "set", "set#4"),
            ("a#b#4", "a#b", "a#b#4"),
            ("a#b#4#2", "a#b", "a#b#4"),
            ("other#4#2", "set", "other#4"),
            ("bare", "set", "bare"),
        ] {
            assert_eq!(conversation(&named(id, source)), expected);
        }
        for n in 0..200 {
            let first = is_held_out(&named(&format!("set#{n}"), "set"), 0.3);
            assert_eq!(first, is_held_out(&named(&format!("set#{n}#1"), "set"), 0.3));
        }
    }
}

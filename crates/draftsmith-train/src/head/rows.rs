//! The rows of head training: a response's tokens and labels, and their mixture in each epoch
//! (SpecDec++, §3).

use draftsmith_data::ResponseRow;
use draftsmith_theory::{acceptance_prob, keep_target};

use crate::error::{Result, TrainError};
use crate::head::settings::MixedLabels;

/// A training row, cut to the draft's context.
#[derive(Debug)]
pub(crate) struct TrainingRow {
    pub(crate) id: String,
    content: RowContent,
}

#[derive(Debug)]
enum RowContent {
    /// A row whose tokens are mixed again in each epoch.
    Mixed(MixedRow),
    /// A row of recorded rollouts, which is the same in each epoch.
    Recorded(Mixture),
}

/// The tokens and labels of a [`ResponseRow`] for mixing, with at least one position.
#[derive(Debug)]
struct MixedRow {
    prompt_ids: Vec<u32>,
    /// X, the target's tokens. `draft_ids` and `labels` have the same length.
    response_ids: Vec<u32>,
    /// Y, the draft's tokens at the same positions: sampled, or the most probable ones.
    draft_ids: Vec<u32>,
    /// The label of each token of Y.
    labels: Vec<f32>,
}

/// The input and the labels of one row in one epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Mixture {
    /// The prompt, then Z: some tokens of X are kept, the others are replaced by those of Y. For a
    /// recorded row, the prompt and X.
    pub(crate) input_ids: Vec<u32>,
    /// The indices of candidates in `input_ids`, ascending. In a mixed row, candidates are the
    /// tokens from Y; in a recorded row, the tokens of X that were drafted and accepted.
    pub(crate) labelled: Vec<usize>,
    /// The label of each candidate in `labelled`.
    pub(crate) labels: Vec<f32>,
    /// The rejected candidates and the candidates drafted after each, by ascending start. Empty for
    /// mixed rows.
    pub(crate) branches: Vec<Branch>,
}

/// Candidates that continue a prefix of a row's input: a rejected candidate, and the draft's next
/// proposals after it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Branch {
    /// The length of the prefix in tokens, 1 or more.
    pub(crate) start: usize,
    /// The candidates, at least one.
    pub(crate) token_ids: Vec<u32>,
    /// The label of each candidate.
    pub(crate) labels: Vec<f32>,
}

impl Mixture {
    /// Lists the labels of the input, then those of each branch.
    pub(crate) fn all_labels(&self) -> impl Iterator<Item = f32> {
        let of_branches = self.branches.iter().flat_map(|branch| &branch.labels);
        self.labels.iter().chain(of_branches).copied()
    }

    /// Returns the tokens at which an EAGLE-3 drafter reads the target's hidden states: all but the
    /// last one.
    pub(crate) fn read_ids(&self) -> &[u32] {
        &self.input_ids[..self.input_ids.len() - 1]
    }

    /// Counts the tokens of the input and its branches.
    pub(crate) fn num_tokens(&self) -> usize {
        let of_branches = self.branches.iter().map(|branch| branch.token_ids.len());
        self.input_ids.len() + of_branches.sum::<usize>()
    }

    /// Counts the labels.
    pub(crate) fn num_labels(&self) -> usize {
        self.all_labels().count()
    }
}

impl TrainingRow {
    /// Builds a row of recorded rollouts.
    pub(crate) fn recorded(row: &ResponseRow, recorded: Mixture) -> Self {
        Self { id: row.id.clone(), content: RowContent::Recorded(recorded) }
    }

    /// Builds a mixed row, cut to `context` tokens. Returns `None` if no position fits, or if the
    /// row has no prompt to draw the first candidate from.
    /// candidate from.
    ///
    /// # Errors
    /// If the row has no draft columns.
    pub(crate) fn new(
        row: &ResponseRow,
        context: usize,
        labels: MixedLabels,
    ) -> Result<Option<Self>> {
        let Some(draft) = &row.draft else {
            return Err(TrainError::Invalid(format!(
                "row `{}` has no draft columns: the data was built without a drafter; hint: add a table \
                 `[drafters.NAME]` with `kind = \"model\"`, and build the data again",
                row.id
            )));
        };
        let pairs = draft.target_log_prob.iter().zip(&draft.draft_log_prob);
        let len = row.response_ids.len().min(context.saturating_sub(row.prompt_ids.len()));
        if len == 0 || row.prompt_ids.is_empty() {
            return Ok(None);
        }
        let (draft_ids, labels) = match labels {
            MixedLabels::Sampled => {
                (&draft.draft_ids, pairs.map(|(p, q)| acceptance_prob(*p, *q)).take(len).collect())
            }
            MixedLabels::Overlap => (&draft.draft_ids, draft.overlap[..len].to_vec()),
            MixedLabels::Greedy => {
                let choices = draft.draft_top_ids.iter().zip(&draft.target_top_ids);
                let agrees = choices.map(|(draft, target)| if draft == target { 1.0 } else { 0.0 });
                (&draft.draft_top_ids, agrees.take(len).collect())
            }
        };
        let content = RowContent::Mixed(MixedRow {
            prompt_ids: row.prompt_ids.clone(),
            response_ids: row.response_ids[..len].to_vec(),
            draft_ids: draft_ids[..len].to_vec(),
            labels,
        });
        Ok(Some(Self { id: row.id.clone(), content }))
    }

    /// Returns whether the mixture of an epoch has any label.
    pub(crate) fn has_label(&self, seed: u64, epoch: u64, mixing_ratio: f64) -> bool {
        self.mixture(seed, epoch, mixing_ratio).num_labels() > 0
    }

    /// Returns the mixture of an epoch. It is a function of the seed, the epoch and the row's id;
    /// recorded rows are the same in every epoch.
    pub(crate) fn mixture(&self, seed: u64, epoch: u64, mixing_ratio: f64) -> Mixture {
        match &self.content {
            RowContent::Mixed(row) => {
                let num_tokens = row.response_ids.len();
                row.mixture(keep_target(seed, epoch, &self.id, mixing_ratio, num_tokens))
            }
            RowContent::Recorded(recorded) => recorded.clone(),
        }
    }
}

impl MixedRow {
    /// Builds the mixture: a token of X where `kept` is true, a labelled token of Y elsewhere.
    fn mixture(&self, kept: Vec<bool>) -> Mixture {
        let mut mixture = Mixture { input_ids: self.prompt_ids.clone(), ..Mixture::default() };
        for (i, kept) in kept.into_iter().enumerate() {
            if kept {
                mixture.input_ids.push(self.response_ids[i]);
            } else {
                mixture.labelled.push(mixture.input_ids.len());
                mixture.labels.push(self.labels[i]);
                mixture.input_ids.push(self.draft_ids[i]);
            }
        }
        mixture
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::pair::{response_row, responses};

    #[test]
    fn the_drafts_tokens_in_a_mixture_have_labels() {
        let row = &responses(1, 40, 11)[0];
        let columns = row.draft.as_ref().unwrap();
        let training = TrainingRow::new(row, 1000, MixedLabels::Sampled).unwrap().unwrap();
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
    fn each_kind_of_label_belongs_to_its_token() {
        let mut row = response_row("set#0", &[1], &[2, 3, 4], &[5, 6, 7], &[0.25, 0.5, 1.0]);
        let draft = row.draft.as_mut().unwrap();
        draft.overlap = vec![0.375, 0.125, 0.75];
        draft.draft_top_ids = vec![2, 9, 4];
        draft.target_top_ids = vec![2, 3, 8];
        let mixture = |labels: MixedLabels| {
            let mixture = TrainingRow::new(&row, 10, labels).unwrap().unwrap().mixture(0, 0, 0.0);
            assert_eq!(mixture.labelled, [1, 2, 3]);
            (mixture.input_ids, mixture.labels)
        };
        assert_eq!(mixture(MixedLabels::Sampled), (vec![1, 5, 6, 7], vec![0.25, 0.5, 1.0]));
        assert_eq!(mixture(MixedLabels::Overlap), (vec![1, 5, 6, 7], vec![0.375, 0.125, 0.75]));
        assert_eq!(mixture(MixedLabels::Greedy), (vec![1, 2, 9, 4], vec![1.0, 0.0, 0.0]));
        row.prompt_ids.clear();
        assert!(TrainingRow::new(&row, 10, MixedLabels::Greedy).unwrap().is_none());
    }

    #[test]
    fn mixtures_are_a_function_of_seed_epoch_and_row() {
        let rows = responses(2, 60, 3);
        let [first, second] = [0, 1]
            .map(|i| TrainingRow::new(&rows[i], 1000, MixedLabels::Sampled).unwrap().unwrap());
        assert_eq!(first.mixture(1, 1, 0.5), first.mixture(1, 1, 0.5));
        assert_ne!(first.mixture(1, 1, 0.5).labelled, first.mixture(1, 2, 0.5).labelled);
        assert_ne!(first.mixture(1, 1, 0.5).labelled, first.mixture(2, 1, 0.5).labelled);
        assert_ne!(first.mixture(1, 1, 0.5).labelled, second.mixture(1, 1, 0.5).labelled);
    }

    #[test]
    fn a_long_row_is_cut_to_the_context() {
        let row = response_row("set#0", &[1, 2, 3], &[4, 5, 6], &[7, 8, 9], &[0.5; 3]);
        let inputs = |context| {
            let row = TrainingRow::new(&row, context, MixedLabels::Sampled).unwrap();
            row.map(|row| row.mixture(0, 0, 0.0).input_ids)
        };
        assert_eq!(inputs(6).unwrap(), [1, 2, 3, 7, 8, 9]);
        assert_eq!(inputs(5).unwrap(), [1, 2, 3, 7, 8]);
        assert_eq!(inputs(4).unwrap(), [1, 2, 3, 7]);
        assert_eq!(inputs(3), None);
        assert_eq!(inputs(1), None);
    }

    #[test]
    fn an_error_names_a_row_without_draft_columns() {
        let mut row = response_row("set#3", &[1], &[2, 3], &[4, 5], &[0.5; 2]);
        row.draft = None;
        let refused = TrainingRow::new(&row, 10, MixedLabels::Sampled);
        let message = refused.unwrap_err().to_string();
        for part in ["`set#3`", "without a drafter", "kind = \"model\""] {
            assert!(message.contains(part), "{message}");
        }
    }
}

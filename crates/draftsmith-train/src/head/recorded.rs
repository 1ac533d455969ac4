//! Training rows from recorded rollouts: the candidates of decoding rounds along a response, with
//! their acceptance as labels.
//!
//! These candidates are distributed as in decoding. At each position of a response there is the
//! draft's candidate after an accepted prefix, drawn as in decoding. A rejected candidate is
//! followed by the draft's next proposals. Rows are not mixed, so they are the same in every epoch.

use std::collections::HashMap;

use draftsmith_data::{ResponseRow, RolloutRow};
use draftsmith_theory::acceptance_prob;

use crate::error::{Result, TrainError};
use crate::head::rows::{Branch, Mixture};

/// Rollouts of the draft along the training responses, recorded without a head.
#[derive(Debug, Clone, Copy)]
pub struct RecordedRollouts<'a> {
    /// The rows. Those of one response are adjacent, and begin with the row of the response itself.
    pub rows: &'a [RolloutRow],
    /// Whether decoding was greedy. If so, labels are 0 or 1, and candidates after a rejected one
    /// have no label. Otherwise labels are min(1, p/q).
    pub is_greedy: bool,
}

/// The recorded rows of each response, by the response's id.
pub(crate) struct RolloutsById<'a> {
    by_id: HashMap<&'a str, &'a [RolloutRow]>,
    is_greedy: bool,
}

impl<'a> From<RecordedRollouts<'a>> for RolloutsById<'a> {
    fn from(rollouts: RecordedRollouts<'a>) -> Self {
        let chunks = rollouts.rows.chunk_by(|one, next| one.id == next.id);
        let by_id = chunks.map(|rows| (rows[0].id.as_str(), rows)).collect();
        Self { by_id, is_greedy: rollouts.is_greedy }
    }
}

impl RolloutsById<'_> {
    /// Builds a row's input and labels, cut to `context` tokens: the response with labels at
    /// accepted candidates, and a branch for each rejected one. Returns `None` if no candidate has
    /// a label.
    ///
    /// # Errors
    /// If there are no rollouts of the row's response.
    pub(crate) fn mixture(&self, row: &ResponseRow, context: usize) -> Result<Option<Mixture>> {
        let first = row.prompt_ids.len();
        let len = row.response_ids.len().min(context.saturating_sub(first));
        if first == 0 || len == 0 {
            return Ok(None);
        }
        let invalid = |problem| TrainError::rollouts(&row.id, problem);
        let rows = self.by_id.get(row.id.as_str()).ok_or_else(|| invalid("there are none"))?;
        let (response, rollouts) = rows.split_first().expect("a chunk is not empty");
        let recorded = &response.candidates.candidate_ids;
        if !response.is_response || !recorded.starts_with(&row.response_ids[..len]) {
            return Err(invalid("they belong to another response"));
        }
        let mut input_ids = row.prompt_ids.clone();
        input_ids.extend(&row.response_ids[..len]);
        let mut mixture = Mixture { input_ids, ..Mixture::default() };
        let mut rollouts = rollouts.iter().peekable();
        for at in 0..len {
            let rollout = rollouts.next_if(|rollout| rollout.start as usize == at);
            // No candidate is drafted for the last token that the length limit allows.
            if at + 1 >= response.limit as usize {
                break;
            }
            match rollout {
                None => {
                    mixture.labelled.push(first + at);
                    mixture.labels.push(self.label(response, at, true));
                }
                Some(rollout) => {
                    let along = &recorded[at..];
                    mixture.branches.push(self.branch(rollout, along, first + at, context));
                }
            }
        }
        let is_labelled = !(mixture.labels.is_empty() && mixture.branches.is_empty());
        Ok(is_labelled.then_some(mixture))
    }

    /// Builds a branch of the candidates drafted at `start`, which is less than `context`. They are
    /// a rejected candidate and those after it, or a whole round, which may begin with accepted
    /// candidates. `along` lists the response's tokens from `start` on.
    fn branch(&self, rollout: &RolloutRow, along: &[u32], start: usize, context: usize) -> Branch {
        let ids = &rollout.candidates.candidate_ids;
        let num_accepted = ids.iter().zip(along).take_while(|(id, token)| id == token).count();
        let num_known = if self.is_greedy { num_accepted + 1 } else { ids.len() };
        let len = num_known.min(ids.len()).min(context - start);
        Branch {
            start,
            token_ids: ids[..len].to_vec(),
            labels: (0..len).map(|at| self.label(rollout, at, at < num_accepted)).collect(),
        }
    }

    fn label(&self, row: &RolloutRow, at: usize, is_accepted: bool) -> f32 {
        if self.is_greedy {
            return if is_accepted { 1.0 } else { 0.0 };
        }
        let candidates = &row.candidates;
        acceptance_prob(candidates.target_log_prob[at] as f32, candidates.draft_log_prob[at] as f32)
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_data::RolloutCandidates;

    use super::*;
    use crate::tests::pair::response_row;

    fn rollout(start: u32, ids: &[u32], acceptance_probs: &[f64], limit: u32) -> RolloutRow {
        let num = ids.len();
        RolloutRow {
            id: "set#0".to_owned(),
            prompt_ids: Vec::new(),
            start,
            limit,
            is_response: false,
            candidates: RolloutCandidates {
                candidate_ids: ids.to_vec(),
                candidate_prob: vec![0.5; num],
                confidence: vec![0.5; num],
                confidence_of_ten: vec![0.5; num],
                draft_entropy: vec![1.0; num],
                predicted_acceptance_prob: None,
                draft_log_prob: vec![-0.25; num],
                target_log_prob: acceptance_probs.iter().map(|p| -0.25 + p.ln()).collect(),
            },
        }
    }

    /// Makes a response of four tokens: accepted, rejected, accepted, and the last one that the limit allows.
    fn recorded() -> (ResponseRow, Vec<RolloutRow>) {
        let row = response_row("set#0", &[1, 2], &[3, 4, 5, 6], &[0; 4], &[0.5; 4]);
        let response = rollout(0, &[3, 4, 5, 6], &[0.5, 1.0, 0.25, 1.0], 4);
        let rollouts = rollout(1, &[7, 8], &[0.125, 0.75], 4);
        (row, vec![RolloutRow { is_response: true, prompt_ids: vec![1, 2], ..response }, rollouts])
    }

    fn mixture(is_greedy: bool, context: usize) -> Option<Mixture> {
        let (row, rows) = recorded();
        let rollouts = RolloutsById::from(RecordedRollouts { rows: &rows, is_greedy });
        rollouts.mixture(&row, context).unwrap()
    }

    #[test]
    fn accepted_candidates_and_branches_have_labels() {
        let found = mixture(false, 64).unwrap();
        assert_eq!(found.input_ids, [1, 2, 3, 4, 5, 6]);
        assert_eq!(found.labelled, [2, 4]);
        assert_eq!(found.labels, [0.5, 0.25]);
        let [branch] = &found.branches[..] else { panic!("{found:?}") };
        assert_eq!((branch.start, &branch.token_ids), (3, &vec![7, 8]));
        assert_eq!(branch.labels, [0.125, 0.75]);
        assert_eq!(found.all_labels().collect::<Vec<_>>(), [0.5, 0.25, 0.125, 0.75]);
    }

    #[test]
    fn greedy_labels_are_0_or_1_and_end_at_a_rejection() {
        let found = mixture(true, 64).unwrap();
        assert_eq!(found.labels, [1.0, 1.0]);
        assert_eq!(
            (&found.branches[0].token_ids, &found.branches[0].labels),
            (&vec![7], &vec![0.0])
        );
    }

    #[test]
    fn a_round_has_labels_up_to_its_rejection() {
        let (row, mut rows) = recorded();
        rows[1] = rollout(1, &[4, 5, 8, 6], &[1.0, 0.5, 0.125, 0.75], 4);
        let branch = |is_greedy| {
            let rollouts = RolloutsById::from(RecordedRollouts { rows: &rows, is_greedy });
            rollouts.mixture(&row, 64).unwrap().unwrap().branches.remove(0)
        };
        let greedy = branch(true);
        assert_eq!((greedy.token_ids, greedy.labels), (vec![4, 5, 8], vec![1.0, 1.0, 0.0]));
        assert_eq!(branch(false).labels, [1.0, 0.5, 0.125, 0.75]);
    }

    #[test]
    fn a_long_row_is_cut_to_the_context() {
        let found = mixture(false, 4).unwrap();
        assert_eq!((found.input_ids.len(), found.labelled.len()), (4, 1));
        assert_eq!(found.branches[0].token_ids, [7]);
        assert_eq!(mixture(false, 3).unwrap().branches, []);
        assert_eq!(mixture(false, 2), None);
    }

    #[test]
    fn rollouts_of_another_response_are_an_error() {
        let (mut row, rows) = recorded();
        let rollouts = RolloutsById::from(RecordedRollouts { rows: &rows, is_greedy: false });
        row.response_ids[1] = 9;
        let message = rollouts.mixture(&row, 64).unwrap_err().to_string();
        assert!(message.contains("`set#0`") && message.contains("another response"), "{message}");
        row.id = "set#1".to_owned();
        let message = rollouts.mixture(&row, 64).unwrap_err().to_string();
        assert!(message.contains("`set#1`") && message.contains("there are none"), "{message}");
    }
}

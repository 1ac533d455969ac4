//! Hidden states of the draft for rows of rollouts, cached on disk: at all tokens of a row and of what
//! is drafted instead. Rollouts are not mixed, so every epoch and every run has the same states.

use burn::tensor::Tensor;
use draftsmith_model::vectors::values;

use crate::error::TrainError;
use crate::head::rows::Mixture;
use crate::states::{StateFile, StateFiles, StatesOf, problems};

/// The file of cached states.
#[derive(Debug)]
pub(crate) struct StoredHidden(StateFile);

/// A row whose states are cached.
pub(crate) struct StoredRow<'r> {
    pub(crate) id: &'r str,
    pub(crate) mixture: Mixture,
}

impl StoredHidden {
    /// Opens the file for rows that a draft of `width` reads.
    ///
    /// # Errors
    /// If the disk has no room for it, or it cannot be opened.
    pub(crate) fn open(
        mut files: StateFiles<'_>,
        width: usize,
        rows: &[StoredRow<'_>],
    ) -> Result<Self, TrainError> {
        let of_draft = rows.iter().map(|StoredRow { id, mixture }| {
            let mut ids = mixture.input_ids.clone();
            for branch in &mixture.branches {
                ids.extend([u32::MAX, branch.start as u32]);
                ids.extend(&branch.token_ids);
            }
            StatesOf { id, num_states: num_tokens(mixture), ids }
        });
        files.add("", width, of_draft);
        Ok(Self(files.open()?.remove(0)))
    }

    /// The states of a row, `[tokens, hidden]` in row-major order, from `compute` if they are not cached.
    pub(crate) fn of_row(&self, id: &str, compute: impl FnOnce() -> Tensor<2>) -> Vec<f32> {
        self.0.read(id).unwrap_or_else(|| self.0.keep(id, values(compute())))
    }

    /// What went wrong, to report when training ends.
    pub(crate) fn problems(&self) -> Vec<String> {
        problems(&[&self.0])
    }
}

/// The tokens that the draft reads of a row: its own, and those of its branches.
pub(crate) fn num_tokens(mixture: &Mixture) -> usize {
    let of_branches = mixture.branches.iter().map(|branch| branch.token_ids.len());
    mixture.input_ids.len() + of_branches.sum::<usize>()
}

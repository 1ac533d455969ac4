//! The hidden states of rows of rollouts, kept on the disk: the draft's at all tokens of a row and of
//! what is drafted instead, and the target's, where heads read them. Nothing of them is mixed: they
//! are one text in every epoch and every run, and so have one set of hidden states.

use burn::tensor::Tensor;
use draftsmith_model::vectors::values;
use draftsmith_model::{DrafterModel, Lengths};

use crate::error::TrainError;
use crate::head::rows::Mixture;
use crate::states::{RowStatesPlan, StateFile, StateFiles, problems};

/// The files of a training.
#[derive(Debug)]
pub(crate) struct StoredHidden {
    draft: StateFile,
    target: Option<StateFile>,
}

/// A row whose states are kept.
pub(crate) struct StoredRow<'r> {
    pub(crate) id: &'r str,
    /// As it is in every epoch, whatever rounds it is cut into.
    pub(crate) mixture: Mixture,
}

impl StoredHidden {
    /// Opens the files of rows that a draft of `width` reads, and a target, if it is read.
    ///
    /// # Errors
    /// If there is no room for them, or one cannot be opened.
    pub(crate) fn open(
        mut files: StateFiles<'_>,
        width: usize,
        target_width: Option<usize>,
        rows: &[StoredRow<'_>],
    ) -> Result<Self, TrainError> {
        let of_draft = rows.iter().map(|StoredRow { id, mixture }| {
            let mut ids = mixture.input_ids.clone();
            for branch in &mixture.branches {
                ids.extend([u32::MAX, branch.start as u32]);
                ids.extend(&branch.token_ids);
            }
            RowStatesPlan { id, num_states: num_tokens(mixture), ids }
        });
        files.add("", width, of_draft);
        if let Some(width) = target_width {
            let of_target = rows.iter().map(|StoredRow { id, mixture }| {
                let ids = mixture.input_ids.clone();
                RowStatesPlan { id, num_states: ids.len(), ids }
            });
            files.add("-target", width, of_target);
        }
        let mut files = files.open()?.into_iter();
        let draft = files.next().expect("one was added");
        Ok(Self { draft, target: files.next() })
    }

    /// The draft's states of a row, `[tokens, hidden]` one after the other, which `compute` gives where
    /// they are not there.
    pub(crate) fn of_draft(&self, id: &str, compute: impl FnOnce() -> Tensor<2>) -> Vec<f32> {
        read_or_keep(&self.draft, id, compute)
    }

    /// The target's of a row.
    pub(crate) fn of_target(&self, target: &DrafterModel, id: &str, ids: &[u32]) -> Vec<f32> {
        let file = self.target.as_ref().expect("it is read");
        read_or_keep(file, id, || target.hidden_states(&[ids], Lengths::AsGiven).squeeze_dim(0))
    }

    /// What went wrong, to be told when training ends.
    pub(crate) fn problems(&self) -> Vec<String> {
        let files: Vec<&StateFile> = [&self.draft].into_iter().chain(&self.target).collect();
        problems(&files)
    }
}

fn read_or_keep(file: &StateFile, id: &str, compute: impl FnOnce() -> Tensor<2>) -> Vec<f32> {
    file.read(id).unwrap_or_else(|| file.store(id, values(compute())))
}

/// The tokens that the draft reads of a row: its own, and those of its branches.
pub(crate) fn num_tokens(mixture: &Mixture) -> usize {
    let of_branches = mixture.branches.iter().map(|branch| branch.token_ids.len());
    mixture.input_ids.len() + of_branches.sum::<usize>()
}

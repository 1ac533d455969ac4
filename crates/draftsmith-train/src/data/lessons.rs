//! What a training sees, written down: for a comparison with another trainer that is to see the
//! same.

use serde::Serialize;

use crate::data::batches::{BatchSource, Loader, Loaders, VALIDATION_EPOCH};

/// What one optimiser step learns from, or a part of what validation is scored on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lesson {
    /// The epoch, counted from 1; 0 is validation.
    pub epoch: usize,
    /// The batches, in order, and the rows of each.
    pub batches: Vec<Vec<Example>>,
}

/// A row of a batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Example {
    /// The row's id.
    pub row_id: String,
    /// What the frozen model reads, without padding.
    pub input_ids: Vec<u32>,
    /// The positions in `input_ids` that the loss is taken at, rising.
    pub positions: Vec<usize>,
    /// What a head is to predict at each of `positions`; none for an adapter, which learns what the
    /// target says.
    pub labels: Vec<f32>,
}

impl<S: BatchSource> Loaders<S> {
    /// All epochs' steps in order, then what validation is scored on.
    pub(crate) fn lessons(&self) -> Vec<Lesson> {
        let of_epoch = |loader: &Loader<S>, epoch: usize| -> Vec<Lesson> {
            let examples = loader.examples(epoch as u64).into_iter();
            examples.map(|batches| Lesson { epoch, batches }).collect()
        };
        let mut lessons: Vec<Lesson> =
            (1..=self.num_epochs).flat_map(|epoch| of_epoch(&self.training, epoch)).collect();
        lessons.extend(of_epoch(&self.validation, VALIDATION_EPOCH as usize));
        lessons
    }
}

//! What a training sees, step by step, as plain data: for a comparison with another trainer that is
//! to see the same.

use serde::Serialize;

/// What one optimizer step learns from, or a part of what validation is scored on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepExamples {
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
    /// What a head is to predict at each of `positions`; none for an adapter, which learns the
    /// target's distribution.
    pub labels: Vec<f32>,
}

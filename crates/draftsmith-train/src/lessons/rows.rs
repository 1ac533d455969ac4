//! Rows of lessons, and their conversion to a padded batch.

use std::ops::Range;
use std::sync::OnceLock;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_data::ResponseRow;
use draftsmith_model::Lengths;

/// The parts of a [`ResponseRow`] that the training of a self-draft needs, with at least one supervised position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LessonRow {
    pub(crate) id: String,
    /// The prompt and the response without its last token.
    pub(crate) input_ids: Vec<u32>,
    /// The token that the last position of `input_ids` predicts.
    pub(crate) last_id: u32,
    /// The first supervised position: it and all later ones predict a token of the response.
    pub(crate) first_supervised: usize,
    /// The target's final hidden states at the supervised positions. They are set once they are
    /// computed, if there is room in memory.
    pub(crate) teacher: OnceLock<Vec<f32>>,
}

impl LessonRow {
    /// Cuts a row to `max_len` tokens. The first supervised position is `first` or later. Returns
    /// `None` if no position is supervised.
    ///
    /// Position j predicts token j + 1, so it is supervised if and only if token j + 1 belongs to
    /// the response. These positions go from the last token of the prompt to the last but one of
    /// the response. The authors' code shifts hidden states and targets by one but not its mask, so
    /// its supervision begins two tokens late. Here the adapter reads BOS, as in decoding.
    pub(crate) fn new(row: &ResponseRow, first: usize, max_len: usize) -> Option<Self> {
        let mut input_ids: Vec<u32> =
            row.prompt_ids.iter().chain(&row.response_ids).copied().take(max_len).collect();
        let last_id = input_ids.pop()?;
        let first_supervised = row.prompt_ids.len().saturating_sub(1).max(first);
        let is_usable = first_supervised < input_ids.len();
        let (id, teacher) = (row.id.clone(), OnceLock::new());
        is_usable.then(|| Self { id, input_ids, last_id, first_supervised, teacher })
    }

    pub(crate) fn num_supervised(&self) -> usize {
        self.input_ids.len() - self.first_supervised
    }

    /// Returns the response's tokens that supervised positions predict, except the last one.
    pub(crate) fn predicted(&self) -> &[u32] {
        &self.input_ids[self.first_supervised + 1..]
    }

    /// Lists the token that each supervised position predicts.
    pub(crate) fn next_ids(&self) -> impl Iterator<Item = u32> {
        self.predicted().iter().copied().chain([self.last_id])
    }
}

/// The tokens of several rows, padded to one length.
pub(crate) struct Padded {
    /// The token ids, `[rows, seq]`.
    pub(crate) ids: Tensor<2, Int>,
    /// The supervised positions of each row.
    pub(crate) wanted: Vec<Range<usize>>,
}

/// Computes a batch's numbers of rows and of positions, including padding.
pub(crate) fn padded_dims(rows: &[&LessonRow], lengths: Lengths, batch_size: usize) -> [usize; 2] {
    let seq = rows.iter().map(|row| row.input_ids.len()).max().unwrap_or(0);
    [lengths.padded_batch(rows.len(), batch_size), lengths.padded(seq)]
}

impl Padded {
    /// Pads rows on the right, which does not affect a causal model's states on the left.
    pub(crate) fn new(
        rows: &[&LessonRow],
        lengths: Lengths,
        batch_size: usize,
        device: &Device,
    ) -> Self {
        let [num_rows, seq] = padded_dims(rows, lengths, batch_size);
        let mut ids: Vec<i32> = Vec::with_capacity(num_rows * seq);
        for (nth, row) in rows.iter().enumerate() {
            ids.extend(row.input_ids.iter().map(|id| *id as i32));
            ids.resize((nth + 1) * seq, 0);
        }
        ids.resize(num_rows * seq, 0);
        let wanted = rows.iter().map(|row| row.first_supervised..row.input_ids.len());
        let mut wanted: Vec<Range<usize>> = wanted.collect();
        wanted.resize(num_rows, 0..0);
        let ids = Tensor::from_data(TensorData::new(ids, [num_rows, seq]), device);
        Self { ids, wanted }
    }
}

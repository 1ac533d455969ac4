//! Rows of logits on the host: what models answer with and verification reads.

use std::ops::Range;

/// Rows of logits over the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// Rows laid end to end, each `vocab_size` long.
    ///
    /// # Panics
    /// If the values do not make whole rows.
    pub fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        assert!(values.len().is_multiple_of(vocab_size), "logits come in whole rows");
        Self { values, vocab_size }
    }

    /// The number of rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// One row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// Some rows, laid end to end.
    pub fn of_rows(&self, rows: Range<usize>) -> &[f32] {
        &self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }

    /// All rows in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

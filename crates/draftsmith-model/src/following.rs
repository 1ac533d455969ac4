//! A batch of new tokens that follow those in a cache on a device. It says where their keys and
//! values are written, which keys and values they read, and what each row may attend to.
//!
//! Attention runs over all sequences of a forward at once. The sequence with the most rows and the
//! longest sequence determine the lengths, in buckets. Padding rows
//! ([`DeviceRows`](crate::rows::DeviceRows)) are treated as tokens that follow the last sequence:
//! no other row attends to them, and the next tokens overwrite them.

use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::buckets::{padded_keys, padded_rows, padded_sequences};
use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::Reach;

/// The number added to masked scores. Softmax turns the sum into exactly 0.
pub(crate) const MASKED: f32 = -1e30;

/// The new rows of a forward, prepared for attention over a cache on a device.
#[derive(Debug, Clone)]
pub(crate) struct Following {
    /// The runs, padded to a power of two by repeating the last one.
    runs: Vec<PlacedRun>,
    /// The number of rows per run in the batch, which is a bucket. A shorter run is padded by
    /// repeating its last row.
    num_rows: usize,
    num_keys: usize,
    placed: Placed,
}

/// The places of the rows in the forward and in the cache.
#[derive(Debug, Clone)]
enum Placed {
    /// One run, whose rows are in order.
    One,
    Several(Box<Several>),
}

#[derive(Debug, Clone)]
struct Several {
    /// The slot, head and position where each row's keys are written, `[rows, kv_heads, 3]`.
    written: Tensor<3, Int>,
    /// The slots to read, `[runs]`; `None` if they are all slots in order.
    slots: Option<Tensor<1, Int>>,
    /// For each row of the batch, its row in the forward, `[runs · num_rows]`.
    rows: Tensor<1, Int>,
    /// For each row of the forward, its row in the batch, `[rows]`.
    back: Tensor<1, Int>,
}

impl Following {
    /// Prepares the attention of `rows`, which
    /// [`KvCache::extend`](crate::kv_cache::KvCache::extend) placed in a cache with `num_slots`
    /// slots. The last `num_padding` rows of the last run are padding.
    pub(crate) fn new(
        rows: PlacedRows<'_>,
        num_padding: usize,
        num_slots: usize,
        num_kv_heads: usize,
        device: &Device,
    ) -> Self {
        let runs: &[PlacedRun] = &rows.runs().collect::<Vec<_>>();
        let end = runs.iter().map(|run| run.start + run.num_rows).max().unwrap_or(0);
        let num_keys = padded_keys(end);
        if let [only] = runs {
            let (runs, num_rows) = (vec![*only], only.num_rows);
            return Self { runs, num_rows, num_keys, placed: Placed::One };
        }
        let mut batch = runs.to_vec();
        let last = batch.len() - 1;
        batch[last].num_rows -= num_padding;
        let num_rows = padded_rows(batch.iter().map(|run| run.num_rows).max().unwrap_or(0));
        let back = rows_of(&batch).map(|(nth, row)| nth * num_rows + row);
        let mut back: Vec<usize> = back.collect();
        back.resize(back.len() + num_padding, back[back.len() - 1]);
        let firsts = batch.iter().scan(0, |end, run| {
            *end += run.num_rows;
            Some(*end - run.num_rows)
        });
        let mut firsts: Vec<usize> = firsts.collect();
        let num_runs = padded_sequences(batch.len());
        batch.resize(num_runs, batch[last]);
        firsts.resize(num_runs, firsts[last]);
        let rows = batch.iter().zip(&firsts).flat_map(|(run, first)| {
            (0..num_rows).map(move |row| first + row.min(run.num_rows - 1))
        });
        let written = rows_of(runs).flat_map(|(nth, row)| {
            let PlacedRun { slot, start, .. } = runs[nth];
            (0..num_kv_heads).flat_map(move |head| [slot, head, start + row])
        });
        let slots = batch.iter().map(|run| run.slot);
        let are_all = slots.clone().eq(0..num_slots);
        let placed = Placed::Several(Box::new(Several {
            written: indices(written, [back.len(), num_kv_heads, 3], device),
            slots: (!are_all).then(|| indices(slots, [num_runs], device)),
            rows: indices(rows, [num_runs * num_rows], device),
            back: indices(back.iter().copied(), [back.len()], device),
        }));
        Self { runs: batch, num_rows, num_keys, placed }
    }

    /// Builds the attention mask, `[runs, 1, num_rows, num_keys]`: 0 for a key that a row may
    /// attend to, otherwise [`MASKED`].
    pub(crate) fn mask(
        &self,
        rows: PlacedRows<'_>,
        reach: &Reach,
        dtype: FloatDType,
        device: &Device,
    ) -> Tensor<4> {
        let Self { runs, num_rows, num_keys, .. } = self;
        let mut mask = vec![MASKED; runs.len() * num_rows * num_keys];
        let entries = runs.iter().flat_map(|run| {
            let entries = (0..*num_rows).map(|row| run.start + row.min(run.num_rows - 1));
            entries.map(|entry| (rows.tree(run.slot), entry))
        });
        for ((tree, entry), seen) in entries.zip(mask.chunks_exact_mut(*num_keys)) {
            let Some(tree) = tree else {
                seen[reach.first_seen(entry)..=entry].fill(0.0);
                continue;
            };
            let first_seen = reach.first_seen(tree.position(entry));
            seen[first_seen.min(tree.num_standing)..reach.end_seen(tree, entry)].fill(0.0);
            tree.hidden_from(entry, first_seen).for_each(|other| seen[other] = MASKED);
        }
        let mask = TensorData::new(mask, [runs.len(), 1, *num_rows, *num_keys]);
        Tensor::<4>::from_data(mask, device).cast(dtype)
    }

    /// Arranges the rows of a forward as a batch of runs.
    ///
    /// # Shapes
    /// - rows: `[1, rows, heads, head_dim]`
    /// - output: `[runs, num_rows, heads, head_dim]`
    pub(crate) fn batch(&self, rows: Tensor<4>) -> Tensor<4> {
        let Placed::Several(several) = &self.placed else { return rows };
        let [_, _, heads, head_dim] = rows.dims();
        let rows = rows.select(1, several.rows.clone());
        rows.reshape([self.runs.len(), self.num_rows, heads, head_dim])
    }

    /// Undoes [`Self::batch`]: returns the batch's rows in the order of the forward.
    ///
    /// # Shapes
    /// - batch: `[runs, num_rows, width]`
    /// - output: `[1, rows, width]`
    pub(crate) fn unbatch(&self, batch: Tensor<3>) -> Tensor<3> {
        let Placed::Several(several) = &self.placed else { return batch };
        let [runs, num_rows, width] = batch.dims();
        batch.reshape([1, runs * num_rows, width]).select(1, several.back.clone())
    }

    /// Writes the rows' keys or values, and returns those that the batch reads.
    ///
    /// # Shapes
    /// - stored: `[slots, kv_heads, allocated, head_dim]`, written in place if there is no other
    ///   reference to it
    /// - new: `[1, rows, kv_heads, head_dim]`
    /// - output: `stored`, and `[runs, kv_heads, num_keys, head_dim]`
    pub(crate) fn append(&self, stored: Tensor<4>, new: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [num_slots, heads, _, head_dim] = stored.dims();
        let seen = |slots| [slots, 0..heads, 0..self.num_keys, 0..head_dim];
        match (&self.placed, &self.runs[0]) {
            (Placed::One, PlacedRun { slot, start, num_rows }) => {
                let slots = *slot..slot + 1;
                let written = [slots.clone(), 0..heads, *start..start + num_rows, 0..head_dim];
                let stored = stored.slice_assign(written, new.swap_dims(1, 2));
                let read = stored.clone().slice(seen(slots));
                (stored, read)
            }
            (Placed::Several(several), _) => {
                let written = several.written.clone();
                let stored =
                    stored.scatter_nd(written, new.squeeze_dim::<3>(0), IndexingUpdateOp::Assign);
                let read = stored.clone().slice(seen(0..num_slots));
                let read = match &several.slots {
                    Some(slots) => read.select(0, slots.clone()),
                    None => read,
                };
                (stored, read)
            }
        }
    }
}

/// Lists for each row the index of its run and its index within the run.
fn rows_of(runs: &[PlacedRun]) -> impl Iterator<Item = (usize, usize)> {
    runs.iter().enumerate().flat_map(|(nth, run)| (0..run.num_rows).map(move |row| (nth, row)))
}

fn indices<const D: usize>(
    values: impl Iterator<Item = usize>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    let values: Vec<i32> = values.map(|value| value as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

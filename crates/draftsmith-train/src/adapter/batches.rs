//! Batches of sequences: what an adapter is given of rows and the frozen target.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, DraftVocabulary, Lengths, vectors};

use crate::adapter::distillation::{Lesson, LmHead, Tokens};
use crate::adapter::rows::{AdapterRow, Padded, padded_dims};
use crate::adapter::settings::Teaching;
use crate::adapter::stored::StoredStates;
use crate::data::batches::{BatchSource, Example, TrainingBatch, real};
use crate::run::devices::PerDevice;

/// A few rows, as the adapter and its loss see them.
#[derive(Debug, Clone)]
pub(crate) struct AdapterBatch {
    /// `[rows, seq, hidden]` each: the frozen target's hidden states at the exit layers, padded on
    /// the right.
    pub(crate) features: Vec<Tensor<3>>,
    /// `[tokens]`: the supervised positions, in `features` seen as `[rows · seq, hidden]`, and
    /// padding.
    pub(crate) supervised: Tensor<1, Int>,
    pub(crate) tokens: Tokens,
    /// What is learned there.
    pub(crate) teacher: Lesson,
    /// The target's own.
    pub(crate) lm_head: LmHead,
    /// The rows' ids, for messages.
    pub(crate) row_ids: Vec<String>,
    /// The share of the step's supervised tokens that is in this batch.
    pub(crate) step_share: f64,
    /// Whether the step's gradients are complete after this batch.
    pub(crate) ends_step: bool,
}

impl TrainingBatch for AdapterBatch {
    fn row_ids(&self) -> &[String] {
        &self.row_ids
    }

    fn num_supervised(&self) -> usize {
        self.tokens.num
    }

    fn ends_step(&self) -> bool {
        self.ends_step
    }
}

/// A target that is only read.
#[derive(Debug, Clone)]
pub(crate) struct FrozenTarget {
    /// Records no autodiff.
    model: CausalLm,
    lm_head: LmHead,
}

impl FrozenTarget {
    /// A target whose LM head has the tokens that are to be drafted, or all.
    pub(crate) fn new(model: CausalLm, vocabulary: Option<&DraftVocabulary>) -> Self {
        let lm_head = LmHead::of(&model);
        let lm_head = match vocabulary {
            Some(vocabulary) => lm_head.narrowed(vocabulary),
            None => lm_head,
        };
        Self { lm_head, model }
    }
}

/// Rows, and the target that reads them.
#[derive(Clone)]
pub(crate) struct AdapterSource {
    pub(crate) targets: PerDevice<FrozenTarget>,
    pub(crate) exit_layers: Vec<usize>,
    pub(crate) teaching: Teaching,
    pub(crate) rows: Vec<Arc<AdapterRow>>,
    pub(crate) batch_size: usize,
    pub(crate) lengths: Lengths,
    /// Bytes that the rows' final hidden states may still take.
    pub(crate) room: Arc<AtomicUsize>,
    /// Hidden states on the disk, instead of those that are computed.
    pub(crate) stored: Option<Arc<StoredStates>>,
}

impl BatchSource for AdapterSource {
    type Batch = AdapterBatch;

    fn num_rows(&self) -> usize {
        self.rows.len()
    }

    fn num_devices(&self) -> usize {
        self.targets.num_devices()
    }

    fn is_used(&self, _row: usize, _epoch: u64) -> bool {
        true
    }

    /// Makes batches of rows of like length, so that little is padding. Each counts by its tokens,
    /// so that a step's gradient is the same however its rows are cut into batches.
    fn step_batches(&self, _epoch: u64, step: &[Vec<usize>]) -> impl Iterator<Item = AdapterBatch> {
        let batches = self.rows_of_batches(step);
        let num_supervised: usize = batches.iter().flatten().map(|row| row.num_supervised()).sum();
        let (num_batches, num_devices) = (batches.len(), self.num_devices());
        (0..num_batches).step_by(num_devices).flat_map(move |start| {
            let num_used = num_devices.min(num_batches - start);
            self.targets.work(num_used, |nth, target| {
                let ends_step = start + nth + 1 == num_batches;
                self.batch(target, &batches[start + nth], num_supervised, ends_step)
            })
        })
    }

    fn step_examples(&self, _epoch: u64, step: &[Vec<usize>]) -> Vec<Vec<Example>> {
        let example = |row: &AdapterRow| Example {
            row_id: row.id.clone(),
            input_ids: row.input_ids.clone(),
            positions: (row.first_supervised..row.input_ids.len()).collect(),
            labels: Vec::new(),
        };
        let batches = self.rows_of_batches(step).into_iter();
        batches.map(|rows| rows.into_iter().map(example).collect()).collect()
    }
}

impl AdapterSource {
    /// A step's rows by batch, those of like length together.
    fn rows_of_batches(&self, step: &[Vec<usize>]) -> Vec<Vec<&AdapterRow>> {
        let mut rows: Vec<&AdapterRow> =
            step.iter().flatten().map(|row| self.rows[*row].as_ref()).collect();
        rows.sort_by_key(|row| row.input_ids.len());
        let batch_size = step.first().map_or(1, Vec::len);
        rows.chunks(batch_size).map(<[&AdapterRow]>::to_vec).collect()
    }

    /// Runs a target on rows of a step that has `step_supervised` supervised tokens.
    fn batch(
        &self,
        target: &FrozenTarget,
        rows: &[&AdapterRow],
        step_supervised: usize,
        ends_step: bool,
    ) -> AdapterBatch {
        let dims = padded_dims(rows, self.lengths, self.batch_size);
        let [_, seq] = dims;
        let mut supervised: Vec<i32> = Vec::new();
        for (nth, row) in rows.iter().enumerate() {
            let start = nth * seq;
            let positions = start + row.first_supervised..start + row.input_ids.len();
            supervised.extend(positions.map(|position| position as i32));
        }
        let device = target.model.device();
        let num_tokens = supervised.len();
        supervised.resize(self.lengths.padded(num_tokens), supervised[num_tokens - 1]);
        let supervised = TensorData::from(supervised.as_slice());
        let supervised = Tensor::<1, Int>::from_data(supervised, &device);
        let are_tokens = real(num_tokens, self.lengths, &device);
        let (features, teacher) = match &self.stored {
            Some(stored) => self.stored_states(stored, target, rows, dims, &supervised),
            None => {
                let Padded { ids, wanted } =
                    Padded::new(rows, self.lengths, self.batch_size, &device);
                let features = target.model.exit_states_at(ids, &self.exit_layers, &wanted);
                let teacher = match self.teaching {
                    Teaching::Response => None,
                    Teaching::Target => {
                        let positions = supervised.clone();
                        Some(self.teacher(target, rows, &features, wanted, positions))
                    }
                };
                (features, teacher)
            }
        };
        let teacher = teacher.map_or_else(|| self.responses(rows, &supervised), Lesson::States);
        AdapterBatch {
            features,
            teacher,
            supervised,
            tokens: Tokens { num: num_tokens, are: are_tokens.map(|are| are.unsqueeze_dim(1)) },
            lm_head: target.lm_head.clone(),
            row_ids: rows.iter().map(|row| row.id.clone()).collect(),
            step_share: num_tokens as f64 / step_supervised as f64,
            ends_step,
        }
    }

    /// The hidden states of rows that are kept on the disk: at the exits, and the final ones at the
    /// supervised positions.
    fn stored_states(
        &self,
        stored: &StoredStates,
        target: &FrozenTarget,
        rows: &[&AdapterRow],
        [num_rows, seq]: [usize; 2],
        supervised: &Tensor<1, Int>,
    ) -> (Vec<Tensor<3>>, Option<Tensor<2>>) {
        let model = &target.model;
        let batch = (self.lengths, self.batch_size);
        let states = stored.states(model, &self.exit_layers, rows, batch);
        let (width, device) = (model.shape().hidden_size, model.device());
        let dtype = model.dtype().float_dtype();
        let features = (0..self.exit_layers.len()).map(|exit| {
            let mut all = Vec::with_capacity(num_rows * seq * width);
            for (nth, row) in states.iter().enumerate() {
                all.extend_from_slice(&row.exits[exit]);
                all.resize((nth + 1) * seq * width, 0.0);
            }
            all.resize(num_rows * seq * width, 0.0);
            vectors::tensor(all, [num_rows, seq, width], &device).cast(dtype)
        });
        let features: Vec<Tensor<3>> = features.collect();
        if self.teaching == Teaching::Response {
            return (features, None);
        }
        let [num_tokens] = supervised.dims();
        let mut last: Vec<f32> = states.iter().flat_map(|row| row.last.iter().copied()).collect();
        // Padding repeats the last token.
        let padding = last[last.len() - width..].to_vec();
        while last.len() < num_tokens * width {
            last.extend_from_slice(&padding);
        }
        let last = vectors::tensor(last, [num_tokens, width], &device).cast(dtype);
        (features, Some(last))
    }

    /// The tokens that follow the supervised positions; the last repeats for padding.
    fn responses(&self, rows: &[&AdapterRow], supervised: &Tensor<1, Int>) -> Lesson {
        let mut ids: Vec<u32> = rows.iter().flat_map(|row| row.next_ids()).collect();
        let last = ids.last().copied().unwrap_or_default();
        ids.resize(supervised.dims()[0], last);
        Lesson::Tokens(ids)
    }

    /// The target's final hidden states at the supervised positions, `[tokens, hidden]`. Those of a
    /// packed target are kept as long as there is room: they cost all layers behind the exits, and
    /// are the same bits whichever rows are beside.
    fn teacher(
        &self,
        target: &FrozenTarget,
        rows: &[&AdapterRow],
        features: &[Tensor<3>],
        mut wanted: Vec<Range<usize>>,
        supervised: Tensor<1, Int>,
    ) -> Tensor<2> {
        let final_states =
            |wanted| target.model.final_states_from(&self.exit_layers, features, wanted);
        if !target.model.is_packed() {
            return at_positions(final_states(&wanted), supervised);
        }
        for (row, wanted) in rows.iter().zip(&mut wanted) {
            if row.teacher.get().is_some() {
                *wanted = 0..0;
            }
        }
        let [_, seq, width] = features[0].dims();
        let last = if wanted.iter().all(Range::is_empty) {
            Vec::new()
        } else {
            vectors::values(final_states(&wanted))
        };
        let mut all = Vec::with_capacity(supervised.dims()[0] * width);
        for (nth, row) in rows.iter().enumerate() {
            if let Some(known) = row.teacher.get() {
                all.extend_from_slice(known);
                continue;
            }
            let first = (nth * seq + row.first_supervised) * width;
            let states = &last[first..first + row.num_supervised() * width];
            all.extend_from_slice(states);
            let take = |room: usize| room.checked_sub(size_of_val(states));
            if self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                // Nobody else makes batches of this row meanwhile.
                let _ = row.teacher.set(states.to_vec());
            }
        }
        vectors::tensor(all, [supervised.dims()[0], width], &features[0].device())
    }
}

/// The hidden states at positions of a batch, row after row.
///
/// # Shapes
/// - hidden: `[rows, seq, hidden]`
/// - positions: `[tokens]`, in `[rows · seq]`
/// - output: `[tokens, hidden]`
pub(crate) fn at_positions(hidden: Tensor<3>, positions: Tensor<1, Int>) -> Tensor<2> {
    let [rows, seq, width] = hidden.dims();
    hidden.reshape([rows * seq, width]).select(0, positions)
}

#[cfg(test)]
mod tests;

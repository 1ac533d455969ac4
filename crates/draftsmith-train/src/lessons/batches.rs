//! Batches of lessons: rows with the frozen target's hidden states.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Int, Tensor};
use draftsmith_model::{CausalLm, DraftVocabulary, Lengths, vectors};

use super::Teaching;
use crate::data::{BatchSource, Example, TrainingBatch, padding_mask};
use crate::lessons::distillation::{Lesson, LessonTokens, LmHead};
use crate::lessons::rows::{LessonRow, Padded, padded_dims};
use crate::lessons::stored::StoredStates;
use crate::run::devices::PerDevice;
use crate::run::optimizer::OptimizerSettings;

/// The number of batches into which the only batch of a step is divided on the CPU, so that each
/// gets its own threads. Splitting single matrix products of a small model between threads can make
/// them slower than one thread would.
const CPU_BATCHES: usize = 2;

/// Returns the maximum number of batches in a step.
pub(crate) fn batches_a_step(optimizer: &OptimizerSettings) -> usize {
    optimizer.gradient_accumulation.max(CPU_BATCHES)
}

/// A batch of rows, as inputs of the drafter and its loss.
#[derive(Debug, Clone)]
pub(crate) struct LessonBatch {
    /// The frozen target's hidden states after each exit layer, `[rows, seq, hidden]`, padded on
    /// the right.
    pub(crate) features: Vec<Tensor<3>>,
    /// The target's token embeddings, `[rows, seq, hidden]`; `None` if the drafter does not read
    /// them.
    pub(crate) embedded: Option<Tensor<3>>,
    /// The token ids, `[rows, seq]`, padded on the right.
    pub(crate) ids: Tensor<2, Int>,
    /// The supervised positions of each row.
    pub(crate) wanted: Vec<Range<usize>>,
    /// For each supervised position, the number of its next token in the draft vocabulary (or the
    /// token's id if all tokens may be drafted). `None` for a token outside the draft vocabulary.
    pub(crate) next_ids: Vec<Option<u32>>,
    pub(crate) tokens: LessonTokens,
    /// The labels at the supervised positions.
    pub(crate) teacher: Lesson,
    /// The target's LM head.
    pub(crate) lm_head: LmHead,
    /// The kind of padding that the batch's tensors have.
    pub(crate) lengths: Lengths,
}

impl LessonBatch {
    /// Marks the supervised tokens of a step, numbered from 0. The first `step` tokens of each row
    /// are not supervised, since the earliest round begins at the first supervised position.
    ///
    /// # Shapes
    /// - output: `[tokens, 1]`, as [`LessonTokens::are`]
    pub(crate) fn are_supervised(&self, step: usize) -> Option<Tensor<2>> {
        let all = self.tokens.are.clone();
        if step == 0 {
            return all;
        }
        let of_row = |wanted: &Range<usize>| (0..wanted.len()).map(|nth| nth >= step);
        let are = self.wanted.iter().flat_map(of_row).map(|is| if is { 1.0 } else { 0.0 });
        let mut are: Vec<f32> = are.collect();
        are.resize(self.lengths.padded(are.len()), 0.0);
        let are = Tensor::<1>::from_floats(are.as_slice(), &self.features[0].device());
        let are = are.unsqueeze_dim(1);
        Some(match all {
            Some(all) => are * all,
            None => are,
        })
    }
}

/// The frozen target with its LM head and the draft vocabulary.
#[derive(Debug, Clone)]
pub(crate) struct FrozenTarget {
    /// The target, without autodiff.
    model: CausalLm,
    lm_head: LmHead,
    /// The tokens that may be drafted; `None` if all tokens may be.
    vocabulary: Option<DraftVocabulary>,
}

impl FrozenTarget {
    /// Wraps a target with its LM head, limited to the draft vocabulary if there is one.
    pub(crate) fn new(model: CausalLm, vocabulary: Option<&DraftVocabulary>) -> Self {
        let lm_head = LmHead::of(&model);
        let lm_head = match vocabulary {
            Some(vocabulary) => lm_head.narrowed(vocabulary),
            None => lm_head,
        };
        Self { lm_head, model, vocabulary: vocabulary.cloned() }
    }

    /// Returns a token's number in the draft vocabulary; `None` if the token is not in it.
    fn number_of(&self, id: u32) -> Option<u32> {
        self.vocabulary.as_ref().map_or(Some(id), |vocabulary| vocabulary.number_of(id))
    }

    /// Removes the logit soft cap for LM heads of drafters. The target's own cap remains.
    pub(crate) fn with_uncapped_students(self) -> Self {
        Self { lm_head: self.lm_head.with_uncapped_students(), ..self }
    }
}

/// The training or validation rows, with the target that reads them.
#[derive(Clone)]
pub(crate) struct LessonSource {
    pub(crate) targets: PerDevice<FrozenTarget>,
    pub(crate) exit_layers: Vec<usize>,
    /// Whether batches contain token embeddings.
    pub(crate) reads_tokens: bool,
    pub(crate) teaching: Teaching,
    pub(crate) rows: Vec<Arc<LessonRow>>,
    pub(crate) batch_size: usize,
    pub(crate) lengths: Lengths,
    /// The number of free bytes for the rows' final hidden states in memory.
    pub(crate) room: Arc<AtomicUsize>,
    /// The hidden states on the disk; `None` if they are not stored.
    pub(crate) stored: Option<Arc<StoredStates>>,
}

impl BatchSource for LessonSource {
    type Content = LessonBatch;

    fn num_rows(&self) -> usize {
        self.rows.len()
    }

    fn num_devices(&self) -> usize {
        self.targets.num_devices()
    }

    fn is_used(&self, _row: usize, _epoch: u64) -> bool {
        true
    }

    /// Groups rows of similar length to reduce padding. Batches are weighted by their tokens, so that the
    /// gradient of a step does not depend on how its rows are divided.
    fn step_batches(
        &self,
        _epoch: u64,
        step: &[Vec<usize>],
    ) -> impl Iterator<Item = TrainingBatch<LessonBatch>> {
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
        let example = |row: &LessonRow| Example {
            row_id: row.id.clone(),
            input_ids: row.input_ids.clone(),
            positions: (row.first_supervised..row.input_ids.len()).collect(),
            labels: Vec::new(),
        };
        let batches = self.rows_of_batches(step).into_iter();
        batches.map(|rows| rows.into_iter().map(example).collect()).collect()
    }
}

impl LessonSource {
    /// Divides a step's rows into batches of similar length. On the CPU, the only batch of a step
    /// is divided in two.
    fn rows_of_batches(&self, step: &[Vec<usize>]) -> Vec<Vec<&LessonRow>> {
        let mut rows: Vec<&LessonRow> =
            step.iter().flatten().map(|row| self.rows[*row].as_ref()).collect();
        rows.sort_by_key(|row| row.input_ids.len());
        let batch_size = match step {
            [only] if self.lengths == Lengths::AsGiven => only.len().div_ceil(CPU_BATCHES),
            _ => step.first().map_or(1, Vec::len),
        };
        rows.chunks(batch_size).map(<[&LessonRow]>::to_vec).collect()
    }

    /// Makes a batch of a step that has `step_supervised` supervised tokens.
    fn batch(
        &self,
        target: &FrozenTarget,
        rows: &[&LessonRow],
        step_supervised: usize,
        ends_step: bool,
    ) -> TrainingBatch<LessonBatch> {
        let dims = padded_dims(rows, self.lengths, self.batch_size);
        let [_, seq] = dims;
        let mut supervised: Vec<i32> = Vec::new();
        for (nth, row) in rows.iter().enumerate() {
            let start = nth * seq;
            let positions = start + row.first_supervised..start + row.input_ids.len();
            supervised.extend(positions.map(|position| position as i32));
        }
        let device = target.model.device();
        let num_supervised = supervised.len();
        let num_padded = self.lengths.padded(num_supervised);
        supervised.resize(num_padded, supervised[num_supervised - 1]);
        let supervised = Tensor::<1, Int>::from_ints(&supervised[..], &device);
        let Padded { ids, wanted } = Padded::new(rows, self.lengths, self.batch_size, &device);
        let (features, teacher) = match &self.stored {
            Some(stored) => self.stored_states(stored, target, rows, dims, &supervised),
            None => {
                let features = target.model.exit_states_at(ids.clone(), &self.exit_layers, &wanted);
                let teacher = match self.teaching {
                    Teaching::Response => None,
                    Teaching::Target => {
                        let (wanted, positions) = (wanted.clone(), supervised.clone());
                        Some(self.teacher(target, rows, &features, wanted, positions))
                    }
                };
                (features, teacher)
            }
        };
        let next_ids = rows.iter().flat_map(|row| row.next_ids());
        let next_ids: Vec<Option<u32>> = next_ids.map(|id| target.number_of(id)).collect();
        let are_tokens = padding_mask(num_supervised, num_padded, self.lengths, &device);
        let (teacher, are_tokens) = match teacher {
            Some(states) => (Lesson::States(states), are_tokens),
            None => responses(&next_ids, &supervised, are_tokens),
        };
        let embedded = self.reads_tokens.then(|| target.model.embed(ids.clone()));
        let are_tokens = are_tokens.map(|are| are.unsqueeze_dim(1));
        let tokens = LessonTokens { num: num_supervised, are: are_tokens };
        let lm_head = target.lm_head.clone();
        TrainingBatch {
            content: LessonBatch {
                features,
                embedded,
                ids,
                wanted,
                next_ids,
                teacher,
                tokens,
                lm_head,
                lengths: self.lengths,
            },
            row_ids: rows.iter().map(|row| row.id.clone()).collect(),
            num_supervised,
            step_share: num_supervised as f64 / step_supervised as f64,
            ends_step,
        }
    }

    /// Reads the stored hidden states of rows: the states after the exit layers, and the final
    /// states at the supervised positions. The latter are `None` if the response is the teacher.
    fn stored_states(
        &self,
        stored: &StoredStates,
        target: &FrozenTarget,
        rows: &[&LessonRow],
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
        // The padding repeats the last token's state.
        let padding = last[last.len() - width..].to_vec();
        while last.len() < num_tokens * width {
            last.extend_from_slice(&padding);
        }
        let last = vectors::tensor(last, [num_tokens, width], &device).cast(dtype);
        (features, Some(last))
    }

    /// Computes the target's final hidden states at the supervised positions, `[tokens, hidden]`.
    /// If the target is packed, they are kept in memory while there is room, because they take all
    /// layers after the exits. Their bits do not depend on the other rows of the batch.
    fn teacher(
        &self,
        target: &FrozenTarget,
        rows: &[&LessonRow],
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
                // No other thread makes a batch of this row.
                let _ = row.teacher.set(states.to_vec());
            }
        }
        vectors::tensor(all, [supervised.dims()[0], width], &features[0].device())
    }
}

/// Labels the supervised positions with the tokens that they predict. Also returns the mask
/// [`LessonTokens::are`], with 0 at positions that have no label. Such positions and the padding
/// have the label 0, which is never used.
fn responses(
    next_ids: &[Option<u32>],
    supervised: &Tensor<1, Int>,
    are: Option<Tensor<1>>,
) -> (Lesson, Option<Tensor<1>>) {
    let mut ids: Vec<u32> = next_ids.iter().map(|id| id.unwrap_or(0)).collect();
    let [num_padded] = supervised.dims();
    ids.resize(num_padded, 0);
    if next_ids.iter().all(Option::is_some) {
        return (Lesson::Tokens(ids), are);
    }
    let have_label = next_ids.iter().map(|id| f32::from(id.is_some()));
    let mut have_label: Vec<f32> = have_label.collect();
    have_label.resize(num_padded, 0.0);
    let are = Tensor::from_floats(have_label.as_slice(), &supervised.device());
    (Lesson::Tokens(ids), Some(are))
}

/// Selects the hidden states at positions of a batch.
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

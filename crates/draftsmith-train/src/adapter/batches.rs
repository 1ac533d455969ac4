//! Batches of sequences: what an adapter is given of rows and the frozen target.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use burn::tensor::{Int, Tensor, TensorData};
use draftsmith_data::ResponseRow;
use draftsmith_model::{CausalLm, DraftVocabulary, Lengths, vectors};

use crate::adapter::distillation::{LmHead, Tokens};
use crate::data::batches::{BatchSource, TrainingBatch, real};
use crate::data::examples::Example;
use crate::run::devices::PerDevice;

/// What adapter training needs of a [`ResponseRow`]. At least one position is supervised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AdapterRow {
    id: String,
    /// The prompt and the response, but for the last token, after which nothing is known.
    input_ids: Vec<u32>,
    /// The first position that predicts a token of the response; all that follow do too.
    first_supervised: usize,
    /// The target's final hidden states at the supervised positions, once they are known and if there
    /// is room for them.
    teacher: OnceLock<Vec<f32>>,
}

impl AdapterRow {
    /// Takes a row as far as it fits `max_len` tokens; `None` if no token of the response that
    /// another precedes does.
    ///
    /// Position j predicts token j + 1, and so is supervised if and only if token j + 1 belongs to
    /// the response: from the prompt's last token to the response's last but one. The authors'
    /// code shifts hidden states and targets by one, but not its mask, and so supervises
    /// predictions two tokens late; here BOS is read, as it is when decoding.
    pub(crate) fn new(row: &ResponseRow, max_len: usize) -> Option<Self> {
        let mut input_ids: Vec<u32> =
            row.prompt_ids.iter().chain(&row.response_ids).copied().take(max_len).collect();
        input_ids.pop();
        let first_supervised = row.prompt_ids.len().saturating_sub(1);
        let is_usable = first_supervised < input_ids.len();
        let (id, teacher) = (row.id.clone(), OnceLock::new());
        is_usable.then(|| Self { id, input_ids, first_supervised, teacher })
    }

    fn num_supervised(&self) -> usize {
        self.input_ids.len() - self.first_supervised
    }

    /// The tokens of the response that it predicts, but for the last.
    pub(crate) fn predicted(&self) -> &[u32] {
        &self.input_ids[self.first_supervised + 1..]
    }
}

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
    /// `[tokens, hidden]`: the target's final hidden states (after the final norm) there.
    pub(crate) teacher: Tensor<2>,
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
    pub(crate) rows: Vec<Arc<AdapterRow>>,
    pub(crate) batch_size: usize,
    pub(crate) lengths: Lengths,
    /// Bytes that the rows' final hidden states may still take.
    pub(crate) room: Arc<AtomicUsize>,
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
        let seq = rows.iter().map(|row| row.input_ids.len()).max().unwrap_or(0);
        let seq = self.lengths.padded(seq);
        let num_rows = self.lengths.padded_batch(rows.len(), self.batch_size);
        let mut ids: Vec<i32> = Vec::with_capacity(num_rows * seq);
        let mut supervised: Vec<i32> = Vec::new();
        let mut wanted = Vec::with_capacity(num_rows);
        for (nth, row) in rows.iter().enumerate() {
            let start = nth * seq;
            let positions = start + row.first_supervised..start + row.input_ids.len();
            supervised.extend(positions.map(|position| position as i32));
            wanted.push(row.first_supervised..row.input_ids.len());
            ids.extend(row.input_ids.iter().map(|id| *id as i32));
            // The model is causal: padding on the right changes nothing to its left.
            ids.resize(start + seq, 0);
        }
        ids.resize(num_rows * seq, 0);
        wanted.resize(num_rows, 0..0);
        let device = target.model.device();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [num_rows, seq]), &device);
        let features = target.model.exit_states_at(ids, &self.exit_layers, &wanted);
        let num_tokens = supervised.len();
        supervised.resize(self.lengths.padded(num_tokens), supervised[num_tokens - 1]);
        let supervised = TensorData::from(supervised.as_slice());
        let supervised = Tensor::<1, Int>::from_data(supervised, &device);
        let are_tokens = real(num_tokens, self.lengths, &device);
        AdapterBatch {
            teacher: self.teacher(target, rows, &features, wanted, supervised.clone()),
            features,
            supervised,
            tokens: Tokens { num: num_tokens, are: are_tokens.map(|are| are.unsqueeze_dim(1)) },
            lm_head: target.lm_head.clone(),
            row_ids: rows.iter().map(|row| row.id.clone()).collect(),
            step_share: num_tokens as f64 / step_supervised as f64,
            ends_step,
        }
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
mod tests {
    use std::path::Path;

    use burn::tensor::Device;

    use super::*;
    use crate::tests::pair::{deep_target, response_row, responses, tiny_draft};

    fn row(prompt: &[u32], response: &[u32]) -> ResponseRow {
        let probs = vec![0.5; response.len()];
        response_row("set#3", prompt, response, response, &probs)
    }

    /// The tokens that supervised positions predict, and those that they follow.
    fn predicted(prompt: &[u32], response: &[u32], max_len: usize) -> Option<Vec<(u32, u32)>> {
        let all = [prompt, response].concat();
        let row = AdapterRow::new(&row(prompt, response), max_len)?;
        assert_eq!(row.input_ids, all[..row.input_ids.len()]);
        let positions = row.first_supervised..row.input_ids.len();
        Some(positions.map(|position| (all[position], all[position + 1])).collect())
    }

    #[test]
    fn exactly_the_responses_tokens_are_predicted() {
        let check = |prompt: &[u32], response: &[u32], max_len, expected: &[(u32, u32)]| {
            assert_eq!(predicted(prompt, response, max_len).as_deref(), Some(expected));
        };
        check(&[1, 2, 3], &[4, 5, 6], 64, &[(3, 4), (4, 5), (5, 6)]);
        check(&[1, 2, 3], &[4], 64, &[(3, 4)]);
        check(&[1], &[4, 5], 64, &[(1, 4), (4, 5)]);
        // Nothing precedes a response's first token without a prompt.
        check(&[], &[4, 5, 6], 64, &[(4, 5), (5, 6)]);
        check(&[1, 2, 3], &[4, 5, 6], 6, &[(3, 4), (4, 5), (5, 6)]);
        check(&[1, 2, 3], &[4, 5, 6], 5, &[(3, 4), (4, 5)]);
        check(&[1, 2, 3], &[4, 5, 6], 4, &[(3, 4)]);
    }

    #[test]
    fn rows_without_anything_to_predict_are_left_out() {
        for (prompt, response, max_len) in [
            (&[1, 2, 3][..], &[][..], 64),
            (&[1, 2, 3], &[4], 3),
            (&[1, 2, 3], &[4], 2),
            (&[], &[4], 64),
            (&[], &[], 64),
        ] {
            assert_eq!(predicted(prompt, response, max_len), None);
        }
    }

    #[test]
    fn rows_need_no_draft_columns() {
        let mut without_draft = row(&[1], &[2]);
        without_draft.draft = None;
        assert!(AdapterRow::new(&without_draft, 64).is_some());
    }

    fn source(num_rows: usize) -> AdapterSource {
        let target = tiny_draft(16, 64);
        let rows = responses(num_rows, 20, 5)
            .iter()
            .map(|row| Arc::new(AdapterRow::new(row, 64).unwrap()))
            .collect();
        AdapterSource {
            targets: FrozenTarget::new(target, None).into(),
            exit_layers: vec![1],
            rows,
            batch_size: 3,
            lengths: Lengths::AsGiven,
            room: Arc::default(),
        }
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn batches_hold_each_rows_own_states_however_it_is_padded() {
        let source = source(7);
        let by_id = |id: &str| source.rows.iter().find(|row| row.id == id).unwrap();
        let batches: Vec<AdapterBatch> =
            source.step_batches(1, &[vec![0, 1, 2], vec![3, 4, 5], vec![6]]).collect();
        let sizes: Vec<usize> = batches.iter().map(|batch| batch.row_ids.len()).collect();
        assert_eq!(sizes, [3, 3, 1]);
        for batch in &batches {
            let features =
                values(at_positions(batch.features[0].clone(), batch.supervised.clone()));
            let (mut expected, mut teachers) = (Vec::new(), Vec::new());
            for row in batch.row_ids.iter().map(|id| by_id(id)) {
                let ids: Vec<i32> = row.input_ids.iter().map(|id| *id as i32).collect();
                let data = TensorData::new(ids, [1, row.input_ids.len()]);
                let ids = Tensor::<2, Int>::from_data(data, &source.targets.first().model.device());
                let from = row.first_supervised * 16;
                let exit =
                    source.targets.first().model.all_hidden_states(ids.clone()).swap_remove(1);
                expected.extend_from_slice(&values(exit)[from..]);
                teachers.extend_from_slice(
                    &values(source.targets.first().model.hidden_states(ids))[from..],
                );
            }
            let pairs = [(features, expected), (values(batch.teacher.clone()), teachers)];
            for (found, expected) in pairs {
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.into_iter().zip(expected) {
                    // Another batch shape may sum in another order: f32 rounding near 1.
                    assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
                }
            }
        }
    }

    #[test]
    fn states_that_are_kept_are_those_that_would_be_computed_again() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen3-bf16");
        let target = CausalLm::from_model_dir(&dir, &Device::flex()).unwrap();
        assert!(target.is_packed());
        let width = target.shape().hidden_size;
        let source = |num_rows| {
            let targets = FrozenTarget::new(target.clone(), None).into();
            AdapterSource { targets, ..source(num_rows) }
        };
        let none = source(7);
        let bits =
            |source: &AdapterSource, epoch: u64, step: &[Vec<usize>]| -> Vec<[Vec<f32>; 2]> {
                let batches = source.step_batches(epoch, step);
                let states = |batch: AdapterBatch| {
                    [batch.features[0].clone().flatten(0, 1), batch.teacher].map(values)
                };
                batches.map(states).collect()
            };
        // Other neighbours each time.
        let epochs =
            [[vec![0, 1, 2], vec![3, 4, 5], vec![6]], [vec![6, 2, 4], vec![0, 5, 1], vec![3]]];
        let bytes: usize = none.rows.iter().map(|row| row.num_supervised() * width * 4).sum();
        for room in [bytes, bytes / 2] {
            let source = AdapterSource { room: Arc::new(room.into()), ..source(7) };
            for epoch in [1, 2, 3] {
                let step = &epochs[epoch % 2];
                assert!(bits(&source, 1, step) == bits(&none, 1, step), "epoch {epoch}");
            }
            let num_kept = source.rows.iter().filter(|row| row.teacher.get().is_some()).count();
            assert_eq!(num_kept == 7, room == bytes, "{num_kept} rows are kept");
            assert!(num_kept > 1);
            let left = source.room.load(Ordering::Relaxed);
            assert!(left < bytes / 7 * 2 && (room != bytes || left == 0), "{left} bytes");
        }
        assert!(none.rows.iter().all(|row| row.teacher.get().is_none()));
    }

    #[test]
    fn a_steps_batches_share_it_by_their_tokens() {
        let source = source(7);
        let batches: Vec<AdapterBatch> =
            source.step_batches(1, &[vec![0, 1, 2], vec![3, 4, 5], vec![6]]).collect();
        let total: usize = source.rows.iter().map(|row| row.num_supervised()).sum();
        for batch in &batches {
            assert_eq!(batch.step_share, batch.num_supervised() as f64 / total as f64);
        }
        let ends: Vec<bool> = batches.iter().map(TrainingBatch::ends_step).collect();
        assert_eq!(ends, [false, false, true]);
        let mut ids: Vec<&String> = batches.iter().flat_map(|batch| &batch.row_ids).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 7);
    }

    #[test]
    fn batches_are_made_on_the_devices_in_turn() {
        let source = source(7);
        let targets =
            [tiny_draft(16, 64), deep_target(16, 64)].map(|target| FrozenTarget::new(target, None));
        let step = [vec![0, 1, 2], vec![3, 4, 5], vec![6]];
        let teachers = |targets: PerDevice<FrozenTarget>| -> Vec<Vec<f32>> {
            let source = AdapterSource { targets, ..source.clone() };
            let batches: Vec<AdapterBatch> = source.step_batches(1, &step).collect();
            let ends: Vec<bool> = batches.iter().map(|batch| batch.ends_step).collect();
            assert_eq!(ends, [false, false, true]);
            batches.into_iter().map(|batch| values(batch.teacher)).collect()
        };
        let [first, second] = targets.clone().map(|target| teachers(target.into()));
        assert!(first[0] != second[0]);
        let both = teachers(PerDevice::new(targets.to_vec()).unwrap());
        assert!(both == [&first[0][..], &second[1], &first[2]]);
    }
}

//! A weight matrix laid out for the processor, and its product with any number of rows.
//!
//! A general matrix product reads a `[in, out]` matrix in blocks, one cache line from every row in
//! turn. That suits many rows. For the 2 to 16 rows of a verification, it waits for memory again
//! and again, and takes several times as long as for one row. Here the matrix is stored as
//! consecutive panels of 16 outputs. Each panel is read sequentially at memory speed, and every
//! input row is multiplied while the weights are in registers. Many rows are processed in blocks,
//! for which a panel stays cached.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::MAX_ROWS_A_BLOCK;
use super::lines::{Factors, Lines};
use super::storage::{LINE, Storage};
use super::team::Team;
use crate::weights::StoredRows;

/// The number of rows that a kernel multiplies in one pass. The number of rows in each thread's
/// block is a multiple of it.
const ROWS_A_PASS: usize = 8;

/// The number of panels that a thread takes at a time.
const PANELS_A_GROUP: usize = 4;

/// The number of weights from which a second thread pays off for few rows. Fewer weights fit a
/// core's caches.
const PARALLEL_WEIGHTS: usize = 4 << 20;

/// The number of multiply-adds from which a second thread pays off for many rows. They take half a
/// millisecond.
const PARALLEL_PRODUCTS: usize = 1 << 24;

/// The number of multiply-adds from which a waiting team pays off. They take some microseconds.
const TEAM_PRODUCTS: usize = 1 << 16;

/// The threads that may work on a product.
#[derive(Debug, Clone, Default)]
pub(crate) enum Threads {
    /// As many threads as make the product faster.
    #[default]
    All,
    /// The calling thread and a waiting team.
    Team(Arc<Team>),
    /// Only the calling thread. The others have work, and this thread must not pick up other work
    /// while it waits, because one of them may be waiting for it.
    One,
}

/// A `[in, out]` matrix and a bias. The matrix is stored as panels of [`LINE`] outputs, each `[in,
/// LINE]`.
#[derive(Debug)]
pub(crate) struct PackedWeights {
    lines: Arc<Lines>,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// The numbers that are added to each row of outputs.
    pub(crate) bias: Option<Vec<f32>>,
}

impl PackedWeights {
    /// Allocates a matrix of zeros without a bias.
    pub(crate) fn zeros(storage: Storage, inputs: usize, outputs: usize) -> Self {
        let lines = Arc::new(Lines::zeros(storage, inputs, outputs));
        Self { lines, inputs, outputs, bias: None }
    }

    /// Allocates matrices of zeros side by side, each with its format and number of outputs. They have
    /// one format if theirs are equal, or several formats if some are quantised, and are otherwise in f32.
    pub(super) fn beside(parts: &[(Storage, usize)], inputs: usize) -> Self {
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
        let first = parts.first().map_or(Storage::F32, |(storage, _)| *storage);
        if parts.iter().all(|(storage, _)| *storage == first) {
            return Self::zeros(first, inputs, outputs);
        }
        let is_quantised =
            |(storage, _): &(Storage, usize)| matches!(storage, Storage::Quantised(_));
        let fill_panels = parts.iter().rev().skip(1).all(|(_, num)| num.is_multiple_of(LINE));
        if !fill_panels || !parts.iter().any(is_quantised) {
            return Self::zeros(Storage::F32, inputs, outputs);
        }
        let mut end = 0;
        let lines = parts.iter().map(|(storage, num)| {
            end += num;
            (end - num..end, Lines::zeros(*storage, inputs, *num))
        });
        let lines = Arc::new(Lines::Beside(lines.collect()));
        Self { lines, inputs, outputs, bias: None }
    }

    /// Packs a `[in, out]` matrix in f32.
    pub(crate) fn pack(
        weight: &[f32],
        inputs: usize,
        outputs: usize,
        bias: Option<Vec<f32>>,
    ) -> Self {
        let mut packed = Self::zeros(Storage::F32, inputs, outputs);
        packed.set_outputs(0..outputs, |input, output| weight[input * outputs + output]);
        Self { bias, ..packed }
    }

    /// Sets the weights of some outputs, rounded to the storage format. `weight` is called with the
    /// index of the input and the index of the output within `outputs`.
    pub(crate) fn set_outputs(
        &mut self,
        outputs: Range<usize>,
        weight: impl Fn(usize, usize) -> f32,
    ) {
        let inputs = self.inputs;
        self.lines_mut().set_outputs(inputs, outputs, weight);
    }

    /// Sets the weights of outputs from `first` on. `rows` are rows of a file, `[outputs, in]`,
    /// which are rounded if the file has another format.
    pub(crate) fn set_rows(&mut self, first: usize, rows: StoredRows<'_>) {
        let inputs = self.inputs;
        if self.lines_mut().set_rows(inputs, first, rows) {
            return;
        }
        let mut values = Vec::new();
        rows.widen_into(&mut values);
        let outputs = first..first + values.len() / inputs;
        self.set_outputs(outputs, |input, output| values[output * inputs + input]);
    }

    #[cfg(test)]
    pub(super) fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Returns the lines for filling. There must not be other references to them yet.
    fn lines_mut(&mut self) -> &mut Lines {
        Arc::get_mut(&mut self.lines).expect("nobody reads weights that are being filled")
    }

    fn storage(&self) -> Storage {
        self.lines.storage()
    }

    /// Appends one output's weights, which are a column of the matrix, to `values`.
    pub(crate) fn read_output(&self, output: usize, values: &mut Vec<f32>) {
        self.lines.read_output(self.inputs, output, values);
    }

    /// Returns the weights of some outputs, one after another.
    pub(crate) fn read_outputs<'a>(&self, outputs: impl Iterator<Item = &'a u32>) -> Vec<f32> {
        let mut values = Vec::with_capacity(outputs.size_hint().0 * self.inputs);
        outputs.for_each(|output| self.read_output(*output as usize, &mut values));
        values
    }

    /// Selects some outputs of the matrix.
    pub(crate) fn select_outputs(&self, outputs: &[u32]) -> Self {
        let mut selected = Self::zeros(self.storage(), self.inputs, outputs.len());
        if let Lines::Quantised(lines) = &*self.lines {
            *selected.lines_mut() = Lines::Quantised(lines.select_outputs(outputs));
        } else {
            let mut weights = Vec::with_capacity(self.inputs);
            for (place, output) in outputs.iter().enumerate() {
                weights.clear();
                self.read_output(*output as usize, &mut weights);
                selected.set_outputs(place..place + 1, |input, _| weights[input]);
            }
        }
        let bias = self.bias.as_ref();
        selected.bias =
            bias.map(|bias| outputs.iter().map(|output| bias[*output as usize]).collect());
        selected
    }

    /// Counts the weights without the bias.
    pub(super) fn num_weights(&self) -> usize {
        self.inputs * self.outputs
    }

    /// Counts the bytes of the weights.
    pub(super) fn num_bytes(&self) -> usize {
        self.lines.num_bytes()
    }

    /// Returns whether several threads share even products of few rows.
    pub(super) fn is_shared(&self) -> bool {
        self.num_weights() >= PARALLEL_WEIGHTS
    }

    /// Computes `x · weight + bias`, row by row.
    ///
    /// # Shapes
    /// - x: `[rows, in]`
    /// - output: `[rows, out]`, resized and overwritten
    pub(crate) fn multiply(&self, x: &[f32], output: &mut Vec<f32>, threads: &Threads) {
        output.resize(x.len() / self.inputs * self.outputs, 0.0);
        self.multiply_into(x, output, threads);
        if let Some(bias) = &self.bias {
            for row in output.chunks_exact_mut(self.outputs) {
                for (value, bias) in row.iter_mut().zip(bias) {
                    *value += bias;
                }
            }
        }
    }

    fn multiply_into(&self, x: &[f32], output: &mut [f32], threads: &Threads) {
        let Self { lines, inputs, outputs, .. } = self;
        let num_rows = x.len() / inputs;
        let num_products = num_rows * inputs * outputs;
        match threads {
            Threads::Team(team) if num_products >= TEAM_PRODUCTS => {
                team.multiply(lines, [*inputs, *outputs], x, output);
            }
            Threads::All if num_rows >= 2 * ROWS_A_PASS && num_products >= PARALLEL_PRODUCTS => {
                self.multiply_row_blocks(x, output);
            }
            Threads::All if self.is_shared() => self.multiply_panel_groups(x, output),
            _ => {
                let factors = Factors::new(lines, *inputs, x);
                lines.multiply(*inputs, 0..*outputs, &factors, output);
            }
        }
    }

    /// Multiplies many rows. Each thread takes blocks of rows.
    fn multiply_row_blocks(&self, x: &[f32], output: &mut [f32]) {
        let Self { lines, inputs, outputs, .. } = self;
        let rows_a_thread = (x.len() / inputs).div_ceil(rayon::current_num_threads());
        let rows_a_block = rows_a_thread.min(MAX_ROWS_A_BLOCK).next_multiple_of(ROWS_A_PASS);
        x.par_chunks(rows_a_block * inputs)
            .zip(output.par_chunks_mut(rows_a_block * outputs))
            .for_each(|(x, output)| {
                lines.multiply(*inputs, 0..*outputs, &Factors::new(lines, *inputs, x), output);
            });
    }

    /// Multiplies few rows by many weights. Each thread takes groups of panels.
    fn multiply_panel_groups(&self, x: &[f32], output: &mut [f32]) {
        let Self { lines, inputs, outputs, .. } = self;
        let (num_rows, width) = (x.len() / inputs, PANELS_A_GROUP * LINE);
        let columns = |group: usize| group * width..((group + 1) * width).min(*outputs);
        let factors = &Factors::new(lines, *inputs, x);
        let groups: Vec<Vec<f32>> = (0..outputs.div_ceil(width))
            .into_par_iter()
            .map(|group| {
                let columns = columns(group);
                let mut output = vec![0.0; num_rows * columns.len()];
                lines.multiply(*inputs, columns, factors, &mut output);
                output
            })
            .collect();
        for (group, values) in groups.iter().enumerate() {
            let columns = columns(group);
            let rows = output.chunks_exact_mut(*outputs);
            for (row, values) in rows.zip(values.chunks_exact(columns.len())) {
                row[columns.clone()].copy_from_slice(values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{QuantType, StoredFormat};
    use burn::tensor::{Device, Distribution, Tensor};
    use half::{bf16, f16};
    use safetensors::Dtype;

    fn random(rows: usize, columns: usize) -> Tensor<2> {
        let device = Device::flex();
        Tensor::random([rows, columns], Distribution::Normal(0.0, 1.0), &device)
    }

    fn values(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec().expect("f32")
    }

    #[test]
    fn a_packed_product_equals_the_general_one_and_rows_are_independent() {
        for (inputs, outputs) in [(1, 1), (7, 5), (8, 32), (33, 100), (192, 517), (2048, 2056)] {
            let weight = random(inputs, outputs);
            let packed = PackedWeights::pack(&values(weight.clone()), inputs, outputs, None);
            let product = |x: &[f32]| {
                let mut output = Vec::new();
                packed.multiply(x, &mut output, &Threads::All);
                output
            };
            let all = random(17, inputs);
            let x = values(all.clone());
            let single: Vec<f32> = x.chunks_exact(inputs).flat_map(product).collect();
            for rows in [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17] {
                let found = product(&x[..rows * inputs]);
                assert_eq!(found, single[..rows * outputs], "{rows} rows are {rows} times one");
                let general =
                    values(all.clone().slice([0..rows, 0..inputs]).matmul(weight.clone()));
                for (a, b) in found.iter().zip(general) {
                    // Sums of up to 2,048 products of unit normals, in another order.
                    assert!((a - b).abs() < 1e-3, "{a} for {b}");
                }
            }
        }
    }

    #[test]
    fn a_bias_is_added_to_every_row() {
        let weight = values(random(5, 3));
        let bias = vec![1.0, -2.0, 0.5];
        let x = values(random(4, 5));
        let (mut without, mut with) = (Vec::new(), Vec::new());
        PackedWeights::pack(&weight, 5, 3, None).multiply(&x, &mut without, &Threads::All);
        PackedWeights::pack(&weight, 5, 3, Some(bias.clone())).multiply(
            &x,
            &mut with,
            &Threads::One,
        );
        for (i, (with, without)) in with.iter().zip(without).enumerate() {
            assert_eq!(*with, without + bias[i % 3]);
        }
    }

    /// Returns `weight` after a round trip through a storage format.
    fn rounded(weight: f32, storage: Storage) -> f32 {
        match storage {
            Storage::F32 => weight,
            Storage::Bf16 => bf16::from_f32(weight).to_f32(),
            Storage::F16 => f16::from_f32(weight).to_f32(),
            Storage::Quantised(_) => unreachable!("only files have quantised weights"),
        }
    }

    #[test]
    fn a_storage_format_only_rounds_the_weights() {
        for storage in [Storage::Bf16, Storage::F16] {
            for (inputs, outputs) in [(1, 1), (7, 5), (8, 32), (33, 100), (192, 517), (2047, 2056)]
            {
                let weight = values(random(inputs, outputs));
                let weight: Vec<f32> = weight.iter().map(|w| rounded(0.01 * w, storage)).collect();
                let expected = PackedWeights::pack(&weight, inputs, outputs, None);
                let mut found = PackedWeights::zeros(storage, inputs, outputs);
                // In two parts, as projections are packed side by side.
                let first = outputs / 3;
                for part in [0..first, first..outputs] {
                    let start = part.start;
                    found.set_outputs(part, |i, o| weight[i * outputs + start + o]);
                }
                let x = values(random(17, inputs));
                for rows in [1, 2, 3, 4, 6, 13, 17] {
                    let product = |packed: &PackedWeights| {
                        let mut output = Vec::new();
                        packed.multiply(&x[..rows * inputs], &mut output, &Threads::All);
                        output
                    };
                    assert_eq!(product(&found), product(&expected), "{storage:?}, {rows} rows");
                }
                let mut read = PackedWeights::zeros(storage, inputs, outputs);
                let by_row = (0..outputs).flat_map(|o| (0..inputs).map(move |i| (i, o)));
                let by_row = by_row.map(|(i, o)| weight[i * outputs + o]);
                let bytes: Vec<u8> = match storage {
                    Storage::F16 => by_row.flat_map(|w| f16::from_f32(w).to_le_bytes()).collect(),
                    _ => by_row.flat_map(|w| bf16::from_f32(w).to_le_bytes()).collect(),
                };
                let dtype = if storage == Storage::F16 { Dtype::F16 } else { Dtype::BF16 };
                let (start, rest) = bytes.split_at(2 * inputs * first);
                let format = StoredFormat::Plain(dtype);
                read.set_rows(0, StoredRows { format, bytes: start });
                read.set_rows(first, StoredRows { format, bytes: rest });
                let (mut from_rows, mut expected) = (Vec::new(), Vec::new());
                for output in 0..outputs {
                    read.read_output(output, &mut from_rows);
                    found.read_output(output, &mut expected);
                }
                assert_eq!(from_rows, expected, "{storage:?}, rows of a file");
                let mut column = Vec::new();
                found.read_output(outputs - 1, &mut column);
                let expected = (0..inputs).map(|i| weight[i * outputs + outputs - 1]);
                assert_eq!(column, expected.collect::<Vec<f32>>());
            }
        }
    }

    #[test]
    fn matrices_of_several_formats_side_by_side_multiply_as_each_by_itself() {
        let (inputs, q8, q4) = (256, QuantType::Q8_0, QuantType::Q4K);
        let parts =
            [(Storage::Quantised(q8), 48), (Storage::F32, 16), (Storage::Quantised(q4), 35)];
        let mut beside = PackedWeights::beside(&parts, inputs);
        let mut first = 0;
        let mut alone = Vec::new();
        for (storage, outputs) in parts {
            let (format, num_bytes) = match storage {
                Storage::Quantised(kind) => {
                    let num_bytes = inputs / kind.block_len() * kind.block_bytes();
                    (StoredFormat::Quantised(kind), num_bytes)
                }
                _ => (StoredFormat::Plain(Dtype::F32), 4 * inputs),
            };
            // No exponent of a half or a float is so large that a product overflows.
            let bytes: Vec<u8> = (0..outputs * num_bytes).map(|i| (i * 37 % 59) as u8).collect();
            let mut own = PackedWeights::zeros(storage, inputs, outputs);
            for weights in [(&mut beside, first), (&mut own, 0)] {
                weights.0.set_rows(weights.1, StoredRows { format, bytes: &bytes });
            }
            first += outputs;
            alone.push(own);
        }
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        (0..first).for_each(|output| beside.read_output(output, &mut found));
        for own in &alone {
            (0..own.outputs).for_each(|output| own.read_output(output, &mut expected));
        }
        assert_eq!(found, expected, "the weights");
        let x = values(random(17, inputs));
        for rows in [1, 3, 17] {
            let product = |weights: &PackedWeights| {
                let mut output = Vec::new();
                weights.multiply(&x[..rows * inputs], &mut output, &Threads::All);
                output
            };
            let (found, own) = (product(&beside), alone.iter().map(product).collect::<Vec<_>>());
            for row in 0..rows {
                let parts = own.iter().zip(&alone);
                let expected: Vec<f32> = parts
                    .flat_map(|(own, weights)| &own[row * weights.outputs..][..weights.outputs])
                    .copied()
                    .collect();
                assert_eq!(found[row * first..][..first], expected, "row {row} of {rows}");
            }
        }
    }

    #[test]
    fn every_number_of_16_bits_is_widened_exactly() {
        for storage in [Storage::Bf16, Storage::F16] {
            let numbers: Vec<f32> = (0..=u16::MAX)
                .map(|bits| match storage {
                    Storage::F16 => f16::from_bits(bits).to_f32(),
                    _ => bf16::from_bits(bits).to_f32(),
                })
                .filter(|number| number.is_finite())
                .collect();
            let mut packed = PackedWeights::zeros(storage, 2, numbers.len());
            packed.set_outputs(0..numbers.len(), |input, o| [numbers[o], -numbers[o]][input]);
            for (x, sign) in [([1.0, 0.0], 1.0), ([0.0, 1.0], -1.0)] {
                let mut found = Vec::new();
                packed.multiply(&x, &mut found, &Threads::One);
                for (found, number) in found.iter().zip(&numbers) {
                    assert_eq!(*found, sign * number);
                }
            }
        }
    }
}

//! A weight matrix as the processor likes to read it, and its product with a few rows.
//!
//! A general matrix product walks a `[in, out]` matrix in blocks, one cache line from every row in
//! turn. For many rows that is right. For the 2 to 16 rows of a verification the forward then waits
//! for memory again and again, several times as long as one row takes, and speculation gains
//! nothing. Here the matrix is stored as panels of 16 outputs laid end to end: each is read from
//! its beginning to its end, at the memory's own speed, and every input row is multiplied with what
//! is in registers.
//!
//! Each output is summed over the inputs in order, whatever the number of rows: a row's result does
//! not depend on the rows beside it, so verification repeats plain decoding's products to the last
//! bit.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Rows of a thread's block are a multiple of this: whole passes.
const ROWS_A_PASS: usize = 6;

/// Panels that a thread takes at a time, and streams side by side that are enough to look ahead by
/// themselves.
const PANELS_A_GROUP: usize = 4;

/// Outputs of one panel: a cache line.
pub(crate) const LINE: usize = 16;

/// Weights from which on a second thread is worth its start for few rows: below, they fit a core's
/// caches.
const PARALLEL_WEIGHTS: usize = 4 << 20;

/// Products of two numbers from which on a second thread is worth its start for many rows: half a
/// millisecond.
const PARALLEL_PRODUCTS: usize = 1 << 24;

/// Sixteen weights of one input, on one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [f32; LINE]);

/// Who may work on a product.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Threads {
    /// As many as it is worth.
    #[default]
    All,
    /// The caller's alone: the others have work of their own, and one of them may be waiting for
    /// this one, so that it must not pick up other work while it waits.
    One,
}

/// A `[in, out]` matrix as panels of [`LINE`] outputs, each `[in, LINE]`, and a bias.
#[derive(Debug)]
pub(crate) struct PackedWeights {
    lines: Vec<Line>,
    inputs: usize,
    outputs: usize,
    bias: Option<Vec<f32>>,
}

impl PackedWeights {
    /// Packs a `[in, out]` matrix.
    pub(crate) fn pack(
        weight: &[f32],
        inputs: usize,
        outputs: usize,
        bias: Option<Vec<f32>>,
    ) -> Self {
        let num_panels = outputs.div_ceil(LINE);
        let mut lines = vec![Line([0.0; LINE]); num_panels * inputs];
        for (panel, lines) in lines.chunks_exact_mut(inputs).enumerate() {
            let (start, end) = (panel * LINE, ((panel + 1) * LINE).min(outputs));
            for (line, row) in lines.iter_mut().zip(weight.chunks_exact(outputs)) {
                line.0[..end - start].copy_from_slice(&row[start..end]);
            }
        }
        Self { lines, inputs, outputs, bias }
    }

    /// The number of outputs.
    pub(crate) fn num_outputs(&self) -> usize {
        self.outputs
    }

    /// One output's weights: a column of the matrix, a row of its transpose.
    pub(crate) fn column(&self, output: usize) -> impl Iterator<Item = f32> {
        let panel = &self.lines[output / LINE * self.inputs..][..self.inputs];
        panel.iter().map(move |line| line.0[output % LINE])
    }

    /// Whether even few rows are shared by several threads.
    pub(super) fn is_shared(&self) -> bool {
        self.inputs * self.outputs >= PARALLEL_WEIGHTS
    }

    /// `x · weight + bias`, row by row.
    ///
    /// # Shapes
    /// - x: `[rows, in]`, one after the other
    /// - output: `[rows, out]`, written whole
    pub(crate) fn multiply(&self, x: &[f32], output: &mut Vec<f32>, threads: Threads) {
        let num_rows = x.len() / self.inputs;
        output.resize(num_rows * self.outputs, 0.0);
        let num_products = num_rows * self.inputs * self.outputs;
        let may_share = threads == Threads::All;
        let is_many_rows = num_rows >= 2 * ROWS_A_PASS && num_products >= PARALLEL_PRODUCTS;
        if may_share && is_many_rows {
            self.multiply_row_blocks(x, output);
        } else if may_share && self.is_shared() {
            self.multiply_panel_groups(x, output);
        } else {
            Arch::new().dispatch(Product { x, lines: &self.lines, shape: self.shape(), output });
        }
        if let Some(bias) = &self.bias {
            for row in output.chunks_exact_mut(self.outputs) {
                for (value, bias) in row.iter_mut().zip(bias) {
                    *value += bias;
                }
            }
        }
    }
}

impl PackedWeights {
    /// PackedWeights end to end.
    fn shape(&self) -> Shape {
        Shape { inputs: self.inputs, stride: self.inputs, outputs: self.outputs }
    }

    /// Many rows: a block of them for each thread.
    fn multiply_row_blocks(&self, x: &[f32], output: &mut [f32]) {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let rows_a_thread = (x.len() / inputs).div_ceil(rayon::current_num_threads());
        let rows_a_block = rows_a_thread.next_multiple_of(ROWS_A_PASS);
        x.par_chunks(rows_a_block * inputs)
            .zip(output.par_chunks_mut(rows_a_block * outputs))
            .for_each(|(x, output)| {
                let (lines, shape) = (&self.lines, self.shape());
                Arch::new().dispatch(Product { x, lines, shape, output });
            });
    }

    /// Few rows and many weights: some panels at a time for each thread.
    fn multiply_panel_groups(&self, x: &[f32], output: &mut [f32]) {
        let (num_rows, inputs) = (x.len() / self.inputs, self.inputs);
        let group_width = PANELS_A_GROUP * LINE;
        let groups: Vec<Vec<f32>> = self
            .lines
            .par_chunks(PANELS_A_GROUP * inputs)
            .enumerate()
            .map(|(number, lines)| {
                let outputs = group_width.min(self.outputs - number * group_width);
                let mut output = vec![0.0; num_rows * outputs];
                let shape = Shape { outputs, ..self.shape() };
                Arch::new().dispatch(Product { x, lines, shape, output: &mut output });
                output
            })
            .collect();
        for (number, group) in groups.iter().enumerate() {
            let start = number * group_width;
            let width = group.len() / num_rows;
            for (row, group) in output.chunks_exact_mut(self.outputs).zip(group.chunks_exact(width))
            {
                row[start..start + width].copy_from_slice(group);
            }
        }
    }
}

/// Rows times panels, `[rows, inputs]` to `[rows, outputs]`.
struct Product<'a> {
    x: &'a [f32],
    lines: &'a [Line],
    shape: Shape,
    output: &'a mut [f32],
}

/// The shape of a product with panels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Lines of a panel that are multiplied.
    pub(super) inputs: usize,
    /// Lines from one panel's beginning to the next's.
    pub(super) stride: usize,
    /// Numbers of a row of the output.
    pub(super) outputs: usize,
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        multiply_panels(simd, self.x, self.lines, self.shape, self.output);
    }
}

/// Multiplies `[rows, inputs]` with panels, into `[rows, outputs]`.
///
/// Where rows are few, several panels go side by side, so that enough sums are in flight to keep
/// the multipliers busy.
#[inline(always)]
pub(super) fn multiply_panels<S: Simd>(
    simd: S,
    x: &[f32],
    lines: &[Line],
    shape: Shape,
    output: &mut [f32],
) {
    let Shape { inputs, stride, outputs } = shape;
    // Of 32 registers of a line each, sums take 28 at the most; of 16 of half a line, 12.
    let is_line_a_register = S::F32_LANES == LINE;
    let most_rows = if is_line_a_register { 14 } else { 6 };
    let num_rows = x.len() / inputs;
    // Passes of about the same size: a pass of one row costs as much as one of four.
    let rows_a_pass = num_rows.div_ceil(num_rows.div_ceil(most_rows));
    let panels_a_pass = match (is_line_a_register, rows_a_pass) {
        // Streams enough that memory is read at its own speed.
        (true, 1..=3) => 6,
        (true, 4..=6) => 2,
        (true, _) => 1,
        (false, 1) => 4,
        (false, 2) if !stride.is_multiple_of(ALIASING_STRIDE) => 2,
        (false, _) => 1,
    };
    for (group, lines) in lines.chunks(panels_a_pass * stride).enumerate() {
        let column = group * panels_a_pass * LINE;
        for (number, x) in x.chunks(rows_a_pass * inputs).enumerate() {
            let output = &mut output[number * rows_a_pass * outputs..];
            if is_line_a_register {
                pass_of_lines(simd, x, lines, shape, column, output);
            } else {
                pass_of_half_lines(simd, x, lines, shape, column, output);
            }
        }
    }
}

/// Calls the `pass` for the rows of `x` and the panels of `lines`.
macro_rules! pass_of_shape {
    (
        $registers:literal,
        [$(($rows:literal: $($panels:literal)+))+],
        ($simd:ident, $x:ident, $lines:ident, $shape:ident, $column:ident, $output:ident)
    ) => {
        match ($x.len() / $shape.inputs, $lines.len() / $shape.stride) {
            $($(($rows, $panels) => {
                pass::<S, $rows, $panels, $registers>($simd, $x, $lines, $shape, $column, $output);
            })+)+
            (rows, panels) => unreachable!("{rows} rows and {panels} panels are no pass"),
        }
    };
}

/// A pass where a register holds a line.
#[inline(always)]
fn pass_of_lines<S: Simd>(
    simd: S,
    x: &[f32],
    lines: &[Line],
    shape: Shape,
    column: usize,
    output: &mut [f32],
) {
    pass_of_shape!(
        1,
        [
            (1: 1 2 3 4 5 6) (2: 1 2 3 4 5 6) (3: 1 2 3 4 5 6) (4: 1 2) (5: 1 2) (6: 1 2)
            (7: 1) (8: 1) (9: 1) (10: 1) (11: 1) (12: 1) (13: 1) (14: 1)
        ],
        (simd, x, lines, shape, column, output)
    );
}

/// A pass where a line takes two registers, or more in several goes.
#[inline(always)]
fn pass_of_half_lines<S: Simd>(
    simd: S,
    x: &[f32],
    lines: &[Line],
    shape: Shape,
    column: usize,
    output: &mut [f32],
) {
    pass_of_shape!(
        2,
        [(1: 1 2 3 4) (2: 1 2) (3: 1) (4: 1) (5: 1) (6: 1)],
        (simd, x, lines, shape, column, output)
    );
}

/// How far ahead a pass asks for its lines.
const LINES_AHEAD: usize = 64;

/// Where panels lie a multiple of so many lines apart, two rows read one panel at a time: the lines
/// of two would compete for the same places of the cache.
const ALIASING_STRIDE: usize = 256;

/// Multiplies `ROWS` rows with `PANELS` panels side by side, of whose lines it holds sums for
/// `REGISTERS` registers at a time.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "loops over small arrays unroll into registers")]
fn pass<S: Simd, const ROWS: usize, const PANELS: usize, const REGISTERS: usize>(
    simd: S,
    x: &[f32],
    lines: &[Line],
    Shape { inputs, stride, outputs }: Shape,
    column: usize,
    output: &mut [f32],
) {
    // Cut so that the compiler sees every length to be `inputs`, and checks no index below.
    let mut rows = [&x[..inputs]; ROWS];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &x[r * inputs..][..inputs];
    }
    let mut panels = [&lines[..inputs]; PANELS];
    for (p, panel) in panels.iter_mut().enumerate() {
        *panel = &lines[p * stride..][..inputs];
    }
    let step = REGISTERS * S::F32_LANES;
    for first in (0..LINE).step_by(step) {
        let mut sums = [[[simd.splat_f32s(0.0); REGISTERS]; ROWS]; PANELS];
        for i in 0..inputs {
            for p in 0..PANELS {
                if PANELS < PANELS_A_GROUP {
                    let is_inside = PANELS == 1 || i + LINES_AHEAD < inputs;
                    let skipped = if is_inside { 0 } else { (PANELS - 1) * stride };
                    prefetch(&panels[p][i], LINES_AHEAD + skipped);
                }
                let weights = S::as_simd_f32s(&panels[p][i].0[first..first + step]).0;
                for r in 0..ROWS {
                    let factor = simd.splat_f32s(rows[r][i]);
                    for register in 0..REGISTERS {
                        sums[p][r][register] =
                            simd.mul_add_f32s(factor, weights[register], sums[p][r][register]);
                    }
                }
            }
        }
        for p in 0..PANELS {
            for r in 0..ROWS {
                let row = &mut output[r * outputs..(r + 1) * outputs];
                write::<S, REGISTERS>(simd, sums[p][r], row, column + p * LINE + first);
            }
        }
    }
}

/// Asks for the line that a pass needs so many lines later, in this panel or the next: one stream
/// at a time does not make the processor look ahead far enough on its own.
#[inline(always)]
fn prefetch(line: &Line, num_lines: usize) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "a prefetch takes a pointer; it reads nothing")]
    // SAFETY: a prefetch of any address is allowed, and this one is only computed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = std::ptr::from_ref(line).wrapping_add(num_lines);
        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, num_lines);
}

/// Stores sums from `start` on, as far as the outputs go: a last panel may be wider than them.
///
/// The sums come by value: where their address is taken, they are kept in memory all along.
#[inline(always)]
fn write<S: Simd, const REGISTERS: usize>(
    _simd: S,
    sums: [S::f32s; REGISTERS],
    output: &mut [f32],
    start: usize,
) {
    let Some(output) = output.get_mut(start..) else { return };
    let (registers, _) = S::as_mut_simd_f32s(output);
    if let Some(registers) = registers.first_chunk_mut() {
        *registers = sums;
    } else {
        let num_left = output.len();
        output.copy_from_slice(&pulp::bytemuck::cast_slice(&sums)[..num_left]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution, Tensor};

    fn random(rows: usize, columns: usize) -> Tensor<2> {
        let device = Device::flex();
        Tensor::random([rows, columns], Distribution::Normal(0.0, 1.0), &device)
    }

    fn values(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec().expect("f32")
    }

    #[test]
    fn it_is_the_general_product_and_rows_do_not_depend_on_each_other() {
        for (inputs, outputs) in [(1, 1), (7, 5), (8, 32), (33, 100), (192, 517), (2048, 2056)] {
            let weight = random(inputs, outputs);
            let packed = PackedWeights::pack(&values(weight.clone()), inputs, outputs, None);
            let product = |x: &[f32]| {
                let mut output = Vec::new();
                packed.multiply(x, &mut output, Threads::All);
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
        PackedWeights::pack(&weight, 5, 3, None).multiply(&x, &mut without, Threads::All);
        PackedWeights::pack(&weight, 5, 3, Some(bias.clone())).multiply(
            &x,
            &mut with,
            Threads::One,
        );
        for (i, (with, without)) in with.iter().zip(without).enumerate() {
            assert_eq!(*with, without + bias[i % 3]);
        }
    }
}

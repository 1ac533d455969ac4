//! Input rows rounded to eight bits, as llama.cpp rounds them before a product with quantised
//! weights.
//!
//! The rows are stored in tiles, `[group, row]`, so that a pass over some rows reads them through
//! one pointer.

use pulp::Arch;

use super::{BLOCK, GROUP};

/// The number of inputs that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::packed) enum RowForm {
    /// 32 inputs, as in llama.cpp's `Q8_0` and `Q8_1`. Scales are not rounded to half precision,
    /// and the sums of `Q8_1` are exact.
    Per32,
    /// 256 inputs, as in llama.cpp's `Q8_K`.
    Per256,
}

impl RowForm {
    pub(super) fn block_len(self) -> usize {
        match self {
            Self::Per32 => GROUP,
            Self::Per256 => BLOCK,
        }
    }
}

/// The number of rows that are multiplied by each weight line when it is read, at most.
const MOST_ROWS_A_TILE: usize = 12;

/// The number of rows in a tile if there are several tiles, at most.
const ROWS_A_TILE: usize = 8;

/// Rows in eight bits.
#[derive(Debug)]
pub(in crate::packed) struct QuantisedRows {
    groups: Vec<RowGroup>,
    pub(super) inputs: usize,
    pub(super) num_rows: usize,
    pub(in crate::packed) form: RowForm,
}

/// 32 inputs of a row.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(16))]
pub(super) struct RowGroup {
    pub(super) quants: [[i8; 4]; GROUP / 4],
    /// The number by which the quantised inputs are multiplied.
    pub(super) scale: f32,
    /// The negated sum of the quantised inputs.
    pub(super) minus_sum: i32,
    /// The negated sums of the first and the last 16 quantised inputs.
    pub(super) minus_half_sums: [i16; 2],
    /// The negated sums of all quantised inputs of this group and the next. Only even groups have
    /// them.
    pub(super) minus_pair_sums: [i16; 2],
}

/// Rows that are multiplied in one pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowPass<'a> {
    /// The rows' first groups, followed by other rows of their tile.
    pub(super) groups: &'a [RowGroup],
    /// The distance between a row's groups.
    pub(super) stride: usize,
    /// The number of rows, of which the last may be zeros.
    pub(super) num_rows: usize,
    /// The number of rows whose products are of interest.
    pub(super) num_outputs: usize,
}

impl QuantisedRows {
    /// Rounds rows.
    ///
    /// If an input is NaN or infinite, so are its block's scale and the results of its row.
    ///
    /// # Shapes
    /// - x: `[rows, inputs]`
    pub(in crate::packed) fn new(x: &[f32], inputs: usize, form: RowForm) -> Self {
        assert!(inputs.is_multiple_of(form.block_len()), "rows consist of whole blocks");
        assert!(x.len().is_multiple_of(inputs), "there are whole rows");
        let mut rows = Self { groups: Vec::new(), inputs, num_rows: x.len() / inputs, form };
        let [rows_a_tile, stride] = rows.tile_shape();
        let (num_tiles, num_groups) = (rows.num_rows.div_ceil(rows_a_tile), inputs / GROUP);
        rows.groups.resize(num_tiles * num_groups * stride, RowGroup::default());
        let tiles = rows.groups.chunks_mut(num_groups * stride);
        for (tile, x) in tiles.zip(x.chunks(rows_a_tile * inputs)) {
            Arch::new().dispatch(
                #[inline(always)]
                || quantise_tile(x, inputs, form, tile),
            );
        }
        rows
    }

    /// Divides the rows into passes of at most `most_rows`, in order.
    pub(super) fn passes(&self, most_rows: usize) -> impl Iterator<Item = RowPass<'_>> {
        let num_groups = self.inputs / GROUP;
        let [rows_a_tile, stride] = self.tile_shape();
        let tiles = self.groups.chunks(num_groups * stride).enumerate();
        tiles.flat_map(move |(number, tile)| {
            let end = rows_a_tile.min(self.num_rows - number * rows_a_tile);
            let rows_a_pass = stride.div_ceil(stride.div_ceil(most_rows));
            (0..end).step_by(rows_a_pass).map(move |first| {
                let num_rows = rows_a_pass.min(stride - first);
                let num_outputs = num_rows.min(end - first);
                RowPass { groups: &tile[first..], stride, num_rows, num_outputs }
            })
        })
    }

    /// Returns the number of rows of a tile without and with rows of zeros, so that fewer kernels
    /// are needed. All tiles have about equal size, because a pass of one row costs as much as one
    /// of four.
    fn tile_shape(&self) -> [usize; 2] {
        let num_rows = match self.num_rows {
            num_rows @ ..=MOST_ROWS_A_TILE => num_rows.max(1),
            num_rows => num_rows.div_ceil(num_rows.div_ceil(ROWS_A_TILE)),
        };
        [num_rows, if num_rows > 6 { num_rows.next_multiple_of(2) } else { num_rows }]
    }
}

#[inline(always)]
fn quantise_tile(x: &[f32], inputs: usize, form: RowForm, tile: &mut [RowGroup]) {
    let stride = tile.len() / (inputs / GROUP);
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        for (block, x) in x.chunks_exact(form.block_len()).enumerate() {
            let [factor, scale] = scales(x, form);
            let first = block * form.block_len() / GROUP;
            for (group, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
                let group = first + group;
                let quantised = quantise_group(x, factor, scale);
                tile[group * stride + row] = quantised;
                let even = &mut tile[(group - group % 2) * stride + row];
                even.minus_pair_sums[group % 2] = quantised.minus_sum as i16;
            }
        }
    }
}

/// Returns the factor that maps the largest input to 127, and its inverse.
///
/// llama.cpp's `Q8_K` maps the largest input to -127 and negates the inverse; the products are the
/// same.
#[inline(always)]
fn scales(x: &[f32], form: RowForm) -> [f32; 2] {
    // Compared as integers, NaN is the largest number.
    let mut largest = [0; GROUP];
    for x in x.as_chunks::<GROUP>().0 {
        for i in 0..GROUP {
            largest[i] = largest[i].max(x[i].abs().to_bits());
        }
    }
    let largest = f32::from_bits(largest.into_iter().fold(0, u32::max));
    if largest == 0.0 {
        return [0.0; 2];
    }
    let factor = 127.0 / largest;
    match form {
        RowForm::Per32 => [factor, largest / 127.0],
        RowForm::Per256 => [factor, 1.0 / factor],
    }
}

#[inline(always)]
fn quantise_group(x: &[f32; GROUP], factor: f32, scale: f32) -> RowGroup {
    /// The number whose addition rounds to an integer, in the lowest bits of the sum.
    const ROUNDER: f32 = 12_582_912.0;
    let mut quants = [0; GROUP];
    for i in 0..GROUP {
        quants[i] = (x[i] * factor + ROUNDER).to_bits() as i8;
    }
    let mut minus_half_sums = [0; 2];
    for (sum, quants) in minus_half_sums.iter_mut().zip(quants.as_chunks::<{ GROUP / 2 }>().0) {
        for quant in quants {
            *sum -= i16::from(*quant);
        }
    }
    let minus_sum = i32::from(minus_half_sums[0] + minus_half_sums[1]);
    let quants = pulp::cast(quants);
    RowGroup { quants, scale, minus_sum, minus_half_sums, minus_pair_sums: [0; 2] }
}

//! Products of rows in eight bits and panels of quantised weights.
//!
//! The products of a group's weights and inputs are summed in integers, which is exact. The sums
//! are combined in f32, in the order of the inputs. So a result depends neither on the rows beside
//! it nor on the instructions.
//!
//! Weights are unsigned in a panel. Each sum starts at the negated product of their offset and the
//! sum of the inputs.

use std::ops::Range;
use std::slice;

use pulp::bytemuck::{Pod, cast_slice};

use super::lanes::Lanes;
use super::rows::{QuantisedRows, RowGroup, RowPass};
use super::{BLOCK, GROUP, PanelForm, QuantLine, ScaleLine, Scales};
use crate::packed::kernel::prefetch;
use crate::packed::storage::LINE;

/// The number of streams of reads from which the processor prefetches well enough by itself.
const MIN_STREAMS_AHEAD: usize = 4;

/// The distance between a prefetched line and the line in use, in lines.
const LINES_AHEAD: usize = 64;

/// The number of bytes of panels, at most, that several passes of rows multiply. They stay in a
/// core's second cache.
const GROUP_BYTES: usize = 1 << 19;

/// The number of panels that several passes of rows multiply, at most.
const MOST_PANELS: usize = 16;

/// Consecutive panels of quantised weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a> {
    pub(super) lines: &'a [QuantLine],
    pub(super) scales: &'a [ScaleLine],
    pub(super) num_panels: usize,
    /// The number of lines of a panel.
    pub(super) num_lines: usize,
    /// The number of lines of scales of a panel.
    pub(super) num_scale_lines: usize,
    /// The number that is subtracted from the bits to obtain a signed weight.
    pub(super) offset: i32,
}

impl Panels<'_> {
    pub(super) fn slice(self, panels: Range<usize>) -> Self {
        let range = |num_lines: usize| panels.start * num_lines..panels.end * num_lines;
        Self {
            lines: &self.lines[range(self.num_lines)],
            scales: &self.scales[range(self.num_scale_lines)],
            num_panels: panels.len(),
            ..self
        }
    }

    /// Splits into groups of at most `size` panels, each with its first panel.
    fn groups(self, size: usize) -> impl Iterator<Item = (usize, Self)> {
        let starts = (0..self.num_panels).step_by(size);
        starts.map(move |start| (start, self.slice(start..self.num_panels.min(start + size))))
    }
}

/// Multiplies rows by panels, into `[rows, outputs]`. The last panel may be wider.
///
/// The lanes of a register are a strip: a panel, or a half of one. With few rows, several strips are
/// multiplied side by side, so that enough sums are in progress to keep the multipliers busy.
pub(super) fn multiply_panels<I: Lanes, F: PanelForm>(
    lanes: I,
    rows: &QuantisedRows,
    panels: Panels<'_>,
    outputs: usize,
    output: &mut [f32],
) {
    let is_one_pass = rows.passes(I::MOST_ROWS).nth(1).is_none();
    let panels_a_group = GROUP_BYTES / (panels.num_lines * size_of::<QuantLine>());
    let panels_a_group = match is_one_pass {
        true => panels.num_panels,
        false => panels_a_group.clamp(2, MOST_PANELS).next_multiple_of(2),
    };
    for (start, panels) in panels.groups(panels_a_group) {
        let columns = start * LINE..outputs.min((start + panels.num_panels) * LINE);
        let mut output = output.chunks_exact_mut(outputs).map(|row| &mut row[columns.clone()]);
        for rows in rows.passes(I::MOST_ROWS) {
            let mut output: Vec<_> = output.by_ref().take(rows.num_outputs).collect();
            multiply_rows::<I, F>(lanes, rows, panels, &mut output);
        }
    }
}

/// Multiplies the rows of a pass by panels.
fn multiply_rows<I: Lanes, F: PanelForm>(
    lanes: I,
    rows: RowPass<'_>,
    panels: Panels<'_>,
    output: &mut [&mut [f32]],
) {
    let num_strips = output[0].len().div_ceil(LINE / I::STRIPS);
    macro_rules! match_shape {
        ($(($num_rows:literal: $num_strips:literal))+) => {
            match rows.num_rows {
                $($num_rows => for first in (0..num_strips).step_by($num_strips) {
                    lanes.vectorize(
                        #[inline(always)]
                        || {
                            let sums =
                                pass::<I, F, $num_rows, $num_strips>(lanes, rows, panels, first);
                            write(&sums, output, first * LINE / I::STRIPS);
                        },
                    );
                })+
                num_rows => unreachable!("{num_rows} rows are no pass"),
            }
        };
    }
    // Bytes need no unpacking, so that more strips keep the multipliers busy.
    if I::MOST_ROWS == 12 && F::BITS == 8 {
        match_shape!((1: 6) (2: 6) (3: 4) (4: 3) (5: 2) (6: 2) (8: 2) (10: 1) (12: 1));
    } else if I::MOST_ROWS == 12 {
        match_shape!((1: 6) (2: 4) (3: 2) (4: 2) (5: 1) (6: 1) (8: 1) (10: 1) (12: 1));
    } else if I::STRIPS == 2 {
        match_shape!((1: 4) (2: 2) (3: 2) (4: 2) (5: 1) (6: 1));
    } else if I::MOST_ROWS == 6 {
        match_shape!((1: 2) (2: 1) (3: 1) (4: 1) (5: 1) (6: 1));
    } else {
        match_shape!((1: 1));
    }
}

/// Writes the sums of strips to rows from a column on.
#[inline(always)]
fn write<Floats: Pod, const ROWS: usize, const STRIPS: usize>(
    sums: &[[Floats; ROWS]; STRIPS],
    output: &mut [&mut [f32]],
    column: usize,
) {
    for (r, output) in output.iter_mut().enumerate().take(ROWS) {
        let strips = output[column..].chunks_mut(size_of::<Floats>() / size_of::<f32>());
        for (sums, output) in sums.iter().zip(strips) {
            output.copy_from_slice(&cast_slice(slice::from_ref(&sums[r]))[..output.len()]);
        }
    }
}

/// Multiplies `ROWS` rows by `STRIPS` strips side by side, from a strip on. If there are fewer, the
/// last one is multiplied again.
#[inline(always)]
fn pass<I: Lanes, F: PanelForm, const ROWS: usize, const STRIPS: usize>(
    lanes: I,
    rows: RowPass<'_>,
    panels: Panels<'_>,
    first: usize,
) -> [[I::Floats; ROWS]; STRIPS] {
    // The number of panels side by side.
    let num_panels = STRIPS.div_ceil(I::STRIPS);
    let form = F::SCALES;
    let num_groups = form.num_groups();
    let Panels { num_lines, num_scale_lines, .. } = panels;
    // All slices have the same length, so that the compiler checks one index for all of them.
    let mut all_lines = [panels.lines; STRIPS];
    let mut all_scales = [panels.scales; STRIPS];
    let mut halves = [0; STRIPS];
    for s in 0..STRIPS {
        let panel = ((first + s) / I::STRIPS).min(panels.num_panels - 1);
        all_lines[s] = &panels.lines[panel * num_lines..][..num_lines];
        all_scales[s] = &panels.scales[panel * num_scale_lines..][..num_scale_lines];
        halves[s] = if STRIPS == 1 { first % I::STRIPS } else { s % I::STRIPS };
    }
    let zero = lanes.splat(0.0);
    let mut sums = [[zero; ROWS]; STRIPS];
    for block in 0..num_lines / (num_groups * F::BITS) {
        let groups = &rows.groups[block * num_groups * rows.stride..];
        let mut block_sums = [[zero; ROWS]; STRIPS];
        let mut scales = [panels.scales; STRIPS];
        for s in 0..STRIPS {
            scales[s] = &all_scales[s][block * form.num_lines()..][..form.num_lines()];
            if num_panels < MIN_STREAMS_AHEAD && s % I::STRIPS == 0 {
                let blocks_ahead = LINES_AHEAD / (num_groups * F::BITS);
                for line in scales[s].iter().step_by(2) {
                    prefetch(line, blocks_ahead * form.num_lines());
                }
            }
        }
        for group in 0..num_groups {
            let rows = &groups[group * rows.stride..][..ROWS];
            let first = (block * num_groups + group) * F::BITS;
            let mut lines = [panels.lines; STRIPS];
            for s in 0..STRIPS {
                lines[s] = &all_lines[s][first..][..F::BITS];
                if num_panels < MIN_STREAMS_AHEAD && s % I::STRIPS == 0 {
                    // After the end of a panel, the next pass's panel follows.
                    let is_inside = num_panels == 1 || first + LINES_AHEAD < num_lines;
                    let skipped = if is_inside { 0 } else { (num_panels - 1) * num_lines };
                    for line in lines[s] {
                        prefetch(line, LINES_AHEAD + skipped);
                    }
                }
            }
            let weights =
                StripGroup { lines, scales, halves, number: group, offset: panels.offset };
            add_part::<I, F, ROWS, STRIPS>(lanes, rows, weights, 0, &mut block_sums);
            if form.num_parts() == 2 {
                add_part::<I, F, ROWS, STRIPS>(lanes, rows, weights, 1, &mut block_sums);
            }
        }
        if form.has_minimum() {
            let rows = RowPass { groups, ..rows };
            add_minimums::<I, F, ROWS, STRIPS>(lanes, rows, (scales, halves), &mut block_sums);
        }
        let groups = &groups[..ROWS];
        for r in 0..ROWS {
            for s in 0..STRIPS {
                sums[s][r] =
                    lanes.mul_add(block_sums[s][r], lanes.splat(groups[r].scale), sums[s][r]);
            }
        }
    }
    sums
}

/// The bits of 1.5 · 2²³. A small integer added to the bits is added to the number, so that sums
/// need no conversion. Multiplied by a scale in half precision, the number is exact.
const ONES: i32 = 0x4b40_0000;

/// A group's weights in some strips.
#[derive(Debug, Clone, Copy)]
struct StripGroup<'a, const STRIPS: usize> {
    lines: [&'a [QuantLine]; STRIPS],
    /// The scales of the group's block.
    scales: [&'a [ScaleLine]; STRIPS],
    /// The strips' numbers in their panels.
    halves: [usize; STRIPS],
    /// The number of the group in its block.
    number: usize,
    offset: i32,
}

/// Multiplies rows by a part of a group, and adds the products to the sums of the group's block.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "loops over small arrays unroll into registers")]
fn add_part<I: Lanes, F: PanelForm, const ROWS: usize, const STRIPS: usize>(
    lanes: I,
    rows: &[RowGroup],
    weights: StripGroup<'_, STRIPS>,
    part: usize,
    block_sums: &mut [[I::Floats; ROWS]; STRIPS],
) {
    let form = F::SCALES;
    let offset = if F::BITS == 8 && I::SUBTRACTS_OFFSET { 0 } else { weights.offset };
    let mut products = [[lanes.start(0); ROWS]; STRIPS];
    for r in 0..ROWS {
        let minus_sum = match form {
            Scales::NestedHalves => i32::from(rows[r].minus_half_sums[part]),
            _ => rows[r].minus_sum,
        };
        let start = if form.is_nested() { 0 } else { ONES };
        for s in 0..STRIPS {
            products[s][r] = lanes.start(minus_sum * offset + start);
        }
    }
    macro_rules! steps {
        ($($step:literal)+) => {$(
            if $step * form.num_parts() / (GROUP / 4) == part {
                for s in 0..STRIPS {
                    let weights = weights_of::<I, F>(lanes, weights.lines[s], weights.halves[s], $step);
                    for r in 0..ROWS {
                        let inputs = rows[r].quants[$step];
                        products[s][r] = lanes.dot(products[s][r], weights, inputs, F::BITS, $step);
                    }
                }
            }
        )+};
    }
    // The compiler would not unroll a loop of this size.
    steps!(0 1 2 3 4 5 6 7);
    for s in 0..STRIPS {
        let scale =
            scale_of(lanes, form, weights.scales[s], weights.halves[s], (weights.number, part));
        let minus_ones = lanes.mul(scale, lanes.splat(-f32::from_bits(ONES as u32)));
        for r in 0..ROWS {
            let products = lanes.total(products[s][r]);
            block_sums[s][r] = if form.is_nested() {
                lanes.mul_add(lanes.floats(products), scale, block_sums[s][r])
            } else {
                lanes.mul_add(lanes.bits_as_floats(products), scale, minus_ones)
            };
        }
    }
}

/// Adds the products of minimums and sums of a row's inputs to the sums of a block.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "loops over small arrays unroll into registers")]
fn add_minimums<I: Lanes, F: PanelForm, const ROWS: usize, const STRIPS: usize>(
    lanes: I,
    rows: RowPass<'_>,
    (scales, halves): ([&[ScaleLine]; STRIPS], [usize; STRIPS]),
    block_sums: &mut [[I::Floats; ROWS]; STRIPS],
) {
    let mut sums = [[lanes.splat_int(0); ROWS]; STRIPS];
    if F::SCALES == Scales::Nested {
        for pair in 0..BLOCK / GROUP / 2 {
            let groups = &rows.groups[2 * pair * rows.stride..][..ROWS];
            for s in 0..STRIPS {
                let minimums = &scales[s][2 + BLOCK / GROUP / 2 + pair];
                for r in 0..ROWS {
                    let inputs = groups[r].minus_pair_sums;
                    sums[s][r] = lanes.dot_pair(sums[s][r], minimums, halves[s], inputs);
                }
            }
        }
    } else {
        let groups = &rows.groups[..ROWS];
        for r in 0..ROWS {
            for s in 0..STRIPS {
                sums[s][r] = lanes.splat_int(-groups[r].minus_sum);
            }
        }
    }
    for s in 0..STRIPS {
        let scale = lanes.halves(&scales[s][1], halves[s]);
        for r in 0..ROWS {
            block_sums[s][r] = lanes.mul_add(lanes.floats(sums[s][r]), scale, block_sums[s][r]);
        }
    }
}

/// Returns four inputs' weights, of a group that consists of `lines`.
#[inline(always)]
fn weights_of<I: Lanes, F: PanelForm>(
    lanes: I,
    lines: &[QuantLine],
    half: usize,
    step: usize,
) -> I::Bytes {
    if F::BITS == 8 {
        return lanes.load(&lines[step], half);
    }
    let low = lanes.bits(lanes.load(&lines[step % 4], half), 4 * (step / 4) as i32, 0x0f);
    // The upper bits move to the place of the fifth bit.
    let (line, place, mask) = match F::BITS {
        5 => (4, step, 0x10),
        6 => (4 + step / 4, 2 * (step % 4), 0x30),
        _ => return low,
    };
    lanes.or(low, lanes.bits(lanes.load(&lines[line], half), place as i32 - 4, mask))
}

/// Returns the scales of a part of a group.
#[inline(always)]
fn scale_of<I: Lanes>(
    lanes: I,
    form: Scales,
    scales: &[ScaleLine],
    half: usize,
    (group, part): (usize, usize),
) -> I::Floats {
    let scale = lanes.halves(&scales[0], half);
    let (line, place) = match form {
        Scales::Half | Scales::HalfAndMinimum => return scale,
        Scales::Nested => (2 + group / 2, group % 2),
        Scales::NestedHalves => (1 + group, part),
    };
    let is_signed = form == Scales::NestedHalves;
    lanes.mul(scale, lanes.scales(&scales[line], place, half, is_signed))
}

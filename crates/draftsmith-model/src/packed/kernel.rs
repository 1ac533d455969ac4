//! Products of rows and panels: the inner loops of every product with packed weights, and of
//! attention over packed keys and values.
//!
//! Each output is summed over the inputs in order, for any number of rows. So a row's result does
//! not depend on the rows beside it, and verification repeats the products of plain decoding to the
//! last bit.

use pulp::Simd;

use super::storage::{LINE, StoredLine};

/// The number of streams of reads from which the processor prefetches well enough by itself.
const MIN_STREAMS_AHEAD: usize = 4;

/// The shape of a product with panels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// The width of an input row, which is the number of inputs of each panel.
    pub(super) inputs: usize,
    /// The number of lines from the start of one panel to the start of the next.
    pub(super) stride: usize,
    /// The width of an output row.
    pub(super) outputs: usize,
}

/// Multiplies rows `[rows, inputs]` by panels, into `[rows, outputs]`.
///
/// With few rows, several panels are multiplied side by side, so that enough sums are in progress
/// to keep the multipliers busy.
#[inline(always)]
pub(super) fn multiply_panels<S: Simd, L: StoredLine>(
    simd: S,
    x: &[f32],
    lines: &[L],
    shape: Shape,
    output: &mut [f32],
) {
    let Shape { inputs, stride, outputs } = shape;
    // The sums take at most 24 of 32 registers if a register holds a whole line, or 12 of 16 if it
    // holds half a line. Up to 12 rows read each weight once. More rows are divided into passes of
    // up to eight: three panels then share each row's factors.
    let is_line_a_register = S::F32_LANES == LINE;
    let num_rows = x.len() / inputs;
    let most_rows = match (is_line_a_register, num_rows) {
        (true, ..=12) => 12,
        (true, _) => 8,
        (false, _) => 6,
    };
    // Passes have about equal size, because a pass of one row costs as much as one of four.
    let rows_a_pass = num_rows.div_ceil(num_rows.div_ceil(most_rows));
    let panels_a_pass = match (is_line_a_register, rows_a_pass) {
        // Lines of two inputs leave fewer registers for sums.
        (true, 3) if L::INPUTS > 1 => 4,
        (true, 6..=8) if L::INPUTS > 1 => 2,
        (true, 9..) if L::INPUTS > 1 => 1,
        // Six panels are enough streams to read memory at full speed.
        (true, 1..=3) => 6,
        (true, 4..=8) => 3,
        (true, _) => 2,
        (false, 1) if L::INPUTS > 1 => 3,
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

/// Calls `pass` for the number of rows in `x` and of panels in `lines`.
macro_rules! pass_of_shape {
    (
        $registers:literal,
        [$(($rows:literal: $($panels:literal)+))+],
        ($simd:ident, $x:ident, $lines:ident, $shape:ident, $column:ident, $output:ident)
    ) => {
        // The last panel may be cut off after the last of its lines that is read.
        match ($x.len() / $shape.inputs, $lines.len().div_ceil($shape.stride)) {
            $($(($rows, $panels) => {
                $simd.vectorize(
                    #[inline(always)]
                    || pass::<S, L, $rows, $panels, $registers>($simd, $x, $lines, $shape, $column, $output),
                );
            })+)+
            (rows, panels) => unreachable!("{rows} rows and {panels} panels are no pass"),
        }
    };
}

/// Runs a pass in which a register holds a whole line.
#[inline(always)]
fn pass_of_lines<S: Simd, L: StoredLine>(
    simd: S,
    x: &[f32],
    lines: &[L],
    shape: Shape,
    column: usize,
    output: &mut [f32],
) {
    pass_of_shape!(
        1,
        [
            (1: 1 2 3 4 5 6) (2: 1 2 3 4 5 6) (3: 1 2 3 4 5 6) (4: 1 2 3) (5: 1 2 3) (6: 1 2 3)
            (7: 1 2 3) (8: 1 2 3) (9: 1 2) (10: 1 2) (11: 1 2) (12: 1 2)
        ],
        (simd, x, lines, shape, column, output)
    );
}

/// Runs a pass in which a line takes two or more registers.
#[inline(always)]
fn pass_of_half_lines<S: Simd, L: StoredLine>(
    simd: S,
    x: &[f32],
    lines: &[L],
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

/// The distance between a prefetched line and the line in use, in lines.
const LINES_AHEAD: usize = 64;

/// The distance between panels, in lines, at whose multiples lines of two panels compete for the
/// same cache sets. Two rows then read one panel at a time.
const ALIASING_STRIDE: usize = 256;

/// Multiplies `ROWS` rows by `PANELS` panels side by side, with `REGISTERS` registers of sums per
/// row and panel.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "loops over small arrays unroll into registers")]
fn pass<S: Simd, L: StoredLine, const ROWS: usize, const PANELS: usize, const REGISTERS: usize>(
    simd: S,
    x: &[f32],
    lines: &[L],
    Shape { inputs, stride, outputs }: Shape,
    column: usize,
    output: &mut [f32],
) {
    // The slices are cut so that the compiler knows every length to be `num_lines` and drops the
    // bounds checks below.
    let num_lines = inputs / L::INPUTS;
    let mut rows = [&L::factors(x)[..num_lines]; ROWS];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &L::factors(&x[r * inputs..][..inputs])[..num_lines];
    }
    let mut panels = [&lines[..num_lines]; PANELS];
    for (p, panel) in panels.iter_mut().enumerate() {
        *panel = &lines[p * stride..][..num_lines];
    }
    let step = REGISTERS * S::F32_LANES;
    for first in (0..LINE).step_by(step) {
        let mut sums = [[[simd.splat_f32s(0.0); REGISTERS]; ROWS]; PANELS];
        for i in 0..num_lines {
            if PANELS < MIN_STREAMS_AHEAD {
                for p in 0..PANELS {
                    let is_inside = PANELS == 1 || i + LINES_AHEAD < num_lines;
                    let skipped = if is_inside { 0 } else { (PANELS - 1) * stride };
                    prefetch(&panels[p][i], LINES_AHEAD + skipped);
                }
            }
            for input in 0..L::INPUTS {
                let mut weights = [[simd.splat_f32s(0.0); REGISTERS]; PANELS];
                for p in 0..PANELS {
                    weights[p] = panels[p][i].widen::<S, REGISTERS>(simd, input, first);
                }
                for r in 0..ROWS {
                    let factor = simd.splat_f32s(rows[r][i].as_ref()[input]);
                    for p in 0..PANELS {
                        for register in 0..REGISTERS {
                            sums[p][r][register] = simd.mul_add_f32s(
                                factor,
                                weights[p][register],
                                sums[p][r][register],
                            );
                        }
                    }
                }
            }
        }
        // The last input is handled separately if it has a line to itself.
        if num_lines * L::INPUTS < inputs {
            for p in 0..PANELS {
                let line = &lines[p * stride + num_lines];
                let weights = line.widen::<S, REGISTERS>(simd, 0, first);
                for r in 0..ROWS {
                    let factor = simd.splat_f32s(x[(r + 1) * inputs - 1]);
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

/// Prefetches the line that a pass needs `num_lines` lines later, in this panel or the next. If
/// there is a single stream, the processor does not look far enough ahead by itself.
#[inline(always)]
pub(super) fn prefetch<L>(line: &L, num_lines: usize) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "a prefetch takes a pointer; it reads nothing")]
    // SAFETY: prefetching any address is allowed, and this one is only computed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = std::ptr::from_ref(line).wrapping_add(num_lines);
        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, num_lines);
}

/// Stores sums from output `start` on, without those past the last output: the last panel may be
/// wider.
///
/// The sums are passed by value, because taking their address would keep them in memory throughout.
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

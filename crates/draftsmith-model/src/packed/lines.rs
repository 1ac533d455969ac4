//! The weights of a matrix as lines, with functions to fill, read and multiply them.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::kernel::{Shape, multiply_panels};
use super::storage::{Bf16Line, F16Line, F32Line, LANE_BYTES, LINE, Storage, StoredLine};

/// Consecutive panels of lines in one of the storage formats.
#[derive(Debug)]
pub(super) enum Lines {
    F32(Vec<F32Line>),
    Bf16(Vec<Bf16Line>),
    F16(Vec<F16Line>),
}

/// Evaluates an expression for lines of any storage format.
macro_rules! for_lines {
    ($lines:expr, $name:ident => $value:expr) => {
        match $lines {
            Lines::F32($name) => $value,
            Lines::Bf16($name) => $value,
            Lines::F16($name) => $value,
        }
    };
}

impl Lines {
    /// Allocates lines of zeros.
    pub(super) fn zeros(storage: Storage, inputs: usize, outputs: usize) -> Self {
        fn empty<L: StoredLine>(inputs: usize, outputs: usize) -> Vec<L> {
            vec![L::EMPTY; outputs.div_ceil(LINE) * inputs.div_ceil(L::INPUTS)]
        }
        match storage {
            Storage::F32 => Self::F32(empty(inputs, outputs)),
            Storage::Bf16 => Self::Bf16(empty(inputs, outputs)),
            Storage::F16 => Self::F16(empty(inputs, outputs)),
        }
    }

    pub(super) fn storage(&self) -> Storage {
        match self {
            Self::F32(_) => Storage::F32,
            Self::Bf16(_) => Storage::Bf16,
            Self::F16(_) => Storage::F16,
        }
    }

    /// Sets the weights of some outputs, rounded to the storage format. `weight` is called with the
    /// index of the input and the index of the output within `outputs`.
    pub(super) fn set_outputs(
        &mut self,
        inputs: usize,
        outputs: Range<usize>,
        weight: impl Fn(usize, usize) -> f32,
    ) {
        for_lines!(self, lines => set_outputs(lines, inputs, outputs, weight));
    }

    /// Sets the weights of outputs from `first` on. `rows` are rows of a file in the storage
    /// format, `[outputs, in]`.
    pub(super) fn set_rows(&mut self, inputs: usize, first: usize, rows: &[u8]) {
        for_lines!(self, lines => set_rows(lines, inputs, first, rows));
    }

    /// Appends one output's weights to `values`.
    pub(super) fn read_output(&self, inputs: usize, output: usize, values: &mut Vec<f32>) {
        for_lines!(self, lines => {
            let weight = weights_of(lines, inputs, output);
            values.extend((0..inputs).map(weight));
        });
    }

    /// Multiplies rows by the panels of some outputs. `outputs` must start at a panel.
    ///
    /// # Shapes
    /// - x: `[rows, inputs]`
    /// - output: `[rows, outputs]`
    pub(super) fn multiply(
        &self,
        inputs: usize,
        outputs: Range<usize>,
        x: &[f32],
        output: &mut [f32],
    ) {
        fn product<L: StoredLine>(
            lines: &[L],
            inputs: usize,
            outputs: Range<usize>,
            x: &[f32],
            output: &mut [f32],
        ) {
            let stride = inputs.div_ceil(L::INPUTS);
            let lines = &lines[outputs.start / LINE * stride..outputs.end.div_ceil(LINE) * stride];
            let shape = Shape { inputs, stride, outputs: outputs.len() };
            Arch::new().dispatch(Product { x, lines, shape, output });
        }
        for_lines!(self, lines => product(lines, inputs, outputs, x, output));
    }
}

fn set_outputs<L: StoredLine>(
    lines: &mut [L],
    inputs: usize,
    outputs: Range<usize>,
    weight: impl Fn(usize, usize) -> f32,
) {
    let stride = inputs.div_ceil(L::INPUTS);
    let mut start = outputs.start;
    while start < outputs.end {
        let panel = start / LINE;
        let end = ((panel + 1) * LINE).min(outputs.end);
        let lines = &mut lines[panel * stride..][..stride];
        for input in 0..inputs {
            let line = &mut lines[input / L::INPUTS];
            for output in start..end {
                let weight = weight(input, output - outputs.start);
                line.set(input % L::INPUTS, output % LINE, weight);
            }
        }
        start = end;
    }
}

/// Transposes a file's rows, in the storage format, into lines.
fn set_rows<L: StoredLine>(lines: &mut [L], inputs: usize, first: usize, rows: &[u8]) {
    let stride = inputs.div_ceil(L::INPUTS);
    let row_bytes = inputs * LANE_BYTES / L::INPUTS;
    for (number, row) in rows.chunks_exact(row_bytes).enumerate() {
        let (panel, output) = ((first + number) / LINE, (first + number) % LINE);
        let panel = &mut lines[panel * stride..][..stride];
        let (lanes, last) = row.as_chunks();
        for (line, lane) in panel.iter_mut().zip(lanes) {
            line.set_lane(output, *lane);
        }
        if !last.is_empty() {
            let mut lane = [0; LANE_BYTES];
            lane[..last.len()].copy_from_slice(last);
            panel[stride - 1].set_lane(output, lane);
        }
    }
}

/// Returns a function that reads one output's weights by input.
fn weights_of<L: StoredLine>(
    lines: &[L],
    inputs: usize,
    output: usize,
) -> impl Fn(usize) -> f32 + '_ {
    let stride = inputs.div_ceil(L::INPUTS);
    let panel = &lines[output / LINE * stride..][..stride];
    move |input| panel[input / L::INPUTS].get(input % L::INPUTS, output % LINE)
}

/// A product of rows and panels: `[rows, inputs]` to `[rows, outputs]`.
struct Product<'a, L> {
    x: &'a [f32],
    lines: &'a [L],
    shape: Shape,
    output: &'a mut [f32],
}

impl<L: StoredLine> WithSimd for Product<'_, L> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        multiply_panels(simd, self.x, self.lines, self.shape, self.output);
    }
}

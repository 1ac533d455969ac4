//! The weights of a matrix as lines, with functions to fill, read and multiply them.

use std::borrow::Cow;
use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::kernel::{Shape, multiply_panels};
use super::quantised::{QuantisedLines, QuantisedRows, RowForm};
use super::storage::{Bf16Line, F16Line, F32Line, LANE_BYTES, LINE, Storage, StoredLine};
use crate::weights::StoredRows;

/// Consecutive panels of lines in one of the storage formats.
#[derive(Debug)]
pub(super) enum Lines {
    F32(Vec<F32Line>),
    Bf16(Vec<Bf16Line>),
    F16(Vec<F16Line>),
    Quantised(QuantisedLines),
    /// Matrices of several formats side by side, each with its range of outputs. All but the last
    /// fill their panels.
    Beside(Vec<(Range<usize>, Lines)>),
}

/// Evaluates an expression for lines of a format that is not quantised, and another one for others.
macro_rules! for_lines {
    ($lines:expr, $name:ident => $value:expr, $others:pat => $other:expr) => {
        match $lines {
            Lines::F32($name) => $value,
            Lines::Bf16($name) => $value,
            Lines::F16($name) => $value,
            $others => $other,
        }
    };
}

/// Rows to multiply, in the forms that the lines of a matrix read.
#[derive(Debug)]
pub(super) struct Factors<'a> {
    x: Cow<'a, [f32]>,
    quantised: Vec<QuantisedRows>,
}

impl<'a> Factors<'a> {
    /// Converts rows `[rows, inputs]` for products with `lines`.
    pub(super) fn new(lines: &Lines, inputs: usize, x: impl Into<Cow<'a, [f32]>>) -> Self {
        let (x, mut forms) = (x.into(), Vec::new());
        lines.add_forms(&mut forms);
        let quantised = forms.into_iter().map(|form| QuantisedRows::new(&x, inputs, form));
        Self { quantised: quantised.collect(), x }
    }

    pub(super) fn num_numbers(&self) -> usize {
        self.x.len()
    }
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
            Storage::Quantised(kind) => {
                Self::Quantised(QuantisedLines::zeros(kind, inputs, outputs))
            }
        }
    }

    /// Returns the storage format, or f32 for several formats, whose numbers it represents.
    pub(super) fn storage(&self) -> Storage {
        match self {
            Self::F32(_) | Self::Beside(_) => Storage::F32,
            Self::Bf16(_) => Storage::Bf16,
            Self::F16(_) => Storage::F16,
            Self::Quantised(lines) => Storage::Quantised(lines.kind),
        }
    }

    /// Adds the forms in which these lines read rows.
    fn add_forms(&self, forms: &mut Vec<RowForm>) {
        match self {
            Self::Quantised(lines) if !forms.contains(&lines.kind.row_form()) => {
                forms.push(lines.kind.row_form());
            }
            Self::Beside(parts) => parts.iter().for_each(|(_, lines)| lines.add_forms(forms)),
            _ => {}
        }
    }

    /// Counts the bytes of the lines.
    pub(super) fn num_bytes(&self) -> usize {
        match self {
            Self::Quantised(lines) => lines.num_bytes(),
            Self::Beside(parts) => parts.iter().map(|(_, lines)| lines.num_bytes()).sum(),
            lines => for_lines!(lines, it => size_of_val(&**it), _ => 0),
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
        for_lines!(self, lines => set_outputs(lines, inputs, outputs, weight), _ => {
            unreachable!("quantised weights are set by rows of a file")
        });
    }

    /// Sets the weights of outputs from `first` on. `rows` are rows of a file, `[outputs, in]`. Returns
    /// whether the file has the storage format; otherwise nothing is set.
    pub(super) fn set_rows(&mut self, inputs: usize, first: usize, rows: StoredRows<'_>) -> bool {
        if let Self::Beside(parts) = self {
            let part = parts.iter_mut().find(|(outputs, _)| outputs.contains(&first));
            let (outputs, lines) = part.expect("all rows belong to a part");
            return lines.set_rows(inputs, first - outputs.start, rows);
        }
        let is_same = self.storage() == Storage::of(rows.format);
        if is_same {
            for_lines!(self, lines => set_rows(lines, inputs, first, rows.bytes), others => {
                if let Self::Quantised(lines) = others {
                    lines.set_rows(first, rows.bytes);
                }
            });
        }
        is_same
    }

    /// Appends one output's weights to `values`.
    pub(super) fn read_output(&self, inputs: usize, output: usize, values: &mut Vec<f32>) {
        match self {
            Self::Quantised(lines) => lines.read_output(output, values),
            Self::Beside(parts) => {
                let part = parts.iter().find(|(outputs, _)| outputs.contains(&output));
                let (outputs, lines) = part.expect("all outputs belong to a part");
                lines.read_output(inputs, output - outputs.start, values);
            }
            lines => for_lines!(lines, lines => {
                let weight = weights_of(lines, inputs, output);
                values.extend((0..inputs).map(weight));
            }, _ => {}),
        }
    }

    /// Multiplies rows by the panels of some outputs. `outputs` must start at a panel.
    ///
    /// # Shapes
    /// - factors: `[rows, inputs]`
    /// - output: `[rows, outputs]`
    pub(super) fn multiply(
        &self,
        inputs: usize,
        outputs: Range<usize>,
        factors: &Factors<'_>,
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
        match self {
            Self::Quantised(lines) => {
                let form = lines.kind.row_form();
                let rows = factors.quantised.iter().find(|rows| rows.form == form);
                lines.multiply(outputs, rows.expect("the rows were converted for them"), output);
            }
            Self::Beside(parts) => {
                let width = outputs.len();
                for (all, lines) in parts {
                    let here = outputs.start.max(all.start)..outputs.end.min(all.end);
                    if here.is_empty() {
                        continue;
                    }
                    let mut part = vec![0.0; output.len() / width * here.len()];
                    let own = here.start - all.start..here.end - all.start;
                    lines.multiply(inputs, own, factors, &mut part);
                    let columns = here.start - outputs.start..here.end - outputs.start;
                    let rows = output.chunks_exact_mut(width).zip(part.chunks_exact(here.len()));
                    rows.for_each(|(row, part)| row[columns.clone()].copy_from_slice(part));
                }
            }
            lines => {
                for_lines!(lines, it => product(it, inputs, outputs, &factors.x, output), _ => {})
            }
        }
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

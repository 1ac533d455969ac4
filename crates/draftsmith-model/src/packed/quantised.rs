//! Weights that stay in the quantised formats of GGUF files, and their products in integers.
//!
//! The weights of sixteen outputs form a panel, as in `lines`. A panel has the bits of the file's
//! weights in another order, so that one instruction multiplies four inputs of each output. Input
//! rows are rounded to eight bits ([`QuantisedRows`]), as in llama.cpp. Sums over a group of 32
//! inputs are integers, so a row's result does not depend on the rows beside it, on the batch, or on
//! the processor's instructions.

mod blocks;
mod kernel;
mod lanes;
mod rows;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub(super) use rows::{QuantisedRows, RowForm};

use kernel::{Panels, multiply_panels};
use lanes::{Lanes, Portable};

use super::storage::LINE;
use crate::weights::{BLOCK, GROUP, QuantBlock, QuantType, Scales};

impl Scales {
    /// Returns the number of parts of a group, each with a scale.
    const fn num_parts(self) -> usize {
        if matches!(self, Self::NestedHalves) { 2 } else { 1 }
    }

    /// Returns how many of a block's lines are in half precision. They precede the lines of bytes.
    const fn num_halves(self) -> usize {
        1 + self.has_minimum() as usize
    }

    /// Returns the places of a group's two numbers in bytes, each as a line and a byte. Minimums of
    /// two groups alternate; other numbers are in order.
    fn places(self, group: usize, lane: usize) -> [(usize, usize); 2] {
        match self {
            Self::Nested => [
                (group / 2, group % 2 * LINE + lane),
                (BLOCK / GROUP / 2 + group / 2, 2 * lane + group % 2),
            ],
            _ => [(group, lane), (group, LINE + lane)],
        }
    }

    /// Returns the number of lines of a block.
    const fn num_lines(self) -> usize {
        self.num_halves() + if self.is_nested() { BLOCK / GROUP } else { 0 }
    }
}

impl QuantType {
    /// Returns the form of the rows that weights of this type multiply.
    pub(super) const fn row_form(self) -> RowForm {
        if self.scales().is_nested() { RowForm::Per256 } else { RowForm::Per32 }
    }

    /// Returns the number of lines of weights of a block in a panel: one per group and bit.
    const fn block_lines(self) -> usize {
        self.scales().num_groups() * self.bits()
    }
}

/// The form of panels for which a kernel is compiled.
trait PanelForm {
    const BITS: usize;

    const SCALES: Scales;
}

/// Defines a [`PanelForm`] for each type, and a function that multiplies with a type's kernel.
macro_rules! forms {
    ($($name:ident: $scales:ident $bits:literal;)+) => {
        $(
            struct $name;

            impl PanelForm for $name {
                const BITS: usize = $bits;
                const SCALES: Scales = Scales::$scales;
            }
        )+

        /// Multiplies rows by panels of a type with some instructions.
        fn multiply_with<I: Lanes>(
            lanes: I,
            kind: QuantType,
            rows: &QuantisedRows,
            panels: Panels<'_>,
            (outputs, output): (usize, &mut [f32]),
        ) {
            match kind {
                $(QuantType::$name => {
                    multiply_panels::<I, $name>(lanes, rows, panels, outputs, output);
                })+
            }
        }
    };
}

forms! {
    Q8_0: Half 8;
    Q4_0: Half 4;
    Q4_1: HalfAndMinimum 4;
    Q5_0: Half 5;
    Q5_1: HalfAndMinimum 5;
    Q4K: Nested 4;
    Q5K: Nested 5;
    Q6K: NestedHalves 6;
}

/// Four weights of each output of a panel, or bits of more weights.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct QuantLine([u32; LINE]);

/// A scale of each output of a panel in half precision, or two in bytes.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
struct ScaleLine([u8; 2 * LINE]);

/// The vector instructions of a product.
#[derive(Debug, Clone, Copy)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Vnni(lanes::Vnni),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(lanes::Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx2(lanes::Avx2<false>),
    Portable(Portable),
}

/// Consecutive panels of quantised weights.
#[derive(Debug)]
pub(super) struct QuantisedLines {
    pub(super) kind: QuantType,
    inputs: usize,
    outputs: usize,
    lines: Vec<QuantLine>,
    scales: Vec<ScaleLine>,
}

impl QuantisedLines {
    /// Allocates a matrix of zeros.
    ///
    /// # Panics
    /// If the inputs are not whole blocks.
    pub(super) fn zeros(kind: QuantType, inputs: usize, outputs: usize) -> Self {
        assert!(inputs.is_multiple_of(kind.block_len()), "{inputs} inputs are not whole blocks");
        let num_blocks = outputs.div_ceil(LINE) * inputs / kind.block_len();
        Self {
            kind,
            inputs,
            outputs,
            lines: vec![QuantLine([0; LINE]); num_blocks * kind.block_lines()],
            scales: vec![ScaleLine([0; 2 * LINE]); num_blocks * kind.scales().num_lines()],
        }
    }

    /// Sets the weights of outputs from `first_output` on. `rows` are rows of a file, `[outputs,
    /// in]`.
    pub(super) fn set_rows(&mut self, first_output: usize, rows: &[u8]) {
        let (kind, num_blocks) = (self.kind, self.num_blocks());
        for (number, raw) in rows.chunks_exact(kind.block_bytes()).enumerate() {
            let block = QuantBlock::parse(kind, raw);
            self.set_block(first_output + number / num_blocks, number % num_blocks, &block);
        }
    }

    /// Appends one output's weights to `values`. They have the bits that ggml computes.
    pub(super) fn read_output(&self, output: usize, values: &mut Vec<f32>) {
        for number in 0..self.num_blocks() {
            self.block(output, number).widen_into(self.kind, values);
        }
    }

    /// Selects some outputs of the matrix.
    pub(super) fn select_outputs(&self, outputs: &[u32]) -> Self {
        let mut selected = Self::zeros(self.kind, self.inputs, outputs.len());
        for (place, output) in outputs.iter().enumerate() {
            for number in 0..self.num_blocks() {
                selected.set_block(place, number, &self.block(*output as usize, number));
            }
        }
        selected
    }

    /// Counts the bytes of the weights.
    pub(super) fn num_bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of_val(&*self.scales)
    }

    /// Multiplies rows by the panels of some outputs. `outputs` must start at a panel.
    ///
    /// # Shapes
    /// - rows: `[rows, inputs]`
    /// - output: `[rows, outputs]`
    pub(super) fn multiply(&self, outputs: Range<usize>, rows: &QuantisedRows, output: &mut [f32]) {
        self.multiply_with(Instructions::best(), outputs, rows, output);
    }

    fn multiply_with(
        &self,
        instructions: Instructions,
        outputs: Range<usize>,
        rows: &QuantisedRows,
        output: &mut [f32],
    ) {
        let (first, width) = (outputs.start / LINE, outputs.len());
        assert!(outputs.start.is_multiple_of(LINE) && outputs.end <= self.outputs);
        assert_eq!((rows.inputs, rows.form), (self.inputs, self.kind.row_form()));
        assert_eq!(output.len(), rows.num_rows * width);
        if output.is_empty() {
            return;
        }
        let panels = Panels {
            lines: &self.lines,
            scales: &self.scales,
            num_panels: self.outputs.div_ceil(LINE),
            num_lines: self.num_blocks() * self.kind.block_lines(),
            num_scale_lines: self.num_blocks() * self.kind.scales().num_lines(),
            offset: self.kind.offset(),
        };
        let panels = panels.slice(first..first + width.div_ceil(LINE));
        let output = (width, output);
        match instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Vnni(lanes) => multiply_with(lanes, self.kind, rows, panels, output),
            #[cfg(target_arch = "x86_64")]
            Instructions::AvxVnni(lanes) => multiply_with(lanes, self.kind, rows, panels, output),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2(lanes) => multiply_with(lanes, self.kind, rows, panels, output),
            Instructions::Portable(lanes) => {
                multiply_with(lanes, self.kind, rows, panels, output);
            }
        }
    }

    /// Returns the number of blocks of an output.
    fn num_blocks(&self) -> usize {
        self.inputs / self.kind.block_len()
    }

    fn block(&self, output: usize, number: usize) -> QuantBlock {
        let (lines, scales) = self.places(output, number);
        QuantBlock::read(self.kind, &self.lines[lines], &self.scales[scales], output % LINE)
    }

    fn set_block(&mut self, output: usize, number: usize, block: &QuantBlock) {
        let (lines, scales) = self.places(output, number);
        block.write(self.kind, &mut self.lines[lines], &mut self.scales[scales], output % LINE);
    }

    /// Returns the ranges of a block's lines.
    fn places(&self, output: usize, number: usize) -> (Range<usize>, Range<usize>) {
        let number = output / LINE * self.num_blocks() + number;
        let range = |num_lines: usize| number * num_lines..(number + 1) * num_lines;
        (range(self.kind.block_lines()), range(self.kind.scales().num_lines()))
    }
}

impl Instructions {
    /// Returns the fastest instructions of this processor.
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let best = lanes::Vnni::try_new().map(Self::Vnni);
            let best = best.or_else(|| lanes::Avx2::try_new().map(Self::AvxVnni));
            if let Some(best) = best.or_else(|| lanes::Avx2::try_new().map(Self::Avx2)) {
                return best;
            }
        }
        Self::Portable(Portable)
    }
}

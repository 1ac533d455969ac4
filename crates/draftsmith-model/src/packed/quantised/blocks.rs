//! The places of the blocks of GGUF files in panels.
//!
//! A [`QuantBlock`] is what both sides are converted to: quantised weights in the order of the inputs,
//! with the block's scales. Nothing is rounded on the way.
//!
//! In a panel, a group of 32 inputs takes as many lines as a weight has bits. Eight-bit weights
//! are stored in order, four inputs a line. Otherwise four lines contain the lower four bits, the
//! first 16 inputs in the lower halves of the bytes and the other 16 in the upper halves. The fifth
//! bit of all inputs takes one line, and the fifth and sixth two.

use super::{QuantLine, ScaleLine};
use crate::weights::{BLOCK, GROUP, QuantBlock, QuantType};

impl QuantBlock {
    /// Reads a block from a lane of a panel.
    pub(super) fn read(
        kind: QuantType,
        lines: &[QuantLine],
        scales: &[ScaleLine],
        lane: usize,
    ) -> Self {
        let mut block =
            Self { quants: [0; BLOCK], halves: [0; 2], scales: [[0; 2]; BLOCK / GROUP] };
        let groups = block.quants.as_chunks_mut::<GROUP>().0;
        for (group, lines) in groups.iter_mut().zip(lines.chunks_exact(kind.bits())) {
            for (step, quants) in group.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let bytes = |line: usize| lines[line].0[lane].to_le_bytes();
                for (place, quant) in quants.iter_mut().enumerate() {
                    *quant = match kind.bits() {
                        8 => bytes(step)[place],
                        _ => bytes(step % 4)[place] >> (4 * (step / 4)) & 0xf,
                    };
                    *quant |= match kind.bits() {
                        5 => (bytes(4)[place] >> step & 1) << 4,
                        6 => (bytes(4 + step / 4)[place] >> (2 * (step % 4)) & 3) << 4,
                        _ => 0,
                    };
                }
            }
        }
        let (halves, bytes) = scales.split_at(kind.scales().num_halves());
        for (half, line) in block.halves.iter_mut().zip(halves) {
            *half = u16::from_le_bytes([line.0[2 * lane], line.0[2 * lane + 1]]);
        }
        for (number, scales) in block.scales.iter_mut().enumerate().take(bytes.len()) {
            *scales = kind.scales().places(number, lane).map(|(line, byte)| bytes[line].0[byte]);
        }
        block
    }

    /// Writes the block to a lane of a panel.
    pub(super) fn write(
        &self,
        kind: QuantType,
        lines: &mut [QuantLine],
        scales: &mut [ScaleLine],
        lane: usize,
    ) {
        let groups = self.quants.as_chunks::<GROUP>().0;
        for (group, lines) in groups.iter().zip(lines.chunks_exact_mut(kind.bits())) {
            // Each element has the bytes of one step, and all shifts keep them apart.
            let steps: [u32; GROUP / 4] = pulp::cast(*group);
            let steps = steps.map(u32::from_le);
            if kind.bits() == 8 {
                for (line, step) in lines.iter_mut().zip(steps) {
                    line.0[lane] = step;
                }
                continue;
            }
            for line in 0..4 {
                let low = |step: u32| step & 0x0f0f_0f0f;
                lines[line].0[lane] = low(steps[line]) | low(steps[line + 4]) << 4;
            }
            let num_high_bits = kind.bits() - 4;
            let mask = [0, 0x0101_0101, 0x0303_0303][num_high_bits];
            for (number, line) in lines[4..].iter_mut().enumerate() {
                line.0[lane] = 0;
                for place in 0..8 / num_high_bits {
                    let step = steps[number * 4 + place];
                    line.0[lane] |= (step >> 4 & mask) << (num_high_bits * place);
                }
            }
        }
        let (halves, bytes) = scales.split_at_mut(kind.scales().num_halves());
        for (half, line) in self.halves.iter().zip(halves) {
            [line.0[2 * lane], line.0[2 * lane + 1]] = half.to_le_bytes();
        }
        for (number, scales) in self.scales.iter().enumerate().take(bytes.len()) {
            let places = kind.scales().places(number, lane);
            for ((line, byte), scale) in places.into_iter().zip(scales) {
                bytes[line].0[byte] = *scale;
            }
        }
    }
}

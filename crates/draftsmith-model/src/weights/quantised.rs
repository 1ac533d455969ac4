//! The quantised number formats of GGUF files: blocks of small integers that share scales.

use half::f16;

/// The number of weights in the smaller blocks, and of inputs whose products are summed in
/// integers.
pub(crate) const GROUP: usize = 32;

/// The number of weights in the larger blocks.
pub(crate) const BLOCK: usize = 256;

/// A quantised number format of ggml.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuantType {
    /// 8 bits a weight, a scale for 32.
    Q8_0,
    /// 4 bits a weight, a scale for 32.
    Q4_0,
    /// 4 bits a weight, a scale and a minimum for 32.
    Q4_1,
    /// 5 bits a weight, a scale for 32.
    Q5_0,
    /// 5 bits a weight, a scale and a minimum for 32.
    Q5_1,
    /// 4 bits a weight, a scale and a minimum of 6 bits for 32, and two scales of these for 256.
    Q4K,
    /// 5 bits a weight, otherwise as [`Self::Q4K`].
    Q5K,
    /// 6 bits a weight, a scale of 8 bits for 16, and a scale of these for 256.
    Q6K,
}

/// The scales of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// One scale for 32 weights.
    Half,
    /// One scale and one minimum for 32 weights.
    HalfAndMinimum,
    /// A scale and a minimum for each 32 of 256 weights, both in six bits with a common scale.
    Nested,
    /// A scale for each 16 of 256 weights, in eight bits with a common scale.
    NestedHalves,
}

impl Scales {
    pub(crate) const fn has_minimum(self) -> bool {
        matches!(self, Self::HalfAndMinimum | Self::Nested)
    }

    /// Returns the number of groups in a block.
    pub(crate) const fn num_groups(self) -> usize {
        if self.is_nested() { BLOCK / GROUP } else { 1 }
    }

    pub(crate) const fn is_nested(self) -> bool {
        matches!(self, Self::Nested | Self::NestedHalves)
    }
}

impl QuantType {
    /// All formats with their numbers and names in ggml.
    const ALL: [(Self, u64, &'static str); 8] = [
        (Self::Q4_0, 2, "Q4_0"),
        (Self::Q4_1, 3, "Q4_1"),
        (Self::Q5_0, 6, "Q5_0"),
        (Self::Q5_1, 7, "Q5_1"),
        (Self::Q8_0, 8, "Q8_0"),
        (Self::Q4K, 12, "Q4_K"),
        (Self::Q5K, 13, "Q5_K"),
        (Self::Q6K, 14, "Q6_K"),
    ];

    /// Returns the format with this number in ggml; `None` if we do not read it.
    pub(super) fn of_ggml(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.1 == number).map(|it| it.0)
    }

    /// Returns the name in ggml.
    pub(super) fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|it| it.0 == self).expect("all are listed").2
    }

    /// Returns the number of weights in a block.
    pub(crate) const fn block_len(self) -> usize {
        self.scales().num_groups() * GROUP
    }

    /// Returns the number of bytes of a block in a file.
    pub(crate) const fn block_bytes(self) -> usize {
        let num_scale_bytes = match self.scales() {
            Scales::Half => 2,
            Scales::HalfAndMinimum => 4,
            Scales::Nested => 16,
            Scales::NestedHalves => 18,
        };
        self.block_len() * self.bits() / 8 + num_scale_bytes
    }

    pub(crate) const fn bits(self) -> usize {
        match self {
            Self::Q8_0 => 8,
            Self::Q4_0 | Self::Q4_1 | Self::Q4K => 4,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 5,
            Self::Q6K => 6,
        }
    }

    /// Returns the number that is subtracted from the bits to obtain a signed weight.
    pub(crate) const fn offset(self) -> i32 {
        match self {
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => 0,
            _ => 1 << (self.bits() - 1),
        }
    }

    pub(crate) const fn scales(self) -> Scales {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q5_0 => Scales::Half,
            Self::Q4_1 | Self::Q5_1 => Scales::HalfAndMinimum,
            Self::Q4K | Self::Q5K => Scales::Nested,
            Self::Q6K => Scales::NestedHalves,
        }
    }

    /// Appends the weights of whole blocks of a file, with the bits of ggml's reference,
    /// `dequantize_row`.
    pub(super) fn widen_into(self, bytes: &[u8], values: &mut Vec<f32>) {
        for raw in bytes.chunks_exact(self.block_bytes()) {
            QuantBlock::parse(self, raw).widen_into(self, values);
        }
    }
}

/// A block of one output's weights. Blocks of 32 weights use the start of the arrays.
#[derive(Debug, Clone)]
pub(crate) struct QuantBlock {
    /// The quantised weights plus the type's offset.
    pub(crate) quants: [u8; BLOCK],
    /// The scale and the minimum or its scale, in half precision.
    pub(crate) halves: [u16; 2],
    /// The scales of parts of the block: scale and minimum for each 32 inputs, or the scales for
    /// two times 16 inputs.
    pub(crate) scales: [[u8; 2]; BLOCK / GROUP],
}

impl QuantBlock {
    /// Reads a block of a file.
    pub(crate) fn parse(kind: QuantType, raw: &[u8]) -> Self {
        let half = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let (mut quants, mut scales) = ([0; BLOCK], [[0; 2]; BLOCK / GROUP]);
        let halves = match kind {
            QuantType::Q6K => [half(208), 0],
            kind if kind.scales().has_minimum() => [half(0), half(2)],
            _ => [half(0), 0],
        };
        match kind {
            QuantType::Q8_0 => {
                for (quant, raw) in quants.iter_mut().zip(&raw[2..]) {
                    *quant = raw ^ 0x80;
                }
            }
            QuantType::Q4_0 => set_low_bits(&mut quants, &raw[2..18], 16),
            QuantType::Q4_1 => set_low_bits(&mut quants, &raw[4..20], 16),
            QuantType::Q5_0 | QuantType::Q5_1 => {
                let (high, low) = raw[raw.len() - 20..].split_at(4);
                set_low_bits(&mut quants, low, 16);
                for (input, quant) in quants[..GROUP].iter_mut().enumerate() {
                    *quant |= (high[input / 8] >> (input % 8) & 1) << 4;
                }
            }
            QuantType::Q4K => set_low_bits(&mut quants, &raw[16..144], 32),
            QuantType::Q5K => {
                set_low_bits(&mut quants, &raw[48..176], 32);
                set_high_bits(&mut quants, &raw[16..48], 1);
            }
            QuantType::Q6K => {
                set_low_bits(&mut quants, &raw[..128], 64);
                set_high_bits(&mut quants, &raw[128..192], 2);
                scales.as_flattened_mut().copy_from_slice(&raw[192..208]);
            }
        }
        if kind.scales() == Scales::Nested {
            scales = six_bit_scales(&raw[4..16]);
        }
        Self { quants, halves, scales }
    }

    /// Appends the weights, computed with the same operations as in ggml.
    pub(crate) fn widen_into(&self, kind: QuantType, values: &mut Vec<f32>) {
        let [scale, minimum] = self.halves.map(|half| f16::from_bits(half).to_f32());
        for (input, quant) in self.quants[..kind.block_len()].iter().enumerate() {
            let quant = (i32::from(*quant) - kind.offset()) as f32;
            let scales = self.scales[input / GROUP];
            values.push(match kind.scales() {
                Scales::Half => scale * quant,
                Scales::HalfAndMinimum => scale * quant + minimum,
                Scales::Nested => {
                    let [part, part_minimum] = scales.map(f32::from);
                    scale * part * quant - minimum * part_minimum
                }
                Scales::NestedHalves => {
                    let part = scales[input % GROUP / (GROUP / 2)] as i8;
                    scale * f32::from(part) * quant
                }
            });
        }
    }
}

/// Sets the lower four bits of weights. Each `width` bytes have the first `width` of their weights
/// in the lower halves of the bytes.
fn set_low_bits(quants: &mut [u8], raw: &[u8], width: usize) {
    for (quants, raw) in quants.chunks_exact_mut(2 * width).zip(raw.chunks_exact(width)) {
        let (first, second) = quants.split_at_mut(width);
        for i in 0..width {
            (first[i], second[i]) = (raw[i] & 0xf, raw[i] >> 4);
        }
    }
}

/// Sets the bits above the lower four. 32 bytes have the first bits of 32 weights, then those of
/// the next 32.
fn set_high_bits(quants: &mut [u8], raw: &[u8], num_bits: usize) {
    let width = GROUP * 8 / num_bits;
    let mask = (1 << num_bits) - 1;
    for (quants, raw) in quants.chunks_exact_mut(width).zip(raw.chunks_exact(GROUP)) {
        for (plane, quants) in quants.chunks_exact_mut(GROUP).enumerate() {
            for (quant, raw) in quants.iter_mut().zip(raw) {
                *quant |= (raw >> (plane * num_bits) & mask) << 4;
            }
        }
    }
}

/// Unpacks eight pairs of scale and minimum. The bytes have the lower six bits of the first four
/// scales and minimums; the others are divided into four and two bits.
fn six_bit_scales(raw: &[u8]) -> [[u8; 2]; BLOCK / GROUP] {
    let mut scales = [[0; 2]; BLOCK / GROUP];
    for i in 0..4 {
        let [scale, minimum, rest] = [raw[i], raw[i + 4], raw[i + 8]];
        scales[i] = [scale & 0x3f, minimum & 0x3f];
        scales[i + 4] = [rest & 0xf | scale >> 2 & 0x30, rest >> 4 | minimum >> 2 & 0x30];
    }
    scales
}

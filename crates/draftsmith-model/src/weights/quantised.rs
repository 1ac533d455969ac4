//! The quantised number formats of GGUF files: blocks of small integers that share scales.
//!
//! Widening gives the same bits as ggml's reference, `dequantize_row`.

use half::f16;

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

impl QuantType {
    /// All formats with their numbers and names in ggml, and the weights and bytes of a block.
    const ALL: [(Self, u64, &'static str, [usize; 2]); 8] = [
        (Self::Q4_0, 2, "Q4_0", [32, 18]),
        (Self::Q4_1, 3, "Q4_1", [32, 20]),
        (Self::Q5_0, 6, "Q5_0", [32, 22]),
        (Self::Q5_1, 7, "Q5_1", [32, 24]),
        (Self::Q8_0, 8, "Q8_0", [32, 34]),
        (Self::Q4K, 12, "Q4_K", [256, 144]),
        (Self::Q5K, 13, "Q5_K", [256, 176]),
        (Self::Q6K, 14, "Q6_K", [256, 210]),
    ];

    /// Returns the format with this number in ggml; `None` if we do not read it.
    pub(super) fn of_ggml(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.1 == number).map(|it| it.0)
    }

    fn entry(self) -> (Self, u64, &'static str, [usize; 2]) {
        Self::ALL.into_iter().find(|it| it.0 == self).expect("all are listed")
    }

    /// Returns the name in ggml.
    pub(super) fn name(self) -> &'static str {
        self.entry().2
    }

    /// Returns the number of weights in a block.
    pub(crate) fn block_len(self) -> usize {
        self.entry().3[0]
    }

    /// Returns the number of bytes of a block.
    pub(crate) fn block_bytes(self) -> usize {
        self.entry().3[1]
    }

    /// Appends the weights of whole blocks, widened to f32.
    pub(super) fn widen_into(self, bytes: &[u8], values: &mut Vec<f32>) {
        for block in bytes.chunks_exact(self.block_bytes()) {
            match self {
                Self::Q8_0 => {
                    let scale = half(block, 0);
                    values.extend(block[2..].iter().map(|it| f32::from(*it as i8) * scale));
                }
                Self::Q4_0 => self.widen_32(block, &block[2..], None, values),
                Self::Q4_1 => self.widen_32(block, &block[4..], None, values),
                Self::Q5_0 => self.widen_32(block, &block[6..], Some(&block[2..6]), values),
                Self::Q5_1 => self.widen_32(block, &block[8..], Some(&block[4..8]), values),
                Self::Q4K => widen_256(block, &block[16..], None, values),
                Self::Q5K => widen_256(block, &block[48..], Some(&block[16..48]), values),
                Self::Q6K => widen_q6(block, values),
            }
        }
    }

    /// Appends a block of 32 weights. Byte i of `low` has the four low bits of weights i and i + 16,
    /// and bit i of `high` the fifth bit of weight i.
    fn widen_32(self, block: &[u8], low: &[u8], high: Option<&[u8]>, values: &mut Vec<f32>) {
        let scale = half(block, 0);
        let fifth = |i: usize| high.map_or(0, |high| (high[i / 8] >> (i % 8) & 1) << 4);
        let weights = (0..32).map(|i| (low[i % 16] >> (i / 16 * 4) & 15) | fifth(i)).map(f32::from);
        match self {
            Self::Q4_1 | Self::Q5_1 => {
                let min = half(block, 2);
                values.extend(weights.map(|weight| weight * scale + min));
            }
            _ => {
                let zero = if high.is_some() { 16.0 } else { 8.0 };
                values.extend(weights.map(|weight| (weight - zero) * scale));
            }
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Appends a block of 256 weights in eight groups. Two groups share 32 bytes of `low`, and group g has
/// bit g of the bytes of `high`.
fn widen_256(block: &[u8], low: &[u8], high: Option<&[u8]>, values: &mut Vec<f32>) {
    let (scale, min) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    for group in 0..8 {
        let [own_scale, own_min] = match group {
            0..4 => [packed[group] & 63, packed[group + 4] & 63],
            _ => [
                packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            ],
        };
        let (scale, min) = (scale * f32::from(own_scale), min * f32::from(own_min));
        let low = &low[group / 2 * 32..][..32];
        let fifth = |i: usize| high.map_or(0, |high| (high[i] >> group & 1) << 4);
        let weight = |(i, byte): (usize, &u8)| byte >> (group % 2 * 4) & 15 | fifth(i);
        let weights = low.iter().enumerate().map(weight).map(f32::from);
        values.extend(weights.map(|weight| scale * weight - min));
    }
}

/// Appends a block of 256 weights in two halves of four groups, of which each has two scales.
fn widen_q6(block: &[u8], values: &mut Vec<f32>) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half(block, 208);
    values.extend((0..256).map(|i| {
        let (part, group, i) = (i / 128, i % 128 / 32, i % 32);
        let low = low[part * 64 + group % 2 * 32 + i] >> (group / 2 * 4) & 15;
        let high = high[part * 32 + i] >> (group * 2) & 3;
        let own = scales[part * 8 + group * 2 + i / 16] as i8;
        scale * f32::from(own) * (f32::from(low | high << 4) - 32.0)
    }));
}

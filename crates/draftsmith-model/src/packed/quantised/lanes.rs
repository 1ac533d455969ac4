//! The vector instructions of the integer kernel: a lane for each output of a panel, or of a half of
//! one.
//!
//! [`Lanes`] is implemented for AVX-512 with VNNI, for AVX2 with and without AVX-VNNI, and in plain
//! loops for every other processor. Integer products and sums are exact in each of them, and each
//! float operation is the same one, so all agree to the last bit.

use pulp::bytemuck::Pod;
use pulp::cast;

use super::{QuantLine, ScaleLine};
use crate::packed::storage::LINE;

/// Operations on a strip: the sixteen lanes of a panel, or one of its halves. A lane of bytes contains
/// four unsigned weights.
pub(super) trait Lanes: Copy {
    type Bytes: Copy;
    /// Sums of products, in progress.
    type Sums: Copy;
    type Ints: Pod;
    type Floats: Pod;

    /// The number of strips of a panel: 1 or 2.
    const STRIPS: usize;
    /// The number of rows in a pass, at most: 12 or 6, depending on the number of registers, or 1.
    const MOST_ROWS: usize;
    /// Whether [`Self::dot`] subtracts 128 from weights of eight bits.
    const SUBTRACTS_OFFSET: bool = false;

    /// Runs `work` compiled for these instructions, provided that all calls inside are inlined.
    fn vectorize(self, work: impl FnOnce());

    fn load(self, line: &QuantLine, half: usize) -> Self::Bytes;

    /// Shifts bits towards the lowest by a number that may be negative, and applies a mask to each
    /// byte. The mask must drop the bits that come from other bytes.
    fn bits(self, bytes: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes;

    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Starts sums at a value.
    fn start(self, value: i32) -> Self::Sums;

    /// Adds the product of four weights of `num_bits` bits and four inputs to each lane of `sums`. The
    /// steps of a group are numbered from 0.
    fn dot(
        self,
        sums: Self::Sums,
        weights: Self::Bytes,
        inputs: [i8; 4],
        num_bits: usize,
        step: usize,
    ) -> Self::Sums;

    /// Ends sums after an even number of steps.
    fn total(self, sums: Self::Sums) -> Self::Ints;

    /// Adds the product of two scales of six bits and two inputs to each lane of `sums`.
    fn dot_pair(
        self,
        sums: Self::Ints,
        scales: &ScaleLine,
        half: usize,
        inputs: [i16; 2],
    ) -> Self::Ints;

    fn splat_int(self, value: i32) -> Self::Ints;

    /// Converts integers.
    fn floats(self, ints: Self::Ints) -> Self::Floats;

    /// Reads bits as those of floats.
    #[inline(always)]
    fn bits_as_floats(self, bits: Self::Ints) -> Self::Floats {
        cast(bits)
    }

    fn splat(self, value: f32) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Computes `a · b + c` with one rounding.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Widens numbers in half precision.
    fn halves(self, line: &ScaleLine, half: usize) -> Self::Floats;

    /// Widens the bytes in the first or the second half of a line, signed or not.
    fn scales(self, line: &ScaleLine, place: usize, half: usize, is_signed: bool) -> Self::Floats;
}

/// Widens a number in half precision without branches. Exponent and mantissa move to their places;
/// a multiplication corrects the exponent's bias and normalises subnormal numbers.
#[inline(always)]
fn widen(half: u16) -> f32 {
    /// 2¹¹²: the exponent biases of f32 and f16, 127 and 15, differ by 112.
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    const INFINITY: u32 = 0x7c00 << 13;
    let size = u32::from(half & 0x7fff) << 13;
    let finite = (f32::from_bits(size) * BIAS).to_bits();
    let size = if size >= INFINITY { size | f32::INFINITY.to_bits() } else { finite };
    f32::from_bits(size | u32::from(half & 0x8000) << 16)
}

/// Widens the bytes in the first or the second half of a line, signed or not.
#[inline(always)]
fn widen_bytes(line: &ScaleLine, place: usize, is_signed: bool) -> [f32; LINE] {
    line.0.as_chunks().0[place].map(|byte| match is_signed {
        true => f32::from(byte as i8),
        false => f32::from(byte),
    })
}

/// Plain loops, which the compiler vectorises.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

#[expect(clippy::needless_range_loop, reason = "plain loops over arrays vectorise")]
impl Lanes for Portable {
    type Bytes = [u32; LINE];
    type Sums = [i32; LINE];
    type Ints = [i32; LINE];
    type Floats = [f32; LINE];

    const STRIPS: usize = 1;
    // On this architecture, only processors without AVX2 run these loops.
    const MOST_ROWS: usize = if cfg!(target_arch = "x86_64") { 1 } else { 6 };

    #[inline(always)]
    fn vectorize(self, work: impl FnOnce()) {
        work();
    }

    #[inline(always)]
    fn load(self, line: &QuantLine, _half: usize) -> [u32; LINE] {
        line.0
    }

    #[inline(always)]
    fn bits(self, bytes: [u32; LINE], shift: i32, mask: u8) -> [u32; LINE] {
        let mask = u32::from_ne_bytes([mask; 4]);
        let mut bits = [0; LINE];
        for lane in 0..LINE {
            let shifted = if shift < 0 { bytes[lane] << -shift } else { bytes[lane] >> shift };
            bits[lane] = shifted & mask;
        }
        bits
    }

    #[inline(always)]
    fn or(self, mut a: [u32; LINE], b: [u32; LINE]) -> [u32; LINE] {
        for lane in 0..LINE {
            a[lane] |= b[lane];
        }
        a
    }

    #[inline(always)]
    fn start(self, value: i32) -> [i32; LINE] {
        self.splat_int(value)
    }

    #[inline(always)]
    fn dot(
        self,
        mut sums: [i32; LINE],
        weights: [u32; LINE],
        inputs: [i8; 4],
        _num_bits: usize,
        _step: usize,
    ) -> [i32; LINE] {
        for (place, input) in inputs.into_iter().enumerate() {
            for lane in 0..LINE {
                let weight = (weights[lane] >> (8 * place) & 0xff) as i32;
                sums[lane] += weight * i32::from(input);
            }
        }
        sums
    }

    #[inline(always)]
    fn total(self, sums: [i32; LINE]) -> [i32; LINE] {
        sums
    }

    #[inline(always)]
    fn dot_pair(
        self,
        mut sums: [i32; LINE],
        scales: &ScaleLine,
        _half: usize,
        inputs: [i16; 2],
    ) -> [i32; LINE] {
        for lane in 0..LINE {
            for place in 0..2 {
                sums[lane] += i32::from(scales.0[2 * lane + place]) * i32::from(inputs[place]);
            }
        }
        sums
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> [i32; LINE] {
        [value; LINE]
    }

    #[inline(always)]
    fn floats(self, ints: [i32; LINE]) -> [f32; LINE] {
        let mut floats = [0.0; LINE];
        for lane in 0..LINE {
            floats[lane] = ints[lane] as f32;
        }
        floats
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LINE] {
        [value; LINE]
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; LINE], b: [f32; LINE]) -> [f32; LINE] {
        for lane in 0..LINE {
            a[lane] *= b[lane];
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LINE], b: [f32; LINE], mut c: [f32; LINE]) -> [f32; LINE] {
        for lane in 0..LINE {
            c[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        c
    }

    #[inline(always)]
    fn halves(self, line: &ScaleLine, _half: usize) -> [f32; LINE] {
        let mut values = [0.0; LINE];
        for lane in 0..LINE {
            values[lane] = widen(u16::from_le_bytes([line.0[2 * lane], line.0[2 * lane + 1]]));
        }
        values
    }

    #[inline(always)]
    fn scales(self, line: &ScaleLine, place: usize, _half: usize, is_signed: bool) -> [f32; LINE] {
        widen_bytes(line, place, is_signed)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Vnni};

#[cfg(target_arch = "x86_64")]
mod x86;

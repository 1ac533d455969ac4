//! The vector instructions of the integer kernel: sixteen lanes, one per output of a panel.
//!
//! [`Lanes`] has three implementations: AVX-512 with VNNI, AVX2, and plain loops for every other
//! processor. Integer products and sums are exact in each of them, and each float operation is the
//! same one, so the three agree to the last bit.

use super::{Line, ScaleLine};
use crate::packed::storage::LINE;

/// Operations on sixteen lanes. A lane of bytes contains four unsigned weights.
#[expect(clippy::needless_range_loop, reason = "plain loops over arrays vectorise")]
pub(super) trait Lanes: Copy {
    type Bytes: Copy;
    type Ints: Copy;
    type Floats: Copy;

    /// The number of rows in a pass, at most: 12 or 4, depending on the number of registers, or 1.
    const MOST_ROWS: usize;

    /// Runs `work` compiled for these instructions, provided that all calls inside are inlined.
    fn vectorize(self, work: impl FnOnce());

    fn load(self, line: &Line) -> Self::Bytes;

    /// Shifts bits towards the lowest by a number that may be negative, and applies a mask to each
    /// byte. The mask must drop the bits that come from other bytes.
    fn bits(self, bytes: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes;

    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Adds the product of four weights of `BITS` bits and four inputs to each lane of `sums`.
    fn dot<const BITS: usize>(
        self,
        sums: Self::Ints,
        weights: Self::Bytes,
        inputs: [i8; 4],
    ) -> Self::Ints;

    /// Adds the product of two scales of six bits and two inputs to each lane of `sums`.
    fn dot_pair(self, sums: Self::Ints, scales: &ScaleLine, inputs: [i16; 2]) -> Self::Ints;

    fn splat_int(self, value: i32) -> Self::Ints;

    /// Converts integers.
    fn floats(self, ints: Self::Ints) -> Self::Floats;

    /// Reads bits as those of floats.
    fn bits_as_floats(self, bits: Self::Ints) -> Self::Floats;

    fn load_floats(self, values: [f32; LINE]) -> Self::Floats;

    fn store_floats(self, values: Self::Floats) -> [f32; LINE];

    fn splat(self, value: f32) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Computes `a · b + c` with one rounding.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Widens numbers in half precision.
    #[inline(always)]
    fn halves(self, line: &ScaleLine) -> Self::Floats {
        let mut values = [0.0; LINE];
        for lane in 0..LINE {
            values[lane] = widen(u16::from_le_bytes([line.0[2 * lane], line.0[2 * lane + 1]]));
        }
        self.load_floats(values)
    }

    /// Widens the bytes in one half of a line.
    #[inline(always)]
    fn scales<const SIGNED: bool>(self, line: &ScaleLine, half: usize) -> Self::Floats {
        let mut values = [0.0; LINE];
        for lane in 0..LINE {
            let byte = line.0[half * LINE + lane];
            values[lane] = if SIGNED { f32::from(byte as i8) } else { f32::from(byte) };
        }
        self.load_floats(values)
    }
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

/// Plain loops, which the compiler vectorises.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

#[expect(clippy::needless_range_loop, reason = "plain loops over arrays vectorise")]
impl Lanes for Portable {
    type Bytes = [u32; LINE];
    type Ints = [i32; LINE];
    type Floats = [f32; LINE];

    // On this architecture, only processors without AVX2 run these loops.
    const MOST_ROWS: usize = if cfg!(target_arch = "x86_64") { 1 } else { 4 };

    #[inline(always)]
    fn vectorize(self, work: impl FnOnce()) {
        work();
    }

    #[inline(always)]
    fn load(self, line: &Line) -> [u32; LINE] {
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
    fn dot<const BITS: usize>(
        self,
        mut sums: [i32; LINE],
        weights: [u32; LINE],
        inputs: [i8; 4],
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
    fn dot_pair(self, mut sums: [i32; LINE], scales: &ScaleLine, inputs: [i16; 2]) -> [i32; LINE] {
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
    fn bits_as_floats(self, bits: [i32; LINE]) -> [f32; LINE] {
        pulp::cast(bits)
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
    fn load_floats(self, values: [f32; LINE]) -> [f32; LINE] {
        values
    }

    #[inline(always)]
    fn store_floats(self, values: [f32; LINE]) -> [f32; LINE] {
        values
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
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Vnni};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512, __m512i, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
        _mm512_dpwssd_epi32,
    };
    use std::mem::transmute;

    use pulp::x86::{V3, V4};
    use pulp::{Simd, cast, f32x8, f32x16, i16x32, i32x8, i32x16, u32x8, u32x16};

    use super::{LINE, Lanes, Line, ScaleLine};

    pulp::simd_type! {
        /// The instructions of [`Vnni`], for which its passes are compiled.
        struct Features {
            avx: "avx",
            avx2: "avx2",
            fma: "fma",
            avx512f: "avx512f",
            avx512bw: "avx512bw",
            avx512dq: "avx512dq",
            avx512vl: "avx512vl",
            avx512vnni: "avx512vnni",
        }
    }

    /// AVX-512 with VNNI: a register holds a line.
    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Vnni(V4, Features);

    impl Vnni {
        pub(in super::super) fn try_new() -> Option<Self> {
            Some(Self(V4::try_new()?, Features::try_new()?))
        }
    }

    impl Lanes for Vnni {
        type Bytes = u32x16;
        type Ints = i32x16;
        type Floats = f32x16;

        const MOST_ROWS: usize = 12;

        #[inline(always)]
        fn vectorize(self, work: impl FnOnce()) {
            self.1.vectorize(work);
        }

        #[inline(always)]
        fn load(self, line: &Line) -> u32x16 {
            cast(line.0)
        }

        #[inline(always)]
        fn bits(self, bytes: u32x16, shift: i32, mask: u8) -> u32x16 {
            let amount = self.0.splat_u32s(shift.unsigned_abs());
            let shifted = match shift {
                0 => bytes,
                ..0 => self.0.wrapping_dyn_shl_u32s(bytes, amount),
                1.. => self.0.wrapping_dyn_shr_u32s(bytes, amount),
            };
            self.0.and_u32x16(shifted, self.0.splat_u32s(u32::from_ne_bytes([mask; 4])))
        }

        #[inline(always)]
        fn or(self, a: u32x16, b: u32x16) -> u32x16 {
            self.0.or_u32x16(a, b)
        }

        #[inline(always)]
        fn dot<const BITS: usize>(self, sums: i32x16, weights: u32x16, inputs: [i8; 4]) -> i32x16 {
            let inputs = self.0.splat_i32s(cast(inputs));
            #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
            // SAFETY: `Features` exists only if the processor has AVX-512 VNNI, and the types on
            // both sides are 64 bytes of plain numbers.
            unsafe {
                transmute::<__m512i, i32x16>(_mm512_dpbusd_epi32(
                    transmute::<i32x16, __m512i>(sums),
                    transmute::<u32x16, __m512i>(weights),
                    transmute::<i32x16, __m512i>(inputs),
                ))
            }
        }

        #[inline(always)]
        fn dot_pair(self, sums: i32x16, scales: &ScaleLine, inputs: [i16; 2]) -> i32x16 {
            let scales = self.0.convert_i8x32_to_i16x32(cast(scales.0));
            let inputs = self.0.splat_i32s(cast(inputs));
            #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
            // SAFETY: `Features` exists only if the processor has AVX-512 VNNI, and the types on
            // both sides are 64 bytes of plain numbers.
            unsafe {
                transmute::<__m512i, i32x16>(_mm512_dpwssd_epi32(
                    transmute::<i32x16, __m512i>(sums),
                    transmute::<i16x32, __m512i>(scales),
                    transmute::<i32x16, __m512i>(inputs),
                ))
            }
        }

        #[inline(always)]
        fn splat_int(self, value: i32) -> i32x16 {
            self.0.splat_i32s(value)
        }

        #[inline(always)]
        fn bits_as_floats(self, bits: i32x16) -> f32x16 {
            cast(bits)
        }

        #[inline(always)]
        fn floats(self, ints: i32x16) -> f32x16 {
            self.0.convert_i32x16_to_f32x16(ints)
        }

        #[inline(always)]
        fn load_floats(self, values: [f32; LINE]) -> f32x16 {
            cast(values)
        }

        #[inline(always)]
        fn store_floats(self, values: f32x16) -> [f32; LINE] {
            cast(values)
        }

        #[inline(always)]
        fn splat(self, value: f32) -> f32x16 {
            self.0.splat_f32s(value)
        }

        #[inline(always)]
        fn mul(self, a: f32x16, b: f32x16) -> f32x16 {
            self.0.mul_f32x16(a, b)
        }

        #[inline(always)]
        fn mul_add(self, a: f32x16, b: f32x16, c: f32x16) -> f32x16 {
            self.0.mul_add_f32x16(a, b, c)
        }

        #[inline(always)]
        fn halves(self, line: &ScaleLine) -> f32x16 {
            #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
            // SAFETY: `V4` exists only if the processor has AVX-512, and both types are 64 bytes of
            // plain numbers.
            unsafe {
                transmute::<__m512, f32x16>(_mm512_cvtph_ps(cast::<_, __m256i>(line.0)))
            }
        }
    }

    /// AVX2: two registers hold a line.
    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Avx2(V3);

    impl Avx2 {
        pub(in super::super) fn try_new() -> Option<Self> {
            V3::try_new().map(Self)
        }

        #[inline(always)]
        fn half_bits(self, bytes: u32x8, shift: i32, mask: u8) -> u32x8 {
            let amount = self.0.splat_u32s(shift.unsigned_abs());
            let shifted = match shift {
                0 => bytes,
                ..0 => self.0.wrapping_dyn_shl_u32s(bytes, amount),
                1.. => self.0.wrapping_dyn_shr_u32s(bytes, amount),
            };
            self.0.and_u32x8(shifted, self.0.splat_u32s(u32::from_ne_bytes([mask; 4])))
        }

        /// Adds the products of pairs of numbers in 16 bits.
        #[inline(always)]
        fn add_pairs(self, sums: i32x8, a: __m256i, b: __m256i) -> i32x8 {
            self.0.wrapping_add_i32x8(sums, cast(self.0.avx2._mm256_madd_epi16(a, b)))
        }

        /// See [`Lanes::dot`]. Products of pairs fit 16 bits if weights have at most seven bits.
        /// For eight bits, the numbers at even and at odd places are widened first.
        #[inline(always)]
        fn half_dot<const BITS: usize>(
            self,
            sums: i32x8,
            weights: __m256i,
            inputs: __m256i,
        ) -> i32x8 {
            let avx2 = self.0.avx2;
            if BITS < 8 {
                let pairs = avx2._mm256_maddubs_epi16(weights, inputs);
                return self.add_pairs(sums, pairs, cast(self.0.splat_i16x16(1)));
            }
            let even = avx2._mm256_srli_epi16::<8>(avx2._mm256_slli_epi16::<8>(weights));
            let odd = avx2._mm256_srli_epi16::<8>(weights);
            let even_inputs = avx2._mm256_srai_epi16::<8>(avx2._mm256_slli_epi16::<8>(inputs));
            let odd_inputs = avx2._mm256_srai_epi16::<8>(inputs);
            self.add_pairs(self.add_pairs(sums, even, even_inputs), odd, odd_inputs)
        }
    }

    impl Lanes for Avx2 {
        type Bytes = [u32x8; 2];
        type Ints = [i32x8; 2];
        type Floats = [f32x8; 2];

        const MOST_ROWS: usize = 4;

        #[inline(always)]
        fn vectorize(self, work: impl FnOnce()) {
            self.0.vectorize(work);
        }

        #[inline(always)]
        fn load(self, line: &Line) -> [u32x8; 2] {
            cast(line.0)
        }

        #[inline(always)]
        fn bits(self, bytes: [u32x8; 2], shift: i32, mask: u8) -> [u32x8; 2] {
            [self.half_bits(bytes[0], shift, mask), self.half_bits(bytes[1], shift, mask)]
        }

        #[inline(always)]
        fn or(self, a: [u32x8; 2], b: [u32x8; 2]) -> [u32x8; 2] {
            [self.0.or_u32x8(a[0], b[0]), self.0.or_u32x8(a[1], b[1])]
        }

        #[inline(always)]
        fn dot<const BITS: usize>(
            self,
            sums: [i32x8; 2],
            weights: [u32x8; 2],
            inputs: [i8; 4],
        ) -> [i32x8; 2] {
            let inputs = cast(self.0.splat_i32s(cast(inputs)));
            [
                self.half_dot::<BITS>(sums[0], cast(weights[0]), inputs),
                self.half_dot::<BITS>(sums[1], cast(weights[1]), inputs),
            ]
        }

        #[inline(always)]
        fn dot_pair(self, sums: [i32x8; 2], scales: &ScaleLine, inputs: [i16; 2]) -> [i32x8; 2] {
            let inputs = cast(self.0.splat_i32s(cast(inputs)));
            let [low, high]: [__m128i; 2] = cast(scales.0);
            let low = self.0.avx2._mm256_cvtepu8_epi16(low);
            let high = self.0.avx2._mm256_cvtepu8_epi16(high);
            [self.add_pairs(sums[0], low, inputs), self.add_pairs(sums[1], high, inputs)]
        }

        #[inline(always)]
        fn splat_int(self, value: i32) -> [i32x8; 2] {
            [self.0.splat_i32s(value); 2]
        }

        #[inline(always)]
        fn bits_as_floats(self, bits: [i32x8; 2]) -> [f32x8; 2] {
            cast(bits)
        }

        #[inline(always)]
        fn floats(self, ints: [i32x8; 2]) -> [f32x8; 2] {
            let avx = self.0.avx;
            [
                cast(avx._mm256_cvtepi32_ps(cast(ints[0]))),
                cast(avx._mm256_cvtepi32_ps(cast(ints[1]))),
            ]
        }

        #[inline(always)]
        fn load_floats(self, values: [f32; LINE]) -> [f32x8; 2] {
            cast(values)
        }

        #[inline(always)]
        fn store_floats(self, values: [f32x8; 2]) -> [f32; LINE] {
            cast(values)
        }

        #[inline(always)]
        fn splat(self, value: f32) -> [f32x8; 2] {
            [self.0.splat_f32s(value); 2]
        }

        #[inline(always)]
        fn mul(self, a: [f32x8; 2], b: [f32x8; 2]) -> [f32x8; 2] {
            [self.0.mul_f32s(a[0], b[0]), self.0.mul_f32s(a[1], b[1])]
        }

        #[inline(always)]
        fn mul_add(self, a: [f32x8; 2], b: [f32x8; 2], c: [f32x8; 2]) -> [f32x8; 2] {
            [self.0.mul_add_f32s(a[0], b[0], c[0]), self.0.mul_add_f32s(a[1], b[1], c[1])]
        }
    }
}

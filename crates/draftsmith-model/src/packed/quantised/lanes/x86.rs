//! The lanes of x86-64 processors. `pulp` detects their instructions and wraps all but three.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_dpwssd_epi32,
};
use std::mem::transmute;

use pulp::x86::{V3, V4};
use pulp::{Simd, cast, f32x8, f32x16, i16x32, i32x8, i32x16, u32x8, u32x16};

use super::{LINE, Lanes, QuantLine, ScaleLine};

pulp::simd_type! {
    /// The instructions of [`Vnni`], for which its passes are compiled.
    struct VnniFeatures {
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
pub(in super::super) struct Vnni(V4, VnniFeatures);

impl Vnni {
    pub(in super::super) fn try_new() -> Option<Self> {
        Some(Self(V4::try_new()?, VnniFeatures::try_new()?))
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
    fn load(self, line: &QuantLine) -> u32x16 {
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
        // SAFETY: `VnniFeatures` exists only if the processor has AVX-512 VNNI, and the types on
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
        // SAFETY: `VnniFeatures` exists only if the processor has AVX-512 VNNI, and the types on
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
    fn half_dot<const BITS: usize>(self, sums: i32x8, weights: __m256i, inputs: __m256i) -> i32x8 {
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
    fn load(self, line: &QuantLine) -> [u32x8; 2] {
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
        [cast(avx._mm256_cvtepi32_ps(cast(ints[0]))), cast(avx._mm256_cvtepi32_ps(cast(ints[1])))]
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

//! The lanes of x86-64 processors. `pulp` wraps most of their instructions.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, __m512, __m512i, _mm256_cvtph_ps, _mm256_dpbusd_avx_epi32,
    _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_dpwssd_epi32,
};
use std::mem::transmute;

use pulp::x86::{V3, V4};
use pulp::{Simd, cast, f32x8, f32x16, i16x16, i16x32, i32x8, i32x16, u32x8, u32x16};

use super::{Lanes, QuantLine, ScaleLine, widen_bytes};

/// Implements the operations that `pulp` names alike for registers of both sizes.
macro_rules! operations_of_pulp {
    () => {
        #[inline(always)]
        fn bits(self, bytes: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes {
            let amount = self.0.splat_u32s(shift.unsigned_abs());
            let shifted = match shift {
                0 => bytes,
                ..0 => self.0.wrapping_dyn_shl_u32s(bytes, amount),
                1.. => self.0.wrapping_dyn_shr_u32s(bytes, amount),
            };
            self.0.and_u32s(shifted, self.0.splat_u32s(u32::from_ne_bytes([mask; 4])))
        }

        #[inline(always)]
        fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
            self.0.or_u32s(a, b)
        }

        #[inline(always)]
        fn splat_int(self, value: i32) -> Self::Ints {
            self.0.splat_i32s(value)
        }

        #[inline(always)]
        fn splat(self, value: f32) -> Self::Floats {
            self.0.splat_f32s(value)
        }

        #[inline(always)]
        fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
            self.0.mul_f32s(a, b)
        }

        #[inline(always)]
        fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
            self.0.mul_add_f32s(a, b, c)
        }
    };
}

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
    type Sums = i32x16;
    type Ints = i32x16;
    type Floats = f32x16;

    const STRIPS: usize = 1;
    const MOST_ROWS: usize = 12;

    operations_of_pulp!();

    #[inline(always)]
    fn vectorize(self, work: impl FnOnce()) {
        self.1.vectorize(work);
    }

    #[inline(always)]
    fn load(self, line: &QuantLine, _half: usize) -> u32x16 {
        cast(line.0)
    }

    #[inline(always)]
    fn start(self, value: i32) -> i32x16 {
        self.splat_int(value)
    }

    #[inline(always)]
    fn dot(
        self,
        sums: i32x16,
        weights: u32x16,
        inputs: [i8; 4],
        _num_bits: usize,
        _step: usize,
    ) -> i32x16 {
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
    fn total(self, sums: i32x16) -> i32x16 {
        sums
    }

    #[inline(always)]
    fn dot_pair(self, sums: i32x16, scales: &ScaleLine, _half: usize, inputs: [i16; 2]) -> i32x16 {
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
    fn floats(self, ints: i32x16) -> f32x16 {
        self.0.convert_i32x16_to_f32x16(ints)
    }

    #[inline(always)]
    fn halves(self, line: &ScaleLine, _half: usize) -> f32x16 {
        #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
        // SAFETY: `V4` exists only if the processor has AVX-512, and both types are 64 bytes of
        // plain numbers.
        unsafe {
            transmute::<__m512, f32x16>(_mm512_cvtph_ps(cast::<_, __m256i>(line.0)))
        }
    }

    #[inline(always)]
    fn scales(self, line: &ScaleLine, place: usize, _half: usize, is_signed: bool) -> f32x16 {
        cast(widen_bytes(line, place, is_signed))
    }
}

pulp::simd_type! {
    /// The instructions of [`Avx2`], for which its passes are compiled. All processors with AVX2 have
    /// them.
    struct Avx2Features {
        avx2: "avx2",
        fma: "fma",
        f16c: "f16c",
    }
}

/// Runs `work` compiled for the instructions of [`Avx2`] with AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn with_avx_vnni(work: impl FnOnce()) {
    work();
}

/// AVX2: a register holds a half of a line. With `VNNI`, the processor also has AVX-VNNI.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Avx2<const VNNI: bool>(V3, Avx2Features);

impl<const VNNI: bool> Avx2<VNNI> {
    pub(in super::super) fn try_new() -> Option<Self> {
        let lanes = Self(V3::try_new()?, Avx2Features::try_new()?);
        (!VNNI || is_x86_feature_detected!("avxvnni")).then_some(lanes)
    }

    /// Adds the products of pairs of numbers in 16 bits.
    #[inline(always)]
    fn add_pairs(self, sums: i32x8, a: __m256i, b: __m256i) -> i32x8 {
        self.0.wrapping_add_i32x8(sums, cast(self.0.avx2._mm256_madd_epi16(a, b)))
    }
}

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Bytes = u32x8;
    /// Sums, and sums of pairs that still fit in 16 bits.
    type Sums = (i32x8, i16x16);
    type Ints = i32x8;
    type Floats = f32x8;

    const STRIPS: usize = 2;
    const MOST_ROWS: usize = 6;
    const SUBTRACTS_OFFSET: bool = !VNNI;

    operations_of_pulp!();

    #[inline(always)]
    fn vectorize(self, work: impl FnOnce()) {
        if VNNI {
            #[expect(unsafe_code, reason = "`pulp` does not know this feature")]
            // SAFETY: with `VNNI`, the processor has AVX-VNNI, and the others in any case.
            return unsafe { with_avx_vnni(work) };
        }
        self.1.vectorize(work);
    }

    #[inline(always)]
    fn load(self, line: &QuantLine, half: usize) -> u32x8 {
        cast(line.0.as_chunks::<8>().0[half])
    }

    #[inline(always)]
    fn start(self, value: i32) -> (i32x8, i16x16) {
        (self.0.splat_i32s(value), self.0.splat_i16x16(0))
    }

    /// Sums of pairs stay in 16 bits for as many steps as they fit. A weight of eight bits is made
    /// positive, and its input gets its sign.
    #[inline(always)]
    fn dot(
        self,
        (sums, pairs): (i32x8, i16x16),
        weights: u32x8,
        inputs: [i8; 4],
        num_bits: usize,
        step: usize,
    ) -> (i32x8, i16x16) {
        let weights = cast(weights);
        let inputs = cast(self.0.splat_i32s(cast(inputs)));
        if VNNI {
            #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
            // SAFETY: with `VNNI`, the processor has AVX-VNNI.
            let sums = unsafe { _mm256_dpbusd_avx_epi32(cast(sums), weights, inputs) };
            return (cast(sums), pairs);
        }
        let (avx2, zeros) = (self.0.avx2, self.0.splat_i16x16(0));
        let (weights, inputs) = match num_bits {
            8 => {
                let signed = avx2._mm256_xor_si256(weights, cast(self.0.splat_u8s(0x80)));
                (avx2._mm256_abs_epi8(signed), avx2._mm256_sign_epi8(inputs, signed))
            }
            _ => (weights, inputs),
        };
        let products = cast(avx2._mm256_maddubs_epi16(weights, inputs));
        let pairs = self.0.wrapping_add_i16x16(pairs, products);
        let num_steps = match num_bits {
            4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        };
        if step % num_steps + 1 < num_steps {
            return (sums, pairs);
        }
        (self.add_pairs(sums, cast(pairs), cast(self.0.splat_i16x16(1))), zeros)
    }

    #[inline(always)]
    fn total(self, (sums, _): (i32x8, i16x16)) -> i32x8 {
        sums
    }

    #[inline(always)]
    fn dot_pair(self, sums: i32x8, scales: &ScaleLine, half: usize, inputs: [i16; 2]) -> i32x8 {
        let inputs = cast(self.0.splat_i32s(cast(inputs)));
        let scales = self.0.avx2._mm256_cvtepu8_epi16(half_line(scales, half));
        self.add_pairs(sums, scales, inputs)
    }

    #[inline(always)]
    fn floats(self, ints: i32x8) -> f32x8 {
        cast(self.0.avx._mm256_cvtepi32_ps(cast(ints)))
    }

    #[inline(always)]
    fn halves(self, line: &ScaleLine, half: usize) -> f32x8 {
        #[expect(unsafe_code, reason = "`pulp` does not wrap this instruction")]
        // SAFETY: `Avx2Features` exists only if the processor has F16C, and both types are 32 bytes
        // of plain numbers.
        unsafe {
            transmute::<__m256, f32x8>(_mm256_cvtph_ps(half_line(line, half)))
        }
    }

    #[inline(always)]
    fn scales(self, line: &ScaleLine, place: usize, half: usize, is_signed: bool) -> f32x8 {
        let [low, high]: [u64; 2] = cast(half_line(line, place));
        let bytes = cast([if half == 0 { low } else { high }, 0]);
        let avx2 = self.0.avx2;
        self.floats(cast(match is_signed {
            true => avx2._mm256_cvtepi8_epi32(bytes),
            false => avx2._mm256_cvtepu8_epi32(bytes),
        }))
    }
}

#[inline(always)]
fn half_line(line: &ScaleLine, half: usize) -> __m128i {
    cast(line.0.as_chunks::<16>().0[half])
}

//! The storage formats of packed weights, line by line, and their widening to f32 in a kernel.
//!
//! A line is 64 bytes, the size of a cache line and of an AVX-512 register. It contains the weights
//! of sixteen outputs: for one input in f32, or for two inputs in 16 bits. In 16 bits, the weights
//! of two inputs share a 32-bit lane, so widening is a shift or a mask and moves no numbers across
//! lanes.

use half::{bf16, f16};
use pulp::Simd;
use safetensors::Dtype;

use crate::weights::{QuantType, StoredFormat};

/// The number of outputs in a line.
pub(crate) const LINE: usize = 16;

/// The number format of packed weights. Except for quantised weights, products and sums are always
/// f32, and widening in registers is exact. So a bf16 checkpoint gives the same bits in bf16 as in
/// f32, and half as much memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// IEEE single precision.
    F32,
    /// bfloat16, the upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Blocks of a GGUF file, with products in integers.
    Quantised(QuantType),
}

impl Storage {
    /// Returns the format for numbers of a file's format.
    pub(super) fn of(format: StoredFormat) -> Self {
        match format {
            StoredFormat::Quantised(kind) => Self::Quantised(kind),
            StoredFormat::Plain(Dtype::BF16) => Self::Bf16,
            StoredFormat::Plain(Dtype::F16) => Self::F16,
            _ => Self::F32,
        }
    }
}

/// The number of bytes of one output's weights in a line. They have the byte order of files.
pub(crate) const LANE_BYTES: usize = 4;

/// A line of stored weights: those of [`LINE`] outputs for one or two inputs.
pub(crate) trait StoredLine: Copy + Send + Sync + 'static {
    /// The input values that a line is multiplied by, one per input.
    type Factors: AsRef<[f32]>;

    /// The number of inputs in a line.
    const INPUTS: usize;

    const EMPTY: Self;

    /// Splits an input row into factors for each line. If a line has two inputs, a last input may
    /// be left over.
    fn factors(row: &[f32]) -> &[Self::Factors];

    /// Sets a weight, rounded to the format.
    fn set(&mut self, input: usize, output: usize, weight: f32);

    /// Sets one output's weights for all inputs of the line, from a file's bytes.
    fn set_lane(&mut self, output: usize, weights: [u8; LANE_BYTES]);

    fn get(&self, input: usize, output: usize) -> f32;

    /// Widens the weights of one input to f32, for the outputs from `first` on.
    fn widen<S: Simd, const REGISTERS: usize>(
        &self,
        simd: S,
        input: usize,
        first: usize,
    ) -> [S::f32s; REGISTERS];
}

/// A line in f32: sixteen weights of one input.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct F32Line(pub(crate) [f32; LINE]);

impl StoredLine for F32Line {
    type Factors = [f32; 1];

    const INPUTS: usize = 1;

    const EMPTY: Self = Self([0.0; LINE]);

    #[inline(always)]
    fn factors(row: &[f32]) -> &[[f32; 1]] {
        row.as_chunks().0
    }

    fn set(&mut self, _input: usize, output: usize, weight: f32) {
        self.0[output] = weight;
    }

    #[inline(always)]
    fn set_lane(&mut self, output: usize, weights: [u8; LANE_BYTES]) {
        self.0[output] = f32::from_le_bytes(weights);
    }

    fn get(&self, _input: usize, output: usize) -> f32 {
        self.0[output]
    }

    #[inline(always)]
    #[expect(clippy::manual_memcpy, reason = "a loop over registers unrolls, a copy is a call")]
    fn widen<S: Simd, const REGISTERS: usize>(
        &self,
        simd: S,
        _input: usize,
        first: usize,
    ) -> [S::f32s; REGISTERS] {
        let stored = S::as_simd_f32s(&self.0[first..first + REGISTERS * S::F32_LANES]).0;
        let mut weights = [simd.splat_f32s(0.0); REGISTERS];
        for register in 0..REGISTERS {
            weights[register] = stored[register];
        }
        weights
    }
}

/// A line in bf16: sixteen weights for each of two inputs. The first input's weights are in the
/// lower halves of the lanes, the second's in the upper halves.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Bf16Line([u32; LINE]);

/// A line as [`Bf16Line`], in IEEE half precision.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct F16Line([u32; LINE]);

/// Implements the parts that are the same in both formats with two inputs per line.
macro_rules! line_of_two_inputs {
    ($half:ty) => {
        type Factors = [f32; 2];

        const INPUTS: usize = 2;

        const EMPTY: Self = Self([0; LINE]);

        #[inline(always)]
        fn factors(row: &[f32]) -> &[[f32; 2]] {
            row.as_chunks().0
        }

        fn set(&mut self, input: usize, output: usize, weight: f32) {
            let shift = 16 * input;
            let bits = u32::from(<$half>::from_f32(weight).to_bits()) << shift;
            self.0[output] = self.0[output] & !(0xffff << shift) | bits;
        }

        #[inline(always)]
        fn set_lane(&mut self, output: usize, weights: [u8; LANE_BYTES]) {
            self.0[output] = u32::from_le_bytes(weights);
        }

        fn get(&self, input: usize, output: usize) -> f32 {
            <$half>::from_bits((self.0[output] >> (16 * input)) as u16).to_f32()
        }
    };
}

impl StoredLine for Bf16Line {
    line_of_two_inputs!(bf16);

    #[inline(always)]
    fn widen<S: Simd, const REGISTERS: usize>(
        &self,
        simd: S,
        input: usize,
        first: usize,
    ) -> [S::f32s; REGISTERS] {
        let stored = S::as_simd_u32s(&self.0[first..first + REGISTERS * S::F32_LANES]).0;
        let mut weights = [simd.splat_f32s(0.0); REGISTERS];
        for register in 0..REGISTERS {
            let bits = match input {
                0 => simd.wrapping_dyn_shl_u32s(stored[register], simd.splat_u32s(16)),
                _ => simd.and_u32s(stored[register], simd.splat_u32s(0xffff_0000)),
            };
            weights[register] = simd.transmute_f32s_u32s(bits);
        }
        weights
    }
}

impl StoredLine for F16Line {
    line_of_two_inputs!(f16);

    /// Moves the exponent and mantissa to their places in an f32. Then corrects the exponent's bias
    /// by a multiplication, which also normalises subnormal numbers. Infinities are not supported.
    #[inline(always)]
    fn widen<S: Simd, const REGISTERS: usize>(
        &self,
        simd: S,
        input: usize,
        first: usize,
    ) -> [S::f32s; REGISTERS] {
        /// 2¹¹²: the exponent biases of f32 and f16, 127 and 15, differ by 112.
        const BIAS: f32 = f32::from_bits((127 + 112) << 23);
        let stored = S::as_simd_u32s(&self.0[first..first + REGISTERS * S::F32_LANES]).0;
        let mut weights = [simd.splat_f32s(0.0); REGISTERS];
        for register in 0..REGISTERS {
            let upper = match input {
                0 => simd.wrapping_dyn_shl_u32s(stored[register], simd.splat_u32s(16)),
                _ => stored[register],
            };
            let sign = simd.and_u32s(upper, simd.splat_u32s(0x8000_0000));
            let size = simd.and_u32s(upper, simd.splat_u32s(0x7fff_0000));
            let size = simd.wrapping_dyn_shr_u32s(size, simd.splat_u32s(3));
            let size = simd.mul_f32s(simd.transmute_f32s_u32s(size), simd.splat_f32s(BIAS));
            let bits = simd.or_u32s(simd.transmute_u32s_f32s(size), sign);
            weights[register] = simd.transmute_f32s_u32s(bits);
        }
        weights
    }
}

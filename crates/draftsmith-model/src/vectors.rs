//! Vector instructions chosen at run time, and arithmetic that uses them. They are for computations
//! on slices in host memory, in this crate and in crates that depend on it.
//!
//! [`vectorized`] compiles its argument again for the processor's instruction set, provided that
//! all calls inside are inlined. So innermost loops are plain `for` loops over arrays of
//! [`STRANDS`] numbers: closures of `fold` and `map`, and `zip`, may be compiled separately without
//! those instructions.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use pulp::Arch;

/// The number of partial sums in a loop, so that the compiler can vectorise sums.
pub const STRANDS: usize = 8;

/// Runs `work` with the best vector instructions of this processor.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(work)
}

/// Returns whether a computation on `device` can run with these functions instead: on the CPU,
/// without autodiff, and on a processor with fused multiply-add. Without that instruction every
/// `mul_add` would be a function call.
pub fn reach(device: &Device) -> bool {
    #[cfg(target_arch = "x86_64")]
    let fuses = pulp::x86::V3::try_new().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let fuses = cfg!(target_arch = "aarch64");
    fuses && *device == Device::flex() && !device.is_autodiff()
}

/// Copies a tensor's values to host memory as f32, row by row. Nothing is copied if they are
/// already f32 on the CPU and there is no other reference to them.
///
/// # Panics
/// If the device cannot deliver them.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.cast(FloatDType::F32).into_data();
    data.try_into_vec().expect("it was cast to f32")
}

/// Builds a tensor from values in host memory.
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Adds the partial sums.
#[inline(always)]
pub fn sum(strands: [f32; STRANDS]) -> f32 {
    let mut total = 0.0;
    for strand in strands {
        total += strand;
    }
    total
}

/// Computes `eˣ` to within 2 units in the last place for |x| < 87. The result is 0 for smaller x
/// and infinite for larger x. Unlike the C library's function, it is branchless and vectorises.
///
/// The argument is split into a multiple of ln 2 and a rest within ±½ ln 2, whose exponential is a
/// Taylor polynomial of degree 7 (Cody and Waite 1980).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// ln 2 in two parts. The first part has so few bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// The number whose addition and subtraction round to an integer.
    const ROUNDER: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.7);
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let num_doublings = rounded - ROUNDER;
    let rest = num_doublings.mul_add(-LN_2[0], clamped);
    let rest = num_doublings.mul_add(-LN_2[1], rest);
    let mut series = 1.0 / 5040.0;
    for factorial in [720.0_f32, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        series = rest.mul_add(series, 1.0 / factorial);
    }
    // The integer is in the lowest bits of the rounded sum; the shift drops the other bits.
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    series * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_within_two_units_in_the_last_place() {
        let mut worst: f64 = 0.0;
        for i in -87_000..=88_000 {
            let x = i as f32 / 1000.0;
            let found = f64::from(vectorized(|| exp(x)));
            let expected = f64::from(x).exp();
            worst = worst.max(((found - expected) / expected).abs());
        }
        assert!(worst <= 2.0 * f64::from(f32::EPSILON), "off by {worst}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-200.0) < 2e-38 && exp(-1e30) < 2e-38);
        assert!(exp(f32::NAN).is_nan());
    }
}

//! Exponentials e^(logit − largest) of whole rows of logits, eight at a time with AVX2.
//!
//! A draft step needs them for every logit. With one library call per logit they took a fifth of a
//! small draft model's step. A NaN logit stays NaN in its weight and in the sums, and callers check
//! for it. Weights below e^−708, near the smallest normal number, become 0. In [`coarse_sums`],
//! weights below e^−87 do.

#[cfg(target_arch = "x86_64")]
use pulp::x86::V3;

/// The smallest distance d from the largest logit at which the weight e^d is not set to 0.
const MIN_DISTANCE: f64 = -708.0;

/// Computes Σ e^d and Σ d e^d over the row, with d = logit − `largest`, for the signals of stop
/// rules. A token of weight 0 adds nothing. The sums use f32 exponentials and have a relative error
/// below 1e-6. They take a third of the time of [`weights`].
pub(crate) fn coarse_sums(logits: &[f32], largest: f32) -> (f64, f64) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V3::try_new() {
        return simd.vectorize(coarse::Sums { simd, logits, largest });
    }
    sums_one_by_one(logits, largest)
}

/// Computes the weights e^(d / temperature) of all logits, with d = logit − `largest`, and their
/// sum.
pub(crate) fn weights(logits: &[f32], largest: f32, temperature: f64) -> (Vec<f64>, f64) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V3::try_new() {
        return simd.vectorize(eights::ExponentialWeights { simd, logits, largest, temperature });
    }
    weights_one_by_one(logits, largest, temperature)
}

fn sums_one_by_one(logits: &[f32], largest: f32) -> (f64, f64) {
    let (mut total, mut weighted) = (0.0, 0.0);
    for &logit in logits {
        let distance = f64::from(logit) - f64::from(largest);
        let weight = weight(distance);
        total += weight;
        weighted += if distance < MIN_DISTANCE { 0.0 } else { weight * distance };
    }
    (total, weighted)
}

fn weights_one_by_one(logits: &[f32], largest: f32, temperature: f64) -> (Vec<f64>, f64) {
    let distances = logits.iter().map(|&logit| f64::from(logit) - f64::from(largest));
    let row: Vec<f64> = distances.map(|distance| weight(distance / temperature)).collect();
    let total = row.iter().sum();
    (row, total)
}

fn weight(distance: f64) -> f64 {
    if distance < MIN_DISTANCE { 0.0 } else { distance.exp() }
}

/// Pads the last logits of a row with −∞, whose weight is 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn padded<const LANES: usize>(logits: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..logits.len()].copy_from_slice(logits);
    lanes
}

/// The implementation of `weights` in explicit AVX2 and FMA vectors, because the compiler leaves
/// plain loops scalar. Eight logits fill two vectors, so that the instructions of one vector hide
/// the latency of the other.
#[cfg(target_arch = "x86_64")]
mod eights {
    use std::f64::consts::{LN_2, LOG2_E};

    use pulp::x86::V3;
    use pulp::{NullaryFnOnce, cast, f32x4, f64x4};

    use super::{MIN_DISTANCE, padded};

    /// The difference of ln 2 and [`LN_2`], the nearest f64.
    const LN_2_REST: f64 = 2.319_046_813_846_299_6e-17;
    /// The number 1.5 · 2^52, whose unit in the last place is 1, plus the exponent bias of f64.
    const TO_EXPONENT: f64 = 6_755_399_441_055_744.0 + 1023.0;
    /// The Taylor coefficients 1 / k! for k from 2 to 13, in pairs. The remainder of the Taylor
    /// series is below 1e-17 for |r| <= ln 2 / 2.
    const COEFFICIENTS: [[f64; 2]; 6] = [
        [1.0 / 2.0, 1.0 / 6.0],
        [1.0 / 24.0, 1.0 / 120.0],
        [1.0 / 720.0, 1.0 / 5_040.0],
        [1.0 / 40_320.0, 1.0 / 362_880.0],
        [1.0 / 3_628_800.0, 1.0 / 39_916_800.0],
        [1.0 / 479_001_600.0, 1.0 / 6_227_020_800.0],
    ];

    pub(super) struct ExponentialWeights<'a> {
        pub(super) simd: V3,
        pub(super) logits: &'a [f32],
        pub(super) largest: f32,
        pub(super) temperature: f64,
    }

    impl NullaryFnOnce for ExponentialWeights<'_> {
        type Output = (Vec<f64>, f64);

        #[inline(always)]
        fn call(self) -> (Vec<f64>, f64) {
            let Self { simd, logits, largest, temperature } = self;
            let temperature = simd.splat_f64x4(temperature);
            let mut totals = [simd.splat_f64x4(0.0); 2];
            let mut row = vec![0.0; logits.len()];
            let (eights, rest) = logits.as_chunks::<8>();
            let (row_eights, row_rest) = row.as_chunks_mut::<8>();
            for (weights, &eight) in row_eights.iter_mut().zip(eights) {
                (*weights, totals) = weighed(simd, totals, eight, largest, temperature);
            }
            if !rest.is_empty() {
                let weights;
                (weights, totals) = weighed(simd, totals, padded(rest), largest, temperature);
                row_rest.copy_from_slice(&weights[..rest.len()]);
            }
            (row, sum(simd, totals))
        }
    }

    #[inline(always)]
    fn weighed(
        simd: V3,
        mut totals: [f64x4; 2],
        logits: [f32; 8],
        largest: f32,
        temperature: f64x4,
    ) -> ([f64; 8], [f64x4; 2]) {
        let [low, high] = distances(simd, logits, largest);
        let distances = [simd.div_f64x4(low, temperature), simd.div_f64x4(high, temperature)];
        let weights = exponentials(simd, distances);
        for half in 0..2 {
            totals[half] = simd.add_f64x4(totals[half], weights[half]);
        }
        (cast(weights), totals)
    }

    #[inline(always)]
    fn sum(simd: V3, halves: [f64x4; 2]) -> f64 {
        let four = simd.add_f64x4(halves[0], halves[1]);
        (four.0 + four.2) + (four.1 + four.3)
    }

    #[inline(always)]
    fn distances(simd: V3, logits: [f32; 8], largest: f32) -> [f64x4; 2] {
        let largest = simd.splat_f64x4(f64::from(largest));
        let [low, high] = cast::<[f32; 8], [f32x4; 2]>(logits);
        [
            simd.sub_f64x4(simd.convert_f32x4_to_f64x4(low), largest),
            simd.sub_f64x4(simd.convert_f32x4_to_f64x4(high), largest),
        ]
    }

    #[inline(always)]
    fn exponentials(simd: V3, [low, high]: [f64x4; 2]) -> [f64x4; 2] {
        [exponential(simd, low), exponential(simd, high)]
    }

    /// Computes e^d = 2^n e^r for d <= 0, with integer n and |r| <= ln 2 / 2.
    #[inline(always)]
    fn exponential(simd: V3, distances: f64x4) -> f64x4 {
        let to_exponent = simd.splat_f64x4(TO_EXPONENT);
        // The last 12 bits of the sum are those of n + 1023.
        let biased = simd.mul_add_f64x4(distances, simd.splat_f64x4(LOG2_E), to_exponent);
        let power_of_two = cast(simd.shl_const_u64x4::<52>(cast(biased)));
        let whole = simd.sub_f64x4(biased, to_exponent);
        let rest = simd.mul_add_f64x4(whole, simd.splat_f64x4(-LN_2), distances);
        let rest = simd.mul_add_f64x4(whole, simd.splat_f64x4(-LN_2_REST), rest);

        // Pairs of terms, and pairs of pairs, because in Horner's scheme each term waits for the
        // previous one.
        let square = simd.mul_f64x4(rest, rest);
        let fourth = simd.mul_f64x4(square, square);
        let mut pairs = [rest; 6];
        for (pair, [even, odd]) in pairs.iter_mut().zip(COEFFICIENTS) {
            *pair = simd.mul_add_f64x4(simd.splat_f64x4(odd), rest, simd.splat_f64x4(even));
        }
        let low = simd.mul_add_f64x4(pairs[1], square, pairs[0]);
        let middle = simd.mul_add_f64x4(pairs[3], square, pairs[2]);
        let high = simd.mul_add_f64x4(pairs[5], square, pairs[4]);
        let from_square = simd.mul_add_f64x4(high, fourth, middle);
        let from_square = simd.mul_add_f64x4(from_square, fourth, low);
        let from_first = simd.mul_add_f64x4(from_square, square, rest);
        let series = simd.add_f64x4(from_first, simd.splat_f64x4(1.0));

        // Multiplying by the power of two keeps NaN; adding to the exponent bits would not.
        zero_if_far(simd, distances, simd.mul_f64x4(series, power_of_two))
    }

    /// Returns `values`, or 0 where the distance is below the minimum.
    #[inline(always)]
    fn zero_if_far(simd: V3, distances: f64x4, values: f64x4) -> f64x4 {
        let is_far = simd.cmp_lt_f64x4(distances, simd.splat_f64x4(MIN_DISTANCE));
        simd.andnot_f64x4(cast(is_far), values)
    }
}

/// The implementation of `coarse_sums`: f32 exponentials, sixteen at a time. Each f32 lane sums a
/// few dozen of them, and the lanes are summed in f64.
#[cfg(target_arch = "x86_64")]
mod coarse {
    use std::f32::consts::LOG2_E;

    use pulp::x86::V3;
    use pulp::{NullaryFnOnce, cast, f32x8};

    use super::padded;

    /// The number ln 2 in two parts. The first has few enough bits for exact multiples.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// The number 1.5 · 2^23, whose unit in the last place is 1, plus the exponent bias of f32.
    const TO_EXPONENT: f32 = 12_582_912.0 + 127.0;
    /// The smallest distance d from the largest logit at which the weight e^d is not set to 0.
    const MIN_DISTANCE: f32 = -87.0;
    /// The number of logits whose exponentials are summed in f32 before an f64 sum.
    const BLOCK: usize = 512;

    pub(super) struct Sums<'a> {
        pub(super) simd: V3,
        pub(super) logits: &'a [f32],
        pub(super) largest: f32,
    }

    impl NullaryFnOnce for Sums<'_> {
        type Output = (f64, f64);

        #[inline(always)]
        fn call(self) -> (f64, f64) {
            let Self { simd, logits, largest } = self;
            let largest = simd.splat_f32x8(largest);
            let (mut total, mut weighted) = (0.0, 0.0);
            for block in logits.chunks(BLOCK) {
                let mut sums = [[simd.splat_f32x8(0.0); 2]; 2];
                let (sixteens, rest) = block.as_chunks::<16>();
                for &sixteen in sixteens {
                    sums = added(simd, sums, sixteen, largest);
                }
                if !rest.is_empty() {
                    sums = added(simd, sums, padded(rest), largest);
                }
                total += sum(simd, sums[0]);
                weighted += sum(simd, sums[1]);
            }
            (total, weighted)
        }
    }

    #[inline(always)]
    fn added(
        simd: V3,
        [mut totals, mut weighted]: [[f32x8; 2]; 2],
        logits: [f32; 16],
        largest: f32x8,
    ) -> [[f32x8; 2]; 2] {
        let halves = cast::<[f32; 16], [f32x8; 2]>(logits);
        for half in 0..2 {
            let distances = simd.sub_f32x8(halves[half], largest);
            let weights = exponential(simd, distances);
            totals[half] = simd.add_f32x8(totals[half], weights);
            let finite = zero_if_far(simd, distances, distances);
            weighted[half] = simd.mul_add_f32x8(weights, finite, weighted[half]);
        }
        [totals, weighted]
    }

    #[inline(always)]
    fn sum(simd: V3, halves: [f32x8; 2]) -> f64 {
        let lanes: [f32; 8] = cast(simd.add_f32x8(halves[0], halves[1]));
        lanes.into_iter().map(f64::from).sum()
    }

    /// Computes e^d = 2^n e^r for d <= 0, with integer n and |r| <= ln 2 / 2. The remainder of the
    /// Taylor series after r⁷ is below 6e-9.
    #[inline(always)]
    fn exponential(simd: V3, distances: f32x8) -> f32x8 {
        let splat = |value| simd.splat_f32x8(value);
        // The last 9 bits of the sum are those of n + 127.
        let biased = simd.mul_add_f32x8(distances, splat(LOG2_E), splat(TO_EXPONENT));
        let power_of_two = cast(simd.shl_const_u32x8::<23>(cast(biased)));
        let whole = simd.sub_f32x8(biased, splat(TO_EXPONENT));
        let rest = simd.mul_add_f32x8(whole, splat(-LN_2[0]), distances);
        let rest = simd.mul_add_f32x8(whole, splat(-LN_2[1]), rest);
        // Pairs of terms, and pairs of pairs, because in Horner's scheme each term waits for the
        // previous one.
        let square = simd.mul_f32x8(rest, rest);
        let pair = |even, odd| simd.mul_add_f32x8(splat(odd), rest, splat(even));
        let low = simd.mul_add_f32x8(pair(1.0 / 2.0, 1.0 / 6.0), square, pair(1.0, 1.0));
        let high = pair(1.0 / 720.0, 1.0 / 5_040.0);
        let high = simd.mul_add_f32x8(high, square, pair(1.0 / 24.0, 1.0 / 120.0));
        let series = simd.mul_add_f32x8(high, simd.mul_f32x8(square, square), low);
        zero_if_far(simd, distances, simd.mul_f32x8(series, power_of_two))
    }

    /// Returns `values`, or 0 where the distance is below the minimum.
    #[inline(always)]
    fn zero_if_far(simd: V3, distances: f32x8, values: f32x8) -> f32x8 {
        let is_far = simd.cmp_lt_f32x8(distances, simd.splat_f32x8(MIN_DISTANCE));
        simd.andnot_f32x8(cast(is_far), values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_the_exponentials_down_to_the_minimum() {
        // The library's error and ours are at most 2.2e-16 each.
        let mut largest_error = 0.0f64;
        for temperature in [1.0, 0.7, 1.9] {
            let logits: Vec<f32> = (0..2_000_003).map(|step| step as f32 * -0.000_354).collect();
            for (&logit, weight) in logits.iter().zip(weights(&logits, 0.0, temperature).0) {
                let distance = f64::from(logit) / temperature;
                if distance >= MIN_DISTANCE {
                    largest_error = largest_error.max((weight / distance.exp() - 1.0).abs());
                } else {
                    assert_eq!(weight, 0.0, "at {distance}");
                }
            }
        }
        assert!(largest_error < 4.5e-16, "{largest_error:e}");
    }

    #[test]
    fn rows_of_every_length_are_summed_and_weighed() {
        for len in 1..=40 {
            for temperature in [1.0, 0.6] {
                let mut logits: Vec<f32> =
                    (0..len).map(|index| 3.5 - (index * 7 % 40) as f32 * 0.37).collect();
                logits[len / 2] = if len > 1 { f32::NEG_INFINITY } else { 3.5 };
                if len > 2 {
                    logits[len - 1] = -800.0;
                }
                let (expected, expected_total) = weights_one_by_one(&logits, 3.5, temperature);
                let (found, total) = weights(&logits, 3.5, temperature);
                assert_eq!(found.len(), len);
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() <= 4.5e-16 * expected, "{found}, {expected}");
                }
                // Forty terms of one sign, summed in a different order.
                assert!((total / expected_total - 1.0).abs() < 4e-15, "{total}");
                let (expected_total, expected_weighted) = sums_one_by_one(&logits, 3.5);
                let (total, weighted) = coarse_sums(&logits, 3.5);
                assert!((total / expected_total - 1.0).abs() < 1e-6, "{total}");
                assert!((weighted - expected_weighted).abs() <= 1e-6 * -expected_weighted);
            }
        }
    }

    #[test]
    fn coarse_sums_have_a_relative_error_below_1e_6() {
        for (len, slope) in [(1_000, 0.02), (32_000, 0.003), (151_936, 1e-5), (151_936, 0.01)] {
            let logits: Vec<f32> = (0..len).map(|at| 7.0 - (at * 7 % len) as f32 * slope).collect();
            let (expected_total, expected_weighted) = sums_one_by_one(&logits, 7.0);
            let (total, weighted) = coarse_sums(&logits, 7.0);
            assert!((total / expected_total - 1.0).abs() < 1e-6, "{len}: {total}");
            assert!((weighted / expected_weighted - 1.0).abs() < 1e-6, "{len}: {weighted}");
        }
    }

    #[test]
    fn a_nan_stays_nan_wherever_it_is() {
        for len in 1..=9 {
            for place in 0..len {
                for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7fff_ffff)] {
                    let mut logits = vec![0.0; len];
                    logits[place] = nan;
                    let (total, weighted) = coarse_sums(&logits, 0.0);
                    assert!(total.is_nan() && weighted.is_nan());
                    let (weights, total) = weights(&logits, 0.0, 1.0);
                    assert!(total.is_nan());
                    assert!(weights.iter().enumerate().all(|(at, w)| w.is_nan() == (at == place)));
                }
            }
        }
    }
}

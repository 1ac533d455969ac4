//! Exponentials e^(logit − largest) of whole rows of logits, in vectors.
//!
//! A draft step needs them for every logit. With one library call per logit they took a fifth of a
//! small draft model's step. A NaN logit stays NaN in its weight and in the sums, and callers check
//! for it. Weights below e^−708, near the smallest normal number, become 0. In [`coarse_sums`],
//! weights below e^−87 do.
//!
//! The compiler vectorises these loops because they are plain `for` loops over slices and arrays: a
//! `zip` or a closure in one may be compiled separately, without the vector instructions.

use pulp::Arch;

/// The smallest distance d from the largest logit at which the weight e^d is not set to 0.
const MIN_DISTANCE: f64 = -708.0;
/// The same for the f32 exponentials of [`coarse_sums`].
const MIN_COARSE_DISTANCE: f32 = -87.0;
/// The number of f32 values that are computed at the same time, in two vectors or more, so that the
/// instructions of one hide the latency of the other.
const LANES: usize = 16;
/// The number of logits whose f32 exponentials are summed in f32 before an f64 sum.
const BLOCK: usize = 512;

/// Computes Σ e^d and Σ d e^d over the row, with d = logit − `largest`, for the signals of stop
/// rules. A token of weight 0 adds nothing. The sums use f32 exponentials and have a relative error
/// below 1e-6. They take a third of the time of [`weights`].
pub(crate) fn coarse_sums(logits: &[f32], largest: f32) -> (f64, f64) {
    match fuses() {
        true => vectorized(
            #[inline(always)]
            || sums(logits, largest, coarse_exponential),
        ),
        false => sums(logits, largest, f32::exp),
    }
}

/// Computes the weights e^(d / temperature) of all logits, with d = logit − `largest`, and their
/// sum.
pub(crate) fn weights(logits: &[f32], largest: f32, temperature: f64) -> (Vec<f64>, f64) {
    match fuses() {
        true => vectorized(
            #[inline(always)]
            || weigh(logits, largest, temperature, exponential),
        ),
        false => weigh(logits, largest, temperature, f64::exp),
    }
}

/// Returns whether `mul_add` is an instruction of this processor. It is a slow function call
/// otherwise.
fn fuses() -> bool {
    #[cfg(target_arch = "x86_64")]
    return pulp::x86::V3::try_new().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    return cfg!(target_arch = "aarch64");
}

/// Runs `work` with the best vector instructions of this processor.
#[inline(always)]
fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(work)
}

#[inline(always)]
fn sums(logits: &[f32], largest: f32, exponential: impl Fn(f32) -> f32) -> (f64, f64) {
    let (mut total, mut weighted) = (0.0, 0.0);
    for block in logits.chunks(BLOCK) {
        let mut totals = [[0.0; LANES]; 2];
        let (whole, rest) = block.as_chunks::<LANES>();
        for lanes in whole {
            add(&mut totals, lanes, largest, &exponential);
        }
        if !rest.is_empty() {
            // The last logits are padded with −∞, whose weight is 0.
            let mut padded = [f32::NEG_INFINITY; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            add(&mut totals, &padded, largest, &exponential);
        }
        let [of_block, weighted_of_block] = totals.map(|totals| {
            let (low, high) = totals.split_at(LANES / 2);
            low.iter().zip(high).map(|(low, high)| f64::from(low + high)).sum::<f64>()
        });
        total += of_block;
        weighted += weighted_of_block;
    }
    (total, weighted)
}

#[inline(always)]
fn add(
    [totals, weighted]: &mut [[f32; LANES]; 2],
    logits: &[f32; LANES],
    largest: f32,
    exponential: impl Fn(f32) -> f32,
) {
    for lane in 0..LANES {
        let distance = logits[lane] - largest;
        let weight = exponential(distance);
        totals[lane] += weight;
        let finite = if distance < MIN_COARSE_DISTANCE { 0.0 } else { distance };
        weighted[lane] = weight.mul_add(finite, weighted[lane]);
    }
}

#[inline(always)]
fn weigh(
    logits: &[f32],
    largest: f32,
    temperature: f64,
    exponential: impl Fn(f64) -> f64,
) -> (Vec<f64>, f64) {
    let mut row = vec![0.0; logits.len()];
    for at in 0..logits.len() {
        let distance = (f64::from(logits[at]) - f64::from(largest)) / temperature;
        row[at] = if distance < MIN_DISTANCE { 0.0 } else { exponential(distance) };
    }
    let mut totals = [0.0; LANES / 2];
    let (whole, rest) = row.as_chunks::<{ LANES / 2 }>();
    for lanes in whole {
        for lane in 0..LANES / 2 {
            totals[lane] += lanes[lane];
        }
    }
    for lane in 0..rest.len() {
        totals[lane] += rest[lane];
    }
    for half in [4, 2, 1] {
        for lane in 0..half {
            totals[lane] += totals[lane + half];
        }
    }
    (row, totals[0])
}

/// Computes e^d = 2^n e^r for d <= 0, with integer n and |r| <= ln 2 / 2. The remainder of the
/// Taylor series after r¹³ is below 1e-17.
#[inline(always)]
fn exponential(distance: f64) -> f64 {
    use std::f64::consts::{LN_2, LOG2_E};
    /// The difference of ln 2 and [`LN_2`], the nearest f64.
    const LN_2_REST: f64 = 2.319_046_813_846_299_6e-17;
    /// The number 1.5 · 2^52, whose unit in the last place is 1, plus the exponent bias of f64.
    const TO_EXPONENT: f64 = 6_755_399_441_055_744.0 + 1023.0;
    // The last 12 bits of the sum are those of n + 1023.
    let biased = distance.mul_add(LOG2_E, TO_EXPONENT);
    let power_of_two = f64::from_bits(biased.to_bits() << 52);
    let whole = biased - TO_EXPONENT;
    let rest = whole.mul_add(-LN_2_REST, whole.mul_add(-LN_2, distance));
    // Pairs of terms, and pairs of pairs, because in Horner's scheme each term waits for the
    // previous one.
    let square = rest * rest;
    let fourth = square * square;
    let pair = |even: f64, odd: f64| rest.mul_add(1.0 / odd, 1.0 / even);
    let low = pair(24.0, 120.0).mul_add(square, pair(2.0, 6.0));
    let middle = pair(40_320.0, 362_880.0).mul_add(square, pair(720.0, 5_040.0));
    let high =
        pair(479_001_600.0, 6_227_020_800.0).mul_add(square, pair(3_628_800.0, 39_916_800.0));
    let from_square = high.mul_add(fourth, middle).mul_add(fourth, low);
    let series = from_square.mul_add(square, rest) + 1.0;
    // Multiplying by the power of two keeps NaN; adding to the exponent bits would not.
    series * power_of_two
}

/// Computes e^d in f32 as [`exponential`] does. The remainder of the Taylor series after r⁷ is
/// below 6e-9.
#[inline(always)]
fn coarse_exponential(distance: f32) -> f32 {
    /// The number ln 2 in two parts. The first has few enough bits for exact multiples.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// The number 1.5 · 2^23, whose unit in the last place is 1, plus the exponent bias of f32.
    const TO_EXPONENT: f32 = 12_582_912.0 + 127.0;
    let biased = distance.mul_add(std::f32::consts::LOG2_E, TO_EXPONENT);
    let power_of_two = f32::from_bits(biased.to_bits() << 23);
    let whole = biased - TO_EXPONENT;
    let rest = whole.mul_add(-LN_2[1], whole.mul_add(-LN_2[0], distance));
    let square = rest * rest;
    let pair = |even: f32, odd: f32| rest.mul_add(1.0 / odd, 1.0 / even);
    let low = pair(2.0, 6.0).mul_add(square, rest + 1.0);
    let high = pair(720.0, 5_040.0).mul_add(square, pair(24.0, 120.0));
    let series = high.mul_add(square * square, low);
    if distance < MIN_COARSE_DISTANCE { 0.0 } else { series * power_of_two }
}

#[cfg(test)]
mod tests {
    use super::*;

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

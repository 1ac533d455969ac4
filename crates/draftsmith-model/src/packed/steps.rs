//! The operations between products, each a pass over a few values in place: norms, gates, rotation,
//! softmax.
//!
//! Sums have eight partial sums, so that they vectorise. A row's result depends on that row only.
//! Loops are plain `for` loops over indices of slices cut to one length, because closures of `fold`
//! and `extend`, and `zip`, may be compiled separately without vector instructions.

#![expect(clippy::needless_range_loop, reason = "a `zip` in the innermost loop is a call")]

use crate::vectors::{STRANDS, exp, sum};

/// Computes `Σ x²`.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut strands = [0.0_f32; STRANDS];
    let (chunks, rest) = x.as_chunks::<STRANDS>();
    for i in 0..rest.len() {
        strands[i] = rest[i] * rest[i];
    }
    for chunk in chunks {
        for i in 0..STRANDS {
            strands[i] = chunk[i].mul_add(chunk[i], strands[i]);
        }
    }
    sum(strands)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Computes `x / sqrt(mean(x²) + ε) ∘ γ`, row by row, into `x`.
#[inline(always)]
pub(super) fn rms_norm(x: &mut [f32], gamma: &[f32], epsilon: f32) {
    let width = gamma.len();
    for row in x.chunks_exact_mut(width) {
        let scale = 1.0 / (sum_of_squares(row) / width as f32 + epsilon).sqrt();
        for i in 0..width {
            row[i] = row[i] * scale * gamma[i];
        }
    }
}

/// Computes `(x − mean) / sqrt(variance + ε) ∘ γ + β`, row by row, into `x`.
#[inline(always)]
pub(super) fn layer_norm(x: &mut [f32], gamma: &[f32], beta: &[f32], epsilon: f32) {
    let width = gamma.len();
    let beta = &beta[..width];
    for row in x.chunks_exact_mut(width) {
        let mut strands = [0.0_f32; STRANDS];
        let (chunks, rest) = row.as_chunks::<STRANDS>();
        strands[..rest.len()].copy_from_slice(rest);
        for chunk in chunks {
            for i in 0..STRANDS {
                strands[i] += chunk[i];
            }
        }
        let mean = sum(strands) / width as f32;
        for i in 0..width {
            row[i] -= mean;
        }
        let scale = 1.0 / (sum_of_squares(row) / width as f32 + epsilon).sqrt();
        for i in 0..width {
            row[i] = row[i] * scale * gamma[i] + beta[i];
        }
    }
}

/// Computes `x · sigmoid(x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Computes `x · Φ(x)`. The error function is formula 7.1.26 of Abramowitz and Stegun, with an
/// error of at most 1.5e-7.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    const SERIES: [f32; 4] = [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    let y = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / 0.327_591_1_f32.mul_add(y, 1.0);
    let mut series = 1.061_405_4;
    for term in SERIES {
        series = t.mul_add(series, term);
    }
    // This is half of 1 − erf(|x| / √2), the tail probability beyond |x|.
    let tail = 0.5 * series * t * exp(-y * y);
    if x < 0.0 { x * tail } else { x - x * tail }
}

/// Computes `x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))`, where `½ (1 + tanh(y)) = sigmoid(2y)`.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769;
    x * sigmoid(TWICE_ROOT * x * (0.044_715 * x).mul_add(x, 1.0))
}

/// Computes `cap · tanh(x / cap)`, into `x`.
#[inline(always)]
pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
    let twice = 2.0 / cap;
    for i in 0..x.len() {
        // tanh(y) = (1 − e⁻²ʸ) / (1 + e⁻²ʸ) for |y|, so no exponential overflows.
        let small = exp(-x[i].abs() * twice);
        let size = cap * ((1.0 - small) / (1.0 + small));
        x[i] = if x[i] < 0.0 { -size } else { size };
    }
}

/// Computes `activation(gate) ∘ up` for rows that contain the gate and then `up`.
#[inline(always)]
pub(super) fn gated(
    gate_up: &[f32],
    width: usize,
    output: &mut Vec<f32>,
    activation: impl Fn(f32) -> f32,
) {
    output.resize(gate_up.len() / 2, 0.0);
    for (row, output) in gate_up.chunks_exact(2 * width).zip(output.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for i in 0..width {
            output[i] = activation(gate[i]) * up[i];
        }
    }
}

/// Computes `activation(x)`, into `x`.
#[inline(always)]
pub(super) fn activate(x: &mut [f32], activation: impl Fn(f32) -> f32) {
    for i in 0..x.len() {
        x[i] = activation(x[i]);
    }
}

/// Computes `x + silu(y)`, into `x`.
#[inline(always)]
pub(super) fn add_silu(x: &mut [f32], y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] += y[i] * sigmoid(y[i]);
    }
}

/// Computes `x + y`, into `x`.
#[inline(always)]
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] += y[i];
    }
}

/// Computes `x + factor · y`, into `x`.
#[inline(always)]
pub(super) fn add_scaled(x: &mut [f32], factor: f32, y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] = factor.mul_add(y[i], x[i]);
    }
}

/// Computes `Σ x y`.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut strands = [0.0_f32; STRANDS];
    let (x, x_rest) = x.as_chunks::<STRANDS>();
    let (y, y_rest) = y.as_chunks::<STRANDS>();
    for i in 0..x_rest.len() {
        strands[i] = x_rest[i] * y_rest[i];
    }
    for c in 0..x.len() {
        for i in 0..STRANDS {
            strands[i] = x[c][i].mul_add(y[c][i], strands[i]);
        }
    }
    sum(strands)
}

/// Rotates the first channels of a head's query or key in the half-split layout, and scales all
/// channels.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], scale: f32) {
    let half = cos.len();
    let (first, second) = head.split_at_mut(half);
    let (second, rest) = second.split_at_mut(half);
    let sin = &sin[..half];
    for i in 0..half {
        let (x, y) = (first[i], second[i]);
        first[i] = (x * cos[i] - y * sin[i]) * scale;
        second[i] = (y * cos[i] + x * sin[i]) * scale;
    }
    for i in 0..rest.len() {
        rest[i] *= scale;
    }
}

/// Turns the scores `first..len` into probabilities, and sets all others to 0.
///
/// # Panics
/// If the number of scores is not a multiple of [`STRANDS`].
#[inline(always)]
pub(super) fn softmax(scores: &mut [f32], first: usize, len: usize) {
    // Few layers have a window, and filling an empty slice would still cost a call.
    if first > 0 {
        scores[..first].fill(f32::NEG_INFINITY);
    }
    scores[len..].fill(f32::NEG_INFINITY);
    let (strands, []) = scores.as_chunks_mut::<STRANDS>() else {
        panic!("scores come in whole strands");
    };
    let (seen, hidden) = strands.split_at_mut(len.div_ceil(STRANDS));
    hidden.as_flattened_mut().fill(0.0);
    let mut strands = [f32::NEG_INFINITY; STRANDS];
    for chunk in seen.iter() {
        for i in 0..STRANDS {
            strands[i] = if chunk[i] > strands[i] { chunk[i] } else { strands[i] };
        }
    }
    let mut highest = f32::NEG_INFINITY;
    for strand in strands {
        highest = highest.max(strand);
    }
    for chunk in seen.iter_mut() {
        for i in 0..STRANDS {
            chunk[i] = exp(chunk[i] - highest);
        }
    }
    // The probability must be exactly 0, where the exponential may leave a tiny number.
    if first > 0 {
        seen.as_flattened_mut()[..first].fill(0.0);
    }
    seen.as_flattened_mut()[len..].fill(0.0);
    let mut total = [0.0_f32; STRANDS];
    for chunk in seen.iter() {
        for i in 0..STRANDS {
            total[i] += chunk[i];
        }
    }
    let scale = 1.0 / sum(total);
    for chunk in seen {
        for i in 0..STRANDS {
            chunk[i] *= scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_scores_get_probability_0() {
        for (first, len) in [(0, 1), (0, 3), (0, 8), (5, 11), (10, 16), (3, 24), (23, 24)] {
            let mut scores = [50.0; 24];
            for (i, score) in scores[first..len].iter_mut().enumerate() {
                *score = 0.5 * i as f32;
            }
            softmax(&mut scores, first, len);
            assert!((scores[first..len].iter().sum::<f32>() - 1.0).abs() < 1e-6);
            for pair in scores[first..len].windows(2) {
                assert!((pair[1] / pair[0] - 0.5_f32.exp()).abs() < 1e-5);
            }
            assert!(scores[..first].iter().chain(&scores[len..]).all(|score| *score == 0.0));
        }
    }

    #[test]
    fn activations_and_soft_caps_match_64_bit_arithmetic() {
        for i in -1200..=1200 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (exact + 0.044_715 * exact.powi(3));
            let expected = 0.5 * exact * (1.0 + inner.tanh());
            assert!((f64::from(gelu_tanh(x)) - expected).abs() < 2e-6, "{x}");
            // Φ by integration from 0 (Simpson's rule).
            let num_steps = 400;
            let density = |y: f64| (-0.5 * y * y).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let step = exact / f64::from(num_steps);
            let integral: f64 = (0..num_steps)
                .map(|n| {
                    let at = |offset: f64| density((f64::from(n) + offset) * step);
                    (at(0.0) + 4.0 * at(0.5) + at(1.0)) * step / 6.0
                })
                .sum();
            assert!((f64::from(gelu(x)) - exact * (0.5 + integral)).abs() < 2e-6, "{x}");
            let mut capped = [x];
            soft_cap(&mut capped, 3.0);
            assert!((f64::from(capped[0]) - 3.0 * (exact / 3.0).tanh()).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn a_layer_norms_mean_and_deviation_are_its_weights() {
        let mut rows: Vec<f32> = (0..22).map(|i| (i * i % 17) as f32 + 100.0).collect();
        let (gamma, beta) = ([2.0; 11], [-1.0; 11]);
        layer_norm(&mut rows, &gamma, &beta, 1e-9);
        for row in rows.chunks(11) {
            let mean = row.iter().sum::<f32>() / 11.0;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 11.0;
            assert!((mean + 1.0).abs() < 1e-5 && (variance - 4.0).abs() < 1e-4, "{row:?}");
        }
    }

    #[test]
    fn a_rotation_keeps_lengths() {
        let mut head = [3.0, 0.0, 4.0, 1.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0], 2.0);
        assert_eq!(head, [-8.0, 0.0, 6.0, 2.0]);
        // Channels that are not rotated are scaled.
        let mut head = [3.0, 4.0, 5.0];
        rotate(&mut head, &[0.0], &[1.0], 2.0);
        assert_eq!(head, [-8.0, 6.0, 10.0]);
    }
}

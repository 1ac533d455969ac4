//! The steps between products, each one pass over a few values in place: norm, gate, exponential,
//! rotation, softmax.
//!
//! Sums run in eight strands, so that they vectorise; a row's result depends on that row alone.
//! Loops are plain `for` loops over indices of slices cut to one length: the closure of an
//! iterator's `fold` or `extend`, and what `zip` calls, may be compiled on their own, without the
//! vector instructions.

#![expect(clippy::needless_range_loop, reason = "a `zip` in the innermost loop is a call")]

use crate::vectors::{STRANDS, exp, sum};

/// `Σ x²`.
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

/// `x / sqrt(mean(x²) + ε) ∘ γ`, row by row, into `x`.
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

/// `silu(gate) ∘ up` of rows that hold a gate and, behind it, what it gates.
#[inline(always)]
pub(super) fn gated(gate_up: &[f32], width: usize, output: &mut Vec<f32>) {
    output.resize(gate_up.len() / 2, 0.0);
    for (row, output) in gate_up.chunks_exact(2 * width).zip(output.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for i in 0..width {
            output[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
    }
}

/// `silu(x)`, into `x`.
#[inline(always)]
pub(super) fn silu(x: &mut [f32]) {
    for i in 0..x.len() {
        x[i] *= sigmoid(x[i]);
    }
}

/// `x + silu(y)`, into `x`.
#[inline(always)]
pub(super) fn add_silu(x: &mut [f32], y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] += y[i] * sigmoid(y[i]);
    }
}

/// `x + y`, into `x`.
#[inline(always)]
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] += y[i];
    }
}

/// `x + factor · y`, into `x`.
#[inline(always)]
pub(super) fn add_scaled(x: &mut [f32], factor: f32, y: &[f32]) {
    let y = &y[..x.len()];
    for i in 0..x.len() {
        x[i] = factor.mul_add(y[i], x[i]);
    }
}

/// `Σ x y`.
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

/// Rotates one head's query or key to its position, in the half-split layout, and scales it.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], scale: f32) {
    let half = cos.len();
    let (first, second) = head.split_at_mut(half);
    let (second, sin) = (&mut second[..half], &sin[..half]);
    for i in 0..half {
        let (x, y) = (first[i], second[i]);
        first[i] = (x * cos[i] - y * sin[i]) * scale;
        second[i] = (y * cos[i] + x * sin[i]) * scale;
    }
}

/// Turns the first `len` scores into probabilities, and the others into 0.
///
/// # Panics
/// Unless the scores come in whole strands.
#[inline(always)]
pub(super) fn softmax(scores: &mut [f32], len: usize) {
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
    // What lies behind the last score that is seen is next to nothing, and here nothing.
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
    fn hidden_scores_have_no_share() {
        for len in [1, 3, 8, 11, 16, 24] {
            let mut scores = [50.0; 24];
            for (i, score) in scores[..len].iter_mut().enumerate() {
                *score = 0.5 * i as f32;
            }
            softmax(&mut scores, len);
            assert!((scores[..len].iter().sum::<f32>() - 1.0).abs() < 1e-6);
            for pair in scores[..len].windows(2) {
                assert!((pair[1] / pair[0] - 0.5_f32.exp()).abs() < 1e-5);
            }
            assert!(scores[len..].iter().all(|score| *score == 0.0));
        }
    }

    #[test]
    fn a_rotation_keeps_lengths() {
        let mut head = [3.0, 0.0, 4.0, 1.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0], 2.0);
        assert_eq!(head, [-8.0, 0.0, 6.0, 2.0]);
    }
}

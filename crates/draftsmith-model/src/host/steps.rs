//! The steps between products, each one pass over a few values in place: norm, gate, exponential,
//! rotation, softmax.
//!
//! Sums run in eight strands, so that they vectorise; a row's result depends on that row alone.
//! Loops are plain `for` loops over slices: the closure of an iterator's `fold` or `extend` may be
//! compiled on its own, without the vector instructions.

/// Sums that run side by side.
const STRANDS: usize = 8;

/// `Σ x²`.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut strands = [0.0_f32; STRANDS];
    let chunks = x.chunks_exact(STRANDS);
    for (strand, value) in strands.iter_mut().zip(chunks.remainder()) {
        *strand = value * value;
    }
    for chunk in chunks {
        for (strand, value) in strands.iter_mut().zip(chunk) {
            *strand = value.mul_add(*value, *strand);
        }
    }
    sum(strands)
}

#[inline(always)]
fn sum(strands: [f32; STRANDS]) -> f32 {
    let mut total = 0.0;
    for strand in strands {
        total += strand;
    }
    total
}

/// `eˣ` to within 2 units in the last place for |x| < 87, 0 below and infinite above: branchless,
/// so that it vectorises, as the C library's does not.
///
/// The argument is split into a multiple of ln 2 and a rest within ±½ ln 2, whose exponential is
/// its Taylor polynomial of degree 7 (Cody and Waite 1980).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// ln 2 in two parts, the first with few enough bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// Added and subtracted again, it rounds to an integer.
    const ROUNDER: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.7);
    let num_doublings = clamped.mul_add(std::f32::consts::LOG2_E, ROUNDER) - ROUNDER;
    let rest = num_doublings.mul_add(-LN_2[0], clamped);
    let rest = num_doublings.mul_add(-LN_2[1], rest);
    let mut series = 1.0 / 5040.0;
    for factorial in [720.0_f32, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        series = rest.mul_add(series, 1.0 / factorial);
    }
    let power = f32::from_bits(((num_doublings as i32 + 127) << 23) as u32);
    series * power
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / sqrt(mean(x²) + ε) ∘ γ`, row by row, appended to `output`.
#[inline(always)]
pub(super) fn rms_norm(x: &[f32], gamma: &[f32], epsilon: f32, output: &mut Vec<f32>) {
    let width = gamma.len();
    output.resize(x.len(), 0.0);
    for (row, output) in x.chunks_exact(width).zip(output.chunks_exact_mut(width)) {
        let scale = 1.0 / (sum_of_squares(row) / width as f32 + epsilon).sqrt();
        for ((output, value), gamma) in output.iter_mut().zip(row).zip(gamma) {
            *output = value * scale * gamma;
        }
    }
}

/// `silu(gate) ∘ up` of rows that hold a gate and, behind it, what it gates.
#[inline(always)]
pub(super) fn gated(gate_up: &[f32], width: usize, output: &mut Vec<f32>) {
    output.resize(gate_up.len() / 2, 0.0);
    for (row, output) in gate_up.chunks_exact(2 * width).zip(output.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((output, gate), up) in output.iter_mut().zip(gate).zip(up) {
            *output = gate * sigmoid(*gate) * up;
        }
    }
}

/// `x + silu(y)`, into `x`.
#[inline(always)]
pub(super) fn add_silu(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y * sigmoid(*y);
    }
}

/// `x + y`, into `x`.
#[inline(always)]
pub(super) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Rotates one head's query or key to its position, in the half-split layout, and scales it.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], scale: f32) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = (x * cos - y * sin) * scale;
        *b = (y * cos + x * sin) * scale;
    }
}

/// Turns the first `len` scores into probabilities, and the others into 0.
#[inline(always)]
pub(super) fn softmax(scores: &mut [f32], len: usize) {
    let (seen, hidden) = scores.split_at_mut(len);
    hidden.fill(0.0);
    let mut highest = f32::NEG_INFINITY;
    for score in seen.iter() {
        highest = highest.max(*score);
    }
    for score in seen.iter_mut() {
        *score = exp(*score - highest);
    }
    let mut strands = [0.0_f32; STRANDS];
    for chunk in seen.chunks(STRANDS) {
        for (strand, score) in strands.iter_mut().zip(chunk) {
            *strand += score;
        }
    }
    let scale = 1.0 / sum(strands);
    for score in seen.iter_mut() {
        *score *= scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::vectorized;

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

    #[test]
    fn hidden_scores_have_no_share() {
        let mut scores = [1.0, 2.0, 3.0, 50.0, 60.0];
        softmax(&mut scores, 3);
        assert!((scores[..3].iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((scores[2] / scores[1] - 1.0_f32.exp()).abs() < 1e-5);
        assert_eq!(scores[3..], [0.0, 0.0]);
    }

    #[test]
    fn a_rotation_keeps_lengths() {
        let mut head = [3.0, 0.0, 4.0, 1.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0], 2.0);
        assert_eq!(head, [-8.0, 0.0, 6.0, 2.0]);
    }
}

//! The losses of a chunk in host memory.
//!
//! A token's logits stay in the L1 cache during a few vectorised passes, and the gradient overwrites
//! them. Tensor operations would go through main memory at each step and compute exponentials one by
//! one.

use draftsmith_model::vectors::{STRANDS, exp, sum, vectorized};
use rayon::prelude::*;

use super::{DistillationLoss, NUM_SCORES};

/// The fewest tokens that are worth starting a thread for.
const TOKENS_PER_TASK: usize = 16;

/// Returns the sum of the tokens' losses (cross-entropy in nats), and overwrites the student's logits
/// with the gradient of `token_share` times that sum.
///
/// # Shapes
/// - student, teacher: logits, `[tokens, vocab]`
pub(super) fn loss_and_gradient(
    loss: DistillationLoss,
    student: &mut [f32],
    mut teacher: Vec<f32>,
    vocab_size: usize,
    token_share: f32,
) -> f64 {
    let rows = student.par_chunks_exact_mut(vocab_size);
    let rows = rows.zip(teacher.par_chunks_exact_mut(vocab_size));
    let of_row = |(row, probs): (&mut [f32], &mut [f32])| {
        vectorized(
            #[inline(always)]
            || softmax(probs),
        );
        vectorized(
            #[inline(always)]
            || match loss {
                DistillationLoss::CrossEntropy => cross_entropy(row, probs, token_share),
                DistillationLoss::TotalVariation => total_variation(row, probs, token_share),
            },
        )
    };
    // Added in order, so that the result does not depend on threads.
    let losses: Vec<f32> = rows.with_min_len(TOKENS_PER_TASK).map(of_row).collect();
    losses.into_iter().map(f64::from).sum()
}

/// The sums of [`LmHead::score_sums`](super::LmHead::score_sums).
///
/// # Shapes
/// - student, teacher: logits, `[tokens, vocab]`
pub(super) fn score_sums(
    mut student: Vec<f32>,
    mut teacher: Vec<f32>,
    vocab_size: usize,
) -> [f64; NUM_SCORES] {
    let rows = student.par_chunks_exact_mut(vocab_size);
    let rows = rows.zip(teacher.par_chunks_exact_mut(vocab_size));
    let of_row = |(student, teacher): (&mut [f32], &mut [f32])| {
        let agree = vectorized(
            #[inline(always)]
            || {
                let indices = [index_of_largest(student), index_of_largest(teacher)];
                log_softmax(student);
                log_softmax(teacher);
                indices[0] == indices[1]
            },
        );
        let [cross_entropy, entropy, overlap] = vectorized(
            #[inline(always)]
            || pass(Scores, student, teacher),
        );
        [cross_entropy, entropy, f32::from(agree), overlap]
    };
    let all: Vec<[f32; NUM_SCORES]> = rows.with_min_len(TOKENS_PER_TASK).map(of_row).collect();
    let mut sums = [0.0; NUM_SCORES];
    for scores in all {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *sum += f64::from(score);
        }
    }
    sums
}

/// A pass over a token's numbers: it replaces each number and sums `SUMS` terms.
trait Pass<const SUMS: usize>: Copy {
    /// `teacher` is the number at the same index of the other row.
    fn at(self, x: f32, teacher: f32) -> (f32, [f32; SUMS]);
}

/// Runs a pass over a token's numbers together with the target's.
#[inline(always)]
fn pass<P: Pass<SUMS>, const SUMS: usize>(
    pass: P,
    row: &mut [f32],
    teacher: &[f32],
) -> [f32; SUMS] {
    let mut strands = [[0.0; STRANDS]; SUMS];
    let (chunks, rest) = row.as_chunks_mut::<STRANDS>();
    let (teachers, teachers_rest) = teacher.as_chunks::<STRANDS>();
    let teachers = &teachers[..chunks.len()];
    for nth in 0..chunks.len() {
        let (chunk, teacher) = (&mut chunks[nth], &teachers[nth]);
        for i in 0..STRANDS {
            let (x, terms) = pass.at(chunk[i], teacher[i]);
            chunk[i] = x;
            for s in 0..SUMS {
                strands[s][i] += terms[s];
            }
        }
    }
    for i in 0..rest.len() {
        let (x, terms) = pass.at(rest[i], teachers_rest[i]);
        rest[i] = x;
        for s in 0..SUMS {
            strands[s][i] += terms[s];
        }
    }
    let mut sums = [0.0; SUMS];
    for s in 0..SUMS {
        sums[s] = sum(strands[s]);
    }
    sums
}

/// Runs a pass over a token's numbers.
#[inline(always)]
fn pass_alone<P: Pass<SUMS>, const SUMS: usize>(pass: P, row: &mut [f32]) -> [f32; SUMS] {
    let mut strands = [[0.0; STRANDS]; SUMS];
    let (chunks, rest) = row.as_chunks_mut::<STRANDS>();
    for chunk in chunks {
        for i in 0..STRANDS {
            let (x, terms) = pass.at(chunk[i], 0.0);
            chunk[i] = x;
            for s in 0..SUMS {
                strands[s][i] += terms[s];
            }
        }
    }
    for i in 0..rest.len() {
        let (x, terms) = pass.at(rest[i], 0.0);
        rest[i] = x;
        for s in 0..SUMS {
            strands[s][i] += terms[s];
        }
    }
    let mut sums = [0.0; SUMS];
    for s in 0..SUMS {
        sums[s] = sum(strands[s]);
    }
    sums
}

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut strands = [f32::NEG_INFINITY; STRANDS];
    let (chunks, rest) = row.as_chunks::<STRANDS>();
    for chunk in chunks {
        for i in 0..STRANDS {
            strands[i] = if chunk[i] > strands[i] { chunk[i] } else { strands[i] };
        }
    }
    let mut largest = f32::NEG_INFINITY;
    for x in strands {
        largest = largest.max(x);
    }
    for x in rest {
        largest = largest.max(*x);
    }
    largest
}

/// The first index of the largest number; `None` if all are NaN.
#[inline(always)]
fn index_of_largest(row: &[f32]) -> Option<usize> {
    let largest = largest(row);
    row.iter().position(|x| *x == largest)
}

/// Turns logits into probabilities.
#[inline(always)]
fn softmax(row: &mut [f32]) {
    let [sum] = pass_alone(Exponentials { largest: largest(row) }, row);
    let [] = pass_alone(Scale(1.0 / sum), row);
}

/// Turns logits into logarithms of probabilities.
#[inline(always)]
fn log_softmax(row: &mut [f32]) {
    let largest = largest(row);
    let [sum] = pass_alone(SumOfExponentials { largest }, row);
    let [] = pass_alone(Less(largest + sum.ln()), row);
}

/// −Σ p log q, and q − p in place of the logits.
#[inline(always)]
fn cross_entropy(row: &mut [f32], probs: &[f32], token_share: f32) -> f32 {
    let [sum, weighted] = pass(WeightedExponentials { largest: largest(row) }, row, probs);
    let [] = pass(Difference { inverse_sum: 1.0 / sum, token_share }, row, probs);
    // log sum − Σ p · shifted, because p sums to 1.
    sum.ln() - weighted
}

/// ½ Σ |p − q|, and ½ q ∘ (sign(q − p) − Σ q · sign(q − p)).
#[inline(always)]
fn total_variation(row: &mut [f32], probs: &[f32], token_share: f32) -> f32 {
    softmax(row);
    let [distance, lean] = pass(SignedDifference, row, probs);
    let [] = pass(TotalVariationGradient { lean, token_share }, row, probs);
    0.5 * distance
}

/// The sign, 0 at 0: a subgradient of |x|.
#[inline(always)]
fn sign(x: f32) -> f32 {
    let above = if x > 0.0 { 1.0 } else { 0.0 };
    let below = if x < 0.0 { 1.0 } else { 0.0 };
    above - below
}

#[derive(Clone, Copy)]
struct Exponentials {
    largest: f32,
}

impl Pass<1> for Exponentials {
    #[inline(always)]
    fn at(self, x: f32, _: f32) -> (f32, [f32; 1]) {
        let exp = exp(x - self.largest);
        (exp, [exp])
    }
}

#[derive(Clone, Copy)]
struct SumOfExponentials {
    largest: f32,
}

impl Pass<1> for SumOfExponentials {
    #[inline(always)]
    fn at(self, x: f32, _: f32) -> (f32, [f32; 1]) {
        (x, [exp(x - self.largest)])
    }
}

#[derive(Clone, Copy)]
struct WeightedExponentials {
    largest: f32,
}

impl Pass<2> for WeightedExponentials {
    #[inline(always)]
    fn at(self, x: f32, prob: f32) -> (f32, [f32; 2]) {
        let shifted = x - self.largest;
        let exp = exp(shifted);
        (exp, [exp, prob * shifted])
    }
}

#[derive(Clone, Copy)]
struct Scale(f32);

impl Pass<0> for Scale {
    #[inline(always)]
    fn at(self, x: f32, _: f32) -> (f32, [f32; 0]) {
        (x * self.0, [])
    }
}

#[derive(Clone, Copy)]
struct Less(f32);

impl Pass<0> for Less {
    #[inline(always)]
    fn at(self, x: f32, _: f32) -> (f32, [f32; 0]) {
        (x - self.0, [])
    }
}

#[derive(Clone, Copy)]
struct Difference {
    inverse_sum: f32,
    token_share: f32,
}

impl Pass<0> for Difference {
    #[inline(always)]
    fn at(self, exp: f32, prob: f32) -> (f32, [f32; 0]) {
        // The same operations as in `softmax`, so that equal logits have a difference of exactly 0.
        ((exp * self.inverse_sum - prob) * self.token_share, [])
    }
}

#[derive(Clone, Copy)]
struct SignedDifference;

impl Pass<2> for SignedDifference {
    #[inline(always)]
    fn at(self, q: f32, p: f32) -> (f32, [f32; 2]) {
        (q, [(q - p).abs(), q * sign(q - p)])
    }
}

#[derive(Clone, Copy)]
struct TotalVariationGradient {
    lean: f32,
    token_share: f32,
}

impl Pass<0> for TotalVariationGradient {
    #[inline(always)]
    fn at(self, q: f32, p: f32) -> (f32, [f32; 0]) {
        (0.5 * self.token_share * q * (sign(q - p) - self.lean), [])
    }
}

/// −Σ p log q, −Σ p log p and Σ min(p, q), from log probabilities.
#[derive(Clone, Copy)]
struct Scores;

impl Pass<3> for Scores {
    #[inline(always)]
    fn at(self, log_q: f32, log_p: f32) -> (f32, [f32; 3]) {
        let (q, p) = (exp(log_q), exp(log_p));
        let smaller = if q < p { q } else { p };
        (log_q, [-p * log_q, -p * log_p, smaller])
    }
}

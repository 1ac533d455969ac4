//! The losses of a chunk in host memory.
//!
//! A token's logits stay in the L1 cache during a few vectorised passes, and the gradient overwrites
//! them. Tensor operations would go through main memory at each step and compute exponentials one by
//! one.

use draftsmith_model::vectors::{STRANDS, exp, sum, vectorized};
use rayon::prelude::*;

use super::{DistillationLoss, NUM_SCORES};

/// The minimum number of tokens for which starting a thread is worthwhile.
const TOKENS_PER_TASK: usize = 16;

/// Turns logits into probabilities.
///
/// # Shapes
/// - logits: `[tokens, vocab]`
pub(super) fn probabilities(mut logits: Vec<f32>, vocab_size: usize) -> Vec<f32> {
    let rows = logits.par_chunks_exact_mut(vocab_size).with_min_len(TOKENS_PER_TASK);
    rows.for_each(|row| {
        vectorized(
            #[inline(always)]
            || softmax(row),
        );
    });
    logits
}

/// Returns the sum of the tokens' losses, each multiplied by its share (cross-entropy is in nats).
/// Overwrites the student's logits with the gradient of that sum. Tokens with a share of 0 are not
/// read.
///
/// # Shapes
/// - student: logits, `[tokens, vocab]`
/// - teacher: probabilities, `[tokens, vocab]`
/// - shares: `[tokens]`
pub(super) fn loss_and_gradient(
    loss: DistillationLoss,
    student: &mut [f32],
    teacher: &[f32],
    shares: &[f32],
) -> f64 {
    let vocab_size = student.len() / shares.len();
    let rows = student.par_chunks_exact_mut(vocab_size);
    let rows = rows.zip(teacher.par_chunks_exact(vocab_size)).zip(shares);
    let of_row = |((row, probs), share): ((&mut [f32], &[f32]), &f32)| {
        if *share == 0.0 {
            row.fill(0.0);
            return 0.0;
        }
        let loss = vectorized(
            #[inline(always)]
            || match loss {
                DistillationLoss::CrossEntropy => cross_entropy(row, probs, *share),
                DistillationLoss::TotalVariation | DistillationLoss::Dspark => {
                    with_distance(row, probs, *share, loss.weights())
                }
            },
        );
        f64::from(loss) * f64::from(*share)
    };
    // Losses are added in order, so that the result does not depend on threads.
    let losses: Vec<f64> = rows.with_min_len(TOKENS_PER_TASK).map(of_row).collect();
    losses.into_iter().sum()
}

/// Computes the sums of [`LmHead::score_sums`](super::LmHead::score_sums).
///
/// # Shapes
/// - student, teacher: logits, `[tokens, vocab]`
/// - shares: `[tokens]`: 1 for a token, 0 for padding
pub(super) fn score_sums(
    mut student: Vec<f32>,
    mut teacher: Vec<f32>,
    vocab_size: usize,
    shares: &[f32],
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
            || scores(student, teacher),
        );
        [cross_entropy, entropy, f32::from(agree), overlap]
    };
    let all: Vec<[f32; NUM_SCORES]> = rows.with_min_len(TOKENS_PER_TASK).map(of_row).collect();
    let mut sums = [0.0; NUM_SCORES];
    for (scores, share) in all.into_iter().zip(shares) {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *sum += f64::from(score * share);
        }
    }
    sums
}

/// Runs `at` on each of a token's numbers together with the number `beside` it, the teacher's. `at`
/// returns a replacement for the number and `SUMS` terms. Returns the sum of each term over the row.
#[inline(always)]
fn pass<T: Copy, const SUMS: usize>(
    row: &mut [f32],
    beside: &[T],
    at: impl Fn(f32, T) -> (f32, [f32; SUMS]),
) -> [f32; SUMS] {
    let mut strands = [[0.0; STRANDS]; SUMS];
    let (chunks, rest) = row.as_chunks_mut::<STRANDS>();
    let (others, others_rest) = beside.as_chunks::<STRANDS>();
    let others = &others[..chunks.len()];
    for nth in 0..chunks.len() {
        let (chunk, other) = (&mut chunks[nth], &others[nth]);
        for i in 0..STRANDS {
            let (x, terms) = at(chunk[i], other[i]);
            chunk[i] = x;
            for s in 0..SUMS {
                strands[s][i] += terms[s];
            }
        }
    }
    for i in 0..rest.len() {
        let (x, terms) = at(rest[i], others_rest[i]);
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

/// Runs `at` on each of a token's numbers, as [`pass`] does, beside nothing.
#[inline(always)]
fn pass_alone<const SUMS: usize>(
    row: &mut [f32],
    at: impl Fn(f32) -> (f32, [f32; SUMS]),
) -> [f32; SUMS] {
    // A list of `()` takes no memory.
    let nothing = vec![(); row.len()];
    pass(
        row,
        &nothing,
        #[inline(always)]
        |x, ()| at(x),
    )
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

/// Returns the first index of the largest number; `None` if all are NaN.
#[inline(always)]
fn index_of_largest(row: &[f32]) -> Option<usize> {
    let largest = largest(row);
    row.iter().position(|x| *x == largest)
}

/// Turns logits into probabilities.
#[inline(always)]
fn softmax(row: &mut [f32]) {
    let largest = largest(row);
    let [sum] = pass_alone(
        row,
        #[inline(always)]
        |x| {
            let exp = exp(x - largest);
            (exp, [exp])
        },
    );
    let inverse_sum = 1.0 / sum;
    for exp in row {
        *exp *= inverse_sum;
    }
}

/// Turns logits into logarithms of probabilities.
#[inline(always)]
fn log_softmax(row: &mut [f32]) {
    let largest = largest(row);
    let [sum] = pass_alone(
        row,
        #[inline(always)]
        |x| (x, [exp(x - largest)]),
    );
    let log_sum = largest + sum.ln();
    for x in row {
        *x -= log_sum;
    }
}

/// Replaces logits by exp(x − largest). Returns the sum of these exponentials and Σ p · (x − largest).
/// Because p sums to 1, −Σ p log q is the logarithm of the former minus the latter.
#[inline(always)]
fn exponentials(row: &mut [f32], probs: &[f32]) -> [f32; 2] {
    let largest = largest(row);
    pass(
        row,
        probs,
        #[inline(always)]
        |x, prob| {
            let shifted = x - largest;
            let exp = exp(shifted);
            (exp, [exp, prob * shifted])
        },
    )
}

/// Computes −Σ p log q. Overwrites the logits with the gradient: (q − p) times the token's share.
#[inline(always)]
fn cross_entropy(row: &mut [f32], probs: &[f32], token_share: f32) -> f32 {
    let [sum, weighted] = exponentials(row, probs);
    let inverse_sum = 1.0 / sum;
    // These are the same operations as in `softmax`, so that equal logits have a difference of
    // exactly 0.
    for (exp, prob) in row.iter_mut().zip(probs) {
        *exp = (*exp * inverse_sum - prob) * token_share;
    }
    sum.ln() - weighted
}

/// Computes −a Σ p log q + b Σ |p − q|, given `[a, b]`. Overwrites the logits with the gradient:
/// a (q − p) + b q ∘ (sign(q − p) − Σ q · sign(q − p)), times the token's share.
#[inline(always)]
fn with_distance(row: &mut [f32], probs: &[f32], token_share: f32, [a, b]: [f32; 2]) -> f32 {
    let [sum, weighted] = exponentials(row, probs);
    // These are the same operations as in `softmax`, so that equal logits have a distance of 0.
    let inverse_sum = 1.0 / sum;
    let [distance, lean] = pass(
        row,
        probs,
        #[inline(always)]
        |exp, p| {
            let q = exp * inverse_sum;
            (q, [(q - p).abs(), q * sign(q - p)])
        },
    );
    for (q, p) in row.iter_mut().zip(probs) {
        *q = token_share * (a * (*q - p) + b * *q * (sign(*q - p) - lean));
    }
    a * (sum.ln() - weighted) + b * distance
}

/// Computes −Σ p log q, −Σ p log p and Σ min(p, q), from log probabilities.
#[inline(always)]
fn scores(log_student: &mut [f32], log_teacher: &[f32]) -> [f32; 3] {
    pass(
        log_student,
        log_teacher,
        #[inline(always)]
        |log_q, log_p| {
            let (q, p) = (exp(log_q), exp(log_p));
            let smaller = if q < p { q } else { p };
            (log_q, [-p * log_q, -p * log_p, smaller])
        },
    )
}

/// Returns the sign of a number, which is 0 at 0: a subgradient of |x|.
#[inline(always)]
fn sign(x: f32) -> f32 {
    let above = if x > 0.0 { 1.0 } else { 0.0 };
    let below = if x < 0.0 { 1.0 } else { 0.0 };
    above - below
}

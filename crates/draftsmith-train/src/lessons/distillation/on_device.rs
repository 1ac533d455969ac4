//! The losses of a chunk as tensor operations, on any device. Each exponential is computed once.

use burn::tensor::Tensor;

use super::DistillationLoss;

/// The probabilities of a chunk and their logarithms, `[tokens, vocab]` each.
struct Softmax {
    probs: Tensor<2>,
    log_probs: Tensor<2>,
}

impl Softmax {
    fn of(logits: Tensor<2>) -> Self {
        let largest = logits.clone().max_dim(1);
        let shifted = logits - largest;
        let exp = shifted.clone().exp();
        let sum = exp.clone().sum_dim(1);
        Self { probs: exp / sum.clone(), log_probs: shifted - sum.log() }
    }
}

/// Computes the probabilities of logits, `[tokens, vocab]`.
pub(super) fn probabilities(logits: Tensor<2>) -> Tensor<2> {
    Softmax::of(logits).probs
}

/// Computes the tokens' losses, and the gradient of their sum with respect to the student's logits.
///
/// # Shapes
/// - student: logits, `[tokens, vocab]`
/// - p: the teacher's probabilities, `[tokens, vocab]`
/// - output: `[tokens, 1]` and `[tokens, vocab]`
pub(super) fn losses_and_gradient(
    loss: DistillationLoss,
    student: Tensor<2>,
    p: Tensor<2>,
) -> (Tensor<2>, Tensor<2>) {
    let Softmax { probs, log_probs } = Softmax::of(student);
    let cross_entropy = (p.clone() * log_probs).sum_dim(1).neg();
    let difference = probs.clone() - p;
    if loss == DistillationLoss::CrossEntropy {
        return (cross_entropy, difference);
    }
    // `sign` is 0 at 0, which is a subgradient of |x|.
    let sign = difference.clone().sign();
    let lean = (probs.clone() * sign.clone()).sum_dim(1);
    let [a, b] = loss.weights();
    let distance = difference.clone().abs().sum_dim(1);
    (cross_entropy * a + distance * b, difference * a + probs * (sign - lean) * b)
}

/// Computes the sums of [`LmHead::score_sums`](super::LmHead::score_sums).
///
/// # Shapes
/// - student, teacher: logits, `[tokens, vocab]`
/// - are_tokens: `[tokens, 1]`, as [`LessonTokens::are`](super::LessonTokens::are)
/// - output: `[NUM_SCORES]`
pub(super) fn score_sums(
    student: Tensor<2>,
    teacher: Tensor<2>,
    are_tokens: Option<Tensor<2>>,
) -> Tensor<1> {
    let agreement = student.clone().argmax(1).equal(teacher.clone().argmax(1));
    let (q, p) = (Softmax::of(student), Softmax::of(teacher));
    let cross_entropy = (p.probs.clone() * q.log_probs).sum_dim(1).neg();
    let entropy = (p.probs.clone() * p.log_probs).sum_dim(1).neg();
    let overlap = p.probs.min_pair(q.probs).sum_dim(1);
    let scores = Tensor::cat(vec![cross_entropy, entropy, agreement.float(), overlap], 1);
    let scores = match are_tokens {
        Some(are) => scores * are,
        None => scores,
    };
    scores.sum_dim(0).squeeze_dim(0)
}

//! The loss of Kangaroo: cross-entropy of the adapter against the target's whole distribution,
//! through the target's LM head, a chunk of tokens at a time.
//!
//! The logits of every token are too many to hold, and autodiff would hold several copies of them.
//! So nothing here is recorded: the gradient with respect to the adapter's hidden states is a
//! formula, and the learner goes on from there. Each exponential is taken once: on the CPU they are
//! most of the time. Products run in the LM head's type, everything between them in f32.

use burn::tensor::{FloatDType, Tensor};
use draftsmith_model::CausalLm;

/// The target's frozen LM head.
#[derive(Debug, Clone)]
pub(crate) struct LmHead {
    /// `[hidden, vocab]`
    weight: Tensor<2>,
}

/// The softmax of a chunk's logits, in parts. `[tokens, vocab]`, and `[tokens, 1]` for sums.
struct Softmax {
    /// Logits less their row's largest.
    shifted: Tensor<2>,
    /// Their exponentials.
    exp: Tensor<2>,
    sum: Tensor<2>,
}

impl LmHead {
    /// The head of a target that does not record autodiff.
    pub(crate) fn of(target: &CausalLm) -> Self {
        Self { weight: target.lm_head_weight() }
    }

    fn softmax(&self, hidden: Tensor<2>) -> Softmax {
        let logits = hidden.matmul(self.weight.clone()).cast(FloatDType::F32);
        let largest = logits.clone().max_dim(1);
        let shifted = logits - largest;
        let exp = shifted.clone().exp();
        let sum = exp.clone().sum_dim(1);
        Softmax { shifted, exp, sum }
    }

    /// The loss −Σ p log q / tokens in nats, p = softmax(head(teacher)) and q =
    /// softmax(head(student)) (Kangaroo, section 3.1, with the mask applied before), and its
    /// gradient with respect to `student`, (q − p) · headᵀ / tokens. Nothing is recorded.
    ///
    /// `loss_chunk` tokens at a time, which bounds memory and does not change the result.
    ///
    /// # Shapes
    /// - student, teacher: `[tokens, hidden]`, normed; at least one token
    /// - output: `[1]` and `[tokens, hidden]`
    pub(crate) fn loss_and_gradient(
        &self,
        student: Tensor<2>,
        teacher: Tensor<2>,
        loss_chunk: usize,
    ) -> (Tensor<1>, Tensor<2>) {
        let [num_tokens, _] = student.dims();
        let token_share = 1.0 / num_tokens as f64;
        let transposed = self.weight.clone().transpose();
        let mut losses = Vec::new();
        let mut gradients = Vec::new();
        for (student, teacher) in chunks(student, teacher, loss_chunk) {
            let q = self.softmax(student);
            let p = self.softmax(teacher).into_probs();
            losses.push(q.cross_entropy(p.clone()).sum() * token_share);
            let difference = (q.into_probs() - p).cast(self.weight.dtype());
            gradients.push(difference.matmul(transposed.clone()) * token_share);
        }
        (Tensor::cat(losses, 0).sum(), Tensor::cat(gradients, 0))
    }

    /// Sums over tokens of: −Σ p log q, −Σ p log p (nats), whether p and q have the same most
    /// probable token, and Σ min(p, q).
    ///
    /// # Shapes
    /// - student, teacher: `[tokens, hidden]`, normed; at least one token
    /// - output: `[4]`
    pub(crate) fn score_sums(
        &self,
        student: Tensor<2>,
        teacher: Tensor<2>,
        loss_chunk: usize,
    ) -> Tensor<1> {
        let sums = chunks(student, teacher, loss_chunk).map(|(student, teacher)| {
            let (q, p) = (self.softmax(student), self.softmax(teacher));
            let agreement = q.shifted.clone().argmax(1).equal(p.shifted.clone().argmax(1));
            let probs = p.exp.clone() / p.sum.clone();
            let cross_entropy = q.cross_entropy(probs.clone());
            let entropy = p.cross_entropy(probs.clone());
            let overlap = probs.min_pair(q.into_probs());
            let sums = [cross_entropy.sum(), entropy.sum(), agreement.float().sum(), overlap.sum()];
            Tensor::cat(sums.to_vec(), 0)
        });
        sums.reduce(|sums, more| sums + more).expect("there is a token")
    }
}

impl Softmax {
    /// `[tokens, vocab]`
    fn into_probs(self) -> Tensor<2> {
        self.exp / self.sum
    }

    /// −Σ `probs` · log softmax = log sum − Σ `probs` · shifted, because `probs` sum to 1.
    ///
    /// # Shapes
    /// - probs: `[tokens, vocab]`
    /// - output: `[tokens, 1]`
    fn cross_entropy(&self, probs: Tensor<2>) -> Tensor<2> {
        self.sum.clone().log() - (probs * self.shifted.clone()).sum_dim(1)
    }
}

/// Both, cut into the same runs of tokens.
fn chunks(
    student: Tensor<2>,
    teacher: Tensor<2>,
    loss_chunk: usize,
) -> impl Iterator<Item = (Tensor<2>, Tensor<2>)> {
    let [num_tokens, _] = student.dims();
    assert_eq!(student.dims(), teacher.dims(), "a teacher for each token");
    (0..num_tokens).step_by(loss_chunk).map(move |start| {
        let rows = start..num_tokens.min(start.saturating_add(loss_chunk));
        (student.clone().slice(rows.clone()), teacher.clone().slice(rows))
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::activation::{log_softmax, softmax};
    use burn::tensor::{Device, TensorData};
    use draftsmith_theory::SeededDraws;

    use super::*;
    use crate::test_pair::tiny_draft;

    const HIDDEN: usize = 16;

    fn random(num_tokens: usize, purpose: &str) -> Tensor<2> {
        let mut draws = SeededDraws::new(3, &[purpose]);
        let values: Vec<f32> =
            (0..num_tokens * HIDDEN).map(|_| 4.0 * draws.uniform() as f32 - 2.0).collect();
        Tensor::from_data(TensorData::new(values, [num_tokens, HIDDEN]), &Device::flex())
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[track_caller]
    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            // f32 sums in another order, of numbers near 1.
            assert!((a - b).abs() < 1e-5, "{a} for {b}");
        }
    }

    #[test]
    fn the_head_that_was_read_is_the_targets() {
        let target = tiny_draft(HIDDEN, 64);
        let hidden = random(40, "hidden");
        let expected = target.lm_head(hidden.clone().unsqueeze()).squeeze_dim::<2>(0);
        let found = hidden.matmul(LmHead::of(&target).weight);
        assert_close(&values(found), &values(expected));
    }

    #[test]
    fn value_and_gradient_are_those_of_autodiff_whatever_the_chunk() {
        let target = tiny_draft(HIDDEN, 64);
        let head = LmHead::of(&target);
        let (student, teacher) = (random(23, "student"), random(23, "teacher"));
        let leaf = student.clone().autodiff().require_grad();
        let probs = softmax(teacher.clone().matmul(head.weight.clone()), 1);
        let log_probs = log_softmax(leaf.clone().matmul(head.weight.clone()), 1);
        let direct = (log_probs * probs).sum().neg() / 23.0;
        let gradient = leaf.grad(&direct.backward()).unwrap();
        // Otherwise the comparison shows little.
        assert!(gradient.clone().abs().max().into_scalar::<f32>() > 1e-2);
        for loss_chunk in [1, 2, 7, 22, 23, 24, usize::MAX] {
            let (loss, found) =
                head.loss_and_gradient(student.clone(), teacher.clone(), loss_chunk);
            assert_close(&values(loss), &values(direct.clone()));
            assert_close(&values(found), &values(gradient.clone()));
        }
    }

    #[test]
    fn the_teacher_itself_costs_its_entropy_and_has_no_gradient() {
        let head = LmHead::of(&tiny_draft(HIDDEN, 64));
        let teacher = random(9, "teacher");
        let (loss, gradient) = head.loss_and_gradient(teacher.clone(), teacher.clone(), 4);
        let sums = values(head.score_sums(teacher.clone(), teacher, 4));
        assert_close(&values(gradient), &[0.0; 9 * HIDDEN]);
        assert_close(&[sums[0] / 9.0, sums[1] / 9.0], &[loss.into_scalar(); 2]);
        assert_close(&[sums[2], sums[3]], &[9.0, 9.0]);
    }

    #[test]
    fn the_sums_are_those_of_each_token_whatever_the_chunk() {
        let head = LmHead::of(&tiny_draft(HIDDEN, 64));
        let (student, teacher) = (random(12, "student"), random(12, "teacher"));
        let probs =
            |hidden: &Tensor<2>| values(softmax(hidden.clone().matmul(head.weight.clone()), 1));
        let (q, p) = (probs(&student), probs(&teacher));
        let vocab = q.len() / 12;
        let largest = |row: &[f32]| (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        let mut expected = [0.0_f32; 4];
        for (q, p) in q.chunks(vocab).zip(p.chunks(vocab)) {
            for (q, p) in q.iter().zip(p) {
                expected[0] -= p * q.ln();
                expected[1] -= p * p.ln();
                expected[3] += p.min(*q);
            }
            expected[2] += f32::from(largest(q) == largest(p));
        }
        for loss_chunk in [1, 5, 12] {
            let sums = values(head.score_sums(student.clone(), teacher.clone(), loss_chunk));
            for (found, expected) in sums.iter().zip(expected) {
                // Sums of twelve such.
                assert!((found - expected).abs() < 1e-4, "{sums:?} for {expected:?}");
            }
        }
    }

    #[test]
    fn far_apart_distributions_stay_finite() {
        let head = LmHead::of(&tiny_draft(HIDDEN, 64));
        let (student, teacher) = (random(5, "student") * 1e3, random(5, "teacher") * 1e3);
        let (loss, gradient) = head.loss_and_gradient(student, teacher, 2);
        assert!(loss.into_scalar::<f32>().is_finite());
        assert!(values(gradient).iter().all(|x| x.is_finite()));
    }
}

//! The distillation losses of a self-draft, and their gradients through the target's LM head.
//!
//! The logits of a whole batch do not fit in memory, and autodiff would hold several copies of them.
//! So the loss is computed a chunk of tokens at a time without autodiff: the gradient with respect to
//! the drafter's hidden states has a closed form, and the learner backpropagates from there. On the
//! CPU the formulas are passes over one token's logits (`on_host`), on other devices they are tensor
//! operations (`on_device`). Matrix products run in the LM head's type, the rest in f32.

mod on_device;
mod on_host;
#[cfg(test)]
mod tests;

use std::ops::Range;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use draftsmith_model::{CausalLm, DraftVocabulary, narrowed, soft_capped, vectors};
use serde::{Deserialize, Serialize};

/// The loss to minimise, a mean over supervised tokens. p is the target's distribution and q the
/// adapter's, both at temperature 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DistillationLoss {
    /// The cross-entropy −Σ p log q in nats (Kangaroo §3.1, eq. 3).
    CrossEntropy,
    /// ½ Σ |p − q| = 1 − Σ min(p, q), the fraction of sampled candidates that are rejected (SVIP,
    /// §2). Its gradient vanishes where p and q are far apart.
    TotalVariation,
    /// 0.1 times the cross-entropy plus 0.9 Σ |p − q| (DSpark).
    Dspark,
}

impl DistillationLoss {
    /// Returns the weights of the cross-entropy and of Σ |p − q| in the loss.
    pub(crate) fn weights(self) -> [f32; 2] {
        match self {
            Self::CrossEntropy => [1.0, 0.0],
            Self::TotalVariation => [0.0, 0.5],
            Self::Dspark => [0.1, 0.9],
        }
    }
}

/// The target's frozen LM head.
#[derive(Debug, Clone)]
pub(crate) struct LmHead {
    /// The weights, `[hidden, vocab]`.
    weight: Tensor<2>,
    /// The soft cap of this head's logits; `None` if there is none.
    soft_cap: Option<f32>,
    /// The soft cap of the logits of a drafter's own LM head; `None` if there is none.
    students_soft_cap: Option<f32>,
}

/// The outputs of an adapter or drafter in training (the student) at a batch's tokens.
#[derive(Debug, Clone)]
pub(crate) struct Student {
    /// The hidden states after the final norm, `[tokens, hidden]`.
    pub(crate) hidden: Tensor<2>,
    /// The student's own LM head, `[hidden, vocab]`; `None` if it uses the target's.
    pub(crate) own_head: Option<Tensor<2>>,
}

/// The teacher's labels for a batch's tokens.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "there is one per batch")]
pub(crate) enum Lesson {
    /// The target's distributions. Its LM head computes them from these hidden states after the
    /// final norm, `[tokens, hidden]`.
    States(Tensor<2>),
    /// The tokens of the response: each has probability 1.
    Tokens(Vec<u32>),
}

impl Lesson {
    fn num_tokens(&self) -> usize {
        match self {
            Self::States(states) => states.dims()[0],
            Self::Tokens(ids) => ids.len(),
        }
    }

    fn slice(&self, rows: Range<usize>) -> Self {
        match self {
            Self::States(states) => Self::States(states.clone().slice(rows)),
            Self::Tokens(ids) => Self::Tokens(ids[rows].to_vec()),
        }
    }
}

/// The logit of an impossible token. It is finite, so that its product with the probability 0 is not
/// NaN.
const NEVER: f32 = -1e30;

/// The supervised tokens of a batch, followed by padding.
#[derive(Debug, Clone)]
pub(crate) struct LessonTokens {
    /// The number of supervised tokens without padding, at least 1.
    pub(crate) num: usize,
    /// The mask of labelled tokens, `[tokens, 1]`: 1 for a token with a label, 0 for padding and
    /// for a token without a label. `None` if all have a label.
    pub(crate) are: Option<Tensor<2>>,
}

/// A student's outputs at a batch's tokens in one of its drafting steps.
#[derive(Debug, Clone)]
pub(crate) struct StudentStep {
    /// The hidden states after the final norm, `[tokens, hidden]`, without autodiff.
    pub(crate) hidden: Tensor<2>,
    /// The mask of the tokens in this step's loss, `[tokens, 1]`, as [`LessonTokens::are`].
    pub(crate) are: Option<Tensor<2>>,
    /// The factor for the sum of the step's token losses.
    pub(crate) share: f64,
}

/// A loss, and its gradients with respect to a student's tensors, without autodiff.
#[derive(Debug, Clone)]
pub(crate) struct LossAndGradients {
    /// The loss, `[1]`.
    pub(crate) loss: Tensor<1>,
    /// The gradient with respect to each step's hidden states, `[tokens, hidden]`.
    pub(crate) hidden: Vec<Tensor<2>>,
    /// The gradient with respect to the student's own LM head, `[hidden, vocab]` in f32, or those of
    /// each step's, one below another; `None` if it has none.
    pub(crate) own_head: Option<Tensor<2>>,
}

impl LossAndGradients {
    /// Multiplies the gradients of a student's outputs by `share`, and backpropagates them to a
    /// learner's parameters.
    ///
    /// # Shapes
    /// - outputs: `[tokens, hidden]` for each step, with autodiff
    /// - own_head: `[hidden, vocab]`
    pub(crate) fn backward<L: Module>(
        self,
        learner: &L,
        outputs: Vec<Tensor<2>>,
        own_head: Option<Tensor<2>>,
        share: f64,
    ) -> GradientsParams {
        // The gradient of Σ output ∘ g with respect to the output is g.
        let of_outputs = outputs.into_iter().zip(self.hidden);
        let of_outputs = of_outputs.map(|(output, gradient)| (output * (gradient * share)).sum());
        let of_head = own_head.zip(self.own_head).map(|(head, gradient)| {
            let gradient = (gradient * share).cast(head.dtype());
            (head * gradient).sum()
        });
        let sum = of_outputs.chain(of_head).reduce(|sum, term| sum + term);
        let sum = sum.expect("a student has a step");
        GradientsParams::from_grads(sum.backward(), learner)
    }
}

/// The teacher's probabilities for a chunk of tokens.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
enum Probabilities {
    /// Probabilities in host memory: `vocab` numbers for each token.
    Host(Vec<f32>),
    /// Probabilities on another device, `[tokens, vocab]`.
    Device(Tensor<2>),
}

impl Probabilities {
    fn of(logits: Tensor<2>) -> Self {
        if !vectors::reach(&logits.device()) {
            return Self::Device(on_device::probabilities(logits));
        }
        let [_, vocab_size] = logits.dims();
        Self::Host(on_host::probabilities(vectors::values(logits), vocab_size))
    }
}

/// The number of sums of [`LmHead::score_sums`].
pub(crate) const NUM_SCORES: usize = 4;

/// Computes the sum of a chunk's losses times `share`, and its gradient with respect to the student's logits.
///
/// # Shapes
/// - student: logits, `[tokens, vocab]`
/// - are: `[tokens, 1]`, as [`LessonTokens::are`]
/// - output: `[1]` and `[tokens, vocab]`
fn loss_and_gradient(
    loss: DistillationLoss,
    student: Tensor<2>,
    teacher: &Probabilities,
    are: Option<Tensor<2>>,
    share: f64,
) -> (Tensor<1>, Tensor<2>) {
    match teacher {
        Probabilities::Host(teacher) => {
            let (shape, device) = (student.dims(), student.device());
            let mut student = vectors::values(student);
            let shares = shares(are, shape[0], share);
            let sum = on_host::loss_and_gradient(loss, &mut student, teacher, &shares);
            let loss = vectors::tensor(vec![sum as f32], [1], &device);
            (loss, vectors::tensor(student, shape, &device))
        }
        Probabilities::Device(teacher) => {
            let (losses, gradient) = on_device::losses_and_gradient(loss, student, teacher.clone());
            match are.map(|are| are * share) {
                Some(shares) => ((losses * shares.clone()).sum(), gradient * shares),
                None => (losses.sum() * share, gradient * share),
            }
        }
    }
}

/// Returns the factor of each token's loss: `share` for a token, 0 for padding.
fn shares(are: Option<Tensor<2>>, num_tokens: usize, share: f64) -> Vec<f32> {
    are.map_or_else(|| vec![share as f32; num_tokens], |are| vectors::values(are * share))
}

impl LmHead {
    /// Takes the LM head of a target, which has no autodiff.
    pub(crate) fn of(target: &CausalLm) -> Self {
        let soft_cap = target.config().spec.logit_soft_cap;
        Self { weight: target.lm_head_weight(), soft_cap, students_soft_cap: soft_cap }
    }

    /// Returns the weights, `[hidden, vocab]`.
    pub(crate) fn weight(&self) -> Tensor<2> {
        self.weight.clone()
    }

    /// Removes the logit soft cap for drafters' own LM heads.
    pub(crate) fn with_uncapped_students(self) -> Self {
        Self { students_soft_cap: None, ..self }
    }

    /// Narrows the head to a draft vocabulary.
    pub(crate) fn narrowed(self, vocabulary: &DraftVocabulary) -> Self {
        Self { weight: narrowed(self.weight, vocabulary), ..self }
    }

    /// Sums a student's losses over its steps and computes the gradients, without autodiff. p =
    /// softmax(head(teacher)) and q = softmax(head(hidden)); for q, the student's own LM head is
    /// used if it has one, or that of the step. All steps share the teacher's distributions.
    ///
    /// The computation takes `loss_chunk` tokens at a time, which bounds memory and does not change
    /// the result.
    pub(crate) fn loss_and_gradients(
        &self,
        loss: DistillationLoss,
        steps: &[StudentStep],
        own_head: Option<Tensor<2>>,
        teacher: &Lesson,
        loss_chunk: usize,
    ) -> LossAndGradients {
        let own_heads = heads_of_steps(own_head, &steps[0].hidden);
        let has_own = own_heads[0].is_some();
        let heads: Vec<Self> = own_heads.into_iter().map(|own| self.students(own)).collect();
        let transposed = heads.iter().map(|head| head.weight.clone().transpose());
        let transposed: Vec<Tensor<2>> = transposed.collect();
        let device = transposed[0].device();
        let mut losses = Vec::new();
        let mut gradients = vec![Vec::new(); steps.len()];
        let mut heads_gradients: Vec<Option<Tensor<2>>> = vec![None; heads.len()];
        for rows in chunks(teacher.num_tokens(), loss_chunk) {
            let teacher = Probabilities::of(self.taught(teacher.slice(rows.clone()), &device));
            for (nth, (step, gradients)) in steps.iter().zip(&mut gradients).enumerate() {
                let nth = nth % heads.len();
                let students_head = &heads[nth];
                let hidden = step.hidden.clone().slice(rows.clone());
                let are = step.are.clone().map(|are| are.slice(rows.clone()));
                let logits = students_head.logits(hidden.clone());
                let slopes = students_head.soft_cap.map(|cap| {
                    // The slope of the soft cap is 1 − tanh².
                    (logits.clone() / cap).square().neg() + 1.0
                });
                let (loss, gradient) = loss_and_gradient(loss, logits, &teacher, are, step.share);
                losses.push(loss);
                let gradient = match slopes {
                    Some(slopes) => gradient * slopes,
                    None => gradient,
                };
                let gradient = gradient.cast(self.weight.dtype());
                if has_own {
                    let more = hidden.transpose().matmul(gradient.clone()).cast(FloatDType::F32);
                    heads_gradients[nth] = Some(match heads_gradients[nth].take() {
                        Some(sum) => sum + more,
                        None => more,
                    });
                }
                gradients.push(gradient.matmul(transposed[nth].clone()));
            }
        }
        LossAndGradients {
            loss: Tensor::cat(losses, 0).sum(),
            hidden: gradients.into_iter().map(|parts| Tensor::cat(parts, 0)).collect(),
            own_head: heads_gradients
                .into_iter()
                .collect::<Option<_>>()
                .map(|all| Tensor::cat(all, 0)),
        }
    }

    /// Sums four scores over the tokens: −Σ p log q and −Σ p log p in nats, 1 if p and q have the
    /// same most probable token, and Σ min(p, q).
    ///
    /// # Shapes
    /// - output: `[NUM_SCORES]`
    pub(crate) fn score_sums(
        &self,
        student: Student,
        teacher: &Lesson,
        tokens: &LessonTokens,
        loss_chunk: usize,
    ) -> Tensor<1> {
        let Student { hidden, own_head } = student;
        let device = hidden.device();
        let students_head = self.students(own_head);
        let sums = chunks(teacher.num_tokens(), loss_chunk).map(|rows| {
            let are = tokens.are.clone().map(|are| are.slice(rows.clone()));
            let student = students_head.logits(hidden.clone().slice(rows.clone()));
            let teacher = self.taught(teacher.slice(rows), &device);
            let [num_tokens, vocab_size] = student.dims();
            if vectors::reach(&device) {
                let [student, teacher] = [student, teacher].map(vectors::values);
                let shares = shares(are, num_tokens, 1.0);
                let sums = on_host::score_sums(student, teacher, vocab_size, &shares);
                let sums = sums.map(|sum| sum as f32).to_vec();
                vectors::tensor(sums, [NUM_SCORES], &device)
            } else {
                on_device::score_sums(student, teacher, are)
            }
        });
        sums.reduce(|sums, more| sums + more).expect("there is a token")
    }

    /// Finds the student's most probable tokens, `[tokens]`, as numbers in the LM head's
    /// vocabulary.
    pub(crate) fn most_probable(&self, student: Student, loss_chunk: usize) -> Tensor<1, Int> {
        let head = self.students(student.own_head);
        let [num_tokens, _] = student.hidden.dims();
        let chunks = chunks(num_tokens, loss_chunk).map(|rows| {
            head.logits(student.hidden.clone().slice(rows)).argmax(1).squeeze_dim::<1>(1)
        });
        Tensor::cat(chunks.collect(), 0)
    }

    /// Returns the student's own LM head, or else this one.
    fn students(&self, own_head: Option<Tensor<2>>) -> Self {
        match own_head {
            Some(weight) => Self { weight, soft_cap: self.students_soft_cap, ..self.clone() },
            None => self.clone(),
        }
    }

    /// Computes the teacher's logits, `[tokens, vocab]` in f32.
    fn taught(&self, lesson: Lesson, device: &Device) -> Tensor<2> {
        match lesson {
            Lesson::States(states) => self.logits(states),
            Lesson::Tokens(ids) => {
                let [_, vocab_size] = self.weight.dims();
                let mut logits = vec![NEVER; ids.len() * vocab_size];
                for (row, id) in logits.chunks_exact_mut(vocab_size).zip(&ids) {
                    row[*id as usize] = 0.0;
                }
                vectors::tensor(logits, [ids.len(), vocab_size], device)
            }
        }
    }

    /// Computes logits of hidden states, in f32.
    ///
    /// # Shapes
    /// - hidden: `[tokens, hidden]`, in the head's type
    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let logits = hidden.matmul(self.weight.clone()).cast(FloatDType::F32);
        soft_capped(logits, self.soft_cap)
    }
}

/// Divides a student's own LM head into those of its steps, if there is one for each, one below
/// another. `hidden` are the inputs of one. Otherwise returns the only one.
pub(crate) fn heads_of_steps(
    own_head: Option<Tensor<2>>,
    hidden: &Tensor<2>,
) -> Vec<Option<Tensor<2>>> {
    let [_, width] = hidden.dims();
    let of_steps = |heads: Tensor<2>| heads.split(width, 0).into_iter().map(Some).collect();
    own_head.map_or_else(|| vec![None], of_steps)
}

/// Divides a batch's tokens, including padding, into chunks of `loss_chunk`.
fn chunks(num_tokens: usize, loss_chunk: usize) -> impl Iterator<Item = Range<usize>> {
    (0..num_tokens)
        .step_by(loss_chunk)
        .map(move |start| start..num_tokens.min(start.saturating_add(loss_chunk)))
}

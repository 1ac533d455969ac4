//! The learner of an adapter: training and validation steps, and scores.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use draftsmith_model::Adapter;
use serde::{Deserialize, Serialize};

use crate::data::TrainingBatch;
use crate::error::{Section, TrainError, to_host};
use crate::lessons::batches::{LessonBatch, at_positions};
use crate::lessons::distillation::{DistillationLoss, NUM_SCORES, Student};
use crate::run::member::{Score, Trainee};
use crate::self_draft::loss_and_gradients;

/// An adapter with the settings of its training steps. The target is not part of it, because
/// everything in it is trained and saved.
#[derive(Module, Debug)]
pub(crate) struct AdapterLearner {
    pub(crate) adapter: Adapter,
    /// The index of the adapter's exit layer in [`LessonBatch::features`].
    #[module(skip)]
    pub(crate) exit: usize,
    #[module(skip)]
    pub(crate) loss: DistillationLoss,
    #[module(skip)]
    pub(crate) loss_chunk: usize,
}

/// The score sums of a validation batch.
#[derive(Debug)]
pub(crate) struct AdapterSums {
    /// The sums, `[NUM_SCORES]`: see
    /// [`LmHead::score_sums`](crate::lessons::distillation::LmHead::score_sums).
    sums: Tensor<1>,
    num_tokens: usize,
}

/// The score sums of a validation so far.
#[derive(Debug, Default)]
pub(crate) struct AdapterTally {
    sums: [f64; NUM_SCORES],
    num_tokens: usize,
}

/// The scores of one adapter on one set of tokens, against the target's raw distribution (T = 1).
/// Means over no tokens are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterScores {
    /// The number of tokens predicted.
    pub num_tokens: usize,
    /// The mean of −Σ p log q in nats, where p is the target's distribution and q the adapter's.
    pub cross_entropy: f64,
    /// The mean of −Σ p log p in nats: the lowest possible `cross_entropy`.
    pub target_entropy: f64,
    /// The fraction of tokens for which the target and the adapter have the same most probable
    /// token.
    pub agreement: f64,
    /// The mean of Σ min(p, q): the expected acceptance probability of a token drawn from q.
    pub overlap: f64,
}

impl AdapterScores {
    /// Computes the mean KL(p ‖ q) in nats: the part of the cross-entropy that training can remove.
    pub fn kl(&self) -> f64 {
        self.cross_entropy - self.target_entropy
    }

    /// Returns the mean of the given loss.
    pub fn loss(&self, loss: DistillationLoss) -> f64 {
        // Σ |p − q| = 2 (1 − Σ min(p, q))
        let [cross_entropy, distance] = loss.weights().map(f64::from);
        cross_entropy * self.cross_entropy + distance * 2.0 * (1.0 - self.overlap)
    }
}

impl AdapterLearner {
    /// Computes the adapter's outputs at the batch's supervised positions, in the features' type.
    fn student(&self, batch: &LessonBatch) -> Student {
        let features = batch.features[self.exit].clone();
        let adapter = self.adapter.to_dtype(features.dtype().into());
        Student {
            hidden: at_positions(adapter.forward(features), batch.supervised.clone()),
            own_head: adapter.own_head(),
        }
    }
}

impl Trainee for AdapterLearner {
    type Content = LessonBatch;
    type Part = Adapter;
    type Output = AdapterSums;
    type Tally = AdapterTally;
    type Scores = AdapterScores;

    const SECTION: Section = "adapter";
    const FROZEN: &'static str = "target";
    const SCORES: &'static [Score<AdapterScores>] = &[
        Score {
            name: "cross-entropy",
            higher_is_better: false,
            pick: |scores| scores.cross_entropy,
        },
        Score { name: "KL", higher_is_better: false, pick: AdapterScores::kl },
        Score { name: "agreement", higher_is_better: true, pick: |scores| scores.agreement },
        Score { name: "overlap", higher_is_better: true, pick: |scores| scores.overlap },
    ];

    fn part(self) -> Adapter {
        self.adapter
    }

    fn train_step(&self, batch: &TrainingBatch<LessonBatch>) -> (Tensor<1>, GradientsParams) {
        let Student { hidden, own_head } = self.student(&batch.content);
        let how = (self.loss, self.loss_chunk);
        loss_and_gradients(self, batch, (vec![hidden], own_head), 1.0, how)
    }

    fn validation_step(&self, batch: &TrainingBatch<LessonBatch>) -> AdapterSums {
        let LessonBatch { lm_head, teacher, tokens, .. } = &batch.content;
        let Student { hidden, own_head } = self.student(&batch.content);
        let own_head = own_head.map(Tensor::without_autodiff);
        let student = Student { hidden: hidden.without_autodiff(), own_head };
        let sums = lm_head.score_sums(student, teacher, tokens, self.loss_chunk);
        AdapterSums { sums, num_tokens: tokens.num }
    }

    fn tally(&self) -> AdapterTally {
        AdapterTally::default()
    }

    /// Adds a batch's sums to the tally, and returns the mean cross-entropy as the batch's loss.
    fn count(output: AdapterSums, tally: &mut AdapterTally) -> Result<Option<f64>, TrainError> {
        let AdapterSums { sums, num_tokens } = output;
        let sums = to_host(sums)?;
        for (total, sum) in tally.sums.iter_mut().zip(&sums) {
            *total += f64::from(*sum);
        }
        tally.num_tokens += num_tokens;
        let is_finite = sums.iter().all(|sum| sum.is_finite());
        Ok(is_finite.then(|| f64::from(sums[0]) / num_tokens as f64))
    }

    fn scores(tally: AdapterTally) -> AdapterScores {
        let [cross_entropy, target_entropy, agreement, overlap] =
            tally.sums.map(|sum| sum / tally.num_tokens as f64);
        let num_tokens = tally.num_tokens;
        AdapterScores { num_tokens, cross_entropy, target_entropy, agreement, overlap }
    }

    fn to_minimise(&self, scores: &AdapterScores) -> f64 {
        scores.loss(self.loss)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::activation::{log_softmax, softmax};
    use draftsmith_model::{AdapterArchitecture, AdapterConfig, Lengths};

    use super::*;
    use crate::data::BatchSource;
    use crate::lessons::Teaching;
    use crate::lessons::batches::{FrozenTarget, LessonSource};
    use crate::lessons::distillation::Lesson;
    use crate::lessons::rows::LessonRow;
    use crate::tests::pair::{gradients_of, responses, tiny_draft};

    #[test]
    fn chunked_gradients_equal_those_of_the_whole_loss() {
        for architecture in AdapterArchitecture::ALL {
            for lengths in [Lengths::AsGiven, Lengths::InBuckets] {
                check_gradients(architecture, 1, lengths);
            }
        }
        check_gradients(AdapterArchitecture::DecoderLayer, 3, Lengths::AsGiven);
    }

    fn check_gradients(architecture: AdapterArchitecture, num_layers: usize, lengths: Lengths) {
        let target = tiny_draft(16, 64);
        let rows = responses(6, 20, 5)
            .iter()
            .map(|row| LessonRow::new(row, 0, 64).unwrap().into())
            .collect();
        let targets = FrozenTarget::new(target.clone(), None).into();
        let (exit_layers, room) = (vec![1], Arc::default());
        let source = LessonSource {
            targets,
            exit_layers,
            reads_tokens: false,
            rows,
            batch_size: 7,
            lengths,
            room,
            stored: None,
            teaching: Teaching::Target,
        };
        let config = AdapterConfig::new(target.config(), 1).unwrap();
        let config = AdapterConfig { architecture, ..config }.with_layers(num_layers);
        let mut learner = AdapterLearner {
            adapter: config.init(&target.device().autodiff()),
            exit: 0,
            loss: DistillationLoss::CrossEntropy,
            loss_chunk: 7,
        };
        let batches: Vec<TrainingBatch<LessonBatch>> =
            source.step_batches(1, &[(0..6).collect::<Vec<_>>()]).collect();
        assert_eq!(batches.len(), if lengths == Lengths::AsGiven { 2 } else { 1 });
        assert!((batches.iter().map(|batch| batch.step_share).sum::<f64>() - 1.0).abs() < 1e-12);
        for step in &batches {
            let batch = &step.content;
            let is_padded = lengths == Lengths::InBuckets;
            assert_eq!(batch.features[0].dims()[0], if is_padded { 7 } else { 3 });
            assert_eq!(batch.supervised.dims()[0] > batch.tokens.num, is_padded);
            let mut student = learner.student(batch);
            student.hidden = student.hidden.slice(0..batch.tokens.num);
            let head = student.own_head.unwrap_or_else(|| target.lm_head_weight());
            let log_probs = log_softmax(student.hidden.matmul(head), 1);
            let Lesson::States(teacher) = batch.teacher.clone() else {
                panic!("the teacher has states")
            };
            let teacher = teacher.slice(0..batch.tokens.num);
            let logits = target.lm_head(teacher.unsqueeze()).squeeze_dim::<2>(0);
            let num_tokens = batch.tokens.num as f64;
            assert!(num_tokens > 16.0, "too few tokens");
            let direct = (log_probs * softmax(logits, 1)).sum().neg() / num_tokens;
            let expected = direct.clone() * step.step_share;
            let expected = GradientsParams::from_grads(expected.backward(), &learner);
            let expected = gradients_of(&learner, &expected);
            let direct: f32 = direct.into_scalar();
            let largest = expected.iter().fold(0.0_f32, |most, grad| most.max(grad.abs()));
            assert!(largest > 1e-3, "the gradients are too small to compare: {largest}");
            for loss_chunk in [1, 7, 1000] {
                learner.loss_chunk = loss_chunk;
                let (loss, gradients) = learner.train_step(step);
                let loss: f32 = loss.into_scalar();
                // f32 sums in another order.
                assert!((loss - direct).abs() < 1e-5, "{loss} {direct}");
                for (found, expected) in gradients_of(&learner, &gradients).iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
                }
            }
        }
    }
}

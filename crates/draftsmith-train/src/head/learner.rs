//! The learner of a head: its loss, training and validation steps, and scores.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::activation::log_sigmoid;
use draftsmith_model::AcceptanceHead;
use draftsmith_theory::{HeadMetrics, HeadScores};

use crate::data::TrainingBatch;
use crate::error::{Result, Section, to_host};
use crate::head::batches::HeadBatch;
use crate::run::member::{Score, Trainee};

/// A head with the settings of its training steps. The draft is not part of it, because everything
/// in it is trained and saved.
#[derive(Module, Debug)]
pub(crate) struct HeadLearner {
    pub(crate) head: AcceptanceHead,
    #[module(skip)]
    pub(crate) rejection_weight: f64,
}

/// The outputs of a head for a batch.
#[derive(Debug)]
pub(crate) struct HeadOutput {
    /// The loss, `[1]`.
    pub(crate) loss: Tensor<1>,
    /// The logit of acceptance minus that of rejection, `[labels]`.
    pub(crate) logit: Tensor<1>,
    /// The acceptance probabilities that the head learns, `[labels]`.
    pub(crate) labels: Tensor<1>,
    /// The number of labels without padding.
    pub(crate) num_labels: usize,
}

impl HeadLearner {
    fn output(&self, batch: &TrainingBatch<HeadBatch>) -> HeadOutput {
        let HeadBatch { features, labels, is_label } = batch.content.clone();
        // The head computes in the features' type, but its logits are f32.
        let head = self.head.to_dtype(features.hidden.dtype().into());
        let logit = head.acceptance_logit(features);
        let loss = weighted_bce(logit.clone(), labels.clone(), is_label, self.rejection_weight);
        HeadOutput { loss, logit, labels, num_labels: batch.num_supervised }
    }
}

impl Trainee for HeadLearner {
    type Content = HeadBatch;
    type Part = AcceptanceHead;
    type Output = HeadOutput;
    type Tally = HeadMetrics;
    type Scores = HeadScores;

    const SECTION: Section = "head";
    const FROZEN: &'static str = "draft";
    const SCORES: &'static [Score<HeadScores>] = &[
        Score::lower("KL", |scores| scores.kl),
        Score::lower("unshifted KL", HeadScores::comparable_kl),
        Score::lower("BCE", |scores| scores.bce),
        Score::higher("AUROC", |scores| scores.auroc.unwrap_or(f64::NAN)),
        Score::lower("Brier", |scores| scores.brier),
        Score::lower("ECE", |scores| scores.ece),
    ];

    fn part(self) -> AcceptanceHead {
        self.head
    }

    fn train_step(&self, batch: &TrainingBatch<HeadBatch>) -> (Tensor<1>, GradientsParams) {
        let HeadOutput { loss, .. } = self.output(batch);
        // Each batch's loss is multiplied by its share, so that the accumulated gradient of a step
        // is that of the mean loss.
        let gradients = (loss.clone() * batch.step_share).backward();
        (loss.without_autodiff(), GradientsParams::from_grads(gradients, self))
    }

    fn validation_step(&self, batch: &TrainingBatch<HeadBatch>) -> HeadOutput {
        self.output(batch)
    }

    fn tally(&self) -> HeadMetrics {
        HeadMetrics::unshifting(self.rejection_weight)
    }

    fn count(output: HeadOutput, tally: &mut HeadMetrics) -> Result<Option<f64>> {
        let HeadOutput { loss, logit, labels, num_labels } = output;
        let num_padded = labels.dims()[0];
        let numbers = to_host(Tensor::cat(vec![loss, logit, labels], 0))?;
        let logits = &numbers[1..][..num_labels];
        if !logits.iter().all(|logit| logit.is_finite()) {
            return Ok(None);
        }
        for (logit, label) in logits.iter().zip(&numbers[1 + num_padded..]) {
            let predicted_prob = 1.0 / (1.0 + (-f64::from(*logit)).exp());
            tally.update(predicted_prob, f64::from(*label));
        }
        Ok(Some(f64::from(numbers[0])))
    }

    fn scores(tally: HeadMetrics) -> HeadScores {
        tally.finish()
    }

    /// Returns the validation KL without the shift that the rejection weight causes. A sweep
    /// compares heads by the same number, so the best epoch is the one that a sweep would choose.
    fn to_minimise(&self, scores: &HeadScores) -> f64 {
        scores.comparable_kl()
    }
}

/// Computes the loss of SpecDec++ in nats: binary cross-entropy with soft labels and a weight for
/// rejection.
///
/// [Σ w_rej (1 − y)(−log P(reject)) + y (−log P(accept))] / [w_rej Σ (1 − y) + Σ y] over the labels
/// of one batch, as in the authors' code (the paper prints only the numerator).
///
/// The head's softmax over two logits equals a sigmoid of their difference.
///
/// # Shapes
/// - logit: `[labels]`, the logit of acceptance minus that of rejection; at least one
/// - labels: `[labels]`, acceptance probabilities; 0 for padding
/// - is_label: `[labels]`, 1 for a label, 0 for padding; `None` without padding
/// - output: `[1]`
pub(crate) fn weighted_bce(
    logit: Tensor<1>,
    labels: Tensor<1>,
    is_label: Option<Tensor<1>>,
    rejection_weight: f64,
) -> Tensor<1> {
    let mut rejected = (labels.clone().neg() + 1.0) * rejection_weight;
    if let Some(is_label) = is_label {
        rejected = rejected * is_label;
    }
    let log_likelihood =
        log_sigmoid(logit.clone()) * labels.clone() + log_sigmoid(logit.neg()) * rejected.clone();
    log_likelihood.sum().neg() / (rejected + labels).sum()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::{
        AcceptanceHeadConfig, DrafterModel, HeadForm, HeadInput, HeadReads, Lengths,
    };

    use super::*;
    use crate::data::{BatchSettings, Loader};
    use crate::head::batches::HeadSource;
    use crate::head::rows::TrainingRow;
    use crate::head::settings::MixedLabels;
    use crate::tests::pair::{gradients_of, responses, tiny_draft};

    #[test]
    fn padding_changes_neither_losses_nor_gradients() {
        let reads = HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy]);
        let source = HeadSource {
            drafts: DrafterModel::from(&tiny_draft(16, 64)).into(),
            reads: reads.clone(),
            rows: responses(7, 12, 5)
                .iter()
                .map(|row| TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap().into())
                .collect(),
            seed: 7,
            mixing_ratio: 0.15,
            batch_size: 3,
            lengths: Lengths::AsGiven,
            stored: None,
        };
        let settings = BatchSettings { seed: 7, batch_size: 3, gradient_accumulation: 2 };
        let config = AcceptanceHeadConfig { reads, ..AcceptanceHeadConfig::new(16, 2, false) };
        let learner =
            HeadLearner { head: config.init(&Device::flex().autodiff()), rejection_weight: 6.0 };
        let batches = |lengths| -> Vec<TrainingBatch<HeadBatch>> {
            let source = HeadSource { lengths, ..source.clone() };
            Loader { source, settings }.batches(1, 0).collect()
        };
        let (given, padded) = (batches(Lengths::AsGiven), batches(Lengths::InBuckets));
        assert_eq!(given.len(), 3);
        for (given, padded) in given.into_iter().zip(padded) {
            assert_eq!(given.num_supervised, padded.num_supervised);
            assert!(padded.content.labels.dims()[0] > padded.num_supervised);
            let [expected, found] = [given, padded].map(|batch| {
                let (loss, gradients) = learner.train_step(&batch);
                let gradient = gradients_of(&learner, &gradients);
                let mut tally = learner.tally();
                let counted =
                    HeadLearner::count(learner.valid().validation_step(&batch), &mut tally);
                let loss: f32 = loss.into_scalar();
                assert_eq!(counted.unwrap(), Some(f64::from(loss)));
                (loss, HeadLearner::scores(tally).kl as f32, gradient)
            });
            assert!(found.2.iter().any(|gradient| gradient.abs() > 1e-3));
            // f32 sums in another order.
            assert!((found.0 - expected.0).abs() < 1e-5 && (found.1 - expected.1).abs() < 1e-5);
            for (found, expected) in found.2.iter().zip(&expected.2) {
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
    }

    /// Computes the epoch score that the learner minimises, if all labels and all predictions are equal.
    fn to_minimise(rejection_weight: f64, predicted_prob: f64, label: f64) -> f64 {
        let learner = HeadLearner {
            head: AcceptanceHeadConfig::new(4, 1, true).init(&Device::flex()),
            rejection_weight,
        };
        let mut tally = learner.tally();
        tally.update(predicted_prob, label);
        learner.to_minimise(&HeadLearner::scores(tally))
    }

    #[test]
    fn the_epoch_score_is_lowest_at_the_minimum_of_the_weighted_loss() {
        for label in [0.2, 0.5, 0.9] {
            for weight in [0.5, 1.0, 6.0, 12.0] {
                // The minimum of the weighted loss, from its derivative.
                let least = label / (label + weight * (1.0 - label));
                let best = to_minimise(weight, least, label);
                assert!(best.abs() < 1e-12, "{best} at weight {weight}");
                for other in [label, 0.5 * least, 0.5 * (1.0 + least)] {
                    let is_other = (other - least).abs() > 1e-12;
                    assert!(!is_other || to_minimise(weight, other, label) > 1e-3);
                }
            }
        }
    }

    fn bce(logits: &[f32], labels: &[f32], weight: f64) -> f32 {
        let device = Device::flex();
        let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, &device);
        weighted_bce(tensor(logits), tensor(labels), None, weight).into_scalar()
    }

    #[track_caller]
    fn close(found: f32, expected: f64) {
        // A few f32 roundings of numbers of this size.
        let off = (f64::from(found) - expected).abs();
        assert!(off < 1e-6 * expected.abs().max(1.0), "{found} != {expected}");
    }

    #[test]
    fn the_loss_equals_a_hand_computed_one() {
        // P(accept) is ½ at logit 0 and ¾ at ln 3; w = 6.
        // Row 1, y = 1: 1 · ln 2, weight 1. Row 2, y = 0: 6 · ln 4, weight 6.
        // Row 3, y = ¼ at ln 3: 6 · ¾ · ln 4 + ¼ · ln (4/3), weight 4.75.
        let ln3 = 3_f64.ln();
        let numerator =
            2_f64.ln() + 6.0 * 4_f64.ln() + 4.5 * 4_f64.ln() + 0.25 * (4.0_f64 / 3.0).ln();
        let denominator = 1.0 + 6.0 + 4.5 + 0.25;
        close(bce(&[0.0, ln3 as f32, ln3 as f32], &[1.0, 0.0, 0.25], 6.0), numerator / denominator);
    }

    #[test]
    fn with_weight_1_the_loss_is_the_mean_cross_entropy() {
        let rows: [(f64, f64); 3] = [(0.3, 0.2), (-1.0, 0.9), (2.0, 0.5)];
        let mean = rows.iter().map(|(z, y)| {
            let accept = 1.0 / (1.0 + (-z).exp());
            -(y * accept.ln() + (1.0 - y) * (1.0 - accept).ln())
        });
        close(bce(&[0.3, -1.0, 2.0], &[0.2, 0.9, 0.5], 1.0), mean.sum::<f64>() / 3.0);
    }

    #[test]
    fn a_single_label_is_normalised_by_its_weight() {
        for weight in [1.0, 6.0, 12.0] {
            close(bce(&[0.0], &[0.0], weight), 2_f64.ln());
            close(bce(&[0.0], &[1.0], weight), 2_f64.ln());
        }
    }

    #[test]
    fn certain_wrong_predictions_have_a_finite_loss() {
        close(bce(&[200.0, -200.0], &[0.0, 1.0], 1.0), 200.0);
        close(bce(&[200.0, -200.0], &[1.0, 0.0], 1.0), 0.0);
    }

    #[test]
    fn the_gradient_is_the_weighted_difference() {
        // d loss / d z = [(w (1 − y) + y) σ(z) − y] / Σ weights.
        let device = Device::flex().autodiff();
        let (z, y, weight) = ([0.4_f64, -1.5, 3.0], [0.1_f64, 0.7, 1.0], 6.0);
        let logit = Tensor::<1>::from_floats(z.map(|v| v as f32), &device).require_grad();
        let labels = Tensor::<1>::from_floats(y.map(|v| v as f32), &Device::flex());
        let grads = weighted_bce(logit.clone(), labels, None, weight).backward();
        let found: Vec<f32> = logit.grad(&grads).unwrap().into_data().try_into_vec().unwrap();
        let weights: Vec<f64> = y.iter().map(|y| weight * (1.0 - y) + y).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..3 {
            let sigmoid = 1.0 / (1.0 + (-z[i]).exp());
            close(found[i], (weights[i] * sigmoid - y[i]) / total);
        }
    }
}

//! The head as burn-train's learner sees it: one batch forward and back.

use burn::module::Module;
use burn::tensor::{ExecutionError, Tensor};
use burn_train::metric::{Adaptor, LossInput};
use burn_train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};
use draftsmith_model::AcceptanceHead;
use draftsmith_theory::{HeadMetrics, HeadScores};

use crate::error::{TrainError, to_host};
use crate::head::batches::HeadBatch;
use crate::head::loss::weighted_bce;
use crate::log::metrics::Score;
use crate::run::clipping::Clipping;
use crate::run::trainee::Trainee;
use crate::section::Section;

/// The head, and the settings that its steps need. The draft is not in here: what is in the
/// learner is trained and saved.
#[derive(Module, Debug)]
pub(crate) struct HeadLearner {
    pub(crate) head: AcceptanceHead,
    #[module(skip)]
    pub(crate) rejection_weight: f64,
    #[module(skip)]
    pub(crate) clipping: Clipping,
    /// The recipe's, for messages.
    #[module(skip)]
    pub(crate) section: Section,
}

/// What a batch gives back. No tensor of it holds on to the graph.
#[derive(Debug, Clone)]
pub(crate) struct HeadOutput {
    /// `[1]`
    pub(crate) loss: Tensor<1>,
    /// `[labels]`: accept minus reject.
    pub(crate) logit: Tensor<1>,
    /// `[labels]`: acceptance probabilities.
    pub(crate) labels: Tensor<1>,
    /// How many there are; what follows is padding.
    pub(crate) num_labels: usize,
}

impl HeadLearner {
    fn output(&self, batch: &HeadBatch) -> HeadOutput {
        // In the features' type; logits are f32.
        let head = self.head.to_dtype(batch.features.hidden.dtype().into());
        let logit = head.acceptance_logit(batch.features.clone());
        let loss = weighted_bce(
            logit.clone(),
            batch.labels.clone(),
            batch.is_label.clone(),
            self.rejection_weight,
        );
        HeadOutput { loss, logit, labels: batch.labels.clone(), num_labels: batch.num_labels }
    }
}

impl TrainStep for HeadLearner {
    type Input = HeadBatch;
    type Output = HeadOutput;

    fn step(&self, batch: HeadBatch) -> TrainOutput<HeadOutput> {
        let output = self.output(&batch);
        // Accumulation sums: each batch brings its share, so that a step has the mean.
        let grads = (output.loss.clone() * batch.step_share).backward();
        TrainOutput::new(self, grads, output.without_graph())
    }
}

impl InferenceStep for HeadLearner {
    type Input = HeadBatch;
    type Output = HeadOutput;

    fn step(&self, batch: HeadBatch) -> HeadOutput {
        self.output(&batch).without_graph()
    }
}

impl Trainee for HeadLearner {
    type Batch = HeadBatch;
    type Part = AcceptanceHead;
    type Tally = HeadMetrics;
    type Scores = HeadScores;

    const FROZEN: &'static str = "draft";
    const SCORES: &'static [Score<HeadScores>] = &[
        Score { name: "KL", higher_is_better: false, pick: |scores| scores.kl },
        Score { name: "unshifted KL", higher_is_better: false, pick: HeadScores::comparable_kl },
        Score { name: "BCE", higher_is_better: false, pick: |scores| scores.bce },
        Score {
            name: "AUROC",
            higher_is_better: true,
            pick: |scores| scores.auroc.unwrap_or(f64::NAN),
        },
        Score { name: "Brier", higher_is_better: false, pick: |scores| scores.brier },
        Score { name: "ECE", higher_is_better: false, pick: |scores| scores.ece },
    ];

    fn section(&self) -> Section {
        self.section
    }

    fn part(self) -> AcceptanceHead {
        self.head
    }

    fn clipping(&self) -> Clipping {
        self.clipping
    }

    fn training_loss(output: &HeadOutput) -> Tensor<1> {
        output.loss.clone()
    }

    fn tally(&self) -> HeadMetrics {
        HeadMetrics::unshifting(self.rejection_weight)
    }

    fn count(output: &HeadOutput, tally: &mut HeadMetrics) -> Result<bool, TrainError> {
        let mut logits = to_host(output.logit.clone())?;
        logits.truncate(output.num_labels);
        if !logits.iter().all(|logit| logit.is_finite()) {
            return Ok(false);
        }
        for (logit, label) in logits.into_iter().zip(to_host(output.labels.clone())?) {
            let predicted_prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
            tally.update(predicted_prob, f64::from(label));
        }
        Ok(true)
    }

    fn scores(tally: HeadMetrics) -> HeadScores {
        tally.finish()
    }

    fn to_minimise(&self, scores: &HeadScores) -> f64 {
        scores.comparable_kl()
    }
}

impl HeadOutput {
    fn without_graph(self) -> Self {
        Self { loss: self.loss.without_autodiff(), logit: self.logit.without_autodiff(), ..self }
    }
}

impl ItemLazy for HeadOutput {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<LossInput> for HeadOutput {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::{
        AcceptanceHeadConfig, DrafterModel, HeadForm, HeadInput, HeadReads, Lengths,
    };

    use super::*;
    use crate::data::batches::{BatchSettings, Loader};
    use crate::head::batches::HeadSource;
    use crate::head::rows::TrainingRow;
    use crate::head::settings::MixedLabels;
    use crate::tests::pair::{gradients_of, responses, tiny_draft};

    #[test]
    fn padding_changes_no_loss_and_no_gradient() {
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
        let learner = HeadLearner {
            head: config.init(&Device::flex().autodiff()),
            rejection_weight: 6.0,
            clipping: Clipping::Norm(1.0),
            section: Section::Head,
        };
        let batches = |lengths| -> Vec<HeadBatch> {
            let source = HeadSource { lengths, ..source.clone() };
            Loader::training(source, settings).batches(1, 0).collect()
        };
        let (given, padded) = (batches(Lengths::AsGiven), batches(Lengths::InBuckets));
        assert_eq!(given.len(), 3);
        for (given, padded) in given.into_iter().zip(padded) {
            assert_eq!(given.num_labels, padded.num_labels);
            assert!(padded.labels.dims()[0] > padded.num_labels);
            let [expected, found] = [given, padded].map(|batch| {
                let TrainOutput { item, grads } = TrainStep::step(&learner, batch.clone());
                let gradient = gradients_of(&learner, &grads);
                let mut tally = learner.tally();
                assert!(HeadLearner::count(&item, &mut tally).unwrap());
                let loss: f32 = item.loss.into_scalar();
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

    /// What the learner minimises over epochs, of predictions for labels that are all `label`.
    fn to_minimise(rejection_weight: f64, predicted_prob: f64, label: f64) -> f64 {
        let learner = HeadLearner {
            head: AcceptanceHeadConfig::new(4, 1, true).init(&Device::flex()),
            rejection_weight,
            clipping: Clipping::Norm(1.0),
            section: Section::Head,
        };
        let mut tally = learner.tally();
        tally.update(predicted_prob, label);
        learner.to_minimise(&HeadLearner::scores(tally))
    }

    #[test]
    fn the_best_epoch_is_the_one_that_the_weighted_loss_leads_to() {
        for label in [0.2, 0.5, 0.9] {
            for weight in [0.5, 1.0, 6.0, 12.0] {
                // Where that loss is least, as its derivative says.
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
}

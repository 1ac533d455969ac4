//! Batches of labelled positions, with the frozen draft's features.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use draftsmith_model::{DrafterModel, HeadFeatures, HeadReads, Lengths};

use crate::data::{BatchSource, Example, TrainingBatch, padding_mask};
use crate::head::features::{Frozen, LabelledRows, StatesOrigin, StoredRounds};
use crate::head::rows::{Mixture, TrainingRow};
use crate::run::devices::PerDevice;

/// The labelled positions of a few rows.
#[derive(Debug, Clone)]
pub(crate) struct HeadBatch {
    /// The features, with one row per label.
    pub(crate) features: HeadFeatures,
    /// The acceptance probabilities, `[labels]`; 0 for padding.
    pub(crate) labels: Tensor<1>,
    /// The mask of labels, `[labels]`: 1 for a label, 0 for padding. `None` without padding.
    pub(crate) is_label: Option<Tensor<1>>,
}

/// The training or validation rows, with the draft that reads their mixtures.
#[derive(Clone)]
pub(crate) struct HeadSource {
    /// The draft on each device, without autodiff.
    pub(crate) drafts: PerDevice<DrafterModel>,
    pub(crate) reads: HeadReads,
    pub(crate) rows: Vec<Arc<TrainingRow>>,
    pub(crate) seed: u64,
    pub(crate) mixing_ratio: f64,
    /// The number of rows per forward of the draft.
    pub(crate) batch_size: usize,
    pub(crate) lengths: Lengths,
    /// The file of stored hidden states. Only for rows that are the same in every epoch.
    pub(crate) stored: Option<Arc<StoredRounds>>,
}

impl BatchSource for HeadSource {
    type Content = HeadBatch;

    fn num_rows(&self) -> usize {
        self.rows.len()
    }

    fn num_devices(&self) -> usize {
        self.drafts.num_devices()
    }

    fn is_used(&self, row: usize, epoch: u64) -> bool {
        self.rows[row].has_label(self.seed, epoch, self.mixing_ratio)
    }

    /// Runs the draft on all rows of a step, so that rows of similar length share a forward, and divides
    /// the features among the step's batches.
    fn step_batches(
        &self,
        epoch: u64,
        step: &[Vec<usize>],
    ) -> impl Iterator<Item = TrainingBatch<HeadBatch>> {
        let mixtures: Vec<Mixture> = step
            .iter()
            .flatten()
            .map(|row| self.rows[*row].mixture(self.seed, epoch, self.mixing_ratio))
            .collect();
        let lengths = self.lengths;
        let names: Vec<&str> = step.iter().flatten().map(|row| &*self.rows[*row].id).collect();
        let frozen = Frozen {
            drafts: &self.drafts,
            reads: &self.reads,
            batch_size: self.batch_size,
            lengths,
            origin: match self.stored.as_deref() {
                Some(stored) => StatesOrigin::Stored(stored, &names),
                None => StatesOrigin::Drafter,
            },
        };
        let mut features = frozen.labelled_rows(&mixtures).into_iter();
        let mut mixtures = mixtures.into_iter();
        step.iter().enumerate().map(move |(nth, rows)| {
            let of_rows = mixtures.by_ref().take(rows.len());
            let mut labels: Vec<f32> =
                of_rows.flat_map(|mixture| mixture.all_labels().collect::<Vec<_>>()).collect();
            let device = self.drafts.of_batch(nth).device();
            let features: Vec<_> = features.by_ref().take(rows.len()).collect();
            let num_supervised = labels.len();
            let num_padded = lengths.padded_numbers(num_supervised);
            labels.resize(num_padded, 0.0);
            let content = HeadBatch {
                features: LabelledRows::cat(&features, num_padded, &device),
                labels: Tensor::from_data(TensorData::from(labels.as_slice()), &device),
                is_label: padding_mask(num_supervised, num_padded, lengths, &device),
            };
            TrainingBatch {
                content,
                num_supervised,
                row_ids: rows.iter().map(|row| self.rows[*row].id.clone()).collect(),
                step_share: 1.0 / step.len() as f64,
                ends_step: nth + 1 == step.len(),
            }
        })
    }

    /// Lists each row's mixture in the epoch, with its labelled positions and labels.
    ///
    /// # Panics
    /// If a row has branches, since it is then not a single sequence.
    fn step_examples(&self, epoch: u64, step: &[Vec<usize>]) -> Vec<Vec<Example>> {
        let example = |row: &usize| {
            let row = &self.rows[*row];
            let Mixture { input_ids, labelled, labels, branches, .. } =
                row.mixture(self.seed, epoch, self.mixing_ratio);
            assert!(branches.is_empty(), "a row with branches is not a single sequence");
            Example { row_id: row.id.clone(), input_ids, positions: labelled, labels }
        };
        step.iter().map(|rows| rows.iter().map(example).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use draftsmith_model::{HeadForm, HeadInput};

    use crate::data::{BatchSettings, Loader, VALIDATION_EPOCH};
    use crate::head::settings::MixedLabels;
    use crate::tests::pair::{responses, tiny_draft};

    const SETTINGS: BatchSettings =
        BatchSettings { seed: 7, batch_size: 3, gradient_accumulation: 4 };

    fn source(num_rows: usize, mixing_ratio: f64) -> HeadSource {
        let rows = responses(num_rows, 12, 5);
        let row = |row| Arc::new(TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap());
        HeadSource {
            drafts: DrafterModel::from(&tiny_draft(16, 64)).into(),
            reads: HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy]),
            rows: rows.iter().map(row).collect(),
            seed: 7,
            mixing_ratio,
            batch_size: 3,
            lengths: Lengths::AsGiven,
            stored: None,
        }
    }

    fn loader(source: HeadSource) -> Loader<HeadSource> {
        Loader { source, settings: SETTINGS }
    }

    fn collect(loader: &Loader<HeadSource>) -> Vec<TrainingBatch<HeadBatch>> {
        loader.batches(1, 0).collect()
    }

    fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
        tensor.clone().into_data().try_into_vec().unwrap()
    }

    /// Lists hidden states and further inputs, row by row.
    fn both(features: &HeadFeatures) -> Vec<f32> {
        let extra = features.extra.clone().expect("there are further inputs");
        values(&Tensor::cat(vec![features.hidden.clone(), extra], 1))
    }

    #[test]
    fn batches_hold_the_features_and_labels_of_their_rows() {
        let source = source(31, 0.15);
        let by_id = |id: &str| source.rows.iter().find(|row| row.id == id).unwrap();
        for batch in collect(&loader(source.clone())) {
            let mixtures: Vec<Mixture> =
                batch.row_ids.iter().map(|id| by_id(id).mixture(7, 1, 0.15)).collect();
            let labels: Vec<f32> = mixtures.iter().flat_map(|m| m.labels.clone()).collect();
            assert_eq!(values(&batch.content.labels), labels);
            let expected: Vec<f32> = mixtures
                .iter()
                .flat_map(|m| {
                    let frozen = Frozen {
                        drafts: &source.drafts,
                        reads: &source.reads,
                        batch_size: 1,
                        lengths: Lengths::AsGiven,
                        origin: StatesOrigin::Drafter,
                    };
                    let rows = frozen.labelled_rows(std::slice::from_ref(m));
                    both(&LabelledRows::cat(&rows, 0, &Device::flex()))
                })
                .collect();
            assert_eq!(batch.content.features.hidden.dims(), [labels.len(), 16]);
            let whole = (0..labels.len()).map(|row| batch.content.features.select(&[row]));
            let found: Vec<f32> = whole.flat_map(|row| both(&row)).collect();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.into_iter().zip(expected) {
                // Another batch shape may sum in another order: f32 rounding of numbers near 1.
                assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
            }
        }
    }

    #[test]
    fn examples_equal_the_batches() {
        let source = source(31, 0.15);
        let loader = loader(source);
        let written: Vec<Vec<Example>> =
            loader.examples(1).into_iter().flat_map(|step| step.batches).collect();
        let batches = collect(&loader);
        assert_eq!(written.len(), batches.len());
        for (examples, batch) in written.iter().zip(&batches) {
            let ids: Vec<&String> = examples.iter().map(|example| &example.row_id).collect();
            assert_eq!(ids, batch.row_ids.iter().collect::<Vec<_>>());
            let labels: Vec<f32> = examples.iter().flat_map(|e| e.labels.clone()).collect();
            assert_eq!(values(&batch.content.labels), labels);
            assert!(examples.iter().all(|e| e.positions.len() == e.labels.len()));
        }
    }

    #[test]
    fn batches_have_equal_shares_of_their_step() {
        let shares: Vec<f64> =
            collect(&loader(source(31, 0.0))).iter().map(|batch| batch.step_share).collect();
        assert_eq!(shares[..8], [0.25; 8]);
        assert_eq!(shares[8..], [1.0 / 3.0; 3]);
    }

    #[test]
    fn validation_batches_never_change() {
        let loader = loader(source(10, 0.15));
        let labels = |loader: &Loader<HeadSource>| -> Vec<Vec<f32>> {
            loader.batches(VALIDATION_EPOCH, 0).map(|batch| values(&batch.content.labels)).collect()
        };
        assert_eq!(labels(&loader), labels(&loader));
        let first = loader.batches(VALIDATION_EPOCH, 0).next().unwrap();
        assert_eq!(first.row_ids, ["set#0", "set#1", "set#2"]);
    }

    #[test]
    fn rows_without_labels_are_skipped() {
        let loader = loader(source(31, 0.95));
        let (num_rows, _) = loader.size(1);
        assert!(num_rows > 0 && num_rows < 31, "{num_rows}");
        assert!(
            collect(&loader)
                .iter()
                .all(|batch| batch.content.labels.dims()[0] >= batch.row_ids.len())
        );
    }
}

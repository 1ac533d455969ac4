//! Which rows make which batch of which step, and the thread that runs the frozen draft for them.
//!
//! A step is `batch_size` × `gradient_accumulation` rows of a shuffle that is a function of (seed,
//! epoch): an epoch looks the same however many were run before it in this process. A step never
//! spans two epochs. An epoch's last step has the rows that are left, and its gradients are
//! averaged over the batches that it has, so that nothing is lost and nothing counts too little
//! (the Hugging Face Trainer of the authors' time carried the remainder into the next epoch, and
//! lost it after the last).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_model::CausalLm;
use draftsmith_theory::SeededDraws;

use crate::features::labelled_features;
use crate::head_training::HeadTraining;
use crate::rows::{Mixture, TrainingRow};

/// Batches that wait for the learner. Each holds hidden states, which are large.
const QUEUE_LEN: usize = 2;

/// The epoch whose mixtures validation uses, always: training counts its epochs from 1.
const VALIDATION_EPOCH: u64 = 0;

/// The labelled positions of a few rows.
#[derive(Debug, Clone)]
pub(crate) struct HeadBatch {
    /// `[labels, hidden]`: the frozen draft's hidden states.
    pub(crate) features: Tensor<2>,
    /// `[labels]`: acceptance probabilities.
    pub(crate) labels: Tensor<1>,
    /// The rows' ids, for messages.
    pub(crate) row_ids: Vec<String>,
    /// One over the number of batches of the step.
    pub(crate) step_share: f64,
    /// Whether the step's gradients are complete after this batch.
    pub(crate) ends_step: bool,
}

/// Row indices: epoch → steps → batches → rows.
type Plan = Vec<Vec<Vec<usize>>>;

/// Rows and everything that turns them into batches.
#[derive(Clone)]
pub(crate) struct HeadLoader {
    draft: CausalLm,
    rows: Vec<Arc<TrainingRow>>,
    settings: BatchSettings,
    order: Order,
}

/// The part of a recipe that batches depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSettings {
    pub(crate) seed: u64,
    pub(crate) mixing_ratio: f64,
    pub(crate) batch_size: usize,
    pub(crate) gradient_accumulation: usize,
}

#[derive(Debug, Clone)]
enum Order {
    /// Shuffled and mixed afresh for each epoch; whoever runs the epochs sets the number.
    Training(Arc<AtomicU64>),
    /// The same every time.
    Validation,
}

impl BatchSettings {
    pub(crate) fn new(training: &HeadTraining, seed: u64) -> Self {
        Self {
            seed,
            mixing_ratio: training.mixing_ratio,
            batch_size: training.batch_size,
            gradient_accumulation: training.gradient_accumulation,
        }
    }
}

impl HeadLoader {
    /// Training batches of the epoch that `epoch` holds when the iteration begins.
    pub(crate) fn training(
        draft: CausalLm,
        rows: Vec<Arc<TrainingRow>>,
        settings: BatchSettings,
        epoch: Arc<AtomicU64>,
    ) -> Self {
        Self { draft, rows, settings, order: Order::Training(epoch) }
    }

    /// Validation batches.
    pub(crate) fn validation(
        draft: CausalLm,
        rows: Vec<Arc<TrainingRow>>,
        settings: BatchSettings,
    ) -> Self {
        Self { draft, rows, settings, order: Order::Validation }
    }

    /// The number of rows with a label, and of steps, in an epoch.
    pub(crate) fn size(&self, epoch: u64) -> (usize, usize) {
        let plan = self.plan(epoch);
        (plan.iter().flatten().map(Vec::len).sum(), plan.len())
    }

    fn epoch(&self) -> u64 {
        match &self.order {
            Order::Training(epoch) => epoch.load(Ordering::SeqCst),
            Order::Validation => VALIDATION_EPOCH,
        }
    }

    /// The epoch's rows that have a label, in order, cut into steps and batches.
    fn plan(&self, epoch: u64) -> Plan {
        let BatchSettings { seed, mixing_ratio, batch_size, gradient_accumulation } = self.settings;
        let mut rows: Vec<usize> = (0..self.rows.len())
            .filter(|row| self.rows[*row].has_label(seed, epoch, mixing_ratio))
            .collect();
        if let Order::Training(_) = self.order {
            shuffle(&mut rows, &mut SeededDraws::new(seed, &["order", &epoch.to_string()]));
        }
        rows.chunks(batch_size.saturating_mul(gradient_accumulation))
            .map(|step| step.chunks(batch_size).map(<[usize]>::to_vec).collect())
            .collect()
    }

    /// Runs the draft on one step's rows together, so that rows of like length can share a
    /// forward, and deals the features out to the step's batches.
    fn step_batches(&self, epoch: u64, step: &[Vec<usize>]) -> Vec<HeadBatch> {
        let BatchSettings { seed, mixing_ratio, batch_size, .. } = self.settings;
        let mixtures: Vec<Mixture> = step
            .iter()
            .flatten()
            .map(|row| self.rows[*row].mixture(seed, epoch, mixing_ratio))
            .collect();
        let mut features = labelled_features(&self.draft, &mixtures, batch_size).into_iter();
        let mut mixtures = mixtures.into_iter();
        let device = self.draft.device();
        step.iter()
            .enumerate()
            .map(|(nth, rows)| {
                let labels: Vec<f32> =
                    mixtures.by_ref().take(rows.len()).flat_map(|mixture| mixture.labels).collect();
                HeadBatch {
                    features: Tensor::cat(features.by_ref().take(rows.len()).collect(), 0),
                    labels: Tensor::from_data(TensorData::from(labels.as_slice()), &device),
                    row_ids: rows.iter().map(|row| self.rows[*row].id().to_owned()).collect(),
                    step_share: 1.0 / step.len() as f64,
                    ends_step: nth + 1 == step.len(),
                }
            })
            .collect()
    }
}

/// Fisher and Yates's shuffle.
fn shuffle(rows: &mut [usize], draws: &mut SeededDraws) {
    for last in (1..rows.len()).rev() {
        // Below `last + 1`: the uniform number is below 1.
        rows.swap(last, (draws.uniform() * (last + 1) as f64) as usize);
    }
}

impl DataLoader<HeadBatch> for HeadLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<HeadBatch> + 'a> {
        let epoch = self.epoch();
        let plan = self.plan(epoch);
        let num_rows = plan.iter().flatten().map(Vec::len).sum();
        let (sender, receiver) = sync_channel(QUEUE_LEN);
        let loader = self.clone();
        let producer = std::thread::spawn(move || {
            for step in plan {
                for batch in loader.step_batches(epoch, &step) {
                    // The iterator is gone: nobody wants the rest.
                    if sender.send(batch).is_err() {
                        return;
                    }
                }
            }
        });
        Box::new(Batches {
            receiver: Some(receiver),
            producer: Some(producer),
            progress: Progress::new(0, num_rows, Some("rows".to_owned())),
        })
    }

    fn num_items(&self) -> usize {
        self.rows.len()
    }

    /// Batches stay where the draft is; its hidden states are constants to any learner.
    fn to_device(&self, _device: &Device) -> Arc<dyn DataLoader<HeadBatch>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<HeadBatch>> {
        Arc::new(Self { rows: self.rows[start..end].to_vec(), ..self.clone() })
    }
}

/// The batches of one epoch, as the producer delivers them.
struct Batches {
    receiver: Option<Receiver<HeadBatch>>,
    producer: Option<JoinHandle<()>>,
    progress: Progress,
}

impl Iterator for Batches {
    type Item = Result<HeadBatch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => {
                self.progress.items_processed += batch.row_ids.len();
                Some(Ok(batch))
            }
            Err(_) => {
                self.receiver = None;
                // The producer has ended. If by a panic, the epoch must not look complete.
                if let Some(Err(panic)) = self.producer.take().map(JoinHandle::join) {
                    std::panic::resume_unwind(panic);
                }
                None
            }
        }
    }
}

impl DataLoaderIterator<HeadBatch> for Batches {
    fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        // Without a receiver the producer ends at its next batch.
        self.receiver = None;
        if let Some(producer) = self.producer.take() {
            drop(producer.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_pair::{responses, tiny_draft};

    const SETTINGS: BatchSettings =
        BatchSettings { seed: 7, mixing_ratio: 0.15, batch_size: 3, gradient_accumulation: 4 };

    fn rows(num_rows: usize) -> Vec<Arc<TrainingRow>> {
        let rows = responses(num_rows, 12, 5);
        rows.iter().map(|row| Arc::new(TrainingRow::new(row, 64).unwrap().unwrap())).collect()
    }

    fn loader(num_rows: usize, settings: BatchSettings) -> (HeadLoader, Arc<AtomicU64>) {
        let epoch = Arc::new(AtomicU64::new(1));
        let rows = rows(num_rows);
        (HeadLoader::training(tiny_draft(16, 64), rows, settings, epoch.clone()), epoch)
    }

    fn collect(loader: &HeadLoader) -> Vec<HeadBatch> {
        loader.iter().map(Result::unwrap).collect()
    }

    fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
        tensor.clone().into_data().try_into_vec().unwrap()
    }

    #[test]
    fn batches_hold_the_features_and_labels_of_their_rows() {
        let (loader, _) = loader(31, SETTINGS);
        let by_id = |id: &str| loader.rows.iter().find(|row| row.id() == id).unwrap();
        for batch in collect(&loader) {
            let mixtures: Vec<Mixture> =
                batch.row_ids.iter().map(|id| by_id(id).mixture(7, 1, 0.15)).collect();
            let labels: Vec<f32> = mixtures.iter().flat_map(|m| m.labels.clone()).collect();
            assert_eq!(values(&batch.labels), labels);
            let expected: Vec<f32> = mixtures
                .iter()
                .flat_map(|m| labelled_features(&loader.draft, std::slice::from_ref(m), 1))
                .flat_map(|features| values(&features))
                .collect();
            assert_eq!(batch.features.dims(), [labels.len(), 16]);
            for (found, expected) in values(&batch.features).into_iter().zip(expected) {
                // Another batch shape may sum in another order: f32 rounding of numbers near 1.
                assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
            }
        }
    }

    #[test]
    fn steps_are_whole_but_for_the_last_and_lose_no_row() {
        let no_mixing = BatchSettings { mixing_ratio: 0.0, ..SETTINGS };
        let (loader, _) = loader(31, no_mixing);
        let batches = collect(&loader);
        // 31 rows: two steps of 4 batches of 3 rows, and a step of 3 batches of 3, 3 and 1.
        let sizes: Vec<usize> = batches.iter().map(|batch| batch.row_ids.len()).collect();
        assert_eq!(sizes, [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1]);
        let ends: Vec<usize> = (0..11).filter(|nth| batches[*nth].ends_step).collect();
        assert_eq!(ends, [3, 7, 10]);
        let shares: Vec<f64> = batches.iter().map(|batch| batch.step_share).collect();
        assert_eq!(shares[..8], [0.25; 8]);
        assert_eq!(shares[8..], [1.0 / 3.0; 3]);
        let mut ids: Vec<String> = batches.into_iter().flat_map(|batch| batch.row_ids).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 31);
        assert_eq!(loader.size(1), (31, 3));
        let mut iterator = loader.iter();
        iterator.by_ref().for_each(drop);
        assert!(iterator.progress().is_completed());
    }

    #[test]
    fn the_order_is_a_function_of_seed_and_epoch() {
        let (loader, epoch) = loader(31, SETTINGS);
        let order = |loader: &HeadLoader| -> Vec<Vec<String>> {
            collect(loader).into_iter().map(|batch| batch.row_ids).collect()
        };
        let first = order(&loader);
        assert_eq!(order(&loader), first);
        epoch.store(2, Ordering::SeqCst);
        assert_ne!(order(&loader), first);
        epoch.store(1, Ordering::SeqCst);
        assert_eq!(order(&loader), first);
        let other_seed = BatchSettings { seed: 8, ..SETTINGS };
        assert_ne!(order(&HeadLoader { settings: other_seed, ..loader.clone() }), first);
    }

    #[test]
    fn validation_is_the_same_every_time() {
        let loader = HeadLoader::validation(tiny_draft(16, 64), rows(10), SETTINGS);
        let labels = |loader: &HeadLoader| -> Vec<Vec<f32>> {
            collect(loader).iter().map(|batch| values(&batch.labels)).collect()
        };
        assert_eq!(labels(&loader), labels(&loader));
        assert_eq!(collect(&loader)[0].row_ids, ["set#0", "set#1", "set#2"]);
    }

    #[test]
    fn rows_without_a_label_are_left_out_of_the_epoch() {
        let sparse = BatchSettings { mixing_ratio: 0.95, ..SETTINGS };
        let (loader, _) = loader(31, sparse);
        let (num_rows, _) = loader.size(1);
        assert!(num_rows > 0 && num_rows < 31, "{num_rows}");
        assert!(collect(&loader).iter().all(|batch| batch.labels.dims()[0] >= batch.row_ids.len()));
    }

    #[test]
    fn an_iterator_that_is_dropped_early_ends_its_thread() {
        let (loader, _) = loader(31, SETTINGS);
        let mut batches = loader.iter();
        assert!(batches.next().is_some());
        // Would wait for ever if the producer did.
        drop(batches);
    }
}

//! Batches and steps: which rows each contains, and the thread that prepares them.
//!
//! A step takes `batch_size` × `gradient_accumulation` rows of a shuffled epoch. The shuffle is a
//! function of (seed, epoch), so an epoch does not depend on earlier epochs. A step never spans two
//! epochs. The last step of an epoch takes the remaining rows and averages gradients over the
//! batches that it has, so every row has the same weight and none is lost. (The Hugging Face
//! Trainer that the SpecDec++ authors used carried the remainder into the next epoch and dropped it
//! after the last one.)

pub(crate) mod split;

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use burn::data::dataloader::Progress;
use burn::tensor::{Device, Tensor};
use draftsmith_model::Lengths;
use draftsmith_theory::SeededDraws;
use serde::Serialize;

/// The number of prepared batches per device that may wait for the learner. It is small because
/// batches contain hidden states, which are large.
const QUEUE_LEN: usize = 2;

/// The epoch number of validation batches, which are not shuffled. Training epochs count from 1.
pub(crate) const VALIDATION_EPOCH: u64 = 0;

/// One batch of an optimizer step.
#[derive(Debug, Clone)]
pub(crate) struct TrainingBatch<C> {
    /// The inputs and labels for the learner.
    pub(crate) content: C,
    /// The ids of the batch's rows, for messages.
    pub(crate) row_ids: Vec<String>,
    /// The number of positions that the loss covers.
    pub(crate) num_supervised: usize,
    /// The weight of this batch in the step's loss.
    pub(crate) step_share: f64,
    /// Whether this is the last batch of its step.
    pub(crate) ends_step: bool,
}

/// A source of batches: the training or validation rows, with the frozen model that computes
/// features for them.
pub(crate) trait BatchSource: Clone + Send + Sync + 'static {
    /// The inputs and labels that the learner reads from a batch.
    type Content: Send + 'static;

    /// Returns the number of rows.
    fn num_rows(&self) -> usize;

    /// Returns the number of devices. The batches of each step are assigned to them in turn,
    /// beginning with the first device.
    fn num_devices(&self) -> usize;

    /// Returns whether a row has any label in an epoch.
    fn is_used(&self, row: usize, epoch: u64) -> bool;

    /// Prepares the batches of one step, given the rows of each batch.
    fn step_batches(
        &self,
        epoch: u64,
        step: &[Vec<usize>],
    ) -> impl Iterator<Item = TrainingBatch<Self::Content>>;

    /// Lists the examples of a step as plain data: for each batch, one example per row.
    fn step_examples(&self, epoch: u64, step: &[Vec<usize>]) -> Vec<Vec<Example>>;
}

/// The inputs and labels of one optimizer step, or of a group of validation batches. They are plain
/// data, so that another trainer can be given the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepExamples {
    /// The epoch, counted from 1; 0 for validation.
    pub epoch: usize,
    /// The examples of each batch.
    pub batches: Vec<Vec<Example>>,
}

/// One row of a batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Example {
    /// The row's id.
    pub row_id: String,
    /// The frozen model's input, without padding.
    pub input_ids: Vec<u32>,
    /// The positions in `input_ids` that the loss covers, ascending.
    pub positions: Vec<usize>,
    /// An acceptance head's label at each of `positions`. Empty for an adapter, which learns the
    /// target's distribution.
    pub labels: Vec<f32>,
}

/// Builds a mask of shape `[num_padded]`: 1 for the first `num` entries and 0 for the padding after
/// them. Returns `None` if `lengths` asks for no padding.
pub(crate) fn padding_mask(
    num: usize,
    num_padded: usize,
    lengths: Lengths,
    device: &Device,
) -> Option<Tensor<1>> {
    (lengths == Lengths::InBuckets).then(|| {
        let mut mask = vec![1.0; num];
        mask.resize(num_padded, 0.0);
        Tensor::from_floats(mask.as_slice(), device)
    })
}

/// The row indices of an epoch's steps: one list of batches per step, one list of rows per batch.
type EpochPlan = Vec<Vec<Vec<usize>>>;

/// Makes the batches of the training rows, or of the validation rows.
#[derive(Clone)]
pub(crate) struct Loader<S> {
    pub(crate) source: S,
    pub(crate) settings: BatchSettings,
}

/// The loaders of the training rows and of the validation rows.
pub(crate) struct Loaders<S> {
    pub(crate) training: Loader<S>,
    pub(crate) validation: Loader<S>,
    pub(crate) num_epochs: usize,
    /// The number of optimizer steps in all epochs.
    pub(crate) num_steps: usize,
    /// The number of training rows with a label, in the epoch that has the fewest.
    pub(crate) num_training: usize,
    /// The number of validation rows with a label.
    pub(crate) num_validation: usize,
    /// The number of rows on each side of the split, with or without labels.
    pub(crate) rows: RowCounts,
}

/// The number of rows on each side of the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCounts {
    /// The number of training rows.
    pub num_training: usize,
    /// The number of validation rows.
    pub num_validation: usize,
    /// The number of rows that have no response, or whose response begins beyond the maximum
    /// sequence length.
    pub num_unusable: usize,
}

/// The settings that decide how rows are divided into batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSettings {
    pub(crate) seed: u64,
    pub(crate) batch_size: usize,
    pub(crate) gradient_accumulation: usize,
}

impl<S: BatchSource> Loaders<S> {
    pub(crate) fn new(
        training: S,
        validation: S,
        settings: BatchSettings,
        num_epochs: usize,
        rows: RowCounts,
    ) -> Self {
        let training = Loader { source: training, settings };
        let validation = Loader { source: validation, settings };
        let sizes = (1..=num_epochs).map(|epoch| training.size(epoch as u64));
        let (num_training, num_steps) = sizes
            .reduce(|(fewest, all), (rows, steps)| (fewest.min(rows), all + steps))
            .unwrap_or((0, 0));
        let (num_validation, _) = validation.size(VALIDATION_EPOCH);
        Self { training, validation, num_epochs, num_steps, num_training, num_validation, rows }
    }

    /// Lists the examples of every training step in order, then those of validation.
    pub(crate) fn examples(&self) -> Vec<StepExamples> {
        let training = (1..=self.num_epochs as u64).map(|epoch| (&self.training, epoch));
        let all = training.chain([(&self.validation, VALIDATION_EPOCH)]);
        all.flat_map(|(loader, epoch)| loader.examples(epoch)).collect()
    }
}

impl<S: BatchSource> Loader<S> {
    /// Counts the rows with labels and the optimizer steps of an epoch.
    pub(crate) fn size(&self, epoch: u64) -> (usize, usize) {
        let plan = self.plan(epoch);
        (num_rows(&plan), plan.len())
    }

    /// Lists the examples of each step of an epoch.
    pub(crate) fn examples(&self, epoch: u64) -> Vec<StepExamples> {
        let plan = self.plan(epoch);
        let batches = plan.iter().map(|step| self.source.step_examples(epoch, step));
        batches.map(|batches| StepExamples { epoch: epoch as usize, batches }).collect()
    }

    /// Returns the number of rows, with or without labels.
    pub(crate) fn num_rows(&self) -> usize {
        self.source.num_rows()
    }

    /// Starts a thread that prepares the batches of an epoch, except those of its first `num_steps`
    /// steps.
    pub(crate) fn batches(&self, epoch: u64, num_steps: usize) -> Batches<S::Content> {
        let mut plan = self.plan(epoch);
        let num_all = num_rows(&plan);
        plan.drain(..num_steps.min(plan.len()));
        let num_skipped = num_all - num_rows(&plan);
        let (sender, receiver) = sync_channel(QUEUE_LEN * self.source.num_devices());
        let source = self.source.clone();
        let producer = std::thread::spawn(move || {
            let deliver = || {
                let mut batches = plan.iter().flat_map(|step| source.step_batches(epoch, step));
                // Sending fails once the receiver is dropped.
                let _ = batches.try_for_each(|batch| sender.send(batch));
            };
            // The producer has its own thread pool. On the learner's pool, each short matrix
            // product of the learner would wait until the frozen model has processed a sequence.
            let num_threads = rayon::current_num_threads();
            match rayon::ThreadPoolBuilder::new().num_threads(num_threads).build() {
                Ok(pool) => pool.install(deliver),
                Err(_) => deliver(),
            }
        });
        Batches {
            receiver: Some(receiver),
            producer: Some(producer),
            progress: Progress::new(num_skipped, num_all, Some("rows".to_owned())),
        }
    }

    /// Divides the rows that have labels in an epoch into steps and batches.
    fn plan(&self, epoch: u64) -> EpochPlan {
        let BatchSettings { seed, batch_size, gradient_accumulation } = self.settings;
        let mut rows: Vec<usize> =
            (0..self.source.num_rows()).filter(|row| self.source.is_used(*row, epoch)).collect();
        if epoch != VALIDATION_EPOCH {
            SeededDraws::new(seed, &["order", &epoch.to_string()]).shuffle(&mut rows);
        }
        rows.chunks(batch_size.saturating_mul(gradient_accumulation))
            .map(|step| step.chunks(batch_size).map(<[usize]>::to_vec).collect())
            .collect()
    }
}

fn num_rows(plan: &EpochPlan) -> usize {
    plan.iter().flatten().map(Vec::len).sum()
}

/// The batches of one epoch, received from the producer thread.
pub(crate) struct Batches<C> {
    receiver: Option<Receiver<TrainingBatch<C>>>,
    producer: Option<JoinHandle<()>>,
    progress: Progress,
}

impl<C> Iterator for Batches<C> {
    type Item = TrainingBatch<C>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => {
                self.progress.items_processed += batch.row_ids.len();
                Some(batch)
            }
            Err(_) => {
                self.receiver = None;
                // If the producer panicked, the epoch must not look complete.
                if let Some(Err(panic)) = self.producer.take().map(JoinHandle::join) {
                    std::panic::resume_unwind(panic);
                }
                None
            }
        }
    }
}

impl<C> Batches<C> {
    /// The number of rows handed out so far, including those of skipped steps.
    pub(crate) fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Takes at most `num` of the remaining batches of the current step, and returns them with the
    /// epoch's progress after each. Both lists are empty at the end of the epoch.
    pub(crate) fn next_of_step(&mut self, num: usize) -> (Vec<TrainingBatch<C>>, Vec<Progress>) {
        let (mut batches, mut progress) = (Vec::<TrainingBatch<C>>::new(), Vec::new());
        while batches.len() < num && !batches.last().is_some_and(|batch| batch.ends_step) {
            let Some(batch) = self.next() else { break };
            batches.push(batch);
            progress.push(self.progress());
        }
        (batches, progress)
    }
}

impl<C> Drop for Batches<C> {
    fn drop(&mut self) {
        // Without a receiver, the producer stops at its next batch.
        self.receiver = None;
        if let Some(producer) = self.producer.take() {
            drop(producer.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Rows that are represented by their ids.
    #[derive(Clone)]
    struct RowIds(Arc<Vec<String>>);

    impl BatchSource for RowIds {
        type Content = ();

        fn num_rows(&self) -> usize {
            self.0.len()
        }

        fn num_devices(&self) -> usize {
            1
        }

        fn is_used(&self, row: usize, epoch: u64) -> bool {
            epoch < 3 || row.is_multiple_of(2)
        }

        fn step_batches(
            &self,
            _epoch: u64,
            step: &[Vec<usize>],
        ) -> impl Iterator<Item = TrainingBatch<()>> {
            step.iter().enumerate().map(|(nth, rows)| TrainingBatch {
                content: (),
                row_ids: rows.iter().map(|row| self.0[*row].clone()).collect(),
                num_supervised: rows.len(),
                step_share: 1.0,
                ends_step: nth + 1 == step.len(),
            })
        }

        fn step_examples(&self, _epoch: u64, step: &[Vec<usize>]) -> Vec<Vec<Example>> {
            let example = |row: &usize| Example {
                row_id: self.0[*row].clone(),
                input_ids: Vec::new(),
                positions: Vec::new(),
                labels: Vec::new(),
            };
            step.iter().map(|rows| rows.iter().map(example).collect()).collect()
        }
    }

    const SETTINGS: BatchSettings =
        BatchSettings { seed: 7, batch_size: 3, gradient_accumulation: 4 };

    fn row_ids(num_rows: usize) -> RowIds {
        RowIds(Arc::new((0..num_rows).map(|n| format!("set#{n}")).collect()))
    }

    fn loader(num_rows: usize) -> Loader<RowIds> {
        Loader { source: row_ids(num_rows), settings: SETTINGS }
    }

    fn order(loader: &Loader<RowIds>, epoch: u64) -> Vec<Vec<String>> {
        loader.batches(epoch, 0).map(|batch| batch.row_ids).collect()
    }

    #[test]
    fn only_the_last_step_is_short_and_no_row_is_lost() {
        let loader = loader(31);
        let batches: Vec<TrainingBatch<()>> = loader.batches(1, 0).collect();
        // 31 rows: two steps of 4 batches of 3 rows, and a step of 3 batches of 3, 3 and 1.
        let sizes: Vec<usize> = batches.iter().map(|batch| batch.row_ids.len()).collect();
        assert_eq!(sizes, [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1]);
        let ends: Vec<usize> = (0..11).filter(|nth| batches[*nth].ends_step).collect();
        assert_eq!(ends, [3, 7, 10]);
        let mut ids: Vec<String> = batches.into_iter().flat_map(|batch| batch.row_ids).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 31);
        assert_eq!(loader.size(1), (31, 3));
        let mut iterator = loader.batches(1, 0);
        iterator.by_ref().for_each(drop);
        assert!(iterator.progress().is_completed());
    }

    #[test]
    fn batches_for_several_devices_are_of_one_step() {
        // Two steps of 4 batches, and one of 3.
        for (num_devices, expected) in
            [(1, [1; 11].as_slice()), (3, &[3, 1, 3, 1, 3]), (4, &[4, 4, 3]), (9, &[4, 4, 3])]
        {
            let mut batches = loader(31).batches(1, 0);
            let (mut sizes, mut num_rows) = (Vec::new(), 0);
            loop {
                let (batches_now, progress) = batches.next_of_step(num_devices);
                if batches_now.is_empty() {
                    break;
                }
                for (batch, progress) in batches_now.iter().zip(&progress) {
                    num_rows += batch.row_ids.len();
                    assert_eq!(progress.items_processed, num_rows);
                }
                sizes.push(batches_now.len());
            }
            assert_eq!((sizes.as_slice(), num_rows), (expected, 31));
        }
    }

    #[test]
    fn the_order_is_a_function_of_seed_and_epoch() {
        let loader = loader(31);
        let first = order(&loader, 1);
        assert_eq!(order(&loader, 1), first);
        assert_ne!(order(&loader, 2), first);
        assert_eq!(order(&loader, 1), first);
        let other_seed = BatchSettings { seed: 8, ..SETTINGS };
        assert_ne!(order(&Loader { settings: other_seed, ..loader.clone() }, 1), first);
    }

    #[test]
    fn steps_already_taken_are_skipped() {
        let loader = loader(31);
        let whole = order(&loader, 1);
        // Two steps of 4 batches, and one of 3.
        for (num_steps, num_batches) in [(0, 0), (1, 4), (2, 8), (3, 11), (4, 11)] {
            let left: Vec<_> = loader.batches(1, num_steps).map(|batch| batch.row_ids).collect();
            assert_eq!(left, whole[num_batches..]);
            let mut batches = loader.batches(1, num_steps);
            let rows = whole[..num_batches].concat().len();
            assert_eq!(batches.progress().items_processed, rows);
            batches.by_ref().for_each(drop);
            assert!(batches.progress().is_completed());
        }
    }

    #[test]
    fn validation_rows_are_not_shuffled() {
        let loader = loader(10);
        let first = order(&loader, VALIDATION_EPOCH);
        assert_eq!(first[0], ["set#0", "set#1", "set#2"]);
        assert_eq!(order(&loader, VALIDATION_EPOCH), first);
    }

    #[test]
    fn rows_without_labels_are_skipped() {
        let loader = loader(31);
        assert_eq!(loader.size(3), (16, 2));
        assert_eq!(order(&loader, 3).concat().len(), 16);
    }

    #[test]
    fn dropping_the_iterator_early_ends_its_thread() {
        let loader = loader(31);
        let mut batches = loader.batches(1, 0);
        assert!(batches.next().is_some());
        let is_held = || Arc::strong_count(&loader.source.0) > 1;
        assert!(is_held(), "the producer has a copy of the rows");
        // This would block forever if the producer did.
        drop(batches);
        assert!(!is_held(), "the producer still has the rows");
    }
}

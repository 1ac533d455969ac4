//! Which rows make which batch of which step, and the thread that prepares them.
//!
//! A step is `batch_size` × `gradient_accumulation` rows of a shuffle that is a function of (seed,
//! epoch): an epoch looks the same however many were run before it in this process. A step never
//! spans two epochs. An epoch's last step has the rows that are left, and its gradients are
//! averaged over the batches that it has, so that nothing is lost and nothing counts too little
//! (the Hugging Face Trainer of the SpecDec++ authors' time carried the remainder into the next
//! epoch, and lost it after the last).

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use burn::data::dataloader::Progress;
use burn::tensor::{Device, Tensor};
use draftsmith_model::Lengths;
use draftsmith_theory::SeededDraws;

use crate::data::examples::{Example, StepExamples};

/// Batches that wait for the learner, for each device. Each holds hidden states, which are large.
const QUEUE_LEN: usize = 2;

/// The epoch whose rows validation uses, always: training counts its epochs from 1.
pub(crate) const VALIDATION_EPOCH: u64 = 0;

/// A batch as the loop over epochs sees it.
pub(crate) trait TrainingBatch: Send + 'static {
    /// The rows' ids, for messages.
    fn row_ids(&self) -> &[String];

    /// The number of positions that the loss is taken at.
    fn num_supervised(&self) -> usize;

    /// Whether the step's gradients are complete after this batch.
    fn ends_step(&self) -> bool;
}

/// One side's rows, with the frozen model that makes batches of them.
pub(crate) trait BatchSource: Clone + Send + Sync + 'static {
    /// What the learner is given.
    type Batch: TrainingBatch;

    /// The number of rows.
    fn num_rows(&self) -> usize;

    /// The number of devices that batches are dealt out to, in turn from the first of each step on.
    fn num_devices(&self) -> usize;

    /// Whether a row has anything to learn in an epoch.
    fn is_used(&self, row: usize, epoch: u64) -> bool;

    /// Makes the batches of one step, given the rows of each, in order.
    fn step_batches(&self, epoch: u64, step: &[Vec<usize>]) -> impl Iterator<Item = Self::Batch>;

    /// What [`Self::step_batches`] makes batches of, row by row.
    fn step_examples(&self, epoch: u64, step: &[Vec<usize>]) -> Vec<Vec<Example>>;
}

/// Which of a batch's numbers are of something, 1, and which of padding, 0: `[padded]`. None where
/// there is no padding at any length.
pub(crate) fn real(num: usize, lengths: Lengths, device: &Device) -> Option<Tensor<1>> {
    (lengths == Lengths::InBuckets).then(|| {
        let mut is_real = vec![1.0; num];
        is_real.resize(lengths.padded(num), 0.0);
        Tensor::from_floats(is_real.as_slice(), device)
    })
}

/// Row indices: epoch → steps → batches → rows.
type Plan = Vec<Vec<Vec<usize>>>;

/// Rows and everything that turns them into batches.
#[derive(Clone)]
pub(crate) struct Loader<S> {
    source: S,
    settings: BatchSettings,
    order: Order,
}

/// The loaders of both sides, and what a training has of each.
pub(crate) struct Loaders<S> {
    pub(crate) training: Loader<S>,
    pub(crate) validation: Loader<S>,
    pub(crate) num_epochs: usize,
    /// Optimizer steps of all epochs.
    pub(crate) num_steps: usize,
    /// Training rows that are used, in the epoch that uses fewest.
    pub(crate) num_training: usize,
    /// Validation rows that are used.
    pub(crate) num_validation: usize,
}

/// The loaders of a training, and what became of its rows.
pub(crate) struct Prepared<S> {
    pub(crate) loaders: Loaders<S>,
    pub(crate) rows: RowCounts,
}

/// What becomes of a training's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCounts {
    /// Those that are trained on.
    pub num_training: usize,
    /// Those that are held out.
    pub num_validation: usize,
    /// Those of neither: without a response, or one that begins past the longest sequence.
    pub num_unusable: usize,
}

/// What the cut into batches depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSettings {
    pub(crate) seed: u64,
    pub(crate) batch_size: usize,
    pub(crate) gradient_accumulation: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Shuffled afresh for each epoch.
    Shuffled,
    /// As the rows are.
    AsGiven,
}

impl<S: BatchSource> Loaders<S> {
    /// The loaders of `num_epochs` epochs; at least one.
    pub(crate) fn new(
        training: S,
        validation: S,
        settings: BatchSettings,
        num_epochs: usize,
    ) -> Self {
        let training = Loader::training(training, settings);
        let validation = Loader::validation(validation, settings);
        let sizes = (1..=num_epochs).map(|epoch| training.size(epoch as u64));
        let (num_training, num_steps) = sizes
            .reduce(|(fewest, all), (rows, steps)| (fewest.min(rows), all + steps))
            .unwrap_or((0, 0));
        let (num_validation, _) = validation.size(VALIDATION_EPOCH);
        Self { training, validation, num_epochs, num_steps, num_training, num_validation }
    }

    /// All epochs' steps in order, then what validation is scored on.
    pub(crate) fn examples(&self) -> Vec<StepExamples> {
        let of_epoch = |loader: &Loader<S>, epoch: usize| -> Vec<StepExamples> {
            let steps = loader.examples(epoch as u64).into_iter();
            steps.map(|batches| StepExamples { epoch, batches }).collect()
        };
        let mut steps: Vec<StepExamples> =
            (1..=self.num_epochs).flat_map(|epoch| of_epoch(&self.training, epoch)).collect();
        steps.extend(of_epoch(&self.validation, VALIDATION_EPOCH as usize));
        steps
    }
}

impl<S: BatchSource> Loader<S> {
    /// Training batches.
    pub(crate) fn training(source: S, settings: BatchSettings) -> Self {
        Self { source, settings, order: Order::Shuffled }
    }

    /// Validation batches.
    pub(crate) fn validation(source: S, settings: BatchSettings) -> Self {
        Self { source, settings, order: Order::AsGiven }
    }

    /// The number of rows that are used, and of steps, in an epoch.
    pub(crate) fn size(&self, epoch: u64) -> (usize, usize) {
        let plan = self.plan(epoch);
        (plan.iter().flatten().map(Vec::len).sum(), plan.len())
    }

    /// What an epoch's batches are made of: steps, batches, rows.
    pub(crate) fn examples(&self, epoch: u64) -> Vec<Vec<Vec<Example>>> {
        self.plan(epoch).iter().map(|step| self.source.step_examples(epoch, step)).collect()
    }

    /// The number of rows, used or not.
    pub(crate) fn num_rows(&self) -> usize {
        self.source.num_rows()
    }

    /// An epoch's batches, without those of its first `num_steps` steps.
    pub(crate) fn batches(&self, epoch: u64, num_steps: usize) -> Batches<S::Batch> {
        let mut plan = self.plan(epoch);
        let count = |plan: &Plan| plan.iter().flatten().map(Vec::len).sum::<usize>();
        let num_rows = count(&plan);
        plan.drain(..num_steps.min(plan.len()));
        let num_skipped_rows = num_rows - count(&plan);
        let (sender, receiver) = sync_channel(QUEUE_LEN * self.source.num_devices());
        let source = self.source.clone();
        let producer = std::thread::spawn(move || {
            // The frozen model's sequences are long work: on the learner's pool, each of its short
            // products would wait behind one. Without a pool of its own it shares that one.
            let num_threads = rayon::current_num_threads();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build();
            let deliver = || deliver(&source, epoch, plan, &sender);
            match &pool {
                Ok(pool) => pool.install(deliver),
                Err(_) => deliver(),
            }
        });
        Batches {
            receiver: Some(receiver),
            producer: Some(producer),
            progress: Progress::new(num_skipped_rows, num_rows, Some("rows".to_owned())),
        }
    }

    /// The epoch's rows that are used, in order, cut into steps and batches.
    fn plan(&self, epoch: u64) -> Plan {
        let BatchSettings { seed, batch_size, gradient_accumulation } = self.settings;
        let mut rows: Vec<usize> =
            (0..self.source.num_rows()).filter(|row| self.source.is_used(*row, epoch)).collect();
        if self.order == Order::Shuffled {
            shuffle(&mut rows, &mut SeededDraws::new(seed, &["order", &epoch.to_string()]));
        }
        rows.chunks(batch_size.saturating_mul(gradient_accumulation))
            .map(|step| step.chunks(batch_size).map(<[usize]>::to_vec).collect())
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

/// Makes the batches of the steps of a plan and sends them, as long as somebody wants them.
fn deliver<S: BatchSource>(source: &S, epoch: u64, plan: Plan, sender: &SyncSender<S::Batch>) {
    for step in plan {
        for batch in source.step_batches(epoch, &step) {
            // The iterator is gone: nobody wants the rest.
            if sender.send(batch).is_err() {
                return;
            }
        }
    }
}

/// The batches of one epoch, as the producer delivers them.
pub(crate) struct Batches<B> {
    receiver: Option<Receiver<B>>,
    producer: Option<JoinHandle<()>>,
    progress: Progress,
}

impl<B: TrainingBatch> Iterator for Batches<B> {
    type Item = B;

    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => {
                self.progress.items_processed += batch.row_ids().len();
                Some(batch)
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

impl<B: TrainingBatch> Batches<B> {
    /// How many of the epoch's rows have been handed out, those that were left out included.
    pub(crate) fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// The next batches of a step, at most `num` or what is left of the step, and how far the epoch
    /// is with each; none at its end.
    pub(crate) fn next_of_step(&mut self, num: usize) -> (Vec<B>, Vec<Progress>) {
        let (mut batches, mut progress) = (Vec::new(), Vec::new());
        while batches.len() < num && !batches.last().is_some_and(B::ends_step) {
            let Some(batch) = self.next() else { break };
            batches.push(batch);
            progress.push(self.progress());
        }
        (batches, progress)
    }
}

impl<B> Drop for Batches<B> {
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
    use std::sync::Arc;

    use super::*;

    /// Rows that are made into batches of their own names.
    #[derive(Clone)]
    struct Names(Arc<Vec<String>>);

    struct Named {
        row_ids: Vec<String>,
        ends_step: bool,
    }

    impl TrainingBatch for Named {
        fn row_ids(&self) -> &[String] {
            &self.row_ids
        }

        fn num_supervised(&self) -> usize {
            self.row_ids.len()
        }

        fn ends_step(&self) -> bool {
            self.ends_step
        }
    }

    impl BatchSource for Names {
        type Batch = Named;

        fn num_rows(&self) -> usize {
            self.0.len()
        }

        fn num_devices(&self) -> usize {
            1
        }

        fn is_used(&self, row: usize, epoch: u64) -> bool {
            epoch < 3 || row.is_multiple_of(2)
        }

        fn step_batches(&self, _epoch: u64, step: &[Vec<usize>]) -> impl Iterator<Item = Named> {
            step.iter().enumerate().map(|(nth, rows)| Named {
                row_ids: rows.iter().map(|row| self.0[*row].clone()).collect(),
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

    fn names(num_rows: usize) -> Names {
        Names(Arc::new((0..num_rows).map(|n| format!("set#{n}")).collect()))
    }

    fn loader(num_rows: usize) -> Loader<Names> {
        Loader::training(names(num_rows), SETTINGS)
    }

    fn order(loader: &Loader<Names>, epoch: u64) -> Vec<Vec<String>> {
        loader.batches(epoch, 0).map(|batch| batch.row_ids).collect()
    }

    #[test]
    fn steps_are_whole_but_for_the_last_and_lose_no_row() {
        let loader = loader(31);
        let batches: Vec<Named> = loader.batches(1, 0).collect();
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
    fn batches_are_dealt_out_within_their_step() {
        // Two steps of 4 batches, and one of 3.
        for (num_devices, expected) in
            [(1, [1; 11].as_slice()), (3, &[3, 1, 3, 1, 3]), (4, &[4, 4, 3]), (9, &[4, 4, 3])]
        {
            let mut batches = loader(31).batches(1, 0);
            let (mut num_dealt, mut num_rows) = (Vec::new(), 0);
            loop {
                let (dealt, progress) = batches.next_of_step(num_devices);
                if dealt.is_empty() {
                    break;
                }
                for (batch, progress) in dealt.iter().zip(&progress) {
                    num_rows += batch.row_ids.len();
                    assert_eq!(progress.items_processed, num_rows);
                }
                num_dealt.push(dealt.len());
            }
            assert_eq!((num_dealt.as_slice(), num_rows), (expected, 31));
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
    fn steps_that_were_taken_are_left_out() {
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
    fn validation_is_in_order() {
        let loader = Loader::validation(names(10), SETTINGS);
        let first = order(&loader, VALIDATION_EPOCH);
        assert_eq!(first[0], ["set#0", "set#1", "set#2"]);
        assert_eq!(order(&loader, VALIDATION_EPOCH), first);
    }

    #[test]
    fn rows_that_are_not_used_are_left_out_of_the_epoch() {
        let loader = loader(31);
        assert_eq!(loader.size(3), (16, 2));
        assert_eq!(order(&loader, 3).concat().len(), 16);
    }

    #[test]
    fn an_iterator_that_is_dropped_early_ends_its_thread() {
        let loader = loader(31);
        let mut batches = loader.batches(1, 0);
        assert!(batches.next().is_some());
        let is_held = || Arc::strong_count(&loader.source.0) > 1;
        assert!(is_held(), "the producer has a copy of the rows");
        // Would wait for ever if the producer did.
        drop(batches);
        assert!(!is_held(), "the producer still has the rows");
    }
}

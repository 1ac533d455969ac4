//! Which rows make which batch of which step, and the thread that prepares them.
//!
//! A step is `batch_size` × `gradient_accumulation` rows of a shuffle that is a function of (seed,
//! epoch): an epoch looks the same however many were run before it in this process. A step never
//! spans two epochs. An epoch's last step has the rows that are left, and its gradients are
//! averaged over the batches that it has, so that nothing is lost and nothing counts too little
//! (the Hugging Face Trainer of the SpecDec++ authors' time carried the remainder into the next
//! epoch, and lost it after the last).

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use draftsmith_theory::SeededDraws;

use crate::data::lessons::Example;
use crate::error::TrainError;

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

    /// The rows from `start` to before `end`.
    fn slice(&self, start: usize, end: usize) -> Self;
}

/// Row indices: epoch → steps → batches → rows.
type Plan = Vec<Vec<Vec<usize>>>;

/// Where the next iteration over training batches begins: shared by the loop over epochs and the
/// loader, which burn-train asks for batches without saying which.
#[derive(Debug, Clone)]
pub(crate) struct Start(Arc<Mutex<(u64, usize)>>);

impl Start {
    /// The beginning of the first epoch.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new((1, 0))))
    }

    /// In `epoch`, counted from 1, after its first `num_steps` steps.
    pub(crate) fn set(&self, epoch: u64, num_steps: usize) {
        *self.0.lock().expect("nothing panics while it holds the start") = (epoch, num_steps);
    }

    fn get(&self) -> (u64, usize) {
        *self.0.lock().expect("nothing panics while it holds the start")
    }
}

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
    /// Where `training` begins.
    pub(crate) start: Start,
    pub(crate) num_epochs: usize,
    /// Optimiser steps of all epochs.
    pub(crate) num_steps: usize,
    /// Training rows that are used, in the epoch that uses fewest.
    pub(crate) num_training: usize,
    /// Validation rows that are used.
    pub(crate) num_validation: usize,
}

/// The loaders of a training, and what became of its rows.
pub(crate) struct Prepared<S> {
    pub(crate) loaders: Loaders<S>,
    /// Rows that are trained on.
    pub(crate) num_training_rows: usize,
    /// Rows that are held out.
    pub(crate) num_validation_rows: usize,
    /// Rows of neither.
    pub(crate) num_unusable_rows: usize,
}

/// What the cut into batches depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSettings {
    pub(crate) seed: u64,
    pub(crate) batch_size: usize,
    pub(crate) gradient_accumulation: usize,
}

#[derive(Debug, Clone)]
enum Order {
    /// Shuffled afresh for each epoch; whoever runs the epochs says where to begin.
    Training(Start),
    /// The same every time.
    Validation,
}

impl<S: BatchSource> Loaders<S> {
    /// The loaders of `num_epochs` epochs; at least one.
    pub(crate) fn new(
        training: S,
        validation: S,
        settings: BatchSettings,
        num_epochs: usize,
    ) -> Self {
        let start = Start::new();
        let training = Loader::training(training, settings, start.clone());
        let validation = Loader::validation(validation, settings);
        let sizes = (1..=num_epochs).map(|epoch| training.size(epoch as u64));
        let (num_training, num_steps) = sizes
            .reduce(|(fewest, all), (rows, steps)| (fewest.min(rows), all + steps))
            .unwrap_or((0, 0));
        let (num_validation, _) = validation.size(VALIDATION_EPOCH);
        Self { training, validation, start, num_epochs, num_steps, num_training, num_validation }
    }
}

impl<S: BatchSource> Loader<S> {
    /// Training batches, from where `start` says when the iteration begins to the epoch's end.
    pub(crate) fn training(source: S, settings: BatchSettings, start: Start) -> Self {
        Self { source, settings, order: Order::Training(start) }
    }

    /// Validation batches.
    pub(crate) fn validation(source: S, settings: BatchSettings) -> Self {
        Self { source, settings, order: Order::Validation }
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

    /// The epoch, and the steps of it that are left out.
    fn start(&self) -> (u64, usize) {
        match &self.order {
            Order::Training(start) => start.get(),
            Order::Validation => (VALIDATION_EPOCH, 0),
        }
    }

    /// The epoch's rows that are used, in order, cut into steps and batches.
    fn plan(&self, epoch: u64) -> Plan {
        let BatchSettings { seed, batch_size, gradient_accumulation } = self.settings;
        let mut rows: Vec<usize> =
            (0..self.source.num_rows()).filter(|row| self.source.is_used(*row, epoch)).collect();
        if let Order::Training(_) = self.order {
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

impl<S: BatchSource> DataLoader<S::Batch> for Loader<S> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<S::Batch> + 'a> {
        let (epoch, num_skipped) = self.start();
        let mut plan = self.plan(epoch);
        let count = |plan: &Plan| plan.iter().flatten().map(Vec::len).sum::<usize>();
        let num_rows = count(&plan);
        plan.drain(..num_skipped.min(plan.len()));
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
        Box::new(Batches {
            receiver: Some(receiver),
            producer: Some(producer),
            progress: Progress::new(num_skipped_rows, num_rows, Some("rows".to_owned())),
        })
    }

    fn num_items(&self) -> usize {
        self.source.num_rows()
    }

    /// Batches stay where the frozen model is; its hidden states are constants to any learner.
    fn to_device(&self, _device: &Device) -> Arc<dyn DataLoader<S::Batch>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<S::Batch>> {
        Arc::new(Self { source: self.source.slice(start, end), ..self.clone() })
    }
}

/// The next batches of a step, one for each device or what is left of the step, and how far the
/// iteration is with each; none at its end.
pub(crate) fn next_batches<B: TrainingBatch>(
    batches: &mut dyn DataLoaderIterator<B>,
    num_devices: usize,
) -> Result<(Vec<B>, Vec<Progress>), TrainError> {
    let (mut dealt, mut progress) = (Vec::new(), Vec::new());
    while dealt.len() < num_devices && !dealt.last().is_some_and(B::ends_step) {
        let Some(batch) = batches.next() else { break };
        dealt.push(batch.map_err(|error| TrainError::Learner(Arc::new(error.into())))?);
        progress.push(batches.progress());
    }
    Ok((dealt, progress))
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
struct Batches<B> {
    receiver: Option<Receiver<B>>,
    producer: Option<JoinHandle<()>>,
    progress: Progress,
}

impl<B: TrainingBatch> Iterator for Batches<B> {
    type Item = Result<B, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => {
                self.progress.items_processed += batch.row_ids().len();
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

impl<B: TrainingBatch> DataLoaderIterator<B> for Batches<B> {
    fn progress(&self) -> Progress {
        self.progress.clone()
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
    use super::*;

    /// Rows that are made into batches of their own names.
    #[derive(Clone)]
    struct Names(Vec<String>);

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

        fn slice(&self, start: usize, end: usize) -> Self {
            Self(self.0[start..end].to_vec())
        }
    }

    const SETTINGS: BatchSettings =
        BatchSettings { seed: 7, batch_size: 3, gradient_accumulation: 4 };

    fn names(num_rows: usize) -> Names {
        Names((0..num_rows).map(|n| format!("set#{n}")).collect())
    }

    fn loader(num_rows: usize) -> (Loader<Names>, Start) {
        let start = Start::new();
        (Loader::training(names(num_rows), SETTINGS, start.clone()), start)
    }

    fn order(loader: &Loader<Names>) -> Vec<Vec<String>> {
        loader.iter().map(|batch| batch.unwrap().row_ids).collect()
    }

    #[test]
    fn steps_are_whole_but_for_the_last_and_lose_no_row() {
        let (loader, _) = loader(31);
        let batches: Vec<Named> = loader.iter().map(Result::unwrap).collect();
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
        let mut iterator = loader.iter();
        iterator.by_ref().for_each(drop);
        assert!(iterator.progress().is_completed());
    }

    #[test]
    fn batches_are_dealt_out_within_their_step() {
        // Two steps of 4 batches, and one of 3.
        for (num_devices, expected) in
            [(1, [1; 11].as_slice()), (3, &[3, 1, 3, 1, 3]), (4, &[4, 4, 3]), (9, &[4, 4, 3])]
        {
            let (loader, _) = loader(31);
            let (mut batches, mut num_dealt, mut num_rows) = (loader.iter(), Vec::new(), 0);
            loop {
                let (dealt, progress) = next_batches(&mut *batches, num_devices).unwrap();
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
        let (loader, start) = loader(31);
        let first = order(&loader);
        assert_eq!(order(&loader), first);
        start.set(2, 0);
        assert_ne!(order(&loader), first);
        start.set(1, 0);
        assert_eq!(order(&loader), first);
        let other_seed = BatchSettings { seed: 8, ..SETTINGS };
        assert_ne!(order(&Loader { settings: other_seed, ..loader.clone() }), first);
    }

    #[test]
    fn steps_that_were_taken_are_left_out() {
        let (loader, start) = loader(31);
        let whole = order(&loader);
        // Two steps of 4 batches, and one of 3.
        for (num_steps, num_batches) in [(0, 0), (1, 4), (2, 8), (3, 11), (4, 11)] {
            start.set(1, num_steps);
            assert_eq!(order(&loader), whole[num_batches..]);
            let mut batches = loader.iter();
            let rows = whole[..num_batches].concat().len();
            assert_eq!(batches.progress().items_processed, rows);
            batches.by_ref().for_each(drop);
            assert!(batches.progress().is_completed());
        }
    }

    #[test]
    fn validation_is_in_order() {
        let loader = Loader::validation(names(10), SETTINGS);
        assert_eq!(order(&loader)[0], ["set#0", "set#1", "set#2"]);
        assert_eq!(order(&loader), order(&loader));
    }

    #[test]
    fn rows_that_are_not_used_are_left_out_of_the_epoch() {
        let (loader, start) = loader(31);
        start.set(3, 0);
        assert_eq!(loader.size(3), (16, 2));
        assert_eq!(order(&loader).concat().len(), 16);
    }

    #[test]
    fn an_iterator_that_is_dropped_early_ends_its_thread() {
        let (loader, _) = loader(31);
        let mut batches = loader.iter();
        assert!(batches.next().is_some());
        // Would wait for ever if the producer did.
        drop(batches);
    }
}

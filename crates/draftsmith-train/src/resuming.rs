//! Tests of both trainers: a training that is stopped anywhere and goes on ends, bit for bit, as one
//! that never stopped.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::checkpoint::Resumption;
use crate::stint::{Ending, Stint};
use crate::test_pair::{responses, tiny_draft};
use crate::test_runs::{Watcher, files_under, finished};
use crate::{AdapterTraining, HeadTraining, Interrupter, TrainError, train_adapter, train_head};

/// The files of an export: the weights, and `config.json` with every epoch's scores and losses.
type Export = [Vec<u8>; 2];

/// A training from scratch, as a process of its own would see it: only the directory is shared.
type Train = fn(learning_rate: f64, Stint<'_>) -> Result<Ending<Export>, TrainError>;

const NUM_EPOCHS: usize = 3;
const NUM_BATCHES_A_STEP: usize = 3;

/// Climbs to the end, and far too high, so that the best weights are not the last.
const RATE: f64 = 0.5;

fn exported(write: impl FnOnce(&Path)) -> Export {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    ["model.safetensors", "config.json"].map(|name| std::fs::read(dir.path().join(name)).unwrap())
}

fn map<T, U>(ending: Ending<T>, then: impl FnOnce(T) -> U) -> Ending<U> {
    match ending {
        Ending::Finished(best) => Ending::Finished(then(best)),
        Ending::Stopped { best, num_steps, num_planned_steps } => {
            Ending::Stopped { best: best.map(then), num_steps, num_planned_steps }
        }
    }
}

fn head(learning_rate: f64, stint: Stint<'_>) -> Result<Ending<Export>, TrainError> {
    let training = HeadTraining {
        num_layers: 2,
        tied: false,
        learning_rate,
        warm_up_share: 1.0,
        weight_decay: 0.1,
        num_epochs: NUM_EPOCHS,
        batch_size: 2,
        gradient_accumulation: NUM_BATCHES_A_STEP,
        validation_share: 0.3,
        ..HeadTraining::default()
    };
    let ending = train_head(&tiny_draft(32, 64), &responses(40, 20, 8), &training, 3, stint)?;
    Ok(map(ending, |trained| exported(|dir| trained.head.write_dir(dir, &trained.config).unwrap())))
}

fn adapter(learning_rate: f64, stint: Stint<'_>) -> Result<Ending<Export>, TrainError> {
    let training = AdapterTraining {
        learning_rate,
        warm_up_share: 1.0,
        num_epochs: NUM_EPOCHS,
        batch_size: 2,
        gradient_accumulation: NUM_BATCHES_A_STEP,
        loss_chunk: 5,
        validation_share: 0.3,
        ..AdapterTraining::default()
    };
    let ending = train_adapter(&tiny_draft(32, 64), &responses(40, 20, 8), &training, 1, 3, stint)?;
    Ok(map(ending, |trained| {
        exported(|dir| trained.adapter.write_dir(dir, &trained.config).unwrap())
    }))
}

const TRAINERS: [Train; 2] = [head, adapter];

/// What training left of its steps.
fn metrics(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap()
}

/// The export of a training that is never stopped, and its number of steps.
fn whole(train: Train) -> (Export, usize) {
    let dir = tempfile::tempdir().unwrap();
    let export = finished(train(RATE, Stint::new(dir.path(), "whole")).unwrap());
    let Resumption::After(num_steps) = Resumption::find(dir.path(), "whole").unwrap() else {
        panic!("no state is left");
    };
    (export, num_steps)
}

fn value(export: &Export, key: &str) -> serde_json::Value {
    let config: serde_json::Value = serde_json::from_slice(&export[1]).unwrap();
    config["training"][key].clone()
}

#[test]
fn stopped_after_any_step_it_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, num_steps) = whole(train);
        assert_ne!(value(&expected, "best_epoch"), NUM_EPOCHS, "the best is the last");
        // Steps within epochs, and one at the end of each.
        assert!(num_steps.is_multiple_of(NUM_EPOCHS) && num_steps > 3 * NUM_EPOCHS, "{num_steps}");
        for stop in 1..num_steps {
            let dir = tempfile::tempdir().unwrap();
            let stint = Stint { max_steps: Some(stop), ..Stint::new(dir.path(), "f") };
            match train(RATE, stint).unwrap() {
                Ending::Stopped { best, num_steps: taken, num_planned_steps } => {
                    assert_eq!((taken, num_planned_steps), (stop, num_steps));
                    assert_eq!(best.is_some(), stop >= num_steps / NUM_EPOCHS);
                }
                Ending::Finished(_) => panic!("not stopped after {stop}"),
            }
            let export = finished(train(RATE, Stint::new(dir.path(), "f")).unwrap());
            assert!(export == expected, "stopped after step {stop} of {num_steps}: other bytes");
        }
    }
}

#[test]
fn one_step_at_a_time_and_saved_after_each_it_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, num_steps) = whole(train);
        let stepwise = tempfile::tempdir().unwrap();
        let dir = &stepwise;
        for taken in 1..num_steps {
            let stint = Stint { max_steps: Some(1), ..Stint::new(dir.path(), "f") };
            assert!(matches!(train(RATE, stint).unwrap(), Ending::Stopped { .. }));
            assert_eq!(Resumption::find(dir.path(), "f").unwrap(), Resumption::After(taken));
        }
        let stint = Stint { max_steps: Some(1), ..Stint::new(dir.path(), "f") };
        assert!(finished(train(RATE, stint).unwrap()) == expected);

        let dir = tempfile::tempdir().unwrap();
        let stint = Stint { save_interval: Duration::ZERO, ..Stint::new(dir.path(), "f") };
        assert!(finished(train(RATE, stint).unwrap()) == expected, "saving changes the result");
        assert_eq!(metrics(dir.path()).lines().count(), num_steps);
        assert_eq!(metrics(dir.path()), metrics(stepwise.path()));
        // It is at its end: there is nothing left to do.
        let stint = Stint { max_steps: Some(0), ..Stint::new(dir.path(), "f") };
        assert!(finished(train(RATE, stint).unwrap()) == expected);
    }
}

#[test]
fn interrupted_between_the_batches_of_a_step_it_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, _) = whole(train);
        let mut num_within_a_step = 0;
        // The renderer is told on another thread, so that the place is not quite the same each time.
        for stop_after in (4..).step_by(5).take(12) {
            let dir = tempfile::tempdir().unwrap();
            let interrupter = Interrupter::new();
            let num_updates = Arc::new(AtomicUsize::new(0));
            let watcher = Watcher {
                interrupter: interrupter.clone(),
                stop_after,
                num_updates: num_updates.clone(),
                num_final_scores: Arc::default(),
            };
            let renderer = Box::new(watcher);
            let stint = Stint { renderer, interrupter, ..Stint::new(dir.path(), "f") };
            let ending = train(RATE, stint).unwrap();
            if let Ending::Stopped { num_steps, best: None, .. } = &ending {
                // In the first epoch every update is a training batch.
                let num_batches = num_updates.load(Ordering::SeqCst);
                num_within_a_step += usize::from(num_batches > num_steps * NUM_BATCHES_A_STEP);
            }
            let export = finished(train(RATE, Stint::new(dir.path(), "f")).unwrap());
            assert!(export == expected, "stopped at batch {stop_after}: other bytes");
        }
        assert!(num_within_a_step > 0, "none was within a step");
    }
}

#[test]
fn another_trainings_state_is_not_gone_on_from() {
    for train in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        let other = Stint { max_steps: Some(4), ..Stint::new(dir.path(), "other") };
        train(2.0 * RATE, other).unwrap();
        let (expected, _) = whole(train);
        assert!(finished(train(RATE, Stint::new(dir.path(), "f")).unwrap()) == expected);
        assert_eq!(Resumption::find(dir.path(), "other").unwrap(), Resumption::Other);
    }
}

#[test]
fn a_state_that_cannot_be_read_is_named() {
    for train in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        train(RATE, Stint { max_steps: Some(9), ..Stint::new(dir.path(), "f") }).unwrap();
        for name in ["state.toml", "optimizer.bpk", "model.bpk", "best.bpk"] {
            let files = files_under(dir.path());
            let file = files.iter().find(|file| file.ends_with(name)).unwrap();
            let path = dir.path().join(file);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            let message = train(RATE, Stint::new(dir.path(), "f")).unwrap_err().to_string();
            let named = format!("cannot go on from `{}`", path.display());
            assert!(message.contains(&named), "{name}: {message}");
            assert!(message.contains("hint: delete"), "{name}: {message}");
            std::fs::write(&path, bytes).unwrap();
        }
        finished(train(RATE, Stint::new(dir.path(), "f")).unwrap());
    }
}

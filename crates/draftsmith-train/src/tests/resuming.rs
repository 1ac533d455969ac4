//! Tests of both trainers, with one member and with several: a resumed training ends with the same bits as
//! an uninterrupted one, each member with the same bits as if trained alone, and several devices with the
//! same bits as one.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Device;

use crate::error::Result;
use crate::log::renderer::Interrupter;
use crate::run::checkpoint::Resumption;
use crate::run::{Ending, TrainingRun};
use crate::tests::pair::{deep_target, responses, tiny_draft};
use crate::tests::runs::{Export, Watcher, exported, files_under, finished};
use crate::{
    AdapterShape, AdapterTraining, HeadTraining, InitialWeights, OptimizerSettings, TrainedHead,
    TrainedState, train_heads, train_self_drafts,
};

/// Runs a training as a new process would: only the directory is shared with earlier runs.
type Train = fn(learning_rate: f64, TrainingRun<'_>) -> Result<Ending<Vec<Export>>>;

const NUM_EPOCHS: usize = 3;
const NUM_BATCHES_A_STEP: usize = 3;

/// The peak learning rate. It is reached at the end and is far too high, so that the best weights are not
/// the last.
const RATE: f64 = 0.5;

fn optimizer(learning_rate: f64) -> OptimizerSettings {
    OptimizerSettings {
        learning_rate: Some(learning_rate),
        warmup_ratio: 1.0,
        num_epochs: NUM_EPOCHS,
        batch_size: 2,
        gradient_accumulation: NUM_BATCHES_A_STEP,
        validation_fraction: 0.3,
        ..OptimizerSettings::HEAD
    }
}

fn head_training(learning_rate: f64) -> HeadTraining {
    HeadTraining {
        num_layers: 2,
        tied: false,
        optimizer: OptimizerSettings { weight_decay: 0.1, ..optimizer(learning_rate) },
        ..HeadTraining::default()
    }
}

fn heads(heads: &[HeadTraining], run: TrainingRun<'_>) -> Result<Ending<Vec<Export>>> {
    let (draft, rows) = (tiny_draft(32, 64), responses(40, 20, 8));
    let ending = train_heads(&draft, &rows, heads, 3, run)?;
    let export = |trained: TrainedHead| {
        exported(|dir| trained.model.write_dir(dir, &trained.config).unwrap())
    };
    Ok(ending.map(|all| all.into_iter().map(export).collect()))
}

fn head(learning_rate: f64, run: TrainingRun<'_>) -> Result<Ending<Vec<Export>>> {
    heads(&[head_training(learning_rate)], run)
}

/// Three heads; two of them stop an epoch early.
fn head_sweep(learning_rate: f64, run: TrainingRun<'_>) -> Result<Ending<Vec<Export>>> {
    let mut base = head_training(learning_rate);
    base.optimizer.patience = Some(1);
    heads(
        &[
            HeadTraining { num_layers: 0, rejection_weight: 1.0, ..base.clone() },
            HeadTraining { num_layers: 3, tied: true, rejection_weight: 1.0, ..base.clone() },
            base,
        ],
        run,
    )
}

fn adapters(
    exit_layers: &[usize],
    learning_rate: f64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<Export>>> {
    let training = |exit_layer: &usize| {
        AdapterTraining::default().with(|it| {
            it.exit_layer = *exit_layer;
            it.common.loss_chunk = 5;
            it.common.optimizer =
                OptimizerSettings { weight_decay: 0.01, beta_2: 0.95, ..optimizer(learning_rate) };
            it.architecture = draftsmith_model::AdapterArchitecture::Attention;
            it.common.initial = InitialWeights::Random;
        })
    };
    let trainings: Vec<AdapterTraining> = exit_layers.iter().map(training).collect();
    let ending =
        train_self_drafts(&deep_target(32, 64), &responses(40, 20, 8), &trainings, 3, run)?;
    let export = |trained: TrainedState<AdapterShape>| {
        exported(|dir| trained.model.write_dir(dir, &trained.config).unwrap())
    };
    Ok(ending.map(|all| all.into_iter().map(export).collect()))
}

fn adapter(learning_rate: f64, run: TrainingRun<'_>) -> Result<Ending<Vec<Export>>> {
    adapters(&[1], learning_rate, run)
}

fn adapter_pass(learning_rate: f64, run: TrainingRun<'_>) -> Result<Ending<Vec<Export>>> {
    adapters(&[2, 1], learning_rate, run)
}

const TRAINERS: [Train; 4] = [head, head_sweep, adapter, adapter_pass];

/// The step logs of a training, one per member.
fn metrics(dir: &Path) -> Vec<String> {
    let files = files_under(dir).into_iter();
    let logs = files.filter(|file| file.ends_with("metrics.jsonl"));
    logs.map(|file| std::fs::read_to_string(dir.join(file)).unwrap()).collect()
}

/// The exports of an uninterrupted training, and its number of steps.
fn whole(train: Train) -> (Vec<Export>, usize) {
    let dir = tempfile::tempdir().unwrap();
    let export = finished(train(RATE, TrainingRun::new(dir.path(), "whole")).unwrap());
    let Resumption::After(num_steps) = Resumption::find(dir.path(), "whole").unwrap() else {
        panic!("the state is missing");
    };
    (export, num_steps)
}

fn value(export: &Export, key: &str) -> serde_json::Value {
    let config: serde_json::Value = serde_json::from_slice(&export[1]).unwrap();
    config["training"][key].clone()
}

#[test]
fn a_training_stopped_after_any_step_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, num_steps) = whole(train);
        let is_early = |export| value(export, "best_epoch") != NUM_EPOCHS;
        assert!(expected.iter().any(is_early), "the best is the last");
        // Some steps are within epochs, and some end them.
        assert!(num_steps.is_multiple_of(NUM_EPOCHS) && num_steps > 3 * NUM_EPOCHS, "{num_steps}");
        for stop in 1..num_steps {
            let dir = tempfile::tempdir().unwrap();
            let run = TrainingRun { max_steps: Some(stop), ..TrainingRun::new(dir.path(), "f") };
            match train(RATE, run).unwrap() {
                Ending::Stopped { best, num_steps: taken, num_planned_steps } => {
                    assert_eq!((taken, num_planned_steps), (stop, num_steps));
                    assert_eq!(best.is_some(), stop >= num_steps / NUM_EPOCHS);
                }
                Ending::Finished(_) => panic!("not stopped after {stop}"),
            }
            let export = finished(train(RATE, TrainingRun::new(dir.path(), "f")).unwrap());
            assert!(export == expected, "stopped after step {stop} of {num_steps}: other bytes");
        }
    }
}

#[test]
fn a_training_stopped_or_saved_after_every_step_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, num_steps) = whole(train);
        let stepwise = tempfile::tempdir().unwrap();
        let dir = &stepwise;
        for taken in 1..num_steps {
            let run = TrainingRun { max_steps: Some(1), ..TrainingRun::new(dir.path(), "f") };
            assert!(matches!(train(RATE, run).unwrap(), Ending::Stopped { .. }));
            assert_eq!(Resumption::find(dir.path(), "f").unwrap(), Resumption::After(taken));
        }
        let run = TrainingRun { max_steps: Some(1), ..TrainingRun::new(dir.path(), "f") };
        assert!(finished(train(RATE, run).unwrap()) == expected);

        let dir = tempfile::tempdir().unwrap();
        let run =
            TrainingRun { save_interval: Duration::ZERO, ..TrainingRun::new(dir.path(), "f") };
        assert!(finished(train(RATE, run).unwrap()) == expected, "saving changes the result");
        let steps = |export| value(export, "num_steps").as_u64().unwrap();
        let mut steps: Vec<u64> = expected.iter().map(steps).collect();
        let mut lines: Vec<u64> =
            metrics(dir.path()).iter().map(|log| log.lines().count() as u64).collect();
        assert_eq!(steps.iter().max(), Some(&(num_steps as u64)));
        steps.sort_unstable();
        lines.sort_unstable();
        assert_eq!(lines, steps);
        assert_eq!(metrics(dir.path()), metrics(stepwise.path()));
        // A finished training takes no more steps.
        let run = TrainingRun { max_steps: Some(0), ..TrainingRun::new(dir.path(), "f") };
        assert!(finished(train(RATE, run).unwrap()) == expected);
    }
}

#[test]
fn a_training_interrupted_within_a_step_ends_with_the_same_bytes() {
    for train in TRAINERS {
        let (expected, _) = whole(train);
        let mut num_within_a_step = 0;
        for stop_after in (4..).step_by(5).take(12) {
            let dir = tempfile::tempdir().unwrap();
            let (run, num_updates) = stopped_after(stop_after, TrainingRun::new(dir.path(), "f"));
            let ending = train(RATE, run).unwrap();
            if let Ending::Stopped { num_steps, best: None, .. } = &ending {
                // In the first epoch every update is a training batch.
                let num_batches = num_updates.load(Ordering::SeqCst);
                num_within_a_step += usize::from(num_batches > num_steps * NUM_BATCHES_A_STEP);
            }
            let export = finished(train(RATE, TrainingRun::new(dir.path(), "f")).unwrap());
            assert!(export == expected, "stopped at batch {stop_after}: other bytes");
        }
        assert!(num_within_a_step > 0, "no interruption was within a step");
    }
}

/// A run that stops after a number of updates, and the counter of updates.
fn stopped_after(stop_after: usize, run: TrainingRun<'_>) -> (TrainingRun<'_>, Arc<AtomicUsize>) {
    let interrupter = Interrupter::new();
    let num_updates = Arc::new(AtomicUsize::new(0));
    let watcher = Watcher {
        interrupter: interrupter.clone(),
        stop_after,
        num_updates: num_updates.clone(),
        num_final_scores: Arc::default(),
    };
    let should_stop = Box::new(move || interrupter.should_stop());
    (TrainingRun { listener: Box::new(watcher), should_stop, ..run }, num_updates)
}

/// A run on several devices: the CPU, listed several times. Each has a thread and copies of weights and
/// batches; transfers between GPUs are not tested.
fn on_devices(num_devices: usize, dir: &Path) -> TrainingRun<'_> {
    TrainingRun {
        more_devices: vec![Device::flex(); num_devices - 1],
        ..TrainingRun::new(dir, "f")
    }
}

#[test]
fn several_devices_end_with_the_same_bytes_as_one() {
    for train in TRAINERS {
        let (expected, num_steps) = whole(train);
        // A step's three batches take two rounds, one, and one with idle devices.
        for num_devices in [2, 3, 5] {
            let dir = tempfile::tempdir().unwrap();
            let found = finished(train(RATE, on_devices(num_devices, dir.path())).unwrap());
            assert!(found == expected, "{num_devices} devices: other bytes");
        }
        // Resumed on other devices, within an epoch and at its end.
        for (before, after) in [(1, 2), (3, 1), (2, 3)] {
            for stop in [1, num_steps / NUM_EPOCHS, num_steps - 1] {
                let dir = tempfile::tempdir().unwrap();
                let run = TrainingRun { max_steps: Some(stop), ..on_devices(before, dir.path()) };
                assert!(matches!(train(RATE, run).unwrap(), Ending::Stopped { .. }));
                let found = finished(train(RATE, on_devices(after, dir.path())).unwrap());
                assert!(found == expected, "{before}, then {after} devices: other bytes");
            }
        }
    }
}

#[test]
fn devices_take_the_batches_of_a_step_in_rounds() {
    for train in TRAINERS {
        for (num_devices, a_round) in [(2, 2), (3, 3)] {
            let mut num_stopped = 0;
            for stop_after in 1..8 {
                let dir = tempfile::tempdir().unwrap();
                let (run, num_updates) =
                    stopped_after(stop_after, on_devices(num_devices, dir.path()));
                if let Ending::Stopped { best: None, .. } = train(RATE, run).unwrap() {
                    // Interruptions happen only between rounds.
                    let in_step = num_updates.load(Ordering::SeqCst) % NUM_BATCHES_A_STEP;
                    assert!(in_step == 0 || in_step == a_round, "{in_step} of {num_devices}");
                    num_stopped += 1;
                }
            }
            assert!(num_stopped > 0, "no run stopped in its first epoch");
        }
    }
}

#[test]
fn a_state_with_another_fingerprint_is_ignored() {
    for train in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        let other = TrainingRun { max_steps: Some(4), ..TrainingRun::new(dir.path(), "other") };
        train(2.0 * RATE, other).unwrap();
        let (expected, _) = whole(train);
        assert!(finished(train(RATE, TrainingRun::new(dir.path(), "f")).unwrap()) == expected);
        assert_eq!(Resumption::find(dir.path(), "other").unwrap(), Resumption::Other);
    }
}

#[test]
fn an_error_names_the_unreadable_state_file() {
    for train in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        train(RATE, TrainingRun { max_steps: Some(9), ..TrainingRun::new(dir.path(), "f") })
            .unwrap();
        for name in ["state.toml", "optimizer.bpk", "model.bpk", "best.bpk"] {
            let files = files_under(dir.path());
            let file = files.iter().find(|file| file.ends_with(name)).unwrap();
            let path = dir.path().join(file);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            let message = train(RATE, TrainingRun::new(dir.path(), "f")).unwrap_err().to_string();
            let named = format!("cannot resume from `{}`", path.display());
            assert!(message.contains(&named), "{name}: {message}");
            assert!(message.contains("hint: delete"), "{name}: {message}");
            std::fs::write(&path, bytes).unwrap();
        }
        finished(train(RATE, TrainingRun::new(dir.path(), "f")).unwrap());
    }
}

#[test]
fn each_member_ends_with_the_same_bytes_as_if_trained_alone() {
    let mut base = head_training(0.1);
    base.optimizer.num_epochs = 4;
    let mut sweep = Vec::new();
    for num_layers in 0..3 {
        for (tied, rejection_weight) in [(true, 1.0), (false, 6.0)] {
            sweep.push(HeadTraining { num_layers, tied, rejection_weight, ..base.clone() });
        }
    }
    let mut num_epochs = Vec::new();
    for patience in [None, Some(1), Some(2)] {
        let mut sweep = sweep.clone();
        sweep.iter_mut().for_each(|head| head.optimizer.patience = patience);
        let dir = tempfile::tempdir().unwrap();
        let together = finished(heads(&sweep, TrainingRun::new(dir.path(), "")).unwrap());
        for (head, found) in sweep.iter().zip(together) {
            let alone_dir = tempfile::tempdir().unwrap();
            let run = TrainingRun::new(alone_dir.path(), "");
            let alone = finished(heads(std::slice::from_ref(head), run).unwrap()).remove(0);
            let name = head.name();
            assert!(found == alone, "{name}, patience {patience:?}: other bytes");
            let log = |dir: &Path| std::fs::read(dir.join("metrics.jsonl")).unwrap();
            assert!(log(&dir.path().join(&name)) == log(alone_dir.path()), "{name}: other steps");
            if patience == Some(1) {
                num_epochs.push(value(&found, "epochs").as_array().unwrap().len());
            }
        }
    }
    // Some members stop before others; otherwise this would not test patience.
    assert!(num_epochs.iter().min() < num_epochs.iter().max(), "{num_epochs:?}");
    assert!(*num_epochs.iter().min().unwrap() < 4, "{num_epochs:?}");

    let [both, one, two] = [vec![2, 1], vec![1], vec![2]].map(|exit_layers| {
        let dir = tempfile::tempdir().unwrap();
        finished(adapters(&exit_layers, RATE, TrainingRun::new(dir.path(), "")).unwrap())
    });
    assert!(both == [two, one].concat(), "other bytes");
    assert!(both[0] != both[1]);
}

#[test]
fn a_training_ends_when_no_member_has_patience_left() {
    let mut training = head_training(RATE);
    training.optimizer.num_epochs = 50;
    training.optimizer.patience = Some(2);
    training.optimizer.warmup_ratio = 0.0;
    let dir = tempfile::tempdir().unwrap();
    let heads = |run| heads(std::slice::from_ref(&training), run).unwrap();
    let ended = finished(heads(TrainingRun::new(dir.path(), "f"))).remove(0);
    let epochs = value(&ended, "epochs").as_array().unwrap().len();
    let best = value(&ended, "best_epoch").as_u64().unwrap() as usize;
    assert_eq!(epochs, best + 2);
    assert!(epochs < 50);
    assert_eq!(value(&ended, "interrupted"), false);
    // Another run changes nothing.
    assert!(finished(heads(TrainingRun::new(dir.path(), "f"))) == [ended]);
}

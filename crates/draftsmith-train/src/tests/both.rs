//! Tests that apply to head and adapter training alike: repeatability, interruption, counts and records, and
//! errors about the input.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use draftsmith_data::ResponseRow;
use serde_json::Value;

use crate::adapter::{AdapterShape, AdapterTraining};
use crate::data::RowCounts;
use crate::data::split::is_held_out;
use crate::eagle3::{Eagle3Shape, Eagle3Training};
use crate::error::{Result, Section};
use crate::head::learner::HeadLearner;
use crate::head::settings::HeadTraining;
use crate::head::train_heads;
use crate::lessons::settings::InitialWeights;
use crate::log::renderer::Interrupter;
use crate::run::member::Trainee;
use crate::run::optimizer::OptimizerSettings;
use crate::run::trained::Trained;
use crate::run::{Ending, TrainingRun};
use crate::self_draft::learner::StateLearner;
use crate::self_draft::train_self_drafts;
use crate::tests::pair::{deep_target, response_row, responses, tiny_draft};
use crate::tests::runs::{Export, Watcher, assert_contains, exported, files_under, finished};

/// The result of a training of either kind.
struct Outcome {
    export: Export,
    rows: RowCounts,
    num_supervised: usize,
    num_steps: usize,
    /// Optimizer steps by the end of each epoch.
    epoch_steps: Vec<usize>,
    interrupted: bool,
    scores: Value,
}

impl Outcome {
    fn of<M, C, S: serde::Serialize>(
        trained: &Trained<M, C, S>,
        write: impl FnOnce(&Path),
    ) -> Self {
        Self {
            export: exported(write),
            rows: trained.rows,
            num_supervised: trained.num_supervised,
            num_steps: trained.num_steps,
            epoch_steps: trained.epochs.iter().map(|epoch| epoch.num_steps).collect(),
            interrupted: trained.interrupted,
            // Converted through text, which may round the last digit as `config.json` does.
            scores: serde_json::from_str(&serde_json::to_string(&trained.scores).unwrap()).unwrap(),
        }
    }

    /// The record of the training in `config.json`.
    fn record(&self) -> Value {
        let mut config: Value = serde_json::from_slice(&self.export[1]).unwrap();
        config["training"].take()
    }
}

/// Trains one member with the given rows, optimizer, seed and run.
type Train = fn(&[ResponseRow], OptimizerSettings, u64, TrainingRun<'_>) -> Result<Ending<Outcome>>;

/// One of the trainers, with small and quick settings.
struct Subject {
    section: Section,
    train: Train,
    /// The key of the number of labels or tokens in the record.
    supervised: &'static str,
    /// The first position that can be supervised.
    first_supervised: usize,
    /// Settings that `config.json` has outside the record.
    in_config: &'static [&'static str],
    num_weights: u64,
    scores: &'static [&'static str],
}

fn train_head(
    rows: &[ResponseRow],
    optimizer: OptimizerSettings,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Outcome>> {
    let head = HeadTraining {
        num_layers: 1,
        // Every position has a label, so that they can be counted.
        mixing_ratio: 0.0,
        optimizer,
        ..HeadTraining::default()
    };
    let ending = train_heads(&tiny_draft(16, 64), rows, &[head], seed, run)?;
    Ok(ending.map(|mut heads| {
        let head = heads.remove(0);
        Outcome::of(&head, |dir| head.model.write_dir(dir, &head.config).unwrap())
    }))
}

fn train_adapter(
    rows: &[ResponseRow],
    optimizer: OptimizerSettings,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Outcome>> {
    let settings = AdapterTraining::default().with(|it| {
        it.exit_layer = 1;
        it.common.loss_chunk = 5;
        it.common.optimizer = optimizer;
        it.architecture = draftsmith_model::AdapterArchitecture::Attention;
        it.common.initial = InitialWeights::Random;
    });
    let ending = train_self_drafts(&tiny_draft(16, 64), rows, &[settings], seed, run)?;
    Ok(ending.map(|mut adapters| {
        let adapter = adapters.remove(0);
        Outcome::of(&adapter, |dir| adapter.model.write_dir(dir, &adapter.config).unwrap())
    }))
}

fn train_drafter(
    rows: &[ResponseRow],
    optimizer: OptimizerSettings,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Outcome>> {
    let settings = Eagle3Training::default().with(|it| {
        it.layers = Some([0, 1, 2]);
        it.num_steps = 3;
        it.common.loss_chunk = 5;
        it.common.optimizer = optimizer;
    });
    let ending = train_self_drafts(&deep_target(16, 64), rows, &[settings], seed, run)?;
    Ok(ending.map(|mut drafters| {
        let drafter = drafters.remove(0);
        Outcome::of(&drafter, |dir| drafter.model.write_dir(dir, &drafter.config).unwrap())
    }))
}

const TRAINERS: [Subject; 3] = [
    Subject {
        section: "head",
        train: train_head,
        supervised: "num_labels",
        first_supervised: 0,
        in_config: &["num_layers", "tied", "form", "inputs", "sweep"],
        // One block and two logits.
        num_weights: 16 * 16 + 16 + 16 * 2 + 2,
        scores: &["KL", "unshifted KL", "BCE", "AUROC", "Brier", "ECE"],
    },
    Subject {
        section: "adapter",
        train: train_adapter,
        supervised: "num_tokens",
        first_supervised: 0,
        in_config: &["exit_layer", "architecture"],
        // Four projections (keys and values of one head of two) and two norms.
        num_weights: 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16,
        scores: &["cross-entropy", "KL", "agreement", "overlap"],
    },
    Subject {
        section: "eagle3",
        train: train_drafter,
        supervised: "num_tokens",
        first_supervised: 1,
        in_config: &["layers"],
        // fc, four projections of which three read two rows, the MLP, four norms and the LM head.
        num_weights: 3 * 16 * 16
            + 2 * (16 * 16 + 2 * 16 * 8)
            + 16 * 16
            + 3 * 16 * 32
            + 4 * 16
            + 16 * 48,
        scores: &["accepted length", "agreement", "cross-entropy", "overlap"],
    },
];

const SEED: u64 = 3;

fn optimizer() -> OptimizerSettings {
    OptimizerSettings {
        learning_rate: Some(1e-2),
        num_epochs: 2,
        gradient_accumulation: 2,
        validation_fraction: 0.3,
        ..OptimizerSettings::HEAD
    }
}

impl Subject {
    fn trained(&self, rows: &[ResponseRow], seed: u64) -> Outcome {
        let dir = tempfile::tempdir().unwrap();
        let run = TrainingRun::new(dir.path(), "");
        finished((self.train)(rows, optimizer(), seed, run).unwrap())
    }

    fn error(&self, rows: &[ResponseRow], optimizer: OptimizerSettings) -> String {
        let dir = tempfile::tempdir().unwrap();
        let ended = (self.train)(rows, optimizer, SEED, TrainingRun::new(dir.path(), ""));
        ended.map(|_| ()).unwrap_err().to_string()
    }

    #[track_caller]
    fn assert_error(&self, rows: &[ResponseRow], optimizer: OptimizerSettings, parts: &[&str]) {
        assert_contains(&self.error(rows, optimizer), parts);
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let rows = responses(30, 30, 8);
    for subject in TRAINERS {
        let first = subject.trained(&rows, 1).export;
        // Other tests train concurrently: neither threads nor burn's generator may matter.
        assert!(first == subject.trained(&rows, 1).export, "the bytes differ");
        assert!(first != subject.trained(&rows, 2).export, "the seed does nothing");
    }
}

#[test]
fn config_json_records_the_training() {
    for subject in TRAINERS {
        let trained = subject.trained(&responses(20, 10, 6), SEED);
        let record = trained.record();
        assert_eq!(record["seed"], SEED);
        assert_eq!(record["optimizer"]["learning_rate"], 1e-2);
        assert_eq!(record["optimizer"]["validation_fraction"], 0.3);
        assert_eq!(record["epochs"].as_array().unwrap().len(), 2);
        assert_eq!(record["epochs"][1]["epoch"], 2);
        assert_eq!(record["validation"], trained.scores);
        assert_eq!(record["num_training_rows"], trained.rows.num_training);
        assert_eq!(record["num_validation_rows"], trained.rows.num_validation);
        assert_eq!(record["num_steps"], trained.num_steps);
        assert_eq!(record[subject.supervised], trained.num_supervised);
        assert_eq!(record["interrupted"], false);
        for key in subject.in_config {
            assert!(record.get(key).is_none(), "{key} appears twice");
        }
    }
}

#[test]
fn rows_steps_and_supervised_positions_are_counted_exactly() {
    let mut rows = responses(30, 10, 2);
    let num_usable = rows.len();
    rows.push(response_row("set#90", &[1; 64], &[2], &[2], &[0.5]));
    for subject in TRAINERS {
        let trained = subject.trained(&rows, SEED);
        let RowCounts { num_training, num_validation, num_unusable } = trained.rows;
        assert_eq!((num_training + num_validation, num_unusable), (num_usable, 1));
        // Steps of 4 · 2 rows, and a shorter last one, in each of two epochs.
        let steps = num_training.div_ceil(8);
        assert_eq!(trained.epoch_steps, [steps, 2 * steps]);
        assert_eq!(trained.num_steps, 2 * steps);
        let training = rows[..num_usable].iter().filter(|row| !is_held_out(row, 0.3));
        let num_in = |row: &ResponseRow| {
            let first = subject.first_supervised.saturating_sub(row.prompt_ids.len() - 1);
            row.response_ids.len() - first
        };
        let tokens: usize = training.map(num_in).sum();
        assert_eq!(trained.num_supervised, 2 * tokens);
    }
}

#[test]
fn the_saved_state_contains_only_the_trained_module() {
    for subject in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        let stale = dir.path().join("checkpoint/epoch-9-step-0/model.bpk");
        std::fs::create_dir_all(stale.parent().unwrap()).unwrap();
        std::fs::write(&stale, "of an earlier run").unwrap();
        std::fs::write(dir.path().join("mine.txt"), "untouched").unwrap();
        let run = TrainingRun::new(dir.path(), "");
        (subject.train)(&responses(20, 10, 6), optimizer(), SEED, run).unwrap();
        let files = files_under(dir.path());
        let has = |name: &str| files.contains(Path::new(name));
        for name in ["model.bpk", "optimizer.bpk", "best.bpk", "state.toml"] {
            assert!(has(&format!("checkpoint/epoch-3-step-0/{name}")), "{files:?}");
        }
        assert_eq!(files.iter().filter(|file| file.starts_with("checkpoint")).count(), 4);
        // There are no other files.
        assert!(has("mine.txt") && has("metrics.jsonl") && files.len() == 6, "{files:?}");
        // Weights of 4 bytes and a header. The embedding of the frozen model has 48 · 16 more weights.
        let model = dir.path().join("checkpoint/epoch-3-step-0/model.bpk");
        let size = std::fs::metadata(model).unwrap().len();
        let num_bytes = subject.num_weights * 4;
        assert!((num_bytes..num_bytes + 3000).contains(&size), "{size}");
    }
}

#[test]
fn every_score_is_listed_in_this_file() {
    fn names<L: Trainee>() -> Vec<&'static str> {
        L::SCORES.iter().map(|score| score.name).collect()
    }
    let [head, adapter, drafter] = TRAINERS;
    assert_eq!(names::<HeadLearner>(), head.scores);
    assert_eq!(names::<StateLearner<draftsmith_model::Adapter, AdapterShape>>(), adapter.scores);
    assert_eq!(names::<StateLearner<draftsmith_model::Eagle3, Eagle3Shape>>(), drafter.scores);
}

/// Trains for up to 50 epochs and stops after a number of batches. Returns the best result, and the number
/// of final validation scores that the listener received.
fn stopped_after(subject: &Subject, num_batches: usize) -> (Option<Outcome>, usize) {
    let interrupter = Interrupter::new();
    let num_final_scores = Arc::new(AtomicUsize::new(0));
    let watcher = Watcher {
        interrupter: interrupter.clone(),
        stop_after: num_batches,
        num_updates: Arc::default(),
        num_final_scores: num_final_scores.clone(),
    };
    if num_batches == 0 {
        interrupter.stop(None);
    }
    let dir = tempfile::tempdir().unwrap();
    let optimizer = OptimizerSettings { num_epochs: 50, ..optimizer() };
    let run = TrainingRun {
        listener: Box::new(watcher),
        should_stop: Box::new(move || interrupter.should_stop()),
        ..TrainingRun::new(dir.path(), "")
    };
    let ending = (subject.train)(&responses(40, 10, 6), optimizer, SEED, run).unwrap();
    assert!(matches!(ending, Ending::Stopped { .. }));
    (ending.best(), num_final_scores.load(Ordering::SeqCst))
}

#[test]
fn an_interrupted_training_returns_its_best_result() {
    for subject in TRAINERS {
        // An epoch has fewer than 15 batches, so this stops in a later one.
        let (trained, num_final_scores) = stopped_after(&subject, 15);
        let trained = trained.unwrap();
        assert!(trained.interrupted);
        let num_epochs = trained.epoch_steps.len();
        assert!(num_epochs > 0 && num_epochs < 10, "{num_epochs}");
        assert_eq!(trained.record()["interrupted"], true);
        // Each score and the loss, once per epoch.
        assert!(num_final_scores >= (subject.scores.len() + 1) * num_epochs);
    }
}

#[test]
fn a_training_interrupted_in_its_first_epoch_has_no_result() {
    for subject in TRAINERS {
        for num_batches in [0, 1] {
            assert!(stopped_after(&subject, num_batches).0.is_none());
        }
    }
}

#[test]
fn should_stop_is_called_after_each_batch() {
    for subject in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        let num_calls = Arc::new(AtomicUsize::new(0));
        let calls = num_calls.clone();
        let should_stop = move || calls.fetch_add(1, Ordering::SeqCst) == 4;
        let run =
            TrainingRun { should_stop: Box::new(should_stop), ..TrainingRun::new(dir.path(), "") };
        match (subject.train)(&responses(40, 10, 6), optimizer(), SEED, run).unwrap() {
            // Four batches are two complete steps.
            Ending::Stopped { best: None, num_steps, .. } => assert_eq!(num_steps, 2),
            _ => panic!("not stopped in the first epoch"),
        }
        assert_eq!(num_calls.load(Ordering::SeqCst), 5);
    }
}

#[test]
fn unusable_data_and_settings_are_errors() {
    let rows = responses(20, 10, 6);
    let too_long = [response_row("set#0", &[1; 64], &[2], &[3], &[0.5])];
    for subject in TRAINERS {
        let section = subject.section;
        subject.assert_error(&[], optimizer(), &["0 rows for training", "build more data"]);
        let fraction = format!("{section}.optimizer.validation_fraction");
        subject.assert_error(&rows[..1], optimizer(), &["of 1 in all", &fraction]);
        subject.assert_error(&too_long, optimizer(), &["(1 ", "64 tokens"]);
        let bad = OptimizerSettings { batch_size: 0, ..optimizer() };
        let problem = format!("`{section}.optimizer.batch_size` is 0");
        subject.assert_error(&rows, bad, &[&problem]);
    }
}

#[test]
fn an_infinite_loss_names_epoch_and_rows() {
    let diverging =
        OptimizerSettings { learning_rate: Some(1e38), warmup_ratio: 0.0, ..optimizer() };
    for subject in TRAINERS {
        let key = format!("{}.optimizer.learning_rate", subject.section);
        subject.assert_error(
            &responses(40, 10, 6),
            diverging,
            &["not finite in epoch 1", "`set#", &key, "'s hidden states"],
        );
    }
}

#[test]
fn an_unusable_directory_is_named() {
    for subject in TRAINERS {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "in the way").unwrap();
        let state_dir = file.join("state");
        let run = TrainingRun::new(&state_dir, "");
        let ended = (subject.train)(&responses(20, 10, 6), optimizer(), SEED, run);
        let message = ended.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("file/state"), "{message}");
    }
}

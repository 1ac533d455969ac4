//! What training must hold to: it learns, it repeats itself, it stops when told, and it says what
//! is wrong with its input.

use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Int, Tensor, TensorData, activation::sigmoid};
use burn_train::Interrupter;
use draftsmith_model::HeadForm;

use super::*;
use crate::head::features::labelled_features;
use crate::head::rows::is_held_out;
use crate::head::settings::{HeadLabels, MixedLabels};
use crate::run::optimizer::OptimizerSettings;
use crate::tests::pair::{response_row, responses, tiny_draft};
use crate::tests::runs::{Watcher, files_under, only};

/// Small and quick.
fn quick() -> HeadTraining {
    HeadTraining {
        num_layers: 1,
        optimizer: OptimizerSettings {
            learning_rate: 1e-2,
            num_epochs: 2,
            gradient_accumulation: 2,
            validation_fraction: 0.3,
            ..OptimizerSettings::HEAD
        },
        ..HeadTraining::default()
    }
}

/// The same with another optimizer.
fn quick_with(change: impl FnOnce(&mut OptimizerSettings)) -> HeadTraining {
    let mut training = quick();
    change(&mut training.optimizer);
    training
}

fn train(
    draft: &CausalLm,
    rows: &[ResponseRow],
    training: &HeadTraining,
    dir: &Path,
) -> Result<TrainedHead, TrainError> {
    train_heads(draft, rows, slice::from_ref(training), 3, Stint::new(dir, "")).map(only)
}

fn train_in_temporary_dir(rows: &[ResponseRow], training: &HeadTraining) -> TrainedHead {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap()
}

/// Rows whose label is a steep function of the draft's hidden state at the draft's token.
fn learnable_rows(draft: &CausalLm, num_rows: usize) -> Vec<ResponseRow> {
    let width = draft.config().hidden_size;
    let mut draws = SeededDraws::new(9, &["direction"]);
    let direction: Vec<f32> = (0..width).map(|_| draws.uniform() as f32 - 0.5).collect();
    let steepness = 40.0 / (width as f32).sqrt();
    let label = |hidden: &[f32]| {
        let along: f32 = hidden.iter().zip(&direction).map(|(h, d)| h * d).sum();
        1.0 / (1.0 + (-steepness * along).exp())
    };
    responses(num_rows, 24, 21)
        .into_iter()
        .map(|row| {
            let draft_ids = row.draft.unwrap().draft_ids;
            let ids: Vec<i32> =
                row.prompt_ids.iter().chain(&draft_ids).map(|id| *id as i32).collect();
            let len = ids.len();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, len]), &draft.device());
            let hidden: Vec<f32> = draft.hidden_states(ids).into_data().try_into_vec().unwrap();
            let labels: Vec<f32> =
                hidden.chunks(width).skip(row.prompt_ids.len()).map(label).collect();
            response_row(&row.id, &row.prompt_ids, &row.response_ids, &draft_ids, &labels)
        })
        .collect()
}

#[test]
fn a_head_learns_what_the_hidden_state_tells() {
    let draft = tiny_draft(16, 64);
    let rows = learnable_rows(&draft, 120);
    let training = HeadTraining {
        // All of Z from Y, so that the label is a function of what the head sees.
        mixing_ratio: 0.0,
        rejection_weight: 1.0,
        ..quick_with(|optimizer| optimizer.num_epochs = 40)
    };
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&draft, &rows, &training, dir.path()).unwrap();
    let first = &trained.epochs[0].validation;
    assert!(trained.scores.kl < 0.2 * first.kl, "{:?} after {first:?}", trained.scores);
    assert!(trained.scores.auroc.unwrap() > 0.9, "{:?}", trained.scores);
    assert!(trained.epochs[39].training_loss < trained.epochs[0].training_loss);
    assert_eq!(trained.epochs.len(), 40);
    assert!(!trained.interrupted);
}

#[test]
fn the_returned_head_is_the_one_that_was_scored_best() {
    for form in [HeadForm::Candidate, HeadForm::LookAhead] {
        assert_is_the_one_that_was_scored_best(form);
    }
}

fn assert_is_the_one_that_was_scored_best(form: HeadForm) {
    let draft = tiny_draft(16, 64);
    let rows = responses(40, 12, 4);
    // A rate this high goes up and down from epoch to epoch.
    let hot = quick_with(|optimizer| (optimizer.learning_rate, optimizer.num_epochs) = (0.3, 6));
    let training = HeadTraining { form, ..hot };
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&draft, &rows, &training, dir.path()).unwrap();
    let kls: Vec<f64> = trained.epochs.iter().map(|epoch| epoch.validation.kl).collect();
    let lowest = kls.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(trained.scores.kl, lowest, "{kls:?}");
    assert_eq!(kls[trained.best_epoch - 1], lowest);

    let held_out = rows.iter().filter(|row| is_held_out(row, 0.3));
    let frozen = DrafterModel::from(&draft);
    let gain = frozen.embedding_gain();
    assert_eq!(gain, 4.0, "of embeddings of about 0.29");
    let frozen = frozen.into();
    let mut metrics = draftsmith_theory::HeadMetrics::default();
    for row in held_out {
        let row = TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap();
        let mixture = row.mixture(3, 0, 0.15);
        if mixture.labels.is_empty() {
            continue;
        }
        let reads = training.reads();
        let mut features =
            labelled_features(&frozen, &reads, std::slice::from_ref(&mixture), 1).remove(0);
        if form == HeadForm::LookAhead {
            // What it reads in use: embeddings as they are.
            let extra = features.extra.unwrap();
            let [rows, width] = extra.dims();
            let embedding = extra.clone().slice([0..rows, 0..16]) / gain;
            let scalars = extra.slice([0..rows, 16..width]);
            features.extra = Some(Tensor::cat(vec![embedding, scalars], 1));
        }
        let logits = trained.head.acceptance_logit(features);
        assert!(!logits.is_autodiff(), "the head still records a graph");
        let probs: Vec<f32> = sigmoid(logits).into_data().try_into_vec().unwrap();
        for (prob, label) in probs.into_iter().zip(mixture.labels) {
            metrics.update(f64::from(prob), f64::from(label));
        }
    }
    let scores = metrics.finish();
    assert_eq!(scores.num_labels, trained.scores.num_labels);
    // A sigmoid in f32 here, in f64 there, and other batch shapes.
    assert!((scores.kl - trained.scores.kl).abs() < 1e-5, "{scores:?} {:?}", trained.scores);
}

#[test]
fn heads_of_every_depth_round_trip_through_their_files() {
    let rows = responses(20, 10, 6);
    for tied in [true, false] {
        for num_layers in 0..=4 {
            let short = quick_with(|optimizer| optimizer.num_epochs = 1);
            let training = HeadTraining { num_layers, tied, ..short };
            let trained = train_in_temporary_dir(&rows, &training);
            let dir = tempfile::tempdir().unwrap();
            trained.head.write_dir(dir.path(), &trained.config).unwrap();
            let (config, read) = AcceptanceHead::from_dir(dir.path(), 16, &Device::flex()).unwrap();
            assert_eq!((config.num_layers, config.is_tied()), (num_layers, tied));
            let keys =
                |config: &AcceptanceHeadConfig| config.training.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(&config), keys(&trained.config));
            let x = Tensor::<2>::ones([1, 16], &Device::flex()) * 0.3;
            // Few rows of a head that was read sum in another order than a trained one's.
            let gap = read.forward(x.clone()) - trained.head.forward(x);
            let gap: f32 = gap.abs().max().into_scalar();
            assert!(gap < 1e-5, "tied {tied}, D {num_layers}: off by {gap}");
        }
    }
}

/// The files of an exported head.
fn exported(trained: &TrainedHead) -> [Vec<u8>; 2] {
    let dir = tempfile::tempdir().unwrap();
    trained.head.write_dir(dir.path(), &trained.config).unwrap();
    ["model.safetensors", "config.json"].map(|name| std::fs::read(dir.path().join(name)).unwrap())
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let rows = responses(30, 30, 8);
    let draft = tiny_draft(32, 64);
    let train_with = |seed| {
        let dir = tempfile::tempdir().unwrap();
        let training = HeadTraining { num_layers: 2, tied: false, ..quick() };
        let stint = Stint::new(dir.path(), "");
        let trained = train_heads(&draft, &rows, slice::from_ref(&training), seed, stint);
        exported(&only(trained.unwrap()))
    };
    let first = train_with(1);
    // Other tests train at the same time: neither threads nor burn's generator may matter.
    assert!(first == train_with(1), "the bytes differ");
    assert!(first != train_with(2), "the seed does nothing");
}

#[test]
fn config_json_records_the_training() {
    let trained = train_in_temporary_dir(&responses(20, 10, 6), &quick());
    let record = &trained.config.training;
    assert_eq!(record["seed"], 3);
    assert_eq!(record["mixing_ratio"], 0.15);
    assert_eq!(record["rejection_weight"], 6.0);
    assert_eq!(record["optimizer"]["learning_rate"], 1e-2);
    assert_eq!(record["epochs"].as_array().unwrap().len(), 2);
    assert_eq!(record["epochs"][1]["epoch"], 2);
    assert_eq!(record["validation"]["kl"], trained.scores.kl);
    assert_eq!(record["num_training_rows"], trained.num_training_rows);
    assert_eq!(trained.num_training_rows + trained.num_validation_rows, 20);
    assert!(!record.contains_key("num_layers"));
}

#[test]
fn steps_are_counted_and_none_is_lost() {
    let training = HeadTraining { mixing_ratio: 0.0, ..quick() };
    let rows = responses(30, 10, 2);
    let trained = train_in_temporary_dir(&rows, &training);
    // Steps of 4 · 2 rows, the last one of what is left, in each of two epochs.
    let steps = trained.num_training_rows.div_ceil(8);
    assert_eq!(trained.epochs[0].num_steps, steps);
    assert_eq!(trained.num_steps, 2 * steps);
    let labels: usize =
        rows.iter().filter(|row| !is_held_out(row, 0.3)).map(|row| row.response_ids.len()).sum();
    assert_eq!(trained.num_labels, 2 * labels);
}

#[test]
fn the_last_state_holds_the_head_alone() {
    let dir = tempfile::tempdir().unwrap();
    let stale = dir.path().join("checkpoint/epoch-9-step-0/model.bpk");
    std::fs::create_dir_all(stale.parent().unwrap()).unwrap();
    std::fs::write(&stale, "of an earlier run").unwrap();
    std::fs::write(dir.path().join("mine.txt"), "left alone").unwrap();
    train(&tiny_draft(16, 64), &responses(20, 10, 6), &quick(), dir.path()).unwrap();
    let files = files_under(dir.path());
    let has = |name: &str| files.contains(Path::new(name));
    for name in ["model.bpk", "optimizer.bpk", "best.bpk", "state.toml"] {
        assert!(has(&format!("checkpoint/epoch-3-step-0/{name}")), "{files:?}");
    }
    assert_eq!(files.iter().filter(|file| file.starts_with("checkpoint")).count(), 4);
    assert!(has("mine.txt") && !has("checkpoint/epoch-9-step-0/model.bpk"), "{files:?}");
    assert!(has("train/epoch-1/Loss.log") && has("valid/epoch-2/KL.log"), "{files:?}");
    assert!(!has("experiment.log"), "{files:?}");
    // 16 · 16 + 16 + 16 · 2 + 2 numbers of 4 bytes, and a header; the draft alone has 48 · 16.
    let model = dir.path().join("checkpoint/epoch-3-step-0/model.bpk");
    let size = std::fs::metadata(model).unwrap().len();
    assert!((306 * 4..306 * 4 + 2048).contains(&size), "{size}");
}

/// Trains for up to 50 epochs of rows, stopped after a number of batches; and how many final
/// validation metrics the renderer was told.
fn stopped_after(num_batches: usize) -> (Option<TrainedHead>, usize) {
    let interrupter = Interrupter::new();
    let num_final_scores = Arc::new(AtomicUsize::new(0));
    let renderer = Watcher {
        interrupter: interrupter.clone(),
        stop_after: num_batches,
        num_updates: Arc::default(),
        num_final_scores: num_final_scores.clone(),
    }
    .renderer();
    if num_batches == 0 {
        interrupter.stop(None);
    }
    let dir = tempfile::tempdir().unwrap();
    let training = quick_with(|optimizer| optimizer.num_epochs = 50);
    let (draft, rows) = (tiny_draft(16, 64), responses(40, 10, 6));
    let stint = Stint { renderer, interrupter, ..Stint::new(dir.path(), "") };
    let ending = train_heads(&draft, &rows, &[training], 3, stint).unwrap();
    assert!(matches!(ending, Ending::Stopped { .. }));
    (ending.best().map(|mut heads| heads.remove(0)), num_final_scores.load(Ordering::SeqCst))
}

#[test]
fn an_interruption_returns_the_best_head_so_far() {
    // In the second or a later epoch: an epoch has fewer than 15 batches.
    let (trained, num_final_scores) = stopped_after(15);
    let trained = trained.unwrap();
    assert!(trained.interrupted);
    assert!(!trained.epochs.is_empty() && trained.epochs.len() < 10);
    assert_eq!(trained.config.training["interrupted"], true);
    // Loss, KL, BCE, AUROC, Brier and ECE, once an epoch.
    assert!(num_final_scores >= 6 * trained.epochs.len());
}

#[test]
fn an_interruption_in_the_first_epoch_returns_nothing() {
    for num_batches in [0, 1] {
        assert!(stopped_after(num_batches).0.is_none());
    }
}

fn error(rows: &[ResponseRow], training: &HeadTraining) -> String {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn data_that_cannot_be_trained_on_is_refused() {
    let mut rows = responses(20, 10, 6);
    assert_says(&error(&[], &quick()), &["0 rows for training", "build more data"]);
    assert_says(
        &error(&rows[..1], &quick()),
        &["of 1 in all", "head.optimizer.validation_fraction"],
    );
    rows[7].draft = None;
    assert_says(&error(&rows, &quick()), &["`set#7`", "models.draft"]);
    let too_long = [response_row("set#0", &[1; 64], &[2], &[3], &[0.5])];
    assert_says(&error(&too_long, &quick()), &["(1 are empty or begin past", "64 tokens"]);
    let recorded = HeadTraining { labels: HeadLabels::Rollouts, ..quick() };
    assert_says(&error(&responses(20, 10, 6), &recorded), &["`set#", "rollouts", "there are none"]);
    let bad = quick_with(|optimizer| optimizer.batch_size = 0);
    assert_says(&error(&rows, &bad), &["`head.optimizer.batch_size` is 0"]);
}

#[test]
fn a_loss_that_is_not_finite_names_epoch_and_rows() {
    let hot = quick_with(|settings| (settings.learning_rate, settings.warmup_ratio) = (1e38, 0.0));
    let message = error(&responses(40, 10, 6), &hot);
    assert_says(&message, &["not finite in epoch 1", "`set#", "head.optimizer.learning_rate"]);
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let message = train(&tiny_draft(16, 64), &responses(20, 10, 6), &quick(), &file.join("head"))
        .unwrap_err()
        .to_string();
    assert_says(&message, &["file/head"]);
}

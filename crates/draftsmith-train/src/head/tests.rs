//! Tests of head training, besides those of both trainers (`crate::tests::both`): it learns, keeps the best
//! epoch, writes files that can be read back, and reports invalid data.

use std::path::Path;
use std::slice;

use burn::tensor::{Int, Tensor, TensorData, activation::sigmoid};
use draftsmith_model::HeadForm;

use super::*;
use crate::data::split::is_held_out;
use crate::head::features::{Frozen, LabelledRows, StatesOrigin};
use crate::head::settings::{HeadLabels, MixedLabels};
use crate::run::optimizer::OptimizerSettings;
use crate::tests::pair::{response_row, responses, tiny_draft};
use crate::tests::runs::{assert_contains, only};

/// Small and quick settings.
fn quick() -> HeadTraining {
    HeadTraining {
        num_layers: 1,
        optimizer: OptimizerSettings {
            learning_rate: Some(1e-2),
            num_epochs: 2,
            gradient_accumulation: 2,
            validation_fraction: 0.3,
            ..OptimizerSettings::HEAD
        },
        ..HeadTraining::default()
    }
}

/// [`quick`] with changed optimizer settings.
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
) -> Result<TrainedHead> {
    train_heads(draft, rows, slice::from_ref(training), 3, TrainingRun::new(dir, "")).map(only)
}

fn train_in_temporary_dir(rows: &[ResponseRow], training: &HeadTraining) -> TrainedHead {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap()
}

/// Rows whose label is a steep function of the draft's hidden state at the draft's token.
fn learnable_rows(draft: &CausalLm, num_rows: usize) -> Vec<ResponseRow> {
    let width = draft.shape().hidden_size;
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
fn a_head_learns_labels_that_depend_on_hidden_states() {
    let draft = tiny_draft(16, 64);
    let rows = learnable_rows(&draft, 120);
    let training = HeadTraining {
        // All tokens come from Y, so that labels are a function of the head's inputs.
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
fn the_result_is_the_head_of_the_best_epoch() {
    for form in [HeadForm::Candidate, HeadForm::LookAhead] {
        assert_result_is_of_the_best_epoch(form);
    }
}

fn assert_result_is_of_the_best_epoch(form: HeadForm) {
    let draft = tiny_draft(16, 64);
    let rows = responses(40, 12, 4);
    // With such a high learning rate scores rise and fall between epochs.
    let diverging =
        quick_with(|optimizer| (optimizer.learning_rate, optimizer.num_epochs) = (Some(0.3), 6));
    let training = HeadTraining { form, ..diverging };
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&draft, &rows, &training, dir.path()).unwrap();
    assert_ne!(training.rejection_weight, 1.0, "the weight must shift the scores");
    let kls: Vec<f64> =
        trained.epochs.iter().map(|epoch| epoch.validation.comparable_kl()).collect();
    let lowest = kls.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(trained.scores.comparable_kl(), lowest, "{kls:?}");
    assert_eq!(kls[trained.best_epoch - 1], lowest);

    let held_out = rows.iter().filter(|row| is_held_out(row, 0.3));
    let frozen = DrafterModel::from(&draft);
    let gain = frozen.embedding_gain();
    assert_eq!(gain, 4.0, "embeddings are about 0.29");
    let frozen = frozen.into();
    let mut metrics = draftsmith_theory::HeadMetrics::default();
    for row in held_out {
        let row = TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap();
        let mixture = row.mixture(3, 0, 0.15);
        if mixture.labels.is_empty() {
            continue;
        }
        let reads = training.reads();
        let one = std::slice::from_ref(&mixture);
        let frozen = Frozen {
            drafts: &frozen,
            reads: &reads,
            batch_size: 1,
            lengths: Lengths::AsGiven,
            origin: StatesOrigin::Drafter,
        };
        let rows = frozen.labelled_rows(one);
        let mut features = LabelledRows::cat(&rows, 0, &Device::flex());
        if form == HeadForm::LookAhead {
            // In use the head reads unscaled embeddings.
            let extra = features.extra.unwrap();
            let [rows, width] = extra.dims();
            let embedding = extra.clone().slice([0..rows, 0..16]) / gain;
            let scalars = extra.slice([0..rows, 16..width]);
            features.extra = Some(Tensor::cat(vec![embedding, scalars], 1));
        }
        let logits = trained.model.acceptance_logit(features);
        assert!(!logits.is_autodiff(), "the head still has autodiff");
        let probs: Vec<f32> = sigmoid(logits).into_data().try_into_vec().unwrap();
        for (prob, label) in probs.into_iter().zip(mixture.labels) {
            metrics.update(f64::from(prob), f64::from(label));
        }
    }
    let scores = metrics.finish();
    assert_eq!(scores.num_labels, trained.scores.num_labels);
    // This sigmoid is in f32, the trainer's in f64, and batch shapes differ.
    assert!((scores.kl - trained.scores.kl).abs() < 1e-5, "{scores:?} {:?}", trained.scores);
}

#[test]
fn heads_of_every_depth_can_be_written_and_read_back() {
    let rows = responses(20, 10, 6);
    for tied in [true, false] {
        for num_layers in 0..=4 {
            let short = quick_with(|optimizer| optimizer.num_epochs = 1);
            let training = HeadTraining { num_layers, tied, ..short };
            let trained = train_in_temporary_dir(&rows, &training);
            let dir = tempfile::tempdir().unwrap();
            trained.model.write_dir(dir.path(), &trained.config).unwrap();
            let (config, read) = AcceptanceHead::from_dir(dir.path(), 16, &Device::flex()).unwrap();
            assert_eq!((config.num_layers, config.tied), (num_layers, tied));
            let keys =
                |config: &AcceptanceHeadConfig| config.training.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(&config), keys(&trained.config));
            let x = Tensor::<2>::ones([1, 16], &Device::flex()) * 0.3;
            // The read head sums in another order for few rows.
            let gap = read.forward(x.clone()) - trained.model.forward(x);
            let gap: f32 = gap.abs().max().into_scalar();
            assert!(gap < 1e-5, "tied {tied}, D {num_layers}: off by {gap}");
        }
    }
}

fn error(rows: &[ResponseRow], training: &HeadTraining) -> String {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap_err().to_string()
}

#[test]
fn unusable_data_is_an_error() {
    let mut rows = responses(20, 10, 6);
    rows[7].draft = None;
    assert_contains(&error(&rows, &quick()), &["`set#7`", "kind = \"model\""]);
    let recorded = HeadTraining { labels: HeadLabels::Rollouts, ..quick() };
    assert_contains(
        &error(&responses(20, 10, 6), &recorded),
        &["`set#", "rollouts", "there are none"],
    );
}

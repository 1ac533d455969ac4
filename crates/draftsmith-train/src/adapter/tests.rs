//! Tests of adapter training, besides those of both trainers (`crate::tests::both`): it learns, keeps the
//! best epoch, does not change the target, and reports invalid data.

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::log_softmax};
use draftsmith_model::{AdapterArchitecture, WeightDtype};

use super::*;
use crate::data::split::is_held_out;
use crate::lessons::distillation::DistillationLoss;
use crate::lessons::settings::InitialWeights;
use crate::run::TrainingRun;
use crate::run::optimizer::OptimizerSettings;
use crate::self_draft::{TrainedState, train_self_drafts};
use crate::states::{FeatureDir, FeatureFormat, Features};
use crate::tests::pair::{early_target, response_row, responses, tiny_draft};
use crate::tests::runs::{assert_contains, exported, only};
use draftsmith_data::ResponseRow;

/// Small and quick settings.
fn quick() -> AdapterTraining {
    AdapterTraining::default().with(|it| {
        it.exit_layer = 1;
        it.common.loss_chunk = 5;
        it.common.optimizer = OptimizerSettings {
            learning_rate: Some(1e-2),
            num_epochs: 2,
            gradient_accumulation: 2,
            validation_fraction: 0.3,
            ..OptimizerSettings::ADAPTER
        };
        it.architecture = AdapterArchitecture::Attention;
        it.common.initial = InitialWeights::Random;
    })
}

/// [`quick`] with changed optimizer settings.
fn quick_with(change: impl FnOnce(&mut OptimizerSettings)) -> AdapterTraining {
    let mut training = quick();
    change(&mut training.common.optimizer);
    training
}

fn train(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    dir: &Path,
) -> Result<TrainedState<AdapterShape>> {
    let run = TrainingRun::new(dir, "");
    train_self_drafts(target, rows, std::slice::from_ref(training), 3, run).map(only)
}

fn train_in_temporary_dir(
    rows: &[ResponseRow],
    training: &AdapterTraining,
) -> TrainedState<AdapterShape> {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap()
}

/// Rows of data that was built without a drafter.
fn undrafted(num_rows: usize, longest: usize, seed: u64) -> Vec<ResponseRow> {
    let rows = responses(num_rows, longest, seed);
    rows.into_iter().map(|row| ResponseRow { draft: None, ..row }).collect()
}

#[test]
fn an_adapter_learns_the_targets_predictions() {
    let rows = undrafted(200, 40, 21);
    let training = quick_with(|settings| (settings.num_epochs, settings.weight_decay) = (15, 0.0));
    let untrained =
        quick_with(|settings| (settings.num_epochs, settings.learning_rate) = (1, Some(1e-30)));
    let [trained, untrained] = [training, untrained].map(|training| {
        let dir = tempfile::tempdir().unwrap();
        train(&early_target(), &rows, &training, dir.path()).unwrap()
    });
    let untrained = untrained.scores;
    let scores = &trained.scores;
    assert_eq!(scores.target_entropy, untrained.target_entropy);
    assert!(scores.kl() > 0.0 && scores.kl() < 0.25 * untrained.kl(), "{scores:?} {untrained:?}");
    assert!(scores.agreement > untrained.agreement + 0.2, "{scores:?} after {untrained:?}");
    assert!(scores.overlap > untrained.overlap + 0.05, "{scores:?} after {untrained:?}");
    assert!(trained.epochs[14].training_loss < trained.epochs[0].training_loss);
    assert!(!trained.interrupted);
    assert!(trained.supervised_per_second() > 0.0);
}

#[test]
fn every_architecture_learns_and_can_be_written_and_read_back() {
    let rows = undrafted(80, 30, 23);
    let target = early_target();
    for architecture in AdapterArchitecture::ALL {
        for initial in [InitialWeights::Random, InitialWeights::Target] {
            let training = quick_with(|optimizer| optimizer.num_epochs = 3);
            let training = training.with(|it| {
                it.architecture = architecture;
                it.common.initial = initial.clone();
            });
            let dir = tempfile::tempdir().unwrap();
            let trained = train(&target, &rows, &training, dir.path()).unwrap();
            assert_eq!(trained.config.architecture, architecture);
            assert_eq!(trained.model.num_parameters(), trained.config.num_parameters());
            let losses: Vec<f64> = trained.epochs.iter().map(|epoch| epoch.training_loss).collect();
            // With this target's layer there is almost nothing to learn.
            let learns = initial == InitialWeights::Target || losses[2] < losses[0];
            assert!(learns, "{architecture}: {losses:?}");
            trained.model.write_dir(dir.path(), &trained.config).unwrap();
            let (config, read) =
                Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex())
                    .unwrap();
            assert_eq!((config.architecture, &config.model), (architecture, &trained.config.model));
            let keys = |config: &AdapterConfig| config.training.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(&config), keys(&trained.config));
            assert_eq!(config.training["loss_chunk"], 5);
            let features = Tensor::<3>::ones([1, 3, 16], &Device::flex());
            let [found, expected] = [read, trained.model].map(|adapter| {
                let normed = adapter.forward(features.clone());
                normed.into_data().try_into_vec::<f32>().unwrap()
            });
            for (found, expected) in found.iter().zip(expected) {
                // Matrix products differ in their layout.
                assert!((found - expected).abs() < 1e-5, "{architecture}: {found} {expected}");
            }
        }
    }
}

#[test]
fn an_adapter_learns_over_its_draft_vocabulary() {
    let rows = undrafted(80, 30, 23);
    let target = early_target();
    let training = quick_with(|optimizer| optimizer.num_epochs = 6)
        .with(|it| it.common.draft_vocabulary = Some(12));
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&target, &rows, &training, dir.path()).unwrap();
    let vocabulary = trained.config.draft_vocabulary.clone().unwrap();
    assert_eq!(vocabulary.ids().len(), 12);
    for id in &target.shape().eos_token_ids {
        assert!(vocabulary.contains(*id));
    }
    let coverage = trained.config.training["vocabulary_coverage"].as_f64().unwrap();
    assert!(coverage > 0.0 && coverage < 1.0, "{coverage}");
    let losses: Vec<f64> = trained.epochs.iter().map(|epoch| epoch.training_loss).collect();
    // The loss covers only the draft vocabulary, so it is below the entropy of twelve tokens.
    assert!(losses[5] < losses[0] && losses[5] < 12_f64.ln(), "{losses:?}");
    trained.model.write_dir(dir.path(), &trained.config).unwrap();
    let (config, read) =
        Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex()).unwrap();
    assert_eq!(config.draft_vocabulary.as_ref(), Some(&vocabulary));
    assert_eq!(read.draft_vocabulary(), Some(&vocabulary));
}

#[test]
fn initial_weights_of_the_targets_last_layer_predict_as_the_target() {
    // The adapter replaces the second of the target's two layers.
    let target = early_target();
    let training =
        quick_with(|settings| (settings.num_epochs, settings.learning_rate) = (1, Some(1e-30)))
            .with(|it| {
                it.architecture = AdapterArchitecture::DecoderLayer;
                it.common.initial = InitialWeights::Target;
            });
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&target, &undrafted(30, 20, 3), &training, dir.path()).unwrap();
    // f32 sums in another order.
    assert!(trained.scores.kl().abs() < 1e-5, "{:?}", trained.scores);
    assert_eq!(trained.scores.agreement, 1.0);
}

#[test]
fn each_loss_decreases_and_its_best_epoch_is_kept() {
    let rows = undrafted(80, 30, 22);
    let losses = [
        DistillationLoss::CrossEntropy,
        DistillationLoss::TotalVariation,
        DistillationLoss::Dspark,
    ];
    for loss in losses {
        let longer = quick_with(|optimizer| optimizer.num_epochs = 5);
        let training = longer.with(|it| it.common.loss = loss);
        let dir = tempfile::tempdir().unwrap();
        let trained = train(&early_target(), &rows, &training, dir.path()).unwrap();
        // The part of the loss that no adapter can remove.
        let floor = match loss {
            DistillationLoss::CrossEntropy => trained.scores.target_entropy,
            DistillationLoss::TotalVariation => 0.0,
            DistillationLoss::Dspark => 0.1 * trained.scores.target_entropy,
        };
        let losses: Vec<f64> =
            trained.epochs.iter().map(|epoch| epoch.validation.loss(loss) - floor).collect();
        let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
        assert_eq!(trained.scores.loss(loss) - floor, lowest, "{loss:?}: {losses:?}");
        assert!(losses[4] < 0.97 * losses[0], "{loss:?}: {losses:?}");
        // The training loss measures the same on other rows and before each step.
        let training_loss = trained.epochs[4].training_loss - floor;
        let range = 0.5 * losses[4]..2.0 * losses[4];
        assert!(range.contains(&training_loss), "{loss:?}: {training_loss} {losses:?}");
    }
}

/// The scores of an adapter, computed row by row from the logits of whole sequences.
fn direct_scores(target: &CausalLm, adapter: &Adapter, rows: &[ResponseRow]) -> [f64; 3] {
    let mut sums = [0.0; 3];
    let mut num_tokens = 0.0;
    for row in rows {
        let ids: Vec<i32> =
            row.prompt_ids.iter().chain(&row.response_ids).map(|id| *id as i32).collect();
        let len = ids.len();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, len]), &target.device());
        let features = target.exit_states(ids.clone(), 1);
        let log_probs = |hidden: Tensor<3>| -> Vec<f32> {
            log_softmax(target.lm_head(hidden), 2).into_data().try_into_vec().unwrap()
        };
        let p = log_probs(target.hidden_states(ids));
        let q = log_probs(adapter.forward(features));
        let vocab = p.len() / len;
        let largest = |row: &[f32]| (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        // The position before each token of the response.
        for position in row.prompt_ids.len() - 1..len - 1 {
            let at = position * vocab..(position + 1) * vocab;
            let (p, q) = (&p[at.clone()], &q[at]);
            for (p, q) in p.iter().zip(q) {
                sums[0] -= f64::from(p.exp() * q);
                sums[1] += f64::from(p.min(*q).exp());
            }
            sums[2] += f64::from(largest(p) == largest(q));
            num_tokens += 1.0;
        }
    }
    sums.map(|sum| sum / num_tokens)
}

#[test]
fn the_result_is_the_adapter_of_the_best_epoch() {
    let target = tiny_draft(16, 64);
    let rows = undrafted(40, 12, 4);
    // The learning rate rises to the end and becomes far too high.
    let training = quick_with(|settings| {
        (settings.learning_rate, settings.warmup_ratio, settings.num_epochs) = (Some(1.0), 1.0, 6);
    });
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&target, &rows, &training, dir.path()).unwrap();
    let losses: Vec<f64> =
        trained.epochs.iter().map(|epoch| epoch.validation.cross_entropy).collect();
    let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(trained.scores.cross_entropy, lowest, "{losses:?}");
    assert_eq!(losses[trained.best_epoch - 1], lowest);
    assert_ne!(trained.best_epoch, 6, "the last epoch is the best: {losses:?}");

    let nothing = Tensor::<3>::zeros([1, 1, 16], &Device::flex());
    assert!(!trained.model.forward(nothing).is_autodiff(), "the adapter still has autodiff");
    let held_out: Vec<ResponseRow> = rows.into_iter().filter(|row| is_held_out(row, 0.3)).collect();
    let num_tokens: usize = held_out.iter().map(|row| row.response_ids.len()).sum();
    assert_eq!(trained.scores.num_tokens, num_tokens);
    let [cross_entropy, overlap, agreement] = direct_scores(&target, &trained.model, &held_out);
    // f32 sums over other shapes.
    assert!((cross_entropy - lowest).abs() < 1e-4, "{cross_entropy} {lowest}");
    assert!((overlap - trained.scores.overlap).abs() < 1e-4);
    assert!((agreement - trained.scores.agreement).abs() < 1e-9);
}

/// All weights of a model.
fn weights(model: &CausalLm) -> Vec<f32> {
    struct Collect(Vec<f32>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values: Vec<f32> = param.val().into_data().try_into_vec().unwrap();
            self.0.extend(values);
        }
    }
    let mut all = Collect(Vec::new());
    model.visit(&mut all);
    all.0
}

#[test]
fn training_keeps_the_target_and_a_step_does_not_depend_on_its_batches() {
    let target = tiny_draft(16, 64);
    let before = weights(&target);
    let rows = undrafted(24, 20, 13);
    let [whole, cut] = [(8, 1, 1000), (2, 4, 3)].map(|(batch_size, accumulation, loss_chunk)| {
        let training = quick_with(|settings| {
            (settings.batch_size, settings.gradient_accumulation) = (batch_size, accumulation);
        });
        let training = training.with(|it| it.common.loss_chunk = loss_chunk);
        let dir = tempfile::tempdir().unwrap();
        train(&target, &rows, &training, dir.path()).unwrap()
    });
    assert_eq!(weights(&target), before);
    assert_eq!((whole.num_steps, whole.num_supervised), (cut.num_steps, cut.num_supervised));
    // AdamW's first steps divide a gradient by its magnitude, which amplifies rounding.
    let gap = (whole.scores.cross_entropy - cut.scores.cross_entropy).abs();
    assert!(gap < 1e-4, "{:?} {:?}", whole.scores, cut.scores);
    assert!((whole.scores.target_entropy - cut.scores.target_entropy).abs() < 1e-5);
}

#[test]
fn a_target_with_autodiff_gives_the_same_adapter() {
    let rows = undrafted(20, 10, 6);
    let plain = train_in_temporary_dir(&rows, &quick());
    let target = tiny_draft(16, 64).fork(&Device::flex().autodiff());
    let dir = tempfile::tempdir().unwrap();
    let trained = train(&target, &rows, &quick(), dir.path()).unwrap();
    let [plain, trained] = [plain, trained]
        .map(|trained| exported(|dir| trained.model.write_dir(dir, &trained.config).unwrap()));
    assert!(plain == trained, "the bytes differ");
}

fn error(rows: &[ResponseRow], training: &AdapterTraining) -> String {
    let dir = tempfile::tempdir().unwrap();
    train(&tiny_draft(16, 64), rows, training, dir.path()).unwrap_err().to_string()
}

#[test]
fn unusable_data_is_an_error() {
    let mut rows = undrafted(20, 10, 6);
    let short = quick().with(|it| it.common.max_len = 2);
    let too_long = [response_row("set#0", &[1; 3], &[2], &[3], &[0.5])];
    assert_contains(&error(&too_long, &short), &["(1 have no response within 2 tokens"]);
    let short = quick().with(|it| it.common.max_len = 4);
    let whole = train_in_temporary_dir(&rows, &quick());
    let cut = train_in_temporary_dir(&rows, &short);
    assert!(cut.rows.num_unusable > 0 && cut.num_supervised < whole.num_supervised);
    rows[7].response_ids[0] = 48;
    assert_contains(&error(&rows, &quick()), &["`set#7`", "token 48", "48 tokens"]);
}

#[test]
fn an_exit_layer_out_of_range_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (target, rows) = (tiny_draft(16, 64), undrafted(20, 10, 6));
    for exit_layer in [2, 3] {
        let trainings = [quick(), quick().with(|it| it.exit_layer = exit_layer)];
        let run = TrainingRun::new(dir.path(), "");
        let error = train_self_drafts(&target, &rows, &trainings, 3, run);
        let message = error.unwrap_err().to_string();
        assert_contains(&message, &["`adapter.exit_layer`", &exit_layer.to_string(), "2 layers"]);
    }
}

/// The losses of all epochs and the final scores.
fn numbers(trained: &TrainedState<AdapterShape>) -> Vec<f64> {
    let epochs = trained.epochs.iter().map(|epoch| epoch.training_loss);
    let scores = [trained.scores.cross_entropy, trained.scores.overlap];
    epochs.chain(scores).collect()
}

#[test]
fn stored_hidden_states_change_losses_only_by_rounding() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen3-bf16");
    let packed = CausalLm::from_model_dir(&fixture, &Device::flex()).unwrap();
    assert!(packed.is_packed());
    // Tokens in the vocabularies of both models.
    let rows = undrafted(60, 30, 23);
    for target in [early_target(), packed] {
        let training = |features, features_format| {
            quick_with(|optimizer| optimizer.num_epochs = 4).with(|it| {
                it.common.features = features;
                it.common.features_format = features_format;
            })
        };
        let recomputed = training(Features::Recompute, FeatureFormat::F16);
        let dir = tempfile::tempdir().unwrap();
        let expected = numbers(&train(&target, &rows, &recomputed, dir.path()).unwrap());
        let width = target.shape().hidden_size;
        // f16 rounds to 11 bits, int8 to 1/254 of a token's largest number.
        for (format, state, bound) in
            [(FeatureFormat::F16, 2 * width, 2e-3), (FeatureFormat::Int8, width + 4, 5e-2)]
        {
            let dir = tempfile::tempdir().unwrap();
            let messages = std::cell::RefCell::new(Vec::new());
            let notify = |text: String| messages.borrow_mut().push(text);
            let cached = training(Features::Cache, format);
            let train = || {
                let (name, models) = ("target".to_owned(), "one".to_owned());
                let stored = dir.path().join("stored");
                let features =
                    FeatureDir { dir: &stored, name, models, notify: &notify, source: None };
                let run = TrainingRun::new(dir.path(), "");
                let run = TrainingRun { features: Some(features), ..run };
                let trained =
                    train_self_drafts(&target, &rows, std::slice::from_ref(&cached), 3, run)
                        .map(only)
                        .unwrap();
                crate::discard(dir.path()).unwrap();
                numbers(&trained)
            };
            let first = train();
            for (found, expected) in first.iter().zip(&expected) {
                let is_near = (found - expected).abs() <= bound * expected.abs();
                assert!(is_near, "{format:?}: {found} for {expected}");
            }
            assert!(first != expected, "{format:?} did not round");
            // The second run reads the files of the first.
            let files = ["features-target-layer-1.bin", "features-target-final.bin"];
            let files = files.map(|name| dir.path().join("stored").join(name));
            let written = || files.each_ref().map(|path| std::fs::read(path).unwrap());
            let before = written();
            assert_eq!(train(), first);
            assert!(written() == before);
            // The message before the first write has the size of the files.
            let states = |row: &ResponseRow| row.prompt_ids.len() + 2 * row.response_ids.len() - 1;
            let num_states: usize = rows.iter().map(states).sum();
            let num_bytes = 2 * 4096 + rows.len() * 2 * 4 + num_states * state;
            assert_eq!(before.iter().map(Vec::len).sum::<usize>(), num_bytes);
            let message = messages.borrow()[0].clone();
            let size = draftsmith_files::in_bytes(num_bytes as u64);
            assert!(message.contains(&format!("{size} in total, up to {size}")), "{message}");
            // A damaged row is computed again.
            let mut damaged = before[0].clone();
            damaged[4096 + 100] ^= 64;
            std::fs::write(&files[0], damaged).unwrap();
            for (found, first) in train().iter().zip(&first) {
                // Tensors sum in another order in another batch, and round to a neighbour.
                let bound = if target.is_packed() { 0.0 } else { 1e-5 };
                assert!((found - first).abs() <= bound, "{format:?}: {found} for {first}");
            }
            assert!(written() == before || !target.is_packed());
            assert_eq!(messages.borrow().len(), 3, "{messages:?}");
        }
    }
}

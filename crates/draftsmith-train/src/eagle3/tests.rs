//! Tests of EAGLE-3 training, besides those of all trainers (`crate::tests::both`): it learns, its gradients are
//! those of the loss, and it reads what its settings say.

use burn::optim::GradientsParams;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{Device, Tensor};
use draftsmith_data::ResponseRow;
use draftsmith_model::{Lengths, UnrolledInputs};

use super::*;
use crate::data::BatchSource;
use crate::lessons::Teaching;
use crate::lessons::batches::{FrozenTarget, LessonSource};
use crate::lessons::distillation::{DistillationLoss, Lesson};
use crate::lessons::rows::LessonRow;
use crate::lessons::settings::InitialWeights;
use crate::run::member::Trainee;
use crate::run::optimizer::OptimizerSettings;
use crate::run::{Ending, TrainingRun};
use crate::self_draft::learner::StateLearner;
use crate::self_draft::{TrainedState, train_self_drafts};
use crate::states::Features;
use crate::tests::pair::{deep_target, gradients_of, patterned, random_model, responses};
use crate::tests::runs::{assert_contains, only};

fn quick() -> Eagle3Training {
    Eagle3Training::default().with(|it| {
        it.layers = Some([0, 1, 2]);
        it.num_steps = 3;
        it.common.loss_chunk = 7;
        it.common.optimizer = OptimizerSettings {
            learning_rate: Some(1e-2),
            num_epochs: 2,
            gradient_accumulation: 1,
            validation_fraction: 0.3,
            ..OptimizerSettings::EAGLE3
        };
    })
}

fn train(rows: &[ResponseRow], training: &Eagle3Training) -> Result<TrainedState<Eagle3Shape>> {
    let dir = tempfile::tempdir().unwrap();
    let run = TrainingRun::new(dir.path(), "");
    train_self_drafts(&deep_target(16, 64), rows, std::slice::from_ref(training), 3, run).map(only)
}

#[test]
fn a_drafter_learns_to_draft_several_tokens() {
    let rows = patterned(60);
    let training = |learning_rate, num_epochs| {
        let mut training = quick().with(|it| it.common.teacher = Teaching::Response);
        (training.common.optimizer.learning_rate, training.common.optimizer.num_epochs) =
            (Some(learning_rate), num_epochs);
        train(&rows, &training).unwrap()
    };
    let (untrained, trained) = (training(1e-30, 1).scores, training(1e-2, 12));
    let scores = trained.scores;
    assert!(untrained.accepted_length < 0.5, "{untrained:?}");
    assert!(scores.accepted_length > 2.2, "{scores:?} after {untrained:?}");
    let [first, .., last] = &scores.agreement[..] else { panic!("three steps") };
    assert!(*first > 0.8 && *last > 0.8, "{scores:?}");
    assert!(scores.cross_entropy < untrained.cross_entropy, "{scores:?} after {untrained:?}");
}

#[test]
fn gradients_are_those_of_the_weighted_loss() {
    for lengths in [Lengths::AsGiven, Lengths::InBuckets] {
        let target = deep_target(16, 64);
        let rows = responses(6, 20, 5);
        let rows = rows.iter().filter_map(|row| LessonRow::new(row, 1, 64));
        let rows: Vec<_> = rows.map(Into::into).collect();
        let num_rows = rows.len();
        let source = LessonSource {
            targets: FrozenTarget::new(target.clone(), None).into(),
            exit_layers: vec![0, 1, 2],
            reads_tokens: true,
            rows,
            batch_size: 7,
            lengths,
            room: Default::default(),
            stored: None,
            teaching: Teaching::Target,
        };
        let training = quick().with(|it| {
            it.step_weight = 0.5;
            it.common.initial = InitialWeights::Random;
            it.layers = Some([0, 1, 2]);
        });
        let config = training.config(target.config(), target.stored_dtype(), None).unwrap();
        let drafter = training.network(&config, &target, 1);
        let mut learner = StateLearner { drafter, states: vec![0, 1, 2], training };
        let all: Vec<usize> = (0..num_rows).collect();
        let batches: Vec<_> = source.step_batches(1, &[all]).collect();
        assert_eq!(batches.len(), if lengths == Lengths::AsGiven { 2 } else { 1 });
        assert!((batches.iter().map(|batch| batch.step_share).sum::<f64>() - 1.0).abs() < 1e-12);
        for step in &batches {
            let batch = &step.content;
            let Lesson::States(teacher) = batch.teacher.clone() else { panic!("states") };
            let [_, seq] = batch.ids.dims();
            let states =
                batch.features.iter().map(|all| all.clone().narrow(1, 0, seq - 1)).collect();
            let embedded = batch.embedded.clone().unwrap().narrow(1, 1, seq - 1);
            // Drafts begin everywhere, and only those of the responses count.
            let everywhere = vec![0..seq - 1; batch.wanted.len()];
            let outputs = learner.drafter.unrolled(UnrolledInputs {
                states,
                next_ids: batch.ids.clone().narrow(1, 1, seq - 1),
                embedded: Some(embedded),
                begun: &everywhere,
                num_steps: 3,
                lengths: Lengths::AsGiven,
            });
            let mut direct: Option<Tensor<1>> = None;
            let mut num_tokens = 0;
            for (nth, output) in outputs.into_iter().enumerate() {
                let mut place = 0;
                for (row, wanted) in batch.wanted.iter().enumerate() {
                    for at in nth..wanted.len() {
                        let position = wanted.start + at - 1;
                        let student = output.clone().narrow(0, row * (seq - 1) + position, 1);
                        let logits = student.matmul(learner.drafter.own_head().unwrap());
                        let taught = teacher.clone().slice(place + at..place + at + 1);
                        let taught = target.lm_head(taught.unsqueeze()).squeeze_dim::<2>(0);
                        let term = (log_softmax(logits, 1) * softmax(taught, 1)).sum();
                        let term = term * -(0.5_f64.powi(nth as i32));
                        direct = Some(direct.map_or(term.clone(), |sum| sum + term));
                        num_tokens += usize::from(nth == 0);
                    }
                    place += wanted.len();
                }
            }
            let direct = direct.unwrap() / num_tokens as f64;
            let expected = direct.clone() * step.step_share;
            let expected = GradientsParams::from_grads(expected.backward(), &learner);
            let expected = gradients_of(&learner, &expected);
            let direct: f32 = direct.into_scalar();
            for loss_chunk in [5, 1000] {
                learner.training.common.loss_chunk = loss_chunk;
                let (loss, gradients) = learner.train_step(step);
                let loss: f32 = loss.into_scalar();
                assert!((loss - direct).abs() < 1e-4, "{loss} {direct}");
                let found = gradients_of(&learner, &gradients);
                assert_eq!(found.len(), expected.len());
                let largest = expected.iter().fold(0.0_f32, |most, grad| most.max(grad.abs()));
                assert!(largest > 1e-3, "the gradients are too small to compare: {largest}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() < 2e-5, "{found} {expected}");
                }
            }
        }
    }
}

#[test]
fn a_draft_vocabulary_limits_the_drafter_and_its_coverage_is_recorded() {
    let rows = patterned(40);
    let training = quick().with(|it| it.common.draft_vocabulary = Some(20));
    let trained = train(&rows, &training).unwrap();
    let vocabulary = trained.config.draft_vocabulary.as_ref().unwrap();
    assert_eq!(vocabulary.ids().len(), 20);
    let coverage = trained.config.vocabulary_coverage().unwrap();
    assert!(coverage > 0.3 && coverage < 1.0, "{coverage}");
    assert_eq!(trained.model.own_head().unwrap().dims(), [16, 20]);
}

#[test]
fn tokens_outside_the_draft_vocabulary_teach_nothing() {
    let rows = patterned(60);
    let response = quick().with(|it| {
        it.common.teacher = Teaching::Response;
        it.common.draft_vocabulary = Some(8);
        it.common.optimizer = OptimizerSettings { num_epochs: 12, ..quick().common.optimizer };
    });
    let trained = train(&rows, &response).unwrap();
    let coverage = trained.config.vocabulary_coverage().unwrap();
    assert!(coverage > 0.1 && coverage < 0.5, "{coverage}");
    // It learns the labelled tokens, and cannot draft the others. Coverage leaves out each response's last token.
    let first = trained.scores.agreement[0];
    assert!((first - coverage).abs() < 0.05, "{first} of {coverage}");
}

#[test]
fn drafters_of_one_pass_equal_those_trained_alone() {
    let rows = patterned(40);
    let lower = quick().with(|it| {
        it.num_steps = 2;
        it.step_weight = 0.5;
    });
    let higher = quick().with(|it| {
        it.layers = Some([1, 3, 4]);
        it.common.loss = DistillationLoss::TotalVariation;
        it.common.initial = InitialWeights::Random;
    });
    let trainings = [lower, higher];
    let target = random_model(5, 16, 64);
    let pass = |trainings: &[Eagle3Training]| {
        let dir = tempfile::tempdir().unwrap();
        let run = TrainingRun::new(dir.path(), "");
        match train_self_drafts(&target, &rows, trainings, 3, run).unwrap() {
            Ending::Finished(trained) => trained,
            Ending::Stopped { .. } => panic!("nothing stops it"),
        }
    };
    for (training, together) in trainings.iter().zip(pass(&trainings)) {
        let alone = pass(std::slice::from_ref(training)).remove(0);
        assert_eq!(alone.scores, together.scores);
        let [alone, together] = [alone, together].map(|trained| {
            let dir = tempfile::tempdir().unwrap();
            trained.model.write_dir(dir.path(), &trained.config).unwrap();
            std::fs::read(dir.path().join("model.safetensors")).unwrap()
        });
        assert!(alone == together, "the weights differ");
    }
}

#[test]
fn stored_states_train_the_same_drafter_within_their_rounding() {
    let rows = patterned(30);
    let scores = [Features::Recompute, Features::Cache].map(|features| {
        train(&rows, &quick().with(|it| it.common.features = features)).unwrap().scores
    });
    let [one, other] = scores.map(|scores| scores.cross_entropy);
    assert!((one - other).abs() < 0.02 * one, "{one} {other}");
}

#[test]
fn bad_settings_are_named() {
    let rows = patterned(10);
    let error = |training: &Eagle3Training| train(&rows, training).unwrap_err().to_string();
    let layers = |layers| quick().with(|it| it.layers = Some(layers));
    assert_contains(&error(&layers([2, 1, 0])), &["eagle3.layers", "[2, 1, 0]", "rise"]);
    assert_contains(&error(&layers([0, 1, 3])), &["eagle3.layers", "below the target's"]);
    let steps = quick().with(|it| it.num_steps = 9);
    assert_contains(&error(&steps), &["eagle3.num_steps", "9", "1 to 8"]);
    let weight = quick().with(|it| it.step_weight = 0.0);
    assert_contains(&error(&weight), &["eagle3.step_weight", "above 0"]);
    let narrow = quick().with(|it| it.common.draft_vocabulary = Some(0));
    assert_contains(&error(&narrow), &["eagle3.draft_vocabulary", "1 or more"]);
}

#[test]
fn a_training_goes_on_from_a_drafter_of_another_target() {
    let rows = patterned(40);
    let narrow = quick().with(|it| it.common.draft_vocabulary = Some(8));
    let before = train(&rows, &narrow).unwrap();
    let dir = tempfile::tempdir().unwrap();
    before.model.write_dir(dir.path(), &before.config).unwrap();
    let own = before.config.draft_vocabulary.clone().unwrap();
    let initial = InitialWeights::Drafter(dir.path().to_path_buf());
    let further = |change: &dyn Fn(&mut Eagle3Training)| {
        train(&rows, &quick().with(|it| it.common.initial = initial.clone()).with(|it| change(it)))
    };
    let once = |it: &mut Eagle3Training| it.common.optimizer.num_epochs = 1;
    let after = further(&once).unwrap();
    assert_eq!(after.config.draft_vocabulary, Some(own.clone()), "it is kept");
    let anew =
        train(&rows, &quick().with(once).with(|it| it.common.draft_vocabulary = Some(8))).unwrap();
    let [after_one, anew] = [&after, &anew].map(|trained| trained.scores.cross_entropy);
    assert!(after_one < anew, "{after_one} instead of {anew} after one epoch");
    let wider = further(&|it| it.common.draft_vocabulary = Some(12)).unwrap();
    let ids = wider.config.draft_vocabulary.clone().unwrap();
    assert_eq!((&ids.ids()[..8], ids.ids().len()), (own.ids(), 12));
    let written = tempfile::tempdir().unwrap();
    wider.model.write_dir(written.path(), &wider.config).unwrap();
    Eagle3Config::beside(written.path(), 3).unwrap();
    let error = |change: &dyn Fn(&mut Eagle3Training)| further(change).unwrap_err().to_string();
    let of_size = error(&|it| it.common.draft_vocabulary = Some(7));
    assert_contains(&of_size, &["eagle3.initial", "8 tokens", "is 7", "hint:"]);
    let nowhere = error(&|it| it.common.initial = InitialWeights::Drafter("rondom".into()));
    assert_contains(&nowhere, &["eagle3.initial", "rondom", "`target`"]);
}

#[test]
fn embeddings_of_its_own_begin_as_the_targets_and_are_trained() {
    let rows = patterned(30);
    let trained = |embeddings, rate| {
        let training = quick().with(|it| it.embeddings = embeddings);
        let training = training.with(|it| it.common.optimizer.learning_rate = Some(rate));
        train(&rows, &training).unwrap().model
    };
    let ids = || Tensor::from_ints([[0, 5]], &Device::flex());
    assert!(trained(false, 1e-2).own_embedding(ids()).is_none());
    let of_target = deep_target(16, 64).embed(ids()).into_data();
    let [first, last] = [1e-30, 1e-2].map(|rate| trained(true, rate).own_embedding(ids()).unwrap());
    assert_eq!(first.into_data(), of_target);
    assert_ne!(last.into_data(), of_target);
}

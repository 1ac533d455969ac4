//! Tests of training in bf16: its losses are close to those of f32, and parameters stay f32.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

use draftsmith_model::{AdapterArchitecture, HeadForm, WeightDtype};

use crate::adapter::{AdapterShape, AdapterTraining};
use crate::head::settings::HeadTraining;
use crate::head::{TrainedHead, train_heads};
use crate::lessons::settings::InitialWeights;
use crate::run::TrainingRun;
use crate::run::optimizer::OptimizerSettings;
use crate::self_draft::{TrainedState, train_self_drafts};
use crate::tests::pair::{early_target, responses, tiny_draft};
use crate::tests::runs::finished;

/// bf16 has 8 significant bits; averaging over hundreds of tokens reduces the error.
const RELATIVE_TOLERANCE: f64 = 0.02;

struct Dtypes(Vec<DType>);

impl ModuleVisitor for Dtypes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().dtype());
    }
}

/// The types of a module's parameters, without repetitions.
fn dtypes(module: &impl Module) -> Vec<DType> {
    let mut dtypes = Dtypes(Vec::new());
    module.visit(&mut dtypes);
    dtypes.0.dedup();
    dtypes.0
}

#[track_caller]
fn assert_near(what: &str, found: f64, expected: f64) {
    let off = (found - expected).abs();
    assert!(off <= RELATIVE_TOLERANCE * expected.abs(), "{what}: {found} for {expected}");
    // Equal numbers would mean that nothing was computed in bf16.
    assert!(off > 0.0, "{what}: {found} in both");
}

fn optimizer(defaults: OptimizerSettings) -> OptimizerSettings {
    OptimizerSettings {
        learning_rate: Some(1e-2),
        num_epochs: 3,
        gradient_accumulation: 2,
        validation_fraction: 0.3,
        ..defaults
    }
}

fn adapter(dtype: WeightDtype) -> TrainedState<AdapterShape> {
    let training = AdapterTraining::default().with(|it| {
        it.exit_layer = 1;
        it.common.dtype = dtype;
        it.common.loss_chunk = 5;
        it.common.optimizer = optimizer(OptimizerSettings::ADAPTER);
        it.architecture = AdapterArchitecture::Attention;
        it.common.initial = InitialWeights::Random;
    });
    let dir = tempfile::tempdir().unwrap();
    let rows = responses(40, 30, 4);
    let run = TrainingRun::new(dir.path(), "");
    train_self_drafts(&early_target(), &rows, &[training], 3, run).map(finished).unwrap().remove(0)
}

fn head(dtype: WeightDtype, form: HeadForm) -> TrainedHead {
    let training = HeadTraining {
        dtype,
        form,
        num_layers: 2,
        optimizer: optimizer(OptimizerSettings::HEAD),
        ..HeadTraining::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let rows = responses(40, 30, 4);
    let run = TrainingRun::new(dir.path(), "");
    train_heads(&tiny_draft(16, 64), &rows, &[training], 3, run).map(finished).unwrap().remove(0)
}

#[test]
fn an_adapter_trained_in_bf16_has_f32_weights_and_similar_losses() {
    let [expected, found] = [WeightDtype::F32, WeightDtype::Bf16].map(adapter);
    assert_eq!(dtypes(&found.model), [DType::F32]);
    assert_eq!(found.num_supervised, expected.num_supervised);
    for (found, expected) in found.epochs.iter().zip(&expected.epochs) {
        assert_near("loss", found.training_loss, expected.training_loss);
        let (found, expected) = (&found.validation, &expected.validation);
        assert_near("cross-entropy", found.cross_entropy, expected.cross_entropy);
        assert_near("entropy", found.target_entropy, expected.target_entropy);
        assert_near("overlap", found.overlap, expected.overlap);
    }
    assert_eq!(found.config.training["dtype"], "bf16");
}

#[test]
fn a_head_trained_in_bf16_has_f32_weights_and_similar_losses() {
    for form in [HeadForm::Candidate, HeadForm::LookAhead] {
        let [expected, found] =
            [WeightDtype::F32, WeightDtype::Bf16].map(|dtype| head(dtype, form));
        assert_eq!(dtypes(&found.model), [DType::F32]);
        assert_eq!(found.num_supervised, expected.num_supervised);
        for (found, expected) in found.epochs.iter().zip(&expected.epochs) {
            assert_near("loss", found.training_loss, expected.training_loss);
            assert_near("BCE", found.validation.bce, expected.validation.bce);
        }
        assert_eq!(found.config.training["dtype"], "bf16");
    }
}

//! The head as burn-train's learner sees it: one batch forward and back, and one optimiser step.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{ExecutionError, Tensor};
use burn_train::metric::{Adaptor, LossInput};
use burn_train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};
use draftsmith_model::AcceptanceHead;

use crate::batches::HeadBatch;
use crate::clipping::clip_to_global_norm;
use crate::loss::weighted_bce;

/// The head, and the two settings that its steps need. The draft is not in here: what is in the
/// learner is trained and saved.
#[derive(Module, Debug)]
pub(crate) struct HeadLearner {
    pub(crate) head: AcceptanceHead,
    #[module(skip)]
    pub(crate) rejection_weight: f64,
    #[module(skip)]
    pub(crate) max_grad_norm: f64,
}

/// What a batch gives back. No tensor of it holds on to the graph.
#[derive(Debug, Clone)]
pub(crate) struct HeadOutput {
    /// `[1]`
    pub(crate) loss: Tensor<1>,
    /// `[labels]`: accept minus reject.
    pub(crate) logit: Tensor<1>,
}

impl HeadLearner {
    fn output(&self, batch: &HeadBatch) -> HeadOutput {
        let logit = self.head.acceptance_logit(batch.features.clone());
        let loss = weighted_bce(logit.clone(), batch.labels.clone(), self.rejection_weight);
        HeadOutput { loss, logit }
    }
}

impl TrainStep for HeadLearner {
    type Input = HeadBatch;
    type Output = HeadOutput;

    fn step(&self, batch: HeadBatch) -> TrainOutput<HeadOutput> {
        let output = self.output(&batch);
        // Accumulation sums: each batch brings its share, so that a step has the mean.
        let grads = (output.loss.clone() * batch.step_share).backward();
        TrainOutput::new(self, grads, output.without_graph())
    }

    fn optimize(
        self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let grads = clip_to_global_norm(&self, grads, self.max_grad_norm);
        optimizer.step(learning_rate, self, grads)
    }
}

impl InferenceStep for HeadLearner {
    type Input = HeadBatch;
    type Output = HeadOutput;

    fn step(&self, batch: HeadBatch) -> HeadOutput {
        self.output(&batch).without_graph()
    }
}

impl HeadOutput {
    fn without_graph(self) -> Self {
        Self { loss: self.loss.without_autodiff(), logit: self.logit.without_autodiff() }
    }
}

impl ItemLazy for HeadOutput {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<LossInput> for HeadOutput {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

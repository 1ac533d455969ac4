//! What the loop trains, a head or an adapter, as the loop sees it.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_train::{InferenceStep, LearnerModel, TrainStep};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::data::batches::TrainingBatch;
use crate::error::TrainError;
use crate::log::metrics::Score;
use crate::run::clipping::Clipping;
use crate::section::Section;

/// What the loop trains, and how it is scored: the head, or an adapter. burn-train's learner has
/// its steps.
pub(crate) trait Trainee:
    LearnerModel
    + Sync
    + TrainStep<Input = <Self as Trainee>::Batch>
    + InferenceStep<Input = <Self as Trainee>::Batch>
{
    /// What a step is given.
    type Batch: TrainingBatch + Clone + Sync;
    /// What the caller wants of it in the end.
    type Part: Module + 'static;
    /// What validation adds up.
    type Tally: Send;
    /// What it makes of that.
    type Scores: std::fmt::Debug + Copy + Send + Sync + Serialize + DeserializeOwned + 'static;

    /// The role of the frozen model, for messages.
    const FROZEN: &'static str;
    /// The scores that are metrics.
    const SCORES: &'static [Score<Self::Scores>];

    /// The recipe's section, for messages.
    fn section(&self) -> Section;

    /// Leaves the rest.
    fn part(self) -> Self::Part;

    /// How a step's gradients are cut.
    fn clipping(&self) -> Clipping;

    /// `[1]`, without a graph.
    fn training_loss(output: &<Self as TrainStep>::Output) -> Tensor<1>;

    /// Nothing added.
    fn tally(&self) -> Self::Tally;

    /// Adds a validation batch, with one wait for the device; false if a prediction is not finite.
    fn count(
        output: &<Self as InferenceStep>::Output,
        tally: &mut Self::Tally,
    ) -> Result<bool, TrainError>;

    /// The scores of what was added.
    fn scores(tally: Self::Tally) -> Self::Scores;

    /// The number that the best epoch has the lowest of.
    fn to_minimise(&self, scores: &Self::Scores) -> f64;
}

//! Batches, losses and trainers of acceptance heads and self-draft adapters, through burn-train.
//!
//! Rows of responses and a frozen model go in (the draft for a head, the target for an adapter);
//! a head or an adapter, its validation scores and where it came from come out. Only what is
//! trained is in the learner: the frozen model runs beside it and hands over hidden states, so that
//! checkpoints hold nothing else. Nothing here prints, reads arguments, picks a device or knows of
//! decoding.
//!
//! | module | what it owns |
//! |---|---|
//! | `data` | which rows make which batch of which step, the thread that prepares them, and what a training sees, written down for others |
//! | `head` | acceptance heads: settings, sweep, mixtures, rollouts, features, loss, and the training |
//! | `adapter` | self-draft adapters: settings, batches, the four distillation losses, scores, and the training |
//! | `run` | the loop over epochs, its members and devices, optimizer and learning rate, and the state from which a run resumes |
//! | `log` | what a training tells: `metrics.jsonl`, TensorBoard's event files, burn-train's metrics, and [`renderer`] |
//! | `states` | hidden states of frozen models that are kept on the disk |
//! | `ranges` | the ranges of settings, and the error that names one outside |

mod adapter;
mod data;
mod error;
mod head;
mod log;
mod run;
mod section;
mod states;
#[cfg(test)]
mod tests;

pub use adapter::distillation::DistillationLoss;
pub use adapter::scores::AdapterScores;
pub use adapter::settings::{AdapterTraining, ExitLayers, InitialWeights, Teaching};
pub use adapter::train::{TrainedAdapter, adapter_examples, first_adapter, train_adapters};
pub use burn_train::Interrupter;
pub use data::batches::{Example, RowCounts, StepExamples};
pub use data::split::is_held_out;
pub use error::TrainError;
pub use head::recorded::RecordedRollouts;
pub use head::settings::{HeadLabels, HeadTraining};
pub use head::sweep::HeadSweep;
pub use head::train::{HeadData, TrainedHead, first_head, head_examples, train_heads};
pub use log::renderer;
pub use run::checkpoint::{Resumption, discard};
pub use run::clipping::Clipping;
pub use run::optimizer::OptimizerSettings;
pub use run::progress::EpochScores;
pub use run::schedule::Schedule;
pub use run::trained::Trained;
pub use run::training_run::{Ending, TrainingRun, TrainingSize};
pub use section::Section;
pub use states::{FeatureDir, FeatureFormat, Features};

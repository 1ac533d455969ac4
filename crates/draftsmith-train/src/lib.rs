//! Training of acceptance heads, self-draft adapters and EAGLE-3 drafters.
//!
//! The inputs are rows of responses and a frozen model: the draft for a head, the target for an
//! adapter or an EAGLE-3 drafter. The results are trained modules with their validation scores and
//! provenance. The frozen model computes hidden states; only the trained modules belong to the
//! saved state. Nothing here prints, reads arguments, chooses a device or knows about decoding.
//!
//! ```no_run
//! use draftsmith_train::{AdapterTraining, TrainingRun, train_self_drafts};
//! # use std::path::Path;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = burn::tensor::Device::flex();
//! let target = draftsmith_model::CausalLm::from_model_dir(Path::new("target"), &device)?;
//! let (rows, _) = draftsmith_data::read_shard(Path::new("responses.parquet"), None)?;
//! let run = TrainingRun::new(Path::new("training"), "what the state belongs to");
//! let ending = train_self_drafts(&target, &rows, &[AdapterTraining::default()], 0, run)?;
//! for trained in ending.best().into_iter().flatten() {
//!     println!("{:?}", trained.scores);
//!     trained.model.write_dir(Path::new("adapter"), &trained.config)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`train_heads`] is the same for heads. The examples `head` and `adapter` of the crate `draftsmith` run both.
//!
//! | module | owns |
//! |---|---|
//! | `data` | the rows of each batch and step, and the thread that prepares them |
//! | `head` | acceptance heads: settings, sweep, mixtures, rollouts, features, loss |
//! | `lessons` | what self-drafts learn from: batches, hidden states, distillation losses |
//! | `self_draft` | the training of all self-drafts: settings, learner, scores |
//! | `adapter`, `eagle`, `eagle3`, `block` | the settings of one form, and its first weights |
//! | `confidence` | confidence heads of finished block drafters |
//! | `run` | the training loop, its members, devices, optimizer and learning rate, and the saved state |
//! | `log` | `metrics.jsonl`, and [`renderer`], the display with burn-train |
//! | `states` | hidden states of frozen models on the disk |
//! | `ranges` | the ranges of numeric settings |

mod adapter;
mod block;
mod confidence;
mod data;
mod eagle;
mod eagle3;
mod error;
mod head;
mod lessons;
mod log;
mod medusa;
mod ranges;
mod run;
mod self_draft;
mod states;
#[cfg(test)]
mod tests;

pub use adapter::{AdapterShape, AdapterTraining};
pub use block::{BlockShape, BlockTraining};
pub use confidence::{
    ConfidenceTraining, FrozenBlock, JudgedPlace, TrainedConfidence, train_confidence,
};
pub use data::split::is_held_out;
pub use data::{Example, RowCounts, StepExamples};
pub use eagle::{EagleShape, EagleTraining};
pub use eagle3::{Eagle3Shape, Eagle3Training};
pub use error::{Section, TrainError};
pub use head::predicted::{TrainingInput, predictions_along};
pub use head::recorded::RecordedRollouts;
pub use head::rollout_rows::{recordings_of, rollout_rows, rows_of_recording};
pub use head::settings::{HeadLabels, HeadSweep, HeadTraining};
pub use head::{HeadData, TrainedHead, first_head, head_examples, train_heads};
pub use lessons::Teaching;
pub use lessons::distillation::DistillationLoss;
pub use lessons::settings::{InitialWeights, LessonSettings};
pub use log::renderer;
pub use medusa::{MedusaShape, MedusaTraining};
pub use run::checkpoint::{Resumption, discard};
pub use run::clipping::Clipping;
pub use run::optimizer::{OptimizerSettings, Schedule};
pub use run::progress::EpochScores;
pub use run::trained::{ExportConfig, ExportRecord, ExportStamp, Trained, TrainedExport};
pub use run::{Ending, TrainingRun, TrainingSize};
pub use self_draft::scores::{AdapterScores, DraftScores, LessonScores, MAX_STEPS};
pub use self_draft::settings::SelfDraftTraining;
pub use self_draft::{
    FirstWeights, StateTraining, TrainedState, first_self_draft, self_draft_examples,
    train_self_drafts,
};
pub use states::{
    FeatureDir, FeatureFormat, Features, GivenStates, Keeping, StatesRow, StatesSource,
    StatesStream,
};

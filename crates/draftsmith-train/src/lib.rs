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
//! | `head_training`, `adapter_training` | the recipe's settings |
//! | `head_sweep` | those of a sweep, and the heads that it stands for |
//! | `ranges` | the ranges of settings, and the error that names one outside |
//! | `rows` | a response as head training sees it: the mixture of an epoch and its labels; the split |
//! | `features` | the frozen draft's hidden states at labelled positions |
//! | `batches` | which rows make which batch of which step, and the thread that prepares them |
//! | `lessons` | what a training sees, written down for others |
//! | `head_batches` | batches of labelled positions |
//! | `adapter_batches` | batches of sequences: hidden states at the exit layer and at the end |
//! | `loss` | the head's: weighted binary cross-entropy with soft labels |
//! | `distillation` | the adapter's four: through the target's LM head, a chunk at a time |
//! | `optimiser` | AdamW, rates and clipping, as both sections have them |
//! | `clipping` | gradients cut to a global norm, or each to a value |
//! | `schedule` | the learning rate of each step |
//! | `head_learner`, `adapter_learner` | head and adapter as burn-train's learner sees them |
//! | `adapter_scores` | how well an adapter speaks for its target |
//! | `metrics` | validation scores as burn-train's metrics |
//! | `devices` | what is the same on each of a training's devices, and a thread for each |
//! | `epochs` | the loop: train, validate, keep the best, save, stop |
//! | `member` | one of the heads or adapters that are trained side by side |
//! | `checkpoint` | the state from which a training goes on as if it had never stopped |
//! | `step_log` | `metrics.jsonl`, a line a step, and the same for TensorBoard |
//! | `event_file` | TensorBoard's event files, cut where steps are taken again |
//! | `trainer` | all that training changes, to and from such a state |
//! | `stint` | one call's share of a training: where, how far, and what it leaves |
//! | `fit` | what every training is put together from |
//! | `train_head`, `train_adapter` | all of it put together |
//! | [`renderer`] | what a caller needs to show progress |

mod adapter_batches;
mod adapter_learner;
mod adapter_scores;
mod adapter_training;
mod batches;
mod checkpoint;
mod clipping;
mod devices;
mod distillation;
mod epochs;
mod error;
mod event_file;
mod features;
mod fit;
mod frozen_draft;
mod head_batches;
mod head_learner;
mod head_sweep;
mod head_training;
mod lessons;
mod loss;
mod member;
mod metrics;
mod optimiser;
mod ranges;
mod recorded;
#[cfg(test)]
mod reduced_precision;
pub mod renderer;
#[cfg(test)]
mod resuming;
mod rows;
mod schedule;
mod step_log;
mod stint;
#[cfg(test)]
mod test_pair;
#[cfg(test)]
mod test_runs;
mod train_adapter;
mod train_head;
mod trainer;

pub use adapter_scores::AdapterScores;
pub use adapter_training::{AdapterTraining, ExitLayers, InitialWeights};
pub use burn_train::Interrupter;
pub use checkpoint::{Resumption, discard};
pub use clipping::Clipping;
pub use distillation::DistillationLoss;
pub use epochs::EpochScores;
pub use error::TrainError;
pub use frozen_draft::FrozenDraft;
pub use head_sweep::HeadSweep;
pub use head_training::{HeadLabels, HeadTraining};
pub use lessons::{Example, Lesson};
pub use recorded::RecordedRollouts;
pub use rows::is_held_out;
pub use schedule::Schedule;
pub use stint::{Ending, Stint};
pub use train_adapter::{TrainedAdapter, adapter_lessons, first_adapter, train_adapters};
pub use train_head::{HeadData, TrainedHead, first_head, head_lessons, train_heads};

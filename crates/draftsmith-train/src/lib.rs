//! Batches, losses and the trainer of acceptance heads, through burn-train.
//!
//! Rows of responses and a frozen draft go in; a head, its validation scores and where it came
//! from come out. Only the head is in the learner: the draft runs beside it and hands over hidden
//! states, so that checkpoints hold what is trained and nothing else. Nothing here prints, reads
//! arguments, picks a device or knows of decoding.
//!
//! | module | what it owns |
//! |---|---|
//! | `head_training` | the recipe's settings and their ranges |
//! | `rows` | a response as training sees it: the mixture of an epoch and its labels; the split |
//! | `features` | the frozen draft's hidden states at labelled positions |
//! | `batches` | which rows make which batch of which step, and the thread that prepares them |
//! | `loss` | weighted binary cross-entropy with soft labels |
//! | `clipping` | gradients cut to a global norm |
//! | `schedule` | the learning rate of each step |
//! | `learner` | the head as burn-train's learner sees it |
//! | `metrics` | validation scores as burn-train's metrics |
//! | `epochs` | the loop: train, validate, keep the best, checkpoint, stop |
//! | `train_head` | all of it put together |
//! | [`renderer`] | what a caller needs to show progress |

mod batches;
mod clipping;
mod epochs;
mod error;
mod features;
mod head_training;
mod learner;
mod loss;
mod metrics;
pub mod renderer;
mod rows;
mod schedule;
#[cfg(test)]
mod test_pair;
mod train_head;

pub use burn_train::Interrupter;
pub use epochs::EpochScores;
pub use error::TrainError;
pub use head_training::HeadTraining;
pub use train_head::{TrainedHead, train_head};

//! Speculative decoding for Rust programs. A drafter proposes several tokens, and the target
//! verifies them in one forward, so that the text is the target's own.
//!
//! ```
//! use draftsmith::{Device, Drafter, Generator, Message, Model, Rule, Sampling};
//!
//! # fn main() -> Result<(), draftsmith::Error> {
//! # let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");
//! let device = Device::flex(); // the CPU
//! let target = Model::load(format!("{models}/target"), &device)?;
//! let draft = Model::load(format!("{models}/draft"), &device)?;
//! let question = [Message::user("What is 541 + 279?")];
//!
//! let plain = Generator::new(&target).generate(&question)?;
//! let mut generator = Generator::new(&target)
//!     .with_drafter(Drafter::model(&draft))?
//!     .with_rule("confidence=0.4".parse::<Rule>()?);
//! let answer = generator.generate(&question)?;
//! assert_eq!(answer.token_ids, plain.token_ids);
//! assert!(answer.text.ends_with("Answer: 820"));
//!
//! let counts = answer.counts();
//! println!("{} of {} candidates accepted", counts.num_accepted, counts.num_drafted);
//! assert!(counts.num_target_forwards < plain.counts().num_target_forwards);
//!
//! let sampling = Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() };
//! let mut sampler = generator.with_decoding(sampling).with_seed(7);
//! assert_eq!(sampler.generate(&question)?.text, sampler.generate(&question)?.text);
//! # Ok(())
//! # }
//! ```
//!
//! | you have | you use |
//! |---|---|
//! | a checkpoint in Hugging Face's format, with tokenizer and chat template | [`Model::load`] |
//! | a smaller model with the same tokenizer | [`Drafter::model`], and [`Drafter::with_head`] if a head was trained |
//! | a drafter that `draftsmith train-drafter` trained: an adapter, EAGLE-3 | [`Drafter::open`] |
//! | a model on the Hugging Face Hub | [`Model::from_hub`] |
//! | a drafter of your own | [`Drafter::of_parts`], [`decode::TextParts`] |
//! | a kind of drafter of your own | [`kinds::KindEntry`], [`Drafter::open_of`] |
//! | no drafter | [`Drafter::prompt_lookup`] |
//! | a rule by name, or one of your own | [`Rule`] |
//! | prompts to stream answers to, or many of them | [`Generator::stream`], [`Generator::generate_many`] |
//! | a rule to judge without running models | [`Generator::record`], [`theory::Recordings::replay_rule`] |
//! | responses to train on | [`Generator::respond`], [`train::train_heads`], [`train::train_self_drafts`] |
//!
//! The lower crates are modules here. The `draftsmith` program trains, tunes and evaluates with
//! recipes. Heads and adapters that it exports decode here under their tuned stop rules. This crate
//! prints nothing and reads no recipe files.

mod checkpoint;
mod drafter;
mod error;
mod generator;
mod recording;
mod rule;
#[cfg(test)]
mod tests;

pub use burn::tensor::Device;
pub use draftsmith_data::{self as data, Message};
pub use draftsmith_decode::{self as decode, Finish};
pub use draftsmith_model as model;
pub use draftsmith_recipe::kinds;
pub use draftsmith_report as report;
pub use draftsmith_theory::{
    self as theory, Bounds, Counts, Decoding, DraftSignals, LookupFirst, MaxGramConfig, Sampling,
    SignalNeeds, StopRule, StopRuleConfig,
};
pub use draftsmith_train::{self as train, rollout_rows};

pub use checkpoint::Model;
pub use drafter::Drafter;
pub use error::Error;
pub(crate) use error::Result;
pub use generator::{Generated, Generator, Piece, PromptInput, Session};
pub use rule::Rule;

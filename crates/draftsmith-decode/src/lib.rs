//! Drafters, sequences and the decoding loop: token ids in, token ids and a trace out.
//!
//! This crate never sees text or training data. `draftsmith-theory` decides which tokens are
//! decoded (verification, stop rules, random draws), and `draftsmith-model` runs the networks. The
//! crate `draftsmith` adds the tokenizer.
//!
//! ```
//! use std::ops::ControlFlow;
//! use draftsmith_decode::{Limits, ModelSession, Request, SeparateDraft, decode_speculative};
//! use draftsmith_model::CausalLm;
//! use draftsmith_theory::{Decoding, FixedLengthConfig, SeededDraws, StopRuleConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny");
//! let device = burn::tensor::Device::flex();
//! let target = CausalLm::from_model_dir(&dir.join("target"), &device)?;
//! let draft = CausalLm::from_model_dir(&dir.join("draft"), &device)?;
//! let mut session = ModelSession::new(&target, 64, "target");
//! let mut drafter = SeparateDraft::new(&draft, None, target.shape().vocab_size, 64, 1);
//! let mut rule = StopRuleConfig::from(FixedLengthConfig { candidate_length: 3 }).init()?;
//! let request = Request {
//!     prompt: &[0, 17, 42],
//!     decoding: Decoding::GREEDY,
//!     limits: &Limits::new(20, vec![1]),
//!     rule: Some(&mut *rule),
//!     draws: &mut SeededDraws::new(0, &["example"]),
//! };
//! let generation = decode_speculative(&mut session, &mut drafter, request, &mut |_| {
//!     ControlFlow::Continue(()) // could show the round's tokens, or stop
//! })?;
//! assert_eq!(generation.trace.num_tokens, generation.token_ids.len());
//! # Ok(())
//! # }
//! ```

mod acceptance;
mod block_draft;
mod cascade;
mod decode;
mod drafter;
mod error;
mod feature_draft;
mod features;
mod lookup_first;
mod max_gram;
mod medusa_draft;
mod merged;
mod record;
mod registry;
mod response_target;
mod round_draft;
mod self_draft;
mod separate_draft;
mod sequence;
mod served_target;
mod session;
mod state_draft;
mod target;
mod text_draft;
mod tree_draft;

pub use block_draft::{BlockDraft, BlockDraftParts};
pub use cascade::{CascadeConfig, CascadeLengths, CascadeParts};
pub use decode::{decode_many, decode_on, decode_plain, decode_speculative};
pub use drafter::chain::propose_chain;
pub use drafter::{
    DraftRound, DraftRow, DraftStep, Drafter, LookUp, Member, ModelDrafter, NoDrafter, StepDrafter,
};
pub use error::DecodeError;
pub use lookup_first::LookupFirstDraft;
pub use max_gram::{LookUpParts, MaxGramDraft};
pub use medusa_draft::MedusaDraftParts;
pub use merged::MergedParts;
pub use record::{RecordOptions, RecordRequest, RecordTask, record};
pub use registry::{AnsweringTarget, DrafterParts, Drafters, Drafting, NamedParts, Sizes};
pub use response_target::{KnownResponse, KnownStates, ResponseTarget};
pub use round_draft::{
    ComputedRows, RoundDraft, RoundDraftParts, RoundNetwork, RoundRow, RoundSource,
};
pub use self_draft::{SelfDraft, SelfDraftParts};
pub use separate_draft::{DraftModelParts, SeparateDraft};
pub use sequence::{Finish, Generation, Limits, Request, RoundTokens};
pub use session::ModelSession;
pub use state_draft::{StateDraft, StateDraftParts};
pub use target::{KeptStates, Logits, Target, TargetLayers, Verification};
pub use text_draft::TextParts;
pub use tree_draft::TreeDraft;

#[cfg(test)]
mod exactness;

//! Drafters, sequences and the decoding loop: token ids in, token ids and a trace out.
//!
//! This crate never sees text or files of examples. `draftsmith-theory` decides which tokens are decoded
//! (verification, stop rules, draws), and `draftsmith-model` computes.

mod acceptance;
mod cascade;
mod chain;
mod decode;
mod drafter;
mod error;
mod feature_draft;
mod features;
mod lookup_first;
mod max_gram;
mod merged;
mod record;
mod registry;
mod response_target;
mod self_draft;
mod separate_draft;
mod sequence;
mod served_target;
mod session;
mod target;
mod tree_draft;

pub use cascade::{CascadeConfig, CascadeLengths, CascadeParts};
pub use decode::{decode_many, decode_plain, decode_speculative};
pub use drafter::{
    DraftRound, DraftRow, DraftStep, Drafter, Member, ModelDrafter, NoDrafter, StepDrafter,
};
pub use error::DecodeError;
pub use lookup_first::LookupFirstDraft;
pub use max_gram::{LookUpParts, MaxGramDraft};
pub use merged::MergedParts;
pub use record::{RecordOptions, RecordRequest, record};
pub use registry::{AnsweringTarget, DrafterParts, Drafters, Drafting, NamedParts, Sizes};
pub use response_target::{KnownResponse, ResponseTarget};
pub use self_draft::{SelfDraft, SelfDraftParts};
pub use separate_draft::{DraftModelParts, SeparateDraft};
pub use sequence::{Finish, Generation, Limits, Request, RoundTokens};
pub use session::ModelSession;
pub use target::{Logits, Target, TargetLayers, Verification};
pub use tree_draft::TreeDraft;

#[cfg(test)]
mod exactness;

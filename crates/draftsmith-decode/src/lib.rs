//! Drafters, sequences and those who advance them: token ids in, token ids and a trace out.
//!
//! It never sees text or files of examples. What is decoded is decided by `draftsmith-theory`
//! (verification, stop rules, draws); what computes is `draftsmith-model`.

mod acceptance;
mod cascade;
mod chain;
mod decode;
mod draft_forwards;
mod draft_row;
mod drafter;
mod error;
mod features;
mod logits;
mod lookup_first;
mod max_gram;
mod merged;
mod model_drafter;
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

pub use cascade::{Cascade, CascadeConfig, CascadeLengths};
pub use chain::propose_chain;
pub use decode::{decode_many, decode_plain, decode_speculative};
pub use drafter::{DraftRound, DraftStep, Drafted, Drafter, NoDrafter, StepDrafter};
pub use error::DecodeError;
pub use logits::Logits;
pub use lookup_first::LookupFirstDraft;
pub use max_gram::MaxGramDraft;
pub use merged::MergedDraft;
pub use model_drafter::ModelDrafter;
pub use record::{RecordOptions, RecordRequest, record};
pub use registry::{DrafterParts, Drafters, Drafting, separate_draft};
pub use response_target::{KnownResponse, ResponseTarget};
pub use self_draft::SelfDraft;
pub use separate_draft::SeparateDraft;
pub use sequence::{Finish, Generation, Limits, Request, RoundTokens, Sequence, Stage};
pub use served_target::ServedTarget;
pub use session::ModelSession;
pub use target::{Target, Verification};
pub use tree_draft::TreeDraft;

#[cfg(test)]
mod exactness;

//! Drafters, the round loop and plain decoding: token ids in, token ids and a trace out.
//!
//! It never sees text or files of examples. What is decoded is decided by `draftsmith-theory`
//! (verification, stop rules, draws); what computes is `draftsmith-model`.

mod acceptance;
mod error;
mod features;
mod record;
mod round;
mod self_draft;
mod separate_draft;
mod session;

pub use error::DecodeError;
pub use record::{RecordOptions, record};
pub use round::{
    Drafted, Drafter, Finish, Generation, Limits, RoundTokens, Target, decode_plain,
    decode_speculative,
};
pub use self_draft::SelfDraft;
pub use separate_draft::SeparateDraft;
pub use session::{Logits, ModelSession};

#[cfg(test)]
mod exactness;

//! The faults that keep a self-draft from being read.

use crate::error::ModelError;

/// What keeps a drafter from being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFaultKind {
    /// A key that changes the network in a way that is not computed, or is unknown.
    RefusedKey,
    /// More layers than the form has, or none.
    SeveralLayers,
    /// The target has fewer layers, or the form reads another number of them.
    WrongLayers,
    /// The target's layers do not ascend.
    DescendingLayers,
    /// A draft vocabulary without `d2t`.
    NoOffsets,
    /// `d2t` without a draft vocabulary.
    SurplusOffsets,
    /// `d2t` holds the target's ids.
    IdsForOffsets,
    /// `d2t` does not lead to different ids of the target.
    WrongOffsets,
    /// A draft vocabulary without an LM head.
    NoHead,
    /// Another width than the target's hidden states have.
    OtherWidth,
    /// Another vocabulary than the target's.
    OtherVocabulary,
    /// A context shorter than the target's.
    ShortContext,
    /// A missing tensor.
    MissingTensor,
    /// A tensor of another shape than `config.json` says.
    WrongShape,
    /// A tensor that belongs to no drafter.
    UnknownTensor,
}

/// A fault that keeps a drafter from being read.
#[derive(Debug)]
pub struct DraftFault {
    /// Its kind.
    pub kind: DraftFaultKind,
    /// What is wrong, with the file and the key or tensor.
    pub error: ModelError,
}

//! How prompts of several sources are chosen, as it stands in provenance.

use serde::{Deserialize, Serialize};

/// A source's share of the prompts: its weight among all of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceWeight {
    /// How many prompt files are the source's.
    pub num_files: usize,
    /// The weight.
    pub weight: f64,
}

/// Bounds on lengths in tokens, both ends included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthBounds {
    /// The shortest prompt: a conversation up to where its first answer begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_prompt_tokens: Option<usize>,
    /// The longest prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_prompt_tokens: Option<usize>,
    /// The shortest answer of a file, in any turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_response_tokens: Option<usize>,
    /// The longest answer of a file, in any turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_response_tokens: Option<usize>,
}

impl LengthBounds {
    /// Whether there are none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

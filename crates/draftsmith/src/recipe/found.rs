//! What a recipe leaves to `tune`.

use serde::{Deserialize, Serialize};

/// Who finds what the recipe leaves open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Found {
    /// `tune` does.
    Tuned,
}

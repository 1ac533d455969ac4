//! The recipe's sections that say how something is trained, and their names.

use std::fmt::{self, Display, Formatter};

/// A section of the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// `[head]`: the acceptance head of a draft model.
    Head,
    /// `[adapter]`: self-draft adapters.
    Adapter,
    /// `[adapter_head]`: the acceptance head of an adapter.
    AdapterHead,
}

impl Section {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Head, Self::Adapter, Self::AdapterHead];

    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Adapter => "adapter",
            Self::AdapterHead => "adapter_head",
        }
    }
}

impl Display for Section {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

//! The table `[evaluate.trees]`: trees of candidates beside the chains of every drafter that has a
//! model.

use anyhow::{Context, Result};
use draftsmith_theory::{TheoryError, TreeShape};
use serde::{Deserialize, Serialize};

use super::checks::require;

/// Which trees are measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TreesRecipe {
    /// Their shapes, each under every rule of its drafter: widths by depth, nodes that a draft forward
    /// reads, the most nodes beside the chain.
    #[serde(default = "default_shapes")]
    pub(crate) shapes: Vec<String>,
}

impl TreesRecipe {
    fn parsed(&self) -> impl Iterator<Item = Result<TreeShape, TheoryError>> {
        self.shapes.iter().map(|shape| shape.parse())
    }

    /// The shapes.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = TreeShape> {
        self.parsed().map(|shape| shape.expect("the recipe was checked"))
    }

    pub(super) fn check(&self) -> Result<()> {
        require(!self.shapes.is_empty(), "evaluate.trees.shapes", "is empty: name a shape")?;
        for (shape, parsed) in self.shapes.iter().zip(self.parsed()) {
            parsed.with_context(|| format!("key `evaluate.trees.shapes`: `{shape}`"))?;
        }
        Ok(())
    }
}

/// The chain's siblings alone, which cost no draft forward, and a tree that is read in part.
fn default_shapes() -> Vec<String> {
    vec!["2x1x4".into(), "3x2x8".into()]
}

//! The table `[evaluate.trees]`: candidate trees to measure in addition to the drafters' chains.

use anyhow::Result;
use draftsmith_theory::{DrafterId, TreeChildren, TreeShape};
use serde::{Deserialize, Serialize};

use super::keys::require;

/// The candidate trees to measure.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreesRecipe {
    /// The tree shapes, each measured under every rule of the drafter. A shape gives the number of
    /// children by depth, the number of nodes that a draft forward reads, and the maximum number of
    /// nodes outside the main chain.
    #[serde(default = "default_shapes")]
    pub shapes: Vec<TreeShape>,
    /// The drafters that draft the trees; all if empty.
    #[serde(default)]
    pub drafters: Vec<DrafterId>,
}

impl TreesRecipe {
    pub(super) fn check(&self) -> Result<()> {
        require(!self.shapes.is_empty(), "evaluate.trees.shapes", "is empty: give a shape")
    }
}

/// Returns two shapes: a chain with siblings, which needs no extra draft forward, and a tree of
/// which the drafter reads a part.
fn default_shapes() -> Vec<TreeShape> {
    let shape = |width, num_read, num_beside| {
        TreeShape::new(&[width], num_read, num_beside, TreeChildren::Top).expect("a shape")
    };
    vec![shape(2, 1, 4), shape(3, 2, 8)]
}

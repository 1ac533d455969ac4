//! The table `[evaluate.trees]`: trees of candidates beside the chains of every drafter that has a
//! model.

use anyhow::Result;
use draftsmith_theory::{TreeChildren, TreeShape};
use serde::{Deserialize, Serialize};

use super::checks::require;

/// Which trees are measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TreesRecipe {
    /// Their shapes, each under every rule of its drafter: widths by depth, nodes that a draft forward
    /// reads, the most nodes beside the chain.
    #[serde(default = "default_shapes")]
    pub(crate) shapes: Vec<TreeShape>,
}

impl TreesRecipe {
    pub(super) fn check(&self) -> Result<()> {
        require(!self.shapes.is_empty(), "evaluate.trees.shapes", "is empty: name a shape")
    }
}

/// The chain's siblings alone, which cost no draft forward, and a tree that is read in part.
fn default_shapes() -> Vec<TreeShape> {
    let shape = |width, num_read, num_beside| {
        TreeShape::new(&[width], num_read, num_beside, TreeChildren::Top).expect("a shape")
    };
    vec![shape(2, 1, 4), shape(3, 2, 8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<TreesRecipe, toml::de::Error> {
        toml::from_str(&format!("shapes = {text}"))
    }

    #[test]
    fn shapes_are_texts_or_lists_of_paths() {
        let read_back = read("['2x1x4', [[0], [1], [0, 0], [0, 1], [1, 0]], '2-1-drawn']");
        let TreesRecipe { shapes } = read_back.expect("shapes");
        let texts: Vec<String> = shapes.iter().map(TreeShape::to_string).collect();
        assert_eq!(texts, ["2x1x4", "2-2.1", "2-1-drawn"]);
        for (text, told) in [
            ("[[[0], [2]]]", "[2]"),
            ("[[[0], [1, 0]]]", "is not there"),
            ("[[]]", "of none"),
            ("['2-1.1.1']", "`2-1.1.1`"),
            ("[3]", "paths, such as"),
        ] {
            let message = read(text).expect_err("refused").to_string();
            assert!(message.contains(told), "{message}");
        }
    }
}

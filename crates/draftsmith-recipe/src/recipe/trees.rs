//! The table `[evaluate.trees]`: trees of candidates, measured beside the chains of every drafter that
//! has a model.

use std::fmt;

use anyhow::Result;
use draftsmith_report::DecodingName;
use draftsmith_theory::{TreeChildren, TreeShape};
use serde::de::value::SeqAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::require;

/// Which trees are measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreesRecipe {
    /// Shapes, each measured under every rule of the drafter. A shape is a text with widths by depth,
    /// the number of nodes that a draft forward reads and the most nodes beside the chain; a list of
    /// paths; or `"tuned"`: the static shape that `tune` finds for each drafter in greedy decoding,
    /// with a chain as long as the tree is deep.
    #[serde(default = "default_shapes")]
    pub shapes: Vec<AskedShape>,
}

/// An entry of `shapes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedShape {
    /// A shape in the recipe.
    Given(TreeShape),
    /// The shape that `tune` finds for each drafter.
    Tuned,
}

impl TreesRecipe {
    /// The shapes in the recipe, without `"tuned"`.
    pub fn given(&self) -> impl Iterator<Item = TreeShape> {
        self.shapes.iter().filter_map(|asked| match asked {
            AskedShape::Given(shape) => Some(*shape),
            AskedShape::Tuned => None,
        })
    }

    /// Whether `tune` searches for a shape under a way of decoding. It can replay only greedy trees.
    pub(super) fn is_tuned(&self, decoding: DecodingName) -> bool {
        decoding == DecodingName::Greedy && self.shapes.contains(&AskedShape::Tuned)
    }

    pub(super) fn check(&self, decodings: &[DecodingName]) -> Result<()> {
        const KEY: &str = "evaluate.trees.shapes";
        require(!self.shapes.is_empty(), KEY, "is empty: give a shape")?;
        require(
            decodings.contains(&DecodingName::Greedy) || !self.is_tuned(DecodingName::Greedy),
            KEY,
            "has \"tuned\", but `evaluate.decodings` has no \"greedy\", the only decoding whose trees can be tuned: \
             add it, or give a shape",
        )
    }
}

/// A chain with siblings, which need no extra draft forward, and a tree that the draft reads in part.
fn default_shapes() -> Vec<AskedShape> {
    let shape = |width, num_read, num_beside| {
        TreeShape::new(&[width], num_read, num_beside, TreeChildren::Top).expect("a shape")
    };
    [shape(2, 1, 4), shape(3, 2, 8)].map(AskedShape::Given).to_vec()
}

const TUNED: &str = "tuned";

impl Serialize for AskedShape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Given(shape) => shape.serialize(serializer),
            Self::Tuned => serializer.serialize_str(TUNED),
        }
    }
}

impl<'de> Deserialize<'de> for AskedShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShapeVisitor)
    }
}

/// Reads `"tuned"` or a shape. As a visitor, so that errors show the entry's place in the file.
struct ShapeVisitor;

impl<'de> de::Visitor<'de> for ShapeVisitor {
    type Value = AskedShape;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(
            "a tree's shape, such as `\"3-2x4x12\"`, paths, such as `[[0], [1], [0, 0]]`, or `\"tuned\"`",
        )
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<AskedShape, E> {
        match text {
            TUNED => Ok(AskedShape::Tuned),
            _ => {
                text.parse().map(AskedShape::Given).map_err(|e| E::custom(format!("`{text}`: {e}")))
            }
        }
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, seq: A) -> Result<AskedShape, A::Error> {
        TreeShape::deserialize(SeqAccessDeserializer::new(seq)).map(AskedShape::Given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<TreesRecipe, toml::de::Error> {
        toml::from_str(&format!("shapes = {text}"))
    }

    #[test]
    fn shapes_are_texts_lists_of_paths_or_tuned() {
        let paths = "[[0], [1], [0, 0], [0, 1], [1, 0]]";
        let trees = read(&format!("['2x1x4', {paths}, 'tuned', '2-1-drawn']")).expect("shapes");
        let texts: Vec<String> = trees.given().map(|shape| shape.to_string()).collect();
        assert_eq!(texts, ["2x1x4", "2-2.1", "2-1-drawn"]);
        let [greedy, sampled] = [DecodingName::Greedy, DecodingName::Sampled];
        assert!(trees.is_tuned(greedy) && !trees.is_tuned(sampled));
        assert!(!read("['2-1']").expect("a shape").is_tuned(greedy));
        let again = toml::to_string(&trees).expect("texts");
        assert_eq!(again, "shapes = [\"2x1x4\", \"2-2.1\", \"tuned\", \"2-1-drawn\"]\n");
        assert_eq!(toml::from_str::<TreesRecipe>(&again).expect("reads").shapes, trees.shapes);
        for (text, expected) in [
            ("[[[0], [2]]]", "[2]"),
            ("[[[0], [1, 0]]]", "[1, 0] of a tree has no parent"),
            ("[[]]", "a list of 1 to 64 paths"),
            ("['2-1.1.1']", "`2-1.1.1`"),
            ("['best']", "`best`"),
            ("[3]", "paths, such as"),
        ] {
            let message = read(text).expect_err("refused").to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn only_greedy_trees_are_tuned() {
        let tuned = read("['tuned']").expect("a word");
        let [greedy, sampled] = [DecodingName::Greedy, DecodingName::Sampled];
        tuned.check(&[sampled, greedy]).expect("greedy is among them");
        let refused = tuned.check(&[sampled]).expect_err("only sampled").to_string();
        assert!(refused.contains("`evaluate.trees.shapes`"), "{refused}");
    }
}

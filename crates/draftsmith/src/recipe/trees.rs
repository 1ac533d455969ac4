//! The table `[evaluate.trees]`: trees of candidates beside the chains of every drafter that has a
//! model.

use std::fmt;

use anyhow::Result;
use draftsmith_theory::{TreeChildren, TreeShape};
use serde::de::value::SeqAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::checks::require;
use crate::names::DecodingName;

/// Which trees are measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TreesRecipe {
    /// Their shapes, each under every rule of its drafter: widths by depth, nodes that a draft forward
    /// reads, the most nodes beside the chain; lists of paths; or, of each drafter where tokens are
    /// decoded greedily, the static shape that `tune` finds, whose chain is as long as it is deep.
    #[serde(default = "default_shapes")]
    pub(crate) shapes: Vec<AskedShape>,
}

/// A shape that a recipe asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskedShape {
    /// This one.
    Given(TreeShape),
    /// The one that `tune` finds for each drafter.
    Tuned,
}

impl TreesRecipe {
    /// The shapes that the recipe gives.
    pub(crate) fn given(&self) -> impl Iterator<Item = TreeShape> {
        self.shapes.iter().filter_map(|asked| match asked {
            AskedShape::Given(shape) => Some(*shape),
            AskedShape::Tuned => None,
        })
    }

    /// Whether `tune` is to find one for drafters under a way of decoding: greedy ones are replayed.
    pub(super) fn is_tuned(&self, decoding: DecodingName) -> bool {
        decoding == DecodingName::Greedy && self.shapes.contains(&AskedShape::Tuned)
    }

    pub(super) fn check(&self, decodings: &[DecodingName]) -> Result<()> {
        const KEY: &str = "evaluate.trees.shapes";
        require(!self.shapes.is_empty(), KEY, "is empty: name a shape")?;
        require(
            decodings.contains(&DecodingName::Greedy) || !self.is_tuned(DecodingName::Greedy),
            KEY,
            "has \"tuned\", but `evaluate.decodings` has no \"greedy\", which alone is replayed in trees: \
             add it, or give a shape",
        )
    }
}

/// The chain's siblings alone, which cost no draft forward, and a tree that is read in part.
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
        deserializer.deserialize_any(Told)
    }
}

/// A word or a shape, whose own reader says what is wrong with it.
struct Told;

impl<'de> de::Visitor<'de> for Told {
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
    fn shapes_are_texts_or_lists_of_paths_or_to_be_found() {
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
        for (text, told) in [
            ("[[[0], [2]]]", "[2]"),
            ("[[[0], [1, 0]]]", "is not there"),
            ("[[]]", "of none"),
            ("['2-1.1.1']", "`2-1.1.1`"),
            ("['best']", "`best`"),
            ("[3]", "paths, such as"),
        ] {
            let message = read(text).expect_err("refused").to_string();
            assert!(message.contains(told), "{message}");
        }
    }

    #[test]
    fn a_tree_is_tuned_for_greedy_decoding_alone() {
        let tuned = read("['tuned']").expect("a word");
        let [greedy, sampled] = [DecodingName::Greedy, DecodingName::Sampled];
        tuned.check(&[sampled, greedy]).expect("greedy is among them");
        let refused = tuned.check(&[sampled]).expect_err("sampled alone").to_string();
        assert!(refused.contains("`evaluate.trees.shapes`"), "{refused}");
    }
}

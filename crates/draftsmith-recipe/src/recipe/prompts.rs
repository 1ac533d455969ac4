//! Sources of prompts: file names or patterns, their weights, and splits.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Result, bail};
use draftsmith_data::SplitRange;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::keys::require;

/// The tolerance for the sum of shares, because decimal fractions are inexact in f64.
const SHARE_TOLERANCE: f64 = 1e-9;

/// A source of prompts. In a recipe, it is a path, or a table with a path and a weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct PromptSource {
    /// The path of a file, or a pattern such as `parts/*.parquet`.
    pub path: PathBuf,
    /// The source's weight. Its share of the prompts is the weight over the sum of all weights. The
    /// default is 1 if another source has a weight.
    pub weight: Option<f64>,
}

impl Serialize for PromptSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.weight {
            None => self.path.serialize(serializer),
            Some(_) => Self::serialize(self, serializer),
        }
    }
}

impl<'de> Deserialize<'de> for PromptSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathOrTable;

        impl<'de> Visitor<'de> for PathOrTable {
            type Value = PromptSource;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a table with `path` and `weight`")
            }

            fn visit_str<E>(self, path: &str) -> Result<PromptSource, E> {
                Ok(PromptSource { path: path.into(), weight: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PromptSource, A::Error> {
                PromptSource::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_any(PathOrTable)
    }
}

/// Checks the weights of a section's sources.
pub(super) fn check_sources(sources: &[PromptSource], num_prompts: Option<usize>) -> Result<()> {
    let weights = sources.iter().filter_map(|source| source.weight);
    for weight in weights.clone() {
        require(
            weight.is_finite() && weight > 0.0,
            "data.prompts",
            &format!(
                "has the weight {weight}: expected a number above 0; leave out unused sources"
            ),
        )?;
    }
    require(
        num_prompts.is_some() || weights.count() == 0,
        "data.num_prompts",
        "is missing: weights are shares of it",
    )
}

/// A split of the prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The prompts for training heads and adapters.
    Train,
    /// The prompts for choosing stop rules.
    Tune,
    /// The prompts for evaluation.
    Test,
}

/// The share of all prompts in each split. If the shares sum to less than 1, the rest is unused.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Splits {
    /// The share for training.
    pub train: f64,
    /// The share for tuning.
    pub tune: f64,
    /// The share for testing.
    pub test: f64,
}

impl Default for Splits {
    fn default() -> Self {
        Self { train: 0.8, tune: 0.1, test: 0.1 }
    }
}

impl Splits {
    /// Returns the range of a split. Ranges are consecutive, so splits never share a prompt.
    pub fn range(&self, split: Split) -> SplitRange {
        let Self { train, tune, test } = *self;
        let (name, from, to) = match split {
            Split::Train => ("train", 0.0, train),
            Split::Tune => ("tune", train, train + tune),
            Split::Test => ("test", train + tune, train + tune + test),
        };
        // Rounding must not exclude a prompt if the shares sum to 1.
        let to = if (to - 1.0).abs() <= SHARE_TOLERANCE { 1.0 } else { to };
        SplitRange { name: name.to_owned(), from, to }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { train, tune, test } = *self;
        for (key, share) in [("train", train), ("tune", tune), ("test", test)] {
            require(
                (0.0..=1.0).contains(&share),
                &format!("splits.{key}"),
                &format!("is {share}, outside 0 to 1"),
            )?;
        }
        let sum = train + tune + test;
        if sum > 1.0 + SHARE_TOLERANCE {
            bail!("the shares of `[splits]` sum to {sum}, more than 1: splits would overlap");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct Section {
        prompts: Vec<PromptSource>,
        seed: u64,
    }

    #[test]
    fn sources_are_paths_or_tables_and_keep_their_form() {
        for text in [
            "prompts = [\"a.jsonl\", { path = \"b/*.parquet\", weight = 2.0 }]\nseed = 1\n",
            "prompts = [\"a.jsonl\"]\nseed = 1\n",
            "seed = 1\n\n[[prompts]]\npath = \"a\"\nweight = 2.0\n",
        ] {
            let section: Section = toml::from_str(text).expect("it reads");
            assert_eq!(toml::to_string(&section).expect("TOML"), text);
        }
        let refused = |source: &str| {
            let text = format!("prompts = [{source}]\nseed = 1");
            toml::from_str::<Section>(&text).expect_err("refused").to_string()
        };
        assert!(refused("{ path = 'a', wieght = 1 }").contains("unknown field `wieght`"));
        assert!(refused("{ weight = 1 }").contains("missing field `path`"));
        assert!(refused("5").contains("a path, or a table with `path` and `weight`"));
    }

    #[test]
    fn splits_lie_side_by_side() {
        let ranges = |splits: Splits| {
            [Split::Train, Split::Tune, Split::Test].map(|split| {
                let SplitRange { from, to, .. } = splits.range(split);
                (from, to)
            })
        };
        for splits in [Splits::default(), Splits { train: 0.7, tune: 0.2, test: 0.1 }] {
            splits.check().expect("they fit");
            let [train, tune, test] = ranges(splits);
            assert_eq!((train.0, train.1, tune.1, test.1), (0.0, tune.0, test.0, 1.0));
        }
        assert_eq!(ranges(Splits { train: 0.5, tune: 0.0, test: 0.25 })[2], (0.5, 0.75));
        let problem = |splits: Splits| splits.check().expect_err("refused").to_string();
        assert!(problem(Splits { train: 0.9, ..Splits::default() }).contains("sum to 1.1"));
        assert!(
            problem(Splits { tune: -0.1, ..Splits::default() }).contains("`splits.tune` is -0.1")
        );
        assert!(problem(Splits { test: f64::NAN, ..Splits::default() }).contains("`splits.test`"));
    }
}

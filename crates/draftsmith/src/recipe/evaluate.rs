//! The section `[evaluate]`: what is measured, on which prompts.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_theory::{Bounds, Decoding, LookupFirst, Sampling};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::cascades::CascadeRecipe;
use super::checks::require;
use super::data::{default_max_new_tokens, one};
use super::max_gram::MaxGramRecipe;
use super::merged::MergedRecipe;
use super::prompts::Split;
use super::stop_rules::{StopRuleKeys, WithStopRules};
use super::trees::TreesRecipe;
use crate::names::DecodingName;

/// The most prompts side by side: each has a cache of its own.
const MAX_BATCH_SIZE: usize = 1024;

/// What is measured.
///
/// `remote` makes serde's code for the fields below functions of their own, which the impls further
/// down call: the keys of stop rules stand in the same table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub(crate) struct EvaluateRecipe {
    /// Prompt files, one dataset each, in any of the forms that `data.prompts` may have.
    pub(crate) prompts: Vec<PathBuf>,
    /// At most so many prompts of each file, spread evenly over it; all if absent.
    #[serde(default)]
    pub(crate) num_prompts: Option<usize>,
    /// The split of the prompt files that is taken; all if absent.
    #[serde(default)]
    pub(crate) split: Option<Split>,
    /// The most new tokens a turn.
    #[serde(default = "default_max_new_tokens")]
    pub(crate) max_new_tokens: usize,
    /// Leave out prompts that do not fit the models' context; an error if false.
    #[serde(default)]
    pub(crate) skip_long_prompts: bool,
    /// How many prompts are answered side by side. Speeds are then those of all of them together, and
    /// a promise, which is of one sequence at a time, is not judged.
    #[serde(default = "default_batch_size")]
    pub(crate) batch_size: usize,
    /// Which decodings are measured.
    #[serde(default = "default_decodings")]
    pub(crate) decodings: Vec<DecodingName>,
    /// Temperature of the sampled decoding.
    #[serde(default = "one")]
    pub(crate) temperature: f64,
    /// Nucleus mass of the sampled decoding.
    #[serde(default = "one")]
    pub(crate) top_p: f64,
    /// Most probable tokens that the sampled decoding keeps; all if absent.
    #[serde(default)]
    pub(crate) top_k: Option<usize>,
    /// The least probability that the sampled decoding keeps, as a share of the largest; all if
    /// absent.
    #[serde(default)]
    pub(crate) min_p: Option<f64>,
    /// The repetition penalty of both decodings, for target and drafters alike; 1 changes nothing.
    #[serde(default = "one")]
    pub(crate) repetition_penalty: f64,
    /// The most candidates a round of the separate draft under any rule but a fixed length.
    #[serde(default = "default_max_candidate_length")]
    pub(crate) max_candidate_length: usize,
    /// The head's directory; the one that this recipe trains if absent.
    #[serde(default)]
    pub(crate) head: Option<PathBuf>,
    /// Directories of self-draft adapters; those that this recipe trains if absent.
    #[serde(default)]
    pub(crate) adapters: Option<Vec<PathBuf>>,
    /// The most candidates a round of a self-draft under any rule but a fixed length.
    #[serde(default = "default_max_self_draft_length")]
    pub(crate) max_self_draft_length: usize,
    /// Trees of candidates, measured where the table is there.
    #[serde(default)]
    pub(crate) trees: Option<TreesRecipe>,
    /// Prompt lookup before each drafter that has a model.
    #[serde(default)]
    pub(crate) lookup_first: Vec<LookupFirst>,
    /// Prompt lookup alone, measured where the table is there.
    #[serde(default)]
    pub(crate) max_gram: Option<MaxGramRecipe>,
    /// Cascades of drafters.
    #[serde(default)]
    pub(crate) cascades: Vec<CascadeRecipe>,
    /// Drafters whose chains are one tree.
    #[serde(default)]
    pub(crate) merged: Vec<MergedRecipe>,
    /// The settings of stop rules.
    #[serde(skip)]
    pub(crate) stop_rules: StopRuleKeys,
}

impl Serialize for EvaluateRecipe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a> {
            #[serde(flatten, with = "EvaluateRecipe")]
            keys: &'a EvaluateRecipe,
            #[serde(flatten)]
            stop_rules: &'a StopRuleKeys,
        }
        Whole { keys: self, stop_rules: &self.stop_rules }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for EvaluateRecipe {
    fn deserialize<D: Deserializer<'de>>(inner: D) -> Result<Self, D::Error> {
        let mut stop_rules = StopRuleKeys::default();
        let keys = Self::deserialize(WithStopRules { inner, rules: &mut stop_rules })?;
        Ok(Self { stop_rules, ..keys })
    }
}

impl EvaluateRecipe {
    /// The decoding that a name stands for here.
    pub(crate) fn decoding(&self, name: DecodingName) -> Decoding {
        let decoding = match name {
            DecodingName::Greedy => Decoding::GREEDY,
            DecodingName::Sampled => Decoding::sampled(Sampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
            }),
        };
        decoding.penalising(self.repetition_penalty)
    }

    /// Whether `tune` is to find a static tree of each drafter under a way of decoding.
    pub(crate) fn tunes_trees(&self, decoding: DecodingName) -> bool {
        self.trees.as_ref().is_some_and(|trees| trees.is_tuned(decoding))
    }

    pub(super) fn check(&self) -> Result<()> {
        require(!self.prompts.is_empty(), "evaluate.prompts", "is empty: name a prompt file")?;
        require(self.num_prompts != Some(0), "evaluate.num_prompts", "is 0: leave it out for all")?;
        require(self.max_new_tokens > 0, "evaluate.max_new_tokens", "is 0, expected 1 or more")?;
        require(
            (1..=MAX_BATCH_SIZE).contains(&self.batch_size),
            "evaluate.batch_size",
            "is 0 or more than 1024: 1 is one prompt at a time",
        )?;
        require(!self.decodings.is_empty(), "evaluate.decodings", "is empty: name one")?;
        self.stop_rules.check()?;
        self.trees.iter().try_for_each(|trees| trees.check(&self.decodings))?;
        self.max_gram.iter().try_for_each(MaxGramRecipe::check)?;
        self.cascades.iter().try_for_each(|cascade| cascade.check("evaluate.cascades"))?;
        self.merged.iter().try_for_each(MergedRecipe::check)?;
        Bounds::new(1, self.max_self_draft_length)
            .context("key `evaluate.max_self_draft_length`")?;
        for name in &self.decodings {
            self.decoding(*name).validate().context("section `evaluate`")?;
        }
        Bounds::new(1, self.max_candidate_length).context("key `evaluate.max_candidate_length`")?;
        Ok(())
    }
}

fn default_decodings() -> Vec<DecodingName> {
    vec![DecodingName::Greedy, DecodingName::Sampled]
}

/// One user at a time.
fn default_batch_size() -> usize {
    1
}

fn default_max_candidate_length() -> usize {
    20
}

/// Kangaroo's γ.
fn default_max_self_draft_length() -> usize {
    6
}

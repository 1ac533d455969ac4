//! The section `[evaluate]`: what is measured, and on which prompts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_theory::{Decoding, DecodingName, DrafterId, LookupFirst, Sampling};
use serde::{Deserialize, Serialize};

use super::keys::require;
use super::prompts::Split;
use super::rules::RulesRecipe;
use super::trees::TreesRecipe;
use crate::kinds::DrafterRecipes;

/// The maximum batch size. Each sequence in a batch has its own KV cache.
const MAX_BATCH_SIZE: usize = 1024;
/// The greatest number of runs with other seeds.
const MAX_REPEATS: usize = 1000;

/// The settings for measurements.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateRecipe {
    /// The prompt files, one dataset each, in any format of `data.prompts`.
    pub prompts: Vec<PathBuf>,
    /// The maximum number of prompts from each file, spread evenly over it; all if absent.
    pub num_prompts: Option<usize>,
    /// The split of the prompt files to use; all prompts if absent.
    pub split: Option<Split>,
    /// The number of times that everything is measured, each time with another seed.
    pub repeats: usize,
    /// The maximum number of new tokens per turn.
    pub max_new_tokens: usize,
    /// Whether to skip prompts that exceed the models' context; if false, they are an error.
    pub skip_long_prompts: bool,
    /// The number of prompts decoded at the same time. Above 1, speeds are those of the whole
    /// batch, and not checked against tuning's expectations, which are for single sequences.
    pub batch_size: usize,
    /// The ways of decoding to measure: greedy, sampled or both.
    pub decodings: Vec<DecodingName>,
    /// The temperature of sampled decoding.
    pub temperature: f64,
    /// The top-p value of sampled decoding; 1 keeps all tokens.
    pub top_p: f64,
    /// The top-k value of sampled decoding; all tokens if absent.
    pub top_k: Option<usize>,
    /// The min-p value of sampled decoding: the smallest probability kept, as a share of the
    /// largest. No limit if absent.
    pub min_p: Option<f64>,
    /// The repetition penalty of all decoding, for target and drafters; 1 has no effect.
    pub repetition_penalty: f64,
    /// The drafters to record, tune and measure; all drafters if absent.
    pub drafters: Option<Vec<DrafterId>>,
    /// Settings of prompt lookup, each tried before every drafter that has a model.
    pub lookup_first: Vec<LookupFirst>,
    /// The settings of stop rules.
    pub rules: RulesRecipe,
    /// Trees of candidates to measure; none if the table is absent.
    pub trees: Option<TreesRecipe>,
    /// Named sets of the cost of each drafter's forward relative to a target forward, for
    /// CS-Drafting's standardised improvement.
    pub cost_ratios: BTreeMap<String, BTreeMap<DrafterId, f64>>,
}

impl Default for EvaluateRecipe {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            num_prompts: None,
            split: None,
            repeats: 1,
            max_new_tokens: 128,
            skip_long_prompts: false,
            batch_size: 1,
            decodings: vec![DecodingName::Greedy, DecodingName::Sampled],
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: None,
            repetition_penalty: 1.0,
            drafters: None,
            lookup_first: Vec::new(),
            rules: RulesRecipe::default(),
            trees: None,
            cost_ratios: BTreeMap::new(),
        }
    }
}

impl EvaluateRecipe {
    /// Returns the sampling settings for greedy or sampled decoding.
    pub fn decoding(&self, name: DecodingName) -> Decoding {
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

    pub(super) fn check(&self, drafters: &DrafterRecipes) -> Result<()> {
        require(!self.prompts.is_empty(), "evaluate.prompts", "is empty: name a prompt file")?;
        require(self.num_prompts != Some(0), "evaluate.num_prompts", "is 0: leave it out for all")?;
        let is_few = (1..=MAX_REPEATS).contains(&self.repeats);
        require(is_few, "evaluate.repeats", "is outside 1 to 1000")?;
        require(self.max_new_tokens > 0, "evaluate.max_new_tokens", "is 0, expected 1 or more")?;
        require(
            (1..=MAX_BATCH_SIZE).contains(&self.batch_size),
            "evaluate.batch_size",
            "is outside 1 to 1024; 1 answers one prompt at a time",
        )?;
        require(!self.decodings.is_empty(), "evaluate.decodings", "is empty: name one")?;
        let is_twice = |at: usize| self.decodings[..at].contains(&self.decodings[at]);
        let is_distinct = !(1..self.decodings.len()).any(is_twice);
        require(is_distinct, "evaluate.decodings", "names a way of decoding twice")?;
        self.rules.check("evaluate.rules")?;
        self.trees.iter().try_for_each(|trees| trees.check())?;
        let priced = self.cost_ratios.values().flat_map(BTreeMap::keys);
        let priced = priced.map(|id| (id, "evaluate.cost_ratios"));
        let named = self.drafters.iter().flatten().map(|id| (id, "evaluate.drafters"));
        let trees = self.trees.iter().flat_map(|trees| &trees.drafters);
        let trees = trees.map(|id| (id, "evaluate.trees.drafters"));
        for (id, key) in named.chain(priced).chain(trees) {
            require(
                drafters.get(*id).is_some(),
                key,
                &format!("names the drafter `{id}`; hint: add a table `[drafters.{id}]`"),
            )?;
        }
        let mut ratios = self.cost_ratios.values().flat_map(BTreeMap::values);
        require(
            ratios.all(|ratio| *ratio >= 0.0 && ratio.is_finite()),
            "evaluate.cost_ratios",
            "has a ratio below 0, expected the share of a target forward, such as 0.04",
        )?;
        for name in &self.decodings {
            self.decoding(*name).validate().context("section `evaluate`")?;
        }
        Ok(())
    }
}

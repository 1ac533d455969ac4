//! The section `[evaluate]`: what is measured, on which prompts.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_theory::{Decoding, DrafterId, LookupFirst, Sampling};
use serde::{Deserialize, Serialize};

use super::keys::require;
use super::prompts::Split;
use super::rules::RulesRecipe;
use super::trees::TreesRecipe;
use crate::kinds::DrafterRecipes;
use draftsmith_theory::DecodingName;

/// The largest batch. Each sequence in it has its own cache.
const MAX_BATCH_SIZE: usize = 1024;

/// What is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateRecipe {
    /// Prompt files, one dataset each, in any form that `data.prompts` may have.
    pub prompts: Vec<PathBuf>,
    /// The most prompts of each file, spread evenly over it; all if absent.
    pub num_prompts: Option<usize>,
    /// The split of the prompt files to use; all prompts if absent.
    pub split: Option<Split>,
    /// How often everything is measured; each time with another seed.
    pub repeats: usize,
    /// The most new tokens per turn.
    pub max_new_tokens: usize,
    /// Skip prompts that do not fit into the models' context; if false, they are an error.
    pub skip_long_prompts: bool,
    /// The number of prompts answered at the same time. Speeds are then those of the whole batch, and
    /// tuning's promises, which are for one sequence at a time, are not judged.
    pub batch_size: usize,
    /// Ways of decoding to measure.
    pub decodings: Vec<DecodingName>,
    /// Temperature of sampled decoding.
    pub temperature: f64,
    /// Top-p of sampled decoding; 1 keeps all tokens.
    pub top_p: f64,
    /// Top-k of sampled decoding; all tokens if absent.
    pub top_k: Option<usize>,
    /// Min-p of sampled decoding: the least probability kept, as a share of the largest; all if absent.
    pub min_p: Option<f64>,
    /// Repetition penalty of greedy and sampled decoding, for target and drafters; 1 has no effect.
    pub repetition_penalty: f64,
    /// The drafters to record, tune and measure; all if absent.
    pub drafters: Option<Vec<DrafterId>>,
    /// Prompt lookup before each drafter that has a model.
    pub lookup_first: Vec<LookupFirst>,
    /// Settings of stop rules.
    pub rules: RulesRecipe,
    /// Trees of candidates, measured if the table is present.
    pub trees: Option<TreesRecipe>,
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
        }
    }
}

impl EvaluateRecipe {
    /// Returns the settings for a way of decoding.
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
        require(self.repeats > 0, "evaluate.repeats", "is 0, expected 1 or more")?;
        require(self.max_new_tokens > 0, "evaluate.max_new_tokens", "is 0, expected 1 or more")?;
        require(
            (1..=MAX_BATCH_SIZE).contains(&self.batch_size),
            "evaluate.batch_size",
            "is outside 1 to 1024; 1 answers one prompt at a time",
        )?;
        require(!self.decodings.is_empty(), "evaluate.decodings", "is empty: name one")?;
        self.rules.check("evaluate.rules")?;
        self.trees.iter().try_for_each(|trees| trees.check())?;
        for id in self.drafters.iter().flatten() {
            require(
                drafters.get(*id).is_some(),
                "evaluate.drafters",
                &format!("names the drafter `{id}`; hint: add a table `[drafters.{id}]`"),
            )?;
        }
        for name in &self.decodings {
            self.decoding(*name).validate().context("section `evaluate`")?;
        }
        Ok(())
    }
}

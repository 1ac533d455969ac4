//! The section `[evaluate]`: what is measured, on which prompts.
//!
//! The keys that list settings of stop rules repeat the theory crate's table of rules;
//! `recipe/stop_rules.rs` turns them into rules, and its tests compare them with the table.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_report::DecodingName;
use draftsmith_theory::{
    Bounds, Decoding, EntropyThresholdConfig, LookupFirst, MaxGramConfig, Sampling, SearchedText,
};
use serde::{Deserialize, Serialize};

use super::cascades::CascadeRecipe;
use super::merged::MergedRecipe;
use super::prompts::Split;
use super::require;
use super::trees::TreesRecipe;

/// The largest batch. Each sequence in it has its own cache.
const MAX_BATCH_SIZE: usize = 1024;

/// What is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EvaluateRecipe {
    /// Prompt files, one dataset each, in any form that `data.prompts` may have.
    pub(crate) prompts: Vec<PathBuf>,
    /// The most prompts of each file, spread evenly over it; all if absent.
    pub(crate) num_prompts: Option<usize>,
    /// The split of the prompt files to use; all prompts if absent.
    pub(crate) split: Option<Split>,
    /// The most new tokens per turn.
    pub(crate) max_new_tokens: usize,
    /// Skip prompts that do not fit into the models' context; if false, they are an error.
    pub(crate) skip_long_prompts: bool,
    /// The number of prompts answered at the same time. Speeds are then those of the whole batch, and
    /// tuning's promises, which are for one sequence at a time, are not judged.
    pub(crate) batch_size: usize,
    /// Ways of decoding to measure.
    pub(crate) decodings: Vec<DecodingName>,
    /// Temperature of sampled decoding.
    pub(crate) temperature: f64,
    /// Top-p of sampled decoding; 1 keeps all tokens.
    pub(crate) top_p: f64,
    /// Top-k of sampled decoding; all tokens if absent.
    pub(crate) top_k: Option<usize>,
    /// Min-p of sampled decoding: the least probability kept, as a share of the largest; all if absent.
    pub(crate) min_p: Option<f64>,
    /// Repetition penalty of greedy and sampled decoding, for target and drafters; 1 has no effect.
    pub(crate) repetition_penalty: f64,
    /// The most candidates per round of a separate draft, under every rule except a fixed length.
    pub(crate) max_candidate_length: usize,
    /// The head's directory; the one that this recipe trains if absent.
    pub(crate) head: Option<PathBuf>,
    /// Directories of self-draft adapters; those that this recipe trains if absent.
    pub(crate) adapters: Option<Vec<PathBuf>>,
    /// The most candidates per round of a self-draft, under every rule except a fixed length.
    pub(crate) max_self_draft_length: usize,
    /// Prompt lookup before each drafter that has a model.
    pub(crate) lookup_first: Vec<LookupFirst>,
    /// Fixed candidate lengths K of the separate draft.
    pub(crate) candidate_lengths: Vec<usize>,
    /// Fixed candidate lengths of self-drafts.
    pub(crate) self_draft_lengths: Vec<usize>,
    /// First lengths of transformers' heuristic.
    pub(crate) initial_lengths: Vec<usize>,
    /// Thresholds h of acceptance heads.
    pub(crate) stop_thresholds: Vec<f64>,
    /// Thresholds h without the paper's lag of one candidate.
    pub(crate) stop_thresholds_without_lag: Vec<f64>,
    /// Confidence thresholds of the separate draft.
    pub(crate) draft_confidence_thresholds: Vec<f64>,
    /// Confidence thresholds of self-drafts: Kangaroo's η.
    pub(crate) confidence_thresholds: Vec<f64>,
    /// Thresholds of the probability of the drawn candidate, as in transformers.
    pub(crate) candidate_prob_thresholds: Vec<f64>,
    /// Thresholds of the product of a round's confidences.
    pub(crate) joint_confidence_thresholds: Vec<f64>,
    /// Entropy thresholds: SVIP's h.
    pub(crate) entropy_thresholds: Vec<f64>,
    /// SVIP's c.
    pub(crate) entropy_scale: f64,
    /// SVIP checks the entropy once in this number of candidates.
    pub(crate) entropy_check_interval: usize,
    /// Trees of candidates, measured if the table is present.
    pub(crate) trees: Option<TreesRecipe>,
    /// Prompt lookup as the only drafter, measured if the table is present.
    pub(crate) max_gram: Option<MaxGramRecipe>,
    /// Cascades of drafters.
    pub(crate) cascades: Vec<CascadeRecipe>,
    /// Drafters whose chains are merged into one tree.
    pub(crate) merged: Vec<MergedRecipe>,
}

impl Default for EvaluateRecipe {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            num_prompts: None,
            split: None,
            max_new_tokens: 128,
            skip_long_prompts: false,
            batch_size: 1,
            decodings: vec![DecodingName::Greedy, DecodingName::Sampled],
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: None,
            repetition_penalty: 1.0,
            max_candidate_length: 20,
            head: None,
            adapters: None,
            // Kangaroo's γ.
            max_self_draft_length: 6,
            lookup_first: Vec::new(),
            candidate_lengths: (1..=10).collect(),
            self_draft_lengths: (1..=6).collect(),
            initial_lengths: Vec::new(),
            stop_thresholds: vec![0.1, 0.3, 0.5, 0.7, 0.9],
            stop_thresholds_without_lag: Vec::new(),
            draft_confidence_thresholds: Vec::new(),
            confidence_thresholds: vec![0.2, 0.4, 0.6, 0.8],
            candidate_prob_thresholds: Vec::new(),
            joint_confidence_thresholds: Vec::new(),
            entropy_thresholds: Vec::new(),
            entropy_scale: EntropyThresholdConfig::ENTROPY_SCALE,
            entropy_check_interval: 1,
            trees: None,
            max_gram: None,
            cascades: Vec::new(),
            merged: Vec::new(),
        }
    }
}

impl EvaluateRecipe {
    /// Settings of a way of decoding.
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

    /// Whether `tune` searches for a static tree of each drafter under a way of decoding.
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
            "is outside 1 to 1024; 1 answers one prompt at a time",
        )?;
        require(!self.decodings.is_empty(), "evaluate.decodings", "is empty: name one")?;
        self.check_stop_rules()?;
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

/// The table `[evaluate.max_gram]`: prompt lookup as a drafter without a model.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MaxGramRecipe {
    /// The most candidates per round; each length is measured.
    pub(crate) lengths: Vec<usize>,
    /// Text that is searched for the sequence's suffix.
    pub(crate) searched: SearchedText,
    /// The fewest tokens in a match.
    pub(crate) min_match: usize,
    /// A table of bigrams that continues rounds where lookup finds nothing more; none if absent.
    pub(crate) bigrams: Option<PathBuf>,
}

impl Default for MaxGramRecipe {
    fn default() -> Self {
        let MaxGramConfig { searched, min_match } = MaxGramConfig::default();
        // The paper's 10, and shorter ones for machines where verifying more rows takes longer.
        Self { lengths: vec![2, 4, 6, 10], searched, min_match, bigrams: None }
    }
}

impl MaxGramRecipe {
    /// The decoder's settings.
    pub(crate) fn config(&self) -> MaxGramConfig {
        MaxGramConfig { searched: self.searched, min_match: self.min_match }
    }

    pub(super) fn check(&self) -> Result<()> {
        require(
            !self.lengths.is_empty() && !self.lengths.contains(&0),
            "evaluate.max_gram.lengths",
            "is empty or has a 0: give numbers of candidates",
        )?;
        require(
            self.min_match > 0,
            "evaluate.max_gram.min_match",
            "is 0: a match has at least one token",
        )
    }
}

//! The section `[data]`: where responses come from, and how they are labelled.

use std::path::PathBuf;

use draftsmith_theory::{Decoding, Sampling, TokenChoice};
use serde::{Deserialize, Serialize};

/// How responses are made and labelled.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataRecipe {
    /// Prompt files: Spec-Bench, GSM8K, HumanEval, Alpaca, ShareGPT, `messages` or `{"prompt"}`.
    pub(crate) prompts: Vec<PathBuf>,
    /// At most so many prompts of each file; all if absent.
    #[serde(default)]
    pub(crate) num_prompts: Option<usize>,
    /// Where responses come from.
    #[serde(default)]
    pub(crate) responses: Responses,
    /// Sampling temperature of target and draft; 0 is greedy.
    #[serde(default = "one")]
    pub(crate) temperature: f64,
    /// Nucleus mass of target and draft; 1 keeps all.
    #[serde(default = "one")]
    pub(crate) top_p: f64,
    /// Most probable tokens kept by target and draft; all if absent.
    #[serde(default)]
    pub(crate) top_k: Option<usize>,
    /// The least probability that target and draft keep, as a share of the largest; all if
    /// absent.
    #[serde(default)]
    pub(crate) min_p: Option<f64>,
    /// Divides the logits that target and draft give to tokens of the text so far where they are
    /// positive, and multiplies them where they are negative; 1 changes nothing.
    #[serde(default = "one")]
    pub(crate) repetition_penalty: f64,
    /// The longest response, in tokens.
    #[serde(default = "default_max_new_tokens")]
    pub(crate) max_new_tokens: usize,
    /// Leave out prompts that do not fit the models' context; an error if false.
    #[serde(default)]
    pub(crate) skip_long_prompts: bool,
}

/// Where responses come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Responses {
    /// The target writes them.
    #[default]
    Generate,
    /// They stand in the prompt files.
    Existing,
}

pub(super) fn one() -> f64 {
    1.0
}

pub(super) fn default_max_new_tokens() -> usize {
    128
}

impl DataRecipe {
    /// How target and draft are sampled; temperature 0 is greedy.
    pub(crate) fn decoding(&self) -> Decoding {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty)
    }
}

/// Sampling settings with the meaning that temperature 0 has everywhere: greedy.
pub(crate) fn decoding(sampling: Sampling) -> Decoding {
    if sampling.temperature == 0.0 { Decoding::GREEDY } else { Decoding::sampled(sampling) }
}

/// The settings of a way of decoding, greedy as temperature 0.
pub(crate) fn sampling(decoding: &Decoding) -> Sampling {
    match decoding.choice {
        TokenChoice::Greedy => Sampling { temperature: 0.0, ..Sampling::default() },
        TokenChoice::Sampled(sampling) => sampling,
    }
}

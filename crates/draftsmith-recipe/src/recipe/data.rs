//! The section `[data]`: where responses come from and how they are labelled.

use anyhow::{Context, Result, bail};
use draftsmith_data::LengthBounds;
use draftsmith_served::{ServerLabels, ServerRecipe};
use draftsmith_theory::{Decoding, Sampling};
use serde::{Deserialize, Serialize};

use super::keys::{decoding, one, require};
use super::prompts::{PromptSource, Split, check_sources};

/// How responses are made and labelled.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Prompt files: Spec-Bench, GSM8K, HumanEval, Alpaca, ShareGPT, `messages` or `{"prompt"}`.
    pub prompts: Vec<PromptSource>,
    /// The most prompts of each file, or with weights of all sources together; all if absent.
    pub num_prompts: Option<usize>,
    /// The split of the prompts to use; all if absent.
    pub split: Option<Split>,
    /// The shortest prompt, in tokens.
    pub min_prompt_tokens: Option<usize>,
    /// The longest prompt, in tokens.
    pub max_prompt_tokens: Option<usize>,
    /// The shortest response of a prompt file, in tokens.
    pub min_response_tokens: Option<usize>,
    /// The longest response of a prompt file, in tokens.
    pub max_response_tokens: Option<usize>,
    /// Keep repeated prompts; if false, each prompt is used once.
    #[serde(default)]
    pub keep_duplicates: bool,
    /// Stop at a malformed record; if false, it is skipped and counted.
    #[serde(default)]
    pub strict: bool,
    /// Where responses come from.
    #[serde(default)]
    pub responses: Responses,
    /// Servers that write the responses, with `responses = "server"`.
    pub server: Option<ServerRecipe>,
    /// Sampling temperature of target and draft; 0 is greedy.
    #[serde(default = "one")]
    pub temperature: f64,
    /// Top-p of target and draft; 1 keeps all tokens.
    #[serde(default = "one")]
    pub top_p: f64,
    /// Top-k of target and draft; all tokens if absent.
    pub top_k: Option<usize>,
    /// Min-p of target and draft: the least probability kept, as a share of the largest; all if absent.
    pub min_p: Option<f64>,
    /// Repetition penalty of target and draft: divides positive logits of tokens in the text so far and
    /// multiplies negative ones; 1 has no effect.
    #[serde(default = "one")]
    pub repetition_penalty: f64,
    /// The longest response, in tokens.
    #[serde(default = "default_max_new_tokens")]
    pub max_new_tokens: usize,
    /// Skip prompts that do not fit into the models' context; if false, they are an error.
    #[serde(default)]
    pub skip_long_prompts: bool,
}

/// Where responses come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Responses {
    /// The target writes them.
    #[default]
    Generate,
    /// The prompt files contain them.
    Existing,
    /// Servers of the target write them.
    Server,
}

fn default_max_new_tokens() -> usize {
    128
}

impl DataRecipe {
    /// Returns the servers that write the responses; `None` if none do.
    pub fn served_by(&self) -> Option<&ServerRecipe> {
        self.server.as_ref().filter(|_| self.responses == Responses::Server)
    }

    /// Returns the servers that write and label the responses, so that the target's weights are not read;
    /// `None` if the weights are read.
    pub fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.served_by().filter(|server| server.labels == ServerLabels::Server)
    }

    /// Checks the table of servers, and that it is present exactly if servers write the responses.
    fn check_server(&self) -> Result<()> {
        match (&self.server, self.responses) {
            (Some(server), Responses::Server) => {
                server.check()?;
                let decoding = self.decoding();
                let is_known = decoding.is_greedy() || !decoding.is_penalised();
                require(
                    server.labels == ServerLabels::Weights || is_known,
                    "data.repetition_penalty",
                    "is not 1, but the servers' log-probabilities do not include a penalty; hint: leave \
                     it out, or set `data.temperature` to 0",
                )
            }
            (None, Responses::Server) => bail!(
                "key `data.responses` is `server`, but there is no table `[data.server]`; hint: add \
                 it with `urls` and `model`"
            ),
            (Some(_), _) => {
                bail!("there is a table `[data.server]`, but `data.responses` is not `server`")
            }
            (None, _) => Ok(()),
        }
    }

    /// Returns the decoding of target and draft; temperature 0 is greedy.
    pub fn decoding(&self) -> Decoding {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty)
    }

    /// Returns the allowed lengths of prompts and responses, in tokens.
    pub fn lengths(&self) -> LengthBounds {
        LengthBounds {
            min_prompt_tokens: self.min_prompt_tokens,
            max_prompt_tokens: self.max_prompt_tokens,
            min_response_tokens: self.min_response_tokens,
            max_response_tokens: self.max_response_tokens,
        }
    }

    /// Checks every key.
    ///
    /// # Errors
    /// If a value is invalid.
    pub(super) fn check(&self) -> Result<()> {
        self.decoding().validate().context("section `data`")?;
        require(!self.prompts.is_empty(), "data.prompts", "is empty; hint: name a prompt file")?;
        require(self.num_prompts != Some(0), "data.num_prompts", "is 0: leave it out for all")?;
        require(self.max_new_tokens > 0, "data.max_new_tokens", "is 0, expected 1 or more")?;
        check_sources(&self.prompts, self.num_prompts)?;
        let bounds = [
            ("prompt", self.min_prompt_tokens, self.max_prompt_tokens),
            ("response", self.min_response_tokens, self.max_response_tokens),
        ];
        for (what, min, max) in bounds {
            require(
                max.is_none_or(|max| max > 0 && min.is_none_or(|min| min <= max)),
                &format!("data.max_{what}_tokens"),
                "allows no length: expected at least 1 and at least the minimum",
            )?;
        }
        let of_responses = self.min_response_tokens.or(self.max_response_tokens);
        require(
            of_responses.is_none() || self.responses == Responses::Existing,
            "data.min_response_tokens` or `data.max_response_tokens",
            "is set, but the files' responses are not used: `data.max_new_tokens` limits responses that \
             the target writes; hint: set `data.responses = \"existing\"`",
        )?;
        self.check_server()
    }
}

//! The section `[data]`: the source of responses and how they are labelled.

use anyhow::{Context, Result, bail};
use draftsmith_data::LengthBounds;
use draftsmith_served::{ServerLabels, ServerRecipe};
use draftsmith_theory::{Decoding, Sampling};
use serde::{Deserialize, Serialize};

use super::keys::{decoding, one, require};
use super::prompts::{PromptSource, Split, check_sources};

/// The settings for creating and labelling responses.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Prompt files in the format of Spec-Bench, GSM8K, HumanEval, Alpaca or ShareGPT, or with
    /// `messages` or `{"prompt"}`.
    pub prompts: Vec<PromptSource>,
    /// The maximum number of prompts per file, or in total if sources have weights; all if absent.
    pub num_prompts: Option<usize>,
    /// The split of the prompts to use; all prompts if absent.
    pub split: Option<Split>,
    /// The minimum length of a prompt in tokens.
    pub min_prompt_tokens: Option<usize>,
    /// The maximum length of a prompt in tokens.
    pub max_prompt_tokens: Option<usize>,
    /// The minimum length of a response in a prompt file, in tokens.
    pub min_response_tokens: Option<usize>,
    /// The maximum length of a response in a prompt file, in tokens.
    pub max_response_tokens: Option<usize>,
    /// Whether to keep repeated prompts; if false, each prompt is used once.
    #[serde(default)]
    pub keep_duplicates: bool,
    /// Whether a malformed record is an error; if false, it is skipped and counted.
    #[serde(default)]
    pub strict: bool,
    /// The source of responses.
    #[serde(default)]
    pub responses: Responses,
    /// The servers that write the responses if `responses` is `"server"`.
    pub server: Option<ServerRecipe>,
    /// The sampling temperature of target and draft model; 0 means greedy.
    #[serde(default = "one")]
    pub temperature: f64,
    /// The top-p value for target and draft model; 1 keeps all tokens.
    #[serde(default = "one")]
    pub top_p: f64,
    /// The top-k value for target and draft model; all tokens if absent.
    pub top_k: Option<usize>,
    /// The min-p value for target and draft model: the smallest probability kept, as a share of the
    /// largest. No limit if absent.
    pub min_p: Option<f64>,
    /// The repetition penalty for target and draft model. It divides positive logits of tokens in
    /// the text so far, and multiplies negative ones; 1 has no effect.
    #[serde(default = "one")]
    pub repetition_penalty: f64,
    /// The maximum length of a generated response in tokens.
    #[serde(default = "default_max_new_tokens")]
    pub max_new_tokens: usize,
    /// Whether to skip prompts that exceed the models' context; if false, they are an error.
    #[serde(default)]
    pub skip_long_prompts: bool,
}

/// The source of responses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Responses {
    /// The target generates the responses.
    #[default]
    Generate,
    /// The prompt files contain the responses.
    Existing,
    /// Servers that run the target generate the responses.
    Server,
}

fn default_max_new_tokens() -> usize {
    128
}

impl DataRecipe {
    /// Returns the servers that generate the responses; `None` if no servers do.
    pub fn served_by(&self) -> Option<&ServerRecipe> {
        self.server.as_ref().filter(|_| self.responses == Responses::Server)
    }

    /// Returns the servers if they both generate and label the responses, so that the target's
    /// weights are not read; `None` otherwise.
    pub fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.served_by().filter(|server| server.labels == ServerLabels::Server)
    }

    /// Checks the table `[data.server]`, which must exist exactly if servers generate the
    /// responses.
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

    /// Returns the decoding settings of target and draft model; temperature 0 means greedy.
    pub fn decoding(&self) -> Decoding {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty)
    }

    /// Returns the allowed lengths of prompts and responses in tokens.
    pub fn lengths(&self) -> LengthBounds {
        LengthBounds {
            min_prompt_tokens: self.min_prompt_tokens,
            max_prompt_tokens: self.max_prompt_tokens,
            min_response_tokens: self.min_response_tokens,
            max_response_tokens: self.max_response_tokens,
        }
    }

    /// Checks the values of all keys.
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

//! The section `[data]`: where responses come from, and how they are labelled.

use anyhow::{Context, Result, bail};
use draftsmith_data::LengthBounds;
use draftsmith_theory::{Decoding, Sampling, TokenChoice};
use serde::{Deserialize, Serialize};

use super::checks::require;
use super::prompts::{PromptSource, Split, check_sources};
use super::server::{ServerLabels, ServerRecipe};

/// How responses are made and labelled.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataRecipe {
    /// Prompt files: Spec-Bench, GSM8K, HumanEval, Alpaca, ShareGPT, `messages` or `{"prompt"}`.
    pub(crate) prompts: Vec<PromptSource>,
    /// At most so many prompts of each file, or, with weights, of all sources together; all if
    /// absent.
    #[serde(default)]
    pub(crate) num_prompts: Option<usize>,
    /// The split of them that is taken; all if absent.
    #[serde(default)]
    pub(crate) split: Option<Split>,
    /// The shortest prompt, in tokens.
    #[serde(default)]
    pub(crate) min_prompt_tokens: Option<usize>,
    /// The longest prompt, in tokens.
    #[serde(default)]
    pub(crate) max_prompt_tokens: Option<usize>,
    /// The shortest response of a prompt file, in tokens.
    #[serde(default)]
    pub(crate) min_response_tokens: Option<usize>,
    /// The longest response of a prompt file, in tokens.
    #[serde(default)]
    pub(crate) max_response_tokens: Option<usize>,
    /// Take prompts as often as they stand in the files; once if false.
    #[serde(default)]
    pub(crate) keep_duplicates: bool,
    /// Stop at a record that is no prompt; skipped and counted if false.
    #[serde(default)]
    pub(crate) strict: bool,
    /// The object store that the data is put into and read from, as a URL.
    #[serde(default)]
    pub(crate) store: Option<String>,
    /// Where responses come from.
    #[serde(default)]
    pub(crate) responses: Responses,
    /// The servers that write them, with `responses = "server"`.
    #[serde(default)]
    pub(crate) server: Option<ServerRecipe>,
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
    /// Servers of the target write them.
    Server,
}

pub(super) fn one() -> f64 {
    1.0
}

pub(super) fn default_max_new_tokens() -> usize {
    128
}

impl DataRecipe {
    /// The servers that write the responses, if they do.
    pub(crate) fn served_by(&self) -> Option<&ServerRecipe> {
        self.server.as_ref().filter(|_| self.responses == Responses::Server)
    }

    /// The same where the target is known by what they say, and its weights are not read.
    pub(crate) fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.served_by().filter(|server| server.labels == ServerLabels::Server)
    }

    /// Checks the servers, and that there are some where they are asked.
    fn check_server(&self) -> Result<()> {
        match (&self.server, self.responses) {
            (Some(server), Responses::Server) => {
                server.check()?;
                let decoding = self.decoding();
                let is_known = decoding.is_greedy() || !decoding.is_penalised();
                require(
                    server.labels == ServerLabels::Weights || is_known,
                    "data.repetition_penalty",
                    "is not 1, but log-probabilities of servers do not tell what a penalty makes of \
                     them; hint: leave it out, or set `data.temperature` to 0",
                )
            }
            (None, Responses::Server) => bail!(
                "key `data.responses` is `server`, but there is no table `[data.server]`: its keys \
                 `urls` and `model` say who writes the responses"
            ),
            (Some(_), _) => {
                bail!("there is a table `[data.server]`, but `data.responses` is not `server`")
            }
            (None, _) => Ok(()),
        }
    }

    /// How target and draft are sampled; temperature 0 is greedy.
    pub(crate) fn decoding(&self) -> Decoding {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty)
    }

    /// Which lengths are taken.
    pub(crate) fn lengths(&self) -> LengthBounds {
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
    /// If one does not hold.
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
                "leaves no length: expected 1 or more, and no less than the shortest",
            )?;
        }
        let of_responses = self.min_response_tokens.or(self.max_response_tokens);
        require(
            of_responses.is_none() || self.responses == Responses::Existing,
            "data.min_response_tokens` or `data.max_response_tokens",
            "is there, but the files' responses are not used: `data.max_new_tokens` is the longest that \
             the target writes; hint: set `data.responses = \"existing\"`",
        )?;
        self.check_server()
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

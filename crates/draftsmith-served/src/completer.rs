//! Completion of single prompts by a server, for certification.

use draftsmith_theory::{Decoding, Sampling};

use crate::TargetSettings;
use crate::client::Servers;
use crate::error::{Result, ServedError};
use crate::protocol::{Ask, Terms};
use crate::secret::Secret;
use crate::settings::{ServerHints, ServerRecipe};

/// The number of most probable tokens whose log-probabilities a [`Completer`] requests.
pub const NUM_LOG_PROBS: usize = 20;

/// A request for a completion.
#[derive(Debug, Clone, Copy)]
pub struct CompletionAsk<'a> {
    /// The prompt's token ids.
    pub prompt: &'a [u32],
    /// The maximum number of new tokens.
    pub num_tokens: usize,
    /// The sampling seed.
    pub seed: u32,
    /// The temperature; 0 for greedy decoding.
    pub temperature: f64,
    /// The number of most probable tokens to sample from; `None` for all.
    pub top_k: Option<usize>,
    /// Whether to request the log-probabilities of the [`NUM_LOG_PROBS`] most probable tokens.
    pub with_log_probs: bool,
}

/// A completion by a server.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Completed {
    /// The token ids. If the completion ended before the limit, the last one is an end-of-sequence
    /// token.
    pub ids: Vec<u32>,
    /// For each position, the most probable tokens with their log-probabilities at temperature 1;
    /// empty if they were not requested.
    pub known: Vec<Vec<(u32, f32)>>,
    /// The number of tokens that the server sent after the completion's end or limit.
    pub num_past_end: usize,
    /// The numbers of drafted and accepted candidates, if the server gives them with its answers, as
    /// llama.cpp does.
    pub speculated: Option<[f64; 2]>,
}

/// A client that requests completions from a server, with retries.
pub struct Completer {
    servers: Servers,
    model: String,
    target: TargetSettings,
}

impl Completer {
    /// Creates the client for the server in `recipe`. `target` provides the tokenizer, the end
    /// tokens and the vocabulary size.
    pub fn new(
        recipe: &ServerRecipe,
        secret: Secret,
        target: TargetSettings,
        hints: ServerHints,
    ) -> Self {
        Self { servers: Servers::new(recipe, secret, hints), model: recipe.model.clone(), target }
    }

    /// Requests a completion.
    ///
    /// # Errors
    /// If the server gives no usable completion after all retries, or returns text without token
    /// ids.
    pub fn complete(&self, ask: CompletionAsk<'_>) -> Result<Completed> {
        let decoding = match ask.temperature {
            0.0 => Decoding::GREEDY,
            temperature => {
                let top_k = ask.top_k;
                Decoding::sampled(Sampling { temperature, top_p: 1.0, top_k, min_p: None })
            }
        };
        let terms = Terms {
            model: self.model.clone(),
            decoding,
            eos_token_ids: self.target.eos_token_ids.clone(),
            stop_strings: Vec::new(),
            vocab_size: self.target.vocab_size,
            log_probs: ask.with_log_probs.then_some(NUM_LOG_PROBS),
        };
        let request = Ask {
            id: "certify".to_owned(),
            prompt_ids: ask.prompt.to_vec(),
            max_tokens: ask.num_tokens,
            seed: ask.seed,
        };
        let received = self.servers.complete(&request, &terms, &self.target);
        let received = received.map_err(ServedError::Invalid)?;
        if received.is_text {
            let problem = "the server returns text and no token ids, and the same text may be other tokens; hint: certify \
                           vLLM, SGLang or llama.cpp, which return ids"
                .to_owned();
            return Err(ServedError::Invalid(problem));
        }
        Ok(Completed {
            ids: received.entry.response_ids,
            known: received.entry.known.unwrap_or_default(),
            num_past_end: received.num_past_end,
            speculated: received.speculated,
        })
    }
}

//! A server with OpenAI's API as an end of the comparison.

use draftsmith_theory::{Decoding, Sampling};

use super::{CertifyAsk, Completed, Completing, NUM_LOG_PROBS};
use crate::TargetSettings;
use crate::client::Servers;
use crate::error::ServedError;
use crate::protocol::{Ask, Terms};
use crate::secret::Secret;
use crate::settings::ServerRecipe;

/// A server.
pub struct ServerEnd {
    servers: Servers,
    model: String,
    target: TargetSettings,
}

impl ServerEnd {
    /// Creates the client of the server that these settings describe; `target` reads its tokens.
    pub fn new(recipe: &ServerRecipe, secret: Secret, target: TargetSettings) -> Self {
        Self { servers: Servers::new(recipe, secret), model: recipe.model.clone(), target }
    }
}

impl Completing for ServerEnd {
    fn complete(&self, ask: CertifyAsk<'_>) -> Result<Completed, ServedError> {
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
        let received = received.map_err(|problem| ServedError::Server { problem, status: None })?;
        if received.is_text {
            let problem = "the server returns text and no token ids, and the same text may be other tokens; hint: certify \
                           vLLM, SGLang or llama.cpp, which return ids"
                .to_owned();
            return Err(ServedError::Server { problem, status: None });
        }
        Ok(Completed {
            ids: received.entry.response_ids,
            known: received.entry.known.unwrap_or_default(),
        })
    }
}

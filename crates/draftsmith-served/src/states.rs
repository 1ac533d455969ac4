//! Hidden states of a target that vLLM runs, for training a drafter without the target's layers.
//!
//! A request sends a row's tokens as a prompt and asks for one token. The server (started with the
//! method `extract_hidden_states`) answers with the path of a safetensors file, which it writes
//! after the answer. It holds a lock beside the file until the file is whole. We read the file and
//! delete both.
//!
//! Nothing in an answer is trusted. A file must be in the agreed directory and must not be a link.
//! Its length, tensors, shapes and tokens must be those that follow from the request, which is
//! checked before anything is allocated. Only such files are deleted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use crate::client::{Failure, Servers};
use crate::completer::NUM_LOG_PROBS;
use crate::error::{Result, ServedError};
use crate::known::{KnownPositions, KnownTokens, LogProbLists, PromptPosition};
use crate::reply::{BoundedBody, StatesPlace, Unusable, parse, states_bytes};
use crate::secret::Secret;
use crate::settings::{ServerHints, ServerRecipe, StatesRecipe};
use crate::states_file::{NO_STATES, StatesDtype, StatesPlan, Untaken};

/// The oldest version of vLLM whose files are sound.
const OLDEST: (u32, u32) = (0, 31);

/// A request for the hidden states of a row.
#[derive(Debug, Clone, Copy)]
pub struct StatesAsk<'a> {
    /// The row's id.
    pub id: &'a str,
    /// The row's tokens.
    pub ids: &'a [u32],
    /// The number of layers whose states the server stores.
    pub num_layers: usize,
    /// The number of values in a state.
    pub width: usize,
    /// Whether to request log-probabilities at all positions. Otherwise they come for the last one.
    pub is_proof: bool,
}

/// The hidden states of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedStates {
    /// For each layer, from the first to the last, a state of each token.
    pub layers: Vec<Vec<f32>>,
    /// The number format of the server's states.
    pub dtype: StatesDtype,
    /// Positions, each with the most probable tokens after it and their log-probabilities.
    pub known: Vec<(usize, Vec<(u32, f32)>)>,
    /// The length of the file, in bytes.
    pub num_bytes: u64,
}

/// A client that requests hidden states from servers, with retries.
pub struct StatesClient {
    servers: Servers,
    model: String,
    timeout: Duration,
    states: StatesRecipe,
    vocab_size: usize,
    /// Whether an answer named no version of vLLM.
    is_unversioned: AtomicBool,
}

/// The keys of an answer that we use.
#[derive(Deserialize)]
struct StatesReply {
    choices: Vec<StatesChoice>,
    kv_transfer_params: Option<StatesPlace>,
    system_fingerprint: Option<String>,
}

#[derive(Deserialize)]
struct StatesChoice {
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    logprobs: Option<LogProbLists>,
    prompt_logprobs: Option<KnownPositions<PromptPosition>>,
}

impl StatesClient {
    /// Creates a client for the servers of a recipe, whose target has `vocab_size` tokens.
    ///
    /// # Errors
    /// If the recipe has no table `[data.server.states]`.
    pub fn new(
        recipe: &ServerRecipe,
        secret: Secret,
        vocab_size: usize,
        hints: ServerHints,
    ) -> Result<Self> {
        let problem = "is missing; hint: name the directories that the servers share, as in \
                       `data.server.states.dirs = [\"/dev/shm/states\"]`";
        let states = recipe.states.clone();
        let states = states.ok_or_else(|| ServedError::setting("data.server.states", problem))?;
        Ok(Self {
            servers: Servers::new(recipe, secret, hints),
            model: recipe.model.clone(),
            timeout: recipe.timeout(),
            states,
            vocab_size,
            is_unversioned: AtomicBool::new(false),
        })
    }

    /// Deletes the files that requests without a usable answer have left. Returns a description of those
    /// that cannot be deleted, if there are any.
    pub fn sweep(&self) -> Option<String> {
        self.servers.sweep()
    }

    /// Returns whether an answer named no version of vLLM.
    pub fn is_unversioned(&self) -> bool {
        self.is_unversioned.load(Ordering::Relaxed)
    }

    /// Requests the states of a row, reads the server's file and deletes it.
    ///
    /// # Errors
    /// If no server gives usable states after all retries.
    pub fn fetch(&self, ask: StatesAsk<'_>) -> Result<ServedStates> {
        let fetched = self.servers.with_retries((ask.id, 0), |number, url, _| {
            let mut body = json!({
                "model": self.model,
                "prompt": ask.ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "stream": false,
                "add_special_tokens": false,
                "return_token_ids": true,
                "logprobs": NUM_LOG_PROBS,
                "return_tokens_as_token_ids": true,
            });
            if ask.is_proof {
                body["prompt_logprobs"] = json!(NUM_LOG_PROBS);
            }
            let mut response = self.servers.post(url, body.to_string().as_bytes())?;
            let reader = response.body_mut().as_reader();
            let most = states_bytes(ask.ids.len(), if ask.is_proof { NUM_LOG_PROBS } else { 0 });
            let mut body = BoundedBody::new(reader, most);
            let num_tokens = ask.ids.len();
            let reply = parse::<StatesReply>(&mut body, num_tokens);
            let reply =
                reply.map_err(|problem| self.servers.unusable(problem, &body, num_tokens))?;
            self.check_version(&reply)?;
            let known = self.known(&reply, &ask).map_err(|what| {
                self.servers.unusable(Unusable::Invalid(what), &body, num_tokens)
            })?;
            self.take(number, reply, known, &ask)
        });
        fetched.map_err(|problem| ServedError::Invalid(format!("row `{}`: {problem}", ask.id)))
    }

    fn check_version(&self, reply: &StatesReply) -> Result<(), Failure> {
        match reply.system_fingerprint.as_deref().and_then(version_of) {
            Some(version) if version < OLDEST => {
                let (major, minor) = version;
                let why = format!("is vLLM {major}.{minor}, whose states are not sound");
                return Err(Failure::permanent(why, NO_STATES));
            }
            Some(_) => {}
            None => self.is_unversioned.store(true, Ordering::Relaxed),
        }
        Ok(())
    }

    /// Checks the tokens of an answer, and returns the log-probabilities at each known position.
    fn known(
        &self,
        reply: &StatesReply,
        ask: &StatesAsk<'_>,
    ) -> Result<Vec<(usize, KnownTokens)>, String> {
        let [choice] = &reply.choices[..] else {
            return Err(format!("{} choices for one prompt", reply.choices.len()));
        };
        if choice.prompt_token_ids.as_ref().is_some_and(|ids| ids != ask.ids) {
            return Err("other prompt tokens than were sent".to_owned());
        }
        let generated = choice.token_ids.as_deref().unwrap_or_default();
        if generated.len() != 1 {
            return Err(format!("{} token ids, expected one", generated.len()));
        }
        let of_prompt: Vec<KnownTokens> = match (&choice.prompt_logprobs, ask.is_proof) {
            (_, false) => Vec::new(),
            (None, true) => return Err("no `prompt_logprobs`".to_owned()),
            (Some(all), true) => all.each().map(<[_]>::to_vec).collect(),
        };
        if ask.is_proof && of_prompt.len() != ask.ids.len() {
            let (found, num) = (of_prompt.len(), ask.ids.len());
            return Err(format!("`prompt_logprobs` of {found} tokens instead of {num}"));
        }
        let is_outside = |(id, _): &(u32, f32)| *id as usize >= self.vocab_size;
        if of_prompt.iter().flatten().any(is_outside) {
            return Err(format!("a token id beyond the target's {}", self.vocab_size));
        }
        let none = LogProbLists::default();
        let last = choice.logprobs.as_ref().unwrap_or(&none).known(generated, self.vocab_size)?;
        // An entry belongs to the token that the position before predicts. The first has none.
        let before = of_prompt.into_iter().skip(1).enumerate().filter(|(_, all)| !all.is_empty());
        Ok(before.chain(last.into_iter().map(|all| (ask.ids.len() - 1, all))).collect())
    }

    /// Reads the file that an answer names.
    fn take(
        &self,
        number: usize,
        reply: StatesReply,
        known: Vec<(usize, KnownTokens)>,
        ask: &StatesAsk<'_>,
    ) -> Result<ServedStates, Failure> {
        let named = reply.kv_transfer_params.and_then(|place| place.hidden_states_path);
        let named = named.ok_or_else(|| {
            let what = "answered without `hidden_states_path`: it does not extract hidden states";
            Failure::permanent(what.to_owned(), NO_STATES)
        })?;
        let plan = StatesPlan { ids: ask.ids, num_layers: ask.num_layers, width: ask.width };
        let path = &self.states.local_path((number, &named)).map_err(Untaken::unreadable)?;
        let taken = plan.take(path, self.timeout).map_err(Untaken::of(path));
        let (layers, dtype, num_bytes) = taken?;
        Ok(ServedStates { layers, dtype, known, num_bytes })
    }
}

/// Reads the version from a fingerprint such as `vllm-0.32.0-1a2b3c`; `None` in another form.
fn version_of(fingerprint: &str) -> Option<(u32, u32)> {
    let mut numbers = fingerprint.strip_prefix("vllm-")?.split(['.', '-', '+']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

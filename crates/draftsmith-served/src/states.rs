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

mod file;

use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;
use serde_json::json;

use self::file::{StatesPlan, Untaken};
use crate::client::{Failure, Servers};
use crate::error::ServedError;
use crate::known::{KnownPositions, KnownTokens, LogProbLists, PromptPosition};
use crate::reply::{BoundedBody, Unusable, parse, states_bytes};
use crate::secret::Secret;
use crate::settings::{ServerHints, ServerRecipe, StatesRecipe};

pub use self::file::StatesDtype;

/// The number of most probable tokens whose log-probabilities are requested, as vLLM allows by
/// default.
const NUM_LOG_PROBS: usize = 20;
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
    /// The server's version, if it gives one.
    pub version: Option<String>,
    /// The length of the file, in bytes.
    pub num_bytes: u64,
}

/// A client that requests hidden states from servers, with retries.
pub struct StatesClient {
    servers: Servers,
    recipe: ServerRecipe,
    states: StatesRecipe,
    vocab_size: usize,
    /// The number of answers without a version that is known to be sound.
    num_unversioned: AtomicUsize,
}

/// The keys of an answer that we use.
#[derive(Deserialize)]
struct StatesReply {
    choices: Vec<StatesChoice>,
    kv_transfer_params: Option<StatesPlace>,
    system_fingerprint: Option<String>,
}

#[derive(Deserialize)]
struct StatesPlace {
    hidden_states_path: Option<String>,
}

#[derive(Deserialize)]
struct StatesChoice {
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    logprobs: Option<LogProbLists>,
    prompt_logprobs: Option<KnownPositions<PromptPosition>>,
}

const NO_STATES: &str = "start vLLM 0.31 or newer as `draftsmith server states RECIPE` prints";
const NOT_SHARED: &str = "each server writes into its own directory of `data.server.states.dirs`, which this machine \
                          must share and whose files (mode 0600) this user must be able to read";

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
    ) -> Result<Self, ServedError> {
        let states = recipe.states.clone().ok_or_else(|| ServedError::Setting {
            key: "data.server.states",
            problem: "is missing; hint: name the directories that the servers share, as in \
                      `data.server.states.dirs = [\"/dev/shm/states\"]`"
                .to_owned(),
        })?;
        let servers = Servers::new(recipe, secret, hints);
        let num_unversioned = AtomicUsize::new(0);
        Ok(Self { servers, recipe: recipe.clone(), states, vocab_size, num_unversioned })
    }

    /// Returns the number of answers that named no version of vLLM.
    pub fn num_unversioned(&self) -> usize {
        self.num_unversioned.load(Ordering::Relaxed)
    }

    /// Requests the states of a row, reads the server's file and deletes it.
    ///
    /// # Errors
    /// If no server gives usable states after all retries.
    pub fn fetch(&self, ask: StatesAsk<'_>) -> Result<ServedStates, ServedError> {
        let fetched = self.servers.with_retries((ask.id, 0), |number, url, _| {
            let mut body = json!({
                "model": self.recipe.model,
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
            let read = parse::<StatesReply>(&mut body, ask.ids.len());
            let read =
                read.and_then(|reply| self.read(number, reply, &ask).map_err(Unusable::Invalid));
            read.map_err(|problem| self.servers.unusable(problem, &body, ask.ids.len()))?
        });
        fetched.map_err(|problem| ServedError::NoStates { id: ask.id.to_owned(), problem })
    }

    /// Checks an answer and reads its file. The inner error is a problem with the file.
    fn read(
        &self,
        number: usize,
        reply: StatesReply,
        ask: &StatesAsk<'_>,
    ) -> Result<Result<ServedStates, Failure>, String> {
        let version = reply.system_fingerprint;
        match version.as_deref().map(version_of) {
            Some(Some(version)) if version < OLDEST => {
                let (major, minor) = version;
                return Ok(Err(Failure::permanent(
                    format!("is vLLM {major}.{minor}, whose states are not sound"),
                    NO_STATES,
                )));
            }
            Some(Some(_)) => {}
            _ => drop(self.num_unversioned.fetch_add(1, Ordering::Relaxed)),
        }
        let [choice] = <[StatesChoice; 1]>::try_from(reply.choices)
            .map_err(|choices| format!("{} choices for one prompt", choices.len()))?;
        if choice.prompt_token_ids.is_some_and(|ids| ids != ask.ids) {
            return Err("other prompt tokens than were sent".to_owned());
        }
        let generated = choice.token_ids.unwrap_or_default();
        let [_] = <[u32; 1]>::try_from(generated.as_slice())
            .map_err(|_| format!("{} token ids, expected one", generated.len()))?;
        let last = choice.logprobs.unwrap_or_default().known(&generated, self.vocab_size)?;
        let last_position = ask.ids.len() - 1;
        let mut known: Vec<(usize, KnownTokens)> = Vec::new();
        if ask.is_proof {
            let of_prompt = choice.prompt_logprobs.ok_or("no `prompt_logprobs`")?;
            let of_prompt: Vec<KnownTokens> = of_prompt.each().map(<[_]>::to_vec).collect();
            if of_prompt.len() != ask.ids.len() {
                let num = of_prompt.len();
                return Err(format!(
                    "`prompt_logprobs` of {num} tokens instead of {}",
                    ask.ids.len()
                ));
            }
            // An entry belongs to the token that the position before predicts. The first has none.
            known.extend(
                of_prompt.into_iter().skip(1).enumerate().filter(|(_, all)| !all.is_empty()),
            );
            let is_outside = |(id, _): &(u32, f32)| *id as usize >= self.vocab_size;
            if known.iter().any(|(_, all)| all.iter().any(is_outside)) {
                return Err(format!("a token id beyond the target's {}", self.vocab_size));
            }
        }
        known.extend(last.into_iter().map(|all| (last_position, all)));
        let named = reply.kv_transfer_params.and_then(|place| place.hidden_states_path);
        let Some(named) = named else {
            let what = "answered without `hidden_states_path`: it does not extract hidden states";
            return Ok(Err(Failure::permanent(what.to_owned(), NO_STATES)));
        };
        let path = match self.states.local_path(number, &named) {
            Ok(path) => path,
            Err(what) => {
                return Ok(Err(Failure::permanent(format!("answered {what}"), NOT_SHARED)));
            }
        };
        let plan = StatesPlan { ids: ask.ids, num_layers: ask.num_layers, width: ask.width };
        Ok(match plan.take(&path, self.recipe.timeout()) {
            Ok((layers, dtype, num_bytes)) => {
                Ok(ServedStates { layers, dtype, known, version, num_bytes })
            }
            Err(untaken) => {
                let (what, hint) = match untaken {
                    Untaken::Unreadable(what) => (what, NOT_SHARED),
                    Untaken::Foreign(what) => (what, NO_STATES),
                };
                let place = path.display();
                let why = format!("answered with the states in `{place}`: {what}");
                Err(Failure::permanent(why, hint))
            }
        })
    }
}

/// Reads the version from a fingerprint such as `vllm-0.32.0-1a2b3c`; `None` in another form.
fn version_of(fingerprint: &str) -> Option<(u32, u32)> {
    let mut numbers = fingerprint.strip_prefix("vllm-")?.split(['.', '-', '+']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

//! The responses of a target that others serve: asked for, written down, and looked up.
//!
//! Requests go out of a few threads, which know nothing but HTTP (`served/client.rs`); who asks walks
//! through conversations on one, and writes each response into the journal (`served/journal.rs`)
//! before anything is made of it. `served/protocol.rs` is what is said on the wire.

mod client;
mod journal;
mod known;
#[cfg(test)]
pub(crate) mod loopback;
mod protocol;
pub(crate) mod readers;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use draftsmith_data::{FinishReason, Prompt, hash_bytes};
use draftsmith_theory::{Decoding, TextEnd, TopProbs};

use self::client::{Pace, Refused, Servers};
use self::journal::{Entry, Journal};
use self::known::KnownTokens;
use self::protocol::{Ask, Completion, Terms, Tokens};
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, next_turn};
use crate::recipe::ServerRecipe;
use crate::text_side::TextSide;

/// How often Ctrl-C is looked for.
const TICK: Duration = Duration::from_millis(100);
const HELD: &str = "nobody panics while holding it";

/// How responses are asked for.
pub(crate) struct Asking<'a> {
    pub(crate) text: &'a TextSide,
    /// The strings that end a response.
    pub(crate) stop_strings: &'a [String],
    /// How many tokens the target has.
    pub(crate) vocab_size: usize,
    pub(crate) decoding: Decoding,
    pub(crate) max_new_tokens: usize,
    pub(crate) seed: u64,
    /// Of how many of the most probable tokens log-probabilities are asked for; None where none are.
    pub(crate) log_probs: Option<usize>,
}

/// What is to be answered.
pub(crate) enum ToAnswer<'p> {
    /// All turns of a conversation, each behind the answers to those before.
    Conversation(Cow<'p, Prompt>),
    /// Tokens, for a row.
    Tokens { id: &'p str, prompt_ids: &'p [u32] },
}

/// A served target's response.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ServedResponse {
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: FinishReason,
    /// What each token was drawn from, where that was asked for.
    pub(crate) probs: Option<Vec<TopProbs>>,
}

/// A target that others serve, and what it answered so far.
pub(crate) struct Served {
    text: TextSide,
    terms: Arc<Terms>,
    max_new_tokens: usize,
    seed: u64,
    concurrency: usize,
    servers: Arc<Servers>,
    journal: Journal,
}

/// A request on its way, by the number of who asked, and what came of it.
type Sent = (usize, Ask);
type Came = (usize, Ask, Result<Completion, Refused>);

impl Served {
    /// The target that a recipe's servers serve, with what the journals beside the one at `journal`
    /// have of it.
    ///
    /// # Errors
    /// If the token is not where it should be, or the journal cannot be read.
    pub(crate) fn open(
        recipe: &ServerRecipe,
        asking: &Asking<'_>,
        journal: &Path,
        console: &Console,
    ) -> Result<Self> {
        Self::open_at_pace(recipe, asking, journal, console, Pace::USUAL)
    }

    fn open_at_pace(
        recipe: &ServerRecipe,
        asking: &Asking<'_>,
        journal: &Path,
        console: &Console,
        pace: Pace,
    ) -> Result<Self> {
        let Asking { text, stop_strings, vocab_size, decoding, max_new_tokens, seed, log_probs } =
            *asking;
        let token = recipe.api_key_env.as_deref().map(token).transpose()?;
        let servers = Servers::new(&recipe.urls, token, recipe.retries, recipe.timeout(), pace);
        let journal = Journal::open(journal)?;
        if journal.num_broken > 0 {
            console.note(format!(
                "{} lines beside `{}` cannot be read; what they held is asked for again",
                journal.num_broken,
                journal.path().display()
            ));
        }
        let terms = Terms {
            model: recipe.model.clone(),
            decoding,
            eos_token_ids: text.eos_token_ids.clone(),
            stop_strings: stop_strings.to_vec(),
            vocab_size,
            log_probs,
        };
        Ok(Self {
            text: text.clone(),
            terms: Arc::new(terms),
            max_new_tokens,
            seed,
            concurrency: recipe.concurrency,
            servers: Arc::new(servers),
            journal,
        })
    }

    /// Asks for all that was not answered yet, and writes it down; what is to be answered is taken as
    /// it is asked for. `progress` counts what is answered to its end.
    ///
    /// # Errors
    /// If a prompt cannot be read or does not fit, a server gives nothing that can be used, however often it is asked,
    /// the journal cannot be written, or Ctrl-C is met.
    pub(crate) fn answer<'p>(
        &mut self,
        all: impl IntoIterator<Item = Result<ToAnswer<'p>>>,
        console: &Console,
        progress: &Progress,
    ) -> Result<()> {
        let (sender, jobs) = channel::<Sent>();
        let (done, results) = channel::<Came>();
        let jobs = Arc::new(Mutex::new(jobs));
        // Left behind where they stand still: no request can be broken off.
        for _ in 0..self.concurrency {
            let (servers, terms) = (self.servers.clone(), self.terms.clone());
            let (jobs, done, text) = (jobs.clone(), done.clone(), self.text.clone());
            std::thread::spawn(move || send(&servers, &terms, &text, &jobs, &done));
        }
        let told = self.answer_through(all.into_iter(), &sender, &results, console, progress);
        self.servers.give_up();
        let Told { num_new, num_texts, num_other_prompts } = told?;
        if num_texts > 0 {
            console.note(format!(
                "{num_texts} of {num_new} responses came as text, and were tokenised here: some of \
                 their tokens may not be those that the target chose; vLLM, SGLang and llama.cpp \
                 give tokens"
            ));
        }
        if num_other_prompts > 0 {
            console.note(format!(
                "{num_other_prompts} of {num_new} prompts had another number of tokens where they \
                 were served: the servers' tokenizer is not that of `models.target`, or adds tokens"
            ));
        }
        Ok(())
    }

    fn answer_through<'p>(
        &mut self,
        all: impl Iterator<Item = Result<ToAnswer<'p>>>,
        sender: &Sender<Sent>,
        results: &Receiver<Came>,
        console: &Console,
        progress: &Progress,
    ) -> Result<Told> {
        let mut told = Told::default();
        let mut waiting = all.enumerate();
        let mut running: HashMap<usize, Walk<'_>> = HashMap::new();
        loop {
            while running.len() < self.concurrency && !console.is_interrupted() {
                let Some((number, what)) = waiting.next() else { break };
                let mut walk = Walk { what: what?, texts: Vec::new() };
                match self.next_ask(&mut walk)? {
                    Some(ask) => {
                        // They listen as long as this does.
                        let _ = sender.send((number, ask));
                        running.insert(number, walk);
                    }
                    None => progress.advance(1),
                }
            }
            if running.is_empty() {
                break;
            }
            let (number, ask, came) = match results.recv_timeout(TICK) {
                Ok(came) => came,
                Err(RecvTimeoutError::Timeout) => {
                    if console.is_interrupted() {
                        self.servers.give_up();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the threads that ask servers ended"),
            };
            let mut walk = running.remove(&number).context("it was running")?;
            match came {
                Ok(completion) => {
                    told.count(&completion, &ask);
                    let entry = self.entry(&ask, completion)?;
                    self.journal.append(&entry)?;
                }
                Err(_) if console.is_interrupted() => continue,
                Err(Refused { why }) => {
                    bail!("prompt `{}`: {why}; what came before is kept", ask.id)
                }
            }
            match self.next_ask(&mut walk)? {
                Some(_) if console.is_interrupted() => {}
                Some(ask) => {
                    let _ = sender.send((number, ask));
                    running.insert(number, walk);
                }
                None => progress.advance(1),
            }
        }
        if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(told) }
    }

    /// What is to be asked next; None where all is answered.
    fn next_ask(&self, walk: &mut Walk<'_>) -> Result<Option<Ask>> {
        loop {
            let Some(turn) = walk.turn(&self.text)? else { return Ok(None) };
            let ask = self.ask(&turn.id, &turn.prompt_ids);
            match self.written(&ask)? {
                Some(entry) => {
                    walk.texts.push(self.text.tokenizer.decode(&entry.response_ids, true)?);
                }
                None => return Ok(Some(ask)),
            }
        }
    }

    /// What the journal has of a request, if it is a response of the target: what somebody has changed
    /// is asked for again.
    fn written(&self, ask: &Ask) -> Result<Option<Entry>> {
        let entry = self.journal.get(&self.terms.identity(ask))?;
        Ok(entry.filter(|entry| entry.is_sound(self.terms.vocab_size)))
    }

    fn ask(&self, id: &str, prompt_ids: &[u32]) -> Ask {
        let room = self.text.context.saturating_sub(prompt_ids.len());
        // Positive in 32 bits, which every server can read.
        let hash = hash_bytes(format!("{} {id} served", self.seed).as_bytes());
        let seed = u32::from_str_radix(&hash[..8], 16).expect("it is hex") >> 1;
        let (id, prompt_ids) = (id.to_owned(), prompt_ids.to_vec());
        Ask { id, prompt_ids, max_tokens: room.min(self.max_new_tokens), seed }
    }

    /// The response to a turn, which was asked for.
    ///
    /// # Errors
    /// If it was not, or cannot be read back.
    pub(crate) fn response(&self, id: &str, prompt_ids: &[u32]) -> Result<ServedResponse> {
        let ask = self.ask(id, prompt_ids);
        let entry = self.written(&ask)?;
        let Entry { response_ids: ids, finish_reason, known, .. } =
            entry.with_context(|| format!("no server was asked about `{id}`"))?;
        let finish = FinishReason::parse(&finish_reason);
        let finish = finish.with_context(|| format!("a journal says `{finish_reason}`"))?;
        let num_asked = self.terms.log_probs.unwrap_or(0);
        let probs = known.map(|known| probs_of(&ids, known, num_asked));
        Ok(ServedResponse { ids, finish, probs })
    }

    /// A completion as a response, ended as the target would end it here.
    fn entry(&self, ask: &Ask, completion: Completion) -> Result<Entry> {
        let Completion { tokens, mut known, is_ended, ended_by, .. } = completion;
        let came = match tokens {
            Tokens::Ids(ids) => ids,
            Tokens::Text(text) => self.text.tokenizer.encode(&text, false)?,
        };
        let (response_ids, finish) = self.ended(ask, came, is_ended, ended_by);
        if let Some(known) = &mut known {
            // Nothing is told of an end token that did not come.
            known.resize(response_ids.len(), KnownTokens::new());
        }
        Ok(Entry {
            id: ask.id.clone(),
            request: self.terms.identity(ask),
            response_ids,
            finish_reason: finish.as_str().to_owned(),
            known,
        })
    }

    /// Tokens up to where the response ends: at an end token, behind a stop string, or at the most
    /// tokens. A server leaves the end token out where it gives text.
    fn ended(
        &self,
        ask: &Ask,
        came: Vec<u32>,
        is_ended: bool,
        ended_by: Option<u32>,
    ) -> (Vec<u32>, FinishReason) {
        let eos_token_ids = &self.text.eos_token_ids;
        let end = is_ended.then(|| ended_by.or(eos_token_ids.first().copied())).flatten();
        let num_prompt = ask.prompt_ids.len();
        let mut ids = ask.prompt_ids.clone();
        let mut finish = FinishReason::Length;
        for id in came.into_iter().chain(end).take(ask.max_tokens) {
            ids.push(id);
            if eos_token_ids.contains(&id) {
                finish = FinishReason::Eos;
                break;
            }
            if self
                .text
                .text_end
                .as_deref()
                .is_some_and(|end| end.is_reached(&mut ids.iter().rev().copied()))
            {
                finish = FinishReason::StopString;
                break;
            }
        }
        (ids.split_off(num_prompt), finish)
    }
}

/// What each token was drawn from, of whose places the `num_asked` most probable tokens were asked for.
fn probs_of(ids: &[u32], known: Vec<KnownTokens>, num_asked: usize) -> Vec<TopProbs> {
    let place = |(id, known): (&u32, KnownTokens)| match known.is_empty() {
        true => TopProbs::unknown(*id),
        false => TopProbs::new(known, num_asked),
    };
    ids.iter().zip(known).map(place).collect()
}

/// Who asks, and the answers so far.
struct Walk<'p> {
    what: ToAnswer<'p>,
    texts: Vec<String>,
}

impl Walk<'_> {
    /// The turn behind those that were answered, if there is one and it fits.
    fn turn(&self, text: &TextSide) -> Result<Option<Turn>> {
        let number = self.texts.len();
        match &self.what {
            ToAnswer::Conversation(prompt) if number < prompt.turns.len() => {
                next_turn(text, prompt, &self.texts)
            }
            ToAnswer::Tokens { id, prompt_ids } if number == 0 => {
                Ok(Some(Turn { number, id: (*id).to_owned(), prompt_ids: prompt_ids.to_vec() }))
            }
            _ => Ok(None),
        }
    }
}

/// What is told of all responses together.
#[derive(Default)]
struct Told {
    num_new: usize,
    num_texts: usize,
    num_other_prompts: usize,
}

impl Told {
    fn count(&mut self, completion: &Completion, ask: &Ask) {
        self.num_new += 1;
        self.num_texts += usize::from(matches!(completion.tokens, Tokens::Text(_)));
        let is_other = completion.num_prompt_tokens.is_some_and(|num| num != ask.prompt_ids.len());
        self.num_other_prompts += usize::from(is_other);
    }
}

/// Sends what comes, until nothing more does.
fn send(
    servers: &Servers,
    terms: &Terms,
    text: &TextSide,
    jobs: &Mutex<Receiver<Sent>>,
    done: &Sender<Came>,
) {
    loop {
        let next = jobs.lock().expect(HELD).recv();
        let Ok((number, ask)) = next else { return };
        let prompt_text =
            || text.tokenizer.decode(&ask.prompt_ids, false).map_err(|e| e.to_string());
        let came = servers.complete(&ask, terms, &prompt_text);
        // Nobody listens any more where it was given up.
        let _ = done.send((number, ask, came));
    }
}

/// The token in an environment variable.
fn token(name: &str) -> Result<String> {
    let token = std::env::var(name).ok().filter(|token| !token.trim().is_empty());
    token.map(|token| token.trim().to_owned()).with_context(|| {
        format!(
            "the environment variable `{name}`, which `data.server.api_key_env` names, is not set; \
             hint: put the servers' token into it"
        )
    })
}

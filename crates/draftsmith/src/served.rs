//! Responses of a target that servers run: requested, written to a journal, and looked up.
//!
//! A few threads send requests and know only HTTP (`served/client.rs`). The calling thread walks through
//! the conversations and appends each response to the journal (`served/journal.rs`) before anything uses
//! it. `served/protocol.rs` defines requests and reads answers.

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
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use draftsmith_data::{FinishReason, hash_bytes};
use draftsmith_theory::{Decoding, TextEnd, TopProbs};

use self::client::Servers;
use self::journal::{Entry, Journal};
use self::known::{KnownTokens, top_probs};
use self::protocol::{Ask, Completion, Terms, Tokens};
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{SetPrompt, next_turn};
use crate::recipe::{DataRecipe, Recipe, ServerRecipe};
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

/// How often to check for an interrupt.
const TICK: Duration = Duration::from_millis(100);
const HELD: &str = "nobody panics while holding it";

/// A recipe's servers, and the journal of their responses.
#[derive(Clone)]
pub(crate) struct ServerAccess<'a> {
    pub(crate) server: &'a ServerRecipe,
    pub(crate) seed: u64,
    /// The journal that this process writes. It also reads the journals in the same directory.
    pub(crate) journal: PathBuf,
}

impl<'a> ServerAccess<'a> {
    /// A recipe's servers.
    ///
    /// # Errors
    /// If the recipe has none.
    pub(crate) fn of(recipe: &'a Recipe, shard: Shard) -> Result<Self> {
        let server = recipe.data.as_ref().and_then(DataRecipe::served_by);
        Ok(Self {
            server: server.context("`data.responses` is `server`")?,
            seed: recipe.seed,
            journal: recipe.data_dir().join(shard.file_name("served", "jsonl")),
        })
    }

    /// Opens the target that the servers run, with the responses in the journals.
    ///
    /// # Errors
    /// If the bearer token is not set, or a journal cannot be read.
    pub(crate) fn open(
        &self,
        workspace: &Workspace,
        decoding: Decoding,
        max_new_tokens: usize,
        console: &Console,
    ) -> Result<Served> {
        let text = workspace.text_side()?;
        let token = self.server.api_key_env.as_deref().map(token).transpose()?;
        let journal = Journal::open(&self.journal)?;
        if journal.num_broken > 0 {
            console.note(format!(
                "{} lines of the journals beside `{}` cannot be read; their responses are requested \
                 again",
                journal.num_broken,
                self.journal.display()
            ));
        }
        let terms = Terms {
            model: self.server.model.clone(),
            decoding,
            eos_token_ids: text.eos_token_ids.clone(),
            stop_strings: workspace.ends.stop_strings.clone(),
            vocab_size: workspace.target_shape()?.vocab_size,
            log_probs: self.server.log_probs(&decoding),
        };
        Ok(Served {
            text: text.clone(),
            terms: Arc::new(terms),
            max_new_tokens,
            seed: self.seed,
            concurrency: self.server.concurrency,
            servers: Arc::new(Servers::new(self.server, token)),
            journal,
        })
    }
}

/// A served target's response.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ServedResponse {
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: FinishReason,
    /// The known part of each token's distribution, if log-probabilities were requested.
    pub(crate) probs: Option<Vec<TopProbs>>,
}

/// A target that servers run, with its responses so far.
pub(crate) struct Served {
    text: TextSide,
    terms: Arc<Terms>,
    max_new_tokens: usize,
    seed: u64,
    concurrency: usize,
    servers: Arc<Servers>,
    journal: Journal,
}

/// What is being answered, and the answers so far.
type Conversation<'p> = (Cow<'p, SetPrompt>, Vec<String>);
/// A request with the index of its conversation.
type Sent = (usize, Ask);
/// The same with the completion, or why there is none.
type Received = (usize, Ask, Result<Completion, String>);

impl Served {
    /// Requests all responses that the journals lack and writes them down. Prompts are read as they are
    /// sent. `progress` counts completed prompts.
    ///
    /// # Errors
    /// If a prompt cannot be read or does not fit, a request fails after all retries, the journal cannot
    /// be written, or the job is interrupted.
    pub(crate) fn answer<'p>(
        &mut self,
        all: impl IntoIterator<Item = Result<Cow<'p, SetPrompt>>>,
        console: &Console,
        progress: &Progress,
    ) -> Result<()> {
        let (sender, jobs) = channel::<Sent>();
        let (done, results) = channel::<Received>();
        let jobs = Arc::new(Mutex::new(jobs));
        // A thread that waits for a stalled request is abandoned: requests cannot be cancelled.
        for _ in 0..self.concurrency {
            let (servers, terms) = (self.servers.clone(), self.terms.clone());
            let (jobs, done, text) = (jobs.clone(), done.clone(), self.text.clone());
            std::thread::spawn(move || send_all(&servers, &terms, &text, &jobs, &done));
        }
        let tally = self.answer_through(all.into_iter(), &sender, &results, console, progress);
        self.servers.give_up();
        tally?.note(console);
        Ok(())
    }

    fn answer_through<'p>(
        &mut self,
        all: impl Iterator<Item = Result<Cow<'p, SetPrompt>>>,
        sender: &Sender<Sent>,
        results: &Receiver<Received>,
        console: &Console,
        progress: &Progress,
    ) -> Result<Tally> {
        let mut tally = Tally::default();
        let mut waiting = all.enumerate();
        let mut running: HashMap<usize, Conversation<'_>> = HashMap::new();
        loop {
            while running.len() < self.concurrency && !console.is_interrupted() {
                let Some((number, prompt)) = waiting.next() else { break };
                let conversation = (prompt?, Vec::new());
                self.send_next(number, conversation, &mut running, sender, progress)?;
            }
            if running.is_empty() {
                break;
            }
            let (number, ask, received) = match results.recv_timeout(TICK) {
                Ok(received) => received,
                Err(RecvTimeoutError::Timeout) => {
                    if console.is_interrupted() {
                        self.servers.give_up();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the request threads ended"),
            };
            let conversation = running.remove(&number).context("it was running")?;
            match received {
                Ok(completion) => {
                    tally.count(&completion, &ask);
                    let entry = self.entry(&ask, completion)?;
                    self.journal.append(&entry)?;
                }
                Err(_) if console.is_interrupted() => {}
                Err(why) => bail!("prompt `{}`: {why}; earlier responses are kept", ask.id),
            }
            if !console.is_interrupted() {
                self.send_next(number, conversation, &mut running, sender, progress)?;
            }
        }
        if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(tally) }
    }

    /// Sends a conversation's next request, if there is one.
    fn send_next<'p>(
        &self,
        number: usize,
        mut conversation: Conversation<'p>,
        running: &mut HashMap<usize, Conversation<'p>>,
        sender: &Sender<Sent>,
        progress: &Progress,
    ) -> Result<()> {
        match self.next_ask(&mut conversation)? {
            Some(ask) => {
                // Cannot fail: `answer` holds the receiver too.
                let _ = sender.send((number, ask));
                running.insert(number, conversation);
            }
            None => progress.advance(1),
        }
        Ok(())
    }

    /// A conversation's next request that the journals do not answer; `None` if all its turns that fit the
    /// context are answered.
    fn next_ask(&self, (prompt, texts): &mut Conversation<'_>) -> Result<Option<Ask>> {
        loop {
            let number = texts.len();
            let turn = match &**prompt {
                SetPrompt::Conversation(prompt) if number < prompt.turns.len() => {
                    next_turn(&self.text, prompt, texts)?.map(|turn| (turn.id, turn.prompt_ids))
                }
                SetPrompt::HeldOut { id, prompt_ids } if number == 0 => {
                    Some((id.clone(), prompt_ids.clone()))
                }
                _ => None,
            };
            let Some((id, prompt_ids)) = turn else { return Ok(None) };
            let ask = self.ask(&id, &prompt_ids);
            let Some(entry) = self.written(&ask)? else { return Ok(Some(ask)) };
            texts.push(self.text.tokenizer.decode(&entry.response_ids, true)?);
        }
    }

    /// The journals' response to a request. Edited entries that the target cannot have produced are
    /// ignored, so that we request them again.
    fn written(&self, ask: &Ask) -> Result<Option<Entry>> {
        let entry = self.journal.get(&self.terms.identity(ask))?;
        Ok(entry.filter(|entry| entry.is_sound(self.terms.vocab_size)))
    }

    fn ask(&self, id: &str, prompt_ids: &[u32]) -> Ask {
        let room = self.text.context.saturating_sub(prompt_ids.len());
        // Non-negative in 32 bits, which every server accepts.
        let hash = hash_bytes(format!("{} {id} served", self.seed).as_bytes());
        let seed = u32::from_str_radix(&hash[..8], 16).expect("it is hex") >> 1;
        let (id, prompt_ids) = (id.to_owned(), prompt_ids.to_vec());
        Ask { id, prompt_ids, max_tokens: room.min(self.max_new_tokens), seed }
    }

    /// The response to a turn.
    ///
    /// # Errors
    /// If it was never requested, or cannot be read back.
    pub(crate) fn response(&self, id: &str, prompt_ids: &[u32]) -> Result<ServedResponse> {
        let entry = self.written(&self.ask(id, prompt_ids))?;
        let Entry { response_ids: ids, finish_reason, known, .. } =
            entry.with_context(|| format!("the journals have no response to `{id}`"))?;
        let finish = FinishReason::parse(&finish_reason);
        let finish = finish.with_context(|| format!("a journal says `{finish_reason}`"))?;
        let num_requested = self.terms.log_probs.unwrap_or(0);
        let probs_at = |(id, known): (&u32, KnownTokens)| top_probs(*id, known, num_requested);
        let probs = known.map(|known| ids.iter().zip(known).map(probs_at).collect());
        Ok(ServedResponse { ids, finish, probs })
    }

    /// A completion as a journal entry.
    fn entry(&self, ask: &Ask, completion: Completion) -> Result<Entry> {
        let Completion { tokens, mut known, is_ended, ended_by, .. } = completion;
        let ids = match tokens {
            Tokens::Ids(ids) => ids,
            Tokens::Text(text) => self.text.tokenizer.encode(&text, false)?,
        };
        let (response_ids, finish) = self.cut_at_end(ask, ids, is_ended, ended_by);
        if let Some(known) = &mut known {
            // Nothing is known about an end token that the server left out.
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

    /// Cuts a response where local decoding would end it: after an end token or a stop string, or at
    /// the token limit. Servers that return text leave out the end token, so it is added back.
    fn cut_at_end(
        &self,
        ask: &Ask,
        received: Vec<u32>,
        is_ended: bool,
        ended_by: Option<u32>,
    ) -> (Vec<u32>, FinishReason) {
        let TextSide { eos_token_ids, text_end, .. } = &self.text;
        let end = is_ended.then(|| ended_by.or(eos_token_ids.first().copied())).flatten();
        let mut ids = ask.prompt_ids.clone();
        let mut finish = FinishReason::Length;
        for id in received.into_iter().chain(end).take(ask.max_tokens) {
            ids.push(id);
            if eos_token_ids.contains(&id) {
                finish = FinishReason::Eos;
                break;
            }
            if text_end.as_ref().is_some_and(|end| end.is_reached(&mut ids.iter().rev().copied())) {
                finish = FinishReason::StopString;
                break;
            }
        }
        (ids.split_off(ask.prompt_ids.len()), finish)
    }
}

/// Counts of new responses, for a note at the end.
#[derive(Default)]
struct Tally {
    num_new: usize,
    num_texts: usize,
    num_other_prompts: usize,
}

impl Tally {
    fn count(&mut self, completion: &Completion, ask: &Ask) {
        self.num_new += 1;
        self.num_texts += usize::from(matches!(completion.tokens, Tokens::Text(_)));
        let is_other = completion.num_prompt_tokens.is_some_and(|num| num != ask.prompt_ids.len());
        self.num_other_prompts += usize::from(is_other);
    }

    fn note(&self, console: &Console) {
        let Self { num_new, num_texts, num_other_prompts } = self;
        if *num_texts > 0 {
            console.note(format!(
                "{num_texts} of {num_new} responses arrived as text and were tokenised here, so some \
                 tokens may differ from the target's; vLLM, SGLang and llama.cpp return token ids"
            ));
        }
        if *num_other_prompts > 0 {
            console.note(format!(
                "the servers counted another number of tokens in {num_other_prompts} of {num_new} \
                 prompts: their tokenizer differs from that of `models.target`, or adds tokens"
            ));
        }
    }
}

/// Sends requests until the channel closes.
fn send_all(
    servers: &Servers,
    terms: &Terms,
    text: &TextSide,
    jobs: &Mutex<Receiver<Sent>>,
    done: &Sender<Received>,
) {
    loop {
        let next = jobs.lock().expect(HELD).recv();
        let Ok((number, ask)) = next else { return };
        let prompt_text =
            || text.tokenizer.decode(&ask.prompt_ids, false).map_err(|e| e.to_string());
        let received = servers.complete(&ask, terms, &prompt_text);
        // Fails only if the receiver has given up.
        let _ = done.send((number, ask, received));
    }
}

/// The bearer token in an environment variable.
fn token(name: &str) -> Result<String> {
    let token = std::env::var(name).ok().map(|token| token.trim().to_owned());
    token.filter(|token| !token.is_empty()).with_context(|| {
        format!(
            "the environment variable `{name}`, which `data.server.api_key_env` names, is not set; \
             hint: set it to the servers' token"
        )
    })
}

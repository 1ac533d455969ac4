//! Responses of a target that servers run: requested, written to a journal, and looked up.
//!
//! A few threads send requests (`served/client.rs`), read the answers (`served/reply.rs`) and make responses
//! of them (`served/response.rs`). An answer that gives no response of the target is a failed request. The
//! calling thread walks through the conversations and appends each response to the journal
//! (`served/journal.rs`) before anything uses it. Each response ends its conversation or moves it to the
//! next turn, so a conversation has no more responses than turns. Texts of servers are printed only after
//! `served/secret.rs` has removed the bearer token.

mod client;
mod journal;
mod known;
#[cfg(test)]
pub(crate) mod loopback;
mod protocol;
pub(crate) mod readers;
mod reply;
mod response;
mod secret;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use draftsmith_data::{FinishReason, Prompt, hash_bytes};
use draftsmith_theory::{Decoding, TopProbs};
use indicatif::HumanDuration;

use self::client::Servers;
use self::journal::{Entry, Journal};
use self::known::{KnownTokens, top_probs};
use self::protocol::{Ask, Terms};
use self::response::Received;
use self::secret::Secret;
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{SetPrompt, next_turn};
use crate::recipe::{DataRecipe, Recipe, ServerRecipe};
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

/// How often to check for an interrupt.
const TICK: Duration = Duration::from_millis(100);
/// A wait for servers that is worth a line.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// The number of other models that notes name.
const MOST_MODELS: usize = 3;
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
        let secret = self.server.api_key_env.as_deref().map(Secret::read).transpose()?;
        let secret = secret.unwrap_or_default();
        self.open_with(secret, workspace, decoding, max_new_tokens, console)
    }

    fn open_with(
        &self,
        secret: Secret,
        workspace: &Workspace,
        decoding: Decoding,
        max_new_tokens: usize,
        console: &Console,
    ) -> Result<Served> {
        let text = workspace.text_side()?;
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
            servers: Arc::new(Servers::new(self.server, secret)),
            journal,
            filtered: HashSet::new(),
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
    /// The ids of the responses that a content filter stopped.
    filtered: HashSet<String>,
}

/// A prompt that is being answered, and the answers so far.
struct OpenConversation<'p> {
    prompt: Cow<'p, SetPrompt>,
    texts: Vec<String>,
    /// Whether a content filter stopped the last answer.
    is_over: bool,
}

/// A request with the index of its conversation.
type Sent = (usize, Ask);
/// The index of a conversation, its row's id, and the response or why there is none.
type Returned = (usize, String, Result<Received, String>);

/// The threads that send requests.
struct RequestThreads {
    sender: Sender<Sent>,
    results: Receiver<Returned>,
    threads: Vec<JoinHandle<()>>,
}

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
        let requests = self.start_threads();
        let tally = self.answer_through(all.into_iter(), &requests, console, progress);
        self.servers.give_up();
        tally?.note(console);
        let num_filtered = self.filtered.len();
        if num_filtered > 0 {
            console.note(format!(
                "the servers' content filter stopped {num_filtered} responses, which are left out with \
                 the turns that follow them"
            ));
        }
        Ok(())
    }

    fn start_threads(&self) -> RequestThreads {
        let (sender, jobs) = channel::<Sent>();
        let (done, results) = channel::<Returned>();
        let jobs = Arc::new(Mutex::new(jobs));
        // A thread that waits for a stalled request is abandoned: requests cannot be cancelled.
        let start = |_| {
            let (servers, terms) = (self.servers.clone(), self.terms.clone());
            let (jobs, done, text) = (jobs.clone(), done.clone(), self.text.clone());
            std::thread::spawn(move || send_all(&servers, &terms, &text, &jobs, &done))
        };
        RequestThreads { sender, results, threads: (0..self.concurrency).map(start).collect() }
    }

    fn answer_through<'p>(
        &mut self,
        all: impl Iterator<Item = Result<Cow<'p, SetPrompt>>>,
        requests: &RequestThreads,
        console: &Console,
        progress: &Progress,
    ) -> Result<Tally> {
        let (mut tally, mut told) = (Tally::default(), None);
        let mut waiting = all.enumerate();
        let mut running: HashMap<usize, OpenConversation<'_>> = HashMap::new();
        loop {
            while running.len() < self.concurrency && !console.is_interrupted() {
                let Some((number, prompt)) = waiting.next() else { break };
                let prompt = prompt?;
                let conversation = OpenConversation { prompt, texts: Vec::new(), is_over: false };
                self.send_next(number, conversation, &mut running, &requests.sender, progress)?;
            }
            if running.is_empty() {
                break;
            }
            let (number, id, received) = match requests.results.recv_timeout(TICK) {
                Ok(received) => received,
                Err(RecvTimeoutError::Timeout) => {
                    if console.is_interrupted() {
                        self.servers.give_up();
                    }
                    if requests.threads.iter().any(JoinHandle::is_finished) {
                        bail!("a request thread panicked");
                    }
                    self.tell_wait(&mut told, progress);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the request threads ended"),
            };
            let mut conversation = running.remove(&number).context("it was running")?;
            match received {
                Ok(received) => {
                    tally.count(&received, &self.terms.model, progress);
                    self.journal.append(&received.entry)?;
                    self.advance(&mut conversation, &received.entry)?;
                }
                Err(_) if console.is_interrupted() => {}
                Err(why) => bail!("prompt `{id}`: {why}; earlier responses are kept"),
            }
            if !console.is_interrupted() {
                self.send_next(number, conversation, &mut running, &requests.sender, progress)?;
            }
        }
        if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(tally) }
    }

    /// Says that all requests wait for a server, and how long. `told` is the end of the last wait that was
    /// said.
    fn tell_wait(&self, told: &mut Option<Instant>, progress: &Progress) {
        let Some(rest) = self.servers.waiting() else {
            if told.take().is_some() {
                progress.message("");
            }
            return;
        };
        if told.replace(rest.until) == Some(rest.until) {
            return;
        }
        let wait = rest.until.saturating_duration_since(Instant::now());
        progress.message(format!("waiting {} for the servers", HumanDuration(wait)));
        if wait >= LONG_WAIT || rest.requested.is_some() {
            let requested = rest.requested.map_or_else(String::new, |requested| {
                format!(
                    " and requested a wait of {}, more than `data.server.timeout_s`",
                    HumanDuration(requested)
                )
            });
            progress.print(&format!(
                "{}{requested}; the next request follows in {}",
                rest.why,
                HumanDuration(wait)
            ));
        }
    }

    /// Sends a conversation's next request, if there is one.
    fn send_next<'p>(
        &mut self,
        number: usize,
        mut conversation: OpenConversation<'p>,
        running: &mut HashMap<usize, OpenConversation<'p>>,
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
    fn next_ask(&mut self, conversation: &mut OpenConversation<'_>) -> Result<Option<Ask>> {
        loop {
            let OpenConversation { prompt, texts, is_over } = &*conversation;
            let number = texts.len();
            let turn = match &**prompt {
                _ if *is_over => None,
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
            self.advance(conversation, &Entry { id, ..entry })?;
        }
    }

    /// Moves a conversation to the turn after a response, or ends it.
    fn advance(&mut self, conversation: &mut OpenConversation<'_>, entry: &Entry) -> Result<()> {
        if entry.is_filtered() {
            self.filtered.insert(entry.id.clone());
            conversation.is_over = true;
        } else {
            conversation.texts.push(self.text.tokenizer.decode(&entry.response_ids, true)?);
        }
        Ok(())
    }

    /// The number of responses that a content filter stopped.
    pub(crate) fn num_filtered(&self) -> usize {
        self.filtered.len()
    }

    /// A prompt without its turns from the first on whose response a content filter stopped; `None` if no
    /// turn is left.
    pub(crate) fn unfiltered(&self, prompt: &Prompt) -> Option<Prompt> {
        let is_kept = |turn: &usize| !self.filtered.contains(&prompt.row_id(*turn));
        let num_turns = (0..prompt.turns.len()).take_while(is_kept).count();
        let turns = prompt.turns[..num_turns].to_vec();
        (num_turns > 0).then(|| Prompt { turns, ..prompt.clone() })
    }

    /// Likewise for a prompt of a set.
    pub(crate) fn unfiltered_of_set(&self, prompt: &SetPrompt) -> Option<SetPrompt> {
        match prompt {
            SetPrompt::Conversation(prompt) => self.unfiltered(prompt).map(SetPrompt::Conversation),
            SetPrompt::HeldOut { id, .. } => (!self.filtered.contains(id)).then(|| prompt.clone()),
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
}

/// Counts of new responses, for a note at the end.
#[derive(Default)]
struct Tally {
    num_new: usize,
    num_texts: usize,
    num_other_prompts: usize,
    /// The first names that servers gave their model other than the requested one.
    other_models: Vec<String>,
}

impl Tally {
    /// Counts a response, and notes a model's name that differs from the requested one.
    fn count(&mut self, received: &Received, model: &str, progress: &Progress) {
        self.num_new += 1;
        self.num_texts += usize::from(received.is_text);
        self.num_other_prompts += usize::from(received.has_other_prompt);
        if let Some(other) = &received.other_model
            && self.other_models.len() < MOST_MODELS
            && !self.other_models.contains(other)
        {
            progress.print(&format!(
                "a server calls its model `{other}`, and `{model}` was requested; check that it is \
                 `models.target`"
            ));
            self.other_models.push(other.clone());
        }
    }

    fn note(&self, console: &Console) {
        let Self { num_new, num_texts, num_other_prompts, .. } = self;
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
    done: &Sender<Returned>,
) {
    loop {
        let next = jobs.lock().expect(HELD).recv();
        let Ok((number, ask)) = next else { return };
        let received = servers.complete(&ask, terms, text);
        // Fails only if the receiver has given up.
        let _ = done.send((number, ask.id, received));
    }
}

//! Responses of a target that servers run: requested, written to a journal, and looked up.
//!
//! A few threads send requests (`client.rs`), read the answers (`reply.rs`) and make responses
//! of them (`response.rs`). An answer that gives no response of the target is a failed request. The
//! calling thread walks through the conversations and appends each response to the journal
//! (`journal.rs`) before anything uses it. Each response ends its conversation or moves it to the
//! next turn, so a conversation has no more responses than turns. Texts of servers are printed only after
//! `secret.rs` has removed the bearer token.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use draftsmith_data::{FinishReason, TextTokenizer, hash_bytes};
use draftsmith_theory::{Decoding, TextEnd, TopProbs};

use super::client::Servers;
use super::journal::{Entry, Journal};
use super::known::{KnownTokens, top_probs};
use super::protocol::{Ask, Terms};
use super::response::Received;
use super::{HELD, Secret, ServedError, ServerRecipe};

/// How often to check for an interrupt.
const TICK: Duration = Duration::from_millis(100);
/// The number of other models that notes name.
const MOST_MODELS: usize = 3;

/// The target as this machine knows it, and how it decodes.
#[derive(Debug, Clone)]
pub struct TargetSettings {
    /// The target's tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// The tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// The strings that end one.
    pub stop_strings: Vec<String>,
    /// Finds `stop_strings` in token ids, if there are any.
    pub text_end: Option<Arc<dyn TextEnd + Send + Sync>>,
    /// The target's vocabulary size.
    pub vocab_size: usize,
    /// The longest sequence, in tokens, that all models can read.
    pub context: usize,
    /// How the servers are to decode.
    pub decoding: Decoding,
    /// The most tokens of a response.
    pub max_new_tokens: usize,
    /// The seed of sampled responses.
    pub seed: u64,
}

/// Shows a job's user what servers do, and says when to stop.
pub trait Listener {
    /// Returns whether to stop. What was requested by then is still awaited and kept.
    fn is_interrupted(&self) -> bool;
    /// Reports that all responses to another prompt are there.
    fn advance(&self);
    /// Shows a line to the user.
    fn note(&self, line: &str);
    /// Reports that all requests wait for a server; `None` once they go on.
    fn wait(&self, wait: Option<Wait>);
}

/// A wait of all requests.
#[derive(Debug, Clone)]
pub struct Wait {
    /// The failure before it, without the bearer token.
    pub why: String,
    /// Until the next request.
    pub length: Duration,
    /// The wait that the server requested, if it is longer than `data.server.timeout_s`.
    pub requested: Option<Duration>,
}

/// A turn of a conversation, to be answered.
#[derive(Debug, Clone)]
pub struct ServedTurn {
    /// The id of its row.
    pub id: String,
    /// The token ids of the conversation up to where the answer begins.
    pub prompt_ids: Vec<u32>,
}

/// A served target's response.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedResponse {
    /// Its token ids.
    pub ids: Vec<u32>,
    /// Why it ends.
    pub finish: FinishReason,
    /// The known part of each token's distribution, if log-probabilities were requested.
    pub probs: Option<Vec<TopProbs>>,
}

/// A target that servers run, with its responses so far.
pub struct Served {
    target: Arc<TargetSettings>,
    terms: Arc<Terms>,
    concurrency: usize,
    servers: Arc<Servers>,
    journal: Journal,
    /// The ids of the responses that a content filter stopped.
    filtered: HashSet<String>,
}

/// A prompt that is being answered, and the answers so far.
struct OpenConversation<P> {
    prompt: P,
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

/// What `answer` was given, with the channel to its threads.
struct Job<'a, L, N> {
    next: N,
    listener: &'a L,
    sender: &'a Sender<Sent>,
}

impl Served {
    /// Opens the target that servers run, with the responses in the journal.
    ///
    /// # Errors
    /// If the journal cannot be read or written.
    pub fn open(
        server: &ServerRecipe,
        secret: Secret,
        target: TargetSettings,
        journal: &Path,
    ) -> Result<Self, ServedError> {
        let terms = Terms {
            model: server.model.clone(),
            decoding: target.decoding,
            eos_token_ids: target.eos_token_ids.clone(),
            stop_strings: target.stop_strings.clone(),
            vocab_size: target.vocab_size,
            log_probs: server.log_probs(&target.decoding),
        };
        Ok(Self {
            target: Arc::new(target),
            terms: Arc::new(terms),
            concurrency: server.concurrency,
            servers: Arc::new(Servers::new(server, secret)),
            journal: Journal::open(journal)?,
            filtered: HashSet::new(),
        })
    }

    /// The number of lines of the journal that cannot be read. Their responses are requested again.
    pub fn num_broken(&self) -> usize {
        self.journal.num_broken
    }

    /// Requests all responses that the journal lacks and writes them down. Prompts are read as they are
    /// sent. `next` returns a prompt's turn after those with the given answers, or `None` at its end.
    ///
    /// # Errors
    /// If a prompt is an error, `next` fails, a request fails after all retries, the journal cannot be
    /// written, or the job is interrupted.
    pub fn answer<P, E: From<ServedError>>(
        &mut self,
        all: impl IntoIterator<Item = Result<P, E>>,
        next: impl Fn(&P, &[String]) -> Result<Option<ServedTurn>, E>,
        listener: &impl Listener,
    ) -> Result<(), E> {
        let requests = self.start_threads();
        let job = Job { next, listener, sender: &requests.sender };
        let tally = self.answer_through(all.into_iter(), &requests, &job);
        self.servers.give_up();
        tally?.note(listener);
        let num_filtered = self.filtered.len();
        if num_filtered > 0 {
            listener.note(&format!(
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
            let (jobs, done, target) = (jobs.clone(), done.clone(), self.target.clone());
            std::thread::spawn(move || send_all(&servers, &terms, &target, &jobs, &done))
        };
        RequestThreads { sender, results, threads: (0..self.concurrency).map(start).collect() }
    }

    fn answer_through<P, E: From<ServedError>>(
        &mut self,
        all: impl Iterator<Item = Result<P, E>>,
        requests: &RequestThreads,
        job: &Job<'_, impl Listener, impl Fn(&P, &[String]) -> Result<Option<ServedTurn>, E>>,
    ) -> Result<Tally, E> {
        let (mut tally, mut told) = (Tally::default(), None);
        let mut waiting = all.enumerate();
        let mut running: HashMap<usize, OpenConversation<P>> = HashMap::new();
        let is_interrupted = || job.listener.is_interrupted();
        loop {
            while running.len() < self.concurrency && !is_interrupted() {
                let Some((number, prompt)) = waiting.next() else { break };
                let prompt = prompt?;
                let conversation = OpenConversation { prompt, texts: Vec::new(), is_over: false };
                self.send_next(number, conversation, &mut running, job)?;
            }
            if running.is_empty() {
                break;
            }
            let (number, id, received) = match requests.results.recv_timeout(TICK) {
                Ok(received) => received,
                Err(RecvTimeoutError::Timeout) => {
                    if is_interrupted() {
                        self.servers.give_up();
                    }
                    if requests.threads.iter().any(JoinHandle::is_finished) {
                        return Err(ServedError::Panicked.into());
                    }
                    self.tell_wait(&mut told, job.listener);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Err(ServedError::Panicked.into()),
            };
            let mut conversation = running.remove(&number).expect("it was running");
            match received {
                Ok(received) => {
                    tally.count(&received, &self.terms.model, job.listener);
                    self.journal.append(&received.entry).map_err(ServedError::from)?;
                    self.advance(&mut conversation, &received.entry)?;
                }
                Err(_) if is_interrupted() => {}
                Err(problem) => return Err(ServedError::NoResponse { id, problem }.into()),
            }
            if !is_interrupted() {
                self.send_next(number, conversation, &mut running, job)?;
            }
        }
        if is_interrupted() { Err(ServedError::Interrupted.into()) } else { Ok(tally) }
    }

    /// Says that all requests wait for a server. `told` is the end of the last wait that was said.
    fn tell_wait(&self, told: &mut Option<Instant>, listener: &impl Listener) {
        let Some(rest) = self.servers.waiting() else {
            if told.take().is_some() {
                listener.wait(None);
            }
            return;
        };
        if told.replace(rest.until) != Some(rest.until) {
            let length = rest.until.saturating_duration_since(Instant::now());
            listener.wait(Some(Wait { why: rest.why, length, requested: rest.requested }));
        }
    }

    /// Sends a conversation's next request, if there is one.
    fn send_next<P, E: From<ServedError>>(
        &mut self,
        number: usize,
        mut conversation: OpenConversation<P>,
        running: &mut HashMap<usize, OpenConversation<P>>,
        job: &Job<'_, impl Listener, impl Fn(&P, &[String]) -> Result<Option<ServedTurn>, E>>,
    ) -> Result<(), E> {
        match self.next_ask(&mut conversation, &job.next)? {
            Some(ask) => {
                // Cannot fail: `answer` holds the receiver too.
                let _ = job.sender.send((number, ask));
                running.insert(number, conversation);
            }
            None => job.listener.advance(),
        }
        Ok(())
    }

    /// Finds a conversation's next request that the journal does not answer; `None` if there is none,
    /// or a content filter ended the conversation.
    fn next_ask<P, E: From<ServedError>>(
        &mut self,
        conversation: &mut OpenConversation<P>,
        next: impl Fn(&P, &[String]) -> Result<Option<ServedTurn>, E>,
    ) -> Result<Option<Ask>, E> {
        while !conversation.is_over
            && let Some(turn) = next(&conversation.prompt, &conversation.texts)?
        {
            let ServedTurn { id, prompt_ids } = turn;
            let ask = self.ask(&id, &prompt_ids);
            let Some(entry) = self.written(&ask)? else { return Ok(Some(ask)) };
            self.advance(conversation, &Entry { id, ..entry })?;
        }
        Ok(None)
    }

    /// Moves a conversation to the turn after a response, or ends it.
    fn advance<P>(
        &mut self,
        conversation: &mut OpenConversation<P>,
        entry: &Entry,
    ) -> Result<(), ServedError> {
        if entry.is_filtered() {
            self.filtered.insert(entry.id.clone());
            conversation.is_over = true;
        } else {
            conversation.texts.push(self.target.tokenizer.decode(&entry.response_ids, true)?);
        }
        Ok(())
    }

    /// The number of responses that a content filter stopped.
    pub fn num_filtered(&self) -> usize {
        self.filtered.len()
    }

    /// Returns whether a content filter stopped the response to a row.
    pub fn is_filtered(&self, id: &str) -> bool {
        self.filtered.contains(id)
    }

    /// Reads the journal's response to a request. Edited entries that the target cannot have produced
    /// are ignored, so that we request them again.
    fn written(&self, ask: &Ask) -> Result<Option<Entry>, ServedError> {
        let entry = self.journal.get(&self.terms.identity(ask))?;
        Ok(entry.filter(|entry| entry.is_sound(self.terms.vocab_size)))
    }

    fn ask(&self, id: &str, prompt_ids: &[u32]) -> Ask {
        let room = self.target.context.saturating_sub(prompt_ids.len());
        // Non-negative in 32 bits, which every server accepts.
        let hash = hash_bytes(format!("{} {id} served", self.target.seed).as_bytes());
        let seed = u32::from_str_radix(&hash[..8], 16).expect("it is hex") >> 1;
        let (id, prompt_ids) = (id.to_owned(), prompt_ids.to_vec());
        Ask { id, prompt_ids, max_tokens: room.min(self.target.max_new_tokens), seed }
    }

    /// Reads the response to a turn from the journal.
    ///
    /// # Errors
    /// If it was never requested, or cannot be read back.
    pub fn response(&self, id: &str, prompt_ids: &[u32]) -> Result<ServedResponse, ServedError> {
        let entry = self.written(&self.ask(id, prompt_ids))?;
        let finished = entry.and_then(|entry| {
            let finish = FinishReason::parse(&entry.finish_reason)?;
            Some((finish, entry.response_ids, entry.known))
        });
        let (finish, ids, known) =
            finished.ok_or_else(|| ServedError::NotRequested { id: id.to_owned() })?;
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
    fn count(&mut self, received: &Received, model: &str, listener: &impl Listener) {
        self.num_new += 1;
        self.num_texts += usize::from(received.is_text);
        self.num_other_prompts += usize::from(received.has_other_prompt);
        if let Some(other) = &received.other_model
            && self.other_models.len() < MOST_MODELS
            && !self.other_models.contains(other)
        {
            listener.note(&format!(
                "a server calls its model `{other}`, and `{model}` was requested; check that it is \
                 `models.target`"
            ));
            self.other_models.push(other.clone());
        }
    }

    fn note(&self, listener: &impl Listener) {
        let Self { num_new, num_texts, num_other_prompts, .. } = self;
        if *num_texts > 0 {
            listener.note(&format!(
                "{num_texts} of {num_new} responses arrived as text and were tokenised here, so some \
                 tokens may differ from the target's; vLLM, SGLang and llama.cpp return token ids"
            ));
        }
        if *num_other_prompts > 0 {
            listener.note(&format!(
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
    target: &TargetSettings,
    jobs: &Mutex<Receiver<Sent>>,
    done: &Sender<Returned>,
) {
    loop {
        let next = jobs.lock().expect(HELD).recv();
        let Ok((number, ask)) = next else { return };
        let received = servers.complete(&ask, terms, target);
        // Fails only if the receiver has given up.
        let _ = done.send((number, ask.id, received));
    }
}

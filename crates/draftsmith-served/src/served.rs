//! Requests the missing responses from the servers that run the target, and records them in a
//! journal.
//!
//! Worker threads send requests (`client.rs`), parse the answers (`reply.rs`) and convert them to
//! responses (`response.rs`). An answer that cannot be a response of the target counts as a failed
//! request. The calling thread walks through the conversations, and appends each response to the
//! journal (`journal.rs`) before using it. Each response ends its conversation or moves it to the
//! next turn. Messages quote text from servers only after `secret.rs` has removed the bearer token.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use draftsmith_data::{FinishReason, TextTokenizer, hash_bytes};
use draftsmith_theory::{Decoding, TextEnd, TopProbs};

use super::client::Servers;
use super::journal::{Entry, FILTERED, INEXACT, Journal};
use super::known::{KnownTokens, top_probs};
use super::protocol::{Ask, Terms};
use super::response::Received;
use super::threads::start_all;
use super::{HELD, Result, Secret, ServedError, ServerHints, ServerRecipe};

/// The interval between checks for an interrupt.
const TICK: Duration = Duration::from_millis(100);
/// The maximum number of unexpected model names to report.
const MOST_MODELS: usize = 3;

/// The target's tokenizer, limits and decoding settings.
#[derive(Debug, Clone)]
pub struct TargetSettings {
    /// The target's tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// The end-of-sequence token ids.
    pub eos_token_ids: Vec<u32>,
    /// The strings that end a response.
    pub stop_strings: Vec<String>,
    /// A matcher that finds `stop_strings` in token ids; `None` if there are no stop strings.
    pub text_end: Option<Arc<dyn TextEnd + Send + Sync>>,
    /// The target's vocabulary size.
    pub vocab_size: usize,
    /// The maximum length of a prompt with its response, in tokens.
    pub context: usize,
    /// The way the servers decode: greedy or sampled, and any repetition penalty.
    pub decoding: Decoding,
    /// The maximum number of tokens in a response.
    pub max_new_tokens: usize,
    /// The seed of sampled responses.
    pub seed: u64,
}

/// A caller's interface to running requests: it reports progress to the user and can stop the work.
pub trait Listener {
    /// Returns whether to stop. Requests under way are still awaited, and their responses kept.
    fn is_interrupted(&self) -> bool;
    /// Reports that one more conversation is complete.
    fn advance(&self);
    /// Shows one line of text to the user.
    fn note(&self, line: &str);
    /// Reports that all servers are paused after failures; `None` reports that requests continue.
    fn wait(&self, wait: Option<Wait>);
}

/// A pause in which a server gets no requests, because it has failed recently.
#[derive(Debug, Clone)]
pub struct Wait {
    /// The failure that caused the pause, without the bearer token.
    pub why: String,
    /// The time of the next request.
    pub until: Instant,
    /// The wait that the server requested (`retry-after`), if longer than the timeout.
    pub requested: Option<Duration>,
}

/// A conversation turn for the target to answer.
#[derive(Debug, Clone)]
pub struct ServedTurn {
    /// The id of the turn's row.
    pub id: String,
    /// The token ids of the conversation up to the answer.
    pub prompt_ids: Vec<u32>,
}

/// A response of the target on a server.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedResponse {
    /// The response's token ids.
    pub ids: Vec<u32>,
    /// The reason why the response ends.
    pub finish: FinishReason,
    /// The known part of the distribution that each token was drawn from; `None` if
    /// log-probabilities were not requested.
    pub probs: Option<Vec<TopProbs>>,
}

/// A target on servers, with the journal of its responses.
pub struct Served {
    target: Arc<TargetSettings>,
    terms: Arc<Terms>,
    concurrency: usize,
    servers: Arc<Servers>,
    journal: Journal,
    /// The ids of the rows whose responses are left out, with the reasons.
    left_out: HashMap<String, String>,
}

/// An unfinished conversation: its prompt and the texts of the answers so far.
struct OpenConversation<P> {
    prompt: P,
    texts: Vec<String>,
    /// Whether the last answer is left out.
    is_over: bool,
}

/// A request with the index of its conversation.
type Sent = (usize, Ask);
/// The index of a conversation, its row's id, and the response or a description of the failure.
type Returned = (usize, String, Result<Received, String>);

/// The threads that send requests.
struct RequestThreads {
    sender: Sender<Sent>,
    results: Receiver<Returned>,
    threads: Vec<JoinHandle<()>>,
}

/// The arguments of [`Served::answer`], with the channel to the request threads.
struct Job<'a, L, N> {
    next: N,
    listener: &'a L,
    sender: &'a Sender<Sent>,
}

impl Served {
    /// Opens the journal at `journal` and creates the servers' clients. Sends no request.
    ///
    /// # Errors
    /// If the journal cannot be read or written.
    pub fn open(
        server: &ServerRecipe,
        secret: Secret,
        target: TargetSettings,
        journal: &Path,
        hints: ServerHints,
    ) -> Result<Self> {
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
            servers: Arc::new(Servers::new(server, secret, hints)),
            journal: Journal::open(journal)?,
            left_out: HashMap::new(),
        })
    }

    /// Returns the number of unreadable lines in the journal. Their responses are requested again.
    pub fn num_broken(&self) -> usize {
        self.journal.num_broken
    }

    /// Requests all responses that the journal lacks, and appends them to it. Prompts are taken
    /// from `all` lazily. `next` returns the turn that follows the given answers, or `None` at the
    /// end of the conversation.
    ///
    /// # Errors
    /// If an item of `all` is an error, `next` fails, a request fails after all retries, the
    /// journal cannot be written, or the listener interrupts.
    pub fn answer<P, E: From<ServedError>>(
        &mut self,
        all: impl IntoIterator<Item = Result<P, E>>,
        next: impl Fn(&P, &[String]) -> Result<Option<ServedTurn>, E>,
        listener: &impl Listener,
    ) -> Result<(), E> {
        let requests = self.start_threads()?;
        let job = Job { next, listener, sender: &requests.sender };
        let tally = self.answer_through(all.into_iter(), &requests, &job);
        self.servers.give_up();
        if let Some(left) = self.servers.sweep() {
            listener.note(&left);
        }
        tally?.note(listener);
        for (why, said) in [(FILTERED, OF_FILTER), (INEXACT, OF_TEXTS)] {
            let num = self.left_out.values().filter(|reason| *reason == why).count();
            if num > 0 {
                listener.note(&format!(
                    "{num} responses {said} are left out with the turns that follow them"
                ));
            }
        }
        Ok(())
    }

    fn start_threads(&self) -> Result<RequestThreads> {
        let (sender, jobs) = channel::<Sent>();
        let (done, results) = channel::<Returned>();
        let jobs = Arc::new(Mutex::new(jobs));
        // A thread that waits for a stalled request is abandoned, because requests cannot be
        // cancelled.
        let start = || {
            let (servers, terms) = (self.servers.clone(), self.terms.clone());
            let (jobs, done, target) = (jobs.clone(), done.clone(), self.target.clone());
            Builder::new().spawn(move || {
                loop {
                    let next = jobs.lock().expect(HELD).recv();
                    let Ok((number, ask)) = next else { return };
                    let received = servers.complete(&ask, &terms, &target);
                    // Sending fails only if the job has ended, and then nobody needs the response.
                    let _ = done.send((number, ask.id, received));
                }
            })
        };
        let threads = start_all(self.concurrency, start)?;
        Ok(RequestThreads { sender, results, threads })
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
                Err(problem) => {
                    let message = format!("prompt `{id}`: {problem}; earlier responses are kept");
                    return Err(ServedError::Invalid(message).into());
                }
            }
            if !is_interrupted() {
                self.send_next(number, conversation, &mut running, job)?;
            }
        }
        if is_interrupted() { Err(ServedError::Interrupted.into()) } else { Ok(tally) }
    }

    /// Reports a pause of all servers to the listener once. `told` is the end of the pause that was
    /// reported last.
    fn tell_wait(&self, told: &mut Option<Instant>, listener: &impl Listener) {
        let Some(rest) = self.servers.waiting() else {
            if told.take().is_some() {
                listener.wait(None);
            }
            return;
        };
        if told.replace(rest.until) != Some(rest.until) {
            listener.wait(Some(rest));
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
                // Sending cannot fail while `answer` holds the request threads, which keep the
                // receiver.
                let _ = job.sender.send((number, ask));
                running.insert(number, conversation);
            }
            None => job.listener.advance(),
        }
        Ok(())
    }

    /// Returns a conversation's next request that the journal does not answer; `None` if the
    /// conversation is complete or a content filter ended it.
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

    /// Adds a response to its conversation. A response that is left out ends the conversation.
    fn advance<P>(&mut self, conversation: &mut OpenConversation<P>, entry: &Entry) -> Result<()> {
        if entry.is_left_out() {
            self.left_out.insert(entry.id.clone(), entry.finish_reason.clone());
            conversation.is_over = true;
        } else {
            conversation.texts.push(self.target.tokenizer.decode(&entry.response_ids, true)?);
        }
        Ok(())
    }

    /// Returns the number of responses that are left out: a content filter stopped them, or their
    /// text is not what the target wrote.
    pub fn num_left_out(&self) -> usize {
        self.left_out.len()
    }

    /// Returns whether the response to a row is left out.
    pub fn is_left_out(&self, id: &str) -> bool {
        self.left_out.contains_key(id)
    }

    /// Reads the journal's response to a request, if there is one. Ignores entries that the target
    /// cannot have produced (the file may have been edited), so that they are requested again.
    fn written(&self, ask: &Ask) -> Result<Option<Entry>> {
        let entry = self.journal.get(&self.terms.identity(ask))?;
        Ok(entry.filter(|entry| entry.is_sound(self.terms.vocab_size)))
    }

    fn ask(&self, id: &str, prompt_ids: &[u32]) -> Ask {
        let room = self.target.context.saturating_sub(prompt_ids.len());
        // The seed is a non-negative 32-bit integer, which every server accepts.
        let hash = hash_bytes(format!("{} {id} served", self.target.seed).as_bytes());
        let seed = u32::from_str_radix(&hash[..8], 16).expect("it is hex") >> 1;
        let (id, prompt_ids) = (id.to_owned(), prompt_ids.to_vec());
        Ask { id, prompt_ids, max_tokens: room.min(self.target.max_new_tokens), seed }
    }

    /// Reads the response to a turn from the journal.
    ///
    /// # Errors
    /// If the response is not in the journal or is left out, or the file cannot be read.
    pub fn response(&self, id: &str, prompt_ids: &[u32]) -> Result<ServedResponse> {
        let entry = self.written(&self.ask(id, prompt_ids))?;
        let finished = entry.and_then(|entry| {
            let finish = FinishReason::parse(&entry.finish_reason)?;
            Some((finish, entry.response_ids, entry.known))
        });
        let (finish, ids, known) = finished.ok_or_else(|| {
            ServedError::Invalid(format!("the journal has no response to `{id}`"))
        })?;
        let num_requested = self.terms.log_probs.unwrap_or(0);
        let probs_at = |(id, known): (&u32, KnownTokens)| top_probs(*id, known, num_requested);
        let probs = known.map(|known| ids.iter().zip(known).map(probs_at).collect());
        Ok(ServedResponse { ids, finish, probs })
    }
}

const OF_FILTER: &str = "that the servers' content filter stopped";
const OF_TEXTS: &str = "whose texts are not what the target wrote (characters are replaced, the prompt is repeated, or the \
                        tokens are not as many as counted)";
/// The kinds of responses that are kept and told.
const KINDS: [&str; 4] = [
    "arrived as text and were tokenised here, so some tokens may differ from the target's; vLLM, SGLang and llama.cpp \
     return token ids",
    "are to prompts in which the servers counted another number of tokens: their tokenizer differs from the target's, or \
     adds tokens",
    "were ended by stop strings or tokens of the servers' own, and have no end token; start the servers without them, or \
     list the tokens in the target's `generation_config.json`",
    "have fewer token ids than the servers counted in `usage`",
];

/// The counts of new responses, for messages to the user.
#[derive(Default)]
struct Tally {
    num_new: usize,
    /// The numbers of responses of the kinds in [`KINDS`].
    nums: [usize; KINDS.len()],
    /// The first few model names that servers reported instead of the requested one.
    other_models: Vec<String>,
}

impl Tally {
    /// Counts a response, and reports a model name that differs from the requested one.
    fn count(&mut self, received: &Received, model: &str, listener: &impl Listener) {
        self.num_new += 1;
        let Received { is_text, has_other_prompt, is_stopped, lacks_ids, .. } = *received;
        for (num, is_one) in
            self.nums.iter_mut().zip([is_text, has_other_prompt, is_stopped, lacks_ids])
        {
            *num += usize::from(is_one);
        }
        if let Some(other) = &received.other_model
            && self.other_models.len() < MOST_MODELS
            && !self.other_models.contains(other)
        {
            listener.note(&format!(
                "a server calls its model `{other}`, and `{model}` was requested; check that it is \
                 the target"
            ));
            self.other_models.push(other.clone());
        }
    }

    fn note(&self, listener: &impl Listener) {
        for (num, what) in self.nums.iter().zip(KINDS).filter(|(num, _)| **num > 0) {
            listener.note(&format!("{num} of {} responses {what}", self.num_new));
        }
    }
}

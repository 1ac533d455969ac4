//! Parsing of servers' answers while they arrive, up to the maximum length that an answer to the
//! request can have.
//!
//! Keys that we do not use are skipped, so the request bounds memory and time.

use std::fmt;
use std::io::{self, BufReader, Read};
use std::marker::PhantomData;

use draftsmith_files::in_bytes;
use serde::de::{DeserializeOwned, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::error::Category;

use super::known::{KnownTokens, LogProbLists};
use super::protocol::{Ask, Terms};

/// The allowance in bytes for everything in an answer except tokens, such as settings and timings.
const OTHER_BYTES: u64 = 1 << 16;
/// The allowance in bytes per prompt token, since llama.cpp returns the prompt as text.
const PROMPT_TOKEN_BYTES: u64 = 256;
/// The allowance in bytes per response token for its text and id. llama.cpp returns both twice.
pub(super) const TOKEN_BYTES: u64 = 1024;
/// The allowance in bytes per log-probability, with the token's text and bytes. llama.cpp returns
/// each twice.
const LOG_PROB_BYTES: u64 = 384;
/// The number of leading bytes that are kept for error messages.
const START_BYTES: usize = 4096;

/// Returns the maximum length of an answer to a request, in bytes. Parsing takes less than ten
/// times as much memory.
pub(super) fn most_bytes(ask: &Ask, terms: &Terms) -> u64 {
    let log_probs = terms.log_probs.map_or(0, |num| LOG_PROB_BYTES * (num as u64 + 1));
    OTHER_BYTES
        + PROMPT_TOKEN_BYTES * ask.prompt_ids.len() as u64
        + (TOKEN_BYTES + log_probs) * ask.max_tokens as u64
}

/// Returns the maximum length of an answer with hidden states of `num_tokens` tokens, which lists
/// `num_log_probs` log-probabilities for each of them.
pub(super) fn states_bytes(num_tokens: usize, num_log_probs: usize) -> u64 {
    let of_token = PROMPT_TOKEN_BYTES + LOG_PROB_BYTES * (num_log_probs as u64 + 1);
    OTHER_BYTES + of_token * num_tokens as u64
}

/// A response body that can be read up to a limit. It keeps its beginning for error messages.
pub(super) struct BoundedBody<R> {
    inner: R,
    most: u64,
    num_read: u64,
    start: Vec<u8>,
    is_over: bool,
    is_at_end: bool,
}

impl<R: Read> BoundedBody<R> {
    pub(super) fn new(inner: R, most: u64) -> Self {
        Self { inner, most, num_read: 0, start: Vec::new(), is_over: false, is_at_end: false }
    }

    /// Returns the beginning of the body, and whether more may follow it.
    pub(super) fn start(&self) -> (&[u8], bool) {
        (&self.start, !self.is_at_end || self.num_read > self.start.len() as u64)
    }
}

impl<R: Read> Read for BoundedBody<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.most - self.num_read;
        if left == 0 {
            // The parser may read again after an error.
            self.is_over = self.is_over || self.inner.read(&mut [0])? > 0;
            self.is_at_end = !self.is_over;
            return if self.is_over { Err(io::Error::other("it is too long")) } else { Ok(0) };
        }
        let length = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let num_bytes = self.inner.read(&mut buffer[..length])?;
        self.is_at_end = num_bytes == 0 && length > 0;
        self.num_read += num_bytes as u64;
        let to_keep = num_bytes.min(START_BYTES - self.start.len());
        self.start.extend_from_slice(&buffer[..to_keep]);
        Ok(num_bytes)
    }
}

/// A parsed answer of a server.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Completion {
    pub(super) tokens: Tokens,
    /// The known log-probabilities at each position; `None` if they were not requested.
    pub(super) known: Option<Vec<KnownTokens>>,
    pub(super) ending: ReplyEnding,
    /// The end-of-sequence token, if the server names it separately.
    pub(super) ended_by: Option<u32>,
    /// What the server says ended the completion, if that is not an end-of-sequence token; empty if
    /// it gives no name.
    pub(super) stopped_by: Option<String>,
    /// The number of prompt tokens that the server counted, if given.
    pub(super) num_prompt_tokens: Option<usize>,
    /// The number of response tokens: of the received ids, or for text the server's count, if
    /// given.
    pub(super) num_tokens: Option<usize>,
    /// Whether the server counted at least two more response tokens than it sent ids.
    pub(super) lacks_ids: bool,
    /// The server's name for its model, if given.
    pub(super) model: Option<String>,
    /// The file in which the server stores hidden states, if it does.
    pub(super) states_path: Option<String>,
    /// The numbers of drafted and accepted candidates, if the server gives them.
    pub(super) speculated: Option<[f64; 2]>,
}

/// A completion's tokens as the server sent them.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tokens {
    Ids(Vec<u32>),
    Text(String),
}

/// The reason why a completion ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyEnding {
    /// An end-of-sequence token was generated.
    Stop,
    /// The token limit was reached.
    Length,
    /// A content filter stopped the completion.
    ContentFilter,
}

/// The reason why an answer is unusable.
#[derive(Debug)]
pub(super) enum Unusable {
    /// A broken connection or a timeout.
    Broken(io::Error),
    /// An answer in an unknown format. The error message also quotes its beginning.
    Foreign(&'static str),
    /// An answer with an invalid value, with a description of the problem.
    Invalid(String),
    /// An answer that claims to have reached the token limit, but has only this many tokens.
    CutShort(usize),
}

/// Parses and checks a server's answer to `ask`.
///
/// # Errors
/// If the answer is unusable.
pub(super) fn read(
    body: &mut BoundedBody<impl Read>,
    ask: &Ask,
    terms: &Terms,
) -> Result<Completion, Unusable> {
    match terms.log_probs {
        None => parse::<Reply<IgnoredAny>>(body, ask.max_tokens)?
            .completion(ask, terms, |_, _| Ok(None)),
        Some(_) => parse::<Reply<LogProbLists>>(body, ask.max_tokens)?.completion(
            ask,
            terms,
            |lists, ids| lists.unwrap_or_default().known(ids, terms.vocab_size).map(Some),
        ),
    }
}

/// Parses an answer about `num_tokens` tokens.
///
/// # Errors
/// If it is not such JSON, or too long.
pub(super) fn parse<T: DeserializeOwned>(
    body: &mut BoundedBody<impl Read>,
    num_tokens: usize,
) -> Result<T, Unusable> {
    serde_json::from_reader(BufReader::new(&mut *body)).map_err(|error| match error.classify() {
        Category::Io if body.is_over => Unusable::Invalid(format!(
            "more than {}, the most that we read for {num_tokens} tokens",
            in_bytes(body.most)
        )),
        Category::Io => Unusable::Broken(error.into()),
        Category::Data => Unusable::Invalid(format!("JSON of another form: {error}")),
        Category::Syntax | Category::Eof => Unusable::Foreign("something other than JSON"),
    })
}

/// The keys of an answer that we use. `L` is the type that log-probabilities are parsed into.
#[derive(Deserialize)]
#[serde(bound = "L: Deserialize<'de>")]
struct Reply<L> {
    model: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    choices: Option<ReplyChoices<L>>,
    usage: Option<ReplyUsage>,
    timings: Option<ReplyTimings>,
    kv_transfer_params: Option<StatesPlace>,
    #[serde(rename = "__verbose")]
    verbose: Option<VerboseReply>,
}

/// The keys of vLLM's `kv_transfer_params` that we use.
#[derive(Deserialize)]
pub(super) struct StatesPlace {
    pub(super) hidden_states_path: Option<String>,
}

/// The counters in llama.cpp's `timings`, which it leaves out if it drafted nothing.
#[derive(Deserialize)]
struct ReplyTimings {
    draft_n: Option<ReplyCount>,
    draft_n_accepted: Option<ReplyCount>,
}

#[derive(Deserialize)]
struct ReplyUsage {
    prompt_tokens: Option<ReplyCount>,
    completion_tokens: Option<ReplyCount>,
}

/// A number of tokens, which some servers write as a float. Anything else is as good as none.
#[derive(Deserialize)]
#[serde(untagged)]
enum ReplyCount {
    Number(f64),
    Other(IgnoredAny),
}

impl ReplyCount {
    fn whole(&self) -> Option<usize> {
        match self {
            Self::Number(number) if *number >= 0.0 && number.fract() == 0.0 => {
                Some(*number as usize)
            }
            Self::Number(_) | Self::Other(_) => None,
        }
    }
}

/// The object `__verbose` of llama.cpp.
#[derive(Deserialize)]
struct VerboseReply {
    tokens: Option<Vec<u32>>,
    stopping_word: Option<StopReason>,
}

#[derive(Deserialize)]
#[serde(bound = "L: Deserialize<'de>")]
struct ReplyChoice<L> {
    index: Option<u64>,
    text: Option<String>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    logprobs: Option<L>,
    // What ended vLLM's and SGLang's answers, unless it is the model's first end-of-sequence token.
    stop_reason: Option<StopReason>,
    matched_stop: Option<StopReason>,
}

/// The choice with index 0 in a list of choices, if any.
struct ReplyChoices<L>(Option<ReplyChoice<L>>);

impl<'de, L: Deserialize<'de>> Deserialize<'de> for ReplyChoices<L> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<L>(PhantomData<L>);
        impl<'de, L: Deserialize<'de>> Visitor<'de> for List<L> {
            type Value = ReplyChoices<L>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let (mut first, mut place) = (None, 0);
                while let Some(choice) = list.next_element::<ReplyChoice<L>>()? {
                    // A choice without an index has its place in the list as index.
                    if choice.index.unwrap_or(place) == 0 && first.is_none() {
                        first = Some(choice);
                    }
                    place += 1;
                }
                Ok(ReplyChoices(first))
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// What ended a completion: a token or a stop string, or something else.
#[derive(Deserialize)]
#[serde(untagged)]
enum StopReason {
    Id(u32),
    Text(String),
    Other(IgnoredAny),
}

impl<L> Reply<L> {
    /// Checks the answer to a request and extracts the completion. `known` extracts the
    /// log-probabilities of token ids.
    fn completion(
        self,
        ask: &Ask,
        terms: &Terms,
        known: impl FnOnce(Option<L>, &[u32]) -> Result<Option<Vec<KnownTokens>>, String>,
    ) -> Result<Completion, Unusable> {
        let invalid = |what: &str| Unusable::Invalid(what.to_owned());
        let choices = self.choices.ok_or(Unusable::Foreign("JSON without `choices`"))?;
        let choice = choices.0.ok_or_else(|| invalid("`choices` without an index 0"))?;
        let ending = match choice.finish_reason.as_deref() {
            Some("stop" | "eos" | "eos_token" | "stop_sequence") => ReplyEnding::Stop,
            Some("length") => ReplyEnding::Length,
            Some("content_filter") => ReplyEnding::ContentFilter,
            Some(other) => return Err(invalid(&format!("a `finish_reason` of `{other}`"))),
            None => return Err(invalid("no `finish_reason`")),
        };
        let prompt_ids = choice.prompt_token_ids.or(self.prompt_token_ids);
        if prompt_ids.is_some_and(|ids| ids != ask.prompt_ids) {
            return Err(invalid("other prompt tokens than were sent"));
        }
        let (verbose_ids, stopping_word) =
            self.verbose.map_or((None, None), |verbose| (verbose.tokens, verbose.stopping_word));
        let ids = choice.token_ids.or(verbose_ids);
        let tokens = match (ids, choice.text) {
            _ if ending == ReplyEnding::ContentFilter => Tokens::Ids(Vec::new()),
            (Some(ids), _) => Tokens::Ids(checked_ids(ids, terms.vocab_size)?),
            (None, Some(_)) if terms.log_probs.is_some() => {
                return Err(invalid(
                    "text without token ids and log-probabilities, which sampled responses need; vLLM \
                     and llama.cpp return them",
                ));
            }
            (None, Some(text)) => Tokens::Text(checked_text(text, ask)?),
            (None, None) => return Err(invalid("neither `token_ids` nor `text`")),
        };
        let num_in_usage = |count: fn(&ReplyUsage) -> &Option<ReplyCount>| {
            self.usage.as_ref().and_then(|usage| count(usage).as_ref()?.whole())
        };
        let num_counted = num_in_usage(|usage| &usage.completion_tokens);
        let num_tokens = match &tokens {
            Tokens::Ids(ids) => {
                check_count(ids, num_counted, ending, ask)?;
                Some(ids.len())
            }
            Tokens::Text(_) => num_counted,
        };
        if let (ReplyEnding::Length, Some(num)) = (ending, num_tokens)
            && num < ask.max_tokens
        {
            return Err(Unusable::CutShort(num));
        }
        let known = match &tokens {
            Tokens::Ids(ids) if ending != ReplyEnding::ContentFilter => {
                known(choice.logprobs, ids).map_err(Unusable::Invalid)?
            }
            _ => None,
        };
        let reasons = [choice.stop_reason, choice.matched_stop, stopping_word];
        let (ended_by, stopped_by) = ended_and_stopped(reasons, &terms.eos_token_ids);
        // TGI says no more than this.
        let is_by_text = choice.finish_reason.as_deref() == Some("stop_sequence");
        Ok(Completion {
            known,
            ending,
            ended_by,
            stopped_by: stopped_by.or(is_by_text.then(String::new)),
            lacks_ids: matches!((&tokens, num_counted), (Tokens::Ids(ids), Some(num))
                if ending != ReplyEnding::ContentFilter && ids.len() + 1 < num),
            num_prompt_tokens: num_in_usage(|usage| &usage.prompt_tokens),
            num_tokens,
            tokens,
            model: self.model,
            speculated: self.timings.map(|it| {
                [it.draft_n, it.draft_n_accepted]
                    .map(|count| count.and_then(|count| count.whole()).unwrap_or(0) as f64)
            }),
            states_path: self.kv_transfer_params.and_then(|place| place.hidden_states_path),
        })
    }
}

/// Checks that token ids are in the target's vocabulary.
fn checked_ids(ids: Vec<u32>, vocab_size: usize) -> Result<Vec<u32>, Unusable> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(ids),
        Some(id) => Err(Unusable::Invalid(format!(
            "the token id {id}, but the target has {vocab_size}: it serves another model"
        ))),
    }
}

/// Returns the end token that ended a completion, and anything else that did.
fn ended_and_stopped(
    reasons: [Option<StopReason>; 3],
    eos_token_ids: &[u32],
) -> (Option<u32>, Option<String>) {
    let (mut ended_by, mut stopped_by) = (None, None);
    for reason in reasons.into_iter().flatten() {
        match reason {
            StopReason::Id(id) if eos_token_ids.contains(&id) => ended_by = Some(id),
            StopReason::Id(id) => stopped_by = Some(id.to_string()),
            // llama.cpp writes an empty word if it has none.
            StopReason::Text(words) if !words.is_empty() => stopped_by = Some(words),
            StopReason::Text(_) | StopReason::Other(_) => {}
        }
    }
    (ended_by, stopped_by)
}

/// Checks that token ids are not those of the prompt and the response.
fn check_count(
    ids: &[u32],
    num_counted: Option<usize>,
    ending: ReplyEnding,
    ask: &Ask,
) -> Result<(), Unusable> {
    let problem = match num_counted {
        // Servers count the end token or not.
        Some(num) if ids.len() > num + usize::from(ending == ReplyEnding::Stop) => {
            format!("{} token ids, but its `usage` counts {num}", ids.len())
        }
        None if ids.starts_with(&ask.prompt_ids) => {
            "token ids that begin with the prompt's".to_owned()
        }
        _ => return Ok(()),
    };
    Err(Unusable::Invalid(problem))
}

/// Checks before tokenisation that a text is not too long for the requested number of tokens.
fn checked_text(text: String, ask: &Ask) -> Result<String, Unusable> {
    let Ask { max_tokens, .. } = ask;
    if text.len() as u64 > TOKEN_BYTES * *max_tokens as u64 {
        let length = in_bytes(text.len() as u64);
        return Err(Unusable::Invalid(format!("a text of {length} for {max_tokens} tokens")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;

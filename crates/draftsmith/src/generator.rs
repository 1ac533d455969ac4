//! Generates text with a target and an optional drafter.
//!
//! Each call of a [`Generator`] creates new KV caches for its sequence and drops them at the end; a
//! [`Session`] keeps them between turns. Decoding runs inside rayon's thread pool, where a forward
//! on the CPU hands rows to a second thread much faster than from outside.

use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_data::{Message, StopStrings};
use draftsmith_decode::{
    Drafters, Finish, Generation, Limits, LookupFirstDraft, ModelSession, NoDrafter, Request,
    RoundTokens, Sizes, decode_many, decode_on,
};
use draftsmith_theory::{Counts, Decoding, SeededDraws, Trace};

use crate::drafter::{Drafter, OpenedDrafter};
use crate::rule::Rule;
use crate::{Error, Model, Result};

/// The name of the random stream for generated text.
const GENERATE: &str = "generate";

/// The maximum number of prompts in a batch.
const MOST_SLOTS: usize = 16;

/// A target with its decoding settings and an optional drafter.
///
/// Without a drafter, it decodes one token per forward. With a drafter, sampled text has the same
/// distribution, and greedy text the same tokens.
#[derive(Debug)]
pub struct Generator {
    pub(crate) target: Model,
    pub(crate) drafter: Option<OpenedDrafter>,
    rule: Option<Rule>,
    pub(crate) decoding: Decoding,
    pub(crate) seed: u64,
    pub(crate) limits: Limits,
}

/// The input that generated text continues.
#[derive(Debug, Clone, Copy)]
pub enum PromptInput<'a> {
    /// Plain text, without the chat template.
    Text(&'a str),
    /// A conversation, formatted with the model's chat template.
    Chat(&'a [Message]),
    /// Token ids.
    Ids(&'a [u32]),
}

/// The tokens that one round adds, for streaming.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// The text that the tokens complete. A character that needs more tokens is delivered with the
    /// last of them, so the final piece may have no tokens.
    pub text: &'a str,
    /// The token ids: accepted candidates, then the target's own token.
    pub token_ids: &'a [u32],
    /// The number of candidates that were drafted.
    pub num_drafted: usize,
    /// The number of candidates that were accepted.
    pub num_accepted: usize,
}

/// A generated text with its statistics.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The token ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// The ids of the new tokens, including an end token.
    pub token_ids: Vec<u32>,
    /// The new text, without special tokens.
    pub text: String,
    /// The reason why the text ends.
    pub finish: Finish,
    /// The rounds and their times.
    pub trace: Trace,
    /// The number of prompt tokens whose KV cache a [`Session`] reused from earlier turns.
    pub num_reused: usize,
}

impl Generated {
    /// Returns the numbers of tokens, forwards, and drafted and accepted candidates.
    /// `num_target_forwards` is the number of rounds.
    pub fn counts(&self) -> Counts {
        self.trace.counts()
    }
}

impl Generator {
    /// Creates a generator without a drafter, for greedy decoding of up to 128 new tokens. Text
    /// ends at the model's end tokens.
    pub fn new(target: &Model) -> Self {
        let limits = Limits::new(128, target.network().shape().eos_token_ids.clone());
        let (target, decoding) = (target.clone(), Decoding::GREEDY);
        Self { target, drafter: None, rule: None, decoding, seed: 0, limits }
    }

    /// Loads a drafter for the target.
    ///
    /// # Errors
    /// If a file is missing or broken, or was trained for other models.
    pub fn with_drafter(self, drafter: Drafter) -> Result<Self> {
        Ok(Self { drafter: Some(drafter.load(&self.target)?), ..self })
    }

    /// Sets the stop rule, which ends draft phases. The default is the rule that `draftsmith tune`
    /// wrote for the head or adapter. Without a tuned rule, it is `head=0.7` if there is an
    /// acceptance head, and `fixed=5` otherwise.
    #[must_use]
    pub fn with_rule(self, rule: impl Into<Rule>) -> Self {
        Self { rule: Some(rule.into()), ..self }
    }

    /// Sets how tokens are chosen: [`Decoding::GREEDY`], or a [`Sampling`](crate::Sampling) with temperature,
    /// top-k and top-p.
    #[must_use]
    pub fn with_decoding(self, decoding: impl Into<Decoding>) -> Self {
        Self { decoding: decoding.into(), ..self }
    }

    /// Sets the seed for sampling. The same seed and prompt give the same text in every call.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets the maximum number of new tokens.
    #[must_use]
    pub fn with_max_new_tokens(mut self, max_new_tokens: usize) -> Self {
        self.limits.max_new_tokens = max_new_tokens;
        self
    }

    /// Sets strings that end a text, in addition to the end tokens.
    ///
    /// # Errors
    /// If a string is empty.
    pub fn with_stop_strings(mut self, strings: &[String]) -> Result<Self> {
        let strings = StopStrings::new(strings, self.target.tokenizer())?;
        self.limits.text_end = Some(Arc::new(strings));
        Ok(self)
    }

    /// Generates a text.
    ///
    /// # Errors
    /// If the prompt is empty or too long, a setting is invalid, the stop rule reads something that
    /// the drafter lacks, or a model fails.
    pub fn generate<'a>(&mut self, prompt: impl Into<PromptInput<'a>>) -> Result<Generated> {
        self.stream(prompt, |_| ControlFlow::Continue(()))
    }

    /// Generates a text and passes it to `observe` round by round. `observe` can stop it.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn stream<'a>(
        &mut self,
        prompt: impl Into<PromptInput<'a>>,
        mut observe: impl FnMut(Piece<'_>) -> ControlFlow<()> + Send,
    ) -> Result<Generated> {
        let prompt_ids = self.encode(prompt.into())?;
        let target = self.target.clone();
        streamed(&target, prompt_ids, 0, &mut observe, |prompt, observe| {
            self.decode(prompt, GENERATE, observe)
        })
    }

    /// Opens a session for a conversation of up to `capacity` tokens. It keeps the models' KV
    /// caches between turns. The models' contexts limit the capacity.
    pub fn session(&mut self, capacity: usize) -> Session<'_> {
        let context = self.drafter.as_ref().map_or(usize::MAX, |drafter| drafter.context);
        let capacity = capacity.min(context).min(self.target.network().shape().context);
        Session { running: self.running(capacity, 1), tokens: Vec::new() }
    }

    pub(crate) fn encode(&self, prompt: PromptInput<'_>) -> Result<Vec<u32>> {
        prompt.encode(&self.target)
    }

    /// Returns the maximum length, in tokens, of a sequence that begins with `len` tokens.
    pub(crate) fn capacity(&self, len: usize) -> usize {
        let context = self.drafter.as_ref().map_or(usize::MAX, |drafter| drafter.context);
        let longest = len.saturating_add(self.limits.max_new_tokens).saturating_add(1);
        longest.min(context).min(self.target.network().shape().context)
    }

    /// Generates answers to several prompts in batches. Each answer equals that of
    /// [`Generator::generate`], in less time. A custom stop rule decodes them one after another.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate_many<'a, P: Into<PromptInput<'a>>>(
        &mut self,
        prompts: impl IntoIterator<Item = P>,
    ) -> Result<Vec<Generated>> {
        let prompts = prompts.into_iter().map(|prompt| self.encode(prompt.into()));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        let side_by_side =
            if self.rule.as_ref().is_some_and(Rule::is_custom) { 1 } else { MOST_SLOTS };
        let mut all = Vec::new();
        for some in prompts.chunks(side_by_side) {
            let slices: Vec<&[u32]> = some.iter().map(Vec::as_slice).collect();
            let go_on = &mut |_: usize, _: RoundTokens<'_>| ControlFlow::Continue(());
            for (prompt, generation) in some.iter().zip(self.decode_all(&slices, GENERATE, go_on)?)
            {
                let Generation { token_ids, trace, finish } = generation;
                let text = self.target.tokenizer().decode(&token_ids, true)?;
                let prompt_ids = prompt.clone();
                all.push(Generated { prompt_ids, token_ids, text, finish, trace, num_reused: 0 });
            }
        }
        Ok(all)
    }

    /// Decodes one prompt. `purpose` names the random stream.
    pub(crate) fn decode(
        &mut self,
        prompt: &[u32],
        purpose: &str,
        observe: &mut (dyn FnMut(RoundTokens<'_>) -> ControlFlow<()> + Send),
    ) -> Result<Generation> {
        let mut all = self.decode_all(&[prompt], purpose, &mut |_, round| observe(round))?;
        Ok(all.remove(0))
    }

    /// Decodes prompts as a batch. A custom stop rule allows only one.
    fn decode_all(
        &mut self,
        prompts: &[&[u32]],
        purpose: &str,
        observe: &mut (dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()> + Send),
    ) -> Result<Vec<Generation>> {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let capacity = self.capacity(longest);
        self.running(capacity, prompts.len()).decode(prompts, 0, purpose, observe)
    }

    fn running(&mut self, capacity: usize, num_slots: usize) -> Running<'_> {
        let Self { target, drafter, rule, decoding, seed, limits } = self;
        let sizes = Sizes { target: target.network(), capacity, num_slots };
        let drafters = Drafters::new(drafter.as_ref().map(|it| &it.parts), sizes);
        let (drafter, decoding, seed) = (drafter.as_ref(), *decoding, *seed);
        Running { drafters, target, drafter, rule, decoding, seed, limits }
    }
}

/// A generator's models with their KV caches.
struct Running<'g> {
    drafters: Drafters<'g>,
    target: &'g Model,
    drafter: Option<&'g OpenedDrafter>,
    rule: &'g mut Option<Rule>,
    decoding: Decoding,
    seed: u64,
    limits: &'g Limits,
}

impl Running<'_> {
    /// Decodes prompts as a batch. A custom stop rule allows only one. For a single prompt,
    /// `num_kept` is the number of its first tokens that are already in the KV caches.
    fn decode(
        &mut self,
        prompts: &[&[u32]],
        num_kept: usize,
        purpose: &str,
        observe: &mut (dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()> + Send),
    ) -> Result<Vec<Generation>> {
        self.decoding.validate()?;
        let Self { drafters, target, drafter, rule, decoding, seed, limits } = self;
        let (target, decoding, limits) = (target.network(), *decoding, *limits);
        rayon::scope(|_| {
            let draws = || SeededDraws::new(*seed, &[purpose]);
            let mut draws: Vec<SeededDraws> = prompts.iter().map(|_| draws()).collect();
            let Some(loaded) = drafter else {
                let requests = prompts.iter().zip(&mut draws).map(|(prompt, draws)| Request {
                    prompt,
                    decoding,
                    limits,
                    rule: None,
                    draws,
                });
                return decoded(drafters.target(), &mut NoDrafter, requests, num_kept, observe);
            };
            let tuned = loaded.tuned(&decoding, target.dtype()).filter(|_| rule.is_none());
            let first = loaded.lookup_first.or(tuned.and_then(|it| it.drafter.lookup_first()));
            let default = || Rule::by_default(loaded.head.is_some());
            let chosen = loaded.own_rule(&decoding).or(tuned.map(|tuned| &tuned.config));
            let mut own = chosen.map_or_else(default, |rule| rule.clone().into());
            let (rule, mut place) = (rule.as_mut().unwrap_or(&mut own), Vec::new());
            let rules = rule.for_each(loaded.max_candidates, prompts.len(), &mut place)?;
            if rules.iter().any(|rule| rule.needs().acceptance_prob) && loaded.head.is_none() {
                return Err(Error::NoHead);
            }
            let built = drafters.drafting(loaded.parts.id);
            let (target, drafter) = built.expect("the drafter was built above");
            let requests = prompts.iter().zip(&mut draws).zip(rules);
            let requests = requests.map(|((prompt, draws), rule)| Request {
                prompt,
                decoding,
                limits,
                rule: Some(rule),
                draws,
            });
            let num_slots = prompts.len();
            let before = first.map(|first| {
                LookupFirstDraft::new(&mut *drafter, (first, loaded.answers.as_ref()), num_slots)
            });
            match before {
                Some(mut drafter) => decoded(target, &mut drafter, requests, num_kept, observe),
                None => decoded(target, drafter, requests, num_kept, observe),
            }
        })
    }
}

/// Decodes a batch of requests, or one that continues after `num_kept` tokens in the KV caches.
fn decoded<'a, 'm, D: draftsmith_decode::Drafter<ModelSession<'m>> + ?Sized>(
    target: &mut ModelSession<'m>,
    drafter: &mut D,
    mut requests: impl Iterator<Item = Request<'a>>,
    num_kept: usize,
    observe: &mut dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Vec<Generation>> {
    if num_kept == 0 {
        return Ok(decode_many(target, drafter, requests, observe)?);
    }
    let request = requests.next().expect("a turn has a prompt");
    let observe = &mut |round: RoundTokens<'_>| observe(0, round);
    Ok(vec![decode_on(target, drafter, request, num_kept, observe)?])
}

/// A conversation with KV caches that are kept between turns, from [`Generator::session`].
///
/// Each prompt is the whole conversation. If it begins with all tokens of the previous turns, as
/// chat templates produce it, only the rest is processed. Otherwise all of it is processed. Either
/// way, the text is that of [`Generator::generate`], apart from rounding on a GPU.
pub struct Session<'g> {
    running: Running<'g>,
    /// The tokens of the conversation up to the last answer.
    tokens: Vec<u32>,
}

impl Session<'_> {
    /// Generates the next answer.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate<'a>(&mut self, prompt: impl Into<PromptInput<'a>>) -> Result<Generated> {
        self.stream(prompt, |_| ControlFlow::Continue(()))
    }

    /// Generates the next answer and passes it to `observe` round by round. `observe` can stop it.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn stream<'a>(
        &mut self,
        prompt: impl Into<PromptInput<'a>>,
        mut observe: impl FnMut(Piece<'_>) -> ControlFlow<()> + Send,
    ) -> Result<Generated> {
        let prompt_ids = prompt.into().encode(self.running.target)?;
        // After an error, the state of the caches is unknown, so the next turn starts from scratch.
        let before = std::mem::take(&mut self.tokens);
        let goes_on = prompt_ids.len() > before.len() && prompt_ids.starts_with(&before);
        let num_kept = if goes_on { before.len() } else { 0 };
        let running = &mut self.running;
        let generated =
            streamed(running.target, prompt_ids, num_kept, &mut observe, |prompt, round| {
                let mut all =
                    running.decode(&[prompt], num_kept, GENERATE, &mut |_, it| round(it))?;
                Ok(all.remove(0))
            })?;
        self.tokens = [&generated.prompt_ids[..], &generated.token_ids].concat();
        Ok(generated)
    }
}

/// Generates a text with `decode`, and passes it to `observe` as it is produced.
fn streamed(
    target: &Model,
    prompt_ids: Vec<u32>,
    num_reused: usize,
    observe: &mut (dyn FnMut(Piece<'_>) -> ControlFlow<()> + Send),
    decode: impl FnOnce(
        &[u32],
        &mut (dyn FnMut(RoundTokens<'_>) -> ControlFlow<()> + Send),
    ) -> Result<Generation>,
) -> Result<Generated> {
    let mut stream = target.tokenizer().text_stream(true);
    let (mut text, mut failure) = (String::new(), None);
    let generation = decode(&prompt_ids, &mut |round| {
        let RoundTokens { kept, num_drafted, num_accepted, .. } = round;
        let added = kept.iter().filter_map(|id| stream.push(*id).transpose());
        let added = added.collect::<Result<String, _>>().unwrap_or_else(|error| {
            failure = Some(error);
            String::new()
        });
        text += &added;
        let piece = Piece { text: &added, token_ids: kept, num_drafted, num_accepted };
        if failure.is_some() { ControlFlow::Break(()) } else { observe(piece) }
    })?;
    failure.map_or(Ok(()), Err)?;
    if let Some(rest) = stream.finish()? {
        // This is the last piece, so the answer of `observe` does not matter.
        let _ = observe(Piece { text: &rest, token_ids: &[], num_drafted: 0, num_accepted: 0 });
        text += &rest;
    }
    let Generation { token_ids, trace, finish } = generation;
    Ok(Generated { prompt_ids, token_ids, text, finish, trace, num_reused })
}

impl PromptInput<'_> {
    fn encode(self, target: &Model) -> Result<Vec<u32>> {
        match self {
            PromptInput::Text(text) => Ok(target.tokenizer().encode(text, true)?),
            PromptInput::Chat(messages) => target.encode_chat(messages),
            PromptInput::Ids(ids) => Ok(ids.to_vec()),
        }
    }
}

impl<'a> From<&'a str> for PromptInput<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a Vec<Message>> for PromptInput<'a> {
    fn from(messages: &'a Vec<Message>) -> Self {
        Self::Chat(messages)
    }
}

impl<'a, const N: usize> From<&'a [Message; N]> for PromptInput<'a> {
    fn from(messages: &'a [Message; N]) -> Self {
        Self::Chat(messages)
    }
}

//! The sources of a target's answers: the local target, servers that run it, or the prompt files.

mod existing;

use std::borrow::Cow;

use anyhow::{Context, Result};
use draftsmith_data::{FinishReason, Prompt};
use draftsmith_decode::{Finish, RoundTokens};
use draftsmith_recipe::{Bar, TextSide};
use draftsmith_served::{Served, ServedResponse};
use draftsmith_theory::{SeededDraws, TopProbs};

use self::existing::existing_response;
use crate::conversation::{SetPrompt, Turn, answer_batched, num_ended_by_call};
use crate::labels;
use crate::responses::Responder;

/// The target's answer to one turn.
pub struct TargetAnswer {
    /// The id of the prompt's turn.
    pub id: String,
    /// The token ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// The token ids of the response.
    pub response_ids: Vec<u32>,
    /// The reason why the response ends.
    pub finish: FinishReason,
    /// The most probable tokens at each position, as returned by the server; `None` for greedy
    /// answers and local targets.
    pub probs: Option<Vec<TopProbs>>,
    /// The target's log-probability of each response token; `None` unless the source keeps them.
    pub log_probs: Option<Vec<f32>>,
}

/// A source of answers.
pub trait Answers: Sync {
    /// Answers several turns. The answers are in the order of the turns.
    ///
    /// # Errors
    /// If an answer is missing or does not fit, the target fails, or the job is interrupted.
    fn answer(&self, turns: Vec<Turn<'_>>) -> Result<Vec<TargetAnswer>>;

    /// Returns whether the answer to the turn with this id is left out. The default is false.
    fn is_left_out(&self, _id: &str) -> bool {
        false
    }

    /// Returns the number of answers that are left out.
    fn num_left_out(&self) -> usize {
        0
    }
}

/// Answers all turns of the prompts. Each turn follows the answers to the earlier turns of its
/// conversation. The result lists the answers to conversations before those to held-out prompts. A
/// turn whose answer is left out is omitted, with all later turns of its conversation. Also returns the
/// number of conversations that ended at other calls of tools than the file's.
///
/// # Errors
/// If a first turn does not fit, or the source fails.
pub fn answer_all(
    source: &dyn Answers,
    text: &TextSide,
    prompts: &[SetPrompt],
) -> Result<(Vec<TargetAnswer>, usize)> {
    let (mut conversations, mut held_out) = (Vec::new(), Vec::new());
    for prompt in prompts {
        match prompt {
            SetPrompt::Conversation(prompt) => conversations.extend(unfiltered(source, prompt)),
            SetPrompt::HeldOut { id, .. } if source.is_left_out(id) => {}
            SetPrompt::HeldOut { id, prompt_ids } => {
                let (id, prompt_ids) = (id.clone(), prompt_ids.clone());
                held_out.push(Turn { id, prompt_ids, of: None, calls: None, share: 1.0 });
            }
        }
    }
    let conversations: Vec<&Prompt> = conversations.iter().map(|prompt| &**prompt).collect();
    let answered = answer_batched(
        text,
        &conversations,
        |answer: &TargetAnswer| &answer.response_ids,
        |turns| source.answer(turns.into_iter().map(|(_, turn)| turn).collect()),
    )?;
    let held_out = source.answer(held_out)?;
    let num_ended = num_ended_by_call(text, &conversations, answered.iter().map(|it| &it.1));
    let answers = answered.into_iter().flat_map(|(all, _)| all).chain(held_out);
    Ok((answers.collect(), num_ended))
}

/// Cuts a conversation before the first turn that a content filter stopped; `None` if no turn is
/// left.
pub fn unfiltered<'p>(source: &dyn Answers, prompt: &'p Prompt) -> Option<Cow<'p, Prompt>> {
    let is_kept = |turn: &usize| !source.is_left_out(&prompt.row_id(*turn));
    match (0..prompt.turns.len()).take_while(is_kept).count() {
        0 => None,
        all if all == prompt.turns.len() => Some(Cow::Borrowed(prompt)),
        some => Some(Cow::Owned(Prompt { turns: prompt.turns[..some].to_vec(), ..prompt.clone() })),
    }
}

/// The local target as a source, which answers turns in batches.
pub struct OwnTarget<'a> {
    /// The target with its decoding settings.
    pub responder: Responder<'a>,
    /// The seed of random draws.
    pub seed: u64,
    /// The names that, after a turn's id, identify the stream of random draws.
    pub stream: Vec<&'a str>,
    /// The progress of the answers.
    pub progress: &'a dyn Bar,
    /// The function that returns how much a turn's answer counts as progress.
    pub worth: &'a (dyn Fn(&Turn<'_>) -> f64 + Sync),
    /// Whether the log-probabilities of response tokens are kept.
    pub keeps_log_probs: bool,
}

impl Answers for OwnTarget<'_> {
    fn answer(&self, turns: Vec<Turn<'_>>) -> Result<Vec<TargetAnswer>> {
        let Responder { target, decoding, limits, .. } = &self.responder;
        let vocab_size = target.shape().vocab_size;
        let stream = |turn: &Turn<'_>| {
            let names: Vec<&str> =
                [&*turn.id].into_iter().chain(self.stream.iter().copied()).collect();
            SeededDraws::new(self.seed, &names)
        };
        let mut prompts: Vec<(&[u32], SeededDraws)> =
            turns.iter().map(|turn| (&turn.prompt_ids[..], stream(turn))).collect();
        let mut log_probs = vec![Vec::new(); turns.len()];
        // The text before each token: its log-probability is conditional on it, and so is the
        // repetition penalty.
        let mut texts: Vec<Vec<u32>> = match self.keeps_log_probs {
            true => turns.iter().map(|turn| turn.prompt_ids.clone()).collect(),
            false => Vec::new(),
        };
        let mut written = self.progress.side_by_side(turns.iter().map(self.worth).collect());
        let mut lens = vec![0; turns.len()];
        let observe = |nth: usize, tokens: RoundTokens<'_>| {
            lens[nth] += tokens.kept.len();
            written.reach(nth, lens[nth] as f64 / limits.max_new_tokens as f64);
            if self.keeps_log_probs {
                for (id, logits) in tokens.kept.iter().zip(tokens.logits.chunks_exact(vocab_size)) {
                    let text = &mut texts[nth];
                    log_probs[nth].push(labels::log_prob(decoding, logits, text, *id));
                    text.push(*id);
                }
            }
        };
        let generations = self.responder.respond(&mut prompts, observe)?;
        written.finish();
        let written = generations.into_iter().zip(log_probs);
        let answers =
            turns.into_iter().zip(written).map(|(turn, (generation, log_probs))| TargetAnswer {
                id: turn.id,
                prompt_ids: turn.prompt_ids,
                response_ids: generation.token_ids,
                finish: match generation.finish {
                    Finish::Eos => FinishReason::Eos,
                    Finish::StopString => FinishReason::StopString,
                    Finish::Length | Finish::Stopped => FinishReason::Length,
                },
                probs: None,
                log_probs: self.keeps_log_probs.then_some(log_probs),
            });
        Ok(answers.collect())
    }
}

/// The servers' answers, read from the journal.
impl Answers for Served {
    fn answer(&self, turns: Vec<Turn<'_>>) -> Result<Vec<TargetAnswer>> {
        let answer = |turn: Turn<'_>| {
            let Turn { id, prompt_ids, .. } = turn;
            let response = self.response(&id, &prompt_ids);
            let ServedResponse { ids: response_ids, finish, probs } =
                response.with_context(|| format!("prompt `{id}`"))?;
            Ok(TargetAnswer { id, prompt_ids, response_ids, finish, probs, log_probs: None })
        };
        turns.into_iter().map(answer).collect()
    }

    fn is_left_out(&self, id: &str) -> bool {
        self.is_left_out(id)
    }

    fn num_left_out(&self) -> usize {
        self.num_left_out()
    }
}

/// The responses in prompt files as a source, cut where local decoding would end them.
pub struct ExistingAnswers<'a> {
    /// The tokenizer and the ends of responses, to encode responses given as text.
    pub text: &'a TextSide,
    /// The maximum number of tokens in a response.
    pub max_new_tokens: usize,
}

impl Answers for ExistingAnswers<'_> {
    fn answer(&self, turns: Vec<Turn<'_>>) -> Result<Vec<TargetAnswer>> {
        let answer = |turn: Turn<'_>| {
            let (response_ids, finish) = existing_response(self.text, &turn, self.max_new_tokens)
                .with_context(|| format!("prompt `{}`", turn.id))?;
            let Turn { id, prompt_ids, .. } = turn;
            Ok(TargetAnswer { id, prompt_ids, response_ids, finish, probs: None, log_probs: None })
        };
        turns.into_iter().map(answer).collect()
    }
}

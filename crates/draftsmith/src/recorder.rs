//! The target's answers to prompts, and what drafters do along them: what `record` keeps in files and
//! `survey` in memory.
//!
//! Every draw is seeded by its row's id: threads, order and restarts change nothing, and the same
//! prompts give the same recordings wherever they are recorded.

use std::borrow::Cow;

use anyhow::Result;
use draftsmith_data::FinishReason;
use draftsmith_decode::{Finish, Generation};
use draftsmith_theory::{Decoding, Recording, SeededDraws, TopProbs};
use rayon::prelude::*;

use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::{SetPrompt, Turn, answer_batched};
use crate::exports::Exports;
use crate::pair::Pair;
use crate::recordings::{RecordedModels, RecordingJob, ToRecord};
use crate::responses::{Responder, sequences_at_once};
use crate::results::{DecodingName, DrafterName};
use crate::served::{Served, ServedResponse};
use crate::text_side::TextSide;

/// The target's answer to one prompt.
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) response_ids: Vec<u32>,
    /// Why it ends.
    pub(crate) finish: Finish,
    /// What a served target drew each token from, as far as it is known; None where each was the most
    /// probable, or its weights are here.
    pub(crate) probs: Option<Vec<TopProbs>>,
}

/// What the recordings of all prompts have in common.
pub(crate) struct Recorder<'a> {
    pub(crate) models: RecordedModels<'a>,
    pub(crate) max_new_tokens: usize,
    pub(crate) seed: u64,
    /// The most candidates that a round can be replayed with.
    pub(crate) max_length: usize,
    /// Whether candidates get their labels also where the drafter has no head: one is to be weighed.
    pub(crate) labels: bool,
    /// Whether several threads record, each several responses.
    pub(crate) on_cpu: bool,
    pub(crate) console: &'a Console,
    /// Counts responses: once as they are given, and once for each drafter.
    pub(crate) progress: &'a Progress,
}

impl Recorder<'_> {
    /// What a drafter does along answers, which were given by the same way of decoding.
    ///
    /// # Errors
    /// If an answer does not fit, a model fails, or Ctrl-C is met.
    pub(crate) fn record<'a>(
        &self,
        exports: &Exports,
        drafter: DrafterName,
        decoding: Decoding,
        answers: impl IntoIterator<Item = &'a Answer>,
    ) -> Result<Vec<(String, Recording)>> {
        let job = RecordingJob {
            models: self.models.clone(),
            exports,
            drafter,
            decoding,
            max_new_tokens: self.max_new_tokens,
            max_length: self.max_length,
            labels: self.labels,
            on_cpu: self.on_cpu,
            console: self.console,
            progress: self.progress,
        };
        let (name, how) = (drafter.to_string(), DecodingName::of(&decoding).text());
        let answers: Vec<&Answer> = answers.into_iter().collect();
        let mut responses: Vec<ToRecord<'_>> = answers
            .iter()
            .map(|answer| ToRecord {
                prompt_ids: &answer.prompt_ids,
                response_ids: &answer.response_ids,
                probs: answer.probs.as_deref(),
                draws: SeededDraws::new(self.seed, &[&answer.id, "rollouts", &name, how]),
            })
            .collect();
        let recorded = job.record(&mut responses)?;
        let ids = answers.iter().map(|answer| answer.id.clone());
        Ok(ids.zip(recorded).collect())
    }

    /// The target's answers to all turns of prompts, each fed with the earlier ones.
    ///
    /// # Errors
    /// If a first turn does not fit, the target fails, or Ctrl-C is met.
    pub(crate) fn answer(&self, prompts: &[SetPrompt], decoding: Decoding) -> Result<Vec<Answer>> {
        let pair = match &self.models {
            RecordedModels::Pair(pair) => *pair,
            RecordedModels::Served { text, workspace, access, .. } => {
                let served = access.open(workspace, decoding, self.max_new_tokens, self.console)?;
                return self.answer_served(served, text, prompts);
            }
        };
        let at_once = sequences_at_once(prompts.len(), self.on_cpu);
        let some = |prompts: &[SetPrompt]| self.answer_some(pair, prompts, decoding);
        let answers: Vec<Vec<Answer>> = if self.on_cpu {
            prompts.par_chunks(at_once).map(some).collect::<Result<_>>()?
        } else {
            prompts.chunks(at_once).map(some).collect::<Result<_>>()?
        };
        Ok(answers.into_iter().flatten().collect())
    }

    /// The answers to prompts that go side by side: all of one form, as those of a set are.
    fn answer_some(
        &self,
        pair: &Pair,
        prompts: &[SetPrompt],
        decoding: Decoding,
    ) -> Result<Vec<Answer>> {
        self.answer_by(&pair.text, prompts, |turns| self.respond(pair, turns, decoding))
    }

    /// What servers answered, which are asked for what they have not.
    fn answer_served(
        &self,
        mut served: Served,
        text: &TextSide,
        prompts: &[SetPrompt],
    ) -> Result<Vec<Answer>> {
        let all = prompts.iter().map(|prompt| Ok(Cow::Borrowed(prompt)));
        served.answer(all, self.console, self.progress)?;
        self.answer_by(text, prompts, |turns| {
            let answer = |(_, turn): (usize, Turn)| {
                let Turn { id, prompt_ids, .. } = turn;
                let ServedResponse { ids, finish, probs } = served.response(&id, &prompt_ids)?;
                let finish = match finish {
                    FinishReason::Eos => Finish::Eos,
                    FinishReason::StopString => Finish::StopString,
                    FinishReason::Length => Finish::Length,
                };
                Ok(Answer { id, prompt_ids, response_ids: ids, finish, probs })
            };
            turns.into_iter().map(answer).collect()
        })
    }

    fn answer_by(
        &self,
        text: &TextSide,
        prompts: &[SetPrompt],
        respond: impl Fn(Vec<(usize, Turn)>) -> Result<Vec<Answer>>,
    ) -> Result<Vec<Answer>> {
        let mut conversations = Vec::new();
        let mut held_out = Vec::new();
        for (nth, prompt) in prompts.iter().enumerate() {
            match prompt {
                SetPrompt::Conversation(prompt) => conversations.push(prompt),
                SetPrompt::HeldOut { id, prompt_ids } => {
                    let (id, prompt_ids) = (id.clone(), prompt_ids.clone());
                    held_out.push((nth, Turn { number: 0, id, prompt_ids }));
                }
            }
        }
        let of_conversations =
            answer_batched(text, &conversations, |answer: &Answer| &answer.response_ids, &respond)?;
        let of_held_out = respond(held_out)?;
        Ok(of_conversations.into_iter().flat_map(|(all, _)| all).chain(of_held_out).collect())
    }

    /// The target's answers to turns, with which others go side by side.
    fn respond(
        &self,
        pair: &Pair,
        turns: Vec<(usize, Turn)>,
        decoding: Decoding,
    ) -> Result<Vec<Answer>> {
        let target = &pair.target;
        let responder = Responder {
            target,
            context: pair.text.context,
            decoding,
            limits: pair.text.limits(self.max_new_tokens),
            console: self.console,
        };
        let how = DecodingName::of(&decoding).text();
        let draws = |id: &str| SeededDraws::new(self.seed, &[id, "record", how]);
        let mut prompts: Vec<(&[u32], SeededDraws)> =
            turns.iter().map(|(_, turn)| (&turn.prompt_ids[..], draws(&turn.id))).collect();
        let mut answered = self.progress.side_by_side(vec![1.0; turns.len()]);
        let mut lens = vec![0; turns.len()];
        let responses = responder.respond(&mut prompts, |nth, tokens| {
            lens[nth] += tokens.kept.len();
            answered.reach(nth, lens[nth] as f64 / self.max_new_tokens as f64);
        })?;
        answered.finish();
        let answer = |((_, turn), response): ((usize, Turn), Generation)| {
            let Turn { id, prompt_ids, .. } = turn;
            let Generation { token_ids: response_ids, finish, .. } = response;
            Answer { id, prompt_ids, response_ids, finish, probs: None }
        };
        Ok(turns.into_iter().zip(responses).map(answer).collect())
    }
}

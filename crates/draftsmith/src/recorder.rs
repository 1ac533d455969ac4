//! The target's answers to prompts, and what drafters do along them: what `record` keeps in files and
//! `survey` in memory.
//!
//! Every draw is seeded by its row's id: threads, order and restarts change nothing, and the same
//! prompts give the same recordings wherever they are recorded.

use anyhow::Result;
use draftsmith_decode::{Finish, Generation};
use draftsmith_theory::{Decoding, Recording, SeededDraws};
use rayon::prelude::*;

use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::{Turn, answer_side_by_side};
use crate::exports::Exports;
use crate::pair::Pair;
use crate::recordings::{RecordingJob, ToRecord};
use crate::responses::{Responder, sequences_at_once};
use crate::results::{DecodingName, DrafterName};
use crate::rollouts::SetPrompt;

/// The target's answer to one prompt.
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) response_ids: Vec<u32>,
    /// Why it ends.
    pub(crate) finish: Finish,
}

/// What the recordings of all prompts have in common.
pub(crate) struct Recorder<'a> {
    pub(crate) pair: &'a Pair,
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
            pair: self.pair,
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
        let at_once = sequences_at_once(prompts.len(), self.on_cpu);
        let some = |prompts: &[SetPrompt]| self.answer_some(prompts, decoding);
        let answers: Vec<Vec<Answer>> = if self.on_cpu {
            prompts.par_chunks(at_once).map(some).collect::<Result<_>>()?
        } else {
            prompts.chunks(at_once).map(some).collect::<Result<_>>()?
        };
        Ok(answers.into_iter().flatten().collect())
    }

    /// The answers to prompts that go side by side: all of one form, as those of a set are.
    fn answer_some(&self, prompts: &[SetPrompt], decoding: Decoding) -> Result<Vec<Answer>> {
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
        let respond = |turns: Vec<(usize, Turn)>| self.respond(turns, decoding);
        let of_conversations = answer_side_by_side(
            self.pair,
            &conversations,
            |answer: &Answer| &answer.response_ids,
            respond,
        )?;
        let of_held_out = self.respond(held_out, decoding)?;
        Ok(of_conversations.into_iter().flat_map(|(all, _)| all).chain(of_held_out).collect())
    }

    /// The target's answers to turns, with which others go side by side.
    fn respond(&self, turns: Vec<(usize, Turn)>, decoding: Decoding) -> Result<Vec<Answer>> {
        let target = &self.pair.target;
        let responder = Responder {
            target,
            context: self.pair.context(),
            decoding,
            limits: self.pair.limits(self.max_new_tokens),
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
            Answer { id, prompt_ids, response_ids, finish }
        };
        Ok(turns.into_iter().zip(responses).map(answer).collect())
    }
}

//! Generates rows for training heads and adapters, and recordings for replaying stop rules.

use std::ops::ControlFlow;

use draftsmith_data::{FinishReason, ResponseRow};
use draftsmith_decode::{Drafters, Finish, RecordOptions, RecordRequest, Sizes, record};
use draftsmith_theory::{Recordings, SeededDraws};

use crate::generator::{Generator, PromptInput};
use crate::{Error, Result};

impl Generator {
    /// Generates the target's answers to prompts as training rows with the ids `SOURCE#0`,
    /// `SOURCE#1` and so on. Adapters train directly on these rows. Heads also need
    /// [`Generator::record`] and [`rollout_rows`](draftsmith_train::rollout_rows).
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn respond<'a, P: Into<PromptInput<'a>>>(
        &mut self,
        source: &str,
        prompts: impl IntoIterator<Item = P>,
    ) -> Result<Vec<ResponseRow>> {
        let vocab_size = self.target.network().shape().vocab_size;
        let decoding = self.decoding;
        let row = |(number, prompt): (usize, P)| {
            let (id, prompt_ids) = (format!("{source}#{number}"), self.encode(prompt.into())?);
            let (mut text, mut log_probs) = (prompt_ids.clone(), Vec::new());
            let generation = self.decode(&prompt_ids, &id, &mut |round| {
                for (id, logits) in round.kept.iter().zip(round.logits.chunks_exact(vocab_size)) {
                    let logits = decoding.penalised(logits, text.iter().copied());
                    log_probs.push(decoding.probs(&logits)[*id as usize].ln() as f32);
                    text.push(*id);
                }
                ControlFlow::Continue(())
            })?;
            Ok(ResponseRow {
                id,
                source: source.to_owned(),
                prompt_ids,
                response_ids: generation.token_ids,
                response_target_log_prob: log_probs,
                target_outside_mass: None,
                draft: None,
                finish_reason: match generation.finish {
                    Finish::Eos => FinishReason::Eos,
                    Finish::StopString => FinishReason::StopString,
                    Finish::Length | Finish::Stopped => FinishReason::Length,
                },
            })
        };
        prompts.into_iter().enumerate().map(row).collect()
    }

    /// Records what the drafter would propose along responses of the target, which must be decoded
    /// with the same settings. Rounds of up to `max_length` candidates can then be replayed under
    /// any stop rule without a model. Replay is exact for greedy decoding, and exact in
    /// distribution for sampling.
    ///
    /// # Errors
    /// If the drafter has no model, a response does not fit, or a model fails.
    pub fn record(&self, rows: &[ResponseRow], max_length: usize) -> Result<Recordings> {
        let drafter = self.drafter.as_ref().ok_or(Error::NoSteps)?;
        let longest = rows.iter().map(|row| row.prompt_ids.len()).max().unwrap_or(0);
        let (target, capacity) = (self.target.network(), self.capacity(longest));
        let options = RecordOptions {
            decoding: self.decoding,
            limits: self.limits.clone(),
            max_length,
            has_head: drafter.head.is_some(),
            labels: true,
            is_target_here: true,
        };
        let draws = |row: &ResponseRow| SeededDraws::new(self.seed, &[&row.id, "rollouts"]);
        let mut draws: Vec<SeededDraws> = rows.iter().map(draws).collect();
        let responses = rayon::scope(|_| {
            let sizes = Sizes { target, capacity, num_slots: 1 };
            let mut drafters = Drafters::new([&drafter.parts], sizes);
            let (target, drafter) =
                drafters.drafting(drafter.parts.id).expect("the drafter was built above");
            let steps = drafter.by_steps().ok_or(Error::NoSteps)?;
            let requests = rows.iter().zip(&mut draws).map(|(row, draws)| RecordRequest {
                prompt: &row.prompt_ids,
                response: &row.response_ids,
                draws,
            });
            let observe = &mut |_: usize| ControlFlow::Continue(());
            Ok::<_, Error>(record(target, steps, &options, requests, observe)?)
        })?;
        Ok(Recordings {
            drafter: drafter.parts.id,
            max_length,
            eos_token_ids: self.limits.eos_token_ids.clone(),
            head: drafter.head,
            responses,
            answers: drafter.answers.clone(),
        })
    }
}

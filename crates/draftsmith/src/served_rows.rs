//! Builds rows from servers' responses and log-probabilities, without the target's weights.
//!
//! A greedy response gives the target's most probable token at each position, which is all that its labels
//! need. For a sampled one, servers return the log-probabilities of the most probable tokens, and each row
//! stores a bound on the error from the rest (`draftsmith-theory`, `top_probs.rs`).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Mutex;

use anyhow::{Context, Result};
use draftsmith_data::{Prompt, ResponseRow};
use draftsmith_decode::KnownResponse;
use draftsmith_theory::{Decoding, SeededDraws, TokenChoice, TopProbs};

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_batched, answer_named};
use crate::labels::{Labels, ServedModels};
use crate::recipe::{DataRecipe, Recipe};
use crate::served::{Served, ServedResponse, ServerAccess, ToAnswer};
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

const HELD: &str = "nobody panics while holding it";

/// Requests the responses to `num_prompts` prompts that the journals lack from the recipe's servers.
///
/// # Errors
/// If a request fails, or a prompt cannot be read.
pub(crate) fn ask_servers(
    recipe: &Recipe,
    shard: Shard,
    workspace: &Workspace,
    num_prompts: usize,
    prompts: impl Iterator<Item = Result<Prompt>>,
    console: &Console,
) -> Result<Served> {
    let data = recipe.data.as_ref().context("there is a section `[data]`")?;
    let access = ServerAccess::of(recipe, shard)?;
    let mut served = access.open(workspace, data.decoding(), data.max_new_tokens, console)?;
    let progress = Progress::new(console, "servers", "prompts", num_prompts as u64);
    let all = prompts.map(|prompt| Ok(ToAnswer::Conversation(Cow::Owned(prompt?))));
    served.answer(all, console, &progress)?;
    progress.finish();
    Ok(served)
}

/// Builds the rows of served responses.
pub(crate) struct ServedRows<'a> {
    served: &'a Served,
    text: &'a TextSide,
    models: ServedModels<'a>,
    decoding: Decoding,
    seed: u64,
    max_outside_mass: f64,
    console: &'a Console,
    progress: &'a Progress,
    known_mass: Mutex<KnownMass>,
}

/// How much of the target's probability mass is known, for a note at the end.
#[derive(Default)]
struct KnownMass {
    num_rows: usize,
    num_left_out: usize,
    /// Tokens and unknown mass of the rows that were kept.
    num_tokens: usize,
    outside_mass: f64,
}

impl<'a> ServedRows<'a> {
    /// Rows of `served`, labelled with the workspace's draft.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn new(
        served: &'a Served,
        recipe: &Recipe,
        data: &DataRecipe,
        workspace: &'a Workspace,
        console: &'a Console,
        progress: &'a Progress,
    ) -> Result<Self> {
        Ok(Self {
            served,
            text: workspace.text_side()?,
            models: workspace.served_models()?,
            decoding: data.decoding(),
            seed: recipe.seed,
            max_outside_mass: data.served_by().map_or(1.0, |server| server.max_outside_mass),
            console,
            progress,
            known_mass: Mutex::default(),
        })
    }

    /// The rows of conversations, one per assistant turn, in order. Rows with too much unknown mass are left
    /// out.
    ///
    /// # Errors
    /// If a response is missing or does not fit, the draft fails, or the job is interrupted.
    pub(crate) fn rows(&self, prompts: &[&Prompt]) -> Result<Vec<ResponseRow>> {
        let answered = answer_batched(
            self.text,
            prompts,
            |row: &ResponseRow| &row.response_ids,
            |turns| {
                let row = |(prompt_index, turn): (usize, Turn)| {
                    if self.console.is_interrupted() {
                        return Err(Interrupted.into());
                    }
                    answer_named(turn, |turn| self.row(prompts[prompt_index], turn))
                };
                turns.into_iter().map(row).collect()
            },
        )?;
        self.progress.advance(prompts.len() as u64);
        let rows = answered.into_iter().flat_map(|(rows, _)| rows);
        Ok(rows.filter(|row| self.is_known(row)).collect())
    }

    fn row(&self, prompt: &Prompt, turn: Turn) -> Result<ResponseRow> {
        let Turn { id, prompt_ids, .. } = turn;
        let ServedResponse { ids, finish, probs } = self.served.response(&id, &prompt_ids)?;
        let mut draws = SeededDraws::new(self.seed, &[&id, "draft tokens"]);
        let response = KnownResponse { response: &ids, probs: probs.as_deref() };
        let labels =
            Labels::of_served(&self.models, &self.decoding, &prompt_ids, &response, &mut draws)?;
        let mut row = ResponseRow {
            id,
            source: prompt.source.clone(),
            prompt_ids,
            response_ids: ids,
            response_target_log_prob: labels.response_target_log_prob,
            target_outside_mass: probs.map(|probs| self.outside_masses(&probs)),
            draft: labels.draft,
            finish_reason: finish,
        };
        row.round_stored();
        Ok(row)
    }

    fn outside_masses(&self, probs: &[TopProbs]) -> Vec<f32> {
        let TokenChoice::Sampled(sampling) = self.decoding.choice else {
            return vec![0.0; probs.len()];
        };
        let vocab_size = self.models.vocab_size;
        let mass = |probs: &TopProbs| probs.outside_mass(&sampling, vocab_size).clamp(0.0, 1.0);
        probs.iter().map(|probs| mass(probs) as f32).collect()
    }

    /// Whether enough of a row's probability mass is known. Counts the row.
    fn is_known(&self, row: &ResponseRow) -> bool {
        let Some(masses) = &row.target_outside_mass else { return true };
        let sum: f64 = masses.iter().map(|mass| f64::from(*mass)).sum();
        let is_known = sum <= self.max_outside_mass * masses.len() as f64;
        let mut all = self.known_mass.lock().expect(HELD);
        all.num_rows += 1;
        if is_known {
            all.num_tokens += masses.len();
            all.outside_mass += sum;
        } else {
            all.num_left_out += 1;
        }
        is_known
    }

    /// Notes how much of the mass is unknown.
    pub(crate) fn note(&self) {
        let all = self.known_mass.lock().expect(HELD);
        if all.num_rows == 0 {
            return;
        }
        let mean = all.outside_mass / all.num_tokens.max(1) as f64;
        let mut line = format!(
            "build-data: {:.2} % of the target's probability mass is unknown",
            100.0 * mean
        );
        if all.num_left_out > 0 {
            line += &format!(
                "; {} of {} responses are left out, because they exceed \
                 `data.server.max_outside_mass` = {}",
                all.num_left_out, all.num_rows, self.max_outside_mass
            );
        }
        self.console.note(line);
    }
}

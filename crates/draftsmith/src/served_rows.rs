//! Rows of responses that servers gave, labelled by what they said of them: the target's weights are
//! not read.
//!
//! A greedy response is what the target prefers at each place: that is all that its labels need. Of a
//! sampled one servers say the log-probabilities of the most probable tokens, and rows tell how far
//! the truth may be from what that is taken for (`draftsmith-theory`, `top_probs.rs`).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result};
use draftsmith_data::{Prompt, ResponseRow};
use draftsmith_decode::KnownResponse;
use draftsmith_theory::{Decoding, SeededDraws, TokenChoice, TopProbs};

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_named, answer_side_by_side};
use crate::labels::{Labels, ServedModels};
use crate::recipe::{DataRecipe, Recipe, ServerRecipe};
use crate::served::{Asking, Served, ServedResponse, ToAnswer};
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

const HELD: &str = "nobody panics while holding it";

/// Asks the recipe's servers for the responses to so many prompts, but for those that were asked for
/// before.
///
/// # Errors
/// If they cannot be had, or a prompt cannot be read.
pub(crate) fn ask_servers(
    recipe: &Recipe,
    shard: Shard,
    workspace: &Workspace,
    num_prompts: usize,
    prompts: impl Iterator<Item = Result<Prompt>>,
    console: &Console,
) -> Result<Served> {
    let data = recipe.data.as_ref().context("there is a section `[data]`")?;
    let asker = Asker::of(recipe, shard)?;
    let mut served = asker.open(workspace, data.decoding(), data.max_new_tokens, console)?;
    let progress = Progress::new(console, "servers", "prompts", num_prompts as u64);
    let all = prompts.map(|prompt| Ok(ToAnswer::Conversation(Cow::Owned(prompt?))));
    served.answer(all, console, &progress)?;
    progress.finish();
    Ok(served)
}

/// Who asks servers of the target, and where their answers are written down.
#[derive(Clone)]
pub(crate) struct Asker<'a> {
    pub(crate) server: &'a ServerRecipe,
    /// The strings that end a response.
    pub(crate) stop_strings: &'a [String],
    pub(crate) seed: u64,
    /// Each process has a journal of its own, and reads those beside it.
    pub(crate) journal: PathBuf,
}

impl<'a> Asker<'a> {
    /// Who asks a recipe's servers.
    ///
    /// # Errors
    /// If there are none.
    pub(crate) fn of(recipe: &'a Recipe, shard: Shard) -> Result<Self> {
        let server = recipe.data.as_ref().and_then(DataRecipe::served_by);
        Ok(Self {
            server: server.context("`data.responses` is `server`")?,
            stop_strings: &recipe.models.stop_strings,
            seed: recipe.seed,
            journal: recipe.data_dir().join(shard.file_name("served", "jsonl")),
        })
    }

    /// What the servers answered so far, and may be asked, under a way of decoding.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub(crate) fn open(
        &self,
        workspace: &Workspace,
        decoding: Decoding,
        max_new_tokens: usize,
        console: &Console,
    ) -> Result<Served> {
        let asking = Asking {
            text: workspace.text_side()?,
            stop_strings: self.stop_strings,
            vocab_size: workspace.target_shape()?.vocab_size,
            decoding,
            max_new_tokens,
            seed: self.seed,
            log_probs: self.server.log_probs(&decoding),
        };
        Served::open(self.server, &asking, &self.journal, console)
    }
}

/// What the rows of all prompts have in common.
pub(crate) struct ServedRows<'a> {
    served: &'a Served,
    text: &'a TextSide,
    models: ServedModels<'a>,
    decoding: Decoding,
    seed: u64,
    max_outside_mass: f64,
    console: &'a Console,
    progress: &'a Progress,
    told: Mutex<Told>,
}

/// What is told of all rows together.
#[derive(Default)]
struct Told {
    num_rows: usize,
    num_left_out: usize,
    num_tokens: usize,
    outside_mass: f64,
}

impl<'a> ServedRows<'a> {
    /// Rows of what was served, for the workspace's draft.
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
            told: Mutex::default(),
        })
    }

    /// The rows of conversations, one an assistant turn, in order, without those that are too little
    /// known.
    ///
    /// # Errors
    /// If a response is not there or does not fit, the draft fails, or Ctrl-C is met.
    pub(crate) fn rows(&self, prompts: &[&Prompt]) -> Result<Vec<ResponseRow>> {
        let answered = answer_side_by_side(
            self.text,
            prompts,
            |row: &ResponseRow| &row.response_ids,
            |turns| {
                let row = |(of_prompt, turn): (usize, Turn)| {
                    if self.console.is_interrupted() {
                        return Err(Interrupted.into());
                    }
                    answer_named(turn, |turn| self.row(prompts[of_prompt], turn))
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

    /// Whether enough is known of a row, which is counted.
    fn is_known(&self, row: &ResponseRow) -> bool {
        let Some(masses) = &row.target_outside_mass else { return true };
        let sum: f64 = masses.iter().map(|mass| f64::from(*mass)).sum();
        let is_known = sum <= self.max_outside_mass * masses.len() as f64;
        let mut told = self.told.lock().expect(HELD);
        told.num_rows += 1;
        if is_known {
            told.num_tokens += masses.len();
            told.outside_mass += sum;
        } else {
            told.num_left_out += 1;
        }
        is_known
    }

    /// Tells how much is known.
    pub(crate) fn tell(&self) {
        let told = self.told.lock().expect(HELD);
        if told.num_rows == 0 {
            return;
        }
        let mean = told.outside_mass / told.num_tokens.max(1) as f64;
        let mut line = format!(
            "build-data: the target's probabilities are known but for {:.2} % of the mass",
            100.0 * mean
        );
        if told.num_left_out > 0 {
            line += &format!(
                "; {} of {} responses left out, of which less is known than \
                 `data.server.max_outside_mass` = {} asks for",
                told.num_left_out, told.num_rows, self.max_outside_mass
            );
        }
        self.console.note(line);
    }
}

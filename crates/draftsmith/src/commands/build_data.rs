//! `build-data`: prompts in, labelled responses out, in shards that are each whole or absent.
//!
//! A shard holds the rows of a fixed run of prompts, and every draw is seeded by its row's id: so
//! a job that was killed resumes at the first missing shard, and the bytes are the same in the
//! end, however often it was stopped and on however many threads it ran.

mod labels;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    FinishReason, Prompt, Provenance, ResponseRow, ShardPlace, ShardSet, has_shards, shard_path,
    write_shard,
};
use draftsmith_decode::{Finish, Limits, ModelSession, decode_plain};
use draftsmith_theory::{Decoding, SeededDraws};
use rayon::prelude::*;
use serde::Serialize;

use crate::built_data::{data_provenance, told};
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_turns};
use crate::device::DeviceChoice;
use crate::pair::Pair;
use crate::prompts::FirstPrompts;
use crate::recipe::{DataRecipe, Recipe, Responses};
use crate::workspace::Workspace;

/// Prompts (whole conversations) a shard.
const PROMPTS_PER_SHARD: usize = 32;

/// What was built, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct BuiltData {
    /// The directory of the shards.
    pub(crate) data_dir: PathBuf,
    /// Shards in all.
    pub(crate) num_shards: usize,
    /// Shards that were there already.
    pub(crate) num_shards_kept: usize,
    /// Prompts in all.
    pub(crate) num_prompts: usize,
    /// Response tokens written now.
    pub(crate) num_new_tokens: usize,
}

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<BuiltData> {
    let data = recipe
        .data
        .as_ref()
        .context("the recipe has no section `[data]`: it says which prompts to build data from")?;
    let mut sources = FirstPrompts::read(&data.prompts, data.num_prompts)?;
    let pair = workspace.pair()?;
    if data.skip_long_prompts {
        sources.iter_mut().try_for_each(|source| source.skip_long(pair, console))?;
    }
    let prompts: Vec<&Prompt> = sources.iter().flat_map(|source| &source.prompts).collect();
    let provenance = data_provenance(recipe, data, workspace)?;
    let dir = recipe.data_dir();
    let num_shards = prompts.len().div_ceil(PROMPTS_PER_SHARD);
    let present = present_shards(&dir, &provenance, num_shards)?;
    check_prompts(pair, &prompts, data)?;

    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
    recipe.write_beside(&dir)?;
    let progress = Progress::new(console, "build-data", "prompts", prompts.len() as u64);
    let num_present = present.iter().filter(|p| **p).count();
    let labeller = Labeller { pair, data, seed: recipe.seed, decoding: data.decoding() };
    let mut num_new_tokens = 0;
    let mut num_done = 0;
    for (index, chunk) in prompts.chunks(PROMPTS_PER_SHARD).enumerate() {
        if present[index] {
            num_done += chunk.len();
            progress.skip_to(num_done as u64);
            continue;
        }
        let build = |prompt: &&Prompt| -> Result<Vec<ResponseRow>> {
            if console.is_interrupted() {
                return Err(Interrupted.into());
            }
            let rows = labeller.rows(prompt)?;
            progress.advance(1);
            Ok(rows)
        };
        let rows: Vec<Vec<ResponseRow>> = if DeviceChoice::is_cpu(workspace.device()) {
            chunk.par_iter().map(build).collect::<Result<_>>()?
        } else {
            chunk.iter().map(build).collect::<Result<_>>()?
        };
        let rows: Vec<ResponseRow> = rows.into_iter().flatten().collect();
        num_new_tokens += rows.iter().map(|row| row.response_ids.len()).sum::<usize>();
        let place = ShardPlace { index, count: num_shards };
        workspace.forget(&dir);
        write_shard(&shard_path(&dir, index), &rows, &provenance, Some(place))?;
        num_done += chunk.len();
    }
    progress.finish();
    let built = BuiltData {
        data_dir: dir,
        num_shards,
        num_shards_kept: num_present,
        num_prompts: prompts.len(),
        num_new_tokens,
    };
    console.note(format!(
        "build-data: {} shards in `{}`, {} of them there before",
        built.num_shards,
        built.data_dir.display(),
        built.num_shards_kept
    ));
    console.document(&built)?;
    Ok(built)
}

/// Which shards are there already.
///
/// # Errors
/// If one cannot be read, is not what its name says, or was made with other settings.
fn present_shards(dir: &Path, provenance: &Provenance, num_shards: usize) -> Result<Vec<bool>> {
    if !has_shards(dir) {
        return Ok(vec![false; num_shards]);
    }
    let shards = ShardSet::find(dir)?;
    let differences = shards.provenance.differences(provenance);
    if !differences.is_empty() {
        bail!(
            "the data in `{}` was built with {}; hint: delete the Parquet files there, or give the \
             recipe another `name`",
            dir.display(),
            told(&differences)
        );
    }
    if shards.count != num_shards {
        bail!(
            "the data in `{}` has {} shards, but these prompts make {num_shards}; hint: delete the \
             Parquet files there",
            dir.display(),
            shards.count
        );
    }
    Ok((0..num_shards).map(|index| shards.present.contains_key(&index)).collect())
}

/// Checks every prompt's first turn, so that one that cannot be used is an error before any work.
fn check_prompts(pair: &Pair, prompts: &[&Prompt], data: &DataRecipe) -> Result<()> {
    for prompt in prompts {
        let lacks = prompt.turns.iter().any(|turn| turn.response.is_none());
        if data.responses == Responses::Existing && lacks {
            bail!(
                "prompt `{}` has no response in its file; \
                 hint: set `data.responses = \"generate\"` to let the target write them",
                prompt.id
            );
        }
        pair.check_fits(&prompt.id, &pair.encode(&prompt.messages(0, &[]))?)?;
    }
    Ok(())
}

/// What the rows of all prompts have in common.
struct Labeller<'a> {
    pair: &'a Pair,
    data: &'a DataRecipe,
    seed: u64,
    decoding: Decoding,
}

impl Labeller<'_> {
    /// The rows of one conversation, one an assistant turn.
    fn rows(&self, prompt: &Prompt) -> Result<Vec<ResponseRow>> {
        let (rows, _) = answer_turns(
            self.pair,
            prompt,
            |row: &ResponseRow| &row.response_ids,
            |turn| self.row(prompt, turn),
        )?;
        Ok(rows)
    }

    fn row(&self, prompt: &Prompt, turn: Turn) -> Result<ResponseRow> {
        let Turn { number, id, prompt_ids } = turn;
        let existing = prompt.turns[number].response.as_deref();
        let existing = existing.filter(|_| self.data.responses == Responses::Existing);
        let context = self.pair.context();
        let mut target = ModelSession::new(&self.pair.target, context, "target");
        let (response_ids, finish_reason) = match existing {
            Some(text) => self.existing_response(text, context - prompt_ids.len())?,
            None => self.generate(&id, &prompt_ids, &mut target)?,
        };
        let mut ids = prompt_ids.clone();
        ids.extend(&response_ids);
        // The logits after the last prompt token and every response token but the last.
        let (read, from) = (&ids[..ids.len() - 1], prompt_ids.len() - 1);
        let target_logits = target.score(read, from)?;
        let draft_logits = match &self.pair.draft {
            Some(draft) => Some(ModelSession::new(draft, context, "draft").score(read, from)?),
            None => None,
        };
        let mut draws = SeededDraws::new(self.seed, &[&id, "draft tokens"]);
        let labels = labels::label(
            &self.decoding,
            &target_logits,
            draft_logits.as_ref(),
            &response_ids,
            &mut draws,
        );
        let mut row = ResponseRow {
            id,
            source: prompt.source.clone(),
            prompt_ids,
            response_ids,
            response_target_log_prob: labels.response_target_log_prob,
            draft: labels.draft,
            finish_reason,
        };
        row.round_stored();
        Ok(row)
    }

    fn generate(
        &self,
        id: &str,
        prompt_ids: &[u32],
        target: &mut ModelSession<'_>,
    ) -> Result<(Vec<u32>, FinishReason)> {
        let limits = Limits {
            max_new_tokens: self.data.max_new_tokens,
            eos_token_ids: self.pair.target.shape().eos_token_ids.clone(),
        };
        let mut draws = SeededDraws::new(self.seed, &[id, "response"]);
        let generation =
            decode_plain(target, &self.decoding, prompt_ids, &limits, &mut draws, &mut |_| {
                ControlFlow::Continue(())
            })?;
        let finish = match generation.finish {
            Finish::Eos => FinishReason::Eos,
            Finish::Length | Finish::Stopped => FinishReason::Length,
        };
        Ok((generation.token_ids, finish))
    }

    /// A response from the file, ended as the target would end it, cut where it does not fit.
    fn existing_response(&self, text: &str, room: usize) -> Result<(Vec<u32>, FinishReason)> {
        let mut ids = self.pair.tokenizer.encode(text, false)?;
        ids.extend(self.pair.target.shape().eos_token_ids.first());
        let most = room.min(self.data.max_new_tokens);
        let finish = if ids.len() > most { FinishReason::Length } else { FinishReason::Eos };
        ids.truncate(most);
        Ok((ids, finish))
    }
}

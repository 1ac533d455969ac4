//! `build-data`: generates labelled responses to prompts, and writes them in shards that are each
//! complete or absent.
//!
//! A shard holds the rows of a fixed range of prompts, and random draws are seeded by row ids. So a
//! killed job resumes at its first missing shard, and the files do not depend on interruptions or
//! the number of threads. `build_data/present.rs` examines existing shards, `build_data/rows.rs`
//! builds rows, and `build_data/given.rs` compares our labels with labels in prompt files.

mod given;
mod present;
mod rows;

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use draftsmith_data::{Prompt, Provenance, ShardPlace, shard_path, write_manifest, write_shard};
use draftsmith_files::{check_room, in_bytes};
use draftsmith_served::Served;
use rayon::prelude::*;
use serde::Serialize;

use self::given::check_known;
use self::present::{num_rows, present_shards};
use self::rows::{Labeller, share_of_response};
use crate::answers::{Answers, ExistingAnswers, OwnTarget};
use crate::conversation::{SetPrompt, Turn};
use crate::responses::Responder;
use crate::server_access::{self, ServerAccess};
use draftsmith_recipe::built_data::data_provenance;
use draftsmith_recipe::prompts::chosen::ChosenPrompts;
use draftsmith_recipe::{
    DataRecipe, DeviceChoice, Recipe, Responses, TextSide, Watch, Workspace, choose_prompts,
};

/// The number of prompts (whole conversations) per shard.
const PROMPTS_PER_SHARD: usize = 32;

/// The maximum number of bytes per response token in a shard: twelve uncompressed columns of four
/// bytes.
pub const BYTES_PER_TOKEN: u64 = 48;

/// The result of `build-data`.
#[derive(Debug, Serialize)]
pub struct BuiltData {
    /// The directory of the shards.
    pub data_dir: PathBuf,
    /// The number of shards in the whole data set.
    pub num_shards: usize,
    /// The number of shards that existed already.
    pub num_shards_kept: usize,
    /// The number of prompts in the whole data set.
    pub num_prompts: usize,
    /// The number of response tokens that this run wrote.
    pub num_new_tokens: usize,
    /// The number of sampled responses that this run left out, because the log-probabilities from
    /// the server cover too little probability mass.
    pub num_left_out: usize,
    /// The number of responses that a server's content filter stopped, or whose text is not what the
    /// target wrote. These are left out too.
    pub num_filtered: usize,
    /// The number of conversations that this run ended at an answer that calls tools otherwise than the
    /// file, whose results would not belong to it.
    pub num_ended_by_call: usize,
}

/// The treatment of damaged shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DamagedShards {
    /// A damaged shard is an error.
    Refused,
    /// Damaged shards are built again.
    Rebuilt,
}

/// Builds the missing shards of a recipe's data.
///
/// # Errors
/// If the recipe has no section `[data]`, a prompt or its response does not fit, shards were built
/// with other settings or are damaged, the disk is too small, a model or a server fails, or the job
/// is interrupted.
pub fn build_data(
    recipe: &Recipe,
    damaged: DamagedShards,
    workspace: &Workspace,
    watch: &dyn Watch,
) -> Result<BuiltData> {
    let data = recipe
        .data
        .as_ref()
        .context("the recipe has no section `[data]`, which names the prompts")?;
    let text = workspace.text_side()?;
    let prompts = choose_prompts(recipe, data, text, watch)?;
    let models = match data.target_elsewhere() {
        None => workspace.pair()?.into(),
        Some(_) => workspace.models.served_models()?,
    };
    let provenance = data_provenance(recipe, data, workspace)?;
    let (dir, num_shards) = (recipe.data_dir(), prompts.len().div_ceil(PROMPTS_PER_SHARD));
    let job = BuildJob { workspace, prompts, provenance, dir, num_shards, watch };
    let (kept, missing) = job.kept_and_missing(damaged)?;
    check_prompts(text, &job.prompts, data, workspace.models.vocab_size()?)?;
    job.check_room(&missing, data.max_new_tokens.min(text.context))?;
    std::fs::create_dir_all(&job.dir)
        .with_context(|| format!("cannot create `{}`", job.dir.display()))?;
    recipe.write_beside(&job.dir)?;
    let (num_kept, num_missing) = (job.num_prompts(&kept), job.num_prompts(&missing));
    let served = data.served_by().map(|_| job.ask_servers(recipe, data, &missing)).transpose()?;
    let progress = watch.bar("build-data", "prompts", (num_kept + num_missing) as u64);
    let worth = |turn: &Turn<'_>| turn.share * share_of_response(data, models.draft.is_some());
    let answers: Box<dyn Answers> = match (data.responses, models.target, served) {
        (Responses::Generate, Some(target), _) => Box::new(OwnTarget {
            responder: Responder {
                target,
                context: text.context,
                decoding: data.decoding(),
                limits: text.limits(data.max_new_tokens),
                watch,
            },
            seed: recipe.seed,
            stream: vec!["response"],
            progress: &*progress,
            worth: &worth,
            // Without a draft model, no later forward would compute them.
            keeps_log_probs: models.draft.is_none(),
        }),
        (_, _, Some(served)) => Box::new(served),
        (_, _, None) => Box::new(ExistingAnswers { text, max_new_tokens: data.max_new_tokens }),
    };
    let labeller = Labeller {
        models,
        text,
        data,
        seed: recipe.seed,
        decoding: data.decoding(),
        answers: &*answers,
        counted: Mutex::default(),
        progress: &*progress,
        watch,
    };
    progress.skip_to(num_kept as u64);
    let num_new_tokens = job.build(&missing, &labeller)?;
    labeller.note();
    progress.finish();
    job.finish(kept.len(), num_new_tokens, &labeller)
}

/// The inputs and paths for building one data set's shards.
struct BuildJob<'a> {
    workspace: &'a Workspace,
    prompts: ChosenPrompts,
    provenance: Provenance,
    dir: PathBuf,
    num_shards: usize,
    watch: &'a dyn Watch,
}

impl BuildJob<'_> {
    /// Returns the indices of a shard's prompts.
    fn prompts_of(&self, index: usize) -> Range<usize> {
        let begin = index * PROMPTS_PER_SHARD;
        begin..(begin + PROMPTS_PER_SHARD).min(self.prompts.len())
    }

    fn num_prompts(&self, shards: &[usize]) -> usize {
        shards.iter().map(|index| self.prompts_of(*index).len()).sum()
    }

    /// Splits the indices of all shards into existing shards and shards to build.
    fn kept_and_missing(&self, damaged: DamagedShards) -> Result<(Vec<usize>, Vec<usize>)> {
        let Self { dir, provenance, num_shards, watch, .. } = self;
        let present = present_shards(dir, provenance, *num_shards, damaged, *watch)?;
        Ok((0..*num_shards).partition(|index| present.contains(index)))
    }

    /// Checks the free disk space, and tells the user the maximum size of the data to be written.
    fn check_room(&self, missing: &[usize], max_new_tokens: usize) -> Result<()> {
        let num_turns: usize =
            missing.iter().map(|index| self.prompts.num_turns(self.prompts_of(*index))).sum();
        let most_tokens = num_turns as u64 * max_new_tokens as u64;
        let most_bytes = most_tokens.saturating_mul(BYTES_PER_TOKEN);
        check_room("the data", &self.dir, most_bytes)?;
        if num_turns > 0 {
            self.watch.note(format!(
                "build-data: {num_turns} responses to write, at most {most_tokens} tokens and {}",
                in_bytes(most_bytes)
            ));
        }
        Ok(())
    }

    /// Requests from the recipe's servers the responses for missing shards that the journal lacks.
    fn ask_servers(&self, recipe: &Recipe, data: &DataRecipe, missing: &[usize]) -> Result<Served> {
        let access = ServerAccess::of(recipe)?;
        let watch = self.watch;
        let mut served =
            access.open(self.workspace, data.decoding(), data.max_new_tokens, watch)?;
        let num_prompts = self.num_prompts(missing) as u64;
        let progress = watch.bar("servers", "prompts", num_prompts);
        let prompts = self.prompts.each(missing.iter().flat_map(|index| self.prompts_of(*index)));
        let all = prompts.map(|prompt| Ok(Cow::Owned(SetPrompt::Conversation(prompt?))));
        let text = self.workspace.text_side()?;
        server_access::ask_servers(&mut served, all, text, watch, &*progress)?;
        progress.finish();
        Ok(served)
    }

    /// Builds the missing shards and returns their number of response tokens.
    ///
    /// Each thread takes one shard after another. A thread that finds no shard left helps with the
    /// forwards of the other threads. Shards are not tasks of the thread pool, because a thread
    /// that waits within a forward could then start another shard.
    fn build(&self, missing: &[usize], labeller: &Labeller<'_>) -> Result<usize> {
        let prompts = self.prompts.each(missing.iter().flat_map(|index| self.prompts_of(*index)));
        let waiting = Mutex::new((missing.iter(), prompts));
        let next_shard = || -> Result<Option<(usize, Vec<Prompt>)>> {
            let mut waiting = waiting.lock().expect("nobody panics while holding it");
            let (shards, prompts) = &mut *waiting;
            let Some(index) = shards.next() else { return Ok(None) };
            let prompts = prompts.take(self.prompts_of(*index).len());
            Ok(Some((*index, prompts.collect::<Result<_>>()?)))
        };
        let build_some = |_| -> Result<usize> {
            let mut num_new_tokens = 0;
            while let Some((index, prompts)) = next_shard()? {
                let rows = labeller.rows(&prompts.iter().collect::<Vec<_>>())?;
                self.workspace.artifacts.forget(&self.dir);
                let place = ShardPlace { index, count: self.num_shards };
                write_shard(&shard_path(&self.dir, index), &rows, &self.provenance, Some(place))?;
                num_new_tokens += rows.iter().map(|row| row.response_ids.len()).sum::<usize>();
            }
            Ok(num_new_tokens)
        };
        let is_cpu = DeviceChoice::is_cpu(self.workspace.models.device());
        let num_threads = if is_cpu { rayon::current_num_threads() } else { 1 };
        let num_new_tokens: Vec<usize> = (0..num_threads)
            .into_par_iter()
            .with_max_len(1)
            .map(build_some)
            .collect::<Result<_>>()?;
        Ok(num_new_tokens.iter().sum())
    }

    /// Writes the manifest, and tells the user what was built.
    ///
    /// # Errors
    /// If the manifest cannot be written, or no shard has a row.
    fn finish(
        self,
        num_shards_kept: usize,
        num_new_tokens: usize,
        labeller: &Labeller<'_>,
    ) -> Result<BuiltData> {
        let Self { prompts, dir: data_dir, num_shards, watch, .. } = self;
        write_manifest(&data_dir, num_shards)?;
        if num_rows(&data_dir)? == 0 {
            return Err(labeller.no_rows(&data_dir));
        }
        watch.note(format!(
            "build-data: {num_shards} shards in `{}`, {num_shards_kept} of which existed",
            data_dir.display()
        ));
        let [num_left_out, num_filtered, num_ended_by_call] = labeller.num_left_out();
        Ok(BuiltData {
            data_dir,
            num_shards,
            num_shards_kept,
            num_prompts: prompts.len(),
            num_new_tokens,
            num_left_out,
            num_filtered,
            num_ended_by_call,
        })
    }
}

/// Checks the first turn of every prompt before any work is done. If responses come from the prompt
/// files, also checks that ids are unique, because those files may set the ids.
fn check_prompts(
    text: &TextSide,
    prompts: &ChosenPrompts,
    data: &DataRecipe,
    vocab_size: usize,
) -> Result<()> {
    let takes_existing = data.responses == Responses::Existing;
    let mut ids = HashSet::new();
    for prompt in prompts.each(0..prompts.len()) {
        let prompt = prompt?;
        text.check_fits(&prompt.id, &text.prompt_ids(&prompt, 0, &[])?)?;
        check_known(&prompt, vocab_size)?;
        ensure!(
            !takes_existing || ids.insert(prompt.id.clone()),
            "two prompts have the id `{}`, the second in `{}`; hint: change or remove one of them",
            prompt.id,
            prompt.source
        );
    }
    Ok(())
}

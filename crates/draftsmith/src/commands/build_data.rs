//! `build-data`: prompts in, labelled responses out, in shards that are each complete or absent.
//!
//! A shard holds the rows of a fixed range of prompts, and every draw is seeded by its row's id. So a killed
//! job resumes at its first missing shard, and the bytes do not depend on interruptions or on the number
//! of threads or processes. `build_data/present.rs` examines existing shards, `build_data/existing.rs` takes
//! responses from the prompt files.

mod existing;
mod present;

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    FinishReason, GivenTokens, Prompt, Provenance, ResponseRow, ShardPlace, shard_path, write_shard,
};
use draftsmith_decode::{Finish, Generation, RoundTokens};
use draftsmith_files::{check_room, in_bytes};
use draftsmith_theory::{Decoding, SeededDraws};
use rayon::prelude::*;
use serde::Serialize;

use self::existing::{GivenLabels, check_known, existing_response};
use self::present::{finish, present_shards};
use crate::built_data::data_provenance;
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_batched, answer_named};
use crate::data_store::{DataStore, Put};
use crate::device::DeviceChoice;
use crate::labels::{self, DraftTokens, Labels};
use crate::pair::Pair;
use crate::prompts::chosen::ChosenPrompts;
use crate::prompts::for_data::choose_prompts;
use crate::recipe::{DataRecipe, Recipe, Responses};
use crate::responses::Responder;
use crate::served::{Served, ServedResponse};
use crate::served_rows::{ServedRows, ask_servers};
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

/// Prompts (whole conversations) per shard.
const PROMPTS_PER_SHARD: usize = 32;

/// Most bytes per response token in a shard: twelve columns of four bytes, uncompressed.
const BYTES_PER_TOKEN: u64 = 48;

/// The job's result, printed by `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct BuiltData {
    /// The directory of the shards.
    pub(crate) data_dir: PathBuf,
    /// The number of shards of the whole data set.
    pub(crate) num_shards: usize,
    /// This process's shards that existed already.
    pub(crate) num_shards_kept: usize,
    /// The number of prompts of the whole data set.
    pub(crate) num_prompts: usize,
    /// Shards that other processes have yet to build.
    pub(crate) num_shards_left: usize,
    /// Response tokens written by this run.
    pub(crate) num_new_tokens: usize,
}

/// Which shards to build.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Building {
    /// This process's part of the data.
    pub(crate) shard: Shard,
    /// Whether to build damaged shards again instead of failing.
    pub(crate) repairs: bool,
}

impl Building {
    /// All missing shards.
    pub(crate) const ALL: Self = Self { shard: Shard::WHOLE, repairs: false };
}

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    building: Building,
    workspace: &Workspace,
    console: &Console,
) -> Result<BuiltData> {
    let data = recipe
        .data
        .as_ref()
        .context("the recipe has no section `[data]`, which names the prompts")?;
    let store = data.store.as_deref().map(DataStore::open).transpose()?;
    let text = workspace.text_side()?;
    let prompts = choose_prompts(recipe, data, text, console)?;
    let pair = match data.target_elsewhere() {
        None => Some(workspace.pair()?),
        Some(_) => None,
    };
    let provenance = data_provenance(recipe, data, workspace)?;
    let (dir, num_shards) = (recipe.data_dir(), prompts.len().div_ceil(PROMPTS_PER_SHARD));
    let job = Job { building, workspace, prompts, provenance, store, dir, num_shards, console };
    let (kept, missing) = job.kept_and_missing()?;
    check_prompts(text, &job.prompts, data, workspace.vocab_size()?)?;
    job.check_room(&missing, data.max_new_tokens.min(text.context))?;
    std::fs::create_dir_all(&job.dir)
        .with_context(|| format!("cannot create `{}`", job.dir.display()))?;
    recipe.write_beside(&job.dir)?;
    let (num_kept, num_missing) = (job.num_prompts(&kept), job.num_prompts(&missing));
    let served = match data.served_by() {
        Some(_) => {
            let missing = job.prompts.each(missing.iter().flat_map(|index| job.prompts_of(*index)));
            Some(ask_servers(recipe, building.shard, workspace, num_missing, missing, console)?)
        }
        None => None,
    };
    let progress = Progress::new(console, "build-data", "prompts", (num_kept + num_missing) as u64);
    let (seed, decoding, served) = (recipe.seed, data.decoding(), served.as_ref());
    let rows = match (pair, served) {
        (None, Some(served)) => {
            RowSource::Served(ServedRows::new(served, recipe, data, workspace, console, &progress)?)
        }
        (pair, served) => {
            let pair = pair.context("without a server the weights are read")?;
            let (progress, given) = (&progress, GivenLabels::default());
            RowSource::Models(Labeller {
                pair,
                data,
                seed,
                decoding,
                served,
                given,
                progress,
                console,
            })
        }
    };
    progress.skip_to(num_kept as u64);
    let num_new_tokens = job.build(&missing, &rows)?;
    match &rows {
        RowSource::Served(served) => served.note(),
        RowSource::Models(labeller) => labeller.given.note(data.max_new_tokens, console),
    }
    progress.finish();
    let built = job.finish(kept.len(), missing.len(), num_new_tokens)?;
    console.document(&built)?;
    Ok(built)
}

/// The build of one data set's shards.
struct Job<'a> {
    building: Building,
    workspace: &'a Workspace,
    prompts: ChosenPrompts,
    provenance: Provenance,
    store: Option<DataStore>,
    dir: PathBuf,
    num_shards: usize,
    console: &'a Console,
}

impl Job<'_> {
    /// The prompts of a shard.
    fn prompts_of(&self, index: usize) -> Range<usize> {
        let begin = index * PROMPTS_PER_SHARD;
        begin..(begin + PROMPTS_PER_SHARD).min(self.prompts.len())
    }

    fn num_prompts(&self, shards: &[usize]) -> usize {
        shards.iter().map(|index| self.prompts_of(*index).len()).sum()
    }

    /// This process's shards that exist and those to build, after synchronising with the store.
    fn kept_and_missing(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let Self { building, store, dir, .. } = self;
        if let Some(store) = store {
            store.pull_own(dir, self.num_shards, building.shard, building.repairs)?;
        }
        let present =
            present_shards(dir, &self.provenance, self.num_shards, *building, self.console)?;
        if let Some(store) = store {
            store.push_missing(dir, present.iter().copied())?;
        }
        let own = (0..self.num_shards).filter(|index| building.shard.builds(*index));
        Ok(own.partition(|index| present.contains(index)))
    }

    /// Checks the free disk space, and notes how much is to be written at most.
    fn check_room(&self, missing: &[usize], max_new_tokens: usize) -> Result<()> {
        let num_turns: usize =
            missing.iter().map(|index| self.prompts.num_turns(self.prompts_of(*index))).sum();
        let most_tokens = num_turns as u64 * max_new_tokens as u64;
        let most_bytes = most_tokens.saturating_mul(BYTES_PER_TOKEN);
        check_room("the data", &self.dir, most_bytes)?;
        if num_turns > 0 {
            self.console.note(format!(
                "build-data: {num_turns} responses to write, at most {most_tokens} tokens and {}",
                in_bytes(most_bytes)
            ));
        }
        Ok(())
    }

    /// Builds the missing shards and returns the number of response tokens.
    ///
    /// Each thread takes one shard after another. A thread that finds none left helps the others'
    /// forwards. Shards are therefore not tasks of the thread pool: a thread that waits for half a forward
    /// could pick one up.
    fn build(&self, missing: &[usize], rows: &RowSource<'_>) -> Result<usize> {
        let waiting = Mutex::new((missing.iter(), self.prompts.reader()));
        let next_shard = || -> Result<Option<(usize, Vec<Prompt>)>> {
            let mut waiting = waiting.lock().expect("nobody panics while holding it");
            let (shards, reader) = &mut *waiting;
            let Some(index) = shards.next() else { return Ok(None) };
            let prompts = self.prompts_of(*index).map(|number| reader.get(number));
            Ok(Some((*index, prompts.collect::<Result<_>>()?)))
        };
        let build_some = |_| -> Result<usize> {
            let mut num_new_tokens = 0;
            while let Some((index, prompts)) = next_shard()? {
                num_new_tokens += self.build_shard(index, &prompts, rows)?;
            }
            Ok(num_new_tokens)
        };
        let is_cpu = DeviceChoice::is_cpu(self.workspace.device());
        let num_threads = if is_cpu { rayon::current_num_threads() } else { 1 };
        let num_new_tokens: Vec<usize> = (0..num_threads)
            .into_par_iter()
            .with_max_len(1)
            .map(build_some)
            .collect::<Result<_>>()?;
        Ok(num_new_tokens.iter().sum())
    }

    fn build_shard(&self, index: usize, prompts: &[Prompt], rows: &RowSource<'_>) -> Result<usize> {
        let Self { dir, provenance, num_shards: count, .. } = self;
        let prompts: Vec<&Prompt> = prompts.iter().collect();
        let rows = match rows {
            RowSource::Models(labeller) => labeller.rows(&prompts)?,
            RowSource::Served(served) => served.rows(&prompts)?,
        };
        self.workspace.forget(dir);
        let place = ShardPlace { index, count: *count };
        write_shard(&shard_path(dir, index), &rows, provenance, Some(place))?;
        if let Some(store) = &self.store {
            store.push(dir, index, if self.building.repairs { Put::Over } else { Put::New })?;
        }
        Ok(rows.iter().map(|row| row.response_ids.len()).sum())
    }

    /// Writes the manifest if every shard exists, and notes what was built.
    fn finish(
        self,
        num_shards_kept: usize,
        num_built: usize,
        num_new_tokens: usize,
    ) -> Result<BuiltData> {
        let Self { building, prompts, store, dir: data_dir, num_shards, console, .. } = self;
        let num_shards_left = match &store {
            Some(store) => store.finish(&data_dir, num_shards, building.repairs)?,
            None => finish(&data_dir, num_shards)?,
        };
        let num_own = num_shards_kept + num_built;
        console.note(format!(
            "build-data: {num_own} shards in `{}`, {num_shards_kept} of which existed{}",
            data_dir.display(),
            match num_shards_left {
                0 if num_own == num_shards => String::new(),
                0 => format!("; all {num_shards} are complete"),
                left => format!("; {left} of {num_shards} are left to other processes"),
            }
        ));
        let num_prompts = prompts.len();
        Ok(BuiltData {
            data_dir,
            num_shards,
            num_shards_kept,
            num_prompts,
            num_shards_left,
            num_new_tokens,
        })
    }
}

/// Checks every prompt's first turn before any work, and that ids are unique if responses are taken from
/// the files, where prompts given as tokens name their ids.
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
        if takes_existing && !prompt.turns.iter().all(draftsmith_data::Turn::has_response) {
            bail!(
                "prompt `{}` has no response in its file; \
                 hint: set `data.responses = \"generate\"` to generate them with the target",
                prompt.id
            );
        }
        text.check_fits(&prompt.id, &text.prompt_ids(&prompt, 0, &[])?)?;
        check_known(&prompt, vocab_size)?;
        if takes_existing && !ids.insert(prompt.id.clone()) {
            bail!(
                "two prompts have the id `{}`, the second in `{}`; hint: change or remove one of them",
                prompt.id,
                prompt.source
            );
        }
    }
    Ok(())
}

/// A turn's share of its prompt's work.
fn share_of_turn(prompt: &Prompt) -> f64 {
    1.0 / prompt.turns.len() as f64
}

/// Where rows come from.
enum RowSource<'a> {
    /// Target and draft run locally.
    Models(Labeller<'a>),
    /// Servers run the target, and the draft runs locally.
    Served(ServedRows<'a>),
}

/// Builds rows with the target's weights.
struct Labeller<'a> {
    pair: &'a Pair,
    data: &'a DataRecipe,
    seed: u64,
    decoding: Decoding,
    /// The servers' responses, if servers write them.
    served: Option<&'a Served>,
    /// Statistics of responses given as tokens.
    given: GivenLabels,
    progress: &'a Progress,
    console: &'a Console,
}

/// The response to a turn.
struct Response<'p> {
    ids: Vec<u32>,
    finish: FinishReason,
    /// The target's log-probability of each token, if already known.
    target_log_prob: Option<Vec<f32>>,
    /// Its source, if the prompt file gives tokens.
    given: Option<&'p GivenTokens>,
}

impl Labeller<'_> {
    /// The rows of conversations, one per assistant turn, in order.
    fn rows(&self, prompts: &[&Prompt]) -> Result<Vec<ResponseRow>> {
        let mut left = prompts.len() as f64;
        let answered = answer_batched(
            &self.pair.text,
            prompts,
            |row: &ResponseRow| &row.response_ids,
            |turns| {
                let responses = self.responses(prompts, &turns)?;
                let label = |((prompt_index, turn), response): ((usize, Turn), Response<'_>)| {
                    if self.console.is_interrupted() {
                        return Err(Interrupted.into());
                    }
                    let prompt = prompts[prompt_index];
                    let row = answer_named(turn, |turn| self.row(prompt, turn, response))?;
                    let share = share_of_turn(prompt);
                    self.progress.advance_part(share * (1.0 - self.share_of_response()));
                    left -= share;
                    Ok(row)
                };
                turns.into_iter().zip(responses).map(label).collect()
            },
        )?;
        // The turns that exceed the context.
        self.progress.advance_part(left);
        Ok(answered.into_iter().flat_map(|(rows, _)| rows).collect())
    }

    /// The share of a turn's work that generating the response takes: half if the labels need another
    /// forward over it.
    fn share_of_response(&self) -> f64 {
        match (self.data.responses, &self.pair.draft) {
            (Responses::Existing | Responses::Server, _) => 0.0,
            (Responses::Generate, Some(_)) => 0.5,
            (Responses::Generate, None) => 1.0,
        }
    }

    /// The response to each turn: from its file, the servers or the target.
    fn responses<'p>(
        &self,
        prompts: &[&'p Prompt],
        turns: &[(usize, Turn)],
    ) -> Result<Vec<Response<'p>>> {
        if self.data.responses == Responses::Existing {
            let existing = |(prompt_index, Turn { number, id, prompt_ids }): &(usize, Turn)| {
                let turn = &prompts[*prompt_index].turns[*number];
                let most = self.data.max_new_tokens;
                let (ids, finish) = existing_response(&self.pair.text, turn, prompt_ids, most)
                    .with_context(|| format!("prompt `{id}`"))?;
                Ok(Response { ids, finish, target_log_prob: None, given: turn.tokens.as_ref() })
            };
            return turns.iter().map(existing).collect();
        }
        if let Some(served) = self.served {
            let served = |(_, turn): &(usize, Turn)| {
                let ServedResponse { ids, finish, .. } =
                    served.response(&turn.id, &turn.prompt_ids)?;
                Ok(Response { ids, finish, target_log_prob: None, given: None })
            };
            return turns.iter().map(served).collect();
        }
        let share = self.share_of_response();
        let worth = |(index, _): &(usize, Turn)| share_of_turn(prompts[*index]) * share;
        self.generate(turns, turns.iter().map(worth).collect())
    }

    /// Generates the response to each turn with the target. `worth` is each turn's share of the progress.
    fn generate<'p>(&self, turns: &[(usize, Turn)], worth: Vec<f64>) -> Result<Vec<Response<'p>>> {
        let responder = Responder {
            target: &self.pair.target,
            context: self.pair.text.context,
            decoding: self.decoding,
            limits: self.pair.text.limits(self.data.max_new_tokens),
            console: self.console,
        };
        let vocab_size = self.pair.target.shape().vocab_size;
        let draws = |id: &str| SeededDraws::new(self.seed, &[id, "response"]);
        let mut prompts: Vec<(&[u32], SeededDraws)> =
            turns.iter().map(|(_, turn)| (&turn.prompt_ids[..], draws(&turn.id))).collect();
        let has_draft = self.pair.draft.is_some();
        // Without a draft no forward follows, so we compute the log-probabilities now.
        let mut log_probs = vec![Vec::new(); prompts.len()];
        let mut texts: Vec<Vec<u32>> =
            turns.iter().map(|(_, turn)| turn.prompt_ids.clone()).collect();
        let mut written = self.progress.side_by_side(worth);
        let mut lens = vec![0; turns.len()];
        let observe = |nth: usize, tokens: RoundTokens<'_>| {
            lens[nth] += tokens.kept.len();
            written.reach(nth, lens[nth] as f64 / self.data.max_new_tokens as f64);
            if !has_draft {
                for (id, logits) in tokens.kept.iter().zip(tokens.logits.chunks_exact(vocab_size)) {
                    let text = &mut texts[nth];
                    log_probs[nth].push(labels::log_prob(&self.decoding, logits, text, *id));
                    text.push(*id);
                }
            }
        };
        let generations = responder.respond(&mut prompts, observe)?;
        written.finish();
        let response = |(generation, log_probs): (Generation, Vec<f32>)| Response {
            ids: generation.token_ids,
            finish: match generation.finish {
                Finish::Eos => FinishReason::Eos,
                Finish::StopString => FinishReason::StopString,
                Finish::Length | Finish::Stopped => FinishReason::Length,
            },
            target_log_prob: (!has_draft).then_some(log_probs),
            given: None,
        };
        Ok(generations.into_iter().zip(log_probs).map(response).collect())
    }

    fn row(&self, prompt: &Prompt, turn: Turn, response: Response<'_>) -> Result<ResponseRow> {
        let Turn { id, prompt_ids, .. } = turn;
        let Response { ids: response_ids, finish: finish_reason, target_log_prob, given } =
            response;
        let labels = match target_log_prob {
            Some(response_target_log_prob) => Labels { response_target_log_prob, draft: None },
            None => {
                let mut draws = SeededDraws::new(self.seed, &[&id, "draft tokens"]);
                let draft_tokens = match given.and_then(|given| given.draft_ids.as_deref()) {
                    Some(ids) => DraftTokens::Given(&ids[..response_ids.len()]),
                    None => DraftTokens::Drawn(&mut draws),
                };
                Labels::of(self.pair, &self.decoding, &prompt_ids, &response_ids, draft_tokens)?
            }
        };
        if let (Some(given), Some(columns)) = (given, &labels.draft) {
            self.given.count(given, columns)?;
        }
        let mut row = ResponseRow {
            id,
            source: prompt.source.clone(),
            prompt_ids,
            response_ids,
            response_target_log_prob: labels.response_target_log_prob,
            target_outside_mass: None,
            draft: labels.draft,
            finish_reason,
        };
        row.round_stored();
        Ok(row)
    }
}

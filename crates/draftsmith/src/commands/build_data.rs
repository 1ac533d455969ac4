//! `build-data`: prompts in, labelled responses out, in shards that are each whole or absent.
//!
//! A shard holds the rows of a fixed run of prompts, and every draw is seeded by its row's id: so
//! a job that was killed resumes at the first missing shard, and the bytes are the same in the
//! end, however often it was stopped and on however many threads, or by however many processes, it ran.
//! `build_data/present.rs` looks at what is there, `build_data/existing.rs` takes responses from the files.

mod existing;
mod present;

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    FinishReason, GivenTokens, Prompt, ResponseRow, ShardPlace, shard_path, write_shard,
};
use draftsmith_decode::{Finish, Generation, RoundTokens};
use draftsmith_files::{check_room, in_bytes};
use draftsmith_theory::{Decoding, SeededDraws};
use rayon::prelude::*;
use serde::Serialize;

use self::existing::{Existing, GivenLabels, check_known, existing_response};
use self::present::{finish, present_shards};
use crate::built_data::data_provenance;
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_named, answer_side_by_side};
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

/// Prompts (whole conversations) a shard.
const PROMPTS_PER_SHARD: usize = 32;

/// The most bytes that a response's token takes in a shard: twelve columns of four, not compressed.
const BYTES_A_TOKEN: u64 = 48;

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
    /// Shards that other processes have still to build.
    pub(crate) num_shards_left: usize,
    /// Response tokens written now.
    pub(crate) num_new_tokens: usize,
}

/// What of the data is built.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Building {
    /// The shards of this process.
    pub(crate) shard: Shard,
    /// Whether shards that are not what was written are built again; an error if not.
    pub(crate) repairs: bool,
}

impl Building {
    /// All of it, as far as it is not there.
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
        .context("the recipe has no section `[data]`: it says which prompts to build data from")?;
    let store = data.store.as_deref().map(DataStore::open).transpose()?;
    let text = workspace.text_side()?;
    let prompts = choose_prompts(recipe, data, text, console)?;
    let pair = match data.target_elsewhere() {
        None => Some(workspace.pair()?),
        Some(_) => None,
    };
    let provenance = data_provenance(recipe, data, workspace)?;
    let dir = recipe.data_dir();
    let num_shards = prompts.len().div_ceil(PROMPTS_PER_SHARD);
    if let Some(store) = &store {
        store.pull_own(&dir, num_shards, building.shard, building.repairs)?;
    }
    let present = present_shards(&dir, &provenance, num_shards, building, console)?;
    if let Some(store) = &store {
        store.push_missing(&dir, present.iter().copied())?;
    }
    check_prompts(text, &prompts, data, workspace.vocab_size()?)?;

    let prompts_of = |index: usize| -> Range<usize> {
        let begin = index * PROMPTS_PER_SHARD;
        begin..(begin + PROMPTS_PER_SHARD).min(prompts.len())
    };
    let own = (0..num_shards).filter(|index| building.shard.builds(*index));
    let (there, missing): (Vec<usize>, Vec<usize>) = own.partition(|index| present.contains(index));
    let num_prompts = |shards: &[usize]| shards.iter().map(|index| prompts_of(*index).len()).sum();
    let (num_there, num_missing): (usize, usize) = (num_prompts(&there), num_prompts(&missing));
    let num_turns: usize = missing.iter().map(|index| prompts.num_turns(prompts_of(*index))).sum();
    let most_tokens = num_turns as u64 * data.max_new_tokens.min(text.context) as u64;
    let most_bytes = most_tokens.saturating_mul(BYTES_A_TOKEN);
    check_room("the data", &dir, most_bytes)?;
    if num_turns > 0 {
        console.note(format!(
            "build-data: {num_turns} responses to write, at most {most_tokens} tokens and {}",
            in_bytes(most_bytes)
        ));
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
    recipe.write_beside(&dir)?;
    let served = match data.served_by() {
        Some(_) => {
            let missing = prompts.each(missing.iter().flat_map(|index| prompts_of(*index)));
            Some(ask_servers(recipe, building.shard, workspace, num_missing, missing, console)?)
        }
        None => None,
    };
    let progress =
        Progress::new(console, "build-data", "prompts", (num_there + num_missing) as u64);
    let (seed, decoding, served) = (recipe.seed, data.decoding(), served.as_ref());
    let rows = match (pair, served) {
        (None, Some(served)) => {
            Rows::Served(ServedRows::new(served, recipe, data, workspace, console, &progress)?)
        }
        (pair, served) => {
            let pair = pair.context("there are weights where no server is asked")?;
            let progress = &progress;
            let given = GivenLabels::default();
            Rows::Own(Labeller { pair, data, seed, decoding, served, given, progress, console })
        }
    };
    progress.skip_to(num_there as u64);
    let build = |index: usize, prompts: &[&Prompt]| -> Result<usize> {
        let rows = match &rows {
            Rows::Own(labeller) => labeller.rows(prompts)?,
            Rows::Served(served) => served.rows(prompts)?,
        };
        let place = ShardPlace { index, count: num_shards };
        workspace.forget(&dir);
        write_shard(&shard_path(&dir, index), &rows, &provenance, Some(place))?;
        if let Some(store) = &store {
            store.push(&dir, index, if building.repairs { Put::Over } else { Put::New })?;
        }
        Ok(rows.iter().map(|row| row.response_ids.len()).sum())
    };
    // Each thread takes a shard after the other. One that is left without helps the others, a
    // forward at a time: so shards are no work of the pool's own, which whoever waits for half a
    // forward might pick up.
    let waiting = Mutex::new((missing.iter(), prompts.reader()));
    let next_shard = || -> Result<Option<(usize, Vec<Prompt>)>> {
        let mut waiting = waiting.lock().expect("nobody panics while holding it");
        let (shards, reader) = &mut *waiting;
        let Some(index) = shards.next() else { return Ok(None) };
        let prompts = prompts_of(*index).map(|number| reader.get(number));
        Ok(Some((*index, prompts.collect::<Result<_>>()?)))
    };
    let build_some = |_| -> Result<usize> {
        let mut num_new_tokens = 0;
        while let Some((index, prompts)) = next_shard()? {
            num_new_tokens += build(index, &prompts.iter().collect::<Vec<_>>())?;
        }
        Ok(num_new_tokens)
    };
    let num_threads =
        if DeviceChoice::is_cpu(workspace.device()) { rayon::current_num_threads() } else { 1 };
    let num_new_tokens: Vec<usize> =
        (0..num_threads).into_par_iter().with_max_len(1).map(build_some).collect::<Result<_>>()?;
    match &rows {
        Rows::Served(served) => served.tell(),
        Rows::Own(labeller) => labeller.given.tell(data.max_new_tokens, console),
    }
    progress.finish();
    let num_shards_left = match &store {
        Some(store) => store.finish(&dir, num_shards, building.repairs)?,
        None => finish(&dir, num_shards)?,
    };
    let built = BuiltData {
        data_dir: dir,
        num_shards,
        num_shards_kept: there.len(),
        num_prompts: prompts.len(),
        num_shards_left,
        num_new_tokens: num_new_tokens.iter().sum(),
    };
    let num_own = built.num_shards_kept + missing.len();
    console.note(format!(
        "build-data: {num_own} shards in `{}`, {} of them there before{}",
        built.data_dir.display(),
        built.num_shards_kept,
        match num_shards_left {
            0 if num_own == num_shards => String::new(),
            0 => format!("; all {num_shards} are there"),
            left => format!("; of {num_shards}, {left} are for other processes to build"),
        }
    ));
    console.document(&built)?;
    Ok(built)
}

/// Checks every prompt's first turn, so that one that cannot be used is an error before any work, and
/// that no two have one id: those that came as tokens have their file's.
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
                 hint: set `data.responses = \"generate\"` to let the target write them",
                prompt.id
            );
        }
        text.check_fits(&prompt.id, &text.prompt_ids(&prompt, 0, &[])?)?;
        check_known(&prompt, vocab_size)?;
        if takes_existing && ids.contains(&prompt.id) {
            bail!(
                "two prompts have the id `{}`, the second in `{}`; hint: change one of them, or \
                 remove it",
                prompt.id,
                prompt.source
            );
        }
        if takes_existing {
            ids.insert(prompt.id);
        }
    }
    Ok(())
}

/// What a turn is of a prompt's work.
fn share_of_turn(prompt: &Prompt) -> f64 {
    1.0 / prompt.turns.len() as f64
}

/// Who makes rows.
enum Rows<'a> {
    /// The models here.
    Own(Labeller<'a>),
    /// Servers, of which the draft alone is here.
    Served(ServedRows<'a>),
}

/// What the rows of all prompts have in common.
struct Labeller<'a> {
    pair: &'a Pair,
    data: &'a DataRecipe,
    seed: u64,
    decoding: Decoding,
    /// What servers answered.
    served: Option<&'a Served>,
    /// What came as tokens.
    given: GivenLabels,
    progress: &'a Progress,
    console: &'a Console,
}

/// What answers a turn.
struct Response<'p> {
    ids: Vec<u32>,
    finish: FinishReason,
    /// The target's log-probability of each token, if that is known already.
    target_log_prob: Option<Vec<f32>>,
    /// What it was taken from, where it came as tokens.
    given: Option<&'p GivenTokens>,
}

impl Labeller<'_> {
    /// The rows of conversations, one an assistant turn, in order.
    fn rows(&self, prompts: &[&Prompt]) -> Result<Vec<ResponseRow>> {
        let mut left = prompts.len() as f64;
        let answered = answer_side_by_side(
            &self.pair.text,
            prompts,
            |row: &ResponseRow| &row.response_ids,
            |turns| {
                let responses = self.responses(prompts, &turns)?;
                let label = |((of_prompt, turn), response): ((usize, Turn), Response<'_>)| {
                    if self.console.is_interrupted() {
                        return Err(Interrupted.into());
                    }
                    let prompt = prompts[of_prompt];
                    let row = answer_named(turn, |turn| self.row(prompt, turn, response))?;
                    let share = share_of_turn(prompt);
                    self.progress.advance_part(share * (1.0 - self.share_of_response()));
                    left -= share;
                    Ok(row)
                };
                turns.into_iter().zip(responses).map(label).collect()
            },
        )?;
        // Those that outgrew the context.
        self.progress.advance_part(left);
        Ok(answered.into_iter().flat_map(|(rows, _)| rows).collect())
    }

    /// How much of a turn's work it is to have the response written: half, where it is read once more
    /// for its labels.
    fn share_of_response(&self) -> f64 {
        match (self.data.responses, &self.pair.draft) {
            (Responses::Existing | Responses::Server, _) => 0.0,
            (Responses::Generate, Some(_)) => 0.5,
            (Responses::Generate, None) => 1.0,
        }
    }

    /// What answers each turn: the file's own response, or the target's.
    fn responses<'p>(
        &self,
        all_prompts: &[&'p Prompt],
        turns: &[(usize, Turn)],
    ) -> Result<Vec<Response<'p>>> {
        if self.data.responses == Responses::Existing {
            return turns
                .iter()
                .map(|(of_prompt, Turn { number, id, prompt_ids })| {
                    let turn = &all_prompts[*of_prompt].turns[*number];
                    let most = self.data.max_new_tokens;
                    let existing = existing_response(&self.pair.text, turn, prompt_ids, most);
                    let Existing { ids, finish } =
                        existing.with_context(|| format!("prompt `{id}`"))?;
                    Ok(Response { ids, finish, target_log_prob: None, given: turn.tokens.as_ref() })
                })
                .collect();
        }
        if let Some(served) = self.served {
            let served = |(_, turn): &(usize, Turn)| {
                let ServedResponse { ids, finish, .. } =
                    served.response(&turn.id, &turn.prompt_ids)?;
                Ok(Response { ids, finish, target_log_prob: None, given: None })
            };
            return turns.iter().map(served).collect();
        }
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
        // Without a draft, the logits that a token is drawn from are read once: now.
        let mut log_probs = vec![Vec::new(); prompts.len()];
        let mut texts: Vec<Vec<u32>> =
            turns.iter().map(|(_, turn)| turn.prompt_ids.clone()).collect();
        let worth = |(of_prompt, _): &(usize, Turn)| {
            share_of_turn(all_prompts[*of_prompt]) * self.share_of_response()
        };
        let mut written = self.progress.side_by_side(turns.iter().map(worth).collect());
        let mut lens = vec![0; turns.len()];
        let note_tokens = |nth: usize, tokens: RoundTokens<'_>| {
            lens[nth] += tokens.kept.len();
            written.reach(nth, lens[nth] as f64 / self.data.max_new_tokens as f64);
            if self.pair.draft.is_none() {
                for (id, logits) in tokens.kept.iter().zip(tokens.logits.chunks_exact(vocab_size)) {
                    let text = &mut texts[nth];
                    log_probs[nth].push(labels::log_prob(&self.decoding, logits, text, *id));
                    text.push(*id);
                }
            }
        };
        let generations = responder.respond(&mut prompts, note_tokens)?;
        written.finish();
        let response = |(generation, log_probs): (Generation, Vec<f32>)| Response {
            ids: generation.token_ids,
            finish: match generation.finish {
                Finish::Eos => FinishReason::Eos,
                Finish::StopString => FinishReason::StopString,
                Finish::Length | Finish::Stopped => FinishReason::Length,
            },
            target_log_prob: self.pair.draft.is_none().then_some(log_probs),
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

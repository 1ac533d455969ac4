//! `record`: what each drafter proposes along responses of the target, so that any stop rule can be
//! replayed without models.
//!
//! Two sets of prompts are recorded, validation and test, each drafter and way of decoding in a
//! file of its own that is whole or absent. Every draw is seeded by its row's id: threads, order
//! and restarts change nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{Generation, Limits};
use draftsmith_files::{check_room, in_bytes};
use draftsmith_model::HeadInput;
use draftsmith_theory::{Recording, SeededDraws};
use rayon::prelude::*;
use serde::Serialize;

use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::{Turn, answer_side_by_side};
use crate::device::{DeviceChoice, on_pool};
use crate::exports::{Exports, adapter_dirs};
use crate::pair::Pair;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::recordings::{RecordingJob, ToRecord};
use crate::responses::{Responder, sequences_at_once};
use crate::results::{DecodingName, DrafterName};
use crate::rollouts::{
    FileState, PromptSet, RolloutFiles, RolloutKey, RolloutSummary, SetPrompt, SetSources,
};
use crate::workspace::Workspace;

/// The most bytes that a candidate takes in a file: six columns of four, not compressed.
const BYTES_A_CANDIDATE: u64 = 24;

/// A file of rollouts, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct RecordedFile {
    /// The file.
    pub(crate) path: PathBuf,
    /// What drafted.
    pub(crate) drafter: DrafterName,
    /// Which prompts.
    pub(crate) set: PromptSet,
    /// How tokens were chosen.
    pub(crate) decoding: DecodingName,
    /// Whether it was there already, recorded with the same models, prompts and settings.
    pub(crate) kept: bool,
    /// What is in it.
    #[serde(flatten)]
    pub(crate) summary: RolloutSummary,
}

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<RecordedFile>> {
    on_pool(|| record(recipe, workspace, console))
}

fn record(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Vec<RecordedFile>> {
    let (tune, evaluate) = recipe.need_tuning("record")?;
    if adapter_dirs(recipe, evaluate).is_empty() {
        recipe.need_draft("record, where there is no adapter,")?;
    }
    let validation = SetSources::read(recipe, PromptSet::Validation, workspace)?;
    let test = SetSources::read(recipe, PromptSet::Test, workspace)?;
    let pair = workspace.pair()?;
    let exports = Exports::read(recipe, evaluate, workspace)?;
    let mut heads = exports.heads();
    if let Some(head) = heads.find(|head| head.config.reads.inputs().contains(&HeadInput::Position))
    {
        bail!(
            "the head in `{}` reads `position`, so its prediction for a candidate depends on where \
             the round began, and cannot be recorded once; hint: train it without `position` in \
             its `inputs`, or leave out record, tune and replay",
            head.dir.display()
        );
    }
    let sets = [
        (PromptSet::Validation, validation.choose(recipe, workspace, console)?),
        (PromptSet::Test, test.choose(recipe, workspace, console)?),
    ];
    let files = RolloutFiles::of(recipe, workspace)?;
    let dir = recipe.data_dir();
    let plan = plan(&files, evaluate, &sets, console)?;
    let most_tokens = (plan.num_responses() * evaluate.max_new_tokens.min(pair.context())) as u64;
    let most_bytes = most_tokens.saturating_mul(tune.max_length as u64 * BYTES_A_CANDIDATE);
    check_room("what drafters propose", &dir, most_bytes)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
    if most_tokens > 0 {
        console.note(format!(
            "record: {} responses to write and to record, at most {most_tokens} tokens and {}",
            plan.num_responses(),
            in_bytes(most_bytes)
        ));
    }
    let progress = Progress::new(console, "record", "responses", plan.num_responses() as u64);
    let recorder = Recorder {
        pair,
        exports: &exports,
        evaluate,
        seed: recipe.seed,
        max_length: tune.max_length,
        on_cpu: DeviceChoice::is_cpu(workspace.device()),
        console,
        progress: &progress,
    };
    let mut recorded = Vec::new();
    for group in plan.groups {
        // The target answers once for all drafters.
        let mut answers = None;
        for (key, present) in group.files {
            let kept = present.is_some();
            let summary = match present {
                Some(summary) => summary,
                None => {
                    let recordings = recorder.record(key, group.prompts, &mut answers)?;
                    files.write(key, &recordings)?.summary()
                }
            };
            recorded.push(RecordedFile {
                path: files.path(key),
                drafter: key.drafter,
                set: key.set,
                decoding: key.decoding,
                kept,
                summary,
            });
        }
    }
    if recorded.iter().all(|file| file.kept) {
        progress.clear()
    } else {
        progress.finish()
    }
    tell(&recorded, console)?;
    Ok(recorded)
}

/// All files, those of one set and decoding together.
struct Plan<'a> {
    groups: Vec<PlanGroup<'a>>,
}

struct PlanGroup<'a> {
    prompts: &'a [SetPrompt],
    /// With what a file holds that need not be recorded.
    files: Vec<(RolloutKey, Option<RolloutSummary>)>,
}

impl Plan<'_> {
    /// Responses that are still to be given, once, and recorded, once for each file.
    fn num_responses(&self) -> usize {
        let of_group = |group: &PlanGroup<'_>| {
            let num_files = group.files.iter().filter(|(_, present)| present.is_none()).count();
            let num_turns: usize = group.prompts.iter().map(SetPrompt::num_turns).sum();
            if num_files == 0 { 0 } else { (1 + num_files) * num_turns }
        };
        self.groups.iter().map(of_group).sum()
    }
}

fn plan<'a>(
    files: &RolloutFiles<'_>,
    evaluate: &EvaluateRecipe,
    sets: &'a [(PromptSet, Vec<SetPrompt>)],
    console: &Console,
) -> Result<Plan<'a>> {
    let mut decodings = evaluate.decodings.clone();
    decodings.sort();
    decodings.dedup();
    let mut groups = Vec::new();
    for (set, prompts) in sets {
        for decoding in &decodings {
            let mut group = PlanGroup { prompts, files: Vec::new() };
            for drafter in files.drafters() {
                let key = RolloutKey { drafter, set: *set, decoding: *decoding };
                let present = match files.state(key)? {
                    FileState::Whole(set) => Some(set.summary()),
                    FileState::Absent => None,
                    FileState::Stale(why) => {
                        console.note(format!("record: {why}: it is recorded again"));
                        None
                    }
                };
                group.files.push((key, present));
            }
            groups.push(group);
        }
    }
    Ok(Plan { groups })
}

/// The target's answer to one prompt.
struct Answer {
    id: String,
    prompt_ids: Vec<u32>,
    response_ids: Vec<u32>,
}

/// What the recordings of all prompts have in common.
struct Recorder<'a> {
    pair: &'a Pair,
    exports: &'a Exports,
    evaluate: &'a EvaluateRecipe,
    seed: u64,
    max_length: usize,
    on_cpu: bool,
    console: &'a Console,
    progress: &'a Progress,
}

impl Recorder<'_> {
    /// Records all prompts. Their answers, a turn each, are added where the target has not given
    /// them yet.
    fn record(
        &self,
        key: RolloutKey,
        prompts: &[SetPrompt],
        answers: &mut Option<Vec<Answer>>,
    ) -> Result<Vec<(String, Recording)>> {
        let (set, decoding) = (key.set.name(), key.stored_decoding());
        let answers = match answers {
            Some(answers) => answers,
            None => {
                self.progress.message(format!("target, {set}, {decoding}"));
                answers.insert(self.answer(prompts, key)?)
            }
        };
        self.progress.message(format!("{}, {set}, {decoding}", key.drafter));
        let job = RecordingJob {
            pair: self.pair,
            exports: self.exports,
            drafter: key.drafter,
            decoding: self.evaluate.decoding(key.decoding),
            max_new_tokens: self.evaluate.max_new_tokens,
            max_length: self.max_length,
            on_cpu: self.on_cpu,
            console: self.console,
            progress: self.progress,
        };
        let drafter = key.drafter.to_string();
        let mut responses: Vec<ToRecord<'_>> = answers
            .iter()
            .map(|answer| {
                let stream = [&answer.id, "rollouts", &drafter, decoding.as_str()];
                ToRecord {
                    prompt_ids: &answer.prompt_ids,
                    response_ids: &answer.response_ids,
                    draws: SeededDraws::new(self.seed, &stream),
                }
            })
            .collect();
        let recorded = job.record(&mut responses)?;
        let ids = answers.iter().map(|answer| answer.id.clone());
        Ok(ids.zip(recorded).collect())
    }

    /// The target's answers to all turns of prompts, each fed with the earlier ones.
    fn answer(&self, prompts: &[SetPrompt], key: RolloutKey) -> Result<Vec<Answer>> {
        let at_once = sequences_at_once(prompts.len(), self.on_cpu);
        let some = |prompts: &[SetPrompt]| self.answer_some(prompts, key);
        let answers: Vec<Vec<Answer>> = if self.on_cpu {
            prompts.par_chunks(at_once).map(some).collect::<Result<_>>()?
        } else {
            prompts.chunks(at_once).map(some).collect::<Result<_>>()?
        };
        Ok(answers.into_iter().flatten().collect())
    }

    /// The answers to prompts that go side by side: all of one form, as those of a set are.
    fn answer_some(&self, prompts: &[SetPrompt], key: RolloutKey) -> Result<Vec<Answer>> {
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
        let respond = |turns: Vec<(usize, Turn)>| self.respond(turns, key);
        let of_conversations = answer_side_by_side(
            self.pair,
            &conversations,
            |answer: &Answer| &answer.response_ids,
            respond,
        )?;
        let of_held_out = self.respond(held_out, key)?;
        Ok(of_conversations.into_iter().flat_map(|(all, _)| all).chain(of_held_out).collect())
    }

    /// The target's answers to turns, with which others go side by side.
    fn respond(&self, turns: Vec<(usize, Turn)>, key: RolloutKey) -> Result<Vec<Answer>> {
        let target = &self.pair.target;
        let responder = Responder {
            target,
            context: self.pair.context(),
            decoding: self.evaluate.decoding(key.decoding),
            limits: Limits {
                max_new_tokens: self.evaluate.max_new_tokens,
                eos_token_ids: target.shape().eos_token_ids.clone(),
            },
            console: self.console,
        };
        let draws =
            |id: &str| SeededDraws::new(self.seed, &[id, "record", key.stored_decoding().as_str()]);
        let mut prompts: Vec<(&[u32], SeededDraws)> =
            turns.iter().map(|(_, turn)| (&turn.prompt_ids[..], draws(&turn.id))).collect();
        let responses = responder.respond(&mut prompts, |_, _| ())?;
        self.progress.advance(turns.len() as u64);
        let answer = |((_, turn), response): ((usize, Turn), Generation)| {
            let Turn { id, prompt_ids, .. } = turn;
            Answer { id, prompt_ids, response_ids: response.token_ids }
        };
        Ok(turns.into_iter().zip(responses).map(answer).collect())
    }
}

fn tell(recorded: &[RecordedFile], console: &Console) -> Result<()> {
    console.document(&recorded)?;
    for file in recorded {
        let summary = &file.summary;
        let mut line = format!(
            "{}: {} responses, {} tokens",
            file.path.display(),
            summary.num_responses,
            summary.num_tokens
        );
        if let Some(share) = summary.share_accepted {
            line += &format!(", draft accepted at {:.1} %", share * 100.0);
        }
        if let Some(length) = summary.mean_rollout_length {
            line += &format!(", rollouts of {length:.1} tokens elsewhere");
        }
        if file.kept {
            line += " (there before)";
        }
        console.text(line + "\n")?;
    }
    Ok(())
}

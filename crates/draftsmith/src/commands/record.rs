//! `record`: what each drafter proposes along responses of the target, so that any stop rule can be
//! replayed without models.
//!
//! Two sets of prompts are recorded, validation and test, each drafter and way of decoding in a
//! file of its own that is whole or absent. Every draw is seeded by its row's id: threads, order
//! and restarts change nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use draftsmith_model::HeadInput;
use draftsmith_theory::{Recording, SeededDraws};
use rayon::prelude::*;
use serde::Serialize;

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::conversation::{Turn, answer_turns};
use crate::decoders::Decoders;
use crate::device::{DeviceChoice, on_pool};
use crate::exports::{Exports, adapter_dirs};
use crate::pair::Pair;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::results::{DecodingName, DrafterName};
use crate::rollouts::{
    FileState, PromptSet, RolloutFiles, RolloutKey, RolloutSummary, SetPrompt, SetSources,
};
use crate::workspace::Workspace;

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
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;

    let plan = plan(&files, evaluate, &sets, console)?;
    let progress = Progress::new(console, "record", "prompts", plan.num_prompts() as u64);
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
        let mut answers: Vec<Option<Vec<Answer>>> = group.prompts.iter().map(|_| None).collect();
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
    /// Prompts that are still to be recorded, once for each file.
    fn num_prompts(&self) -> usize {
        let of_group = |group: &PlanGroup<'_>| {
            let num_files = group.files.iter().filter(|(_, present)| present.is_none()).count();
            num_files * group.prompts.len()
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

impl<'a> Recorder<'a> {
    /// Records all prompts. Their answers, a turn each, are added where the target has not given
    /// them yet.
    fn record(
        &self,
        key: RolloutKey,
        prompts: &[SetPrompt],
        answers: &mut [Option<Vec<Answer>>],
    ) -> Result<Vec<(String, Recording)>> {
        let (set, decoding) = (key.set.name(), key.stored_decoding());
        self.progress.message(format!("{}, {set}, {decoding}", key.drafter));
        let decoders = || Decoders::new(self.pair, self.exports, self.evaluate.max_new_tokens);
        let one = |decoders: &mut Decoders<'a>,
                   (prompt, answers): (&SetPrompt, &mut Option<Vec<Answer>>)|
         -> Result<Vec<(String, Recording)>> {
            if self.console.is_interrupted() {
                return Err(Interrupted.into());
            }
            let answers = match answers {
                Some(answers) => answers,
                None => answers.insert(self.answer(decoders, prompt, key)?),
            };
            let recorded = answers
                .iter()
                .map(|answer| {
                    let recording = self
                        .record_answer(decoders, answer, key)
                        .with_context(|| format!("prompt `{}`", answer.id))?;
                    Ok((answer.id.clone(), recording))
                })
                .collect::<Result<Vec<_>>>()?;
            self.progress.advance(1);
            Ok(recorded)
        };
        let recorded: Vec<Vec<(String, Recording)>> = if self.on_cpu {
            let pairs = prompts.par_iter().zip(answers.par_iter_mut());
            pairs.map_init(decoders, one).collect::<Result<_>>()?
        } else {
            let mut decoders = decoders();
            let pairs = prompts.iter().zip(answers);
            pairs.map(|pair| one(&mut decoders, pair)).collect::<Result<_>>()?
        };
        Ok(recorded.into_iter().flatten().collect())
    }

    /// The target's answers to all turns of a prompt, each fed with the earlier ones.
    fn answer(
        &self,
        decoders: &mut Decoders<'a>,
        prompt: &SetPrompt,
        key: RolloutKey,
    ) -> Result<Vec<Answer>> {
        let decoding = self.evaluate.decoding(key.decoding);
        let mut one = |turn: Turn| -> Result<Answer> {
            let Turn { id, prompt_ids, .. } = turn;
            let stream = [&id, "record", key.stored_decoding().as_str()];
            let mut draws = SeededDraws::new(self.seed, &stream);
            let generation = decoders.decode_plain(&decoding, &prompt_ids, &mut draws)?;
            Ok(Answer { id, prompt_ids, response_ids: generation.token_ids })
        };
        match prompt {
            SetPrompt::Conversation(prompt) => {
                let (answers, _) =
                    answer_turns(self.pair, prompt, |answer| &answer.response_ids, one)?;
                Ok(answers)
            }
            SetPrompt::HeldOut { id, prompt_ids } => {
                let (id, prompt_ids) = (id.clone(), prompt_ids.clone());
                let named = format!("prompt `{id}`");
                Ok(vec![one(Turn { number: 0, id, prompt_ids }).context(named)?])
            }
        }
    }

    fn record_answer(
        &self,
        decoders: &mut Decoders<'a>,
        answer: &Answer,
        key: RolloutKey,
    ) -> Result<Recording> {
        let drafter = key.drafter.to_string();
        let stream = [&answer.id, "rollouts", &drafter, key.stored_decoding().as_str()];
        let mut draws = SeededDraws::new(self.seed, &stream);
        decoders.record(
            key.drafter,
            &self.evaluate.decoding(key.decoding),
            self.max_length,
            &answer.prompt_ids,
            &answer.response_ids,
            &mut draws,
        )
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

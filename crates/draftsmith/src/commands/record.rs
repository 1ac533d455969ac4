//! `record`: what each drafter proposes along responses of the target, so that any stop rule can be
//! replayed without models.
//!
//! Two sets of prompts are recorded, validation and test, each drafter and way of decoding in a
//! file of its own that is whole or absent. Every draw is seeded by its row's id: threads, order
//! and restarts change nothing.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_files::{check_room, in_bytes};
use serde::Serialize;

use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::SetPrompt;
use crate::device::{DeviceChoice, on_pool};
use crate::exports::{Exports, adapter_dirs};
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::recorder::Recorder;
use crate::recordings::RecordedModels;
use crate::results::{DecodingName, DrafterName};
use crate::rollouts::{FileState, PromptSet, RolloutFiles, RolloutKey, RolloutSummary, SetSources};
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
    let models = RecordedModels::of(recipe, workspace)?;
    let exports = Exports::read(recipe, evaluate, workspace)?;
    let sets = [
        (PromptSet::Validation, validation.choose(recipe, workspace, console)?),
        (PromptSet::Test, test.choose(recipe, workspace, console)?),
    ];
    let files = RolloutFiles::of(recipe, workspace)?;
    let dir = recipe.data_dir();
    let plan = plan(&files, evaluate, &sets, console)?;
    let most_tokens =
        (plan.num_responses() * evaluate.max_new_tokens.min(workspace.context()?)) as u64;
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
        models,
        max_new_tokens: evaluate.max_new_tokens,
        seed: recipe.seed,
        max_length: tune.max_length,
        labels: false,
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
                    let decoding = evaluate.decoding(key.decoding);
                    let (set, how) = (key.set.name(), key.decoding.text());
                    let answers = match &mut answers {
                        Some(answers) => answers,
                        None => {
                            progress.message(format!("target, {set}, {how}"));
                            answers.insert(recorder.answer(group.prompts, decoding)?)
                        }
                    };
                    progress.message(format!("{}, {set}, {how}", key.drafter));
                    let recorded = recorder.record(&exports, key.drafter, decoding, &*answers)?;
                    files.write(key, &recorded)?.summary()
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

//! `record`: records the candidates and signals of each drafter along responses of the target, so
//! that every stop rule can be replayed without models.
//!
//! Two sets of prompts are recorded, validation and test. There is one file for each set, drafter
//! and way of decoding. Each file is complete or absent.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use draftsmith_files::{check_room, in_bytes};
use draftsmith_report::DecodingName;
use serde::Serialize;

use crate::conversation::SetPrompt;
use crate::recorder::{AnswerRecorder, RecordedDrafter, RecordedModels};
use crate::rollouts::{
    FileState, PromptSet, RolloutFiles, RolloutKey, RolloutSummary, set_prompts,
};
use draftsmith_recipe::{EvaluateRecipe, NOTHING_DRAFTS, Recipe, Watch, Workspace};

/// The maximum number of bytes per candidate in a file: six uncompressed columns of four bytes.
const BYTES_A_CANDIDATE: u64 = 24;

/// The description of one rollouts file in `--json`.
#[derive(Debug, Serialize)]
pub struct RecordedFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The drafter, prompt set and way of decoding.
    #[serde(flatten)]
    pub key: RolloutKey,
    /// Whether the file existed already, with the same models, prompts and settings.
    pub kept: bool,
    /// The size of the file's recordings and their acceptance rate.
    #[serde(flatten)]
    pub summary: RolloutSummary,
}

/// Records a recipe's drafters. Existing files that match the recipe are kept.
///
/// # Errors
/// If a file or model is broken, or the disk is too small.
pub fn record(
    recipe: &Recipe,
    workspace: &Workspace,
    watch: &dyn Watch,
) -> Result<Vec<RecordedFile>> {
    let (tune, evaluate) = recipe.need_tuning("record")?;
    ensure!(recipe.evaluated().any(|(_, it)| it.kind.is_recorded()), "{NOTHING_DRAFTS}");
    let prompts = |set| anyhow::Ok((set, set_prompts(recipe, set, workspace, watch)?));
    let sets = [prompts(PromptSet::Validation)?, prompts(PromptSet::Test)?];
    let models = RecordedModels::of(recipe, workspace)?;
    let drafters = recipe.load_drafters(workspace, false)?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let groups = plan(&files, evaluate, &sets, watch)?;
    let num_responses: usize = groups.iter().map(FileGroup::num_responses).sum();
    let most_tokens =
        (num_responses * evaluate.max_new_tokens.min(workspace.models.context()?)) as u64;
    let most_bytes =
        most_tokens.saturating_mul(tune.max_candidate_length as u64 * BYTES_A_CANDIDATE);
    let dir = recipe.data_dir();
    check_room("what drafters propose", &dir, most_bytes)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
    if most_tokens > 0 {
        watch.note(format!(
            "record: {num_responses} responses to write and to record, at most {most_tokens} tokens \
             and {}",
            in_bytes(most_bytes)
        ));
    }
    let progress = watch.bar("record", "responses", num_responses as u64);
    let recorder = AnswerRecorder {
        models,
        max_new_tokens: evaluate.max_new_tokens,
        seed: recipe.seed,
        max_length: tune.max_candidate_length,
        labels: false,
        watch,
        progress: &*progress,
    };
    let mut recorded = Vec::new();
    for group in groups {
        let (set, how) = (group.set.name(), group.decoding.text());
        let decoding = evaluate.decoding(group.decoding);
        // The target answers the prompts once for all drafters.
        let mut answers = None;
        for (key, present) in group.files {
            let kept = present.is_some();
            let summary = match present {
                Some(summary) => summary,
                None => {
                    let answers = match &mut answers {
                        Some(answers) => answers,
                        None => {
                            progress.message(&format!("target, {set}, {how}"));
                            answers.insert(recorder.answer(group.prompts, decoding)?)
                        }
                    };
                    progress.message(&format!("{}, {set}, {how}", key.drafter));
                    let id = key.drafter.id().context("a recorded drafter has a name")?;
                    let drafter = RecordedDrafter { drafters: &drafters, id, decoding };
                    let recorded = recorder.record_answers(&drafter, &*answers)?;
                    files.write(key, &recorded)?.summary()
                }
            };
            recorded.push(RecordedFile { path: files.path(key), key, kept, summary });
        }
    }
    if !recorded.iter().all(|file| file.kept) {
        progress.finish();
    }
    Ok(recorded)
}

/// The rollouts files of one prompt set under one way of decoding, one per drafter.
struct FileGroup<'a> {
    set: PromptSet,
    decoding: DecodingName,
    prompts: &'a [SetPrompt],
    /// The files to write. A matching existing file has a summary and is not recorded again.
    files: Vec<(RolloutKey, Option<RolloutSummary>)>,
}

impl FileGroup<'_> {
    /// Counts the units of work: each response is generated once, and recorded once per missing
    /// file. Returns 0 if no file is missing.
    fn num_responses(&self) -> usize {
        let num_files = self.files.iter().filter(|(_, present)| present.is_none()).count();
        let num_turns: usize = self.prompts.iter().map(SetPrompt::num_turns).sum();
        if num_files == 0 { 0 } else { (1 + num_files) * num_turns }
    }
}

fn plan<'a>(
    files: &RolloutFiles<'_>,
    evaluate: &EvaluateRecipe,
    sets: &'a [(PromptSet, Vec<SetPrompt>)],
    watch: &dyn Watch,
) -> Result<Vec<FileGroup<'a>>> {
    let decodings: BTreeSet<DecodingName> = evaluate.decodings.iter().copied().collect();
    let mut groups = Vec::new();
    for (set, prompts) in sets {
        for decoding in &decodings {
            let (set, decoding) = (*set, *decoding);
            let mut group = FileGroup { set, decoding, prompts, files: Vec::new() };
            for drafter in files.drafters() {
                let key = RolloutKey { drafter, set, decoding };
                let present = match files.state(key)? {
                    FileState::Whole(set) => Some(set.summary()),
                    FileState::Absent => None,
                    FileState::Stale(why) => {
                        watch.note(format!("record: {why}: it is recorded again"));
                        None
                    }
                };
                group.files.push((key, present));
            }
            groups.push(group);
        }
    }
    Ok(groups)
}

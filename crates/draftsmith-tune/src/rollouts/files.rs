//! The rollouts files of a recipe: their paths, and the check whether they match the current
//! models, prompts and settings.

use draftsmith_report::{DecodingName, DrafterName};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use draftsmith_data::{
    PromptFile, Provenance, RolloutHead, RolloutProvenance, RolloutRow, hash_bytes, read_rollouts,
    rollouts_path, write_rollouts,
};
use draftsmith_model::AcceptanceHeadConfig;
use draftsmith_theory::{
    DrafterId, HeadTiming, Recording, RoundForwards, StoredAnswers, TokenChoice,
};
use draftsmith_train::rows_of_recording;
use serde::Serialize;
use serde_json::json;

use super::{PromptSet, RecordedSet};
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::{
    DrafterRecipe, EvaluateRecipe, Recipe, TuneRecipe, Workspace, changes_text,
};

/// The identity of one rollouts file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RolloutKey {
    /// The drafter.
    pub drafter: DrafterName,
    /// The set of prompts.
    pub set: PromptSet,
    /// The way of decoding, greedy or sampled.
    pub decoding: DecodingName,
}

/// The state of a rollouts file, compared with the recipe.
pub enum FileState {
    /// The file does not exist.
    Absent,
    /// The file matches the recipe.
    Whole(RecordedSet),
    /// The file is broken or has another provenance. The text gives the reason.
    Stale(String),
}

/// The rollouts files of a recipe, with everything that they depend on.
pub struct RolloutFiles<'a> {
    recipe: &'a Recipe,
    evaluate: &'a EvaluateRecipe,
    tune: &'a TuneRecipe,
    /// The provenance that all files share. The drafter, prompts and decoding differ by file.
    responses: Provenance,
    drafters: Vec<HashedDrafter>,
    validation_prompts: Vec<PromptFile>,
    test_prompts: Vec<PromptFile>,
    vocab_size: usize,
    context: usize,
    answers: Option<Arc<StoredAnswers>>,
}

/// A drafter to record, with the hashes of its weights and its head.
struct HashedDrafter {
    name: DrafterName,
    hash: String,
    head: Option<RolloutHead>,
    forwards: RoundForwards,
    /// The number of candidates beyond which the drafter proposes none.
    most_candidates: Option<usize>,
    head_dir: Option<PathBuf>,
}

impl<'a> RolloutFiles<'a> {
    /// Hashes the models and prompts of a recipe.
    ///
    /// # Errors
    /// If the recipe lacks a section, or one of its files cannot be read.
    pub fn of(recipe: &'a Recipe, workspace: &Workspace) -> Result<Self> {
        let (tune, evaluate) = recipe.need_tuning("record")?;
        let provenance = workspace.provenance(recipe.seed, evaluate.max_new_tokens)?;
        let responses = Provenance { draft: None, ..provenance };
        Ok(Self {
            recipe,
            evaluate,
            tune,
            responses,
            drafters: drafters(recipe, workspace)?,
            validation_prompts: match &tune.prompts {
                Some(paths) => workspace.artifacts.prompt_files(paths)?,
                None => vec![held_out_prompts(recipe, workspace)?],
            },
            test_prompts: workspace.artifacts.prompt_files(&evaluate.prompts)?,
            vocab_size: workspace.models.target_shape()?.vocab_size,
            context: workspace.models.context()?,
            answers: if tune.lookup_first { workspace.answers()? } else { None },
        })
    }

    /// Returns the names of the drafters to record, in the recipe's order.
    pub fn drafters(&self) -> Vec<DrafterName> {
        self.drafters.iter().map(|drafting| drafting.name).collect()
    }

    /// Returns the directory of the drafter's acceptance head; `None` without a head.
    pub fn head_dir(&self, drafter: DrafterName) -> Option<&Path> {
        let drafting = self.drafters.iter().find(|drafting| drafting.name == drafter);
        drafting.and_then(|drafting| drafting.head_dir.as_deref())
    }

    /// Returns the hash of the drafter's acceptance head; `None` without a head.
    pub fn head_hash(&self, drafter: DrafterName) -> Option<&str> {
        let drafting = self.drafters.iter().find(|drafting| drafting.name == drafter);
        drafting.and_then(|drafting| Some(drafting.head.as_ref()?.hash.as_str()))
    }

    /// Returns the path of a file, whether or not it exists.
    pub fn path(&self, key: RolloutKey) -> PathBuf {
        let drafter = key.drafter.to_string();
        rollouts_path(&self.recipe.data_dir(), &drafter, key.set.name(), key.decoding.text())
    }

    /// Reads a file and compares its provenance with the recipe's.
    ///
    /// # Errors
    /// If the recipe has no such drafter.
    pub fn state(&self, key: RolloutKey) -> Result<FileState> {
        let expected = self.provenance(key)?;
        let path = self.path(key);
        if !path.exists() {
            return Ok(FileState::Absent);
        }
        let (rows, provenance) = match read_rollouts(&path, Some(self.vocab_size)) {
            Ok(read) => read,
            Err(error) => return Ok(FileState::Stale(error.to_string())),
        };
        let differences = provenance.differences(&expected);
        if !differences.is_empty() {
            let why =
                format!("`{}` was recorded with {}", path.display(), changes_text(&differences));
            return Ok(FileState::Stale(why));
        }
        Ok(FileState::Whole(self.set(&rows, &provenance)?))
    }

    /// Writes a file completely or not at all, and returns its recordings.
    ///
    /// # Errors
    /// If the file cannot be written, or the recipe has no such drafter.
    pub fn write(&self, key: RolloutKey, recorded: &[(String, Recording)]) -> Result<RecordedSet> {
        let provenance = self.provenance(key)?;
        let has_head = provenance.head.is_some();
        let rows: Vec<_> = recorded
            .iter()
            .flat_map(|(id, recording)| rows_of_recording(id, recording, has_head))
            .collect();
        write_rollouts(&self.path(key), &rows, &provenance)?;
        self.set(&rows, &provenance)
    }

    fn set(&self, rows: &[RolloutRow], provenance: &RolloutProvenance) -> Result<RecordedSet> {
        let mut set = RecordedSet::new(rows, provenance)?;
        set.recordings.answers = self.answers.clone();
        Ok(set)
    }

    /// Lists the provenance of every file, as it would be recorded now.
    ///
    /// # Errors
    /// If a prompt file cannot be read.
    pub fn provenances(&self) -> Result<Vec<RolloutProvenance>> {
        let sets = [PromptSet::Validation, PromptSet::Test];
        let keys = self.drafters().into_iter().flat_map(|drafter| {
            let decodings = self.evaluate.decodings.iter();
            decodings.flat_map(move |decoding| {
                sets.map(|set| RolloutKey { drafter, set, decoding: *decoding })
            })
        });
        keys.map(|key| self.provenance(key)).collect()
    }

    /// Builds the provenance that the file would have if it were recorded now.
    fn provenance(&self, key: RolloutKey) -> Result<RolloutProvenance> {
        let RolloutKey { drafter, set, decoding } = key;
        let drafting = self.drafters.iter().find(|drafting| drafting.name == drafter);
        let drafting = drafting.with_context(|| {
            format!("the recipe `{}` has no drafter `{drafter}`", self.recipe.name)
        })?;
        let (prompts, limit, split) = match set {
            PromptSet::Validation => {
                (&self.validation_prompts, self.tune.num_prompts, self.tune.split)
            }
            PromptSet::Test => (&self.test_prompts, self.evaluate.num_prompts, self.evaluate.split),
        };
        let mut responses = Provenance {
            draft: Some(drafting.hash.clone()),
            prompts: prompts.clone(),
            limit: limit.map(|limit| limit as u64),
            split: split.map(|split| self.recipe.splits.range(split)),
            ..self.responses.clone()
        };
        let decoding = self.evaluate.decoding(decoding);
        responses.repetition_penalty = decoding.repetition_penalty;
        if let TokenChoice::Sampled(sampling) = decoding.choice {
            responses.temperature = sampling.temperature;
            responses.top_p = sampling.top_p;
            responses.top_k = sampling.top_k.map(|top_k| top_k as u32);
            responses.min_p = sampling.min_p;
            let server = self.recipe.target_elsewhere();
            let log_probs = server.and_then(|server| server.log_probs(&decoding));
            responses.served_log_probs = log_probs.map(|num| num as u32);
        }
        let most = self.tune.max_candidate_length;
        let max_length = drafting.most_candidates.map_or(most, |own| own.min(most));
        Ok(RolloutProvenance {
            responses,
            drafter: drafter.to_string(),
            set: set.name().to_owned(),
            head: drafting.head.clone(),
            max_length: max_length as u32,
            context: self.context as u32,
            forwards: drafting.forwards,
            data: None,
        })
    }
}

/// Builds the provenance entry for the prompts that training held out, in place of a prompt file.
fn held_out_prompts(recipe: &Recipe, workspace: &Workspace) -> Result<PromptFile> {
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let all = json!({ "rows": data.hash, "share": recipe.held_out_share() });
    Ok(PromptFile { name: "held out".to_owned(), hash: hash_bytes(all.to_string().as_bytes()) })
}

/// Hashes the weights or settings of the drafters to record, and their heads.
fn drafters(recipe: &Recipe, workspace: &Workspace) -> Result<Vec<HashedDrafter>> {
    let recorded = recipe.evaluated().filter(|(_, it)| it.kind.is_recorded());
    let hashed = |(id, drafter): (DrafterId, &DrafterRecipe)| {
        let loading = recipe.loading(id, workspace);
        let hash = drafter.kind.recorded_hash(&loading)?;
        let head_dir = loading.head_dir()?;
        let beside = head_dir.as_deref().map(|dir| rollout_head(dir, workspace)).transpose()?;
        // A head in the drafter's own files has the drafter's hash.
        let own = drafter.kind.own_head().map(|timing| RolloutHead::new(hash.clone(), timing));
        let head = beside.or(own);
        let (name, forwards) = (DrafterName::Of(id), drafter.kind.round_forwards());
        let most_candidates = drafter.kind.most_candidates();
        Ok(HashedDrafter { name, hash, head, forwards, most_candidates, head_dir })
    };
    recorded.map(hashed).collect()
}

/// Reads and hashes the acceptance head in a directory.
fn rollout_head(dir: &Path, workspace: &Workspace) -> Result<RolloutHead> {
    let config = AcceptanceHeadConfig::from_dir(dir)?;
    let AcceptanceHeadConfig { hidden_size, num_layers, tied, reads, .. } = &config;
    let shape = format!("{hidden_size} {num_layers} {tied} {reads:?}");
    let hash = workspace.artifacts.export_hash(dir, &shape)?;
    Ok(RolloutHead::new(hash, HeadTiming::of_reader(reads.looks_ahead())))
}

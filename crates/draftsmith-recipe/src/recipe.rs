//! A recipe: one TOML file with a section for each stage.
//!
//! A recipe is read once and checked as a whole, before any work starts. It is written beside every
//! output with defaults filled in and overrides applied. Paths are relative to the working directory.

mod costs;
mod data;
#[cfg(test)]
mod documented;
mod evaluate;
pub(crate) mod keys;
mod overrides;
mod prompts;
pub(crate) mod rules;
mod server;
mod shared_training;
mod trees;
mod tune;

use draftsmith_served::ServerRecipe;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use burn::tensor::Device;
use draftsmith_files::write_whole;
use draftsmith_model::WeightDtype;
use draftsmith_theory::DrafterId;
use draftsmith_train::{HeadTraining, OptimizerSettings};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::costs::GivenCosts;
pub use self::data::{DataRecipe, Responses};
pub use self::evaluate::EvaluateRecipe;
pub use self::keys::decoding;
use self::keys::toml_error;
pub use self::overrides::Overrides;
pub use self::prompts::{PromptSource, Split, Splits};
pub use self::rules::RulesRecipe;
use self::server::check_without_weights;
pub use self::server::read_server;
pub use self::trees::TreesRecipe;
pub use self::tune::TuneRecipe;
use crate::kinds::loaded::{LoadedDrafters, Loading};
use crate::kinds::origin::{Origin, read_keys};
use crate::kinds::{DrafterRecipe, DrafterRecipes, FoundExport, KindTraining, Kinds};
use crate::prompt_files::Reading;
use crate::text_side::Ends;
use crate::watch::Watch;
use crate::workspace::Workspace;

/// All settings of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Names the output directories `data/NAME` and `checkpoints/NAME`; the file's stem if absent.
    #[serde(default)]
    pub name: String,
    /// Seed of every random draw.
    #[serde(default)]
    pub seed: u64,
    /// The models.
    pub models: Models,
    /// The drafters by name, each of a kind.
    #[serde(default)]
    pub drafters: DrafterRecipes,
    /// Shares of the splits of prompt files.
    #[serde(default)]
    pub splits: Splits,
    /// Stage build-data.
    pub data: Option<DataRecipe>,
    /// Whether a malformed record in a prompt file is an error even if `data.strict` is false.
    #[serde(skip)]
    pub is_strict: bool,
    /// The kinds that its drafters may have.
    #[serde(skip)]
    pub kinds: Kinds,
    /// Stages record and tune.
    pub tune: Option<TuneRecipe>,
    /// Stage evaluate.
    pub evaluate: Option<EvaluateRecipe>,
    /// Tables of papers that its results fill. [`Recipe::paper_tables`] reads them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub papers: Vec<toml::Table>,
}

/// The target: a checkpoint directory in Hugging Face's format, or a name on its Hub, `org/name@revision`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// The model whose output is reproduced.
    pub target: PathBuf,
    /// Replaces the target's chat template: `vicuna`, `llama-2`, `alpaca`, the path of a Jinja file, or
    /// `none` for only the last user message.
    pub chat_template: Option<String>,
    /// Today for a chat template that writes the date (`strftime_now`), as `YYYY-MM-DD`.
    pub date: Option<String>,
    /// Replaces the end tokens named in the target's files.
    pub eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer after the token that completes one, as in transformers.
    #[serde(default)]
    pub stop_strings: Vec<String>,
}

impl Models {
    /// Returns the end tokens and stop strings that the recipe gives for answers.
    pub fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, only_answers: false }
    }
}

impl Recipe {
    /// Reads a recipe, applies the command line's overrides, and checks every value.
    pub fn read(path: &Path, overrides: &Overrides<'_>) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the recipe `{}`", path.display()))?;
        let named = || format!("recipe `{}`", path.display());
        let mut table: toml::Table =
            toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
        let mut is_changed = overrides.apply(&mut table)?;
        is_changed |= shared_training::share(&mut table, &overrides.kinds).with_context(named)?;
        let added = match table.get_mut("drafters").and_then(toml::Value::as_table_mut) {
            Some(drafters) => overrides.kinds.take_added(drafters).with_context(named)?,
            None => Vec::new(),
        };
        is_changed |= !added.is_empty();
        let mut recipe: Self = if is_changed {
            // Parsed from text again, so that messages name keys as for a file.
            let merged = toml::to_string(&table).context("cannot merge the overrides")?;
            toml::from_str(&merged)
                .map_err(|e| toml_error(&e))
                .with_context(|| format!("{} with the command line's overrides", named()))?
        } else {
            toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?
        };
        if recipe.name.is_empty() {
            let stem = path.file_stem().unwrap_or_default();
            recipe.name = stem.to_string_lossy().into_owned();
        }
        recipe.seed = overrides.seed.unwrap_or(recipe.seed);
        recipe.is_strict = overrides.is_strict;
        recipe.kinds = overrides.kinds.clone();
        for (place, id, drafter) in added {
            recipe.drafters.insert(place, id, drafter);
        }
        recipe.check().with_context(named)?;
        Ok(recipe)
    }

    /// Creates a recipe without stages, from a target and drafters that flags name.
    pub fn of_drafters(
        target: PathBuf,
        chat_template: Option<String>,
        drafters: DrafterRecipes,
    ) -> Self {
        let (eos_token_ids, stop_strings) = (None, Vec::new());
        Self {
            name: String::new(),
            seed: 0,
            models: Models { target, chat_template, date: None, eos_token_ids, stop_strings },
            drafters,
            splits: Splits::default(),
            data: None,
            is_strict: false,
            kinds: Kinds::default(),
            tune: None,
            evaluate: None,
            papers: Vec::new(),
        }
    }

    /// Reads the recipe of an export: `given`, or the one that training wrote into `dir`.
    ///
    /// # Errors
    /// If the recipe is missing or invalid.
    pub fn of_export(dir: &Path, given: Option<&Path>, seed: Option<u64>) -> Result<Self> {
        let beside = dir.join("recipe.toml");
        let path = given.unwrap_or(&beside);
        if given.is_none() && !path.is_file() {
            bail!(
                "there is no `{}`, which training writes beside an export and which names its \
                 models; hint: give a recipe with `--recipe FILE`",
                path.display()
            );
        }
        Self::read(path, &Overrides { seed, ..Overrides::default() })
    }

    /// Returns the output directory of build-data, `data/NAME`.
    pub fn data_dir(&self) -> PathBuf {
        Path::new("data").join(&self.name)
    }

    /// Returns the output directory of all other stages, `checkpoints/NAME`.
    pub fn checkpoint_dir(&self) -> PathBuf {
        Path::new("checkpoints").join(&self.name)
    }

    /// Returns the directory of what a drafter's training exports: the one that the recipe names, or else
    /// `checkpoints/NAME/<drafter>`.
    pub fn export_dir(&self, id: DrafterId) -> PathBuf {
        self.drafters.export_dir(&self.checkpoint_dir(), id)
    }

    /// Returns the directory of a drafter's head; `None` if the recipe neither names nor trains one.
    pub fn head_dir(&self, id: DrafterId) -> Option<PathBuf> {
        self.drafters.head_dir(&self.checkpoint_dir(), id)
    }

    /// Collects what a drafter is read from: the recipe's drafters, the checkpoint directory and the workspace.
    pub fn loading<'a>(&'a self, id: DrafterId, workspace: &'a Workspace) -> Loading<'a> {
        Loading { id, drafters: &self.drafters, home: self.checkpoint_dir(), workspace }
    }

    /// Opens the recipe's models, which compute in `dtype`, without reading them yet. Missing files of models on the Hub are
    /// downloaded. `served_as` is the target's name on servers if its weights are not needed.
    ///
    /// # Errors
    /// If a model on the Hub cannot be downloaded.
    pub fn open(
        &self,
        served_as: Option<&str>,
        dtype: WeightDtype,
        devices: Vec<Device>,
        watch: &dyn Watch,
    ) -> Result<Workspace> {
        let (target, template) = (&self.models.target, self.models.chat_template.as_deref());
        let drafts = self.drafters.models();
        let mut workspace = Workspace::open(target, served_as, &drafts, template, devices, watch)?;
        workspace.models.num_first_layers = self.num_first_layers();
        workspace.models.dtype = dtype;
        workspace.text.ends = self.models.ends();
        workspace.text.date = self.models.date.clone();
        Ok(workspace)
    }

    /// Reads the drafters to measure; only those that are recorded unless `all`.
    ///
    /// # Errors
    /// If one is missing or invalid, or belongs to other models than the workspace's.
    pub fn load_drafters(&self, workspace: &Workspace, all: bool) -> Result<LoadedDrafters> {
        let wanted = self.evaluated().filter(|(_, it)| all || it.kind.is_recorded());
        let read = |(id, drafter): (DrafterId, &DrafterRecipe)| {
            let loaded = drafter.kind.load(&self.loading(id, workspace));
            loaded.with_context(|| format!("the drafter `{id}`"))
        };
        Ok(LoadedDrafters(wanted.map(read).collect::<Result<_>>()?))
    }

    /// Returns the draft model whose candidates and labels the data has, with the settings of its head's
    /// training; `None` if the recipe does not train that head.
    pub fn trained_head(&self) -> Option<(DrafterId, &HeadTraining)> {
        let (id, _) = self.draft()?;
        Some((id, self.drafters.get(id)?.head_training()?))
    }

    /// Returns the first draft model, whose candidates and labels the data has, with its checkpoint directory
    /// or name on the Hub.
    pub fn draft(&self) -> Option<(DrafterId, &Path)> {
        self.drafters.models().first().copied()
    }

    /// Lists the drafters that the recipe trains on the target's hidden states, in its order.
    pub fn trained_self_drafts(&self) -> Vec<(DrafterId, &dyn KindTraining)> {
        self.drafters.iter().filter_map(|(id, it)| Some((id, it.kind.training()?))).collect()
    }

    /// Returns the drafters to record, tune and measure: those of `evaluate.drafters`, or else all.
    pub fn evaluated(&self) -> impl Iterator<Item = (DrafterId, &DrafterRecipe)> {
        let asked = self.evaluate.as_ref().and_then(|evaluate| evaluate.drafters.as_ref());
        self.drafters.iter().filter(move |(id, _)| asked.is_none_or(|asked| asked.contains(id)))
    }

    /// Returns the same recipe with this drafter as the only one, which evaluation then measures.
    #[must_use]
    pub fn with_only(&self, id: DrafterId, drafter: DrafterRecipe) -> Self {
        let evaluate = self.evaluate.clone();
        let evaluate = evaluate.map(|evaluate| EvaluateRecipe { drafters: None, ..evaluate });
        Self { drafters: DrafterRecipes::one(id, drafter), evaluate, ..self.clone() }
    }

    /// Finds the drafter that an export in `dir` belongs to, and returns it with a recipe of only that drafter, which
    /// is read from `dir`. Recipes beside exports name one drafter; another recipe may name several.
    ///
    /// # Errors
    /// If no drafter of the recipe can be meant, or several can.
    pub fn only_of(&self, found: FoundExport, dir: &Path) -> Result<(DrafterId, Self)> {
        let is_meant = |drafter: &DrafterRecipe| match found.kind {
            Some(kind) => drafter.kind.entry().name == kind.name,
            None => drafter.kind.model().is_some(),
        };
        let all = self.drafters.iter().filter(|(_, drafter)| is_meant(drafter));
        let all: Vec<(DrafterId, &DrafterRecipe)> = all.collect();
        let is_own = |id: DrafterId| match found.kind {
            Some(_) => self.export_dir(id) == dir,
            None => self.head_dir(id).is_some_and(|own| own == dir),
        };
        let meant = match &all[..] {
            [only] => Some(only),
            several => several.iter().find(|(id, _)| is_own(*id)),
        };
        let Some((id, drafter)) = meant else {
            bail!(
                "the recipe of the {} in `{}` names {} drafters that it could belong to; hint: give one with \
                 `--recipe FILE` that has the drafter in a table `[drafters.NAME]`",
                found.export.text,
                dir.display(),
                all.len()
            );
        };
        let drafter = match found.kind.and_then(|kind| kind.in_dir(dir)) {
            Some(kind) => DrafterRecipe::new(kind),
            None => {
                let head = Some(Origin::Path(dir.to_path_buf()));
                DrafterRecipe { head, ..(*drafter).clone() }
            }
        };
        Ok((*id, self.with_only(*id, drafter)))
    }

    /// Returns the directory in which the training of a drafter's head keeps its state.
    pub fn head_training_dir(&self, id: DrafterId) -> PathBuf {
        self.checkpoint_dir().join(format!("{id}-head-training"))
    }

    /// Returns the directory of the heads that a draft model's sweep trains.
    pub fn sweep_dir(&self, id: DrafterId) -> PathBuf {
        self.export_dir(id).join("sweep")
    }

    /// Returns the share of the built data's conversations that no training used. Each training holds out the
    /// same conversations first, so this is the smallest of their shares; without trainings, it is the default
    /// for heads.
    pub fn held_out_share(&self) -> f64 {
        let trainings = self.drafters.iter().flat_map(|(_, it)| {
            let head = it.head_training().map(|head| head.optimizer);
            let own = it.kind.training().map(|training| *training.optimizer());
            [head, own].into_iter().flatten()
        });
        let fractions = trainings.map(|optimizer| optimizer.validation_fraction);
        fractions.reduce(f64::min).unwrap_or(OptimizerSettings::HEAD.validation_fraction)
    }

    /// Returns the output directory of tune and replay.
    pub fn tuning_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("tuning")
    }

    /// Returns the sections `[tune]` and `[evaluate]`, which record, tune and replay need.
    ///
    /// # Errors
    /// If a section is missing; the message names it and `stage`.
    pub fn need_tuning(&self, stage: &str) -> Result<(&TuneRecipe, &EvaluateRecipe)> {
        let tune = self.tune.as_ref().with_context(|| {
            format!(
                "the recipe has no section `[tune]`, which {stage} needs: it says which prompts choose \
                 stop rules; hint: add the section, which may be empty"
            )
        })?;
        let evaluate = self.evaluate.as_ref().with_context(|| {
            format!(
                "the recipe has no section `[evaluate]`, which {stage} needs: it says how and on which \
                 prompts decoding is tested"
            )
        })?;
        Ok((tune, evaluate))
    }

    /// Returns the servers that run the target in place of its weights; `None` if the weights are read.
    pub fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.data.as_ref()?.target_elsewhere()
    }

    /// Returns the largest number of the target's first layers that a drafter needs, 0 if none needs any. An
    /// adapter needs the layers before its exit and those that initialise it; an EAGLE-3 drafter needs all,
    /// `usize::MAX`.
    pub fn num_first_layers(&self) -> usize {
        self.drafters.iter().map(|(_, it)| it.kind.num_first_layers()).max().unwrap_or(0)
    }

    /// Returns the output directory of evaluate.
    pub fn evaluation_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("evaluation")
    }

    /// Returns how to read the prompt files of a section with this split.
    pub fn reading(&self, split: Option<Split>) -> Reading {
        Reading {
            split: split.map(|split| self.splits.range(split)),
            is_strict: self.is_strict || self.data.as_ref().is_some_and(|data| data.strict),
            keeps_tokens: false,
        }
    }

    /// Reads the tables of papers, whose keys the crate of reports knows.
    ///
    /// # Errors
    /// If a key is unknown or invalid; the message names it.
    pub fn paper_tables<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        let read = |table: &toml::Table| read_keys(table.clone());
        let tables: Result<Vec<T>, String> = self.papers.iter().map(read).collect();
        tables.map_err(|problem| anyhow!("`[[papers]]`: {problem}"))
    }

    /// Writes the complete recipe into an output directory, as `recipe.toml`.
    pub fn write_beside(&self, dir: &Path) -> Result<()> {
        let text = toml::to_string(self).context("cannot write the recipe as TOML")?;
        Ok(write_whole(&dir.join("recipe.toml"), text)?)
    }

    /// Writes the recipe with only one drafter into the directory of that drafter's export. Writes the complete
    /// recipe if it has no such drafter.
    pub fn write_of(&self, id: DrafterId, dir: &Path) -> Result<()> {
        match self.drafters.get(id) {
            Some(drafter) => self.with_only(id, drafter.clone()).write_beside(dir),
            None => self.write_beside(dir),
        }
    }

    fn check(&self) -> Result<()> {
        let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.starts_with('.') || !self.name.chars().all(safe) {
            bail!(
                "key `name` is `{}`: expected a directory name of letters, digits, `-`, `_` and `.` \
                 that does not start with `.`",
                self.name
            );
        }
        self.data.iter().try_for_each(DataRecipe::check)?;
        if self.target_elsewhere().is_some() {
            check_without_weights(self)?;
        }
        self.splits.check()?;
        self.drafters.check()?;
        self.tune.iter().try_for_each(TuneRecipe::check)?;
        self.evaluate.iter().try_for_each(|evaluate| evaluate.check(&self.drafters))
    }
}

#[cfg(test)]
mod tests;

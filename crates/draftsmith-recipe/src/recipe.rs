//! A recipe: one TOML file with a section for each stage.
//!
//! A recipe is read once and checked as a whole before any work. Every output gets a copy with
//! defaults filled in and overrides applied. Paths are relative to the working directory.

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

use draftsmith_served::{KeptIn, ServerRecipe};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::Device;
use draftsmith_files::{parse_toml, read_text, write_whole};
use draftsmith_model::{DrafterDir, ModelConfig, WeightDtype};
use draftsmith_theory::DrafterId;
use draftsmith_train::{FeatureFormat, HeadTraining, OptimizerSettings};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::costs::GivenCosts;
pub use self::data::{DataRecipe, Responses};
pub use self::evaluate::EvaluateRecipe;
pub use self::keys::decoding;
use self::keys::{require, toml_error};
pub use self::overrides::Overrides;
pub use self::prompts::{PromptSource, Split, Splits};
pub use self::rules::RulesRecipe;
pub use self::server::read_server;
use self::server::{check_states, check_without_weights};
pub use self::trees::TreesRecipe;
pub use self::tune::TuneRecipe;
use crate::exports::servers::{ServedDrafter, served_path};
use crate::hub::{HubWeights, model_dir};
use crate::kinds::loaded::{LoadedDrafters, Loading};
use crate::kinds::origin::Origin;
use crate::kinds::{DrafterRecipe, DrafterRecipes, FoundExport, KindTraining, Kinds};
use crate::prompt_files::Reading;
use crate::text_side::Ends;
use crate::watch::Watch;
use crate::workspace::{LayersNeeded, Workspace};

/// A recipe with the settings of all stages.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The name in the paths `data/NAME` and `checkpoints/NAME`; by default the recipe file's stem.
    #[serde(default)]
    pub name: String,
    /// The seed of all random draws.
    #[serde(default)]
    pub seed: u64,
    /// The target model and how its answers begin and end.
    pub models: Models,
    /// The drafters by name.
    #[serde(default)]
    pub drafters: DrafterRecipes,
    /// Stored answers that look-ups search, as `build-datastore` writes them; none if absent.
    pub answers: Option<PathBuf>,
    /// The shares of the splits of prompt files.
    #[serde(default)]
    pub splits: Splits,
    /// The settings of the stage build-data.
    pub data: Option<DataRecipe>,
    /// Whether a malformed record in a prompt file is an error even if `data.strict` is false.
    #[serde(skip)]
    pub is_strict: bool,
    /// The kinds that drafters may have.
    #[serde(skip)]
    pub kinds: Kinds,
    /// The settings of the stages record and tune.
    pub tune: Option<TuneRecipe>,
    /// The settings of the stage evaluate.
    pub evaluate: Option<EvaluateRecipe>,
    /// Tables of papers to fill with the recipe's results. [`Recipe::paper_tables`] parses them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub papers: Vec<toml::Table>,
}

/// The target model, with overrides of its chat template and end tokens.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// The target's directory in Hugging Face's format, its Hub name: `org/name@revision`, or a GGUF
    /// file.
    pub target: PathBuf,
    /// The directory or Hub name of the tokenizer, chat template and end tokens; the target's if absent.
    pub tokenizer: Option<PathBuf>,
    /// The chat template that replaces the target's: `vicuna`, `llama-2`, `alpaca`, the path of a
    /// Jinja file, or `none` to use only the last user message as it is.
    pub chat_template: Option<String>,
    /// Today for a chat template that writes the date (`strftime_now`), as `YYYY-MM-DD`.
    pub date: Option<String>,
    /// Further variables of the chat template, such as `enable_thinking` or `tools`.
    #[serde(default)]
    pub template_arguments: Map<String, Value>,
    /// Replaces the end tokens named in the target's files.
    pub eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer. The token that completes one is kept, as in transformers.
    #[serde(default)]
    pub stop_strings: Vec<String>,
}

impl Models {
    /// Returns the end tokens and stop strings that the recipe sets.
    pub fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, only_answers: false }
    }
}

impl Recipe {
    /// Reads a recipe, applies the command line's overrides, and checks every value.
    pub fn read(path: &Path, overrides: &Overrides<'_>) -> Result<Self> {
        let text = read_text(path)
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
            // We parse the text again, so that error messages show lines as for a file.
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

    /// Creates a recipe without stages, from a target and drafters given by command-line flags.
    pub fn of_drafters(
        target: PathBuf,
        chat_template: Option<String>,
        drafters: DrafterRecipes,
    ) -> Self {
        let models = Models { target, chat_template, ..Models::default() };
        Self { models, drafters, ..Self::default() }
    }

    /// Reads an export's recipe: from the file `given`, or else the copy that training wrote into
    /// `dir`.
    ///
    /// # Errors
    /// If the recipe is missing or invalid.
    pub fn of_export(dir: &Path, given: Option<&Path>, seed: Option<u64>) -> Result<Self> {
        let beside = dir.join("recipe.toml");
        let path = given.unwrap_or(&beside);
        ensure!(
            given.is_some() || path.is_file(),
            "there is no `{}`, which training writes beside an export and which names its \
             models; hint: give a recipe with `--recipe FILE`",
            path.display()
        );
        Self::read(path, &Overrides { seed, ..Overrides::default() })
    }

    /// Returns the output directory of the stage build-data, `data/NAME`.
    pub fn data_dir(&self) -> PathBuf {
        Path::new("data").join(&self.name)
    }

    /// Returns the output directory of all other stages, `checkpoints/NAME`.
    pub fn checkpoint_dir(&self) -> PathBuf {
        Path::new("checkpoints").join(&self.name)
    }

    /// Returns the directory of a drafter's export: the one that the recipe names, or else
    /// `checkpoints/NAME/<drafter>`.
    pub fn export_dir(&self, id: DrafterId) -> PathBuf {
        self.drafters.export_dir(&self.checkpoint_dir(), id)
    }

    /// Returns the directory of a drafter's acceptance head; `None` if the recipe has no head for
    /// it.
    pub fn head_dir(&self, id: DrafterId) -> Option<PathBuf> {
        self.drafters.head_dir(&self.checkpoint_dir(), id)
    }

    /// Collects what loading a drafter needs: the drafters, the checkpoint directory and the
    /// workspace.
    pub fn loading<'a>(&'a self, id: DrafterId, workspace: &'a Workspace) -> Loading<'a> {
        Loading { id, drafters: &self.drafters, home: self.checkpoint_dir(), workspace }
    }

    /// Opens the recipe's models for computing in `dtype`, without reading them yet. Downloads
    /// missing files of models on the Hub. If the target runs on servers, `served_as` is its name
    /// there, and its weights are not needed.
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
        // The ends of such a target are needed here, and of a large one only a few files have them.
        let is_elsewhere = served_as.and(self.states_server()).is_some();
        let of_ends =
            is_elsewhere.then(|| model_dir(target, HubWeights::Ends, watch)).transpose()?;
        let target = of_ends.as_ref().unwrap_or(target);
        let mut workspace = Workspace::open(target, served_as, &drafts, template, devices, watch)?;
        workspace.models.layers_needed = self.layers_needed();
        workspace.models.dtype = dtype;
        let tokenizer = self.models.tokenizer.as_ref();
        let tokenizer = tokenizer.map(|dir| model_dir(dir, HubWeights::Without, watch));
        workspace.text.dir = tokenizer.transpose()?;
        workspace.text.ends = self.models.ends();
        workspace.text.date = self.models.date.clone();
        workspace.text.template_arguments = self.models.template_arguments.clone();
        workspace.stored_answers = self.answers.clone();
        Ok(workspace)
    }

    /// Loads the drafters to measure; if `all` is false, only those whose rollouts are recorded.
    ///
    /// # Errors
    /// If a drafter is missing or invalid, or was trained for other models.
    pub fn load_drafters(&self, workspace: &Workspace, all: bool) -> Result<LoadedDrafters> {
        let wanted = self.evaluated().filter(|(_, it)| all || it.kind.is_recorded());
        let read = |(id, _): (DrafterId, &DrafterRecipe)| {
            let loaded = self.loading(id, workspace).load();
            let mut loaded = loaded.with_context(|| format!("the drafter `{id}`"))?;
            loaded.tuned_by(&self.checkpoint_dir(), &self.tuning_dir());
            Ok(loaded)
        };
        let all = wanted.map(read).collect::<Result<_>>()?;
        Ok(LoadedDrafters { all, answers: workspace.answers()? })
    }

    /// Returns the draft model that wrote the data's candidates and labels, with the training
    /// settings of its acceptance head; `None` if the recipe does not train that head.
    pub fn trained_head(&self) -> Option<(DrafterId, &HeadTraining)> {
        let (id, _) = self.draft()?;
        Some((id, self.drafters.get(id)?.head_training()?))
    }

    /// Returns the first draft model, with its checkpoint directory or name on the Hub. The
    /// candidates and labels in the data are its own. `None` without a draft model.
    pub fn draft(&self) -> Option<(DrafterId, &Path)> {
        self.drafters.models().first().copied()
    }

    /// Lists the drafters that the recipe trains on the target's hidden states, in its order.
    pub fn trained_self_drafts(&self) -> Vec<(DrafterId, &dyn KindTraining)> {
        self.drafters.iter().filter_map(|(id, it)| Some((id, it.kind.training()?))).collect()
    }

    /// Returns the drafters to record, tune and measure: those in `evaluate.drafters`, or else all.
    pub fn evaluated(&self) -> impl Iterator<Item = (DrafterId, &DrafterRecipe)> {
        let asked = self.evaluate.as_ref().and_then(|evaluate| evaluate.drafters.as_ref());
        self.drafters.iter().filter(move |(id, _)| asked.is_none_or(|asked| asked.contains(id)))
    }

    /// Returns a copy of the recipe with this drafter as the only one, also for evaluation.
    #[must_use]
    pub fn with_only(&self, id: DrafterId, drafter: DrafterRecipe) -> Self {
        let evaluate = self.evaluate.clone();
        let evaluate = evaluate.map(|evaluate| EvaluateRecipe { drafters: None, ..evaluate });
        Self { drafters: DrafterRecipes::one(id, drafter), evaluate, ..self.clone() }
    }

    /// Finds the drafter of this recipe that the export in `dir` belongs to. Returns its name and a
    /// recipe with only that drafter, read from `dir`. The copy of a recipe beside an export has
    /// one drafter; other recipes may have several.
    ///
    /// # Errors
    /// If no drafter of the recipe matches the export, or several do.
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
        let ignored_keys =
            drafter.kind.path().map(|it| it.ignored_keys.clone()).unwrap_or_default();
        let given = DrafterDir { path: dir.to_path_buf(), ignored_keys };
        let drafter = match found.kind.and_then(|kind| kind.in_dir(given)) {
            Some(kind) => DrafterRecipe::new(kind),
            None => {
                let head = Some(Origin::Path(dir.into()));
                DrafterRecipe { head, ..(*drafter).clone() }
            }
        };
        Ok((*id, self.with_only(*id, drafter)))
    }

    /// Returns the directory for the training state of a drafter's acceptance head.
    pub fn head_training_dir(&self, id: DrafterId) -> PathBuf {
        self.checkpoint_dir().join(format!("{id}-head-training"))
    }

    /// Returns the directory of the acceptance heads from a draft model's hyperparameter sweep.
    pub fn sweep_dir(&self, id: DrafterId) -> PathBuf {
        self.export_dir(id).join("sweep")
    }

    /// Returns the share of the built data's conversations that no training used. All trainings
    /// hold out conversations in the same order, so this is the smallest held-out share. Without
    /// trainings, it is the default for acceptance heads.
    pub fn held_out_share(&self) -> f64 {
        let trainings = self.drafters.iter().flat_map(|(_, it)| {
            let head = it.head_training().map(|head| head.optimizer);
            let own = it.kind.training().map(|training| training.lessons().optimizer);
            [head, own].into_iter().flatten()
        });
        let fractions = trainings.map(|optimizer| optimizer.validation_fraction);
        fractions.reduce(f64::min).unwrap_or(OptimizerSettings::HEAD.validation_fraction)
    }

    /// Returns how other programs load a drafter; `None` if none can.
    pub fn served(&self, id: DrafterId) -> Option<ServedDrafter> {
        let kind = &self.drafters.get(id)?.kind;
        let flags = kind.served()?;
        let dir = kind.path().cloned().unwrap_or_else(|| self.export_dir(id).into());
        let model = match kind.model() {
            Some(model) => (served_path(model, false), None),
            None => {
                let out = served_path(Path::new(&format!("exported/{id}")), true);
                let export = flags.export_command(&dir, &out);
                (out, Some(export))
            }
        };
        Some(flags.served(&self.models.target, model, &dir))
    }

    /// Returns the output directory of the stages tune and replay.
    pub fn tuning_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("tuning")
    }

    /// Returns the sections `[tune]` and `[evaluate]`, which record, tune and replay need.
    ///
    /// # Errors
    /// If a section is missing. The message names it and `stage`.
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

    /// Returns the servers that run the target; `None` if the target's weights are read here.
    pub fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.data.as_ref()?.target_elsewhere()
    }

    /// Returns the target's layers that some drafter needs. An adapter needs the layers before its exit
    /// and the layers that initialise it. An EAGLE-3 drafter needs all, unless servers give the hidden
    /// states.
    pub fn layers_needed(&self) -> LayersNeeded {
        let is_given = self.states_server().is_some();
        let of_kinds = self.drafters.iter().map(|(_, it)| it.kind.layers_needed());
        let of_kinds = of_kinds.filter(|layers| !is_given || *layers != LayersNeeded::All);
        of_kinds.max().unwrap_or(LayersNeeded::First(0))
    }

    /// Returns the servers that give the target's hidden states; `None` if its layers run here.
    pub fn states_server(&self) -> Option<&ServerRecipe> {
        self.target_elsewhere().filter(|server| server.states.is_some())
    }

    /// Returns the largest number in states of servers that all trainings of the recipe can store.
    pub fn largest_stored_state(&self) -> f32 {
        let states = self.states_server().and_then(|server| server.states.as_ref());
        let is_stored = states.is_some_and(|states| states.keep != KeptIn::Nowhere);
        let trained = self.trained_self_drafts().into_iter().filter(|_| is_stored);
        let formats = trained.filter_map(|(_, training)| training.served_format());
        formats.map(FeatureFormat::largest).fold(f32::MAX, f32::min)
    }

    /// Lists the layers of a target whose hidden states the recipe's drafters read, with its last
    /// one, each as the number of layers before the state, in rising order. Empty if no drafter
    /// reads any.
    ///
    /// # Errors
    /// If a drafter's files are missing or invalid.
    pub fn state_layers(&self, target: &ModelConfig) -> Result<Vec<usize>> {
        let mut layers = Vec::new();
        for (_, drafter) in self.drafters.iter() {
            layers.extend(drafter.kind.state_layers(target)?);
        }
        if !layers.is_empty() {
            layers.push(target.shape.num_layers);
        }
        layers.sort_unstable();
        layers.dedup();
        Ok(layers)
    }

    /// Returns the output directory of the stage evaluate.
    pub fn evaluation_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("evaluation")
    }

    /// Returns the options for reading prompt files with this split.
    pub fn reading(&self, split: Option<Split>) -> Reading {
        Reading {
            split: split.map(|split| self.splits.range(split)),
            is_strict: self.is_strict || self.data.as_ref().is_some_and(|data| data.strict),
            keeps_tokens: false,
        }
    }

    /// Parses the tables of papers. The crate that writes reports defines their keys.
    ///
    /// # Errors
    /// If a key is unknown or invalid. The message names the key.
    pub fn paper_tables<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        let read = |table: &toml::Table| parse_toml(table.clone());
        let tables: Result<Vec<T>, String> = self.papers.iter().map(read).collect();
        tables.map_err(|problem| anyhow!("`[[papers]]`: {problem}"))
    }

    /// Writes the complete recipe to `recipe.toml` in an output directory.
    pub fn write_beside(&self, dir: &Path) -> Result<()> {
        let text = toml::to_string(self).context("cannot write the recipe as TOML")?;
        Ok(write_whole(&dir.join("recipe.toml"), text)?)
    }

    /// Writes a copy of the recipe with only one drafter into that drafter's export directory.
    /// Writes the complete recipe if it has no such drafter.
    pub fn write_of(&self, id: DrafterId, dir: &Path) -> Result<()> {
        match self.drafters.get(id) {
            Some(drafter) => self.with_only(id, drafter.clone()).write_beside(dir),
            None => self.write_beside(dir),
        }
    }

    fn check(&self) -> Result<()> {
        let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        ensure!(
            !self.name.is_empty() && !self.name.starts_with('.') && self.name.chars().all(safe),
            "key `name` is `{}`: expected a directory name of letters, digits, `-`, `_` and `.` \
             that does not start with `.`",
            self.name
        );
        self.data.iter().try_for_each(DataRecipe::check)?;
        check_states(self)?;
        if self.target_elsewhere().is_some() {
            check_without_weights(self)?;
        }
        self.splits.check()?;
        self.drafters.check()?;
        self.tune.iter().try_for_each(TuneRecipe::check)?;
        let firsts = self.evaluate.iter().flat_map(|evaluate| &evaluate.lookup_first);
        require(
            self.answers.is_some() || !firsts.clone().any(|first| first.answers),
            "evaluate.lookup_first",
            "searches earlier answers, and the key `answers` names none",
        )?;
        self.evaluate.iter().try_for_each(|evaluate| evaluate.check(&self.drafters))
    }
}

#[cfg(test)]
mod tests;

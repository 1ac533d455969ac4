//! A recipe: one TOML file with a section for each stage.
//!
//! A recipe is read once and checked as a whole, before any work starts. It is written beside every
//! output with defaults filled in and overrides applied. Paths are relative to the working directory.

mod cascades;
mod costs;
mod data;
#[cfg(test)]
mod documented;
mod evaluate;
mod merged;
mod overrides;
mod prompts;
mod server;
mod stop_rules;
mod trees;
mod tune;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_files::{Notation, plain_problem, write_whole};
use draftsmith_model::AdapterConfig;
use draftsmith_served::ServerRecipe;
use draftsmith_train::{
    AdapterTraining, ExitLayers, HeadLabels, HeadTraining, InitialWeights, OptimizerSettings,
    Section,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) use self::cascades::{CascadeRecipe, ChainRuleRecipe};
pub(crate) use self::costs::GivenCosts;
pub(crate) use self::data::{DataRecipe, Responses, decoding};
pub(crate) use self::evaluate::{EvaluateRecipe, MaxGramRecipe};
pub(crate) use self::merged::MergedRecipe;
pub(crate) use self::overrides::Overrides;
pub(crate) use self::prompts::{PromptSource, Split, Splits};
use self::server::check_without_weights;
pub(crate) use self::server::read_server;
pub(crate) use self::trees::{AskedShape, TreesRecipe};
pub(crate) use self::tune::{CalibrationChoice, TuneRecipe};
use crate::prompt_files::Reading;
use crate::text_side::Ends;

/// All settings of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    /// Names the output directories `data/NAME` and `checkpoints/NAME`; the file's stem if absent.
    #[serde(default)]
    pub(crate) name: String,
    /// Seed of every random draw.
    #[serde(default)]
    pub(crate) seed: u64,
    /// The models.
    pub(crate) models: Models,
    /// Shares of the splits of prompt files.
    #[serde(default)]
    pub(crate) splits: Splits,
    /// Stage build-data.
    pub(crate) data: Option<DataRecipe>,
    /// Stage train-head.
    pub(crate) head: Option<HeadTraining>,
    /// Stage train-adapter.
    pub(crate) adapter: Option<AdapterTraining>,
    /// Training of an acceptance head for each adapter: the keys of `[head]`, with labels from rollouts
    /// and without a sweep.
    pub(crate) adapter_head: Option<HeadTraining>,
    /// Whether a malformed record in a prompt file is an error even if `data.strict` is false.
    #[serde(skip)]
    pub(crate) is_strict: bool,
    /// Stages record and tune.
    pub(crate) tune: Option<TuneRecipe>,
    /// Stage evaluate.
    pub(crate) evaluate: Option<EvaluateRecipe>,
}

/// Models: checkpoint directories in Hugging Face's format, or names on its Hub, `org/name@revision`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Models {
    /// The model whose output is reproduced.
    pub(crate) target: PathBuf,
    /// The separate draft.
    pub(crate) draft: Option<PathBuf>,
    /// A second, smaller draft for cascades.
    pub(crate) small_draft: Option<PathBuf>,
    /// Replaces the target's chat template: `vicuna`, `llama-2`, `alpaca`, the path of a Jinja file, or
    /// `none` for only the last user message.
    pub(crate) chat_template: Option<String>,
    /// Replaces the end tokens named in the target's files.
    pub(crate) eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer after the token that completes one, as in transformers.
    #[serde(default)]
    pub(crate) stop_strings: Vec<String>,
}

impl Models {
    /// The end tokens and stop strings of answers.
    pub(crate) fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, only_answers: false }
    }
}

impl Recipe {
    /// Reads a recipe, applies the command line's overrides, and checks every value.
    pub(crate) fn read(path: &Path, overrides: &Overrides<'_>) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the recipe `{}`", path.display()))?;
        let named = || format!("recipe `{}`", path.display());
        let mut table: toml::Table =
            toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
        let is_changed = overrides.apply(&mut table)?;
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
        recipe.check().with_context(named)?;
        Ok(recipe)
    }

    /// The recipe of an export: `given`, or the one that training wrote into `dir`.
    ///
    /// # Errors
    /// If the recipe is missing or invalid.
    pub(crate) fn of_export(dir: &Path, given: Option<&Path>, seed: Option<u64>) -> Result<Self> {
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

    /// The output directory of build-data.
    pub(crate) fn data_dir(&self) -> PathBuf {
        Path::new("data").join(&self.name)
    }

    /// The output directory of all other stages.
    pub(crate) fn checkpoint_dir(&self) -> PathBuf {
        Path::new("checkpoints").join(&self.name)
    }

    /// The output directory of train-head.
    pub(crate) fn head_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("head")
    }

    /// The output directory for the heads of a sweep.
    pub(crate) fn sweep_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("sweep")
    }

    /// The output directory of train-adapter.
    pub(crate) fn adapter_root(&self) -> PathBuf {
        self.checkpoint_dir().join("adapter")
    }

    /// The exit layers and directories of the recipe's adapters. A single adapter is in
    /// [`Recipe::adapter_root`], several are in subdirectories.
    pub(crate) fn adapter_dirs(&self) -> Vec<(usize, PathBuf)> {
        let root = self.adapter_root();
        match self.adapter.as_ref().map(|adapter| &adapter.exit_layer) {
            None => Vec::new(),
            Some(ExitLayers::One(exit_layer)) => vec![(*exit_layer, root)],
            Some(ExitLayers::Many(exit_layers)) => exit_layers
                .iter()
                .map(|exit_layer| (*exit_layer, root.join(format!("exit-{exit_layer}"))))
                .collect(),
        }
    }

    /// The share of the built data's conversations that no training used. Each training holds out the
    /// same conversations first, so this is the smallest of their shares.
    pub(crate) fn held_out_share(&self) -> f64 {
        let head = self.head.as_ref().map(|head| head.optimizer);
        let adapter = self.adapter.as_ref().map(|adapter| adapter.optimizer);
        let adapter_head = self.adapter_head.as_ref().map(|head| head.optimizer);
        let all = [head, adapter, adapter_head].into_iter().flatten();
        let fractions = all.map(|optimizer| optimizer.validation_fraction);
        fractions.reduce(f64::min).unwrap_or(OptimizerSettings::HEAD.validation_fraction)
    }

    /// The output directory of tune and replay.
    pub(crate) fn tuning_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("tuning")
    }

    /// The sections that record, tune and replay need.
    pub(crate) fn need_tuning(&self, stage: &str) -> Result<(&TuneRecipe, &EvaluateRecipe)> {
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

    /// The servers that replace the target's weights, if those are not read.
    pub(crate) fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.data.as_ref()?.target_elsewhere()
    }

    /// The number of the target's first layers that adapters need: the layers before an exit, and layers
    /// that initialise an adapter. Covers the recipe's adapters and those of its evaluation.
    pub(crate) fn num_first_layers(&self) -> usize {
        let own = self.adapter.as_ref().map_or(0, |adapter| {
            let copied = match adapter.initial {
                InitialWeights::Target => adapter.num_layers,
                InitialWeights::Random => 0,
            };
            adapter.exit_layer.to_vec().into_iter().max().unwrap_or(0) + copied
        });
        let named = self.evaluate.as_ref().and_then(|evaluate| evaluate.adapters.as_ref());
        let exits = named.into_iter().flatten().filter_map(|dir| AdapterConfig::from_dir(dir).ok());
        exits.map(|config| config.exit_layer).max().unwrap_or(0).max(own)
    }

    /// The output directory of evaluate.
    pub(crate) fn evaluation_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("evaluation")
    }

    /// How to read the prompt files of a section with this split.
    pub(crate) fn reading(&self, split: Option<Split>) -> Reading {
        Reading {
            split: split.map(|split| self.splits.range(split)),
            is_strict: self.is_strict || self.data.as_ref().is_some_and(|data| data.strict),
            keeps_tokens: false,
        }
    }

    /// The draft's directory, for stages that need one.
    pub(crate) fn need_draft(&self, stage: &str) -> Result<&Path> {
        self.models.draft.as_deref().with_context(|| {
            format!("{stage} needs a draft; hint: set `models.draft` to its checkpoint directory")
        })
    }

    /// Writes the complete recipe into an output directory.
    pub(crate) fn write_beside(&self, dir: &Path) -> Result<()> {
        let text = toml::to_string(self).context("cannot write the recipe as TOML")?;
        Ok(write_whole(&dir.join("recipe.toml"), text)?)
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
        self.head.iter().try_for_each(|head| head.validate(Section::Head))?;
        self.adapter.iter().try_for_each(AdapterTraining::validate)?;
        self.adapter_head.iter().try_for_each(|head| self.check_adapter_head(head))?;
        self.tune.iter().try_for_each(TuneRecipe::check)?;
        self.evaluate.iter().try_for_each(EvaluateRecipe::check)
    }

    fn check_adapter_head(&self, head: &HeadTraining) -> Result<()> {
        head.validate(Section::AdapterHead)?;
        require(
            self.adapter.is_some(),
            "adapter_head",
            "is set without a section `[adapter]`: it trains heads of adapters",
        )?;
        require(
            head.labels == HeadLabels::Rollouts,
            "adapter_head.labels",
            "is not `rollouts`: the candidates in the data come from the draft, not from an adapter",
        )?;
        require(
            head.sweep.is_none(),
            "adapter_head.sweep",
            "is set: only the draft's heads can be swept",
        )
    }
}

/// Checks a key's value.
///
/// # Errors
/// If it does not hold; the message names the key and says the problem.
fn require(holds: bool, key: &str, problem: &str) -> Result<()> {
    if holds { Ok(()) } else { bail!("key `{key}` {problem}") }
}

/// Reads the keys of a table from a file, and checks them. Messages call the file `what`.
fn read_keys<T: DeserializeOwned>(
    what: &str,
    path: &Path,
    check: impl Fn(&T) -> Result<()>,
) -> Result<T> {
    let named = || format!("{what} `{}`", path.display());
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read the {}", named()))?;
    let keys: T = toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
    check(&keys).with_context(named)?;
    Ok(keys)
}

/// The TOML parser's message with the line that it shows, without the names of Rust types.
fn toml_error(error: &toml::de::Error) -> anyhow::Error {
    let message = error.message();
    let text = error.to_string().replace(message, &plain_problem(message, Notation::Toml));
    anyhow::anyhow!("{}", text.trim_end().to_owned())
}

#[cfg(test)]
mod tests;

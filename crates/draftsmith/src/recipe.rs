//! A recipe: one TOML file with a section a stage. Read once, checked as a whole, and written
//! beside every output in the form that was meant: defaults filled in, overrides applied.
//!
//! Paths are relative to the directory that draftsmith is run in.

mod cascade_rules;
mod cascades;
mod checks;
mod costs;
mod data;
#[cfg(test)]
mod documented;
mod evaluate;
mod max_gram;
mod merged;
mod overrides;
mod prompts;
mod server;
mod stop_rules;
mod trees;
mod tune;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_files::write_whole;
use draftsmith_model::AdapterConfig;
use draftsmith_train::{
    AdapterTraining, ExitLayers, HeadLabels, HeadTraining, InitialWeights, OptimizerSettings,
    Section,
};
use serde::{Deserialize, Serialize};

pub(crate) use self::cascade_rules::ChainRuleRecipe;
pub(crate) use self::cascades::CascadeRecipe;
use self::checks::{require, toml_error};
pub(crate) use self::costs::GivenCosts;
pub(crate) use self::data::{DataRecipe, Responses, decoding, sampling};
pub(crate) use self::evaluate::EvaluateRecipe;
pub(crate) use self::max_gram::MaxGramRecipe;
pub(crate) use self::merged::MergedRecipe;
pub(crate) use self::overrides::Overrides;
pub(crate) use self::prompts::{PromptSource, Split, Splits};
#[cfg(test)]
pub(crate) use self::server::ServerLabels;
pub(crate) use self::server::ServerRecipe;
use self::server::check_without_weights;
pub(crate) use self::trees::{AskedShape, TreesRecipe};
pub(crate) use self::tune::{CalibrationChoice, TuneRecipe};
use crate::prompt_files::Reading;
use crate::text_side::Ends;

/// All settings of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    /// Names the output directories `data/NAME` and `checkpoints/NAME`; the file's name if absent.
    #[serde(default)]
    pub(crate) name: String,
    /// Seed of every draw.
    #[serde(default)]
    pub(crate) seed: u64,
    /// The models.
    pub(crate) models: Models,
    /// The shares of the splits that sections may take prompts of.
    #[serde(default)]
    pub(crate) splits: Splits,
    /// Stage build-data.
    pub(crate) data: Option<DataRecipe>,
    /// Stage train-head.
    pub(crate) head: Option<HeadTraining>,
    /// Stage train-adapter.
    pub(crate) adapter: Option<AdapterTraining>,
    /// An acceptance head for each adapter, trained with it: the keys of `[head]`, with labels from
    /// rollouts and without a sweep.
    pub(crate) adapter_head: Option<HeadTraining>,
    /// Whether a malformed record of a prompt file is an error, whatever `data.strict` says.
    #[serde(skip)]
    pub(crate) is_strict: bool,
    /// Stages record and tune.
    pub(crate) tune: Option<TuneRecipe>,
    /// Stage evaluate.
    pub(crate) evaluate: Option<EvaluateRecipe>,
}

/// Checkpoint directories in Hugging Face's form, or names on its Hub: `org/name@revision`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Models {
    /// The model whose output it is.
    pub(crate) target: PathBuf,
    /// The model that proposes.
    pub(crate) draft: Option<PathBuf>,
    /// A second, smaller model that proposes, in cascades.
    pub(crate) small_draft: Option<PathBuf>,
    /// The chat template instead of the target's own: `vicuna`, `llama-2`, `alpaca`, the path of a
    /// Jinja file, or `none` for the last user text alone.
    pub(crate) chat_template: Option<String>,
    /// The tokens that end answers instead of those that the target's files name.
    pub(crate) eos_token_ids: Option<Vec<u32>>,
    /// Strings that end answers, with the token that completes one, as in transformers.
    #[serde(default)]
    pub(crate) stop_strings: Vec<String>,
}

impl Models {
    /// What ends answers.
    pub(crate) fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, only_answers: false }
    }
}

impl Recipe {
    /// Reads a recipe, applies what the command line says besides, and checks every value.
    pub(crate) fn read(path: &Path, overrides: &Overrides<'_>) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the recipe `{}`", path.display()))?;
        let named = || format!("recipe `{}`", path.display());
        let mut table: toml::Table =
            toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
        let is_changed = overrides.apply(&mut table)?;
        let mut recipe: Self = if is_changed {
            // Through text again, so that messages name keys as they do for a file.
            let merged = toml::to_string(&table).context("cannot merge the overrides")?;
            toml::from_str(&merged)
                .map_err(|e| toml_error(&e))
                .with_context(|| format!("{} with what the command line overrides", named()))?
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

    /// The recipe of what was trained: one that was given, or the one that training wrote beside it.
    ///
    /// # Errors
    /// If there is none, or it makes no sense.
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

    /// Where build-data writes.
    pub(crate) fn data_dir(&self) -> PathBuf {
        Path::new("data").join(&self.name)
    }

    /// Where everything else is written.
    pub(crate) fn checkpoint_dir(&self) -> PathBuf {
        Path::new("checkpoints").join(&self.name)
    }

    /// Where train-head writes.
    pub(crate) fn head_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("head")
    }

    /// Where train-head writes the heads of a sweep.
    pub(crate) fn sweep_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("sweep")
    }

    /// Where train-adapter writes.
    pub(crate) fn adapter_root(&self) -> PathBuf {
        self.checkpoint_dir().join("adapter")
    }

    /// Each exit layer of the recipe's adapters, and its directory: the root for one, a directory
    /// in it for each of several.
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

    /// The share of the built data's conversations that nothing was trained on: where heads and
    /// adapters held out different ones, the smaller, which is part of the larger.
    pub(crate) fn held_out_share(&self) -> f64 {
        let head = self.head.as_ref().map(|head| head.optimizer);
        let adapter = self.adapter.as_ref().map(|adapter| adapter.optimizer);
        let adapter_head = self.adapter_head.as_ref().map(|head| head.optimizer);
        let all = [head, adapter, adapter_head].into_iter().flatten();
        let fractions = all.map(|optimizer| optimizer.validation_fraction);
        fractions.reduce(f64::min).unwrap_or(OptimizerSettings::HEAD.validation_fraction)
    }

    /// Where tune and replay write.
    pub(crate) fn tuning_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("tuning")
    }

    /// The sections of record, tune and replay, for stages that cannot do without.
    pub(crate) fn need_tuning(&self, stage: &str) -> Result<(&TuneRecipe, &EvaluateRecipe)> {
        let tune = self.tune.as_ref().with_context(|| {
            format!(
                "the recipe has no section `[tune]`, which {stage} needs: it says what stop rules \
                 are chosen on; an empty one will do"
            )
        })?;
        let evaluate = self.evaluate.as_ref().with_context(|| {
            format!(
                "the recipe has no section `[evaluate]`, which {stage} needs: it says how, and on \
                 which prompts, decoding is tested"
            )
        })?;
        Ok((tune, evaluate))
    }

    /// The servers that the target is known by, where its weights are not read.
    pub(crate) fn target_elsewhere(&self) -> Option<&ServerRecipe> {
        self.data.as_ref()?.target_elsewhere()
    }

    /// How many of the target's first layers adapters stand on or begin with, those of a recipe and
    /// those that its evaluation names.
    pub(crate) fn num_first_layers(&self) -> usize {
        let own = self.adapter.as_ref().map_or(0, |adapter| {
            let behind = match adapter.initial {
                InitialWeights::Target => adapter.num_layers,
                InitialWeights::Random => 0,
            };
            adapter.exit_layer.to_vec().into_iter().max().unwrap_or(0) + behind
        });
        let named = self.evaluate.as_ref().and_then(|evaluate| evaluate.adapters.as_ref());
        let exits = named.into_iter().flatten().filter_map(|dir| AdapterConfig::from_dir(dir).ok());
        exits.map(|config| config.exit_layer).max().unwrap_or(0).max(own)
    }

    /// Where evaluate writes.
    pub(crate) fn evaluation_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("evaluation")
    }

    /// What is taken of prompt files of which a section says a split.
    pub(crate) fn reading(&self, split: Option<Split>) -> Reading {
        Reading {
            split: split.map(|split| self.splits.range(split)),
            is_strict: self.is_strict || self.data.as_ref().is_some_and(|data| data.strict),
            keeps_tokens: false,
        }
    }

    /// The draft, for stages that cannot do without.
    pub(crate) fn need_draft(&self, stage: &str) -> Result<&Path> {
        self.models.draft.as_deref().with_context(|| {
            format!("{stage} needs a draft; hint: set `models.draft` to its checkpoint directory")
        })
    }

    /// Writes the recipe as it was meant beside an output.
    pub(crate) fn write_beside(&self, dir: &Path) -> Result<()> {
        let text = toml::to_string(self).context("cannot write the recipe as TOML")?;
        Ok(write_whole(&dir.join("recipe.toml"), text)?)
    }

    fn check(&self) -> Result<()> {
        let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.name.is_empty() || self.name.starts_with('.') || !self.name.chars().all(safe) {
            bail!(
                "key `name` is `{}`: it names directories, so letters, digits, `-`, `_` and `.` \
                 only, and not `.` first",
                self.name
            );
        }
        if let Some(data) = &self.data {
            data.check()?;
        }
        if self.target_elsewhere().is_some() {
            check_without_weights(self)?;
        }
        self.splits.check()?;
        if let Some(head) = &self.head {
            head.validate(Section::Head)?;
        }
        if let Some(adapter) = &self.adapter {
            adapter.validate()?;
        }
        if let Some(head) = &self.adapter_head {
            self.check_adapter_head(head)?;
        }
        if let Some(tune) = &self.tune {
            tune.check()?;
        }
        if let Some(evaluate) = &self.evaluate {
            evaluate.check()?;
        }
        Ok(())
    }

    fn check_adapter_head(&self, head: &HeadTraining) -> Result<()> {
        head.validate(Section::AdapterHead)?;
        require(
            self.adapter.is_some(),
            "adapter_head",
            "is there without a section `[adapter]`: it says how adapters' heads are trained",
        )?;
        require(
            head.labels == HeadLabels::Rollouts,
            "adapter_head.labels",
            "is not `rollouts`: what is in the data was drawn by the draft, not by an adapter",
        )?;
        require(
            head.sweep.is_none(),
            "adapter_head.sweep",
            "is there: only the draft's heads can be swept",
        )
    }
}

#[cfg(test)]
mod tests;

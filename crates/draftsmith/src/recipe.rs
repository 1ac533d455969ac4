//! A recipe: one TOML file with a section a stage. Read once, checked as a whole, and written
//! beside every output in the form that was meant: defaults filled in, overrides applied.
//!
//! Paths are relative to the directory that draftsmith is run in.

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
use draftsmith_train::{
    AdapterTraining, ExitLayers, HeadLabels, HeadTraining, OptimizerSettings, Section,
    check_moved_keys,
};
use serde::{Deserialize, Serialize};

pub(crate) use self::cascades::{CascadeRecipe, ChainRuleRecipe};
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
pub(crate) use self::tune::{CalibrationChoice, TuneRecipe};
use crate::ends::Ends;
use crate::prompts::reading::Reading;

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
        Ends { eos_token_ids, stop_strings, of_answers_alone: false }
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
        check_moved_keys(&table).with_context(named)?;
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

    /// Where evaluate writes.
    pub(crate) fn evaluation_dir(&self) -> PathBuf {
        self.checkpoint_dir().join("evaluation")
    }

    /// What is taken of prompt files of which a section says a split.
    pub(crate) fn reading(&self, split: Option<Split>) -> Reading {
        Reading {
            split: split.map(|split| self.splits.range(split)),
            is_strict: self.is_strict || self.data.as_ref().is_some_and(|data| data.strict),
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
mod tests {
    use draftsmith_model::WeightDtype;
    use draftsmith_theory::{Decoding, TokenChoice};
    use draftsmith_train::Clipping;

    use crate::results::DecodingName;

    use super::*;

    const RECIPE: &str = "[models]\ntarget = 't'\ndraft = 'd'\n\
                          [data]\nprompts = ['p.jsonl']\n\
                          [head]\n[evaluate]\nprompts = ['q.jsonl']\n";

    fn read(text: &str, overrides: &[&str]) -> Result<Recipe> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("mine.toml");
        std::fs::write(&path, text).expect("written");
        let keys: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
        Recipe::read(&path, &Overrides { keys: &keys, ..Overrides::default() })
    }

    fn message(text: &str, overrides: &[&str]) -> String {
        format!("{:#}", read(text, overrides).expect_err("refused"))
    }

    #[test]
    fn defaults_and_overrides_resolve() {
        let recipe =
            read(RECIPE, &["head.num_layers=2", "seed=7", "models.draft=other"]).expect("reads");
        assert_eq!(recipe.name, "mine");
        assert_eq!(recipe.seed, 7);
        assert_eq!(recipe.head.as_ref().expect("a head").num_layers, 2);
        assert_eq!(recipe.models.draft.as_deref(), Some(Path::new("other")));
        assert_eq!(recipe.evaluate.expect("a section").max_candidate_length, 20);
    }

    #[test]
    fn an_adapters_head_learns_from_rollouts_alone() {
        let head = ["adapter.exit_layer=1", "adapter_head.labels=rollouts"];
        let with = |more: &'static str| [head[0], head[1], more];
        read(RECIPE, &head).expect("reads");
        assert!(message(RECIPE, &head[1..]).contains("`[adapter]`"));
        let sampled = with("adapter_head.labels=sampled");
        assert!(message(RECIPE, &sampled).contains("`adapter_head.labels` is not `rollouts`"));
        let bad = message(RECIPE, &with("adapter_head.num_layers=65"));
        assert!(bad.contains("`adapter_head.num_layers` is 65"), "{bad}");
        let sweep = with("adapter_head.sweep.num_layers=[0, 1]");
        assert!(message(RECIPE, &sweep).contains("`adapter_head.sweep`"));
    }

    #[test]
    fn every_stage_samples_as_evaluate_says() {
        let top_k = |overrides: &[&str]| {
            let evaluate = read(RECIPE, overrides).expect("reads").evaluate.expect("a section");
            assert_eq!(evaluate.decoding(DecodingName::Greedy), Decoding::GREEDY);
            match evaluate.decoding(DecodingName::Sampled).choice {
                TokenChoice::Sampled(sampling) => sampling.top_k,
                TokenChoice::Greedy => panic!("it is sampled"),
            }
        };
        assert_eq!(top_k(&[]), None);
        assert_eq!(top_k(&["data.top_k=3"]), None);
        assert_eq!(top_k(&["evaluate.top_k=3"]), Some(3));
    }

    #[test]
    fn trainings_compute_as_the_command_line_says_where_the_recipe_does_not() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("mine.toml");
        let adapters = "[adapter]\nexit_layer = 1\n[adapter_head]\nlabels = 'rollouts'\n\
                        dtype = 'f32'\n";
        std::fs::write(&path, format!("{RECIPE}{adapters}")).expect("written");
        let dtypes = |dtype, keys: &[String]| {
            let recipe = Recipe::read(&path, &Overrides { keys, dtype, ..Overrides::default() });
            let Recipe { head, adapter, adapter_head, .. } = recipe.expect("reads");
            let [head, adapter_head] = [head, adapter_head].map(|it| it.expect("a section").dtype);
            [head, adapter.expect("a section").dtype, adapter_head]
        };
        use WeightDtype::{Bf16, F32};
        assert_eq!(dtypes(F32, &[]), [F32; 3]);
        assert_eq!(dtypes(Bf16, &[]), [Bf16, Bf16, F32]);
        assert_eq!(dtypes(Bf16, &["adapter.dtype=f32".to_owned()]), [Bf16, F32, F32]);
        assert_eq!(dtypes(F32, &["head.dtype=bf16".to_owned()]), [Bf16, F32, F32]);
        // A section that is not there is not made by it.
        std::fs::write(&path, RECIPE).expect("written");
        let recipe = Recipe::read(&path, &Overrides { dtype: Bf16, ..Overrides::default() });
        assert!(recipe.expect("reads").adapter.is_none());
    }

    #[test]
    fn what_is_written_beside_outputs_reads_back() {
        let overrides =
            ["data.top_k=5", "head.optimizer.clipping.value=0.5", "head.optimizer.schedule=linear"];
        let recipe = read(RECIPE, &overrides).expect("reads");
        assert_eq!(recipe.head.as_ref().expect("a head").optimizer.clipping, Clipping::Value(0.5));
        let dir = tempfile::tempdir().expect("a temporary directory");
        recipe.write_beside(dir.path()).expect("written");
        let again = Recipe::read(&dir.path().join("recipe.toml"), &Overrides::default());
        let again = again.expect("reads back");
        assert_eq!(toml::to_string(&again).expect("TOML"), toml::to_string(&recipe).expect("TOML"));
    }

    #[test]
    fn misspelt_missing_and_senseless_keys_are_named() {
        let misspelt = RECIPE.replace("prompts = ['q.jsonl']", "prompt = ['q.jsonl']");
        assert!(message(&misspelt, &[]).contains("`prompt`"));
        let missing = RECIPE.replace("target = 't'\n", "");
        assert!(message(&missing, &[]).contains("`target`"));
        assert!(message(RECIPE, &["head.layers=2"]).contains("`layers`"));
        assert!(message(RECIPE, &["head.optimizer.rate=2"]).contains("`rate`"));
        let moved = message(&format!("{RECIPE}[adapter]\nvalidation_share = 0.2\n"), &[]);
        assert!(moved.contains("write `adapter.optimizer.validation_fraction`"), "{moved}");
        assert!(
            message(RECIPE, &["head.learning_rate=1"]).contains("`head.optimizer.learning_rate`")
        );
        assert!(message(RECIPE, &["data.temperature=-1"]).contains("data"));
        for section in ["data", "evaluate"] {
            let none = message(RECIPE, &[&format!("{section}.top_k=0")]);
            assert!(none.contains(&format!("`{section}`")) && none.contains("top_k"), "{none}");
        }
        assert!(
            message(RECIPE, &["head.optimizer.clipping.norm=0"])
                .contains("`head.optimizer.clipping.norm`")
        );
        assert!(message(RECIPE, &["evaluate.candidate_lengths=[0]"]).contains("candidate_lengths"));
        assert!(message(RECIPE, &["name=../x"]).contains("`name`"));
        assert!(message(RECIPE, &["seed"]).contains("KEY=VALUE"));
        assert!(message(RECIPE, &["seed.x=1"]).len() > 5);
    }
}

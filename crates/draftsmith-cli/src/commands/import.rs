//! `import`: converts heads, adapters and data in the formats of the papers' own code.
//!
//! For data, `build-data` labels the responses in the authors' file with the models of a recipe.
//! This module only sets the recipe's keys for that.

use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, KANGAROO_ROPE_THETA, WeightDtype, check_finite,
};
use serde_json::json;

use crate::console::Console;
use draftsmith_recipe::{OutDir, Overrides, Recipe};

/// Arguments of `import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// The source's form: `specdec-pp` or `kangaroo`.
    #[arg(long, value_name = "FORM", hide_possible_values = true)]
    from: ImportForm,
    /// For an adapter: the target's layers before it (the authors': 2 for 7B, 3 for 13B models).
    #[arg(long, value_name = "N")]
    exit_layer: Option<NonZeroUsize>,
    /// For data: the recipe that names the models to label it with, and the settings in `[data]`.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// The directory to read; for data, the file.
    source: PathBuf,
    /// The directory to write, which must be absent or empty; for data, `data/NAME`.
    out: PathBuf,
}

/// The formats.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ImportForm {
    /// A SpecDec++ acceptance head (`config.json` and `model.safetensors`), or a JSON file of SpecDec++
    /// data.
    SpecdecPp,
    /// A Kangaroo adapter (`config.json` and `pytorch_model.bin`).
    Kangaroo,
}

impl ImportArguments {
    /// Reads the given recipe and sets its keys for the authors' data: their file contains the
    /// prompts and responses, and malformed records are errors. `None` if the source is not data.
    ///
    /// # Errors
    /// If the recipe is missing or invalid, or the output is not `data/NAME`.
    pub(crate) fn data_recipe(
        &self,
        seed: Option<u64>,
        dtype: WeightDtype,
    ) -> Result<Option<Recipe>> {
        let Self { from, recipe, source, out, .. } = self;
        if !matches!(from, ImportForm::SpecdecPp) || !source.is_file() {
            ensure!(
                recipe.is_none(),
                "`--recipe` is only for a file of the SpecDec++ authors' data, not for `{}`",
                source.display()
            );
            return Ok(None);
        }
        let recipe = recipe.as_ref().with_context(|| {
            format!(
                "`{}` has no labels from your models; hint: give a recipe that names the models with \
                 `--recipe FILE`, or import a head's directory",
                source.display()
            )
        })?;
        let name = name_of(out).with_context(|| {
            format!("data must go into `data/NAME`, where recipes find it, not `{}`", out.display())
        })?;
        let text = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let path = source.to_str().with_context(|| {
            format!("a recipe cannot name `{}`, which is not UTF-8", source.display())
        })?;
        let keys = [
            format!("name={}", text(name)),
            format!("data.prompts=[{}]", text(path)),
            "data.responses=\"existing\"".to_owned(),
        ];
        Recipe::read(
            recipe,
            &Overrides { keys: &keys, seed, dtype, is_strict: true, ..Overrides::default() },
        )
        .map(Some)
    }
}

/// Returns `NAME` from the path `data/NAME`. `None` for other paths.
fn name_of(out: &Path) -> Option<&str> {
    let parts = out.components().filter(|part| *part != Component::CurDir);
    match &parts.collect::<Vec<_>>()[..] {
        [Component::Normal(data), Component::Normal(name)] if *data == "data" => name.to_str(),
        _ => None,
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &ImportArguments, console: &Console) -> Result<()> {
    let ImportArguments { from, exit_layer, source, out, recipe: _ } = arguments;
    let dir = OutDir::begin(out)?;
    check_finite(source)?;
    let what = match from {
        ImportForm::SpecdecPp => {
            let config = AcceptanceHeadConfig::from_dir(source)?;
            let (config, head) =
                AcceptanceHead::from_dir(source, config.hidden_size, &Device::flex())?;
            head.write_dir(dir.path(), &config)?;
            format!(
                "an acceptance head of {} layers for a draft of width {}",
                config.num_layers, config.hidden_size
            )
        }
        ImportForm::Kangaroo => {
            let exit_layer = exit_layer.context(
                "an adapter's files do not name its exit layer; hint: give `--exit-layer N` (the \
                 Kangaroo authors' adapters: 2 for 7B, 3 for 13B models)",
            )?;
            let (config, named_theta) =
                Adapter::import_kangaroo(source, exit_layer.get(), dir.path())?;
            if let Some(theta) = named_theta {
                console.note(format!(
                    "import: `{}` has `rope_theta` = {theta}, but Kangaroo's class trains with \
                     {KANGAROO_ROPE_THETA}, which was written instead",
                    source.join("config.json").display()
                ));
            }
            format!("an adapter of {} parameters after layer {exit_layer}", config.num_parameters())
        }
    };
    dir.finish()?;
    console.text(format!("{what}: {}\n", out.display()))?;
    console.document(&json!({ "source": source, "out": out, "what": what }))
}

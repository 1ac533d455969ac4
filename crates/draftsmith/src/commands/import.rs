//! `import`: heads, adapters and data of the methods' authors, as ours.
//!
//! Data is built: `build-data` labels the responses of the authors' file with the models of a recipe,
//! which is told here to take that file.

use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, KANGAROO_ROPE_THETA, WeightDtype,
};
use serde_json::json;

use crate::console::Console;
use crate::out_dir::OutDir;
use crate::recipe::{Overrides, Recipe};

/// Arguments of `import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// Whose form it has.
    #[arg(long, value_name = "FORM")]
    from: Form,
    /// Of an adapter: the target's layers that run before it (Kangaroo's own: 2 for 7B, 3 for 13B
    /// models), which its files do not say.
    #[arg(long, value_name = "N")]
    exit_layer: Option<NonZeroUsize>,
    /// Of data: the recipe that names the models which label it, and whose `[data]` says how they
    /// sample.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// The directory to read; of data, the file.
    source: PathBuf,
    /// The directory to write, which must not be there, or be empty; of data, `data/NAME`.
    out: PathBuf,
}

/// Whose form something has.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Form {
    /// An acceptance head of SpecDec++'s, `config.json` and `model.safetensors`, or a JSON file of their
    /// data.
    SpecdecPp,
    /// An adapter of Kangaroo's: `config.json` and `pytorch_model.bin`.
    Kangaroo,
}

impl ImportArguments {
    /// The recipe that builds the authors' data, where that is what is imported: the one that was given,
    /// with their file for its prompts and responses, and a malformed record an error.
    ///
    /// # Errors
    /// If there is no recipe, it makes no sense, or the data is to go where no recipe finds it.
    pub(crate) fn data_recipe(
        &self,
        seed: Option<u64>,
        dtype: WeightDtype,
    ) -> Result<Option<Recipe>> {
        let Self { from, recipe, source, out, .. } = self;
        if !matches!(from, Form::SpecdecPp) || !source.is_file() {
            if recipe.is_some() {
                bail!(
                    "`--recipe` is for a file of the SpecDec++ authors' data, and `{}` is none",
                    source.display()
                );
            }
            return Ok(None);
        }
        let recipe = recipe.as_ref().with_context(|| {
            format!(
                "`{}` has no labels of your models; hint: give a recipe that names them with \
                 `--recipe FILE`, or import a head's directory",
                source.display()
            )
        })?;
        let name = name_of(out).with_context(|| {
            format!(
                "data goes into `data/NAME`, where recipes find it, not into `{}`",
                out.display()
            )
        })?;
        let text = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let path = source.to_str().with_context(|| {
            format!("`{}` is no UTF-8, and a recipe cannot name it", source.display())
        })?;
        let keys = [
            format!("name={}", text(name)),
            format!("data.prompts=[{}]", text(path)),
            "data.responses=\"existing\"".to_owned(),
        ];
        Recipe::read(recipe, &Overrides { keys: &keys, seed, dtype, is_strict: true }).map(Some)
    }
}

/// The `NAME` of `data/NAME`.
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
    let what = match from {
        Form::SpecdecPp => {
            let config = AcceptanceHeadConfig::from_dir(source)?;
            let (config, head) =
                AcceptanceHead::from_dir(source, config.hidden_size, &Device::flex())?;
            head.write_dir(dir.path(), &config)?;
            format!(
                "an acceptance head of {} layers for a draft of width {}",
                config.num_layers, config.hidden_size
            )
        }
        Form::Kangaroo => {
            let exit_layer = exit_layer.context(
                "an adapter's files do not say which layer it stands behind: give it with \
                 `--exit-layer N` (Kangaroo's own adapters: 2 for 7B, 3 for 13B models)",
            )?;
            let (config, named_theta) =
                Adapter::import_kangaroo(source, exit_layer.get(), dir.path())?;
            if let Some(theta) = named_theta {
                console.note(format!(
                    "import: `{}` has `rope_theta` = {theta}, but Kangaroo's class, which trained it, \
                     rotates with {KANGAROO_ROPE_THETA}, and so does what was written",
                    source.join("config.json").display()
                ));
            }
            format!(
                "an adapter of {} parameters behind layer {exit_layer}",
                config.num_parameters()
            )
        }
    };
    dir.finish()?;
    console.text(format!("{what}: {}\n", out.display()))?;
    console.document(&json!({ "source": source, "out": out, "what": what }))
}

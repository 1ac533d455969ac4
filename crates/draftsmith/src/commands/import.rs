//! `import`: heads and adapters of the methods' authors, as ours.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, Adapter, KANGAROO_ROPE_THETA};
use serde_json::json;

use crate::console::Console;
use crate::out_dir::OutDir;

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
    /// The directory to read.
    source: PathBuf,
    /// The directory to write, which must not be there, or be empty.
    out: PathBuf,
}

/// Whose form something has.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Form {
    /// An acceptance head of SpecDec++'s: `config.json` and `model.safetensors`.
    SpecdecPp,
    /// An adapter of Kangaroo's: `config.json` and `pytorch_model.bin`.
    Kangaroo,
}

/// Runs the command.
pub(crate) fn run(arguments: &ImportArguments, console: &Console) -> Result<()> {
    let ImportArguments { from, exit_layer, source, out } = arguments;
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

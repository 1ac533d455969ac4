//! `export`: writes heads, adapters and data in the formats that other runtimes load.

mod data;
mod draft_model;
mod eagle3;
mod foreign;
mod transformers;
mod vllm;

use std::path::PathBuf;

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;

use crate::console::Console;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::exports::ExportKind;
use draftsmith_recipe::workspace::Workspace;

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// The form: `draft-model`, `eagle3`, `transformers`, `vllm`, `specdec-pp` or `kangaroo`.
    #[arg(long = "for", value_name = "FORM", hide_possible_values = true)]
    form: Form,
    /// The recipe that names the models, instead of the one beside the source.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// End a round when the head's probability of a rejection exceeds this, instead of the tuned threshold.
    #[arg(long, value_name = "H")]
    stop_threshold: Option<f64>,
    /// The directory of an adapter or head; for `specdec-pp` also of data, or a Parquet file.
    source: PathBuf,
    /// The directory to write, which must be absent or empty; for data, the JSON file.
    out: PathBuf,
}

/// The formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Form {
    /// A self-draft adapter as a checkpoint of the target's family, for runtimes with draft models:
    /// transformers, vLLM, SGLang, llama.cpp.
    DraftModel,
    /// An EAGLE-3 drafter as vLLM, SGLang and llama.cpp load it.
    Eagle3,
    /// A draft with its acceptance head, which ends drafting in transformers' assisted generation. The
    /// draft is the head's separate model, or the draft model of an adapter.
    Transformers,
    /// The same as a Python package with a proposer for vLLM.
    Vllm,
    /// An acceptance head for the SpecDec++ authors' class, or responses with labels for their scripts.
    SpecdecPp,
    /// A self-draft adapter for Kangaroo's class.
    Kangaroo,
}

/// The outcome of an export.
struct Written {
    /// A description of what was written.
    what: String,
    /// Properties of the source that the runtime cannot honour, one sentence each.
    ignored: Vec<String>,
    /// Commands that load it.
    commands: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &ExportArguments, device: &Device, console: &Console) -> Result<()> {
    let ExportArguments { form, recipe, source, .. } = arguments;
    if arguments.stop_threshold.is_some() && !matches!(form, Form::Transformers | Form::Vllm) {
        bail!(
            "flag `--stop-threshold` is for `--for transformers` and `--for vllm`, whose exports stop by \
             an acceptance head; hint: leave it out"
        );
    }
    if *form == Form::SpecdecPp && data::is_data(source) {
        let dir = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
        let recipe = Recipe::of_export(dir, recipe.as_deref(), None)?;
        let target = &recipe.models.target;
        let workspace = Workspace::open(target, None, &[], None, vec![device.clone()], console)?;
        let written = data::specdec_pp(arguments, workspace.text.tokenizer(&workspace.models)?)?;
        return print(arguments, &written, console);
    }
    let kind = ExportKind::of(source)?;
    if *form != Form::SpecdecPp
        && kind == ExportKind::Head
        && let Some(adapter) = source.parent()
        && ExportKind::of(adapter).is_ok_and(|kind| kind == ExportKind::Adapter)
    {
        bail!(
            "`{}` is the head of an adapter; hint: give the adapter's directory, `{}`",
            source.display(),
            adapter.display()
        );
    }
    let workspace = || -> Result<Workspace> {
        let recipe = Recipe::of_export(source, recipe.as_deref(), None)?;
        let (_, recipe) = recipe.only_of(kind, source)?;
        let (template, drafts) = (recipe.models.chat_template.as_deref(), recipe.drafters.models());
        let devices = vec![device.clone()];
        let target = &recipe.models.target;
        let mut workspace = Workspace::open(target, None, &drafts, template, devices, console)?;
        workspace.text.ends = recipe.models.ends();
        Ok(workspace)
    };
    let written = match (form, kind) {
        (Form::DraftModel, ExportKind::Adapter) => draft_model::export(arguments, &workspace()?)?,
        (Form::Eagle3, ExportKind::Eagle3) => eagle3::export(arguments, &workspace()?)?,
        (Form::Eagle3, _) | (_, ExportKind::Eagle3) => bail!(
            "this format does not support the {} in `{}`; hint: `--for eagle3` takes EAGLE-3 drafters, and \
             they go out by it only",
            kind.text(),
            source.display()
        ),
        (Form::Transformers, kind) => transformers::export(arguments, kind, &workspace()?)?,
        (Form::Vllm, kind) => vllm::export(arguments, kind, &workspace()?)?,
        (Form::SpecdecPp, ExportKind::Head) => foreign::specdec_pp(arguments)?,
        (Form::Kangaroo, ExportKind::Adapter) => foreign::kangaroo(arguments)?,
        (Form::DraftModel, ExportKind::Head) => bail!(
            "`{}` is an acceptance head, which a draft model cannot hold; hint: use the head's draft, \
             which is a draft model already",
            source.display()
        ),
        (Form::SpecdecPp, ExportKind::Adapter) | (Form::Kangaroo, ExportKind::Head) => bail!(
            "this format does not support the {} in `{}`; hint: `--for specdec-pp` takes acceptance \
             heads, `--for kangaroo` self-draft adapters",
            kind.text(),
            source.display()
        ),
    };
    print(arguments, &written, console)
}

fn print(arguments: &ExportArguments, written: &Written, console: &Console) -> Result<()> {
    let ExportArguments { form, source, out, .. } = arguments;
    let mut text = format!("{}: {}\n", written.what, out.display());
    for sentence in &written.ignored {
        text += &format!("not exported: {sentence}\n");
    }
    for command in &written.commands {
        text += &format!("{command}\n");
    }
    console.text(text)?;
    console.document(&json!({
        "form": form, "source": source, "out": out,
        "what": written.what, "ignored": written.ignored, "commands": written.commands,
    }))
}

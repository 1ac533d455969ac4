//! `export`: what was trained, in the forms that other runtimes load.

mod data;
mod draft_model;
mod foreign;
mod transformers;
mod vllm;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::console::Console;
use crate::device::on_pool;
use crate::exports::ExportKind;
use crate::recipe::Recipe;
use crate::workspace::Workspace;

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// What is to load it.
    #[arg(long = "for", value_name = "FORM")]
    form: Form,
    /// The recipe that names the models; the one beside what is exported if absent.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// With a head: end a round when the chance of a rejection exceeds this; what was tuned if
    /// absent, or else 0.7.
    #[arg(long, value_name = "H")]
    stop_threshold: Option<f64>,
    /// An adapter's or a head's directory; for `specdec-pp` also a data directory or a Parquet file of
    /// responses.
    source: PathBuf,
    /// The directory to write, which must not be there, or be empty; of data, the JSON file.
    out: PathBuf,
}

/// A form that something else loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Form {
    /// A self-draft adapter as an ordinary checkpoint of the target's family, for every runtime that
    /// has draft models: transformers, vLLM, SGLang, llama.cpp.
    DraftModel,
    /// An acceptance head inside its draft's directory, which transformers' assisted generation then
    /// stops by: a head's separate draft, or the draft model of an adapter with a head.
    Transformers,
    /// The same as a Python package that vLLM loads a proposer from.
    Vllm,
    /// An acceptance head for the SpecDec++ authors' class, or responses and labels for their programs.
    SpecdecPp,
    /// A self-draft adapter for Kangaroo's class.
    Kangaroo,
}

/// What is exported, and where to.
struct Export<'a> {
    source: &'a Path,
    out: &'a Path,
    stop_threshold: Option<f64>,
}

/// What was written.
#[derive(Serialize)]
struct Written {
    /// In words.
    what: String,
    /// What of the source those who load it cannot honour, each in a sentence.
    ignored: Vec<String>,
    /// How it is loaded.
    commands: Vec<String>,
}

/// The same as `--json` tells it.
#[derive(Serialize)]
struct Document<'a> {
    form: Form,
    source: &'a Path,
    out: &'a Path,
    #[serde(flatten)]
    written: &'a Written,
}

/// Runs the command.
pub(crate) fn run(arguments: &ExportArguments, device: &Device, console: &Console) -> Result<()> {
    on_pool(|| export(arguments, device, console))
}

fn export(arguments: &ExportArguments, device: &Device, console: &Console) -> Result<()> {
    let ExportArguments { form, recipe, stop_threshold, source, out } = arguments;
    let export = Export { source, out, stop_threshold: *stop_threshold };
    if *form == Form::SpecdecPp && data::is_data(source) {
        let dir = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
        let recipe = Recipe::of_export(dir, recipe.as_deref(), None)?;
        let target = &recipe.models.target;
        let workspace = Workspace::open(target, None, None, vec![device.clone()], console)?;
        let written = data::specdec_pp(&export, workspace.tokenizer()?)?;
        return tell(arguments, &written, console);
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
        let template = recipe.models.chat_template.as_deref();
        let draft = kind.draft_in(&recipe)?;
        let devices = vec![device.clone()];
        let target = &recipe.models.target;
        let workspace = Workspace::open(target, draft, template, devices, console)?;
        Ok(workspace.ending(recipe.models.ends()))
    };
    let written = match (form, kind) {
        (Form::DraftModel, ExportKind::Adapter) => draft_model::export(&export, &workspace()?)?,
        (Form::Transformers, kind) => transformers::export(&export, kind, &workspace()?)?,
        (Form::Vllm, kind) => vllm::export(&export, kind, &workspace()?)?,
        (Form::SpecdecPp, ExportKind::Head) => foreign::specdec_pp(&export)?,
        (Form::Kangaroo, ExportKind::Adapter) => foreign::kangaroo(&export)?,
        (Form::DraftModel, ExportKind::Head) => bail!(
            "`{}` is an acceptance head, and a draft model has none; hint: the draft that it is for \
             is a draft model already",
            source.display()
        ),
        (Form::SpecdecPp, ExportKind::Adapter) | (Form::Kangaroo, ExportKind::Head) => bail!(
            "that form is not for the {} in `{}`; hint: `--for specdec-pp` takes acceptance heads, \
             `--for kangaroo` self-draft adapters",
            kind.text(),
            source.display()
        ),
    };
    tell(arguments, &written, console)
}

/// Tells what was written.
fn tell(arguments: &ExportArguments, written: &Written, console: &Console) -> Result<()> {
    let ExportArguments { form, source, out, .. } = arguments;
    let mut text = format!("{}: {}\n", written.what, out.display());
    for sentence in &written.ignored {
        text += &format!("not taken along: {sentence}\n");
    }
    for command in &written.commands {
        text += &format!("{command}\n");
    }
    console.text(text)?;
    console.document(&Document { form: *form, source, out, written })
}

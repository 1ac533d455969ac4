//! `export`: writes heads, adapters and data in the formats that other runtimes load.

mod data;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;
use draftsmith_model::{DrafterDir, WeightDtype};
use serde_json::json;

use crate::commands::DeviceJob;
use crate::console::Console;
use draftsmith_recipe::exports::HEAD;
use draftsmith_recipe::exports::forms::{ExportForm, Exporting, Written};
use draftsmith_recipe::kinds::self_draft::low_agreement;
use draftsmith_recipe::{
    AS_DRAFT_MODEL, KindEntry, Kinds, Recipe, Runtime, ServerFlags, Workspace, served_path,
};
use draftsmith_report::DecodingName;
use draftsmith_servers::doctor::{Finding, diagnose};
use draftsmith_theory::{DrafterId, Drafting};
use draftsmith_tune::serving::tuned_ways;

/// Arguments of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// The form: `draft-model`, `eagle3`, `dspark`, `transformers`, `vllm`, `specdec-pp` or `kangaroo`.
    #[arg(long = "for", value_name = "FORM", value_parser = form_parser(), hide_possible_values = true)]
    form: String,
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

/// Runs the command.
pub(crate) fn run(arguments: &ExportArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { device, console, .. } = job;
    let ExportArguments { form, recipe, source, out, stop_threshold } = arguments;
    let kinds = Kinds::default();
    ensure!(
        stop_threshold.is_none() || forms(&kinds).any(|it| it.name == form && it.stops_by_head),
        "flag `--stop-threshold` is for exports that stop by an acceptance head, such as `--for transformers`; \
         hint: leave it out"
    );
    if form == OF_DATA && data::is_data(source) {
        let dir = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
        let recipe = Recipe::of_export(dir, recipe.as_deref(), None)?;
        let (target, devices) = (&recipe.models.target, vec![device.clone()]);
        let mut workspace = Workspace::open(target, None, &[], None, devices, console)?;
        workspace.text.dir.clone_from(&recipe.models.tokenizer);
        let written = data::specdec_pp(arguments, workspace.text.tokenizer(&workspace.models)?)?;
        return print(arguments, &written, console);
    }
    let found = kinds.trained_in(source)?;
    let write = found.export.form(form, source)?.write;
    if form != OF_DATA
        && found.kind.is_none()
        && let Some(drafter) = source.parent()
        && kinds.found_in(drafter).is_ok_and(|it| it.kind.is_some_and(KindEntry::is_trained))
    {
        bail!(
            "`{}` is the head of another drafter; hint: give that drafter's directory, `{}`",
            source.display(),
            drafter.display()
        );
    }
    let (id, recipe) =
        Recipe::of_export(source, recipe.as_deref(), None)?.only_of(found, source)?;
    let open = || -> Result<Workspace> {
        // Drafters that read a server's hidden states may have a target of any family.
        let served_as = recipe.states_server().map(|server| &*server.model);
        recipe.open(served_as, WeightDtype::F32, vec![device.clone()], console)
    };
    let given = recipe.drafters.get(id).and_then(|it| it.kind.path()).cloned();
    let from = given.unwrap_or_else(|| source.into());
    let flags = ServerFlags::of_form(form);
    if flags.is_some_and(|flags| *flags != AS_DRAFT_MODEL) && recipe.target_elsewhere().is_none() {
        let diagnosis = diagnose(&from, &recipe.models.target)?;
        if let Some(Finding { what, servers, hint, .. }) = diagnosis.refuses_export() {
            bail!(
                "the drafter in `{}` cannot be served: {what} ({servers}); hint: {hint}",
                from.display()
            );
        }
    }
    let stop_threshold = *stop_threshold;
    let mut written = write(&Exporting { source: &from, out, stop_threshold, open: &open })?;
    let ignored = from.ignored_text();
    written.ignored.extend(ignored.map(|text| format!("keys: the drafter was {text}")));
    if let Some(flags) = flags {
        written.commands.extend(starts(&recipe, id, flags, (&from, out))?);
    }
    print(arguments, &written, console)
}

/// Returns the commands that start programs with an exported drafter, at the settings that `tune`
/// found.
fn starts(
    recipe: &Recipe,
    id: DrafterId,
    flags: &'static ServerFlags,
    (source, out): (&DrafterDir, &Path),
) -> Result<Vec<String>> {
    if let Some(agreement) = low_agreement(source) {
        return Ok(vec![format!(
            "no start command: its agreement with the target is {agreement:.3}, too low to serve it"
        )]);
    }
    let served = flags.served(&recipe.models.target, (served_path(out, true), None), source);
    let untuned = Drafting::fixed(served.whole_block.unwrap_or(DEFAULT_LENGTH));
    let ways = tuned_ways(recipe, DecodingName::Greedy, Some(id))?;
    let mut lines = Vec::new();
    for runtime in Runtime::ALL {
        if !flags.is_loaded_by(runtime) {
            continue;
        }
        let way = ways.iter().find(|way| {
            way.runtime == runtime.name() && way.drafting.is_some_and(|it| it.num_matched.is_none())
        });
        let drafting = way.and_then(|way| way.drafting).unwrap_or(untuned);
        lines.push(way.map_or_else(|| format!("{}, not tuned:", runtime.name()), |way| way.text()));
        if way.is_some_and(|way| !way.pays()) {
            continue;
        }
        lines.extend(
            served.start(runtime, drafting, false).into_iter().map(|step| format!("  {step}")),
        );
    }
    Ok(lines)
}

/// The number of candidates to start with before `tune`.
const DEFAULT_LENGTH: usize = 3;

/// The export format that also applies to data.
const OF_DATA: &str = "specdec-pp";

/// Iterates over the formats of all exports. A format that several exports share occurs once for
/// each.
fn forms(kinds: &Kinds) -> impl Iterator<Item = &'static ExportForm> {
    let of_kinds = kinds.iter().filter_map(|kind| kind.export.as_ref());
    of_kinds.flat_map(|export| export.forms).chain(HEAD.forms)
}

/// Creates the parser for the names of formats.
fn form_parser() -> PossibleValuesParser {
    let mut names: Vec<&str> = Vec::new();
    for form in forms(&Kinds::default()) {
        if !names.contains(&form.name) {
            names.push(form.name);
        }
    }
    names.into()
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

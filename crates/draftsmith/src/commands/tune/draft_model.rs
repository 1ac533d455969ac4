//! `tune --for draft-model`: what an adapter is worth to runtimes that run it as a draft model of its
//! own.
//!
//! It says what it says behind the target's layers, so the adapter's rollouts are replayed. What
//! differs are the costs, which are measured with the draft model in the place of a separate draft,
//! and the rules: those that runtimes have.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, Recordings};
use serde::Serialize;

use super::measuring::{cost_prompts, given_or_measured};
use super::runtimes::best_settings;
use super::show::how_known;
use crate::console::Console;
use crate::costs::{self, Measurement};
use crate::decoders::Decoders;
use crate::exports::config_keys::write_keys;
use crate::exports::draft_model::{RuntimeSetting, TunedDraftModel};
use crate::exports::{AdapterExport, Exports};
use crate::pair::Pair;
use crate::recipe::{GivenCosts, Recipe};
use crate::results::{CostSource, DecodingName, DrafterName, Estimate};
use crate::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use crate::sweep::{best_fixed, best_of_each, lengths_under};
use crate::tuning::{MeasuredCosts, given_costs};
use crate::workspace::Workspace;

/// What was found for one adapter and decoding.
#[derive(Debug, Serialize)]
pub(crate) struct DraftModelTuning {
    /// The adapter as it is called where it drafts behind the target's layers.
    pub(crate) drafter: DrafterName,
    pub(crate) decoding: DecodingName,
    /// Whose costs these are.
    pub(crate) cost_source: CostSource,
    #[serde(flatten)]
    pub(crate) costs: MeasuredCosts,
    pub(crate) num_prompts: usize,
    pub(crate) num_tokens: usize,
    pub(crate) runtimes: Vec<RuntimeSetting>,
    /// The adapter's directory, whose config was written.
    pub(crate) export: PathBuf,
}

/// Tunes every adapter of the recipe as a draft model, at `costs` or else at those that the recipe gives.
pub(super) fn tune(
    recipe: &Recipe,
    workspace: &Workspace,
    costs: Option<&GivenCosts>,
    console: &Console,
) -> Result<Vec<DraftModelTuning>> {
    let (tune, evaluate) = recipe.need_tuning("tune")?;
    let exports = Exports::read(recipe, evaluate, workspace)?;
    if exports.adapters.is_empty() {
        anyhow::bail!(
            "the recipe has no adapters to run as draft models; \
             hint: give it a section `[adapter]`, or leave out `--for`"
        );
    }
    let files = RolloutFiles::of(recipe, workspace)?;
    let prompts = cost_prompts(recipe, workspace, console)?;
    let nothing_trained = Exports::default();
    let id_of =
        |adapter: &AdapterExport| DrafterId::SelfDraft { exit_layer: adapter.config.exit_layer };
    let drafters: Vec<DrafterName> =
        exports.adapters.iter().map(|adapter| DrafterName::Of(id_of(adapter))).collect();
    let given = given_costs(costs.or(tune.costs.as_ref()), &drafters)?;
    let mut tunings = Vec::new();
    for adapter in &exports.adapters {
        let id = id_of(adapter);
        let drafter = DrafterName::Of(id);
        let is_given = given.iter().any(|costs| costs.drafter == id);
        let pair = if is_given { None } else { Some(pair_with(adapter, workspace)?) };
        let mut decoders = pair
            .as_ref()
            .map(|pair| Decoders::new(pair, &nothing_trained, evaluate.max_new_tokens));
        let mut tuned = TunedDraftModel { dtype: workspace.dtype, ..TunedDraftModel::default() };
        for name in &evaluate.decodings {
            let decoding = evaluate.decoding(*name);
            let set = PromptSet::Validation;
            let recorded = files.read(RolloutKey { drafter, set, decoding: *name })?.recordings;
            // Runtimes know no heads.
            let recordings = Recordings { head: None, ..recorded };
            let lengths_under =
                |costs: &costs::Costs| lengths_under(&recordings, &costs.clone().of_drafter(id)?);
            let (cost_source, measured) = given_or_measured(&given, Some(id), || {
                let name = name.text();
                console.note(format!("tune: measuring costs, {drafter} as a draft model, {name}"));
                let decoders = decoders.as_mut().context("what is measured has been loaded")?;
                let draft = DrafterName::Of(DrafterId::Draft);
                costs::measure(decoders, draft, &decoding, &prompts, &lengths_under, console)
            })?;
            let costs = measured.costs.clone().of_drafter(id)?;
            let choices = best_of_each(&recordings, &costs)?;
            let fixed = best_fixed(&choices)?;
            let runtimes = best_settings(&recordings, decoding, &costs, fixed, recipe.seed)?;
            *tuned.slot(*name) = Some(runtimes.clone());
            tuned.num_prompts = recordings.responses.len();
            let tuning = DraftModelTuning {
                drafter,
                decoding: *name,
                cost_source,
                costs: Measurement { costs, ..measured }.into(),
                num_prompts: recordings.responses.len(),
                num_tokens: recordings.num_tokens(),
                runtimes,
                export: adapter.dir.clone(),
            };
            console.text(text(&tuning)?)?;
            tunings.push(tuning);
        }
        write_keys(&adapter.dir, vec![(TunedDraftModel::KEY, serde_json::to_value(&tuned)?)])?;
    }
    console.document(&tunings)?;
    Ok(tunings)
}

/// The target with an adapter's draft model, read from its files as runtimes read it.
fn pair_with(adapter: &AdapterExport, workspace: &Workspace) -> Result<Pair> {
    let alone = workspace.target_alone()?;
    let place = tempfile::tempdir().context("cannot create a temporary directory")?;
    let model = adapter.adapter.draft_model(&adapter.config, &alone.target)?;
    model.write_model_dir(place.path(), alone.target.stored_dtype())?;
    let draft = CausalLm::from_model_dir_in(place.path(), workspace.dtype, workspace.device())?;
    Ok(alone.with_draft(draft))
}

/// The settings that runtimes have for an adapter's draft model.
///
/// # Errors
/// If the costs do not say what a draft forward takes.
fn text(tuning: &DraftModelTuning) -> Result<String> {
    let costs = &tuning.costs.costs;
    let milli = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
    let mut text = format!(
        "{} as a draft model, {}: {} prompts, {} tokens\n\
         a draft forward {}, a target forward of one row {}, a row more {} on average \
         ({})\n\n",
        tuning.drafter.text(),
        tuning.decoding.text(),
        tuning.num_prompts,
        tuning.num_tokens,
        milli(costs.rounds.draft_seconds(costs.drafter)?),
        milli(costs.rounds.verify_seconds(1)),
        milli(costs.rounds.row_seconds()),
        how_known(tuning.cost_source, &tuning.costs),
    );
    for setting in &tuning.runtimes {
        let Estimate { value, low, high } = setting.speedup;
        text += &format!(
            "  {value:.2}x ({low:.2} to {high:.2})  {:<12}  {}\n",
            setting.runtime, setting.setting
        );
    }
    if tuning.runtimes.iter().all(|setting| setting.speedup.high < 1.0) {
        text += "\nit does not pay so: the target alone is faster, whatever the setting\n";
    }
    text += &format!("\nwritten to {}\n\n", tuning.export.join("config.json").display());
    Ok(text)
}

//! `tune --for draft-model`: tunes adapters for runtimes that run them as separate draft models.
//!
//! Such a model drafts the same tokens as the adapter in a self-draft, so the adapter's rollouts are
//! replayed. The costs differ: they are measured with the model as a separate draft. So do the rules: only
//! those that runtimes have.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use draftsmith_model::CausalLm;
use draftsmith_report::DrafterName;
use draftsmith_theory::{DrafterId, Recordings};
use serde::Serialize;

use super::runtimes::best_settings;
use super::{TuningBasis, cost_prompts, given_or_measured};
use crate::costs::{COSTS_TIME_LIMIT, CostProbe, MeasuredCosts};
use crate::decoders::Decoders;
use crate::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use crate::sweep::{best_fixed, best_of_each, lengths_under};
use crate::tuning::given_costs;
use draftsmith_recipe::exports::AdapterExport;
use draftsmith_recipe::exports::config_keys::write_keys;
use draftsmith_recipe::exports::draft_model::{RuntimeSetting, TunedDraftModel};
use draftsmith_recipe::kinds::loaded::LoadedDrafters;
use draftsmith_recipe::pair::Pair;
use draftsmith_recipe::watch::Watch;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{GivenCosts, Recipe};

/// The result for one adapter and way of decoding. Its drafter is the adapter's self-draft.
#[derive(Debug, Serialize)]
pub struct DraftModelTuning {
    /// What it is based on.
    #[serde(flatten)]
    pub basis: TuningBasis,
    /// The best setting of each runtime.
    pub runtimes: Vec<RuntimeSetting>,
    /// The adapter's directory, whose config was written.
    pub export: PathBuf,
}

/// Tunes for runtimes that run adapters as separate draft models, at `costs` or else at those that
/// the recipe gives.
pub fn tune_for_draft_model(
    recipe: &Recipe,
    workspace: &Workspace,
    costs: Option<&GivenCosts>,
    watch: &dyn Watch,
) -> Result<Vec<DraftModelTuning>> {
    let (tune, evaluate) = recipe.need_tuning("tune")?;
    let loaded = recipe.load_drafters(workspace, false)?;
    let adapters: Vec<(DrafterId, &AdapterExport)> =
        loaded.iter().filter_map(|it| Some((it.id(), it.adapter.as_ref()?))).collect();
    if adapters.is_empty() {
        bail!(
            "the recipe has no adapters to run as draft models; hint: add a table `[drafters.NAME]` with `kind = \
             \"adapter\"`, or leave out `--for`"
        );
    }
    let files = RolloutFiles::of(recipe, workspace)?;
    let prompts = cost_prompts(recipe, workspace, watch)?;
    let drafters: Vec<DrafterName> = adapters.iter().map(|(id, _)| (*id).into()).collect();
    let given = given_costs(costs.or(tune.costs.as_ref()), &drafters)?;
    let mut tunings = Vec::new();
    for (id, adapter) in adapters {
        let is_given = given.iter().any(|costs| costs.drafter == id);
        let pair = (!is_given).then(|| pair_with(adapter, workspace)).transpose()?;
        let as_draft = pair.as_ref().and_then(|pair| pair.draft.as_ref());
        let as_draft = as_draft.map(|model| LoadedDrafters::of_model(model, None));
        let mut decoders = pair
            .as_ref()
            .zip(as_draft.as_ref())
            .map(|(pair, as_draft)| Decoders::new(pair, as_draft, evaluate.max_new_tokens));
        let mut tuned =
            TunedDraftModel { dtype: workspace.models.dtype, ..TunedDraftModel::default() };
        for name in &evaluate.decodings {
            let decoding = evaluate.decoding(*name);
            let key =
                RolloutKey { drafter: id.into(), set: PromptSet::Validation, decoding: *name };
            // Runtimes have no heads.
            let recordings = Recordings { head: None, ..files.read(key)?.recordings };
            let (cost_source, measured) = given_or_measured(&given, id, || {
                let name = name.text();
                watch.note(format!("tune: measuring costs, {id} as a draft model, {name}"));
                let decoders = decoders.as_mut().context("models to measure are loaded")?;
                let (drafter, prompts) = (DrafterId::DRAFT, &prompts);
                let time_limit = COSTS_TIME_LIMIT;
                let probe = CostProbe { decoders, drafter, decoding, prompts, time_limit, watch };
                probe.measure(&|costs| lengths_under(&recordings, &costs.clone().of_drafter(id)?))
            })?;
            let costs = measured.costs.clone().of_drafter(id)?;
            let choices = best_of_each(&recordings, &costs)?;
            let fixed = best_fixed(&choices)?;
            let runtimes = best_settings(&recordings, decoding, &costs, fixed, recipe.seed)?;
            *tuned.slot(*name) = Some(runtimes.clone());
            tuned.num_prompts = recordings.responses.len();
            let basis = TuningBasis {
                drafter: id.into(),
                decoding: *name,
                cost_source,
                costs: MeasuredCosts { costs, ..measured },
                num_prompts: recordings.responses.len(),
                num_tokens: recordings.num_tokens(),
            };
            let tuning = DraftModelTuning { basis, runtimes, export: adapter.dir.clone() };
            tunings.push(tuning);
        }
        write_keys(&adapter.dir, vec![(TunedDraftModel::KEY, serde_json::to_value(&tuned)?)])?;
    }
    Ok(tunings)
}

/// Pairs the target with an adapter's draft model, read from its files as runtimes read it.
fn pair_with(adapter: &AdapterExport, workspace: &Workspace) -> Result<Pair> {
    let alone = workspace.target_alone()?;
    let place = tempfile::tempdir().context("cannot create a temporary directory")?;
    let model = adapter.adapter.draft_model(&adapter.config, &alone.target)?;
    model.write_model_dir(place.path(), alone.target.stored_dtype())?;
    let draft =
        CausalLm::load(place.path(), workspace.models.dtype, None, workspace.models.device())?;
    Ok(alone.with_draft(draft))
}

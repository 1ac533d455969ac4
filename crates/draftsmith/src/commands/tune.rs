//! `tune`: what costs what here, which drafter's rule is best for that, and what gain to expect.
//!
//! Costs are measured with the models at hand; rules are replayed over the rollouts of validation
//! prompts. The best rule goes into the config of the head or adapter it serves, with the gain it
//! promises over the best fixed length; `evaluate` and `check` say whether the promise holds. A
//! head's predictions are first calibrated on the same rollouts, where that makes them better;
//! rules are then replayed, and later decode, with calibrated ones. Static trees whose shape the recipe
//! leaves open get it from the same rollouts.

mod calibrate;
mod draft_model;
mod measuring;
mod runtimes;
mod show;
mod trees;

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    Counts, Decoding, DrafterId, FixedLengthConfig, LookupFirst, Recordings, Sampling,
    seconds_per_token,
};
use serde::Serialize;

use self::calibrate::{Calibrating, calibrate};
use self::measuring::{Measuring, cost_prompts, given_or_measured};
use self::trees::{TreeTuning, TriedTree};
use crate::console::Console;
use crate::costs::{self, Costs, Measurement, measure_tree_costs};
use crate::decoders::Decoders;
use crate::device::on_pool;
use crate::exports::Exports;
use crate::exports::calibration::HeadCalibration;
use crate::exports::config_keys::write_keys;
use crate::exports::draft_model::RuntimeSetting;
use crate::exports::tuned::{Tuned, TunedRule};
use crate::recipe::{GivenCosts, Recipe, sampling};
use crate::results::{CostSource, DecodingName, DrafterName, Estimate, StopRuleName};
use crate::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use crate::statistics::{promise_interval, shown_interval};
use crate::sweep::{
    Choice, best_fixed, best_of_all, best_of_each, cheapest, lengths_under, per_token,
};
use crate::tuning::{CostsEntry, MeasuredCosts, TunedTree, given_costs, write_tuned};
use crate::workspace::Workspace;

/// What was found for one drafter and decoding.
#[derive(Debug, Serialize)]
pub(crate) struct Tuning {
    pub(crate) drafter: DrafterName,
    pub(crate) decoding: DecodingName,
    /// Whose costs these are.
    pub(crate) cost_source: CostSource,
    #[serde(flatten)]
    pub(crate) costs: MeasuredCosts,
    pub(crate) num_prompts: usize,
    pub(crate) num_tokens: usize,
    /// What was found about the head's predictions; null without a head.
    pub(crate) calibration: Option<Calibrating>,
    /// Modelled speed over the target alone of each rule's best setting, and gain over the best
    /// fixed length.
    pub(crate) rules: Vec<RuleGain>,
    /// The rule that was written into the export.
    pub(crate) chosen: StopRuleName,
    /// What is looked up before the drafter is asked; null where nothing is.
    pub(crate) lookup_first: Option<LookupFirst>,
    pub(crate) runtimes: Vec<RuntimeSetting>,
    /// The fastest static tree, if the recipe leaves its shape open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<TunedTree>,
    /// All trees that were tried.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) trees_tried: Vec<TriedTree>,
    /// The export whose config was written, if there is one.
    pub(crate) export: Option<PathBuf>,
}

/// One rule at its best setting.
#[derive(Debug, Serialize)]
pub(crate) struct RuleGain {
    /// What is looked up before the drafter is asked; null where nothing is.
    pub(crate) lookup_first: Option<LookupFirst>,
    pub(crate) stop_rule: StopRuleName,
    pub(crate) config: draftsmith_theory::StopRuleConfig,
    pub(crate) speedup: f64,
    pub(crate) gain: Estimate,
}

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<Tuning>> {
    on_pool(|| tune(recipe, workspace, console))
}

/// Runs the stage for runtimes that run adapters as draft models of their own, at `costs` where they
/// are given.
pub(crate) fn run_for_draft_model(
    recipe: &Recipe,
    workspace: &Workspace,
    costs: Option<GivenCosts>,
    console: &Console,
) -> Result<()> {
    on_pool(|| draft_model::tune(recipe, workspace, costs.as_ref(), console).map(drop))
}

fn tune(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Vec<Tuning>> {
    let (tune, evaluate) = recipe.need_tuning("tune")?;
    let exports = Exports::read(recipe, evaluate, workspace)?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let mut measuring = match recipe.target_elsewhere() {
        Some(_) => None,
        None => Some(Measuring {
            decoders: Decoders::new(workspace.pair()?, &exports, evaluate.max_new_tokens),
            prompts: cost_prompts(recipe, workspace, console)?,
        }),
    };
    let given = given_costs(tune.costs.as_ref(), &files.drafters())?;
    let mut tunings = Vec::new();
    let mut tuned_exports: Vec<TunedExport> = Vec::new();
    for drafter in files.drafters() {
        let export = exports.export_of(drafter);
        let has_head = files.head_dir(drafter).is_some();
        let mut tuned = Tuned::default();
        let mut calibration = has_head.then(HeadCalibration::default);
        for name in &evaluate.decodings {
            let decoding = evaluate.decoding(*name);
            let set = PromptSet::Validation;
            let set = files.read(RolloutKey { drafter, set, decoding: *name })?;
            let calibrating =
                has_head.then(|| calibrate(tune.calibration, &set, decoding)).transpose()?;
            let fitted = calibrating.as_ref().and_then(|found| found.chosen.clone());
            let recordings = match &fitted {
                Some(fitted) => set.recordings.calibrated(&fitted.map),
                None => set.recordings,
            };
            let lengths_under = |costs: &Costs| lengths_under(&recordings, costs);
            let in_trees = evaluate.tunes_trees(*name);
            let (source, measured) = given_or_measured(&given, drafter.id(), || {
                let Measuring { decoders, prompts } = measuring.as_mut().context(
                    "costs are not measured where the target is served; hint: give the table \
                     `[tune.costs]` `draft_ms` and `target_ms`, which `recipes/server_costs.py` \
                     measures on servers",
                )?;
                console.note(format!("tune: measuring costs, {drafter}, {}", name.text()));
                let mut measured =
                    costs::measure(decoders, drafter, &decoding, prompts, &lengths_under, console)?;
                if in_trees {
                    measure_tree_costs(decoders, prompts, &mut measured.costs)?;
                }
                Ok(measured)
            })?;
            let (mut tuning, rule) = choose(
                recipe,
                &recordings,
                drafter,
                decoding,
                workspace.dtype,
                measured,
                export.clone(),
            )?;
            let draft_vocabulary = exports.num_draft_tokens(drafter);
            let rule = TunedRule { draft_vocabulary, cost_source: source, ..rule };
            tuning.calibration = calibrating;
            tuning.cost_source = source;
            if in_trees {
                let costs = &tuning.costs.costs;
                let fixed = FixedLengthConfig { candidate_length: rule.best_fixed_length }.into();
                let spent = recordings.replay(&fixed, &costs.of_rule(&fixed))?;
                let trees = TreeTuning {
                    recordings: &recordings,
                    costs,
                    cost_source: source,
                    models: exports.models_hash(recordings.drafter, workspace)?,
                    dtype: workspace.dtype,
                    seed: recipe.seed,
                    fixed: (rule.best_fixed_length, spent),
                };
                let (best, tried) = trees.best()?;
                (tuning.tree, tuning.trees_tried) = (Some(best), tried);
            }
            match name {
                DecodingName::Greedy => tuned.greedy = Some(rule),
                DecodingName::Sampled => tuned.sampled = Some(rule),
            }
            if let Some(calibration) = &mut calibration {
                *calibration.slot(*name) = fitted;
            }
            console.text(show::tuning(&tuning, console.width())?)?;
            tunings.push(tuning);
        }
        tuned_exports.extend(export.map(|dir| TunedExport { dir, tuned, calibration }));
    }
    // Written together at the end, so that an interrupted run leaves exports unchanged.
    for export in &tuned_exports {
        export.write()?;
    }
    // Given costs are in the recipe.
    let entries: Vec<CostsEntry> = tunings
        .iter()
        .filter(|tuning| tuning.cost_source.is_machine())
        .map(|tuning| CostsEntry {
            decoding: tuning.decoding,
            dtype: workspace.dtype,
            measured: tuning.costs.clone(),
        })
        .collect();
    write_tuned(recipe, &entries)?;
    let trees: Vec<TunedTree> = tunings.iter().filter_map(|tuning| tuning.tree.clone()).collect();
    if !trees.is_empty() {
        write_tuned(recipe, &trees)?;
    }
    recipe.write_beside(&recipe.tuning_dir())?;
    console.document(&tunings)?;
    Ok(tunings)
}

/// What is written into an export.
struct TunedExport {
    dir: PathBuf,
    tuned: Tuned,
    /// None of an adapter without a head.
    calibration: Option<HeadCalibration>,
}

impl TunedExport {
    /// Writes both together: a rule holds for the predictions that it was chosen under.
    fn write(&self) -> Result<()> {
        let mut keys = Vec::new();
        if let Some(calibration) = &self.calibration {
            keys.push((HeadCalibration::KEY, serde_json::to_value(calibration)?));
        }
        keys.push((Tuned::KEY, serde_json::to_value(&self.tuned)?));
        write_keys(&self.dir, keys)
    }
}

/// The best rule for the costs, and what it promises.
fn choose(
    recipe: &Recipe,
    recordings: &Recordings,
    drafter: DrafterName,
    decoding: Decoding,
    dtype: WeightDtype,
    measured: Measurement,
    export: Option<PathBuf>,
) -> Result<(Tuning, TunedRule)> {
    let costs = &measured.costs;
    let choices = match recipe.need_tuning("tune")?.0.lookup_first {
        true => best_of_all(recordings, costs)?,
        false => best_of_each(recordings, costs)?,
    };
    let fixed = best_fixed(&choices)?;
    let best = cheapest(&choices)?;
    let spent = |choice: &Choice| choice.replay(recordings, costs);
    let fixed_spent = spent(fixed)?;
    let plain = seconds_per_token(&recordings.plain(&costs.rounds));
    let num_prompts = recordings.responses.len();
    let rules = choices
        .iter()
        .map(|choice| {
            let own = spent(choice)?;
            let gain = |some: &[usize]| per_token(&fixed_spent, some) / per_token(&own, some) - 1.0;
            Ok(RuleGain {
                lookup_first: choice.lookup_first,
                stop_rule: choice.name,
                config: choice.config.clone(),
                speedup: plain / choice.seconds_per_token,
                gain: shown_interval(num_prompts, recipe.seed, gain),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let best_spent = spent(best)?;
    let acceptance = |some: &[usize]| {
        some.iter().map(|index| best_spent[*index].counts).sum::<Counts>().acceptance_rate()
    };
    let is_best =
        |rule: &&RuleGain| (rule.lookup_first, rule.stop_rule) == (best.lookup_first, best.name);
    let expected = rules.iter().find(is_best).map(|rule| rule.gain);
    let Sampling { temperature, top_p, top_k, min_p } = sampling(&decoding);
    let rule = TunedRule {
        drafter: drafter.behind(best.lookup_first),
        config: best.config.clone(),
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty: decoding.repetition_penalty,
        expected_gain: expected.context("the best rule is one of the rules")?,
        expected_acceptance_rate: promise_interval(num_prompts, recipe.seed, acceptance),
        best_fixed_length: fixed.config.parameter() as usize,
        costs: costs.of_rule(&best.config).line(costs.drafter)?,
        num_prompts,
        dtype,
        draft_vocabulary: None,
        cost_source: CostSource::default(),
    };
    let tuning = Tuning {
        drafter,
        decoding: DecodingName::of(&decoding),
        cost_source: CostSource::default(),
        costs: measured.clone().into(),
        num_prompts,
        num_tokens: recordings.num_tokens(),
        calibration: None,
        rules,
        chosen: best.name,
        lookup_first: best.lookup_first,
        // They have no self-drafts.
        runtimes: match drafter {
            DrafterName::Of(DrafterId::Draft) => {
                runtimes::best_settings(recordings, decoding, costs, fixed, recipe.seed)?
            }
            _ => Vec::new(),
        },
        tree: None,
        trees_tried: Vec::new(),
        export,
    };
    Ok((tuning, rule))
}

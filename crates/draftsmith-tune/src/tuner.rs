//! `tune`: measures the costs of forwards on this machine, finds the best stop rule for each
//! drafter at those costs, and predicts its gain.
//!
//! Rules are replayed over the recordings of validation prompts. The best rule is written into the
//! `config.json` of the head or adapter, with its predicted gain over the best fixed length.
//! `evaluate` and `check` verify the prediction.

pub mod baseline;
mod racing;
mod runtimes;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use draftsmith_data::{Prompt, hash_bytes};
use draftsmith_report::{CostSource, DecodingName, DrafterName, LookUps, ServingWay, rule_label};
use draftsmith_theory::{Decoding, Estimate, LookupFirst, Recordings, StopRuleName};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::baseline::{Baseline, RuleGain};
use self::racing::{MOST_SECONDS, RaceFile, Raced};
pub use self::racing::{RaceOutcome, RacedSetting};
pub use self::runtimes::{LOOK_UP_LENGTHS, LOOK_UP_MATCHES};
use crate::conversation::SetPrompt;
use crate::costs::{COSTS_TIME_LIMIT, CostProbe, Costs, MeasuredCosts};
use crate::decoders::Decoders;
use crate::judging::gain;
use crate::machine::machine_text;
use crate::rollouts::{
    PromptSet, RecordedSet, RolloutFiles, RolloutKey, set_prompts, validation_prompts,
};
use crate::sweep::{RuleChoice, best_fixed, best_of_all, best_of_each, cheapest, lengths_under};
use crate::tuning::{CostsEntry, TuningFile, given_costs};
use draftsmith_recipe::exports::config_keys::write_keys;
use draftsmith_recipe::{
    EvaluateRecipe, LoadedDrafters, Recipe, Silent, TuneRecipe, Tuned, TunedRule, Watch, Workspace,
    num_known, prompts_in_data, spread,
};

/// The number of prompts on which costs are measured.
const NUM_COST_PROMPTS: usize = 4;

/// The inputs of tuning for one drafter and way of decoding.
#[derive(Debug, Serialize)]
pub struct TuningBasis {
    /// The drafter.
    pub drafter: DrafterName,
    /// The way of decoding, greedy or sampled.
    pub decoding: DecodingName,
    /// The source of the costs: measured or given.
    pub cost_source: CostSource,
    /// The costs.
    #[serde(flatten)]
    pub costs: MeasuredCosts,
    /// How much faster another setting of the race may be than the chosen one, as a share: the largest
    /// upper end of the 95 % intervals. 0 without a race.
    pub lost_by_costs: f64,
    /// The number of validation prompts.
    pub num_prompts: usize,
    /// The number of response tokens.
    pub num_tokens: usize,
}

/// The result of tuning for one drafter and way of decoding.
#[derive(Debug, Serialize)]
pub struct Tuning {
    /// The inputs of the tuning.
    #[serde(flatten)]
    pub basis: TuningBasis,
    /// Every rule at its best setting.
    pub rules: Vec<RuleGain>,
    /// What the race showed; null without one.
    pub race: Option<RaceOutcome>,
    /// The rule that was written into the export.
    pub chosen: StopRuleName,
    /// The chosen settings of prompt lookup in front of the drafter; null for no lookup.
    pub lookup_first: Option<LookupFirst>,
    /// Prompt lookup alone at its best setting; null if lookup is not tuned.
    pub look_ups: Option<LookUps>,
    /// The share of drafted candidates that the target accepts; null if nothing was drafted.
    pub share_accepted: Option<f64>,
    /// The best way to serve the drafter in each runtime; empty if no runtime loads it.
    pub ways: Vec<ServingWay>,
    /// The export directory whose `config.json` was written, if any.
    pub export: Option<PathBuf>,
    /// The gain of the chosen rule on the prompts of each source; empty if there is only one
    /// source.
    pub by_source: Vec<SourceGain>,
}

/// The gain of the chosen rule on the prompts of one source.
#[derive(Debug, Serialize)]
pub struct SourceGain {
    /// The name of the source.
    pub source: String,
    /// The number of prompts of the source.
    pub num_prompts: usize,
    /// The modelled speed relative to the fixed length that is best over all sources, minus 1.
    pub gain: Estimate,
}

/// Tunes a recipe's drafters. `time_limit` applies to all measurements of costs together; `None`
/// for the default limit of each.
///
/// # Errors
/// If a file or model is broken, or recordings are missing.
pub fn tune_within(
    recipe: &Recipe,
    workspace: &Workspace,
    time_limit: Option<Duration>,
    watch: &dyn Watch,
) -> Result<Vec<Tuning>> {
    let (_, evaluate) = recipe.need_tuning("tune")?;
    let drafters = recipe.load_drafters(workspace, false)?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let mut tuner = Tuner::new((recipe, workspace), &drafters, &files, time_limit, watch)?;
    note_prompts_in_data(recipe, workspace, watch)?;
    let mut tunings = Vec::new();
    let mut tuned_exports = Vec::new();
    for drafter in files.drafters() {
        let mut tuned = Tuned::default();
        for (name, tuning, rule) in tuner.tune(drafter, &evaluate.decodings)? {
            match name {
                DecodingName::Greedy => tuned.greedy = Some(rule),
                DecodingName::Sampled => tuned.sampled = Some(rule),
            }
            tunings.push(tuning);
        }
        if let Some(dir) = drafters.tuned_into(drafter) {
            tuned_exports.push((dir.join("config.json"), serde_json::to_value(tuned)?));
        }
    }
    // Exports are written at the end, so that a stopped run does not change them.
    for (path, tuned) in tuned_exports {
        write_keys(&path, [(Tuned::KEY, tuned)])?;
    }
    write_files(recipe, &tunings, workspace)?;
    let made_from = made_from(recipe, workspace)?;
    let finished = FinishedTuning { made_from, tunings: serde_json::to_value(&tunings)? };
    TuningFile::TUNED.write(recipe, &finished)?;
    // The next `tune` races again.
    TuningFile::RACES.remove(recipe)?;
    Ok(tunings)
}

/// The result of a finished tuning.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct FinishedTuning {
    /// The hash of everything that the result depends on.
    made_from: String,
    tunings: Value,
}

/// Reads the result of a finished tuning, as a list of [`Tuning`]. `None` if there is none with the same recordings and
/// recipe on this machine.
///
/// # Errors
/// If a file cannot be read.
pub fn finished_tuning(recipe: &Recipe, workspace: &Workspace) -> Result<Option<Value>> {
    let FinishedTuning { made_from: then, tunings } = TuningFile::TUNED.read(recipe)?;
    let is_same = !then.is_empty() && then == made_from(recipe, workspace)?;
    Ok(is_same.then_some(tunings))
}

/// Hashes everything that tuning depends on.
fn made_from(recipe: &Recipe, workspace: &Workspace) -> Result<String> {
    let all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "recordings": RolloutFiles::of(recipe, workspace)?.provenances()?,
        "recipe": serde_json::to_value(recipe)?,
        "answers": workspace.answers_hash()?,
        "dtype": workspace.models.dtype,
        "machine": [format!("{:?}", workspace.models.device()), machine_text()],
    });
    Ok(hash_bytes(all.to_string().as_bytes()))
}

/// Writes the measured costs, and the recipe beside them. Costs that the user gave are in the
/// recipe.
fn write_files(recipe: &Recipe, tunings: &[Tuning], workspace: &Workspace) -> Result<()> {
    let bases = tunings.iter().map(|tuning| &tuning.basis);
    let entry = |basis: &TuningBasis| CostsEntry {
        decoding: basis.decoding,
        dtype: workspace.models.dtype,
        measured: basis.costs.clone(),
    };
    let entries: Vec<CostsEntry> =
        bases.filter(|basis| basis.cost_source.is_machine()).map(entry).collect();
    TuningFile::COSTS.write(recipe, &entries)?;
    recipe.write_beside(&recipe.tuning_dir())
}

/// The state of tuning a recipe's drafters.
pub(crate) struct Tuner<'a> {
    recipe: &'a Recipe,
    tune: &'a TuneRecipe,
    evaluate: &'a EvaluateRecipe,
    workspace: &'a Workspace,
    loaded: &'a LoadedDrafters,
    files: &'a RolloutFiles<'a>,
    /// The time limit of each measurement of costs.
    time_limit: Duration,
    /// The costs that the recipe gives.
    given: Vec<Costs>,
    /// The models and the prompts' token ids for measuring all other costs; `None` if the target
    /// runs on servers.
    measuring: Option<(Decoders<'a>, Vec<Vec<u32>>)>,
    /// The costs and races so far.
    races: RaceFile,
    /// The seconds that are left for races, once the first has begun or the recipe gives them.
    race_left: Option<f64>,
    /// The most seconds of all races unless the recipe gives them.
    race_most: f64,
    /// The number of races that are left.
    num_races: usize,
    watch: &'a dyn Watch,
}

impl<'a> Tuner<'a> {
    /// Prepares to tune a recipe's drafters. `time_limit` applies to all measurements of costs
    /// together; `None` for the default limit of each.
    pub(crate) fn new(
        (recipe, workspace): (&'a Recipe, &'a Workspace),
        loaded: &'a LoadedDrafters,
        files: &'a RolloutFiles<'a>,
        time_limit: Option<Duration>,
        watch: &'a dyn Watch,
    ) -> Result<Self> {
        let (tune, evaluate) = recipe.need_tuning("tune")?;
        let num_measurements = files.drafters().len().max(1) as u32;
        // Races take the other half.
        let half = time_limit.map(|limit| limit / 2);
        let share = half.map_or(COSTS_TIME_LIMIT, |half| half / num_measurements);
        Ok(Self {
            recipe,
            tune,
            evaluate,
            workspace,
            loaded,
            files,
            time_limit: share.min(COSTS_TIME_LIMIT),
            given: given_costs(tune.costs.as_ref(), &files.drafters())?,
            measuring: match recipe.target_elsewhere() {
                Some(_) => None,
                None => {
                    let prompts = validation_prompts(recipe, workspace, watch)?.into_iter();
                    let decoders =
                        Decoders::new(workspace.pair()?, loaded, evaluate.max_new_tokens);
                    Some((decoders, prompts.map(|(_, ids)| ids).collect()))
                }
            },
            races: RaceFile::read(recipe, workspace)?,
            race_left: tune.race_seconds,
            race_most: half.map_or(MOST_SECONDS, |half| half.as_secs_f64().min(MOST_SECONDS)),
            num_races: files.drafters().len() * evaluate.decodings.len(),
            watch,
        })
    }

    /// Tunes a drafter for each way of decoding.
    fn tune(
        &mut self,
        drafter: DrafterName,
        names: &[DecodingName],
    ) -> Result<Vec<(DecodingName, Tuning, TunedRule)>> {
        let key = |name: &DecodingName| RolloutKey {
            drafter,
            set: PromptSet::Validation,
            decoding: *name,
        };
        let sets = names.iter().map(|name| self.files.read(key(name)));
        let sets = sets.collect::<Result<Vec<RecordedSet>>>()?;
        let recordings: Vec<&Recordings> = sets.iter().map(|set| &set.recordings).collect();
        let (source, costs) = self.costs_once(drafter, &recordings, names)?;
        let each = names.iter().zip(sets).zip(costs);
        each.map(|((name, set), measured)| {
            let mut choices = self.finds()(&set.recordings, &measured.costs)?;
            let raced = self.race((drafter, *name), &measured, (&set.recordings, &choices))?;
            raced.iter().for_each(|raced| raced.replace(&mut choices));
            let known = (source, measured, choices, raced);
            let (tuning, rule) = self.tune_from(drafter, *name, set, known)?;
            Ok((*name, tuning, rule))
        })
        .collect()
    }

    fn tune_from(
        &self,
        drafter: DrafterName,
        name: DecodingName,
        set: RecordedSet,
        (cost_source, measured, choices, raced): (
            CostSource,
            MeasuredCosts,
            Vec<RuleChoice>,
            Option<Raced>,
        ),
    ) -> Result<(Tuning, TunedRule)> {
        let (decoding, seed) = (self.evaluate.decoding(name), self.recipe.seed);
        let share_accepted = set.summary().share_accepted;
        let (sources, recordings) = (set.by_source(), &set.recordings);
        let costs = &measured.costs;
        let fixed = best_fixed(&choices)?;
        let best = raced.as_ref().map_or_else(|| cheapest(&choices), |raced| Ok(raced.winner()))?;
        let baseline = Baseline {
            recordings,
            measured: &measured,
            cost_source,
            decoding,
            dtype: self.workspace.models.dtype,
            fixed: fixed.clone(),
            raced: raced.as_ref(),
            seed,
        };
        let of_source = |(source, recordings): &(&str, Recordings)| {
            let [slow, fast] = [fixed, best].map(|choice| choice.replay(recordings, costs));
            let (gain, source) = (gain(&slow?, &fast?, 1, seed), (*source).to_owned());
            anyhow::Ok(SourceGain { source, num_prompts: recordings.responses.len(), gain })
        };
        let by_source = sources.iter().filter(|_| sources.len() > 1).map(of_source);
        let by_source = by_source.collect::<Result<Vec<SourceGain>>>()?;
        let rules = choices.iter().map(|choice| baseline.rule_gain(choice));
        let rules = rules.collect::<Result<Vec<RuleGain>>>()?;
        let rule = baseline.tuned_rule(best)?;
        let ways = self.ways(&baseline, &choices, best)?;
        let tuning = Tuning {
            rules,
            race: raced.as_ref().map(|raced| raced.outcome(fixed)),
            chosen: best.name,
            lookup_first: best.lookup_first,
            look_ups: self.tune.lookup_first.then(|| baseline.look_ups_alone()).transpose()?,
            share_accepted,
            ways,
            export: self.loaded.tuned_into(drafter),
            by_source,
            basis: TuningBasis {
                drafter,
                decoding: name,
                cost_source,
                lost_by_costs: raced.as_ref().map_or(0.0, Raced::lost),
                costs: measured,
                num_prompts: recordings.responses.len(),
                num_tokens: recordings.num_tokens(),
            },
        };
        Ok((tuning, rule))
    }

    /// Finds the best way to serve a drafter in each runtime.
    fn ways(
        &self,
        baseline: &Baseline<'_>,
        choices: &[RuleChoice],
        best: &RuleChoice,
    ) -> Result<Vec<ServingWay>> {
        let id = baseline.recordings.drafter;
        let Some(served) = self.recipe.served(id) else { return Ok(Vec::new()) };
        let look_ups = best.lookup_first.map(|_| "prompt lookup".to_owned());
        let is_head = |choice: &&RuleChoice| choice.name == StopRuleName::RejectionThreshold;
        let rule = (best.name != StopRuleName::FixedLength)
            .then(|| format!("the rule {}", rule_label(None, &best.config)));
        let mut ways = runtimes::best_ways(
            baseline,
            &served,
            &Vec::from_iter(look_ups.clone().into_iter().chain(rule)),
        )?;
        if served.flags.in_transformers
            && let (Some(choice), Some(dir)) =
                (choices.iter().find(is_head), self.loaded.tuned_into(id.into()))
        {
            let lost = Vec::from_iter(look_ups);
            ways.push(runtimes::with_head(baseline, choice, &dir, lost)?);
        }
        Ok(ways)
    }

    /// Returns the function that lists the rules to choose from.
    fn finds(&self) -> fn(&Recordings, &Costs) -> Result<Vec<RuleChoice>> {
        if self.tune.lookup_first { best_of_all } else { best_of_each }
    }

    /// Returns the costs that the recipe gives for the recorded drafter, or else measures them, with the
    /// source of the costs. `recordings` has the drafter's recordings for each way of decoding in
    /// `names`, and the result its costs.
    pub(crate) fn costs(
        &mut self,
        recordings: &[&Recordings],
        names: &[DecodingName],
    ) -> Result<(CostSource, Vec<MeasuredCosts>)> {
        let first = recordings.first().context("the recipe has a way of decoding")?;
        let drafter = first.drafter;
        if let Some(costs) = self.given.iter().find(|costs| costs.drafter == drafter) {
            return Ok((CostSource::Given, vec![MeasuredCosts::given(costs.clone()); names.len()]));
        }
        let (decoders, prompts) = self.measuring.as_mut().context(
            "costs are not measured where the target is served; hint: give the table \
             `[tune.costs]` `draft_ms` and `target_ms`, which `draftsmith server costs` \
             measures on servers",
        )?;
        let (time_limit, watch) = (self.time_limit, self.watch);
        watch.note(format!("tune: measuring costs, {drafter}"));
        let decodings: Vec<Decoding> =
            names.iter().map(|name| self.evaluate.decoding(*name)).collect();
        let (decodings, prompts) = (&decodings, &spread(prompts.clone(), Some(NUM_COST_PROMPTS)));
        let probe = CostProbe { decoders, drafter, decodings, prompts, time_limit, watch };
        let measured = probe.measure(&|costs| lengths_under(first, costs))?;
        Ok((CostSource::Machine, measured))
    }
}

/// Warns the user if validation prompts from files also occur in the training data. Held-out
/// prompts of the data itself are not counted.
fn note_prompts_in_data(recipe: &Recipe, workspace: &Workspace, watch: &dyn Watch) -> Result<()> {
    let (tune, _) = recipe.need_tuning("tune")?;
    let Some(known) = tune.prompts.as_ref().and(prompts_in_data(recipe, workspace.text_side()?))
    else {
        return Ok(());
    };
    let prompts = set_prompts(recipe, PromptSet::Validation, workspace, &Silent)?;
    let conversation = |prompt| match prompt {
        SetPrompt::Conversation(prompt) => Some(prompt),
        SetPrompt::HeldOut { .. } => None,
    };
    let prompts: Vec<Prompt> = prompts.into_iter().filter_map(conversation).collect();
    let num_in_data = num_known(&prompts, &known);
    if num_in_data > 0 {
        watch.note(format!(
            "tune: {num_in_data} of {} prompts in `tune.prompts` are prompts that the training data was \
             built from; rules chosen on them may promise too much",
            prompts.len()
        ));
    }
    Ok(())
}

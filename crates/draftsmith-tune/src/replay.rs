//! `replay`: computes the speed of every stop rule on the test prompts from their recordings,
//! without models. Also computes the trained head's share of a perfect head's gain.
//!
//! The setting of each rule is chosen on the recordings of the validation prompts. This is done for
//! the costs in the recipe, or else those that `tune` measured on this machine, and again for the
//! costs in the SpecDec++ paper. A head's predictions are scored on the test prompts.

use anyhow::Result;
use draftsmith_report::{
    CostSource, DecodingName, DrafterName, HeadOverOnline, HeadPredictions, HeadRace, LookUps,
    Replay, ReplayGroup, Road, TextRange,
};
use draftsmith_theory::{Decoding, HeadMetrics, LookupFirst, Recordings, StopRuleName};

use crate::agreement::rounding;
use crate::costs::Costs;
use crate::judging::{Fold, Judging, over};
use crate::over_online::log_losses;
use crate::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use crate::sweep::{best_look_ups_alone, best_of_all};
use crate::tuning::{CostsEntry, TuningFile, given_costs};
use draftsmith_recipe::{Recipe, Watch, Workspace};

/// Replays every rule over the recordings of a recipe, and writes `tuning/replay.json`.
///
/// # Errors
/// If recordings are missing or stale.
pub fn replay(recipe: &Recipe, workspace: &Workspace, watch: &dyn Watch) -> Result<Replay> {
    let (tune, evaluate) = recipe.need_tuning("replay")?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let given = given_costs(tune.costs.as_ref(), &files.drafters())?;
    let mut measured: Vec<CostsEntry> = TuningFile::COSTS.read(recipe)?;
    measured.retain(|entry| entry.dtype == workspace.models.dtype);
    if measured.is_empty() && given.is_empty() {
        watch.note(
            "replay: this machine's costs are unknown, so only the paper's are used; \
             hint: run `draftsmith tune` with this recipe first",
        );
    }
    let mut heads: Option<HeadRace> = TuningFile::HEADS.read(recipe)?;
    heads = heads.filter(|race| files.head_hash(race.drafter) == Some(race.head_hash.as_str()));
    let mut replay = Replay { dtype: rounding(workspace.models.dtype), heads, ..Replay::default() };
    for drafter in files.drafters() {
        let kind = drafter.id().and_then(|id| recipe.drafters.get(id));
        let road = kind.map_or(Road::SelfDraft, |it| it.kind.road());
        for decoding in &evaluate.decodings {
            let read = |set| files.read(RolloutKey { drafter, set, decoding: *decoding });
            let (validation, test) = (read(PromptSet::Validation)?, read(PromptSet::Test)?);
            let sources = test.by_source();
            let (validation, test) = (validation.recordings, &test.recordings);
            let mut over_online = None;
            let given = given.iter().find(|costs| costs.drafter == test.drafter);
            let machine = measured
                .iter()
                .find(|it| (it.measured.costs.drafter, it.decoding) == (test.drafter, *decoding))
                .map(|entry| (CostSource::Machine, entry.measured.costs.clone()));
            let own = given.map(|costs| (CostSource::Given, costs.clone())).or(machine);
            // The paper's costs are those of a separate draft model.
            let paper = (road == Road::SeparateDraft)
                .then(|| (CostSource::Paper, Costs::paper(test.drafter)));
            for (source, costs) in own.into_iter().chain(paper) {
                let sets = ReplaySets {
                    drafter,
                    road,
                    decoding: *decoding,
                    cost_source: source,
                    first: best_look_ups_alone(&validation, &costs)?,
                    fold: Fold::new(&validation, test, &costs, best_of_all)?,
                    num_validation_prompts: validation.responses.len(),
                    costs,
                    seed: recipe.seed,
                };
                replay.groups.push(sets.group(None, test)?);
                if over_online.is_none() && test.head.is_some() {
                    over_online = Some(sets.over_online(&validation, test)?);
                }
                if sources.len() > 1 {
                    for (source, test) in &sources {
                        replay.groups.push(sets.group(Some(source), test)?);
                    }
                }
            }
            if let Some(over_online) = over_online {
                let decoding = evaluate.decoding(*decoding);
                replay.predictions.extend(predictions(drafter, decoding, test, over_online));
            }
        }
    }
    TuningFile::REPLAY.write(recipe, &replay)?;
    Ok(replay)
}

/// Scores the head's predictions on recorded prompts; `None` without predictions.
fn predictions(
    drafter: DrafterName,
    decoding: Decoding,
    test: &Recordings,
    over_online: HeadOverOnline,
) -> Option<HeadPredictions> {
    let judged = test.judged_predictions(decoding).concat();
    let metrics = HeadMetrics::of(&judged, &|prob| prob);
    (!judged.is_empty()).then(|| HeadPredictions {
        drafter,
        decoding: DecodingName::of(&decoding),
        num_test_prompts: test.responses.len(),
        bins: metrics.reliability(),
        scores: metrics.finish(),
        over_online,
    })
}

/// The rules that were chosen on validation prompts, with the inputs of their evaluation.
struct ReplaySets<'a> {
    drafter: DrafterName,
    /// The drafter's category in reports, such as separate draft model or self-draft.
    road: Road,
    decoding: DecodingName,
    cost_source: CostSource,
    /// The best settings of prompt lookup without the drafter.
    first: LookupFirst,
    fold: Fold<'a>,
    num_validation_prompts: usize,
    costs: Costs,
    seed: u64,
}

impl ReplaySets<'_> {
    /// Compares the head with vLLM's online estimator, whose initial coefficients are learned from
    /// the validation prompts.
    fn over_online(&self, validation: &Recordings, test: &Recordings) -> Result<HeadOverOnline> {
        let judging =
            Judging::new(vec![self.fold.on(test)], std::slice::from_ref(&self.costs), self.seed)?;
        let head = judging.best(|choice| choice.config.needs().acceptance_prob)?;
        let online = judging.best(|choice| choice.name == StopRuleName::OnlineAcceptance)?;
        Ok(HeadOverOnline {
            log_losses: log_losses(test, &validation.learned_acceptance(), self.seed),
            cost_source: self.cost_source,
            speed_gain: judging.estimate(&|some| over(&online, &head, some)),
        })
    }

    /// Evaluates the rules on the recordings `test`, which are all test prompts or those of one
    /// source, `dataset`.
    fn group(&self, dataset: Option<&str>, test: &Recordings) -> Result<ReplayGroup> {
        let judging =
            Judging::new(vec![self.fold.on(test)], std::slice::from_ref(&self.costs), self.seed)?;
        let looked_up = test.replay_look_ups(self.first, &self.costs.rounds);
        let look_ups = LookUps { look_ups: self.first, speedup: judging.speedup(&looked_up) };
        let is_greedy = self.decoding == DecodingName::Greedy;
        let oracle = is_greedy.then(|| judging.oracle()).transpose()?;
        Ok(ReplayGroup {
            drafter: self.drafter,
            road: self.road,
            decoding: self.decoding,
            dataset: dataset.map(str::to_owned),
            cost_source: self.cost_source,
            costs: self.costs.rounds.drafting_line(self.costs.drafter)?,
            num_validation_prompts: self.num_validation_prompts,
            num_test_prompts: test.responses.len(),
            num_test_tokens: test.num_tokens(),
            rows: judging.rows(&judging.folds[0].choices)?,
            plain_seconds: self.costs.rounds.verify_seconds(1),
            oracle,
            look_ups: Some(look_ups),
            by_text_position: TextRange::all_of(test, self.seed),
        })
    }
}

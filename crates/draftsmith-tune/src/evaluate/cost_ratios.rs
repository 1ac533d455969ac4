//! The cost of each drafter's forward relative to a target forward, by model size and by measured
//! time. These are the weights of CS-Drafting's standardised walltime improvement.

use draftsmith_report::{CostRatios, DrafterName};
use std::collections::BTreeMap;
use std::time::Duration;

use draftsmith_theory::{CostModel, DrafterId, Round, RoundCosts, StopRuleName};

use super::measure::PromptRun;
use super::settings::Setting;
use draftsmith_recipe::{LoadedDrafters, Pair, Recipe};

/// Computes for each drafter the number of parameters that its forward reads, divided by the
/// target's number of parameters; 0 for prompt lookup.
pub(super) fn cost_by_size(pair: &Pair, drafters: &LoadedDrafters) -> CostRatios {
    let target = pair.target.config().num_parameters() as f64;
    let sizes = drafters.iter().flat_map(|drafter| &drafter.sizes);
    let shares = sizes.map(|size| (size.id, size.num_read as f64 / target));
    shares.chain([(DrafterId::LOOK_UP, 0.0)]).collect()
}

/// Counts the parameters of each drafter's own; 0 for prompt lookup.
pub(super) fn num_parameters(drafters: &LoadedDrafters) -> BTreeMap<DrafterId, usize> {
    let sizes = drafters.iter().flat_map(|drafter| &drafter.sizes);
    sizes.map(|size| (size.id, size.num_own)).chain([(DrafterId::LOOK_UP, 0)]).collect()
}

/// Returns the recipe's sets of cost ratios by name. Drafters that read no parameters cost nothing.
pub(super) fn given_ratios(recipe: &Recipe, by_size: &CostRatios) -> BTreeMap<String, CostRatios> {
    let free = || by_size.iter().filter(|(_, share)| **share == 0.0);
    let sets = recipe.evaluate.iter().flat_map(|evaluate| &evaluate.cost_ratios);
    let priced = sets.map(|(name, ratios)| {
        let all = free().chain(ratios).map(|(id, ratio)| (*id, *ratio));
        (name.clone(), all.collect())
    });
    priced.collect()
}

/// Prices each drafter's forward at the SpecDec++ paper's costs. The largest separate draft has the
/// paper's price, a smaller one its share of that, and any other drafter its share of a target
/// forward by size. `by_size` comes from [`cost_by_size`].
pub(super) fn paper_costs(recipe: &Recipe, by_size: &CostRatios) -> RoundCosts {
    let CostModel { draft_seconds, target_seconds, .. } = CostModel::PAPER;
    let is_model = |id| recipe.drafters.get(id).is_some_and(|it| it.kind.model().is_some());
    let models = by_size.iter().filter(|(id, _)| is_model(**id));
    let largest = models.map(|(_, share)| *share).fold(0.0, f64::max);
    let price = |(id, share): (&DrafterId, &f64)| match is_model(*id) && largest > 0.0 {
        true => (*id, draft_seconds * share / largest),
        false => (*id, target_seconds * share),
    };
    RoundCosts::paper(by_size.iter().map(price).collect())
}

/// Computes for each drafter the time of its forward, divided by the time of a target forward over
/// one row. The time comes from rounds that only this drafter drafted. Without such rounds it is
/// fitted to the rounds of cascades with this drafter. The result is empty if the target was not
/// timed.
pub(super) fn cost_by_time(
    settings: &[Setting],
    runs: &[Vec<PromptRun>],
    costs: &[Option<RoundCosts>],
) -> CostRatios {
    let rounds = |runs: &'_ [PromptRun]| -> Vec<Round> {
        runs.iter().flat_map(|run| run.trace.rounds.iter().copied()).collect()
    };
    let plain = rounds(&runs[0]);
    let seconds: Duration = plain.iter().map(|round| round.verify_time).sum();
    let target = seconds.as_secs_f64() / plain.len() as f64;
    if !(target > 0.0 && target.is_finite()) {
        return CostRatios::new();
    }
    let mut alone: BTreeMap<DrafterId, (f64, usize)> = BTreeMap::new();
    for (setting, runs) in settings.iter().zip(runs) {
        let DrafterName::Of(id) = setting.drafter else { continue };
        if setting.stop_rule() != StopRuleName::FixedLength {
            continue;
        }
        for round in rounds(runs) {
            if round.forwards.iter().all(|(of, _)| of == id) {
                let (seconds, count) = alone.entry(id).or_default();
                *seconds += round.draft_time.as_secs_f64();
                *count += round.forwards.total();
            }
        }
    }
    let alone = alone.into_iter().filter(|(_, (_, count))| *count > 0);
    let mut ratios: CostRatios =
        alone.map(|(id, (seconds, count))| (id, seconds / count as f64 / target)).collect();
    for (runs, costs) in runs.iter().zip(costs) {
        let Some(costs) = costs else { continue };
        for (id, _) in rounds(runs).iter().flat_map(|round| round.forwards.iter()) {
            if let Ok(seconds) = costs.draft_seconds(id) {
                ratios.entry(id).or_insert(seconds / target);
            }
        }
    }
    ratios
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use draftsmith_theory::{Forwards, Trace};

    use super::*;

    #[test]
    fn drafters_have_the_papers_price_by_their_size_and_look_ups_none() {
        let text = "name = 'a'\nmodels.target = 't'\ndrafters.draft = { kind = 'model', model = 'd' }\n\
                    drafters.small = { kind = 'model', model = 's' }\n\
                    drafters.exit = { kind = 'adapter', exit_layer = 2 }\n\
                    drafters.lookup = { kind = 'prompt-lookup' }\nevaluate.prompts = ['p']\n\
                    evaluate.cost_ratios.pw = { draft = 0.04, small = 0.02 }\n";
        let recipe: Recipe = toml::from_str(text).expect("a recipe");
        let id = DrafterId::named;
        let sizes = [("draft", 0.25), ("small", 0.125), ("exit", 0.0625), ("lookup", 0.0)];
        let by_size = sizes.map(|(name, share)| (id(name), share)).into();
        let costs = paper_costs(&recipe, &by_size);
        for (name, seconds) in
            [("draft", 0.0234), ("small", 0.0117), ("exit", 0.007), ("lookup", 0.0)]
        {
            assert!(
                (costs.draft_seconds(id(name)).expect("a price") - seconds).abs() < 1e-12,
                "{name}"
            );
        }
        let given = &given_ratios(&recipe, &by_size)["pw"];
        let named = [("draft", 0.04), ("small", 0.02), ("lookup", 0.0)];
        assert_eq!(*given, named.map(|(name, ratio)| (id(name), ratio)).into());
        assert_eq!([1, 2, 40].map(|rows| costs.verify_seconds(rows)), [0.108, 0.112, 0.112]);
        // A horizontal cascade of two drafted and four looked-up tokens takes 1.42 target forwards.
        let mut forwards = Forwards::of(id("draft"), 2);
        forwards.add(id("lookup"), 4);
        let round =
            Round { num_drafted: 6, depth: 6, forwards, num_accepted: 2, ..Round::default() };
        let trace =
            Trace { rounds: vec![round; 2], num_tokens: 6, prefill_time: Duration::default() };
        let seconds = costs.seconds(&trace.rounds).expect("prices") / 2.0;
        assert!((seconds / 0.112 - 1.418).abs() < 1e-3, "{seconds}");
        let speedup = super::super::group::speedup_at(&trace, &costs);
        assert!((speedup - 3.0 * 0.108 / seconds).abs() < 1e-12, "{speedup}");
    }
}

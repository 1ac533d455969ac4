//! The cost of each drafter's forwards relative to a forward of the target, by size and by time: the weights
//! of CS-Drafting's standardised walltime improvement.

use std::collections::BTreeMap;
use std::time::Duration;

use draftsmith_model::{CausalLm, ModelConfig};
use draftsmith_report::{CostRatios, DrafterName};
use draftsmith_theory::{DrafterId, Round, RoundCosts, StopRuleName};

use super::measure::PromptRun;
use super::settings::Setting;
use crate::exports::{AdapterExport, Exports};
use crate::pair::Pair;

/// The parameters that a forward of each drafter reads, over those of the target; 0 for prompt lookup.
pub(super) fn cost_by_size(pair: &Pair, exports: &Exports) -> CostRatios {
    let parameters = |model: &CausalLm| model.config().num_parameters() as f64;
    let target = parameters(&pair.target);
    let small = exports.small_draft.as_ref();
    let models = [(DrafterId::Draft, pair.draft.as_ref()), (DrafterId::SmallDraft, small)];
    let models = models.into_iter().filter_map(|(id, model)| Some((id, parameters(model?))));
    let adapters = exports.adapters.iter().map(|export| {
        let exit_layer = export.config.exit_layer;
        let read = read_by_self_draft(pair.target.config(), export);
        (DrafterId::SelfDraft { exit_layer }, read)
    });
    let looked_up = std::iter::once((DrafterId::MaxGram, 0.0));
    models.chain(adapters).chain(looked_up).map(|(id, read)| (id, read / target)).collect()
}

/// The parameters of a self-draft: the target's first layers, the adapter, and the LM head's rows of the
/// draft vocabulary.
fn read_by_self_draft(config: &ModelConfig, export: &AdapterExport) -> f64 {
    let drawn = export.config.draft_vocabulary.as_ref().map(|all| all.ids().len());
    let mut layers = config.clone().with_tied_embeddings(true);
    layers.shape.num_layers = export.config.exit_layer;
    // The parameters of an adapter include those of a separate LM head.
    let has_head = export.adapter.own_head().is_some();
    layers.shape.vocab_size = if has_head { 0 } else { drawn.unwrap_or(config.shape.vocab_size) };
    (layers.num_parameters() + export.adapter.num_parameters()) as f64
}

/// The time of a forward of each drafter over that of a target forward of one row. It is measured in rounds
/// of that drafter only, or else fitted to the rounds of its cascades. Empty if the target was not timed.
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

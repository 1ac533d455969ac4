//! The lengths of cascades that a recipe leaves to `tune`.
//!
//! Those of a drafter over look-ups that forgives nothing are found by replay. Of others nobody has
//! recorded what their reviewers would say behind a rejected candidate, so that theirs are those of
//! which CS-Drafting's closed form (EWIF) expects the most, by how often tokens stand along the
//! recorded responses and by what forwards cost.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use draftsmith_decode::CascadeLengths;
use draftsmith_theory::{CascadeAcceptance, Decoding, DrafterId, Lenience};
use serde::Serialize;

use super::acceptance::Judging;
use super::judged::Judged;
use super::measuring::Measuring;
use crate::console::Console;
use crate::costs::{Costs, measure_reviewing};
use crate::exports::Exports;
use crate::exports::lookup::Lookup;
use crate::recipe::{CascadeRecipe, EvaluateRecipe, GivenCosts, listed};
use crate::results::{DecodingName, DrafterName};
use crate::statistics::shown_interval;
use crate::sweep::cascades::{closed_form, fastest, judge_cascades};
use crate::sweep::expected_cascades::{
    CascadePrices, MeasuredAcceptance, best_lengths, chain_alone, expected,
};
use crate::tuning::{PromisedBy, TunedCascade, TunedPromise};
use crate::workspace::Workspace;

/// The cascades whose first drafter this is and whose lengths are to be found.
pub(super) fn asked_for(evaluate: &EvaluateRecipe, drafter: DrafterId) -> Vec<&CascadeRecipe> {
    tuned(evaluate).filter(|cascade| cascade.drafters[0] == drafter).collect()
}

/// All whose lengths are to be found.
pub(super) fn tuned(evaluate: &EvaluateRecipe) -> impl Iterator<Item = &CascadeRecipe> {
    evaluate.cascades.iter().filter(|cascade| cascade.lengths.is_tuned())
}

/// A cascade that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedCascade {
    /// K.
    pub(crate) lengths: CascadeLengths,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// What lengths are found by.
pub(super) struct Finding<'f, 'm> {
    pub(super) by: Judged<'f>,
    pub(super) decoding: Decoding,
    pub(super) lookup: Lookup,
    pub(super) exports: &'f Exports,
    pub(super) workspace: &'f Workspace,
    pub(super) given: Option<&'f GivenCosts>,
    /// What forwards of the drafters behind the first cost, as far as they were needed.
    pub(super) others: BTreeMap<DrafterId, Costs>,
    /// None where the target is served.
    pub(super) measuring: Option<&'f mut Measuring<'m>>,
    pub(super) console: &'f Console,
}

impl Finding<'_, '_> {
    fn name(&self) -> DecodingName {
        DecodingName::of(&self.decoding)
    }

    /// The fastest lengths of each cascade, and all that replay tried.
    ///
    /// # Errors
    /// If a drafter has no price, lengths cannot be found where the target is served, a model fails, or
    /// Ctrl-C is met.
    pub(super) fn all(
        &mut self,
        cascades: &[&CascadeRecipe],
    ) -> Result<(Vec<TunedCascade>, Vec<TriedCascade>)> {
        let (mut found, mut all_tried) = (Vec::with_capacity(cascades.len()), Vec::new());
        for cascade in cascades {
            if cascade.is_replayed() {
                let (tuned, tried) = self.by_replay(cascade)?;
                found.push(tuned);
                all_tried = tried;
            } else {
                found.push(self.by_closed_form(cascade)?);
            }
        }
        Ok((found, all_tried))
    }

    /// The fastest lengths of a cascade by replay, and all that were tried.
    fn by_replay(&self, cascade: &CascadeRecipe) -> Result<(TunedCascade, Vec<TriedCascade>)> {
        let (by, look_ups) = (&self.by, self.lookup.look_ups());
        let (recordings, costs) = (by.recordings, by.costs);
        let acceptance = recordings.look_up_acceptance(look_ups);
        let judged = judge_cascades(recordings, look_ups, costs)?;
        let best = fastest(&judged)?;
        let tried = judged
            .iter()
            .map(|it| TriedCascade { lengths: it.cascade.lengths(), gain: by.gain(&it.spent) });
        let tuned = TunedCascade {
            drafters: cascade.drafters.clone(),
            lenience: cascade.lenience,
            decoding: self.name(),
            models: self.exports.models_hash(&cascade.drafters, self.workspace)?,
            dtype: by.dtype,
            lengths: best.cascade.lengths(),
            promise: by.promise(&best.spent, judged.len()),
            acceptance: MeasuredAcceptance::new(&acceptance, &cascade.drafters),
            closed_form: Some(closed_form(&acceptance, costs, &judged, by.plain())?),
        };
        Ok((tuned, tried.collect()))
    }

    /// The lengths that the closed form expects the most of.
    fn by_closed_form(&mut self, cascade: &CascadeRecipe) -> Result<TunedCascade> {
        let name = self.name();
        let (by, drafters) = (&self.by, &cascade.drafters[..]);
        let Some(measuring) = self.measuring.as_deref_mut() else {
            bail!(
                "key `evaluate.cascades` has `lengths = \"tuned\"` for {}, lenience {}: how often \
                 several models agree, or a lenient one forgives, is measured where the target's weights \
                 are; hint: give its matrix",
                listed(drafters),
                cascade.lenience
            );
        };
        for drafter in drafters[1..].iter().filter(|id| **id != DrafterId::MaxGram) {
            if !self.others.contains_key(drafter) {
                let costs = costs_of(*drafter, drafters, by, self.given, measuring)?;
                self.others.insert(*drafter, costs);
            }
        }
        self.console.note(format!(
            "tune: measuring acceptance, {}, {}",
            listed(drafters),
            name.text()
        ));
        let judging = Judging {
            drafters,
            lenience: Lenience::new(cascade.lenience)?,
            decoding: self.decoding,
            look_ups: self.lookup.look_ups(),
        };
        let mut along = judging.along(by.recordings, &mut measuring.decoders, self.console)?;
        // Of a response of one token nothing was drafted.
        along.retain(|response| !response.is_empty());
        let acceptance: CascadeAcceptance = along.iter().sum();
        let others = drafters[1..].iter().map(|drafter| self.others.get(drafter));
        let prices = CascadePrices::new(by.costs, others)?;
        let (lengths, num_tried) = best_lengths(drafters.len(), by.fixed.0, |lengths| {
            expected(lengths, &acceptance, &prices).speedup
        });
        let (chain, of_chain) = (chain_alone(1, by.fixed.0), CascadePrices::of_chains(by.costs)?);
        let gain = shown_interval(along.len(), by.seed, |some| {
            let some: CascadeAcceptance = some.iter().map(|index| &along[*index]).sum();
            let chain = expected(&chain, &some, &of_chain).speedup;
            expected(&lengths, &some, &prices).speedup / chain - 1.0
        });
        let best = expected(&lengths, &acceptance, &prices);
        Ok(TunedCascade {
            drafters: drafters.to_vec(),
            lenience: cascade.lenience,
            decoding: name,
            models: self.exports.models_hash(drafters, self.workspace)?,
            dtype: by.dtype,
            lengths,
            promise: TunedPromise {
                promised_by: PromisedBy::ClosedForm,
                num_tried,
                num_prompts: along.len(),
                cost_source: by.cost_source,
                speedup: best.speedup,
                verification_rate: best.verification_rate,
                discard_rate: best.discard_rate,
                best_fixed_length: by.fixed.0,
                expected_gain: gain.into(),
            },
            acceptance: MeasuredAcceptance::new(&acceptance, drafters),
            closed_form: None,
        })
    }
}

/// What forwards of one of a cascade's later drafters cost: measured where the first one's were, with
/// what that one's take longer in rounds than alone, and else as they are given.
fn costs_of(
    drafter: DrafterId,
    drafters: &[DrafterId],
    by: &Judged<'_>,
    given: Option<&GivenCosts>,
    measuring: &mut Measuring<'_>,
) -> Result<Costs> {
    if by.cost_source.is_machine() {
        let Measuring { decoders, prompts } = measuring;
        let own = measure_reviewing(decoders, DrafterName::Of(drafter), prompts)?;
        // A forward within a round has its choice of a token, its review and its rule behind it.
        let Costs { mixed_rounds, reviewing, drafter: first, .. } = by.costs;
        let of_first = reviewing.as_ref().map_or(0.0, |own| own.verify_seconds(1));
        let behind = (mixed_rounds.draft_seconds(*first)? - of_first).max(0.0);
        let one = own.verify_seconds(1) + behind;
        return Ok(Costs {
            drafter,
            mixed_rounds: mixed_rounds.clone().with_draft_seconds(drafter, one),
            reviewing: Some(own),
            ..by.costs.clone()
        });
    }
    let named = given.filter(|given| given.names_drafters());
    let given = named.map(|given| Costs::given(given, drafter, drafters.len())).transpose()?;
    given.flatten().with_context(|| {
        format!(
            "key `tune.costs.draft_ms` has no time of `{drafter}`, which drafts in the cascade of {} of \
             `evaluate.cascades`; hint: give each model's, as in `draft_ms = {{ {} = 1.5, {drafter} = \
             0.5 }}`",
            listed(drafters),
            drafters[0]
        )
    })
}

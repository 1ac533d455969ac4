//! The lengths of cascades that a recipe leaves to `tune`.
//!
//! Those of a drafter over look-ups that forgives nothing are found by replay. Of others nobody has
//! recorded what their reviewers would say behind a rejected candidate, so that theirs are those of
//! which CS-Drafting's closed form (EWIF) expects the most, by how often tokens stand along the
//! recorded responses and by what forwards cost.

use anyhow::{Context, Result};
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
use crate::recipe::{CascadeRecipe, EvaluateRecipe, GivenCosts};
use crate::results::{DecodingName, DrafterName};
use crate::statistics::shown_interval;
use crate::sweep::cascades::{closed_form, fastest, judge_cascades};
use crate::sweep::expected_cascades::{
    AcceptedBy, CascadePrices, ClosedFormCascade, best_lengths, expected,
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
    /// None where the target is served.
    pub(super) measuring: Option<&'f mut Measuring<'m>>,
    pub(super) console: &'f Console,
}

impl Finding<'_, '_> {
    fn name(&self) -> DecodingName {
        DecodingName::of(&self.decoding)
    }

    /// The fastest lengths of a cascade by replay, and all that were tried.
    ///
    /// # Errors
    /// If too little is recorded for one.
    pub(super) fn by_replay(
        &self,
        cascade: &CascadeRecipe,
    ) -> Result<(TunedCascade, Vec<TriedCascade>)> {
        let (by, look_ups) = (&self.by, self.lookup.look_ups());
        let (recordings, costs) = (by.recordings, by.costs);
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
            closed_form: closed_form(recordings, look_ups, costs, &judged, by.plain())?,
        };
        Ok((tuned, tried.collect()))
    }

    /// The lengths that the closed form expects the most of.
    ///
    /// # Errors
    /// If the target is served, a drafter has no price, a model fails, or Ctrl-C is met.
    pub(super) fn by_closed_form(&mut self, cascade: &CascadeRecipe) -> Result<TunedCascade> {
        let name = self.name();
        let Some(measuring) = self.measuring.as_deref_mut() else {
            anyhow::bail!(
                "key `evaluate.cascades` has `lengths = \"tuned\"` for a cascade of several models or \
                 with a lenience, and how often they agree is measured where the target's weights are; \
                 hint: give its matrix"
            );
        };
        let (by, drafters) = (&self.by, &cascade.drafters[..]);
        let mut costs = Vec::new();
        for drafter in &drafters[1..] {
            costs.push(match drafter {
                DrafterId::MaxGram => None,
                drafter => Some(costs_of(*drafter, drafters, by, self.given, measuring)?),
            });
        }
        let listed: Vec<String> = drafters.iter().map(DrafterId::to_string).collect();
        let listed = listed.join(", ");
        self.console.note(format!("tune: measuring acceptance, {listed}, {}", name.text()));
        let judging = Judging {
            drafters,
            lenience: Lenience::new(cascade.lenience)?,
            decoding: self.decoding,
            look_ups: self.lookup.look_ups(),
        };
        let along = judging.along(by.recordings, &mut measuring.decoders, self.console)?;
        let acceptance: CascadeAcceptance = along.iter().sum();
        let prices = CascadePrices::new(by.costs, &costs)?;
        let of = |lengths: &CascadeLengths, acceptance: &CascadeAcceptance| {
            let stands = |reviewer, token| acceptance.prob(reviewer, token);
            expected(lengths, stands, |drafter| acceptance.found_prob(drafter), &prices)
        };
        let (lengths, num_tried) =
            best_lengths(drafters.len(), |lengths| of(lengths, &acceptance).speedup);
        let mut fixed = vec![vec![0; drafters.len()]; drafters.len()];
        fixed[0][0] = by.fixed.0;
        let gain = shown_interval(along.len(), by.seed, |some| {
            let some: CascadeAcceptance = some.iter().map(|index| &along[*index]).sum();
            of(&lengths, &some).speedup / of(&fixed, &some).speedup - 1.0
        });
        let best = of(&lengths, &acceptance);
        let looks_up = drafters.iter().position(|id| *id == DrafterId::MaxGram);
        Ok(TunedCascade {
            drafters: drafters.to_vec(),
            lenience: cascade.lenience,
            decoding: name,
            models: self.exports.models_hash(drafters, self.workspace)?,
            dtype: by.dtype,
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
            closed_form: ClosedFormCascade {
                acceptance: AcceptedBy::all(&acceptance, drafters),
                found: looks_up.map(|drafter| acceptance.found_prob(drafter)),
                lengths: lengths.clone(),
                ewif: best.speedup,
                replayed: None,
            },
            lengths,
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
    let given = given.map(|given| Costs::given(given, drafter, drafters.len())).transpose()?;
    given.flatten().with_context(|| {
        format!(
            "key `tune.costs.draft_ms` has no time of `{drafter}`, which a cascade of \
             `evaluate.cascades` drafts with; hint: add it, as in `draft_ms = {{ {drafter} = 0.5 }}`"
        )
    })
}

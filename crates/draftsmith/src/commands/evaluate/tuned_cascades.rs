//! Cascades whose lengths the recipe leaves to `tune`.

use anyhow::{Context, Result};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, FixedLengthConfig};

use super::promised::Promise;
use crate::exports::cascades::numbered;
use crate::recipe::{EvaluateRecipe, Lengths, LengthsOfEach, Recipe};
use crate::results::{DecodingName, DrafterName};
use crate::tuning::{TunedCascade, read_cascades};

/// What the recipe evaluates, with the lengths that `tune` found.
pub(super) struct Resolved {
    pub(super) evaluate: EvaluateRecipe,
    /// The cascades that were tuned, by what results call them.
    tuned: Vec<(DrafterId, TunedCascade)>,
}

impl Resolved {
    /// Reads what was tuned for models that compute in `dtype`.
    ///
    /// # Errors
    /// If something is missing, or the file cannot be read.
    pub(super) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        dtype: WeightDtype,
    ) -> Result<Self> {
        let mut resolved = Self { evaluate: evaluate.clone(), tuned: Vec::new() };
        if evaluate.cascades.iter().all(|cascade| !cascade.lengths.is_tuned()) {
            return Ok(resolved);
        }
        let known = read_cascades(recipe, dtype)?;
        let tuned = numbered(&evaluate.cascades).zip(&mut resolved.evaluate.cascades);
        for ((id, asked), cascade) in tuned.filter(|((_, asked), _)| asked.lengths.is_tuned()) {
            let found = evaluate.decodings.iter().map(|name| {
                let is_it = |it: &&TunedCascade| {
                    (it.decoding, &it.drafters) == (*name, &asked.drafters)
                };
                known.iter().find(is_it).with_context(|| {
                    let drafters: Vec<String> =
                        asked.drafters.iter().map(DrafterId::to_string).collect();
                    format!(
                        "key `evaluate.cascades` has `lengths = \"tuned\"` for {}, and none were tuned \
                         for {} decoding; hint: run `draftsmith tune` with this recipe first",
                        drafters.join(", "),
                        name.text()
                    )
                })
            });
            let found = found.collect::<Result<Vec<_>>>()?;
            // What is not decoded has no lengths of its own.
            let of = |name| {
                let own = found.iter().find(|it| it.decoding == name).or(found.first());
                own.map(|it| it.lengths.clone()).context("a way of decoding is evaluated")
            };
            let (greedy, sampled) = (of(DecodingName::Greedy)?, of(DecodingName::Sampled)?);
            cascade.lengths = Lengths::Each(LengthsOfEach { greedy, sampled });
            resolved.tuned.extend(found.into_iter().map(|it| (id, it.clone())));
        }
        Ok(resolved)
    }

    /// What tuning promised of them under a way of decoding.
    pub(super) fn promises(&self, decoding: DecodingName) -> impl Iterator<Item = Promise> {
        let tuned = self.tuned.iter().filter(move |(_, it)| it.decoding == decoding);
        tuned.filter_map(move |(id, it)| {
            let named = numbered(&self.evaluate.cascades).find(|(number, _)| number == id);
            let (_, cascade) = named?;
            let longest = FixedLengthConfig { candidate_length: cascade.longest(decoding) };
            Some(Promise {
                drafter: DrafterName::Of(*id),
                config: longest.into(),
                over: it.drafters[0],
                best_fixed_length: it.best_fixed_length,
                expected_gain: it.expected_gain,
                is_of_this_machine: it.cost_source.is_machine(),
            })
        })
    }
}

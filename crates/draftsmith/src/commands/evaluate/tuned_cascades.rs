//! Cascades whose lengths the recipe leaves to `tune`.

use anyhow::{Context, Result, ensure};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, FixedLengthConfig};

use super::promised::Promise;
use crate::exports::cascades::numbered;
use crate::recipe::{EvaluateRecipe, Lengths, LengthsOfEach, Recipe, listed};
use crate::results::{DecodingName, DrafterName};
use crate::tuning::{TunedCascade, read_tuned};

/// Puts the lengths that were tuned into the recipe, and returns what tuning promised of them.
///
/// # Errors
/// If something is missing or was tuned for other models, or the file cannot be read.
pub(super) fn resolve(
    recipe: &Recipe,
    evaluate: &mut EvaluateRecipe,
    models_hash: impl Fn(&[DrafterId]) -> Result<String>,
    dtype: WeightDtype,
) -> Result<Vec<(DecodingName, Promise)>> {
    let mut promised = Vec::new();
    if evaluate.cascades.iter().all(|cascade| !cascade.lengths.is_tuned()) {
        return Ok(promised);
    }
    let known: Vec<TunedCascade> = read_tuned(recipe, dtype)?;
    let asked = evaluate.cascades.clone();
    let tuned = numbered(&asked).zip(&mut evaluate.cascades);
    for ((id, asked), cascade) in tuned.filter(|((_, asked), _)| asked.lengths.is_tuned()) {
        let drafters = || listed(&asked.drafters);
        let models = models_hash(&asked.drafters)?;
        let found = evaluate.decodings.iter().map(|name| {
            let is_it = |it: &&TunedCascade| {
                let of = (it.decoding, &it.drafters, it.lenience);
                of == (*name, &asked.drafters, asked.lenience)
            };
            let found = known.iter().find(is_it).with_context(|| {
                format!(
                    "key `evaluate.cascades` has `lengths = \"tuned\"` for {}, and none were tuned \
                     for {} decoding; hint: run `draftsmith tune` with this recipe first",
                    drafters(),
                    name.text()
                )
            })?;
            ensure!(
                found.models == models,
                "key `evaluate.cascades` has `lengths = \"tuned\"` for {}, and they were tuned for \
                 other models or another draft vocabulary; hint: run `draftsmith tune` again",
                drafters()
            );
            Ok(found)
        });
        let found = found.collect::<Result<Vec<_>>>()?;
        // What is not decoded has no lengths of its own.
        let of = |name| {
            let own = found.iter().find(|it| it.decoding == name).or(found.first());
            own.map(|it| it.lengths.clone()).context("a way of decoding is evaluated")
        };
        let (greedy, sampled) = (of(DecodingName::Greedy)?, of(DecodingName::Sampled)?);
        cascade.lengths = Lengths::Each(LengthsOfEach { greedy, sampled });
        promised.extend(found.into_iter().map(|it| {
            let longest = FixedLengthConfig { candidate_length: cascade.longest(it.decoding) };
            let drafter = DrafterName::Of(id);
            (it.decoding, Promise::of_tuned(drafter, longest, it.drafters[0], &it.promise))
        }));
    }
    Ok(promised)
}

//! Static trees whose shapes the recipe leaves to `tune`, of each drafter, greedy.

use anyhow::{Context, Result, ensure};
use draftsmith_model::WeightDtype;
use draftsmith_theory::DrafterId;

use super::promised::Promise;
use crate::recipe::{AskedShape, EvaluateRecipe, Recipe};
use crate::results::{DecodingName, DrafterName};
use crate::sweep::static_trees::rule_of;
use crate::tuning::{TunedTree, read_tuned};

/// Leaves the shapes in the recipe that it gives, and returns those that were tuned for these drafters
/// with what tuning promised of them.
///
/// # Errors
/// If one is missing or was tuned for other models, or the file cannot be read.
pub(super) fn resolve(
    recipe: &Recipe,
    evaluate: &mut EvaluateRecipe,
    drafters: &[DrafterId],
    models_hash: impl Fn(&[DrafterId]) -> Result<String>,
    dtype: WeightDtype,
) -> Result<Vec<(DecodingName, Promise)>> {
    const DECODING: DecodingName = DecodingName::Greedy;
    if !evaluate.tunes_trees(DECODING) {
        return Ok(Vec::new());
    }
    if let Some(trees) = &mut evaluate.trees {
        trees.shapes = trees.given().map(AskedShape::Given).collect();
    }
    let known: Vec<TunedTree> = read_tuned(recipe, dtype)?;
    let promise = |drafter: &DrafterId| {
        let tuned = known.iter().find(|it| it.drafter == *drafter).with_context(|| {
            format!(
                "key `evaluate.trees.shapes` has \"tuned\", and none was tuned for `{drafter}`; hint: \
                 run `draftsmith tune` with this recipe first"
            )
        })?;
        ensure!(
            tuned.models == models_hash(&[*drafter])?,
            "key `evaluate.trees.shapes` has \"tuned\", and that of `{drafter}` was tuned for other \
             models or another draft vocabulary; hint: run `draftsmith tune` again"
        );
        let tree = DrafterName::Tree(*drafter, tuned.shape);
        let rule = rule_of(tuned.shape);
        Ok((DECODING, Promise::of_tuned(tree, rule, *drafter, &tuned.promise)))
    };
    drafters.iter().map(promise).collect()
}

//! What the recipe evaluates, with the static trees that `tune` found in place of `"tuned"`.

use anyhow::{Context, Result, ensure};
use draftsmith_theory::DrafterId;

use super::promise::Promise;
use crate::exports::Exports;
use crate::recipe::{AskedShape, EvaluateRecipe, Recipe};
use crate::results::DecodingName;
use crate::tuning::{TunedTree, read_tuned};
use crate::workspace::Workspace;

/// What the recipe evaluates, and what tuning promised of its trees.
pub(super) struct Resolved {
    pub(super) evaluate: EvaluateRecipe,
    trees: Vec<Promise>,
}

impl Resolved {
    /// Reads the trees that were tuned for these drafters, if the recipe asks for them.
    ///
    /// # Errors
    /// If one is missing or was tuned for other models, or the file cannot be read.
    pub(super) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        drafters: &[DrafterId],
        exports: &Exports,
        workspace: &Workspace,
    ) -> Result<Self> {
        let mut evaluate = evaluate.clone();
        if !evaluate.tunes_trees(DecodingName::Greedy) {
            return Ok(Self { evaluate, trees: Vec::new() });
        }
        if let Some(trees) = &mut evaluate.trees {
            trees.shapes = trees.given().map(AskedShape::Given).collect();
        }
        let known: Vec<TunedTree> = read_tuned(recipe, workspace.dtype)?;
        let promise = |drafter: &DrafterId| {
            let tuned = known.iter().find(|it| it.drafter == *drafter).with_context(|| {
                format!(
                    "key `evaluate.trees.shapes` has \"tuned\", and none was tuned for `{drafter}`; \
                     hint: run `draftsmith tune` with this recipe first"
                )
            })?;
            ensure!(
                tuned.models == exports.models_hash(*drafter, workspace)?,
                "key `evaluate.trees.shapes` has \"tuned\", and that of `{drafter}` was tuned for other \
                 models or another draft vocabulary; hint: run `draftsmith tune` again"
            );
            Ok(Promise::of_tree(tuned))
        };
        let trees = drafters.iter().map(promise).collect::<Result<_>>()?;
        Ok(Self { evaluate, trees })
    }

    /// What tuning promised of trees under a way of decoding: greedy ones are tuned.
    pub(super) fn promises(&self, decoding: DecodingName) -> impl Iterator<Item = Promise> {
        self.trees.iter().filter(move |_| decoding == DecodingName::Greedy).cloned()
    }
}

//! The gains over the best fixed length that `tune` promised for rules and trees.

use anyhow::{Context, Result, ensure};
use draftsmith_report::{DecodingName, DrafterName};
use draftsmith_theory::{DrafterId, Estimate, StopRuleConfig};

use crate::sweep::static_trees::rule_of;
use crate::tuning::{TunedTree, TuningFile};
use draftsmith_recipe::exports::tuned::TunedRule;
use draftsmith_recipe::kinds::Role;
use draftsmith_recipe::kinds::loaded::Loading;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{AskedShape, EvaluateRecipe, Recipe};

/// A tuned setting and its expected gain.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) drafter: DrafterName,
    pub(super) config: StopRuleConfig,
    /// The drafter whose best fixed length the gain is over.
    pub(super) over: DrafterId,
    pub(super) best_fixed_length: usize,
    pub(super) expected_gain: Estimate,
    /// Whether the costs are those of this machine: gains at other costs cannot be measured here.
    pub(super) is_of_this_machine: bool,
}

impl Promise {
    /// The promise of a tree, over its drafter's chains.
    pub(super) fn of_tree(tuned: &TunedTree) -> Self {
        Self {
            drafter: DrafterName::Tree(tuned.drafter, tuned.shape),
            config: rule_of(tuned.shape).into(),
            over: tuned.drafter,
            best_fixed_length: tuned.best_fixed_length,
            expected_gain: tuned.expected_gain,
            is_of_this_machine: tuned.cost_source.is_machine(),
        }
    }

    /// The promise of a rule; `None` without a drafter.
    pub(super) fn of_rule(tuned: &TunedRule) -> Option<Self> {
        Some(Self {
            drafter: tuned.drafter,
            config: tuned.config.clone(),
            over: tuned.drafter.id()?,
            best_fixed_length: tuned.best_fixed_length,
            expected_gain: tuned.expected_gain,
            is_of_this_machine: tuned.cost_source.is_machine(),
        })
    }
}

/// The static trees that `tune` found for the drafters of a recipe.
pub(super) struct TunedTrees {
    /// The evaluation with those trees in place of `"tuned"`.
    pub(super) evaluate: EvaluateRecipe,
    promises: Vec<Promise>,
}

impl TunedTrees {
    /// Reads the trees, if the recipe asks for them.
    ///
    /// # Errors
    /// If a tree is missing or was tuned for other models, or the file cannot be read.
    pub(super) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        workspace: &Workspace,
    ) -> Result<Self> {
        let mut evaluate = evaluate.clone();
        if !evaluate.tunes_trees(DecodingName::Greedy) {
            return Ok(Self { evaluate, promises: Vec::new() });
        }
        if let Some(trees) = &mut evaluate.trees {
            trees.shapes = trees.given().map(AskedShape::Given).collect();
        }
        let known: Vec<TunedTree> = TuningFile::TREES.read(recipe)?;
        let dtype = workspace.models.dtype;
        let promise = |drafter: DrafterId| {
            let tuned = known.iter().find(|it| (it.drafter, it.dtype) == (drafter, dtype));
            let tuned = tuned.with_context(|| {
                format!(
                    "key `evaluate.trees.shapes` has \"tuned\", and none was tuned for `{drafter}`; \
                     hint: run `draftsmith tune` with this recipe first"
                )
            })?;
            ensure!(
                tuned.models == Loading { id: drafter, recipe, workspace }.models_hash()?,
                "key `evaluate.trees.shapes` has \"tuned\", and that of `{drafter}` was tuned for other \
                 models; hint: run `draftsmith tune` again"
            );
            Ok(Promise::of_tree(tuned))
        };
        let with_steps = recipe.evaluated().filter(|(_, it)| it.kind.role() == Role::Steps);
        let promises = with_steps.map(|(id, _)| promise(id)).collect::<Result<_>>()?;
        Ok(Self { evaluate, promises })
    }

    /// The promises under a way of decoding. Trees are tuned for greedy decoding only.
    pub(super) fn promises(&self, decoding: DecodingName) -> impl Iterator<Item = Promise> {
        self.promises.iter().filter(move |_| decoding == DecodingName::Greedy).cloned()
    }
}

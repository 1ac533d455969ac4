//! What the recipe evaluates, with what it leaves to `tune` as that found it.

use anyhow::Result;
use draftsmith_theory::DrafterId;

use super::promised::Promise;
use super::{tuned_cascades, tuned_trees};
use crate::exports::Exports;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::results::DecodingName;
use crate::workspace::Workspace;

/// What the recipe evaluates, and what tuning promised of it.
pub(super) struct Resolved {
    pub(super) evaluate: EvaluateRecipe,
    promised: Vec<(DecodingName, Promise)>,
}

impl Resolved {
    /// Reads what was tuned, of these drafters' trees.
    ///
    /// # Errors
    /// If something is missing or was tuned for other models, or a file cannot be read.
    pub(super) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        drafters: &[DrafterId],
        exports: &Exports,
        workspace: &Workspace,
    ) -> Result<Self> {
        let mut evaluate = evaluate.clone();
        let hash = |drafters: &[DrafterId]| exports.models_hash(drafters, workspace);
        let dtype = workspace.dtype();
        let mut promised = tuned_cascades::resolve(recipe, &mut evaluate, hash, dtype)?;
        promised.extend(tuned_trees::resolve(recipe, &mut evaluate, drafters, hash, dtype)?);
        Ok(Self { evaluate, promised })
    }

    /// What tuning promised under a way of decoding.
    pub(super) fn promises(&self, decoding: DecodingName) -> impl Iterator<Item = Promise> {
        let promised = self.promised.iter().filter(move |(name, _)| *name == decoding);
        promised.map(|(_, promise)| promise.clone())
    }
}

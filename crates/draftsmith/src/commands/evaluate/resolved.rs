//! What the recipe evaluates, with what it leaves to `tune` as that found it.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::DrafterId;

use super::promised::Promise;
use super::{tuned_cascades, tuned_trees};
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::results::DecodingName;

/// What the recipe evaluates, and what tuning promised of it.
pub(super) struct Resolved {
    pub(super) evaluate: EvaluateRecipe,
    promised: Vec<(DecodingName, Promise)>,
}

impl Resolved {
    /// Reads what was tuned for models that compute in `dtype`, of these drafters.
    ///
    /// # Errors
    /// If something is missing, or a file cannot be read.
    pub(super) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        drafters: &[DrafterId],
        dtype: WeightDtype,
    ) -> Result<Self> {
        let mut evaluate = evaluate.clone();
        let mut promised = tuned_cascades::resolve(recipe, &mut evaluate, dtype)?;
        promised.extend(tuned_trees::resolve(recipe, &mut evaluate, drafters, dtype)?);
        Ok(Self { evaluate, promised })
    }

    /// What tuning promised under a way of decoding.
    pub(super) fn promises(&self, decoding: DecodingName) -> impl Iterator<Item = Promise> {
        let promised = self.promised.iter().filter(move |(name, _)| *name == decoding);
        promised.map(|(_, promise)| promise.clone())
    }
}

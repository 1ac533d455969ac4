//! Cascades as a recipe asks for them, with what only they draft with.

use anyhow::{Result, bail};
use draftsmith_decode::{CascadeConfig, DrafterParts};
use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, MaxGramConfig};

use super::lookup::Lookup;
use crate::recipe::{CascadeRecipe, EvaluateRecipe};
use crate::workspace::Workspace;

/// Cascades, numbered from 1 on.
#[derive(Debug)]
pub(crate) struct Cascades {
    all: Vec<(Vec<DrafterId>, CascadeConfig)>,
    small_draft: Option<CausalLm>,
    lookup: Lookup,
}

impl Cascades {
    /// Those of a recipe, if it has any. `lookup` is the recipe's prompt lookup, `exit_layers` those
    /// of its adapters.
    ///
    /// # Errors
    /// If one names a drafter that is not there, or the small draft cannot be read or is of another
    /// tokenizer.
    pub(super) fn read(
        evaluate: &EvaluateRecipe,
        lookup: Option<&Lookup>,
        exit_layers: &[usize],
        workspace: &Workspace,
    ) -> Result<Option<Self>> {
        if evaluate.cascades.is_empty() {
            return Ok(None);
        }
        let lookup = match lookup {
            Some(lookup) => lookup.clone(),
            None => Lookup::read(MaxGramConfig::default(), None, workspace)?,
        };
        let names = |wanted: DrafterId| {
            evaluate.cascades.iter().any(|cascade| cascade.drafters.contains(&wanted))
        };
        let small_draft = match names(DrafterId::SmallDraft) {
            true => Some(workspace.small_draft()?),
            false => None,
        };
        if names(DrafterId::Draft) && workspace.draft_dir().is_none() {
            bail!(
                "key `evaluate.cascades` has the drafter `draft`; hint: set `models.draft` to its \
                 checkpoint directory"
            );
        }
        let exits = evaluate.cascades.iter().flat_map(|cascade| &cascade.drafters);
        let mut exits = exits.filter_map(|id| id.exit_layer());
        if let Some(exit_layer) = exits.find(|exit_layer| !exit_layers.contains(exit_layer)) {
            bail!(
                "key `evaluate.cascades` has the drafter `self_draft_{exit_layer}`, but there is no \
                 adapter behind layer {exit_layer}; hint: name its directory in `evaluate.adapters`"
            );
        }
        let all = evaluate.cascades.iter();
        let all = all.map(|cascade| Ok((cascade.drafters.clone(), cascade.config()?)));
        let small_draft = small_draft.cloned();
        Ok(Some(Self { all: all.collect::<Result<_>>()?, small_draft, lookup }))
    }

    /// The second, smaller draft, if one takes part.
    pub(crate) fn small_draft(&self) -> Option<&CausalLm> {
        self.small_draft.as_ref()
    }

    /// The drafters' parts, where `others` are those of the drafters that run by themselves too.
    pub(crate) fn parts<'m>(&'m self, others: &[DrafterParts<'m>]) -> Vec<DrafterParts<'m>> {
        let part = |id: &DrafterId| match id {
            DrafterId::SmallDraft => {
                self.small_draft.as_ref().map(|model| DrafterParts::SmallDraft { model })
            }
            DrafterId::MaxGram => Some(self.lookup.parts()),
            id => others.iter().find(|parts| parts.id() == *id).cloned(),
        };
        let cascade = |(nth, (drafters, config)): (usize, &(Vec<DrafterId>, CascadeConfig))| {
            let drafters = drafters.iter().filter_map(part).collect();
            DrafterParts::Cascade { number: nth + 1, config: config.clone(), drafters }
        };
        self.all.iter().enumerate().map(cascade).collect()
    }
}

/// What results call a recipe's cascades.
pub(crate) fn numbered(
    cascades: &[CascadeRecipe],
) -> impl Iterator<Item = (DrafterId, &CascadeRecipe)> {
    let numbers = (1..).map(|number| DrafterId::Cascade { number });
    numbers.zip(cascades)
}

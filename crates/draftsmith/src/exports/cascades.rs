//! Cascades and merged drafts as a recipe asks for them, with what only they draft with.

use anyhow::{Result, bail};
use draftsmith_decode::{CascadeConfig, DrafterParts};
use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, LookupFirst, MaxGramConfig};

use super::lookup::Lookup;
use crate::recipe::{CascadeRecipe, EvaluateRecipe, MergedRecipe};
use crate::workspace::Workspace;

/// Cascades, and merged drafts, each numbered from 1 on.
#[derive(Debug)]
pub(crate) struct Cascades {
    all: Vec<(Vec<DrafterId>, CascadeConfig)>,
    merged: Vec<(Vec<DrafterId>, Option<LookupFirst>)>,
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
        let of_cascades = evaluate.cascades.iter().map(|it| ("evaluate.cascades", &it.drafters));
        let of_merged = evaluate.merged.iter().map(|it| ("evaluate.merged", &it.drafters));
        let drafters = of_cascades.chain(of_merged);
        let named: Vec<(&str, DrafterId)> =
            drafters.flat_map(|(key, ids)| ids.iter().map(move |id| (key, *id))).collect();
        if named.is_empty() {
            return Ok(None);
        }
        let lookup = match lookup {
            Some(lookup) => lookup.clone(),
            None => Lookup::read(MaxGramConfig::default(), None, workspace)?,
        };
        let names = |wanted: DrafterId| named.iter().find(|(_, id)| *id == wanted);
        let small_draft = match names(DrafterId::SmallDraft) {
            Some(_) => Some(workspace.small_draft()?),
            None => None,
        };
        if let Some((key, _)) = names(DrafterId::Draft)
            && workspace.draft_dir().is_none()
        {
            bail!(
                "key `{key}` has the drafter `draft`; hint: set `models.draft` to its checkpoint \
                 directory"
            );
        }
        let mut exits = named.iter().filter_map(|(key, id)| Some((key, id.exit_layer()?)));
        if let Some((key, exit_layer)) = exits.find(|(_, exit)| !exit_layers.contains(exit)) {
            bail!(
                "key `{key}` has the drafter `self_draft_{exit_layer}`, but there is no adapter behind \
                 layer {exit_layer}; hint: name its directory in `evaluate.adapters`"
            );
        }
        let all = evaluate.cascades.iter();
        let all = all.map(|cascade| Ok((cascade.drafters.clone(), cascade.config()?)));
        let small_draft = small_draft.cloned();
        let merged = evaluate.merged.iter().map(|it| (it.drafters.clone(), it.lookup)).collect();
        Ok(Some(Self { all: all.collect::<Result<_>>()?, merged, small_draft, lookup }))
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
        let merged =
            |(nth, (drafters, lookup)): (usize, &(Vec<DrafterId>, Option<LookupFirst>))| {
                let drafters = drafters.iter().filter_map(part).collect();
                DrafterParts::Merged { number: nth + 1, drafters, lookup: *lookup }
            };
        let cascades = self.all.iter().enumerate().map(cascade);
        cascades.chain(self.merged.iter().enumerate().map(merged)).collect()
    }
}

/// What results call a recipe's cascades.
pub(crate) fn numbered(
    cascades: &[CascadeRecipe],
) -> impl Iterator<Item = (DrafterId, &CascadeRecipe)> {
    let numbers = (1..).map(|number| DrafterId::Cascade { number });
    numbers.zip(cascades)
}

/// The same of its merged drafts.
pub(crate) fn numbered_merged(
    merged: &[MergedRecipe],
) -> impl Iterator<Item = (DrafterId, &MergedRecipe)> {
    let numbers = (1..).map(|number| DrafterId::Merged { number });
    numbers.zip(merged)
}

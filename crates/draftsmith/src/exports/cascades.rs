//! A recipe's cascades and merged drafts, with the prompt lookup and the heads that only they use.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{CascadeConfig, DrafterParts};
use draftsmith_theory::{DrafterId, LookupFirst};

use super::lookup::Lookup;
use super::{AdapterExport, HeadExport, check_models};
use crate::recipe::{CascadeRecipe, ChainRuleRecipe, MergedRecipe};
use crate::workspace::Workspace;

/// Cascades and merged drafts, both numbered from 1.
pub(crate) struct Cascades {
    all: Vec<(Vec<DrafterId>, CascadeConfig)>,
    /// Heads named by rules of chains, with the index of the cascade and the drafter.
    heads: Vec<(usize, DrafterId, HeadExport)>,
    merged: Vec<(Vec<DrafterId>, Option<LookupFirst>)>,
    lookup: Lookup,
}

impl Cascades {
    /// Reads what cascades and merged drafts need; None if there are neither. `lookup` reads their prompt
    /// lookup, and `head` is the draft's. The caller has checked that their drafters exist.
    ///
    /// # Errors
    /// If a rule's head is missing or belongs to other models.
    pub(crate) fn read(
        (cascades, merged): (&[CascadeRecipe], &[MergedRecipe]),
        lookup: impl FnOnce() -> Result<Lookup>,
        head: Option<&HeadExport>,
        adapters: &[AdapterExport],
        workspace: &Workspace,
    ) -> Result<Option<Self>> {
        if cascades.is_empty() && merged.is_empty() {
            return Ok(None);
        }
        let lookup = lookup()?;
        let has_own = |id: &DrafterId| match id {
            DrafterId::Draft => head.is_some(),
            id => adapters.iter().any(|adapter| {
                Some(adapter.config.exit_layer) == id.exit_layer() && adapter.head.is_some()
            }),
        };
        let mut heads = Vec::new();
        for (nth, cascade) in cascades.iter().enumerate() {
            for rule in &cascade.rules {
                let drafters = cascade.drafters_of(rule);
                match (&rule.head, &drafters[..]) {
                    (Some(dir), [id]) => {
                        let head = read_chain_head(dir, *id, rule.reviewer, workspace)?;
                        heads.push((nth, *id, head));
                    }
                    (None, [id])
                        if reads_head(rule) && !(has_own(id) && rule.reviewer.is_none()) =>
                    {
                        bail!(
                            "key `evaluate.cascades` has a rule that reads an acceptance head of \
                             `{id}`, but there is none for its reviewer; hint: train one with the \
                             two as draft and target, and name its directory in the rule's `head`"
                        );
                    }
                    _ => {}
                }
            }
        }
        let all = cascades.iter().map(|cascade| Ok((cascade.drafters.clone(), cascade.config()?)));
        let merged = merged.iter().map(|it| (it.drafters.clone(), it.lookup)).collect();
        Ok(Some(Self { all: all.collect::<Result<_>>()?, heads, merged, lookup }))
    }

    /// The parts of cascades and merged drafts; `others` are the parts of their drafters.
    pub(crate) fn parts<'m>(&'m self, others: &[DrafterParts<'m>]) -> Vec<DrafterParts<'m>> {
        let part = |named: Option<usize>, id: &DrafterId| {
            let named = self.heads.iter().find(|(of, whose, _)| Some(*of) == named && whose == id);
            let named = named.map(|(_, _, head)| &head.head);
            let parts = match id {
                DrafterId::MaxGram => return Some(self.lookup.parts()),
                id => others.iter().find(|parts| parts.id() == *id).cloned()?,
            };
            Some(match (parts, named) {
                (DrafterParts::Draft { model, .. }, Some(_)) => {
                    DrafterParts::Draft { model, head: named }
                }
                (DrafterParts::SmallDraft { model, .. }, Some(_)) => {
                    DrafterParts::SmallDraft { model, head: named }
                }
                (parts, _) => parts,
            })
        };
        let cascade = |(nth, (drafters, config)): (usize, &(Vec<DrafterId>, CascadeConfig))| {
            let drafters = drafters.iter().filter_map(|id| part(Some(nth), id)).collect();
            DrafterParts::Cascade { number: nth + 1, config: config.clone(), drafters }
        };
        let merged =
            |(nth, (drafters, lookup)): (usize, &(Vec<DrafterId>, Option<LookupFirst>))| {
                let drafters = drafters.iter().filter_map(|id| part(None, id)).collect();
                DrafterParts::Merged { number: nth + 1, drafters, lookup: *lookup }
            };
        let cascades = self.all.iter().enumerate().map(cascade);
        cascades.chain(self.merged.iter().enumerate().map(merged)).collect()
    }
}

/// Whether a rule reads an acceptance head.
fn reads_head(rule: &ChainRuleRecipe) -> bool {
    rule.stop_rule.entry().is_some_and(|entry| !entry.heads.is_empty())
}

/// Reads the head of a chain's drafter, and checks that it was trained with that drafter and reviewer.
fn read_chain_head(
    dir: &Path,
    drafter: DrafterId,
    reviewer: Option<DrafterId>,
    workspace: &Workspace,
) -> Result<HeadExport> {
    const NO_MODEL: &str = "a rule of a chain can name only the head of a separate draft: an adapter's \
                            head is used if the target reviews its chain";
    let hash_of = |id: DrafterId| match id {
        DrafterId::Draft => workspace.draft_hash(),
        DrafterId::SmallDraft => workspace.small_draft_hash(),
        _ => Ok(None),
    };
    let hidden_size = match drafter {
        DrafterId::Draft => workspace.draft_shape()?.context(NO_MODEL)?.hidden_size,
        DrafterId::SmallDraft => workspace.small_draft()?.shape().hidden_size,
        _ => bail!(NO_MODEL),
    };
    let head = HeadExport::read(dir, hidden_size, workspace)?;
    let reviewer_hash = match reviewer {
        None => Some(workspace.target_hash()?),
        Some(id) => hash_of(id)?,
    };
    let config = &head.config;
    if let (Some(_), Some(hash)) = (&config.draft_hash, hash_of(drafter)?) {
        check_models("head", dir, &[("draft", &config.draft_hash, hash)])?;
    }
    if let (Some(_), Some(hash)) = (&config.target_hash, reviewer_hash) {
        check_models("head", dir, &[("target", &config.target_hash, hash)])?;
    }
    Ok(head)
}

/// A recipe's cascades with their names in results.
pub(crate) fn numbered(
    cascades: &[CascadeRecipe],
) -> impl Iterator<Item = (DrafterId, &CascadeRecipe)> {
    let numbers = (1..).map(|number| DrafterId::Cascade { number });
    numbers.zip(cascades)
}

/// The same for its merged drafts.
pub(crate) fn numbered_merged(
    merged: &[MergedRecipe],
) -> impl Iterator<Item = (DrafterId, &MergedRecipe)> {
    let numbers = (1..).map(|number| DrafterId::Merged { number });
    numbers.zip(merged)
}

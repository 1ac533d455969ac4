//! A candidate tree merged from the chains of several drafters (SpecInfer, Miao et al. 2023,
//! section 3: merge-based expansion).
//!
//! Each drafter proposes its chain independently. Equal greedy or copied candidates of several
//! drafters share a node. A sampled candidate always gets its own node, even if another drafter
//! drew the same token, because verification tests each draw against the distribution that it came
//! from. Siblings are tried in the order of their drafters.

use std::iter;
use std::sync::Arc;

use draftsmith_theory::{DrafterId, DrawnFrom, LookupFirst, Node, Proposal, StoredAnswers};

use crate::drafter::chain::propose_chain;
use crate::drafter::{DraftRound, Drafter, Member, ModelDrafter, StepDrafter};
use crate::error::Result;
use crate::max_gram::MaxGramDraft;
use crate::registry::{DrafterParts, NamedParts, Sizes};
use crate::session::ModelSession;
use crate::target::{Target, TargetLayers};

/// A drafter that merges the chains of several drafters into one tree. A self-draft must come
/// first, so that its cache and the target's hold its nodes in the same order.
pub(crate) struct MergedDraft<'m, T> {
    models: Vec<Box<dyn StepDrafter<T> + 'm>>,
    lookup: Option<(MaxGramDraft<'m>, usize)>,
    /// The tree nodes of each model's chain in the last round, indexed by slot and model.
    chains: Vec<Vec<Vec<usize>>>,
}

impl<'m, T: Target> MergedDraft<'m, T> {
    /// Creates a drafter for up to `num_slots` concurrent sequences. It merges the chains of
    /// `models` and of prompt lookup, if any, into one tree.
    pub(crate) fn new(
        models: Vec<Box<dyn StepDrafter<T> + 'm>>,
        (lookup, answers): (Option<LookupFirst>, Option<&Arc<StoredAnswers>>),
        num_slots: usize,
    ) -> Self {
        let lookup = lookup.map(|lookup| {
            let tables = (None, answers.cloned());
            (MaxGramDraft::new(lookup.config(), tables, num_slots), lookup.most)
        });
        let chains = vec![vec![Vec::new(); models.len()]; num_slots];
        Self { models, lookup, chains }
    }
}

impl<'m> ModelDrafter<'m> for MergedDraft<'m, ModelSession<'m>> {}

/// The parts of a drafter that merges several drafters' chains into one tree.
#[derive(Debug, Clone)]
pub struct MergedParts {
    /// The drafters. All must draft step by step, and a self-draft must come first.
    pub drafters: Vec<NamedParts>,
    /// The settings of prompt lookup, which adds another chain; `None` for no prompt lookup.
    pub lookup: Option<LookupFirst>,
    /// The stored answers that prompt lookup searches; `None` for none.
    pub answers: Option<Arc<StoredAnswers>>,
}

impl DrafterParts for MergedParts {
    fn target_layers(&self) -> TargetLayers {
        NamedParts::target_layers(&self.drafters)
    }

    fn drafter<'m>(&'m self, _id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let members = self.drafters.iter().map(|it| it.drafter(sizes).into_member());
        let models = members.filter_map(|member| match member {
            Member::Steps(model) => Some(model),
            Member::LookUp(_) | Member::Neither => None,
        });
        Box::new(MergedDraft::new(
            models.collect(),
            (self.lookup, self.answers.as_ref()),
            sizes.num_slots,
        ))
    }
}

impl<T: Target> Drafter<T> for MergedDraft<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        for model in &mut self.models {
            model.begin(target, slot, prompt)?;
        }
        self.lookup.iter_mut().try_for_each(|(lookup, _)| lookup.begin(target, slot, prompt))
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        let mut sequences: Vec<Vec<u32>> =
            rounds.iter().map(|round| round.tokens.clone()).collect();
        for (nth, model) in self.models.iter_mut().enumerate() {
            let mut chains = vec![Proposal::default(); rounds.len()];
            let own = rounds.iter_mut().zip(&mut sequences).zip(&mut chains);
            let own = own.map(|((round, tokens), proposal)| DraftRound {
                tokens,
                proposal,
                ..round.reborrow()
            });
            propose_chain(&mut **model, target, &mut own.collect::<Vec<_>>())?;
            for ((round, tokens), chain) in rounds.iter_mut().zip(&mut sequences).zip(chains) {
                tokens.truncate(tokens.len() - chain.len());
                self.chains[round.slot][nth] = merge(round, chain);
            }
        }
        let Some((lookup, most)) = &mut self.lookup else { return Ok(()) };
        for (round, tokens) in rounds.iter_mut().zip(&mut sequences) {
            if round.rule.skips_drafting() {
                continue;
            }
            let mut chain = Proposal::default();
            let own = &mut DraftRound { tokens, proposal: &mut chain, ..round.reborrow() };
            lookup.propose_up_to(*most, own);
            merge(round, chain);
        }
        Ok(())
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        for (model, chain) in self.models.iter_mut().zip(&self.chains[slot]) {
            let num_own = iter::zip(path, chain).take_while(|(node, own)| node == own).count();
            let own: Vec<usize> = (0..num_own).collect();
            model.commit(slot, num_standing, &own);
        }
        let lookup = self.lookup.iter_mut();
        lookup.for_each(|(it, _)| Drafter::<T>::commit(it, slot, num_standing, path));
    }

    fn context(&self) -> usize {
        self.models.iter().map(|model| model.context()).min().unwrap_or(usize::MAX)
    }
}

/// Adds a chain to a round's tree, and returns the tree nodes of its candidates.
fn merge(round: &mut DraftRound<'_>, chain: Proposal) -> Vec<usize> {
    let DraftRound { tokens, proposal, .. } = round;
    chain.forwards.iter().for_each(|(drafter, count)| proposal.forwards.add(drafter, count));
    let (mut nodes, mut parent) = (Vec::with_capacity(chain.len()), None);
    for Node { token_id, drawn_from, .. } in chain.into_nodes() {
        let siblings =
            proposal.nodes().iter().enumerate().filter(|(_, node)| node.parent == parent);
        let is_same = |node: &Node| {
            (&node.drawn_from, &drawn_from) == (&DrawnFrom::OneHot, &DrawnFrom::OneHot)
                && node.token_id == token_id
        };
        let same = siblings.clone().find(|(_, node)| is_same(node)).map(|(number, _)| number);
        let rank = siblings.count();
        let node = same.unwrap_or_else(|| {
            tokens.push(token_id);
            proposal.push(Node { parent, token_id, drawn_from, rank })
        });
        nodes.push(node);
        parent = Some(node);
    }
    nodes
}

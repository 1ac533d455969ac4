//! Candidate trees from a drafter that drafts step by step. Each draft forward reads several nodes,
//! and each node that was read gets several children.
//!
//! The nodes that the drafter reads come first in the proposal, so that the drafter's and the
//! target's KV caches hold them in the same order. Verification tries siblings in the order in
//! which they were drawn. The product of draft probabilities along a path decides which nodes the
//! drafter reads and which nodes fill the rest of the tree.

use draftsmith_theory::{
    DraftLimits, DraftPhase, DrawnToken, EndAfter, SignalNeeds, TextEnd, TreeGrowth, TreeShape,
};

use crate::drafter::chain::RowSource;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, StepDrafter};
use crate::error::Result;

/// A drafter that proposes candidate trees, grown around the chains of another drafter.
pub struct TreeDraft<'d, T> {
    drafter: &'d mut dyn StepDrafter<T>,
    shape: TreeShape,
}

impl<'d, T> TreeDraft<'d, T> {
    /// Creates a drafter that proposes trees of the given shape from `drafter`'s candidates.
    pub fn new(drafter: &'d mut dyn StepDrafter<T>, shape: TreeShape) -> Self {
        Self { drafter, shape }
    }
}

impl<T> Drafter<T> for TreeDraft<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.drafter.begin(target, slot, prompt)
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        propose_trees(self.drafter, self.shape, target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.drafter.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.drafter.context()
    }
}

/// The partly drafted tree of one round.
struct Growing {
    phase: DraftPhase,
    growth: TreeGrowth,
    /// The candidates of the tree's main chain. The stop rule sees only these.
    chain: Vec<u32>,
    /// The parent node of each node that the drafter has read or will read next.
    parents: Vec<Option<usize>>,
    /// The number of last nodes that the next step reads; 0 before the first step, which reads the
    /// sequence.
    num_unread: usize,
}

impl Growing {
    /// Builds the tree's next draft step.
    fn step<'a>(&'a self, round: &'a DraftRound<'_>) -> DraftStep<'a> {
        DraftStep {
            slot: round.slot,
            tokens: round.tokens,
            num_candidates: self.parents.len(),
            parents: &self.parents,
            num_rows: self.num_unread.max(1),
            most: self.phase.num_left(),
            needs: self.phase.needs(),
            decoding: round.decoding,
        }
    }
}

/// Proposes a tree for each round, grown around the chain of its draft phase. All unfinished draft
/// phases share each draft forward. The first row of each step belongs to the chain.
fn propose_trees<T>(
    drafter: &mut dyn StepDrafter<T>,
    shape: TreeShape,
    target: &mut T,
    rounds: &mut [DraftRound<'_>],
) -> Result<()> {
    let most = drafter.max_candidates();
    let begin = |round: &mut DraftRound<'_>| Growing {
        phase: DraftPhase::begin(round.rule, round.limits.upto(most)),
        growth: TreeGrowth::new(shape),
        chain: Vec::new(),
        parents: Vec::new(),
        num_unread: 0,
    };
    let mut trees: Vec<Growing> = rounds.iter_mut().map(begin).collect();
    loop {
        let pairs = rounds.iter().zip(&trees).filter(|(_, tree)| tree.phase.needs_step());
        let steps: Vec<DraftStep<'_>> = pairs.map(|(round, tree)| tree.step(round)).collect();
        if steps.is_empty() {
            break;
        }
        let mut drafted = drafter.draft(target, &steps)?.into_iter();
        let pairs = rounds.iter_mut().zip(&mut trees).filter(|(_, tree)| tree.phase.needs_step());
        for (round, tree) in pairs {
            let rows: Vec<DraftRow> = drafted.by_ref().take(tree.num_unread.max(1)).collect();
            grow(drafter, round, tree, &rows)?;
        }
    }
    for (round, tree) in rounds.iter_mut().zip(&mut trees) {
        tree.growth.finish(round.proposal, round.tokens);
    }
    Ok(())
}

/// Grows a tree by the `rows` of one step. Extends the chain unless the draft phase ends before the
/// draw, adds children to the other nodes that were read, and chooses the nodes to read next.
fn grow<T>(
    drafter: &mut dyn StepDrafter<T>,
    round: &mut DraftRound<'_>,
    tree: &mut Growing,
    rows: &[DraftRow],
) -> Result<()> {
    let DraftRound { slot, tokens, proposal, rule, limits, decoding, draws } = round;
    proposal.forwards.add(drafter.id(), rows.iter().map(|row| row.num_forwards).sum());
    let Growing { phase, growth, chain, parents, num_unread } = tree;
    let (row, others) = rows.split_first().expect("a step has a row");
    let draw_candidate = |needs: SignalNeeds| {
        let (token_id, prob) = growth.extend_chain(row.logits(), decoding, *draws);
        DrawnToken { token_id, candidate_prob: needs.candidate_prob.then_some(prob) }
    };
    let mut source = RowSource { drafter, slot: *slot, row, draw_candidate };
    let num_before = phase.num_candidates();
    // Stop strings are matched against the sequence and the chain, not against the tree's other
    // nodes.
    let prefix = &tokens[..tokens.len() - proposal.len()];
    let text_end = limits.text_end.map(|end| EndAfter { end, prefix });
    let text_end = text_end.as_ref().map(|end| end as &dyn TextEnd);
    let of_chain = DraftLimits { text_end, ..*limits };
    phase.advance(&mut source, row.signals, *rule, of_chain, chain)?;
    if phase.num_candidates() == num_before {
        return Ok(());
    }
    let first_other = proposal.len() - others.len();
    for (node, row) in (first_other..).zip(others) {
        growth.branch(node, row.logits(), decoding, *draws);
    }
    *num_unread = 0;
    if phase.needs_step() {
        *num_unread = growth.read_next(limits.eos_token_ids, proposal, tokens);
        parents.extend(proposal.nodes()[parents.len()..].iter().map(|node| node.parent));
    }
    Ok(())
}

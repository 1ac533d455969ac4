//! Trees of candidates from a drafter that drafts step by step: each forward reads several nodes, and
//! each node that was read has several children.
//!
//! Nodes that the drafter reads come first in the proposal, so drafter and target hold them in the same
//! order. Siblings are tried in the order of their draws; the order in which they are read does not matter. Products
//! of the drafter's probabilities decide which nodes are read and which fill the rest of the tree.

use draftsmith_theory::{
    DraftLimits, DraftPhase, DrawnToken, EndAfter, SignalNeeds, TextEnd, TreeGrowth, TreeShape,
};

use crate::chain::RowSource;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, StepDrafter};
use crate::error::DecodeError;

/// Proposes trees around the chains of another drafter.
pub struct TreeDraft<'d, T> {
    drafter: &'d mut dyn StepDrafter<T>,
    shape: TreeShape,
}

impl<'d, T> TreeDraft<'d, T> {
    /// Creates a drafter that proposes trees of `drafter`'s candidates.
    pub fn new(drafter: &'d mut dyn StepDrafter<T>, shape: TreeShape) -> Self {
        Self { drafter, shape }
    }
}

impl<T> Drafter<T> for TreeDraft<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.drafter.begin(target, slot, prompt)
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_trees(self.drafter, self.shape, target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.drafter.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.drafter.context()
    }
}

/// The tree of a round that is being drafted.
struct Growing {
    phase: DraftPhase,
    growth: TreeGrowth,
    /// The chain's candidates. The stop rule sees only these.
    chain: Vec<u32>,
    /// The parent of each node.
    parents: Vec<Option<usize>>,
    /// How many of the last nodes the next step reads. 0 before the first step, which reads the sequence.
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
            needs: self.phase.needs(),
            decoding: round.decoding,
        }
    }
}

/// Proposes a tree for each round, around the chain of its draft phase. All phases that are not over
/// take their steps together. The first row of each step belongs to the chain.
fn propose_trees<T>(
    drafter: &mut dyn StepDrafter<T>,
    shape: TreeShape,
    target: &mut T,
    rounds: &mut [DraftRound<'_>],
) -> Result<(), DecodeError> {
    let begin = |round: &mut DraftRound<'_>| Growing {
        phase: DraftPhase::begin(round.rule, round.limits),
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

/// Grows a tree by the `rows` of a step: extends the chain, unless its phase ends before a draw, adds
/// children to the other nodes that were read, and chooses the nodes to read next.
fn grow<T>(
    drafter: &mut dyn StepDrafter<T>,
    round: &mut DraftRound<'_>,
    tree: &mut Growing,
    rows: &[DraftRow],
) -> Result<(), DecodeError> {
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
    // A stop string sees the sequence and the chain, without the tree's other nodes.
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

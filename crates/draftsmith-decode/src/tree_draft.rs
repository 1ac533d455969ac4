//! Trees of candidates from a drafter that drafts step by step: each of its forwards reads several
//! nodes, and each node it reads has several children.

use draftsmith_theory::{
    CandidateSource, Decoding, DraftLimits, DraftPhase, Drawn, Draws, EndBehind, SignalNeeds,
    TextEnd, TreeGrowth, TreeShape,
};

use crate::draft_row::{DraftRow, draft_rows};
use crate::drafter::{DraftRound, DraftStep, Drafter, StepDrafter};
use crate::error::DecodeError;

/// A drafter whose proposals are trees. What it reads of a tree comes first among the proposal's
/// nodes, so that it and a target that it advances hold them in the same order.
#[derive(Debug)]
pub struct TreeDraft<'d, D: ?Sized> {
    drafter: &'d mut D,
    shape: TreeShape,
}

impl<'d, D: ?Sized> TreeDraft<'d, D> {
    /// Trees of `drafter`'s candidates.
    pub fn new(drafter: &'d mut D, shape: TreeShape) -> Self {
        Self { drafter, shape }
    }
}

impl<T, D: StepDrafter<T> + ?Sized> Drafter<T> for TreeDraft<'_, D> {
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
    /// The candidates of the chain, which the stop rule sees.
    chain: Vec<u32>,
    /// The parent of each node.
    parents: Vec<Option<usize>>,
    /// How many of the last nodes the next step reads; 0 before the first step, which reads the sequence.
    num_unread: usize,
}

impl Growing {
    /// The step to take.
    fn step<'a>(&'a self, round: &'a DraftRound<'_>) -> DraftStep<'a> {
        DraftStep {
            slot: round.slot,
            tokens: round.tokens,
            num_candidates: self.parents.len(),
            parents: &self.parents,
            num_rows: self.num_unread.max(1),
            needs: self.phase.needs(),
        }
    }
}

/// Proposes the trees around the chains that draft phases draw: a step of all phases at a time, as
/// long as any goes on. The first row of each step is the chain's.
fn propose_trees<T, D: StepDrafter<T> + ?Sized>(
    drafter: &mut D,
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
        let pairs = rounds.iter().zip(&trees).filter(|(_, tree)| tree.phase.needs_step());
        let decodings = pairs.map(|(round, _)| round.decoding);
        let mut drafted = draft_rows(drafter, target, &steps, decodings)?.into_iter();
        let pairs = rounds.iter_mut().zip(&mut trees).filter(|(_, tree)| tree.phase.needs_step());
        for (round, tree) in pairs {
            let rows: Vec<DraftRow> = drafted.by_ref().take(tree.num_unread.max(1)).collect();
            grow(drafter, target, round, tree, &rows)?;
        }
    }
    for (round, tree) in rounds.iter_mut().zip(&mut trees) {
        tree.growth.finish(round.proposal, round.tokens);
    }
    Ok(())
}

/// Grows a tree by a step's `rows`: extends the chain, unless its phase ends before a draw, adds the
/// children of the other nodes that were read, and chooses the nodes to read next.
fn grow<T, D: StepDrafter<T> + ?Sized>(
    drafter: &mut D,
    target: &mut T,
    round: &mut DraftRound<'_>,
    tree: &mut Growing,
    rows: &[DraftRow],
) -> Result<(), DecodeError> {
    let DraftRound { slot, tokens, proposal, rule, limits, decoding, draws } = round;
    let num_forwards = rows.iter().map(DraftRow::num_forwards).sum();
    proposal.forwards.add(drafter.id(), num_forwards);
    let Growing { phase, growth, chain, parents, num_unread } = tree;
    let (first, others) = rows.split_first().expect("a step has a row");
    let mut source =
        TreeSource { drafter, target, slot: *slot, growth, decoding, draws: *draws, row: first };
    let num_before = phase.num_candidates();
    // The text is the sequence and the chain, without the tree's other nodes.
    let standing = &tokens[..tokens.len() - proposal.len()];
    let text_end = limits.text_end.map(|end| EndBehind { end, standing });
    let text_end = text_end.as_ref().map(|end| end as &dyn TextEnd);
    let of_chain = DraftLimits { text_end, ..*limits };
    phase.advance(&mut source, first.signals(), *rule, of_chain, chain)?;
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

/// The row after a tree's chain, as the source of a draft phase's candidates.
struct TreeSource<'a, T, D: ?Sized> {
    drafter: &'a mut D,
    target: &'a mut T,
    slot: usize,
    growth: &'a mut TreeGrowth,
    decoding: &'a Decoding,
    draws: &'a mut dyn Draws,
    row: &'a DraftRow,
}

impl<T, D: StepDrafter<T> + ?Sized> CandidateSource for TreeSource<'_, T, D> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let (token_id, prob) =
            self.growth.extend_chain(self.row.logits(), self.decoding, self.draws);
        Drawn { token_id, candidate_prob: needs.candidate_prob.then_some(prob) }
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        let logits = self.row.own_logits();
        self.drafter.predict_acceptance(self.target, (self.slot, 0), logits, candidate)
    }
}

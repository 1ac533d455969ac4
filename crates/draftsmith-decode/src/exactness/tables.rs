//! Table-driven models, drafters and stop rules, for which the tests enumerate the outcomes of the
//! shipped decoding loop.

use draftsmith_theory::{
    Bounds, DraftSignals, DrafterId, Draws, HeadEstimate, HeadTiming, Proposal, RoundEnd,
    SeededDraws, StopRule, TextEnd,
};

use super::Case;
use crate::drafter::chain::propose_chain;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, StepDrafter};
use crate::error::Result;
use crate::target::Logits;
use crate::target::{Target, Verification};

/// The number of sequences that tables read side by side.
pub(super) const NUM_SLOTS: usize = 2;

/// A model whose logits are a pseudo-random function of the whole prefix, some of them −∞.
#[derive(Clone)]
pub(super) struct Table {
    pub(super) vocab_size: usize,
    pub(super) seed: u64,
    pub(super) context: usize,
    /// When its acceptance head predicts, if it is a draft.
    pub(super) head: HeadTiming,
    /// The size of its draft vocabulary, if it is a draft: it draws only smaller token ids.
    pub(super) num_drawn: u32,
    /// The probability that a logit is −∞.
    pub(super) never: f64,
}

impl Table {
    fn draws(&self, prefix: &[u32], purpose: &str) -> SeededDraws {
        let name: Vec<u8> = prefix.iter().map(|id| b'a' + *id as u8).collect();
        SeededDraws::new(self.seed, &[&String::from_utf8_lossy(&name), purpose])
    }

    /// Draws an acceptance head's prediction for the last token of a prefix. It depends only on the prefix.
    fn acceptance_prob(&self, prefix: &[u32]) -> f64 {
        self.draws(prefix, "head").uniform()
    }

    /// Builds the row of a draft step that has read the prefix.
    fn draft_row(&self, (step, row): (&DraftStep<'_>, usize), prefix: &[u32]) -> DraftRow {
        let prob = || self.acceptance_prob(prefix);
        let predicted = match self.head {
            HeadTiming::AfterRead if step.needs.acceptance_prob => {
                Some(HeadEstimate::OfRead(prob()))
            }
            HeadTiming::BeforeDraw if step.needs.acceptance_prob => {
                Some(HeadEstimate::OfDrawn(prob()))
            }
            _ => None,
        };
        DraftRow::new((step, row), self.row(prefix), predicted)
    }

    /// Returns a look-ahead head's prediction for a candidate drawn after the prefix; `None` for the other kind of
    /// head.
    fn predict(&self, prefix: &[u32], candidate: u32) -> Option<f64> {
        let predicts = self.head == HeadTiming::AtDraw;
        predicts.then(|| self.acceptance_prob(&[prefix, &[candidate]].concat()))
    }

    pub(super) fn row(&self, prefix: &[u32]) -> Vec<f32> {
        let mut draws = self.draws(prefix, "row");
        // The first token is always possible, so every row is a distribution.
        (0..self.vocab_size)
            .map(|id| {
                let logit = (draws.uniform() * 4.0 - 2.0) as f32;
                let is_never = id > 0 && draws.bernoulli(self.never);
                match id as u32 >= self.num_drawn {
                    // The logit of tokens outside a draft vocabulary.
                    true => -1e30,
                    false if is_never => f32::NEG_INFINITY,
                    false => logit,
                }
            })
            .collect()
    }
}

impl Target for Table {
    fn num_slots(&self) -> usize {
        NUM_SLOTS
    }

    fn begin(&mut self, _slot: usize, _prompt: &[u32]) -> Result<()> {
        Ok(())
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        let mut rows = Vec::new();
        for one in batch {
            let num_standing = one.tokens.len() - one.proposal.len();
            if one.proposal.is_chain() {
                let ends = num_standing..=one.tokens.len();
                rows.extend(ends.flat_map(|end| self.row(&one.tokens[..end])));
                continue;
            }
            let mut read = Read::default();
            read.advance(one.tokens, &parents(one.proposal));
            rows.extend(read.rows(self, one.proposal.num_rows()));
        }
        Ok(Logits::new(rows, self.vocab_size))
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.context
    }
}

/// The tokens that a model has read. The last ones may form a tree.
#[derive(Clone, Default)]
struct Read {
    tokens: Vec<u32>,
    /// The parents of the last tokens. The tokens before them are a chain.
    parents: Vec<Option<usize>>,
}

impl Read {
    /// Reads those of `tokens` that are new. `parents` gives the tree that the last tokens form.
    fn advance(&mut self, tokens: &[u32], parents: &[Option<usize>]) {
        self.tokens.extend_from_slice(&tokens[self.tokens.len()..]);
        self.parents = parents.to_vec();
    }

    /// Returns the tokens on the path that ends with the token at position `at`.
    fn prefix(&self, at: usize) -> Vec<u32> {
        let num_standing = self.tokens.len() - self.parents.len();
        let Some(node) = at.checked_sub(num_standing) else {
            return self.tokens[..=at].to_vec();
        };
        let mut path = vec![node];
        while let Some(parent) = self.parents[path[path.len() - 1]] {
            path.push(parent);
        }
        let nodes = path.iter().rev().map(|node| self.tokens[num_standing + node]);
        self.tokens[..num_standing].iter().copied().chain(nodes).collect()
    }

    /// Iterates over the paths that end with each of the last `num` tokens.
    fn last_prefixes(&self, num: usize) -> impl Iterator<Item = Vec<u32>> {
        let len = self.tokens.len();
        (len - num..len).map(|at| self.prefix(at))
    }

    /// Returns a table's rows after each of the last `num` tokens, laid end to end.
    fn rows(&self, table: &Table, num: usize) -> Vec<f32> {
        self.last_prefixes(num).flat_map(|prefix| table.row(&prefix)).collect()
    }

    /// Keeps the first `num_standing` tokens and the nodes on `path`, if they were read.
    fn keep(&mut self, num_standing: usize, path: &[usize]) {
        let read = path.iter().filter_map(|node| self.tokens.get(num_standing + node));
        let kept: Vec<u32> = read.copied().collect();
        self.tokens.truncate(num_standing);
        self.tokens.extend(kept);
        self.parents.clear();
    }
}

fn parents(proposal: &Proposal) -> Vec<Option<usize>> {
    proposal.nodes().iter().map(|node| node.parent).collect()
}

/// A table as a drafter.
#[derive(Clone)]
pub(super) struct Drafting {
    pub(super) table: Table,
    /// Whether its rows depend on the number of candidates before them in the round.
    pub(super) by_round: bool,
    /// Whether one forward computes the rows of a whole round.
    pub(super) at_once: bool,
    /// The paths before each row of the last step, by slot.
    read: [Vec<Vec<u32>>; NUM_SLOTS],
}

impl From<&Table> for Drafting {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), by_round: false, at_once: false, read: Default::default() }
    }
}

impl<T> Drafter<T> for Drafting {
    fn begin(&mut self, _target: &mut T, _slot: usize, _prompt: &[u32]) -> Result<()> {
        Ok(())
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.table.context
    }
}

impl<T> StepDrafter<T> for Drafting {
    fn id(&self) -> DrafterId {
        DrafterId::DRAFT
    }

    fn draft(&mut self, _target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        for step in steps {
            let mut read = Read::default();
            read.advance(step.tokens, step.parents);
            self.read[step.slot] = read.last_prefixes(step.num_rows).collect();
        }
        let rows = steps.iter().flat_map(|step| step.rows().zip(&self.read[step.slot]));
        let row_of = |(row, prefix): ((&DraftStep<'_>, usize), &Vec<u32>)| {
            let depth = if self.by_round { row.0.num_candidates as u64 } else { 0 };
            let table = Table { seed: self.table.seed + 10_000 * depth, ..self.table.clone() };
            let drafted = table.draft_row(row, prefix);
            match self.at_once && row.0.num_candidates > 0 {
                true => drafted.without_forward(),
                false => drafted,
            }
        };
        Ok(rows.map(row_of).collect())
    }

    fn drafts_by_round(&self) -> bool {
        self.by_round
    }

    fn predict_acceptance(
        &mut self,
        (slot, row): (usize, usize),
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        Ok(self.table.predict(&self.read[slot][row], candidate))
    }
}

/// A target that its drafter advances, as a self-draft does. Its rows depend on what it has read in a
/// slot and not on the tokens of the call, so a missing rollback or a confused slot would change the
/// distribution.
#[derive(Clone)]
pub(super) struct Advanced {
    pub(super) table: Table,
    /// The tokens that its shallow layers have read.
    read: [Read; NUM_SLOTS],
    /// The number of tokens that its deep layers have read.
    num_verified: [usize; NUM_SLOTS],
}

impl From<&Table> for Advanced {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Default::default(), num_verified: [0; NUM_SLOTS] }
    }
}

impl Target for Advanced {
    fn num_slots(&self) -> usize {
        NUM_SLOTS
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.read[slot] = Read::default();
        self.read[slot].advance(&prompt[..prompt.len() - 1], &[]);
        self.num_verified[slot] = prompt.len() - 1;
        Ok(())
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        let mut rows = Vec::new();
        for &Verification { slot, tokens, proposal } in batch {
            let (read, num_rows) = (&mut self.read[slot], proposal.num_rows());
            read.advance(tokens, &parents(proposal));
            let num_unread = read.tokens.len() - self.num_verified[slot];
            assert_eq!(num_rows, num_unread, "each position is verified once");
            self.num_verified[slot] = read.tokens.len();
            rows.extend(read.rows(&self.table, num_rows));
        }
        Ok(Logits::new(rows, self.table.vocab_size))
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.read[slot].keep(num_standing, path);
        self.num_verified[slot] = self.num_verified[slot].min(self.read[slot].tokens.len());
    }

    fn context(&self) -> usize {
        self.table.context
    }
}

/// A drafter that reads only what an [`Advanced`] target has read.
#[derive(Clone)]
pub(super) struct Advancing {
    pub(super) table: Table,
    read: [Read; NUM_SLOTS],
    /// The number of rows of the last step in each slot.
    num_rows: [usize; NUM_SLOTS],
}

impl From<&Table> for Advancing {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Default::default(), num_rows: [0; NUM_SLOTS] }
    }
}

impl Drafter<Advanced> for Advancing {
    fn begin(&mut self, target: &mut Advanced, slot: usize, _prompt: &[u32]) -> Result<()> {
        self.read[slot].clone_from(&target.read[slot]);
        Ok(())
    }

    fn propose(&mut self, target: &mut Advanced, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.read[slot].keep(num_standing, path);
    }

    fn context(&self) -> usize {
        self.table.context
    }
}

impl StepDrafter<Advanced> for Advancing {
    fn id(&self) -> DrafterId {
        DrafterId::named("exit1")
    }

    fn draft(&mut self, target: &mut Advanced, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        for step in steps {
            let DraftStep { slot, tokens, parents, .. } = *step;
            target.read[slot].advance(tokens, parents);
            self.read[slot].advance(&target.read[slot].tokens, parents);
            self.num_rows[slot] = step.num_rows;
        }
        let rows = steps
            .iter()
            .flat_map(|step| step.rows().zip(self.read[step.slot].last_prefixes(step.num_rows)));
        Ok(rows.map(|(row, prefix)| self.table.draft_row(row, &prefix)).collect())
    }

    fn predict_acceptance(
        &mut self,
        (slot, row): (usize, usize),
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        // The step's rows come last, because nothing has been read since.
        let read = &self.read[slot];
        let num_rows = self.num_rows[slot];
        let prefix = read.prefix(read.tokens.len() - num_rows + row);
        Ok(self.table.predict(&prefix, candidate))
    }
}

/// A stop string, as tokens. It may begin in the prompt.
#[derive(Debug)]
pub(super) struct EndsWith(pub(super) &'static [u32]);

impl TextEnd for EndsWith {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.0.iter().rev().copied().eq(last_first.take(self.0.len()))
    }
}

/// A drafter that cannot be cloned and is built again for each run.
pub(super) struct Anew<'c, D> {
    case: &'c Case,
    init: fn(&Case) -> D,
    drafter: D,
}

impl<'c, D> Anew<'c, D> {
    pub(super) fn new(case: &'c Case, init: fn(&Case) -> D) -> Self {
        Self { case, init, drafter: init(case) }
    }
}

impl<D> Clone for Anew<'_, D> {
    fn clone(&self) -> Self {
        Self::new(self.case, self.init)
    }
}

impl<T, D: Drafter<T>> Drafter<T> for Anew<'_, D> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.drafter.begin(target, slot, prompt)
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        self.drafter.propose(target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.drafter.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.drafter.context()
    }
}

/// Stops after the drafted prefixes whose bit is set.
#[derive(Clone)]
pub(super) struct StopMap {
    pub(super) vocab_size: usize,
    pub(super) depth: usize,
    pub(super) bits: u64,
    pub(super) asked: Asked,
}

/// When a stop map decides, and whether it skips draft phases.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Asked {
    /// After a candidate is drawn.
    AfterDraw,
    /// Before the next candidate is drawn.
    BeforeDraw,
    /// After a draw, and every second round has no candidates.
    EverySecondRound { skips: bool },
}

impl StopMap {
    /// Counts the prefixes after which the map decides: those shorter than `depth`.
    pub(super) fn num_prefixes(vocab_size: usize, depth: usize) -> usize {
        (1..depth).map(|len| vocab_size.pow(len as u32)).sum()
    }

    /// Returns the number of a prefix: prefixes are in order of length, then in lexicographic order.
    pub(super) fn index(&self, prefix: &[u32]) -> usize {
        let shorter = Self::num_prefixes(self.vocab_size, prefix.len());
        let order = prefix.iter().fold(0, |number, id| number * self.vocab_size + *id as usize);
        shorter + order
    }

    pub(super) fn new(vocab_size: usize, depth: usize, bits: u64) -> Self {
        Self { vocab_size, depth, bits, asked: Asked::AfterDraw }
    }

    fn is_set(&self, candidates: &[u32]) -> bool {
        let decides = !candidates.is_empty() && candidates.len() < self.depth;
        decides && (self.bits >> self.index(candidates)) & 1 == 1
    }
}

impl StopRule for StopMap {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: self.depth }
    }

    fn skips_drafting(&mut self) -> bool {
        self.asked == Asked::EverySecondRound { skips: true }
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        self.asked != Asked::BeforeDraw && self.is_set(candidates)
    }

    fn stops_before_draw(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        self.asked == Asked::BeforeDraw && self.is_set(candidates)
    }

    fn end_round(&mut self, _end: RoundEnd) {
        if let Asked::EverySecondRound { skips } = &mut self.asked {
            *skips = !*skips;
        }
    }
}

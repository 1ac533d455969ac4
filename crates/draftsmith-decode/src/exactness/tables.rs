//! Models, drafters and stop rules that are tables: what the shipped loop is enumerated over.

use draftsmith_theory::{
    Bounds, DraftSignals, DrafterId, Draws, HeadEstimate, HeadTiming, RoundEnd, SeededDraws,
    SignalNeeds, StopRule,
};

use crate::drafter::{DraftRound, DraftStep, Drafted, Drafter, StepDrafter, propose_chain};
use crate::error::DecodeError;
use crate::logits::Logits;
use crate::target::{Target, Verification, committed_len};

/// Sequences that tables read side by side.
pub(super) const NUM_SLOTS: usize = 2;

/// A model that is a function of the whole prefix: pseudo-random logits, some of them −∞.
#[derive(Clone)]
pub(super) struct Table {
    pub(super) vocab_size: usize,
    pub(super) seed: u64,
    pub(super) context: usize,
    /// When its acceptance head predicts, as a draft.
    pub(super) head: HeadTiming,
    /// The tokens that it draws, as a draft of a small vocabulary: those below.
    pub(super) num_drawn: u32,
}

impl Table {
    fn draws(&self, prefix: &[u32], purpose: &str) -> SeededDraws {
        let name: Vec<u8> = prefix.iter().map(|id| b'a' + *id as u8).collect();
        SeededDraws::new(self.seed, &[&String::from_utf8_lossy(&name), purpose])
    }

    /// What an acceptance head might predict, having read the prefix.
    fn acceptance_prob(&self, prefix: &[u32]) -> f64 {
        self.draws(prefix, "head").uniform()
    }

    /// The signals of a draft forward that has read the prefix.
    fn signals(&self, prefix: &[u32], logits: &[f32], needs: SignalNeeds) -> DraftSignals {
        let predicts = needs.acceptance_prob && self.head == HeadTiming::AfterRead;
        let acceptance_prob = predicts.then(|| HeadEstimate::OfRead(self.acceptance_prob(prefix)));
        DraftSignals { acceptance_prob, ..needs.signals_of_logits(logits) }
    }

    /// What the head predicts for a candidate drawn behind the prefix.
    fn predict(&self, prefix: &[u32], candidate: u32) -> Option<f64> {
        let predicts = self.head == HeadTiming::AtDraw;
        predicts.then(|| self.acceptance_prob(&[prefix, &[candidate]].concat()))
    }

    /// The rows after each of the last `num_rows` tokens.
    fn rows(&self, tokens: &[u32], num_rows: usize) -> Vec<f32> {
        let first = tokens.len() - num_rows + 1;
        (first..=tokens.len()).flat_map(|end| self.row(&tokens[..end])).collect()
    }

    pub(super) fn row(&self, prefix: &[u32]) -> Vec<f32> {
        let mut draws = self.draws(prefix, "row");
        // The first token is always possible, so that no row is empty.
        (0..self.vocab_size)
            .map(|id| {
                let logit = (draws.uniform() * 4.0 - 2.0) as f32;
                let is_never = id > 0 && draws.bernoulli(0.2);
                match id as u32 >= self.num_drawn {
                    // What models give to the tokens outside a draft vocabulary.
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

    fn begin(&mut self, _slot: usize, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError> {
        let rows = batch.iter().flat_map(|one| self.rows(one.tokens, one.proposal.num_rows()));
        Ok(Logits::new(rows.collect(), self.vocab_size))
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.context
    }
}

/// A table as a drafter.
#[derive(Clone)]
pub(super) struct Drafting {
    pub(super) table: Table,
    /// What it has read last in each slot.
    read: [Vec<u32>; NUM_SLOTS],
}

impl From<&Table> for Drafting {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Default::default() }
    }
}

impl<T> Drafter<T> for Drafting {
    fn begin(&mut self, _target: &mut T, _slot: usize, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.table.context
    }
}

impl<T> StepDrafter<T> for Drafting {
    fn id(&self) -> DrafterId {
        DrafterId::Draft
    }

    fn draft(
        &mut self,
        _target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError> {
        let step = |&DraftStep { slot, tokens, needs, .. }: &DraftStep<'_>| {
            self.read[slot] = tokens.to_vec();
            let logits = self.table.row(tokens);
            let signals = self.table.signals(tokens, &logits, needs);
            Drafted { logits, signals, num_forwards: 1 }
        };
        Ok(steps.iter().map(step).collect())
    }

    fn predict_acceptance(
        &mut self,
        _target: &mut T,
        slot: usize,
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        Ok(self.table.predict(&self.read[slot], candidate))
    }
}

/// A target that its drafter advances, as a self-draft does. Its rows follow from what it has read
/// itself in a slot, not from the tokens it is handed: were either side not rolled back, or a slot
/// taken for another, the distribution would show it.
#[derive(Clone)]
pub(super) struct Advanced {
    pub(super) table: Table,
    /// What its shallow layers have read.
    read: [Vec<u32>; NUM_SLOTS],
    /// How much of that its deep layers have read.
    num_verified: [usize; NUM_SLOTS],
}

impl From<&Table> for Advanced {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Default::default(), num_verified: [0; NUM_SLOTS] }
    }
}

impl Advanced {
    fn advance(&mut self, slot: usize, tokens: &[u32]) {
        let read = &mut self.read[slot];
        read.extend_from_slice(&tokens[read.len()..]);
    }
}

impl Target for Advanced {
    fn num_slots(&self) -> usize {
        NUM_SLOTS
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.read[slot] = prompt[..prompt.len() - 1].to_vec();
        self.num_verified[slot] = self.read[slot].len();
        Ok(())
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError> {
        let mut rows = Vec::new();
        for &Verification { slot, tokens, proposal } in batch {
            self.advance(slot, tokens);
            let (read, num_rows) = (&self.read[slot], proposal.num_rows());
            assert_eq!(num_rows, read.len() - self.num_verified[slot], "each position once");
            self.num_verified[slot] = read.len();
            rows.extend(self.table.rows(read, num_rows));
        }
        Ok(Logits::new(rows, self.table.vocab_size))
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let len = committed_len(num_standing, path);
        self.read[slot].truncate(len);
        self.num_verified[slot] = self.num_verified[slot].min(len);
    }

    fn context(&self) -> usize {
        self.table.context
    }
}

/// A drafter that reads what an [`Advanced`] target has read, and nothing else.
#[derive(Clone)]
pub(super) struct Advancing {
    pub(super) table: Table,
    read: [Vec<u32>; NUM_SLOTS],
}

impl From<&Table> for Advancing {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Default::default() }
    }
}

impl Drafter<Advanced> for Advancing {
    fn begin(
        &mut self,
        target: &mut Advanced,
        slot: usize,
        _prompt: &[u32],
    ) -> Result<(), DecodeError> {
        self.read[slot].clone_from(&target.read[slot]);
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut Advanced,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.read[slot].truncate(committed_len(num_standing, path));
    }

    fn context(&self) -> usize {
        self.table.context
    }
}

impl StepDrafter<Advanced> for Advancing {
    fn id(&self) -> DrafterId {
        DrafterId::SelfDraft { exit_layer: 1 }
    }

    fn draft(
        &mut self,
        target: &mut Advanced,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError> {
        let step = |&DraftStep { slot, tokens, needs, .. }: &DraftStep<'_>| {
            target.advance(slot, tokens);
            let read = &mut self.read[slot];
            read.extend_from_slice(&target.read[slot][read.len()..]);
            let logits = self.table.row(read);
            let signals = self.table.signals(read, &logits, needs);
            Drafted { logits, signals, num_forwards: 1 }
        };
        Ok(steps.iter().map(step).collect())
    }

    fn predict_acceptance(
        &mut self,
        _target: &mut Advanced,
        slot: usize,
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        Ok(self.table.predict(&self.read[slot], candidate))
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

/// When a stop map is asked, and whether it drafts at all.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Asked {
    /// After a candidate is drawn.
    AfterDraw,
    /// Before the next one is.
    BeforeDraw,
    /// As after a draw, but every second round has no candidates.
    EverySecondRound { skips: bool },
}

impl StopMap {
    /// The number of prefixes at which there is something to decide: those shorter than `depth`.
    pub(super) fn num_prefixes(vocab_size: usize, depth: usize) -> usize {
        (1..depth).map(|len| vocab_size.pow(len as u32)).sum()
    }

    /// Prefixes are numbered by length, then in lexicographic order.
    pub(super) fn index(&self, prefix: &[u32]) -> usize {
        let shorter = Self::num_prefixes(self.vocab_size, prefix.len());
        let order = prefix.iter().fold(0, |number, id| number * self.vocab_size + *id as usize);
        shorter + order
    }
}

impl StopMap {
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

//! Models, drafters and stop rules that are tables: what the shipped loop is enumerated over.

use draftsmith_theory::{
    Bounds, DraftSignals, Draws, HeadEstimate, HeadTiming, RoundEnd, SeededDraws, SignalNeeds,
    StopRule,
};

use crate::error::DecodeError;
use crate::round::{Drafted, Drafter, Target};
use crate::session::Logits;

/// A model that is a function of the whole prefix: pseudo-random logits, some of them −∞.
#[derive(Clone)]
pub(super) struct Table {
    pub(super) vocab_size: usize,
    pub(super) seed: u64,
    pub(super) context: usize,
    /// When its acceptance head speaks, as a draft.
    pub(super) head: HeadTiming,
}

impl Table {
    fn draws(&self, prefix: &[u32], purpose: &str) -> SeededDraws {
        let name: Vec<u8> = prefix.iter().map(|id| b'a' + *id as u8).collect();
        SeededDraws::new(self.seed, &[&String::from_utf8_lossy(&name), purpose])
    }

    /// What an acceptance head might say, having read the prefix.
    fn acceptance_prob(&self, prefix: &[u32]) -> f64 {
        self.draws(prefix, "head").uniform()
    }

    /// The signals of a draft forward that has read the prefix.
    fn signals(&self, prefix: &[u32], logits: &[f32], needs: SignalNeeds) -> DraftSignals {
        let speaks = needs.acceptance_prob && self.head == HeadTiming::AfterRead;
        let acceptance_prob = speaks.then(|| HeadEstimate::OfRead(self.acceptance_prob(prefix)));
        DraftSignals { acceptance_prob, ..needs.signals_of_logits(logits) }
    }

    /// What the head says of a candidate drawn behind the prefix.
    fn predict_acceptance(&self, prefix: &[u32], candidate: u32) -> Option<f64> {
        let speaks = self.head == HeadTiming::AtDraw;
        speaks.then(|| self.acceptance_prob(&[prefix, &[candidate]].concat()))
    }

    pub(super) fn row(&self, prefix: &[u32]) -> Vec<f32> {
        let mut draws = self.draws(prefix, "row");
        // The first token is always possible, so that no row is empty.
        (0..self.vocab_size)
            .map(|id| {
                let logit = (draws.uniform() * 4.0 - 2.0) as f32;
                if id > 0 && draws.bernoulli(0.2) { f32::NEG_INFINITY } else { logit }
            })
            .collect()
    }
}

impl Target for Table {
    fn begin(&mut self, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn logits(&mut self, tokens: &[u32], num_rows: usize) -> Result<Logits, DecodeError> {
        let first = tokens.len() - num_rows + 1;
        let rows = (first..=tokens.len()).flat_map(|end| self.row(&tokens[..end])).collect();
        Ok(Logits::new(rows, self.vocab_size))
    }

    fn roll_back(&mut self, _len: usize) {}

    fn context(&self) -> usize {
        self.context
    }
}

/// A table as a drafter.
#[derive(Clone)]
pub(super) struct Drafting {
    pub(super) table: Table,
    /// What it has read last.
    read: Vec<u32>,
}

impl From<&Table> for Drafting {
    fn from(table: &Table) -> Self {
        Self { table: table.clone(), read: Vec::new() }
    }
}

impl<T> Drafter<T> for Drafting {
    fn begin(&mut self, _target: &mut T, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn draft(
        &mut self,
        _target: &mut T,
        tokens: &[u32],
        _num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        self.read = tokens.to_vec();
        let logits = self.table.row(tokens);
        let signals = self.table.signals(tokens, &logits, needs);
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    fn predict_acceptance(
        &mut self,
        _target: &mut T,
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        Ok(self.table.predict_acceptance(&self.read, candidate))
    }

    fn roll_back(&mut self, _len: usize) {}

    fn context(&self) -> usize {
        self.table.context
    }
}

/// A target that its drafter advances, as a self-draft does. Its rows follow from what it has read
/// itself, not from the tokens it is handed: were either side not rolled back, the law would show
/// it.
#[derive(Clone)]
pub(super) struct Advanced {
    pub(super) table: Table,
    /// What its shallow layers have read.
    pub(super) read: Vec<u32>,
    /// How much of that its deep layers have read.
    pub(super) num_verified: usize,
}

impl Advanced {
    fn advance(&mut self, tokens: &[u32]) {
        self.read.extend_from_slice(&tokens[self.read.len()..]);
    }
}

impl Target for Advanced {
    fn begin(&mut self, prompt: &[u32]) -> Result<(), DecodeError> {
        self.read = prompt[..prompt.len() - 1].to_vec();
        self.num_verified = self.read.len();
        Ok(())
    }

    fn logits(&mut self, tokens: &[u32], num_rows: usize) -> Result<Logits, DecodeError> {
        self.advance(tokens);
        assert_eq!(num_rows, self.read.len() - self.num_verified, "each position once");
        self.num_verified = self.read.len();
        self.table.logits(&self.read, num_rows)
    }

    fn roll_back(&mut self, len: usize) {
        self.read.truncate(len);
        self.num_verified = self.num_verified.min(len);
    }

    fn context(&self) -> usize {
        self.table.context
    }
}

/// A drafter that reads what an [`Advanced`] target has read, and nothing else.
#[derive(Clone)]
pub(super) struct Advancing {
    pub(super) table: Table,
    pub(super) read: Vec<u32>,
}

impl Drafter<Advanced> for Advancing {
    fn begin(&mut self, target: &mut Advanced, _prompt: &[u32]) -> Result<(), DecodeError> {
        self.read.clone_from(&target.read);
        Ok(())
    }

    fn draft(
        &mut self,
        target: &mut Advanced,
        tokens: &[u32],
        _num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        target.advance(tokens);
        self.read.extend_from_slice(&target.read[self.read.len()..]);
        let logits = self.table.row(&self.read);
        let signals = self.table.signals(&self.read, &logits, needs);
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    fn predict_acceptance(
        &mut self,
        _target: &mut Advanced,
        _logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        Ok(self.table.predict_acceptance(&self.read, candidate))
    }

    fn roll_back(&mut self, len: usize) {
        self.read.truncate(len);
    }

    fn context(&self) -> usize {
        self.table.context
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

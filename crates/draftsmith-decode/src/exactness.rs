//! The proof that speculative output is the target's: the shipped loop, run over probability
//! tables, enumerated over every draw and every stop map.
//!
//! A stop map sends each drafted prefix to stop or continue. For vocabularies of 2 and 3 all maps
//! are run. For a vocabulary of 4 at depth 3 there are 2^20, but the output's law is a sum over
//! the first candidate y₁ of terms that depend on the map only through the prefixes that begin
//! with y₁; so it is enough that the law is right whenever one branch has any of its 2^5 maps and
//! the others go on to the bound: every other map's law is a sum of terms met there.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use draftsmith_theory::{
    Bounds, ConfidenceThreshold, Decoding, DraftSignals, Draws, Sampling, SeededDraws, SignalNeeds,
    StopRule, enumerate, law,
};

use crate::error::DecodeError;
use crate::round::{Drafted, Drafter, Limits, Target, decode_plain, decode_speculative};
use crate::session::Logits;

/// Rounding of sums of some thousand products of f64.
const TOLERANCE: f64 = 1e-12;

/// A model that is a function of the whole prefix: pseudo-random logits, some of them −∞.
#[derive(Clone)]
struct Table {
    vocab_size: usize,
    seed: u64,
    context: usize,
}

impl Table {
    fn row(&self, prefix: &[u32]) -> Vec<f32> {
        let name: Vec<u8> = prefix.iter().map(|id| b'a' + *id as u8).collect();
        let mut draws = SeededDraws::new(self.seed, &[&String::from_utf8_lossy(&name)]);
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

impl<T> Drafter<T> for Table {
    fn begin(&mut self, _target: &mut T, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn draft(
        &mut self,
        _target: &mut T,
        tokens: &[u32],
        _num_candidates: usize,
        _needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let signals = DraftSignals::default();
        Ok(Drafted { logits: self.row(tokens), signals, num_forwards: 1 })
    }

    fn roll_back(&mut self, _len: usize) {}

    fn context(&self) -> usize {
        self.context
    }
}

/// A target that its drafter advances, as a self-draft does. Its rows follow from what it has read
/// itself, not from the tokens it is handed: were either side not rolled back, the law would show
/// it.
#[derive(Clone)]
struct Advanced {
    table: Table,
    /// What its shallow layers have read.
    read: Vec<u32>,
    /// How much of that its deep layers have read.
    num_verified: usize,
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
struct Advancing {
    table: Table,
    read: Vec<u32>,
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
        let signals = needs.signals_of_logits(&logits);
        Ok(Drafted { logits, signals, num_forwards: 1 })
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
struct StopMap {
    vocab_size: usize,
    depth: usize,
    bits: u64,
}

impl StopMap {
    /// The number of prefixes at which there is something to decide: those shorter than `depth`.
    fn num_prefixes(vocab_size: usize, depth: usize) -> usize {
        (1..depth).map(|len| vocab_size.pow(len as u32)).sum()
    }

    /// Prefixes are numbered by length, then in lexicographic order.
    fn index(&self, prefix: &[u32]) -> usize {
        let shorter = Self::num_prefixes(self.vocab_size, prefix.len());
        let order = prefix.iter().fold(0, |number, id| number * self.vocab_size + *id as usize);
        shorter + order
    }
}

impl StopRule for StopMap {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: self.depth }
    }

    fn begin_round(&mut self) {}

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() < self.depth && (self.bits >> self.index(candidates)) & 1 == 1
    }
}

struct Case {
    target: Table,
    draft: Table,
    sampling: Sampling,
    limits: Limits,
}

impl Case {
    fn new(vocab_size: usize, max_new_tokens: usize, eos: Option<u32>, seed: u64) -> Self {
        let table = |seed| Table { vocab_size, seed, context: 64 };
        Self {
            target: table(2 * seed),
            draft: table(2 * seed + 1),
            sampling: Sampling::default(),
            limits: Limits { max_new_tokens, eos_token_ids: eos.into_iter().collect() },
        }
    }

    /// The law of the target alone, multiplied out without any decoding loop.
    fn target_law(&self) -> BTreeMap<Vec<u32>, f64> {
        let mut law = BTreeMap::new();
        let mut open = vec![(vec![0], 1.0)];
        while let Some((tokens, prob)) = open.pop() {
            let new = &tokens[1..];
            let ended = new.last().is_some_and(|id| self.limits.eos_token_ids.contains(id));
            if ended || new.len() == self.limits.max_new_tokens {
                law.insert(new.to_vec(), prob);
                continue;
            }
            let probs = self.sampling.probs(&self.target.row(&tokens));
            for (id, p) in probs.into_iter().enumerate().filter(|(_, p)| *p > 0.0) {
                let mut longer = tokens.clone();
                longer.push(id as u32);
                open.push((longer, prob * p));
            }
        }
        law
    }

    fn speculative_law(&self, rule: &(impl StopRule + Clone)) -> BTreeMap<Vec<u32>, f64> {
        self.law_of(&self.target, &self.draft, rule)
    }

    /// The same with the tables as a target and the self-draft that advances it.
    fn self_speculative_law(&self, rule: &(impl StopRule + Clone)) -> BTreeMap<Vec<u32>, f64> {
        let target = Advanced { table: self.target.clone(), read: vec![], num_verified: 0 };
        self.law_of(&target, &Advancing { table: self.draft.clone(), read: vec![] }, rule)
    }

    fn law_of<T: Target + Clone, D: Drafter<T> + Clone>(
        &self,
        target: &T,
        drafter: &D,
        rule: &(impl StopRule + Clone),
    ) -> BTreeMap<Vec<u32>, f64> {
        let decoding = Decoding::Sampled(self.sampling);
        law(enumerate(|draws| {
            let generation = decode_speculative(
                &mut target.clone(),
                &mut drafter.clone(),
                &mut rule.clone(),
                &decoding,
                &[0],
                &self.limits,
                draws,
                &mut |_| ControlFlow::Continue(()),
            )
            .expect("tables do not fail");
            generation.trace.counts().check_forward_identity().expect("a draft forward each");
            generation.token_ids
        }))
    }
}

fn assert_same_law(found: &BTreeMap<Vec<u32>, f64>, expected: &BTreeMap<Vec<u32>, f64>) {
    for tokens in found.keys().chain(expected.keys()) {
        let [a, b] = [found, expected].map(|law| law.get(tokens).copied().unwrap_or(0.0));
        assert!((a - b).abs() <= TOLERANCE, "{tokens:?}: {a} for {b}");
    }
}

#[test]
fn every_stop_map_leaves_the_targets_law_at_vocabularies_of_two_and_three() {
    for (vocab_size, depth, max_new_tokens) in
        [(2, 1, 3), (2, 2, 4), (2, 3, 5), (3, 1, 3), (3, 2, 4), (3, 3, 4)]
    {
        let num_maps = 1_u64 << StopMap::num_prefixes(vocab_size, depth);
        // Fewer tables where there are many maps.
        let num_seeds = if num_maps > 1000 { 1 } else { 4 };
        for seed in 0..num_seeds {
            for eos in [None, Some(1)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, seed);
                let expected = case.target_law();
                for bits in 0..num_maps {
                    let rule = StopMap { vocab_size, depth, bits };
                    assert_same_law(&case.speculative_law(&rule), &expected);
                }
            }
        }
    }
}

#[test]
fn every_stop_map_leaves_the_targets_law_at_a_vocabulary_of_four() {
    let (vocab_size, depth) = (4_usize, 3);
    let case = Case::new(vocab_size, 4, Some(2), 7);
    let expected = case.target_law();
    for first in 0..vocab_size {
        for branch_map in 0..1_u64 << (1 + vocab_size) {
            let mut rule = StopMap { vocab_size, depth, bits: 0 };
            let first = first as u32;
            let mut prefixes = vec![vec![first]];
            prefixes.extend((0..vocab_size as u32).map(|second| vec![first, second]));
            for (bit, prefix) in prefixes.iter().enumerate() {
                rule.bits |= ((branch_map >> bit) & 1) << rule.index(prefix);
            }
            assert_same_law(&case.speculative_law(&rule), &expected);
        }
    }
}

#[test]
fn a_drafter_that_advances_the_target_leaves_its_law() {
    for (vocab_size, depth, max_new_tokens) in [(2, 3, 5), (3, 2, 4)] {
        for seed in 0..2 {
            for eos in [None, Some(1)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, 300 + seed);
                let expected = case.target_law();
                for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                    let rule = StopMap { vocab_size, depth, bits };
                    assert_same_law(&case.self_speculative_law(&rule), &expected);
                }
                for threshold in [0.4, 0.6, 0.8] {
                    let bounds = Bounds { min: 1, max: depth };
                    let rule = ConfidenceThreshold::new(threshold, bounds).expect("valid");
                    assert_same_law(&case.self_speculative_law(&rule), &expected);
                }
            }
        }
    }
}

#[test]
fn warped_distributions_stay_exact() {
    let samplings = [
        Sampling { temperature: 0.7, top_p: 0.8, top_k: None },
        Sampling { temperature: 1.3, top_p: 1.0, top_k: Some(2) },
    ];
    for sampling in samplings {
        for seed in 0..4 {
            let case = Case { sampling, ..Case::new(3, 4, Some(1), 100 + seed) };
            for bits in [0, 1, 0b1010, 0b111] {
                let rule = StopMap { vocab_size: 3, depth: 3, bits };
                assert_same_law(&case.speculative_law(&rule), &case.target_law());
            }
        }
    }
}

#[test]
fn plain_decoding_has_the_targets_law() {
    for eos in [None, Some(1)] {
        let case = Case::new(3, 4, eos, 11);
        let decoding = Decoding::Sampled(case.sampling);
        let found = law(enumerate(|draws| {
            decode_plain(
                &mut case.target.clone(),
                &decoding,
                &[0],
                &case.limits,
                draws,
                &mut |_| ControlFlow::Continue(()),
            )
            .expect("tables do not fail")
            .token_ids
        }));
        assert_same_law(&found, &case.target_law());
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_for_every_stop_map_limit_and_context() {
    let mut draws = SeededDraws::new(0, &["unused"]);
    for seed in 0..40 {
        for max_new_tokens in [0, 1, 2, 5, 9] {
            for context in [1 + 4, 64] {
                let mut case = Case::new(3, max_new_tokens, Some(2), 200 + seed);
                case.target.context = context;
                let plain = decode_plain(
                    &mut case.target.clone(),
                    &Decoding::Greedy,
                    &[0],
                    &case.limits,
                    &mut draws,
                    &mut |_| ControlFlow::Continue(()),
                )
                .expect("tables do not fail");
                for bits in (0..1 << 12).step_by(97) {
                    let speculative = decode_speculative(
                        &mut case.target.clone(),
                        &mut case.draft.clone(),
                        &mut StopMap { vocab_size: 3, depth: 3, bits },
                        &Decoding::Greedy,
                        &[0],
                        &case.limits,
                        &mut draws,
                        &mut |_| ControlFlow::Continue(()),
                    )
                    .expect("tables do not fail");
                    assert_eq!(speculative.token_ids, plain.token_ids);
                    assert_eq!(speculative.finish, plain.finish);
                }
            }
        }
    }
}

//! Traces of decoding, round by round, and the rates that reports show.
//!
//! The decoding loop fills a `Trace`; nothing here reads a clock. All rates refer to kept tokens.
//! Tokens cut by an end-of-sequence token or the token limit count as discarded.

use std::iter::Sum;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{DrafterId, Forwards, Result, RoundEnd, TheoryError};

/// One draft phase and one target forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Round {
    /// The number of candidates drafted and verified; 0 if the target decoded by itself.
    pub num_drafted: usize,
    /// The number of candidates on the longest path. In a chain these are all candidates.
    pub depth: usize,
    /// The number of draft forwards of each drafter. A separate draft model takes one per
    /// candidate. So does a self-draft, whose forward runs the target's shallow layers, the adapter
    /// and the LM head. A look-up counts one per candidate, at no cost.
    pub forwards: Forwards,
    /// The number of accepted candidates, up to the end of the text.
    pub num_accepted: usize,
    /// The time of the draft phase.
    pub draft_time: Duration,
    /// The time of the target forward and verification.
    pub verify_time: Duration,
}

impl Round {
    /// Counts the round's tokens before any cut: accepted candidates and the target's own token.
    pub fn num_tokens(&self) -> usize {
        self.num_accepted + 1
    }

    /// Sums the draft forwards of all drafters.
    pub fn num_draft_forwards(&self) -> usize {
        self.forwards.total()
    }
}

/// The rounds of one generation, or of several merged ones.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Trace {
    /// The rounds, in order.
    pub rounds: Vec<Round>,
    /// The number of new tokens kept, including the end-of-sequence token.
    pub num_tokens: usize,
    /// The time in which both models prefilled the prompt except its last token.
    pub prefill_time: Duration,
}

impl Trace {
    /// Merges generations: joins their rounds and sums their tokens and prefill times.
    pub fn merge<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Trace {
        let mut merged = Trace::default();
        for trace in traces {
            merged.rounds.extend_from_slice(&trace.rounds);
            merged.num_tokens += trace.num_tokens;
            merged.prefill_time += trace.prefill_time;
        }
        merged
    }

    /// Returns the first rounds of one generation, up to the round that reaches `num_tokens`
    /// tokens. None if the generation is shorter.
    pub fn first(&self, num_tokens: usize) -> Option<Trace> {
        if self.num_tokens < num_tokens {
            return None;
        }
        let mut num_yielded = 0;
        let rounds = self.rounds.iter().take_while(|round| {
            let is_before = num_yielded < num_tokens;
            num_yielded += if is_before { round.num_tokens() } else { 0 };
            is_before
        });
        let rounds = rounds.copied().collect();
        let num_tokens = num_yielded.min(self.num_tokens);
        Some(Trace { rounds, num_tokens, prefill_time: self.prefill_time })
    }

    /// Counts tokens, candidates and forwards, from which rates are computed.
    ///
    /// # Panics
    /// If a round accepts more than it drafted, or more tokens were kept than the rounds yield.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for round in &self.rounds {
            let Round { num_drafted, num_accepted, .. } = *round;
            counts.add_round(RoundCounts {
                num_drafted,
                num_draft_forwards: round.num_draft_forwards(),
                num_accepted,
                num_kept: round.num_tokens(),
            });
        }
        let num_yielded = std::mem::replace(&mut counts.num_tokens, self.num_tokens);
        let num_cut = num_yielded.checked_sub(self.num_tokens);
        counts.num_discarded += num_cut.expect("every kept token was yielded by a round");
        counts
    }

    /// Computes CTAR(w), the consistent token acceptance rate (Kangaroo): the share of rounds that
    /// yield more than w = `num_tokens` tokens, before any cut. NaN without rounds.
    pub fn ctar(&self, num_tokens: usize) -> f64 {
        let num_longer = self.rounds.iter().filter(|round| round.num_tokens() > num_tokens).count();
        num_longer as f64 / self.rounds.len() as f64
    }

    /// Computes, for each of the first `num_positions` positions of a round, the probability that its
    /// candidate and all before it are accepted: the product of the accepted shares of candidates whose
    /// predecessors were accepted. Servers take these as synthetic acceptance rates. 0 from the first
    /// position without such candidates.
    pub fn unconditional_rates(&self, num_positions: usize) -> Vec<f64> {
        let mut rate = 1.0;
        let of_position = |position: usize| {
            let count = |least: usize| {
                let reach = |it: &&Round| it.depth >= position && it.num_accepted >= least;
                self.rounds.iter().filter(reach).count()
            };
            rate *= count(position) as f64 / count(position - 1).max(1) as f64;
            rate
        };
        (1..=num_positions).map(of_position).collect()
    }

    /// Computes the standardised walltime improvement over plain decoding (CS-Drafting, section
    /// 5.1): tokens over the cost of the forwards. A target forward costs 1 regardless of its rows,
    /// and a draft forward costs its drafter's cost ratio. None without tokens, or if a drafter has
    /// no cost ratio.
    pub fn standard_improvement(
        &self,
        cost_ratio: impl Fn(DrafterId) -> Option<f64>,
    ) -> Option<f64> {
        let mut cost = self.rounds.len() as f64;
        for (drafter, count) in self.rounds.iter().flat_map(|round| round.forwards.iter()) {
            cost += count as f64 * cost_ratio(drafter)?;
        }
        (self.num_tokens > 0).then(|| self.num_tokens as f64 / cost)
    }

    /// Sums the time of all rounds, without prefill.
    pub fn decode_time(&self) -> Duration {
        self.rounds.iter().map(|round| round.draft_time + round.verify_time).sum()
    }
}

/// Counts of tokens, candidates and forwards. Counts of several generations add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// N: the number of new tokens kept.
    pub num_tokens: usize,
    /// N_target: the number of target forwards, one per round. With a self-draft, the draft
    /// forwards have already run the shallow layers over all candidates but the last. The target
    /// forward runs them over the last candidate, and the deep layers over all.
    pub num_target_forwards: usize,
    /// N_draft: the number of draft forwards.
    pub num_draft_forwards: usize,
    /// The number of drafted candidates.
    pub num_drafted: usize,
    /// The number of accepted candidates, up to the end of the text.
    pub num_accepted: usize,
    /// N_discarded: the number of rejected candidates and of tokens cut by an end-of-sequence token
    /// or the token limit.
    pub num_discarded: usize,
}

/// The counts of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoundCounts {
    pub(crate) num_drafted: usize,
    pub(crate) num_draft_forwards: usize,
    pub(crate) num_accepted: usize,
    /// The number of tokens kept, out of the accepted candidates and the target's own token.
    pub(crate) num_kept: usize,
}

impl RoundCounts {
    /// Returns the part of the counts that a stop rule learns from.
    pub(crate) fn end(self) -> RoundEnd {
        RoundEnd { num_accepted: self.num_accepted, num_kept: self.num_kept }
    }
}

impl Counts {
    /// Adds a round.
    ///
    /// # Panics
    /// If the round accepts more candidates than it drafted, or keeps more tokens than it yields.
    pub(crate) fn add_round(&mut self, round: RoundCounts) {
        let RoundCounts { num_drafted, num_draft_forwards, num_accepted, num_kept } = round;
        assert!(num_accepted <= num_drafted, "only drafted candidates are accepted: {round:?}");
        assert!(num_kept <= num_accepted + 1, "only what a round yields is kept: {round:?}");
        self.num_tokens += num_kept;
        self.num_target_forwards += 1;
        self.num_draft_forwards += num_draft_forwards;
        self.num_drafted += num_drafted;
        self.num_accepted += num_accepted;
        // These are rejected candidates, and tokens after an end token or the limit.
        self.num_discarded += num_drafted + 1 - num_kept;
    }

    /// Computes N_target / N, target forwards per kept token (SpecDec++, before Eq. 2.3). NaN
    /// without tokens.
    pub fn verification_rate(&self) -> f64 {
        self.num_target_forwards as f64 / self.num_tokens as f64
    }

    /// Computes the discarded tokens per kept token: N_discarded / N (SpecDec++, before Eq. 2.3).
    /// NaN without tokens.
    pub fn discard_rate(&self) -> f64 {
        self.num_discarded as f64 / self.num_tokens as f64
    }

    /// Computes the kept tokens per target forward: N / N_target (Kangaroo's CR). NaN without
    /// forwards.
    pub fn compression_rate(&self) -> f64 {
        self.num_tokens as f64 / self.num_target_forwards as f64
    }

    /// Computes the accepted candidates per drafted candidate. NaN without candidates.
    pub fn acceptance_rate(&self) -> f64 {
        self.num_accepted as f64 / self.num_drafted as f64
    }

    /// Counts N_verified, the rows of target forwards: K + 1 in a round of K candidates.
    pub fn num_verified_rows(&self) -> usize {
        self.num_drafted + self.num_target_forwards
    }

    /// Checks N_draft + N_target = N + N_discarded (SpecDec++, section 2), on which Eq. 2.3 depends.
    ///
    /// The identity holds if every draft forward makes one candidate, as with a separate draft
    /// model or a self-draft.
    ///
    /// # Errors
    /// If the counts do not add up.
    pub fn check_forward_identity(&self) -> Result<()> {
        let Self { num_draft_forwards, num_target_forwards, num_tokens, num_discarded, .. } = *self;
        let add_up = num_draft_forwards + num_target_forwards == num_tokens + num_discarded;
        TheoryError::ensure(add_up, || {
            format!(
                "draft and target forwards do not add up to tokens kept and discarded: `{num_draft_forwards}` + \
                 `{num_target_forwards}` != `{num_tokens}` + `{num_discarded}`"
            )
        })
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |total, counts| Self {
            num_tokens: total.num_tokens + counts.num_tokens,
            num_target_forwards: total.num_target_forwards + counts.num_target_forwards,
            num_draft_forwards: total.num_draft_forwards + counts.num_draft_forwards,
            num_drafted: total.num_drafted + counts.num_drafted,
            num_accepted: total.num_accepted + counts.num_accepted,
            num_discarded: total.num_discarded + counts.num_discarded,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, SeededDraws};

    fn round(num_drafted: usize, num_accepted: usize) -> Round {
        let (draft_time, verify_time) =
            (Duration::from_millis(num_drafted as u64), Duration::from_millis(10));
        Round {
            num_drafted,
            depth: num_drafted,
            forwards: Forwards::of(DrafterId::DRAFT, num_drafted),
            num_accepted,
            draft_time,
            verify_time,
        }
    }

    /// Creates a trace of three rounds that yield 4 + 2 + 6 = 12 tokens; the limit keeps 10.
    fn example() -> Trace {
        let rounds = vec![round(3, 3), round(4, 1), round(5, 5)];
        Trace { rounds, num_tokens: 10, prefill_time: Duration::from_millis(7) }
    }

    #[test]
    fn the_beginning_of_a_trace_ends_with_the_round_that_reaches_its_length() {
        let beginning = |num_tokens| {
            let first = example().first(num_tokens)?;
            Some((first.rounds.len(), first.num_tokens, first.prefill_time.as_millis()))
        };
        assert_eq!(beginning(4), Some((1, 4, 7)));
        assert_eq!(beginning(5), Some((2, 6, 7)));
        // The limit cut the last round.
        assert_eq!(beginning(7), Some((3, 10, 7)));
        assert_eq!(beginning(10), Some((3, 10, 7)));
        assert_eq!(beginning(11), None);
    }

    fn random_trace(draws: &mut SeededDraws) -> Trace {
        let rounds: Vec<Round> = (0..1 + draws.categorical(&[1.0; 9]))
            .map(|_| {
                let num_drafted = draws.categorical(&[1.0; 6]);
                round(num_drafted, draws.categorical(&vec![1.0; num_drafted + 1]))
            })
            .collect();
        let num_yielded: usize = rounds.iter().map(Round::num_tokens).sum();
        let last = rounds[rounds.len() - 1].num_tokens();
        let num_tokens = num_yielded - draws.categorical(&vec![1.0; last]);
        Trace { rounds, num_tokens, prefill_time: Duration::from_millis(3) }
    }

    #[test]
    fn forwards_add_up_for_every_trace_of_a_separate_draft() {
        let mut draws = SeededDraws::new(1, &["traces"]);
        for _ in 0..300 {
            let counts = random_trace(&mut draws).counts();
            assert_eq!(counts.check_forward_identity(), Ok(()));
            // The identity divided by N, in f64.
            let per_token = (counts.num_draft_forwards + counts.num_target_forwards) as f64
                / counts.num_tokens as f64;
            assert!((per_token - 1.0 - counts.discard_rate()).abs() < 1e-12);
        }
    }

    #[test]
    fn counts_and_rates_match_hand_computation() {
        let counts = example().counts();
        let expected = Counts {
            num_tokens: 10,
            num_target_forwards: 3,
            num_draft_forwards: 12,
            num_drafted: 12,
            num_accepted: 9,
            num_discarded: 3 + 2,
        };
        assert_eq!(counts, expected);
        assert_eq!(counts.verification_rate(), 0.3);
        assert_eq!(counts.discard_rate(), 0.5);
        assert_eq!(counts.compression_rate(), 10.0 / 3.0);
        assert_eq!(counts.acceptance_rate(), 0.75);
        assert_eq!(counts.num_verified_rows(), 4 + 5 + 6);
    }

    #[test]
    fn ctar_is_the_share_of_rounds_that_yield_more() {
        let shares: Vec<f64> = (0..8).map(|num_tokens| example().ctar(num_tokens)).collect();
        let third = 1.0 / 3.0;
        assert_eq!(shares, [1.0, 1.0, 2.0 / 3.0, 2.0 / 3.0, third, third, 0.0, 0.0]);
        // The tail sum of a distribution is its mean: the compression rate without cuts.
        assert!((shares.iter().sum::<f64>() - 12.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn unconditional_rates_multiply_to_the_accepted_candidates() {
        // Of three rounds, three accept one, two a second and a third; one of one a fourth and a fifth.
        let rates = example().unconditional_rates(6);
        let two_thirds = 1.0 * (2.0 / 3.0);
        assert_eq!(rates, [1.0, two_thirds, two_thirds, two_thirds, two_thirds, 0.0]);
        // Rounds of one length accept as many candidates on average as the rates sum up to.
        let equal: Vec<Round> = (0..=4).map(|num_accepted| round(4, num_accepted)).collect();
        let trace = Trace { num_tokens: 15, rounds: equal, ..Trace::default() };
        let rates = trace.unconditional_rates(4);
        assert!((rates.iter().sum::<f64>() - 2.0).abs() < 1e-12, "{rates:?}");
        assert_eq!(Trace::default().unconditional_rates(2), [0.0, 0.0]);
    }

    #[test]
    fn standard_improvement_is_tokens_over_the_cost_of_forwards() {
        // Ten tokens for three target forwards and twelve draft forwards.
        let at = |cost_ratio| example().standard_improvement(|_| Some(cost_ratio));
        assert_eq!([at(0.0), at(0.25)], [Some(10.0 / 3.0), Some(10.0 / 6.0)]);
        assert_eq!(example().standard_improvement(|_| None), None);
        assert_eq!(Trace::default().standard_improvement(|_| Some(1.0)), None);
    }

    #[test]
    fn merging_adds_counts_and_times() {
        let mut draws = SeededDraws::new(2, &["traces"]);
        let traces: Vec<Trace> = (0..6).map(|_| random_trace(&mut draws)).collect();
        let merged = Trace::merge(&traces);
        assert_eq!(merged.counts(), traces.iter().map(Trace::counts).sum());
        assert_eq!(merged.decode_time(), traces.iter().map(Trace::decode_time).sum());
        assert_eq!(merged.prefill_time, Duration::from_millis(18));
        assert_eq!(Trace::merge([]), Trace::default());
    }

    #[test]
    fn plain_decoding_keeps_the_identity() {
        let trace = Trace { rounds: vec![round(0, 0); 7], num_tokens: 7, ..Trace::default() };
        let counts = trace.counts();
        assert_eq!(counts.check_forward_identity(), Ok(()));
        assert_eq!((counts.verification_rate(), counts.discard_rate()), (1.0, 0.0));
    }

    #[test]
    fn extra_draft_forwards_break_the_identity() {
        let mut trace = example();
        trace.rounds[0].forwards.add(DrafterId::DRAFT, 1);
        let refused = trace.counts().check_forward_identity();
        assert_eq!(refused.map_err(|error| error.to_string()), Err(
            "draft and target forwards do not add up to tokens kept and discarded: `13` + `3` != `10` + `5`".into()
        ));
    }

    #[test]
    #[should_panic(expected = "yielded by a round")]
    fn more_tokens_than_the_rounds_yield_are_a_bug() {
        Trace { num_tokens: 13, ..example() }.counts();
    }
}

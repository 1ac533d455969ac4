//! Review inside a cascade (CS-Drafting, Chen et al. 2023): a drafter's model verifies the
//! candidates of a cheaper drafter. It passes on the accepted tokens, each with the distribution it
//! was emitted from.
//!
//! A reviewer may be lenient, since the target verifies last. With lenience l it accepts a
//! candidate x drawn from d with probability min(1, l·r(x)/d(x)), where r is the reviewer's
//! distribution. With l = 1 the emitted tokens have the distribution r. With l > 1 they have
//! another distribution e, which the next verification must know:
//!
//! e = min(d, l·r) + (1 − Σ min(d, l·r))·(r − d)+/Σ (r − d)+
//!
//! Looked-up candidates are reviewed exactly unless [`Lenience::with_look_ups`] says otherwise
//! (Appendix B forbids lenience for Max-Gram; the authors' code allows it). The authors review
//! greedily only, with the reviewer's own probabilities.

use crate::verify::take_residual;
use crate::{DrawnFrom, Draws, Result, SoftmaxSummary, TheoryError, argmax};

/// The factor l >= 1 by which a reviewer overrates a candidate's probability. Looked-up candidates
/// have a separate factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lenience {
    models: f64,
    look_ups: f64,
}

impl Lenience {
    /// The lenience 1, with which all candidates are reviewed exactly.
    pub const NONE: Self = Self { models: 1.0, look_ups: 1.0 };

    /// Creates lenience for a model's candidates. Looked-up candidates are reviewed exactly.
    ///
    /// # Errors
    /// If `lenience` is below 1 or not finite.
    pub fn new(lenience: f64) -> Result<Self> {
        let is_valid = lenience >= 1.0 && lenience.is_finite();
        let range = "be 1 or more and finite (1 reviews exactly)";
        TheoryError::check(is_valid, "lenience", range, lenience)?;
        Ok(Self { models: lenience, look_ups: 1.0 })
    }

    /// Applies the same lenience to looked-up candidates too.
    #[must_use]
    pub fn with_look_ups(self) -> Self {
        Self { look_ups: self.models, ..self }
    }

    fn is_exact(self) -> bool {
        self == Self::NONE
    }

    /// Returns the factor l for a candidate.
    fn of(self, candidate: &CascadeCandidate) -> f64 {
        if candidate.is_looked_up { self.look_ups } else { self.models }
    }
}

/// A token that a cascade's drafter proposes to its reviewer.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeCandidate {
    /// The candidate's token id.
    pub token_id: u32,
    /// The distribution that the token was drawn from, given the tokens before it.
    pub drawn_from: DrawnFrom,
    /// The probability of the token in its drafter's model, at temperature 1 and without filters. A
    /// lenient greedy reviewer compares it with its own probability. 1 for a looked-up token.
    pub prob: f64,
    /// Whether the token was looked up and no model has reviewed it since.
    pub is_looked_up: bool,
}

/// Reviews a chain greedily and returns the accepted candidates and the reviewer's next token.
/// Candidates are accepted up to the first rejection. A candidate is accepted if it is the
/// reviewer's most probable token. With lenience l > 1 it is also accepted if the reviewer's
/// probability is at least 1/l of the candidate's [`prob`](CascadeCandidate::prob), as in the paper.
/// The authors' code requires more than 1/l.
///
/// `logits_after(i)` returns the reviewer's logits after the first i candidates. It is called only
/// for the rows that are reached.
pub fn review_greedy<'r>(
    candidates: &[CascadeCandidate],
    mut logits_after: impl FnMut(usize) -> &'r [f32],
    lenience: Lenience,
) -> Vec<CascadeCandidate> {
    let mut reviewed = Vec::with_capacity(candidates.len() + 1);
    loop {
        let logits = logits_after(reviewed.len());
        let softmax = (!lenience.is_exact()).then(|| SoftmaxSummary::of(logits));
        let prob = |token: u32| match softmax {
            Some(softmax) => softmax.log_prob(logits[token as usize]).exp(),
            None => 1.0,
        };
        let choice = argmax(logits);
        let candidate = candidates.get(reviewed.len());
        let accepted = candidate.filter(|candidate| {
            candidate.token_id == choice
                || (lenience.of(candidate) > 1.0
                    && prob(candidate.token_id) >= candidate.prob / lenience.of(candidate))
        });
        let token_id = accepted.map_or(choice, |candidate| candidate.token_id);
        reviewed.push(CascadeCandidate {
            token_id,
            drawn_from: DrawnFrom::OneHot,
            prob: prob(token_id),
            is_looked_up: false,
        });
        if accepted.is_none() {
            return reviewed;
        }
    }
}

/// Reviews a chain by rejection sampling. Returns the accepted candidates and one more token. At
/// the first rejection it is drawn from the residual, and if all are accepted, from the reviewer's
/// distribution. Each returned token carries the distribution it is emitted from, given the tokens
/// before it.
///
/// `probs_after(i)` returns the reviewer's distribution r after the first i candidates, with
/// temperature and filters applied.
///
/// # Panics
/// If distributions differ in length, or a candidate's own draft probability is 0.
pub fn review_sampled(
    candidates: &[CascadeCandidate],
    mut probs_after: impl FnMut(usize) -> Vec<f64>,
    lenience: Lenience,
    draws: &mut (impl Draws + ?Sized),
) -> Vec<CascadeCandidate> {
    let mut reviewed = Vec::with_capacity(candidates.len() + 1);
    for candidate in candidates {
        let review = Review::new(candidate, probs_after(reviewed.len()), lenience.of(candidate));
        let is_accepted = draws.bernoulli(review.acceptance_prob);
        let token_id = match is_accepted {
            true => candidate.token_id,
            false => draws.categorical(&review.residual) as u32,
        };
        reviewed.push(CascadeCandidate::drawn(token_id, review.emitted));
        if !is_accepted {
            return reviewed;
        }
    }
    let own = probs_after(reviewed.len());
    let token_id = draws.categorical(&own) as u32;
    reviewed.push(CascadeCandidate::drawn(token_id, own));
    reviewed
}

impl CascadeCandidate {
    /// Creates a candidate from a token that was looked up.
    pub fn looked_up(token_id: u32) -> Self {
        Self { token_id, drawn_from: DrawnFrom::OneHot, prob: 1.0, is_looked_up: true }
    }

    fn drawn(token_id: u32, probs: Vec<f64>) -> Self {
        let (prob, drawn_from) = (probs[token_id as usize], DrawnFrom::Probs(probs));
        Self { token_id, drawn_from, prob, is_looked_up: false }
    }
}

/// The review of one candidate.
struct Review {
    /// The acceptance probability min(1, l·r/d), not yet clamped to 1.
    acceptance_prob: f64,
    /// The unnormalised residual (r − d)+.
    residual: Vec<f64>,
    /// The distribution of the token that takes the candidate's place.
    emitted: Vec<f64>,
}

impl Review {
    /// Computes the review of a candidate by a reviewer with the distribution `own`.
    fn new(candidate: &CascadeCandidate, own: Vec<f64>, lenience: f64) -> Self {
        let CascadeCandidate { token_id, drawn_from, .. } = candidate;
        let candidate = *token_id as usize;
        let d = |token: usize| match drawn_from {
            DrawnFrom::OneHot => f64::from(u8::from(token == candidate)),
            DrawnFrom::Probs(probs) => probs[token],
        };
        if let DrawnFrom::Probs(probs) = drawn_from {
            assert_eq!(probs.len(), own.len(), "distributions must be over one vocabulary");
        }
        assert!(d(candidate) > 0.0, "token `{candidate}` cannot have been drawn from its row");
        let mut residual = own.clone();
        take_residual(&mut residual, 1.0, drawn_from, candidate);
        // This is summed directly because 1 minus the accepted share could round to 0.
        let rejected: f64 =
            own.iter().enumerate().map(|(token, own)| (d(token) - lenience * own).max(0.0)).sum();
        let scale = rejected / residual.iter().sum::<f64>();
        let emitted = if lenience == 1.0 {
            own.clone()
        } else {
            let accepted = own.iter().enumerate().map(|(token, own)| d(token).min(lenience * own));
            accepted.zip(&residual).map(|(accepted, rest)| accepted + scale * rest).collect()
        };
        Self { acceptance_prob: lenience * own[candidate] / d(candidate), residual, emitted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::random_probs;
    use crate::{SeededDraws, distribution_of, enumerate};

    #[test]
    fn tokens_have_the_distribution_that_they_are_proposed_with() {
        let mut rng = SeededDraws::new(1, &["review"]);
        for case in 0..400 {
            let len = 1 + case % 6;
            let (d, r) = (random_probs(&mut rng, len), random_probs(&mut rng, len));
            let own = vec![1.0 / len as f64; len];
            let lenient = |lenience| Lenience::new(lenience).expect("1 or more");
            for (lenience, is_looked_up) in [
                (Lenience::NONE, false),
                (lenient(1.7), false),
                (lenient(4.0), false),
                (Lenience::NONE, true),
                (lenient(2.5), true),
                (lenient(2.5).with_look_ups(), true),
            ] {
                let looked_up = rng.categorical(&d) as u32;
                let mut stated = None;
                let outcomes = enumerate(|draws| {
                    let candidate = match is_looked_up {
                        true => CascadeCandidate::looked_up(looked_up),
                        false => CascadeCandidate::drawn(draws.categorical(&d) as u32, d.clone()),
                    };
                    let rows = [r.clone(), own.clone()];
                    let reviewed =
                        review_sampled(&[candidate], |row| rows[row].clone(), lenience, draws);
                    let DrawnFrom::Probs(found) = &reviewed[0].drawn_from else {
                        panic!("a model's tokens are drawn")
                    };
                    assert_eq!(
                        stated.get_or_insert_with(|| found.clone()),
                        found,
                        "one distribution for all"
                    );
                    assert!(reviewed.iter().all(|token| token.prob > 0.0));
                    reviewed[0].token_id
                });
                let (emitted, stated) =
                    (distribution_of(outcomes), stated.expect("there were draws"));
                for (token, prob) in stated.iter().enumerate() {
                    let found = emitted.get(&(token as u32)).copied().unwrap_or(0.0);
                    // A few dozen f64 operations on numbers below 1.
                    assert!(
                        (found - prob).abs() < 1e-12,
                        "{lenience:?}: d {d:?}, r {r:?}: {found} {prob}"
                    );
                    // An exact reviewer's tokens have its distribution.
                    let own_lenience =
                        if is_looked_up { lenience.look_ups } else { lenience.models };
                    if own_lenience == 1.0 {
                        assert!((r[token] - prob).abs() < 1e-12);
                    }
                }
            }
        }
    }

    #[test]
    fn a_lenient_greedy_reviewer_accepts_nearly_as_probable_candidates() {
        // Probabilities 1/2, 1/4, 1/4.
        let rows = [[2f32.ln(), 0.0, 0.0], [0.0, 0.0, 2f32.ln()], [0.0, 2f32.ln(), 0.0]];
        let candidate = |token_id, prob| CascadeCandidate {
            prob,
            is_looked_up: false,
            ..CascadeCandidate::looked_up(token_id)
        };
        let lenient = |lenience| Lenience::new(lenience).expect("1 or more");
        let review_by = |candidates: &[CascadeCandidate], lenience| -> Vec<u32> {
            let reviewed = review_greedy(candidates, |row| &rows[row], lenience);
            reviewed.iter().map(|token| token.token_id).collect()
        };
        let review = |candidates: &[CascadeCandidate], lenience| -> Vec<u32> {
            review_by(candidates, lenient(lenience))
        };
        let own = [candidate(0, 1.0), candidate(2, 1.0)];
        assert_eq!(review(&own, 1.0), [0, 2, 1]);
        assert_eq!(review(&[], 1.0), [0]);
        let other = [candidate(1, 0.9), candidate(2, 1.0)];
        assert_eq!(review(&other, 1.0), [0]);
        assert_eq!(review(&other, 3.5), [0]);
        assert_eq!(review(&other, 3.7), [1, 2, 1]);
        // Half of a probability is exact in f64.
        let own = review_greedy(&[candidate(1, 0.9)], |row| &rows[row], lenient(3.7))[0].prob;
        let at_equality = |times| [candidate(1, times * own)];
        assert_eq!(review(&at_equality(2.0), 2.0), [1, 2]);
        assert_eq!(review(&at_equality(2.0 + 1e-9), 2.0), [0]);
        // Looked-up tokens have probability 1, and are reviewed exactly unless they are included.
        let looked_up = [1, 2].map(CascadeCandidate::looked_up);
        assert_eq!(review_by(&looked_up, lenient(4.5)), [0]);
        assert_eq!(review_by(&looked_up, lenient(4.5).with_look_ups()), [1, 2, 1]);
        let mixed = [candidate(1, 0.9), CascadeCandidate::looked_up(1)];
        assert_eq!(review_by(&mixed, lenient(4.5)), [1, 2]);
        let reviewed = review_greedy(&other, |row| &rows[row], lenient(3.7));
        // They are proposed with the reviewer's own probabilities.
        for (token, prob) in reviewed.iter().zip([0.25, 0.5, 0.5]) {
            // Exponentials of f32 logits.
            assert!((token.prob - prob).abs() < 1e-6, "{token:?}");
        }
    }

    #[test]
    fn a_lenience_below_1_is_an_error() {
        for lenience in [0.0, 0.99, f64::NAN, f64::INFINITY] {
            assert!(Lenience::new(lenience).is_err());
        }
        assert_eq!(Lenience::new(1.0), Ok(Lenience::NONE));
    }
}

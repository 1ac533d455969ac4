//! Review inside a cascade: a drafter's model verifies what a cheaper drafter proposes, and proposes
//! what then stands, each token with the distribution that it has by then (CS-Drafting, Chen et al.
//! 2023).
//!
//! A reviewer may be lenient, since the target verifies last: with a lenience l it accepts a candidate
//! x drawn from d with chance min(1, l·r(x)/d(x)), where a reviewer with l = 1 emits tokens of its own
//! distribution r. What a lenient one emits is neither of r nor of d, and verification must know it:
//!
//! e = min(d, l·r) + (1 − Σ min(d, l·r))·(r − d)+/Σ (r − d)+
//!
//! The authors review greedily only, with the reviewer's own probabilities.

use crate::verify::take_residual;
use crate::{DrawnFrom, Draws, SoftmaxSummary, TheoryError, argmax};

/// How much more probable than it is a reviewer takes a candidate to be. At least 1, which forgives
/// nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lenience(f64);

impl Lenience {
    /// Forgives nothing.
    pub const NONE: Self = Self(1.0);

    /// A lenience.
    ///
    /// # Errors
    /// If it is below 1 or not finite.
    pub fn new(lenience: f64) -> Result<Self, TheoryError> {
        let is_valid = lenience >= 1.0 && lenience.is_finite();
        TheoryError::check(is_valid, "lenience", "be 1 or more and finite", lenience)?;
        Ok(Self(lenience))
    }

    fn forgives(self) -> bool {
        self.0 > 1.0
    }
}

/// A token that a cascade's drafter proposes to its reviewer.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeCandidate {
    /// The token.
    pub token_id: u32,
    /// Its distribution, given those before it.
    pub drawn_from: DrawnFrom,
    /// The probability that its drafter's model gives to it, raw: what a greedy reviewer's lenience is
    /// measured by. 1 of a token that was looked up.
    pub prob: f64,
}

/// Reviews a chain greedily: candidates stand while they are the reviewer's most probable tokens, or
/// their probability under the reviewer is more than an l-th of the one they were proposed with.
/// Behind those that stand comes the reviewer's own token.
///
/// `logits_after(i)` are the reviewer's behind candidate i − 1; only rows that are reached are asked
/// for.
pub fn review_greedy<'r>(
    candidates: &[CascadeCandidate],
    mut logits_after: impl FnMut(usize) -> &'r [f32],
    lenience: Lenience,
) -> Vec<CascadeCandidate> {
    let mut stands = Vec::with_capacity(candidates.len() + 1);
    loop {
        let logits = logits_after(stands.len());
        let softmax = lenience.forgives().then(|| SoftmaxSummary::of(logits));
        let prob = |token: u32| match softmax {
            Some(softmax) => softmax.log_prob(logits[token as usize]).exp(),
            None => 1.0,
        };
        let choice = argmax(logits);
        let candidate = candidates.get(stands.len());
        let accepted = candidate.filter(|candidate| {
            candidate.token_id == choice
                || (lenience.forgives() && prob(candidate.token_id) > candidate.prob / lenience.0)
        });
        let token_id = accepted.map_or(choice, |candidate| candidate.token_id);
        stands.push(CascadeCandidate {
            token_id,
            drawn_from: DrawnFrom::OneHot,
            prob: prob(token_id),
        });
        if accepted.is_none() {
            return stands;
        }
    }
}

/// Reviews a chain by rejection sampling: the candidates that stand, then a token that was drawn from
/// the residual of the one that does not, or from the reviewer's own distribution where all do. Each
/// has the distribution that it is emitted with, given those before it and how they came about.
///
/// `probs_after(i)` is the reviewer's distribution r behind candidate i − 1, as served.
///
/// # Panics
/// If distributions are not over one vocabulary, or a token's own probability is 0.
pub fn review_sampled(
    candidates: &[CascadeCandidate],
    mut probs_after: impl FnMut(usize) -> Vec<f64>,
    lenience: Lenience,
    draws: &mut (impl Draws + ?Sized),
) -> Vec<CascadeCandidate> {
    let mut stands = Vec::with_capacity(candidates.len() + 1);
    for candidate in candidates {
        let review = Review::new(&candidate.drawn_from, candidate.token_id, lenience, || {
            probs_after(stands.len())
        });
        let is_accepted = draws.bernoulli(review.acceptance_prob);
        let token_id = match is_accepted {
            true => candidate.token_id,
            false => draws.categorical(&review.residual) as u32,
        };
        stands.push(CascadeCandidate::drawn(token_id, review.emitted));
        if !is_accepted {
            return stands;
        }
    }
    let own = probs_after(stands.len());
    let token_id = draws.categorical(&own) as u32;
    stands.push(CascadeCandidate::drawn(token_id, own));
    stands
}

/// The chance that a reviewer of distribution `own` lets a candidate stand, over what it may have been:
/// Σ min(d, l·r).
pub(crate) fn expected_acceptance(
    candidate: &CascadeCandidate,
    own: &[f64],
    Lenience(lenience): Lenience,
) -> f64 {
    match &candidate.drawn_from {
        DrawnFrom::OneHot => (lenience * own[candidate.token_id as usize]).min(1.0),
        DrawnFrom::Probs(d) => {
            assert_eq!(d.len(), own.len(), "distributions must be over one vocabulary");
            d.iter().zip(own).map(|(d, own)| d.min(lenience * own)).sum()
        }
    }
}

/// What a reviewer of distribution `own` emits in the place of a candidate: a token of it, and the
/// distribution that it is emitted with.
pub(crate) fn emitted_instead_of(
    candidate: &CascadeCandidate,
    own: Vec<f64>,
    lenience: Lenience,
) -> CascadeCandidate {
    let token_id = candidate.token_id;
    let Review { emitted, .. } = Review::new(&candidate.drawn_from, token_id, lenience, || own);
    CascadeCandidate::drawn(token_id, emitted)
}

impl CascadeCandidate {
    /// A token that was looked up.
    pub fn certain(token_id: u32) -> Self {
        Self { token_id, drawn_from: DrawnFrom::OneHot, prob: 1.0 }
    }

    pub(crate) fn drawn(token_id: u32, probs: Vec<f64>) -> Self {
        Self { token_id, prob: probs[token_id as usize], drawn_from: DrawnFrom::Probs(probs) }
    }
}

/// What a reviewer makes of one candidate.
struct Review {
    /// min(1, l·r/d).
    acceptance_prob: f64,
    /// (r − d)+, not normalised.
    residual: Vec<f64>,
    /// The distribution of what stands in the candidate's place.
    emitted: Vec<f64>,
}

impl Review {
    fn new(
        drawn_from: &DrawnFrom,
        candidate: u32,
        Lenience(lenience): Lenience,
        reviewer: impl FnOnce() -> Vec<f64>,
    ) -> Self {
        let own = reviewer();
        let candidate = candidate as usize;
        let d = |token: usize| match drawn_from {
            DrawnFrom::OneHot => f64::from(u8::from(token == candidate)),
            DrawnFrom::Probs(probs) => probs[token],
        };
        if let DrawnFrom::Probs(probs) = drawn_from {
            assert_eq!(probs.len(), own.len(), "distributions must be over one vocabulary");
        }
        assert!(d(candidate) > 0.0, "token `{candidate}` cannot have been drawn from its row");
        let of_all = |of: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            own.iter().enumerate().map(|(token, own)| of(token, *own)).collect()
        };
        let mut residual = own.clone();
        take_residual(&mut residual, 1.0, drawn_from, candidate);
        // As a sum of what is rejected it cannot round to nothing where something is.
        let rejected: f64 =
            own.iter().enumerate().map(|(token, own)| (d(token) - lenience * own).max(0.0)).sum();
        let scale = rejected / residual.iter().sum::<f64>();
        let emitted = if lenience == 1.0 {
            own.clone()
        } else {
            of_all(&|token, own| d(token).min(lenience * own) + scale * residual[token])
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
    fn a_token_has_the_distribution_that_it_is_proposed_with() {
        let mut rng = SeededDraws::new(1, &["review"]);
        for case in 0..400 {
            let len = 1 + case % 6;
            let (d, r) = (random_probs(&mut rng, len), random_probs(&mut rng, len));
            let own = vec![1.0 / len as f64; len];
            for (lenience, is_certain) in
                [(1.0, false), (1.7, false), (4.0, false), (1.0, true), (2.5, true)]
            {
                let looked_up = rng.categorical(&d) as u32;
                let mut told = None;
                let outcomes = enumerate(|draws| {
                    let (token_id, drawn_from) = match is_certain {
                        true => (looked_up, DrawnFrom::OneHot),
                        false => (draws.categorical(&d) as u32, DrawnFrom::Probs(d.clone())),
                    };
                    let candidate = CascadeCandidate { token_id, drawn_from, prob: 1.0 };
                    let rows = [r.clone(), own.clone()];
                    let lenience = Lenience::new(lenience).expect("1 or more");
                    let stands =
                        review_sampled(&[candidate], |row| rows[row].clone(), lenience, draws);
                    let DrawnFrom::Probs(found) = &stands[0].drawn_from else {
                        panic!("a model's tokens are drawn")
                    };
                    assert_eq!(
                        told.get_or_insert_with(|| found.clone()),
                        found,
                        "one distribution for all"
                    );
                    assert!(stands.iter().all(|token| token.prob > 0.0));
                    stands[0].token_id
                });
                let (emitted, told) = (distribution_of(outcomes), told.expect("there were draws"));
                for (token, prob) in told.iter().enumerate() {
                    let found = emitted.get(&(token as u32)).copied().unwrap_or(0.0);
                    // A few dozen f64 operations on numbers below 1.
                    assert!(
                        (found - prob).abs() < 1e-12,
                        "{lenience}: d {d:?}, r {r:?}: {found} {prob}"
                    );
                    if lenience == 1.0 {
                        assert!((r[token] - prob).abs() < 1e-12);
                    }
                }
            }
        }
    }

    #[test]
    fn a_greedy_reviewer_forgives_what_is_nearly_as_probable_as_it_was_said_to_be() {
        // Probabilities 1/2, 1/4, 1/4.
        let rows = [[2f32.ln(), 0.0, 0.0], [0.0, 0.0, 2f32.ln()], [0.0, 2f32.ln(), 0.0]];
        let candidate =
            |token_id, prob| CascadeCandidate { token_id, drawn_from: DrawnFrom::OneHot, prob };
        let review = |candidates: &[CascadeCandidate], lenience| -> Vec<u32> {
            let lenience = Lenience::new(lenience).expect("1 or more");
            let stands = review_greedy(candidates, |row| &rows[row], lenience);
            stands.iter().map(|token| token.token_id).collect()
        };
        let own = [candidate(0, 1.0), candidate(2, 1.0)];
        assert_eq!(review(&own, 1.0), [0, 2, 1]);
        assert_eq!(review(&[], 1.0), [0]);
        let other = [candidate(1, 0.9), candidate(2, 1.0)];
        assert_eq!(review(&other, 1.0), [0]);
        assert_eq!(review(&other, 3.5), [0]);
        assert_eq!(review(&other, 3.7), [1, 2, 1]);
        let stands = review_greedy(&other, |row| &rows[row], Lenience(3.7));
        // They are proposed with the reviewer's own probabilities.
        for (token, prob) in stands.iter().zip([0.25, 0.5, 0.5]) {
            // Exponentials of f32 logits.
            assert!((token.prob - prob).abs() < 1e-6, "{token:?}");
        }
    }

    #[test]
    fn a_reviewer_may_be_no_stricter_than_its_own_distribution() {
        for lenience in [0.0, 0.99, f64::NAN, f64::INFINITY] {
            assert!(Lenience::new(lenience).is_err());
        }
        assert_eq!(Lenience::new(1.0), Ok(Lenience::NONE));
    }
}

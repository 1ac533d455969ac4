//! How often reviewers of a cascade let tokens stand, along responses of the target: what
//! [`expected_cascade_round`](crate::expected_cascade_round) is told.

use std::collections::BTreeMap;

use super::Emitted;
use crate::review::{emitted_instead_of, expected_acceptance};
use crate::{CascadeCandidate, DrawnFrom, Lenience, TokenChoice, review_greedy};

/// What the target says at a place of its response.
#[derive(Debug, Clone, PartialEq)]
pub enum TargetSays {
    /// Greedy, its token.
    Token(u32),
    /// Sampled, what its token is drawn from.
    Probs(Vec<f64>),
}

/// What a drafter says there.
#[derive(Debug, Clone, PartialEq)]
pub enum DrafterSays {
    /// The logits that a candidate is chosen by.
    Logits(Vec<f32>),
    /// What a look-up finds, if it finds something.
    LookedUp(Option<u32>),
}

/// How often tokens of a cascade's drafters stand, by who reviews them, at those places of the target's
/// responses where the drafter says something.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CascadeAcceptance {
    num_places: usize,
    /// By the row of K that has the reviewer.
    judged: BTreeMap<(usize, Emitted), Judged>,
}

/// Sums of chances over places.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Judged {
    num_places: usize,
    sum: f64,
}

impl CascadeAcceptance {
    /// What is said at one place by the target and by each drafter, from the largest on; all but the
    /// target have this lenience.
    ///
    /// # Panics
    /// If distributions are not over one vocabulary.
    pub fn add_place(
        &mut self,
        target: &TargetSays,
        drafters: &[DrafterSays],
        choice: TokenChoice,
        lenience: Lenience,
    ) {
        self.begin_place();
        let said: Vec<Option<Said<'_>>> =
            drafters.iter().map(|it| Said::of(it, choice, lenience)).collect();
        for (drafter, own) in said.iter().enumerate() {
            let Some(own) = own else { continue };
            let mut emitted = vec![(None, own.candidate.clone())];
            if lenience != Lenience::NONE && own.logits.is_some() {
                let smaller = said.iter().enumerate().skip(drafter + 1);
                let smaller = smaller.filter_map(|(of, it)| Some((of, it.as_ref()?)));
                let instead = |(of, it): (usize, &Said<'_>)| {
                    Some((Some(of), own.instead_of(&it.candidate, lenience)?))
                };
                emitted.extend(smaller.filter_map(instead));
            }
            for (instead_of, candidate) in emitted {
                let token = Emitted { drafter, instead_of };
                self.add(0, token, by_target(&candidate, target));
                for (reviewer, said) in said[..drafter].iter().enumerate() {
                    let stands = said.as_ref().and_then(|it| it.lets_stand(&candidate, lenience));
                    stands.into_iter().for_each(|prob| self.add(reviewer + 1, token, prob));
                }
            }
        }
    }

    /// Begins a place.
    pub(crate) fn begin_place(&mut self) {
        self.num_places += 1;
    }

    /// Adds the chance with which a token of the place stands.
    pub(crate) fn add(&mut self, reviewer: usize, token: Emitted, prob: f64) {
        let judged = self.judged.entry((reviewer, token)).or_default();
        judged.num_places += 1;
        judged.sum += prob;
    }

    /// The chance that a reviewer, the target being 0 and drafter i being i + 1, lets a token stand; NaN
    /// where none was judged.
    pub fn prob(&self, reviewer: usize, token: Emitted) -> f64 {
        let alone = Emitted { instead_of: None, ..token };
        let of = |token| self.judged.get(&(reviewer, token));
        of(token).or(of(alone)).map_or(f64::NAN, |it| it.sum / it.num_places as f64)
    }

    /// The share of places at which a drafter says something; NaN without places.
    pub fn found_prob(&self, drafter: usize) -> f64 {
        let judged = self.judged.get(&(0, Emitted { drafter, instead_of: None }));
        judged.map_or(0, |it| it.num_places) as f64 / self.num_places as f64
    }

    /// Whether there was no place.
    pub fn is_empty(&self) -> bool {
        self.num_places == 0
    }

    /// All that were judged, each with its chance.
    pub fn probs(&self) -> impl Iterator<Item = (usize, Emitted, f64)> {
        let prob = |it: &Judged| it.sum / it.num_places as f64;
        self.judged.iter().map(move |((reviewer, token), it)| (*reviewer, *token, prob(it)))
    }
}

impl<'a> std::iter::Sum<&'a Self> for CascadeAcceptance {
    fn sum<I: Iterator<Item = &'a Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut total, one| {
            total.num_places += one.num_places;
            for (key, judged) in &one.judged {
                let of_all = total.judged.entry(*key).or_default();
                of_all.num_places += judged.num_places;
                of_all.sum += judged.sum;
            }
            total
        })
    }
}

/// What a drafter says at a place.
struct Said<'l> {
    /// What it emits where nothing is proposed to it.
    candidate: CascadeCandidate,
    /// None of what was looked up.
    logits: Option<&'l [f32]>,
}

impl<'l> Said<'l> {
    /// None where nothing is found.
    fn of(says: &'l DrafterSays, choice: TokenChoice, lenience: Lenience) -> Option<Self> {
        Some(match (says, choice) {
            (DrafterSays::LookedUp(found), _) => {
                Self { candidate: CascadeCandidate::certain((*found)?), logits: None }
            }
            (DrafterSays::Logits(logits), TokenChoice::Greedy) => {
                let candidate = review_greedy(&[], |_| logits, lenience).pop()?;
                Self { candidate, logits: Some(logits) }
            }
            (DrafterSays::Logits(logits), TokenChoice::Sampled(sampling)) => {
                let probs = sampling.probs(logits);
                // Any that may be drawn: a candidate is judged by its distribution.
                let likeliest = (0..probs.len()).max_by(|a, b| probs[*a].total_cmp(&probs[*b]))?;
                let candidate = CascadeCandidate::drawn(likeliest as u32, probs);
                Self { candidate, logits: Some(logits) }
            }
        })
    }

    /// What it emits in the place of a candidate; None of what was looked up, which reviews nothing.
    fn instead_of(
        &self,
        proposed: &CascadeCandidate,
        lenience: Lenience,
    ) -> Option<CascadeCandidate> {
        let logits = self.logits?;
        Some(match &self.candidate.drawn_from {
            DrawnFrom::OneHot => {
                let candidate = std::slice::from_ref(proposed);
                review_greedy(candidate, |_| logits, lenience).swap_remove(0)
            }
            DrawnFrom::Probs(own) => emitted_instead_of(proposed, own.clone(), lenience),
        })
    }

    /// The chance that it lets a candidate stand; None of what was looked up.
    fn lets_stand(&self, candidate: &CascadeCandidate, lenience: Lenience) -> Option<f64> {
        let logits = self.logits?;
        Some(match &self.candidate.drawn_from {
            DrawnFrom::OneHot => {
                let candidate = std::slice::from_ref(candidate);
                let stands = review_greedy(candidate, |_| logits, lenience);
                f64::from(u8::from(stands.len() > 1))
            }
            DrawnFrom::Probs(own) => expected_acceptance(candidate, own, lenience),
        })
    }
}

/// The chance that the target lets a candidate stand, which forgives nothing.
fn by_target(candidate: &CascadeCandidate, target: &TargetSays) -> f64 {
    match target {
        TargetSays::Token(token) => f64::from(u8::from(candidate.token_id == *token)),
        TargetSays::Probs(probs) => expected_acceptance(candidate, probs, Lenience::NONE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::random_probs;
    use crate::{Draws, Sampling, SeededDraws, enumerate, review_sampled};

    const DRAFT: usize = 0;
    const SMALL: usize = 1;
    const LOOKED_UP: usize = 2;

    fn token(drafter: usize, instead_of: Option<usize>) -> Emitted {
        Emitted { drafter, instead_of }
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        // Sums of a few f64 products and logarithms of f32 logits.
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }

    #[test]
    fn greedy_tokens_stand_where_they_are_the_reviewers_or_nearly_as_probable() {
        // Probabilities 1/2, 1/4, 1/4 of the draft's, and 1/5, 3/5, 1/5 of the small one's.
        let draft = DrafterSays::Logits(vec![2f32.ln(), 0.0, 0.0]);
        let small = DrafterSays::Logits(vec![0.0, 3f32.ln(), 0.0]);
        let judge = |target, found, lenience| {
            let mut all = CascadeAcceptance::default();
            let drafters = [draft.clone(), small.clone(), DrafterSays::LookedUp(found)];
            let lenience = Lenience::new(lenience).expect("1 or more");
            all.add_place(&TargetSays::Token(target), &drafters, TokenChoice::Greedy, lenience);
            all
        };
        let strict = judge(1, Some(1), 1.0);
        // The target says 1, as the small one and the look-up do.
        let by_target = [DRAFT, SMALL, LOOKED_UP].map(|it| strict.prob(0, token(it, None)));
        assert_eq!(by_target, [0.0, 1.0, 1.0]);
        assert_eq!(strict.prob(1, token(SMALL, None)), 0.0);
        assert_eq!(strict.prob(2, token(LOOKED_UP, None)), 1.0);
        // A reviewer that forgives nothing emits its own, whatever it reviews.
        assert_eq!(strict.prob(0, token(DRAFT, Some(SMALL))), 0.0);
        // A quarter is more than a third of three fifths, so the draft lets the small one's stand.
        let lenient = judge(1, None, 3.0);
        assert_eq!(lenient.prob(1, token(SMALL, None)), 1.0);
        assert_eq!(lenient.prob(0, token(DRAFT, Some(SMALL))), 1.0);
        assert_eq!(lenient.prob(0, token(DRAFT, None)), 0.0);
        // Nothing was found, and so nothing was judged of it.
        assert_eq!([strict.found_prob(LOOKED_UP), lenient.found_prob(LOOKED_UP)], [1.0, 0.0]);
        assert_eq!([DRAFT, SMALL].map(|it| lenient.found_prob(it)), [1.0; 2]);
        assert!(lenient.prob(0, token(LOOKED_UP, None)).is_nan());
        let both: CascadeAcceptance = [strict, lenient].iter().sum();
        assert_eq!(both.prob(1, token(SMALL, None)), 0.5);
        assert_eq!((both.found_prob(LOOKED_UP), both.prob(0, token(LOOKED_UP, None))), (0.5, 1.0));
        assert!(both.prob(2, token(DRAFT, None)).is_nan(), "nobody reviews a larger one's");
    }

    #[test]
    fn sampled_tokens_stand_as_often_as_in_enumerated_reviews() {
        let mut rng = SeededDraws::new(1, &["acceptance"]);
        let logits = |probs: &[f64]| probs.iter().map(|p| p.ln() as f32).collect::<Vec<f32>>();
        for case in 0..40 {
            let [p, draft, small] = [(); 3].map(|()| random_probs(&mut rng, 2 + case % 4));
            let found = rng.categorical(&small) as u32;
            let lenience = Lenience::new([1.0, 1.6, 4.0][case % 3]).expect("1 or more");
            let drafters = [
                DrafterSays::Logits(logits(&draft)),
                DrafterSays::Logits(logits(&small)),
                DrafterSays::LookedUp(Some(found)),
            ];
            let sampled = TokenChoice::Sampled(Sampling::default());
            let mut all = CascadeAcceptance::default();
            all.add_place(&TargetSays::Probs(p.clone()), &drafters, sampled, lenience);
            for proposer in [SMALL, LOOKED_UP] {
                // The draft reviews one candidate, and the target what the draft emits in its place.
                let outcomes = enumerate(|draws| {
                    let candidate = match proposer {
                        SMALL => {
                            let token_id = draws.categorical(&small) as u32;
                            CascadeCandidate::drawn(token_id, small.clone())
                        }
                        _ => CascadeCandidate::certain(found),
                    };
                    let own = |_| draft.clone();
                    let stands = review_sampled(&[candidate], own, lenience, draws);
                    let by_target =
                        review_sampled(&stands[..1], |_| p.clone(), Lenience::NONE, draws);
                    (stands.len() > 1, by_target.len() > 1)
                });
                let share = |is: fn(&(bool, bool)) -> bool| -> f64 {
                    outcomes.iter().filter(|(it, _)| is(it)).map(|(_, prob)| prob).sum()
                };
                close(all.prob(1, token(proposer, None)), share(|it| it.0));
                close(all.prob(0, token(DRAFT, Some(proposer))), share(|it| it.1));
            }
        }
    }
    #[test]
    fn tokens_that_are_alike_and_beyond_a_top_p_are_no_candidates() {
        // Of equals a top-p keeps the last: the first cannot be drawn.
        let sampling = Sampling { top_p: 0.4, ..Sampling::default() };
        let says = || DrafterSays::Logits(vec![1.0, 1.0]);
        let lenience = Lenience::new(2.0).expect("1 or more");
        let mut all = CascadeAcceptance::default();
        let target = TargetSays::Probs(vec![0.25, 0.75]);
        let choice = TokenChoice::Sampled(sampling);
        all.add_place(&target, &[says(), says()], choice, lenience);
        close(all.prob(0, token(DRAFT, Some(SMALL))), all.prob(0, token(DRAFT, None)));
        close(all.prob(1, token(SMALL, None)), 1.0);
    }
}

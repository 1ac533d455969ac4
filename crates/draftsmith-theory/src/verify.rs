//! Verification: which of a round's candidates stand, and the token that follows them.
//!
//! Greedy verification compares with the target's argmax; sampled verification is rejection
//! sampling (Leviathan et al., Chen et al.) and leaves the output distributed exactly as the
//! target's own. Rows are the distributions *as served*: what each candidate was really drawn from,
//! and what the target would really be sampled with.

use crate::Draws;

/// The outcome of one round: its first `num_accepted` candidates, then `next_token`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Verdict {
    /// How many leading candidates stand.
    pub num_accepted: usize,
    /// The target's token after them: a correction, or a bonus when every candidate stands.
    pub next_token: u32,
}

/// Accepts the longest run of candidates that are the target's own choices.
///
/// `target_choices[i]` is the target's argmax after the candidates before `i`: one for every
/// candidate and one more.
///
/// # Panics
/// If there is not one more choice than candidates.
pub fn verify_greedy(candidates: &[u32], target_choices: &[u32]) -> Verdict {
    assert_eq!(
        target_choices.len(),
        candidates.len() + 1,
        "one more target choice than candidates"
    );
    let num_accepted = candidates
        .iter()
        .zip(target_choices)
        .take_while(|(candidate, choice)| candidate == choice)
        .count();
    Verdict { num_accepted, next_token: target_choices[num_accepted] }
}

/// Accepts each candidate in turn with chance min(1, p/q), up to the first rejection.
///
/// `draft_probs[i]` is the distribution q that candidate `i` was drawn from, and `target_probs[i]`
/// the target's distribution p at the same place, with one more row for the bonus. On rejection the
/// next token is drawn from (p − q)+, normalised by the draw; after the last candidate it is drawn
/// from the last row of p.
///
/// A candidate is accepted iff r < p/q. The published r <= p/q would accept a token of p = 0 at r =
/// 0.
///
/// # Panics
/// If the number of rows or their lengths do not fit, or a candidate's own draft probability is 0.
pub fn verify_sampled<R: AsRef<[f64]>>(
    candidates: &[u32],
    draft_probs: &[R],
    target_probs: &[R],
    draws: &mut (impl Draws + ?Sized),
) -> Verdict {
    assert_eq!(draft_probs.len(), candidates.len(), "one draft row a candidate");
    assert_eq!(target_probs.len(), candidates.len() + 1, "one more target row than candidates");
    for (num_accepted, &candidate) in candidates.iter().enumerate() {
        let (q, p) = (draft_probs[num_accepted].as_ref(), target_probs[num_accepted].as_ref());
        assert_eq!(q.len(), p.len(), "draft and target rows must be over one vocabulary");
        let (q_candidate, p_candidate) = (q[candidate as usize], p[candidate as usize]);
        assert!(q_candidate > 0.0, "candidate `{candidate}` cannot have been drawn from its row");
        if !draws.bernoulli(p_candidate / q_candidate) {
            return Verdict { num_accepted, next_token: draw_residual(p, q, draws) };
        }
    }
    let bonus = target_probs[candidates.len()].as_ref();
    Verdict { num_accepted: candidates.len(), next_token: draws.categorical(bonus) as u32 }
}

/// A token drawn from (p − q)+, normalised.
fn draw_residual(p: &[f64], q: &[f64], draws: &mut (impl Draws + ?Sized)) -> u32 {
    let residual: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    // A rejection means p < q somewhere, hence p > q elsewhere, but rounding can leave rows that
    // sum to a hair less than each other: then p and q are equal for all purposes, and p itself is
    // the right law.
    let nothing_left = residual.iter().all(|&weight| weight == 0.0);
    draws.categorical(if nothing_left { p } else { &residual }) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SeededDraws, enumerate, law};

    /// A random distribution with zeros in it.
    fn random_probs(rng: &mut SeededDraws, len: usize) -> Vec<f64> {
        loop {
            let weights: Vec<f64> = (0..len)
                .map(|_| if rng.bernoulli(0.3) { 0.0 } else { rng.uniform().powi(3) })
                .collect();
            let total: f64 = weights.iter().sum();
            if total > 0.0 {
                return weights.iter().map(|weight| weight / total).collect();
            }
        }
    }

    #[test]
    fn one_candidate_leaves_the_target_law() {
        let mut rng = SeededDraws::new(1, &["verify"]);
        for case in 0..400 {
            let len = 1 + case % 7;
            let (q, p) = (random_probs(&mut rng, len), random_probs(&mut rng, len));
            let bonus = vec![1.0; len];
            let outcomes = enumerate(|draws| {
                let candidate = draws.categorical(&q) as u32;
                let verdict = verify_sampled(&[candidate], &[&q], &[&p, &bonus], draws);
                if verdict.num_accepted == 1 { candidate } else { verdict.next_token }
            });
            let emitted = law(outcomes);
            for (token, prob) in p.iter().enumerate() {
                let found = emitted.get(&(token as u32)).copied().unwrap_or(0.0);
                // A few dozen f64 operations on numbers below 1.
                assert!((found - prob).abs() < 1e-12, "p {p:?}, q {q:?}, token {token}: {found}");
                assert!(
                    *prob > 0.0 || found == 0.0,
                    "a token of target probability 0 is never emitted"
                );
            }
        }
    }

    /// A bigram model: the next token's distribution given the last token.
    type Table = Vec<Vec<f64>>;

    /// One round of two candidates, continued from the target to three tokens.
    fn three_tokens(draft: &Table, target: &Table, draws: &mut impl Draws) -> Vec<u32> {
        let (mut candidates, mut context) = (Vec::new(), 0);
        let (mut draft_probs, mut target_probs) = (Vec::new(), vec![target[0].clone()]);
        for _ in 0..2 {
            draft_probs.push(draft[context].clone());
            context = draws.categorical(&draft[context]);
            candidates.push(context as u32);
            target_probs.push(target[context].clone());
        }
        let verdict = verify_sampled(&candidates, &draft_probs, &target_probs, draws);
        let mut tokens = candidates[..verdict.num_accepted].to_vec();
        tokens.push(verdict.next_token);
        while tokens.len() < 3 {
            let last = tokens[tokens.len() - 1] as usize;
            tokens.push(draws.categorical(&target[last]) as u32);
        }
        tokens
    }

    #[test]
    fn two_candidates_and_a_bonus_leave_the_joint_target_law() {
        let mut rng = SeededDraws::new(2, &["verify"]);
        for _ in 0..25 {
            let draft: Table = (0..3).map(|_| random_probs(&mut rng, 3)).collect();
            let target: Table = (0..3).map(|_| random_probs(&mut rng, 3)).collect();
            let emitted = law(enumerate(|draws| three_tokens(&draft, &target, draws)));
            let plain = law(enumerate(|draws| {
                let mut context = 0;
                let mut next = || {
                    context = draws.categorical(&target[context]);
                    context as u32
                };
                vec![next(), next(), next()]
            }));
            assert_eq!(emitted.keys().collect::<Vec<_>>(), plain.keys().collect::<Vec<_>>());
            for (tokens, prob) in &plain {
                // Sums of a few hundred products of f64 below 1.
                assert!((emitted[tokens] - prob).abs() < 1e-12, "{tokens:?}");
            }
        }
    }

    #[test]
    fn a_vanished_residual_falls_back_to_the_target() {
        // p <= q everywhere, as rounding can leave it: rejected, but with nothing in (p - q)+.
        let (q, p) = ([0.5, 0.5], [0.5 - 1e-16, 0.5]);
        let verdicts = law(enumerate(|draws| verify_sampled(&[0], &[q], &[p, [0.0, 1.0]], draws)));
        let rejected: Vec<u32> =
            verdicts.keys().filter(|v| v.num_accepted == 0).map(|v| v.next_token).collect();
        assert_eq!(rejected, [0, 1]);
    }

    #[test]
    fn equal_rows_accept_everything() {
        let row = vec![0.25, 0.75];
        let rows = vec![row; 4];
        let verdicts = law(enumerate(|draws| verify_sampled(&[1, 0, 1], &rows[..3], &rows, draws)));
        assert!(verdicts.keys().all(|verdict| verdict.num_accepted == 3));
        assert_eq!(verdicts[&Verdict { num_accepted: 3, next_token: 1 }], 0.75);
    }

    #[test]
    fn no_candidates_is_plain_decoding() {
        let verdicts = law(enumerate(|draws| verify_sampled(&[], &[], &[[0.5, 0.5]], draws)));
        assert_eq!(verdicts.len(), 2);
        assert_eq!(verify_greedy(&[], &[8]), Verdict { num_accepted: 0, next_token: 8 });
    }

    #[test]
    fn greedy_accepts_the_longest_match() {
        for (candidates, num_accepted, next_token) in
            [([1, 2, 3], 3, 4), ([1, 2, 9], 2, 3), ([1, 9, 3], 1, 2), ([9, 2, 3], 0, 1)]
        {
            assert_eq!(
                verify_greedy(&candidates, &[1, 2, 3, 4]),
                Verdict { num_accepted, next_token }
            );
        }
    }

    #[test]
    fn one_hot_rows_make_sampled_verification_greedy() {
        let one_hot =
            |token: u32| (0..5).map(|t| f64::from(u8::from(t == token))).collect::<Vec<f64>>();
        let choices = [1, 2, 3, 4];
        let target_probs = choices.map(one_hot);
        for candidates in [[1, 2, 3], [1, 2, 0], [1, 0, 3], [0, 2, 3]] {
            let draft_probs = candidates.map(one_hot);
            let verdict = verify_sampled(
                &candidates,
                &draft_probs,
                &target_probs,
                &mut SeededDraws::new(0, &[]),
            );
            assert_eq!(verdict, verify_greedy(&candidates, &choices));
        }
    }

    #[test]
    #[should_panic(expected = "cannot have been drawn")]
    fn a_candidate_its_row_excludes_is_a_bug() {
        verify_sampled(
            &[1],
            &[[1.0, 0.0]],
            &[[0.5, 0.5], [0.5, 0.5]],
            &mut SeededDraws::new(0, &[]),
        );
    }
}

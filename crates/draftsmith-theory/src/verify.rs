//! Verification: which of a round's proposed tokens the target accepts, and the token that follows.
//!
//! Greedy verification compares with the target's argmax. Sampled verification is rejection
//! sampling (Leviathan et al., Chen et al.; over siblings as in SpecInfer), and its output has
//! exactly the target's distribution. Every row is a distribution *as served*, after temperature
//! and filters: candidates were drawn from the draft's rows, and the target would sample from its
//! own.

use crate::{DrawnFrom, Draws, Proposal};

/// The outcome of one round: the accepted nodes, then `next_token`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Commit {
    /// The indices of the accepted nodes, from the root down.
    pub path: Vec<usize>,
    /// The target's next token: a correction, or a bonus token if nothing was rejected.
    pub next_token: u32,
}

/// Accepts the longest path of tokens that the target would choose.
///
/// `choice_after(row)` returns the target's argmax after the sequence for row 0, and after node i
/// for row i + 1. It is called only for rows on the accepted path.
pub fn verify_greedy(proposal: &Proposal, mut choice_after: impl FnMut(usize) -> u32) -> Commit {
    let mut path = Vec::new();
    loop {
        let at = path.last().copied();
        let choice = choice_after(row_after(at));
        let accepted = proposal.children(at).find(|(_, node)| node.token_id == choice);
        match accepted {
            Some((number, _)) => path.push(number),
            None => return Commit { path, next_token: choice },
        }
    }
}

/// Accepts each proposed token in turn with probability min(1, p/q), then continues with its
/// children if it is accepted, otherwise with its next sibling.
///
/// `probs_after(row)` returns the target's distribution p, with rows as in [`verify_greedy`]. After
/// a rejection p is replaced by the normalised (p − q)+. The remaining siblings are verified
/// against it, and if all are rejected, the next token is drawn from it. After a node without
/// children the next token is drawn from p itself.
///
/// A token is accepted iff r < p/q. The published r <= p/q would accept a token of p = 0 at r = 0.
///
/// # Panics
/// If the draft's and the target's rows differ in length, or a token's own draft probability is 0.
pub fn verify_sampled(
    proposal: &Proposal,
    mut probs_after: impl FnMut(usize) -> Vec<f64>,
    draws: &mut (impl Draws + ?Sized),
) -> Commit {
    let mut path = Vec::new();
    loop {
        let at = path.last().copied();
        let mut p = probs_after(row_after(at));
        let mut accepted = None;
        for (nth, (number, node)) in proposal.children(at).enumerate() {
            // After a rejection p no longer sums to 1.
            let mass: f64 = if nth == 0 { 1.0 } else { p.iter().sum() };
            let token = node.token_id as usize;
            let q_token = match &node.drawn_from {
                DrawnFrom::OneHot => 1.0,
                DrawnFrom::Probs(q) => {
                    assert_eq!(
                        q.len(),
                        p.len(),
                        "draft and target rows must be over one vocabulary"
                    );
                    q[token]
                }
            };
            assert!(q_token > 0.0, "token `{token}` cannot have been drawn from its row");
            if draws.bernoulli(p[token] / (mass * q_token)) {
                accepted = Some(number);
                break;
            }
            take_residual(&mut p, mass, &node.drawn_from, token);
        }
        match accepted {
            Some(number) => path.push(number),
            None => return Commit { path, next_token: draws.categorical(&p) as u32 },
        }
    }
}

/// Returns the index of the target's row after a node, or after the sequence if `node` is None.
fn row_after(node: Option<usize>) -> usize {
    node.map_or(0, |node| node + 1)
}

/// Replaces p, whose sum is `mass`, by the unnormalised residual (p − mass · q)+ after a rejection.
pub(crate) fn take_residual(p: &mut [f64], mass: f64, drawn_from: &DrawnFrom, token: usize) {
    // A rejection means p < q somewhere, hence p > q elsewhere. But rounding can make p <= q
    // everywhere: then the two are practically equal, and p itself is the right distribution.
    match drawn_from {
        DrawnFrom::OneHot => {
            if p.iter().enumerate().any(|(other, p)| other != token && *p > 0.0) {
                p[token] = 0.0;
            }
        }
        DrawnFrom::Probs(q) => {
            if p.iter().zip(q).any(|(p, q)| *p > mass * q) {
                p.iter_mut().zip(q).for_each(|(p, q)| *p = (*p - mass * q).max(0.0));
            }
        }
    }
}

/// Verifies a chain of candidates, each drawn from its row of `draft_probs`.
#[cfg(test)]
pub(crate) fn verify_chain<Q: AsRef<[f64]>, P: AsRef<[f64]>>(
    candidates: &[u32],
    draft_probs: &[Q],
    target_probs: &[P],
    draws: &mut (impl Draws + ?Sized),
) -> Commit {
    let proposal = Proposal::chain(candidates, draft_probs);
    verify_sampled(&proposal, |row| target_probs[row].as_ref().to_vec(), draws)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::random_probs;
    use crate::{Node, SeededDraws, distribution_of, enumerate};

    #[test]
    fn one_candidate_leaves_the_target_distribution() {
        let mut rng = SeededDraws::new(1, &["verify"]);
        for case in 0..400 {
            let len = 1 + case % 7;
            let (q, p) = (random_probs(&mut rng, len), random_probs(&mut rng, len));
            let bonus = vec![1.0; len];
            let outcomes = enumerate(|draws| {
                let candidate = draws.categorical(&q) as u32;
                let commit = verify_chain(&[candidate], &[&q], &[&p, &bonus], draws);
                if commit.path.is_empty() { commit.next_token } else { candidate }
            });
            let emitted = distribution_of(outcomes);
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

    /// A bigram model: the next token's distribution after each token.
    type Table = Vec<Vec<f64>>;

    /// Decodes one round of two candidates, continued by the target to three tokens.
    fn three_tokens(draft: &Table, target: &Table, draws: &mut impl Draws) -> Vec<u32> {
        let (mut candidates, mut context) = (Vec::new(), 0);
        let (mut draft_probs, mut target_probs) = (Vec::new(), vec![target[0].clone()]);
        for _ in 0..2 {
            draft_probs.push(draft[context].clone());
            context = draws.categorical(&draft[context]);
            candidates.push(context as u32);
            target_probs.push(target[context].clone());
        }
        let commit = verify_chain(&candidates, &draft_probs, &target_probs, draws);
        let mut tokens = candidates[..commit.path.len()].to_vec();
        tokens.push(commit.next_token);
        while tokens.len() < 3 {
            let last = tokens[tokens.len() - 1] as usize;
            tokens.push(draws.categorical(&target[last]) as u32);
        }
        tokens
    }

    #[test]
    fn two_candidates_and_a_bonus_leave_the_joint_target_distribution() {
        let mut rng = SeededDraws::new(2, &["verify"]);
        for _ in 0..25 {
            let draft: Table = (0..3).map(|_| random_probs(&mut rng, 3)).collect();
            let target: Table = (0..3).map(|_| random_probs(&mut rng, 3)).collect();
            let emitted = distribution_of(enumerate(|draws| three_tokens(&draft, &target, draws)));
            let plain = distribution_of(enumerate(|draws| {
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

    /// Decodes two tokens in a round of siblings drawn from one row, each with one child.
    fn tree_tokens(
        draft: &Table,
        target: &Table,
        width: usize,
        draws: &mut impl Draws,
    ) -> Vec<u32> {
        let mut proposal = Proposal::default();
        let mut rows = vec![target[0].clone()];
        let mut add = |parent, rank, from: usize, draws: &mut _| {
            let token = Draws::categorical(draws, &draft[from]);
            let drawn_from = DrawnFrom::Probs(draft[from].clone());
            rows.push(target[token].clone());
            (proposal.push(Node { parent, token_id: token as u32, drawn_from, rank }), token)
        };
        let siblings: Vec<_> = (0..width).map(|rank| add(None, rank, 0, draws)).collect();
        for (number, token) in siblings {
            add(Some(number), 0, token, draws);
        }
        let commit = verify_sampled(&proposal, |row| rows[row].clone(), draws);
        let mut tokens: Vec<u32> =
            commit.path.iter().map(|number| proposal.nodes()[*number].token_id).collect();
        tokens.push(commit.next_token);
        if tokens.len() < 2 {
            tokens.push(draws.categorical(&target[tokens[0] as usize]) as u32);
        }
        tokens.truncate(2);
        tokens
    }

    #[test]
    fn trees_leave_the_joint_target_distribution() {
        let mut rng = SeededDraws::new(4, &["verify"]);
        for width in [1, 2, 3] {
            for _ in 0..8 {
                let size = if width < 3 { 3 } else { 2 };
                let draft: Table = (0..size).map(|_| random_probs(&mut rng, size)).collect();
                let target: Table = (0..size).map(|_| random_probs(&mut rng, size)).collect();
                let emitted =
                    distribution_of(enumerate(|draws| tree_tokens(&draft, &target, width, draws)));
                let plain = distribution_of(enumerate(|draws| {
                    let first = draws.categorical(&target[0]);
                    vec![first as u32, draws.categorical(&target[first]) as u32]
                }));
                for tokens in emitted.keys().chain(plain.keys()) {
                    let [found, expected] = [&emitted, &plain]
                        .map(|distribution| distribution.get(tokens).copied().unwrap_or(0.0));
                    // Sums of some thousands of products of f64 below 1.
                    assert!((found - expected).abs() < 1e-12, "{tokens:?}: {found}, {expected}");
                }
            }
        }
    }

    #[test]
    fn one_hot_tokens_leave_the_target_distribution() {
        let mut rng = SeededDraws::new(5, &["verify"]);
        for _ in 0..50 {
            let p = random_probs(&mut rng, 4);
            let mut proposal = Proposal::default();
            for (rank, token_id) in [2, 0].into_iter().enumerate() {
                let drawn_from = DrawnFrom::OneHot;
                proposal.push(Node { parent: None, token_id, drawn_from, rank });
            }
            let emitted = distribution_of(enumerate(|draws| {
                let bonus = vec![1.0; 4];
                let rows = [&p, &bonus, &bonus];
                let commit = verify_sampled(&proposal, |row| rows[row].clone(), draws);
                commit.path.first().map_or(commit.next_token, |at| proposal.nodes()[*at].token_id)
            }));
            for (token, prob) in p.iter().enumerate() {
                let found = emitted.get(&(token as u32)).copied().unwrap_or(0.0);
                assert!((found - prob).abs() < 1e-12, "{token}: {found} for {prob}");
            }
        }
    }

    #[test]
    fn a_vanished_residual_falls_back_to_the_target() {
        // p <= q everywhere, as rounding can leave it: rejected, but with nothing in (p - q)+.
        let (q, rows) = ([0.5, 0.5], [[0.5 - 1e-16, 0.5], [0.0, 1.0]]);
        let commits = distribution_of(enumerate(|draws| verify_chain(&[0], &[q], &rows, draws)));
        let rejected: Vec<u32> = commits
            .keys()
            .filter(|commit| commit.path.is_empty())
            .map(|commit| commit.next_token)
            .collect();
        assert_eq!(rejected, [0, 1]);
    }

    #[test]
    fn equal_rows_accept_everything() {
        let row = vec![0.25, 0.75];
        let rows = vec![row; 4];
        let commits =
            distribution_of(enumerate(|draws| verify_chain(&[1, 0, 1], &rows[..3], &rows, draws)));
        assert!(commits.keys().all(|commit| commit.path == [0, 1, 2]));
        assert_eq!(commits[&Commit { path: vec![0, 1, 2], next_token: 1 }], 0.75);
    }

    #[test]
    fn no_candidates_give_plain_decoding() {
        let nothing = Proposal::default();
        let commits =
            distribution_of(enumerate(|draws| verify_sampled(&nothing, |_| vec![0.5, 0.5], draws)));
        assert_eq!(commits.len(), 2);
        assert_eq!(verify_greedy(&nothing, |_| 8), Commit { path: vec![], next_token: 8 });
    }

    #[test]
    fn greedy_verification_accepts_the_longest_match() {
        for (candidates, num_accepted, next_token) in
            [([1, 2, 3], 3, 4), ([1, 2, 9], 2, 3), ([1, 9, 3], 1, 2), ([9, 2, 3], 0, 1)]
        {
            let proposal = Proposal::certain_chain(&candidates);
            assert_eq!(
                verify_greedy(&proposal, |row| [1, 2, 3, 4][row]),
                Commit { path: (0..num_accepted).collect(), next_token }
            );
        }
    }

    #[test]
    fn greedy_verification_follows_the_targets_branch() {
        let mut proposal = Proposal::certain_chain(&[1, 2]);
        for (parent, token_id) in [(None, 3), (Some(2), 4), (Some(2), 5)] {
            let drawn_from = DrawnFrom::OneHot;
            proposal.push(Node { parent, token_id, drawn_from, rank: 0 });
        }
        // The target chooses 3, then 5, then 6.
        let choices = [3, 0, 0, 5, 0, 6];
        assert_eq!(
            verify_greedy(&proposal, |row| choices[row]),
            Commit { path: vec![2, 4], next_token: 6 }
        );
    }

    #[test]
    fn one_hot_rows_make_sampled_verification_greedy() {
        let one_hot =
            |token: u32| (0..5).map(|t| f64::from(u8::from(t == token))).collect::<Vec<f64>>();
        let choices = [1, 2, 3, 4];
        for candidates in [[1, 2, 3], [1, 2, 0], [1, 0, 3], [0, 2, 3]] {
            for proposal in [
                Proposal::chain(&candidates, &candidates.map(one_hot)),
                Proposal::certain_chain(&candidates),
            ] {
                let draws = &mut SeededDraws::new(0, &[]);
                let commit = verify_sampled(&proposal, |row| one_hot(choices[row]), draws);
                assert_eq!(commit, verify_greedy(&proposal, |row| choices[row]));
            }
        }
    }

    #[test]
    #[should_panic(expected = "cannot have been drawn")]
    fn a_candidate_of_probability_zero_is_a_bug() {
        let draws = &mut SeededDraws::new(0, &[]);
        verify_chain(&[1], &[[1.0, 0.0]], &[[0.5, 0.5], [0.5, 0.5]], draws);
    }
}

//! Selection of the k-th largest logit and the top-p set from a vocabulary, without sorting.
//!
//! `sampling` needs them for every decoded token. One comparison per token discards nearly all of a
//! vocabulary. Repeated halving finds the edge of the selection in the rest, which is never sorted.

/// A token's index and its unnormalised weight.
pub(crate) type Token = (usize, f64);

/// Finds the k-th largest logit, where k = `top_k` is at least 1. Returns −∞ if fewer than k logits
/// are above −∞. NaNs are skipped.
///
/// It makes one pass and holds only the logits above the k-th largest so far, at most 2k + 64.
pub(crate) fn kth_largest(logits: &[f32], top_k: usize) -> f32 {
    let select =
        |best: &mut Vec<f32>| *best.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a)).1;
    let capacity = 2 * top_k + 64;
    let mut best: Vec<f32> = Vec::with_capacity(capacity);
    let mut floor = f32::NEG_INFINITY;
    for &logit in logits {
        if logit > floor {
            best.push(logit);
            if best.len() == capacity {
                floor = select(&mut best);
                best.truncate(top_k);
            }
        }
    }
    if best.len() < top_k { f32::NEG_INFINITY } else { select(&mut best) }
}

/// Finds the tokens of the `top_k` largest logits, in descending order of logit and, among equal
/// logits, ascending order of id. There are fewer if fewer logits are above −∞.
pub(crate) fn largest(logits: &[f32], top_k: usize) -> Vec<u32> {
    if top_k == 0 {
        return Vec::new();
    }
    let floor = kth_largest(logits, top_k);
    let is_kept = |(_, logit): &(u32, f32)| *logit >= floor && *logit > f32::NEG_INFINITY;
    let mut kept: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(is_kept).collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    kept.truncate(top_k);
    kept.into_iter().map(|(token, _)| token).collect()
}

/// Selects the top-p set, in no particular order. A token belongs to it if the more probable tokens
/// together hold less than `top_p` of the mass.
///
/// A kept token and all tokens that weigh no more together hold more than 1 − `top_p` of the mass.
/// They are at most `num_tokens` tokens, so a kept token weighs more than (1 − `top_p`) /
/// `num_tokens` of the total. This bound discards nearly all tokens of most rows. A quickselect on
/// mass then finds the edge of the set in linear time, even if the distribution is flat.
pub(crate) fn nucleus(
    tokens: impl Iterator<Item = Token>,
    total: f64,
    num_tokens: usize,
    top_p: f64,
) -> Vec<Token> {
    // The bound is lowered slightly, so that rounding never removes a token of the set.
    let least = (1.0 - top_p) * total / num_tokens as f64 * (1.0 - 1e-9);
    let mut tokens: Vec<Token> = tokens.filter(|(_, weight)| *weight >= least).collect();
    let descending = |a: &Token, b: &Token| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0));
    // Of the tokens in descending order, those up to and including index `start` are kept, and
    // those from index `end` on are removed.
    let (mut start, mut end, mut mass_before) = (0, tokens.len(), 0.0);
    while end - start > 1 {
        let half = (end - start) / 2;
        tokens[start..end].select_nth_unstable_by(half, descending);
        let mass_through =
            mass_before + tokens[start..start + half].iter().map(|(_, weight)| weight).sum::<f64>();
        if mass_through < top_p * total {
            start += half;
            mass_before = mass_through;
        } else {
            end = start + half;
        }
    }
    tokens.truncate(end);
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededDraws;

    #[test]
    fn kth_largest_equals_that_of_a_sort() {
        let mut draws = SeededDraws::new(9, &["kth"]);
        for len in [1, 10, 200, 1000] {
            let mut logits: Vec<f32> =
                (0..len).map(|_| (draws.uniform() * 50.0).floor() as f32).collect();
            for top_k in [1, 2, 10, 100, 1000].into_iter().filter(|&top_k| top_k <= len) {
                let mut sorted = logits.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                assert_eq!(kth_largest(&logits, top_k), sorted[top_k - 1]);
                let mut tokens: Vec<u32> = (0..len as u32).collect();
                // A stable sort: equals stay in order of index.
                tokens.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
                assert_eq!(largest(&logits, top_k), tokens[..top_k]);
                logits.reverse();
            }
        }
    }

    #[test]
    fn nucleus_equals_that_of_a_sort() {
        let mut draws = SeededDraws::new(9, &["nucleus"]);
        for len in [1, 63, 64, 65, 2000] {
            for top_p in [0.001, 0.3, 0.9, 0.999, 1.0 - 1e-12] {
                // Multiples of 1/8: sums are exact, and ties abound.
                let weights: Vec<f64> =
                    (0..len).map(|_| (draws.uniform() * 40.0).ceil() / 8.0).collect();
                let total: f64 = weights.iter().sum();
                let mut expected: Vec<Token> = weights.iter().copied().enumerate().collect();
                expected.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
                let mut mass = 0.0;
                let num_kept = expected.iter().take_while(|(_, weight)| {
                    let before = mass;
                    mass += weight;
                    before < top_p * total
                });
                let num_kept = num_kept.count();
                expected.truncate(num_kept);
                expected.sort_by_key(|(index, _)| *index);
                let mut found = nucleus(weights.into_iter().enumerate(), total, len, top_p);
                found.sort_by_key(|(index, _)| *index);
                assert_eq!(found, expected);
            }
        }
    }
}

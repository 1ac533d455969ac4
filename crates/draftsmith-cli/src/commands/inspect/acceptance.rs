//! Acceptance of a data set's draft: by its entropy, and the expected tokens of rounds of fixed lengths.

use draftsmith_data::DraftColumns;
use draftsmith_report::median_of;
use draftsmith_theory::{
    EntropyThresholdConfig, acceptance_prob, bretagnolle_huber_bound, entropy_overlap_estimate,
    expected_tokens_per_round, overlap_lower_bound, pinsker_bound,
};
use serde::Serialize;
use serde_json::{Value, json};

/// Computes the mean of values. `None` if there are none.
pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

pub(super) fn overlaps(columns: &DraftColumns) -> Vec<f64> {
    columns.overlap.iter().map(|overlap| f64::from(*overlap)).collect()
}

/// Computes min(1, p/q) at the draft's tokens.
pub(super) fn acceptance_probs(columns: &DraftColumns) -> Vec<f64> {
    let pairs = columns.target_log_prob.iter().zip(&columns.draft_log_prob);
    pairs.map(|(p, q)| f64::from(acceptance_prob(*p, *q))).collect()
}

/// Returns 1 at each position where draft and target have the same most probable token, and 0 elsewhere.
pub(super) fn agreements(columns: &DraftColumns) -> Vec<f64> {
    let pairs = columns.draft_top_ids.iter().zip(&columns.target_top_ids);
    pairs.map(|(draft, target)| f64::from(u8::from(draft == target))).collect()
}

/// The edges between bands of entropy, as SVIP's thresholds h = √(c·H).
const EDGES: [f64; 7] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0];
/// The candidate lengths to show expected tokens for.
const LENGTHS: [usize; 8] = [1, 2, 3, 4, 5, 6, 8, 10];

/// The positions with a similar draft entropy, by SVIP's measure √(c·H).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct EntropyBand {
    /// The smallest √(c·H) of the band, with c as in SVIP's code and H the draft's entropy.
    pub(super) from_threshold: f64,
    /// The smallest √(c·H) of the next band; null for the last band.
    pub(super) to_threshold: Option<f64>,
    /// The number of positions in the band.
    num_positions: usize,
    /// Their mean overlap, which is the expected acceptance probability.
    pub(super) mean_overlap: f64,
    /// The mean of SVIP's estimate of it, 1 − √(c·H).
    pub(super) svip_estimate: f64,
    /// The mean of the overlap's lower bound by KL(q, p) (Pinsker, or Bretagnolle and Huber); null unless
    /// tokens are sampled from the models' raw distributions, to which the divergence refers.
    pub(super) overlap_bound: Option<f64>,
}

/// Groups positions into bands of the draft's entropy, in ascending order; bands without positions are left out.
/// `is_raw` says that the overlap is of the models' distributions at temperature 1 without top-k and top-p.
pub(super) fn by_entropy(drafted: &[&DraftColumns], is_raw: bool) -> Vec<EntropyBand> {
    let scale = EntropyThresholdConfig::ENTROPY_SCALE;
    let mut bands: Vec<Vec<[f64; 3]>> = vec![Vec::new(); EDGES.len() + 1];
    for columns in drafted {
        for (at, (overlap, entropy)) in
            columns.overlap.iter().zip(&columns.draft_entropy).enumerate()
        {
            let entropy = f64::from(*entropy).max(0.0);
            // An unknown divergence gives the trivial bound.
            let cross_entropy = columns.draft_target_cross_entropy.as_ref().map(|all| all[at]);
            let divergence = cross_entropy.map_or(f64::INFINITY, f64::from) - entropy;
            let threshold = (scale * entropy).sqrt();
            bands[EDGES.partition_point(|edge| *edge <= threshold)].push([
                f64::from(*overlap),
                entropy_overlap_estimate(entropy, scale),
                // The data lacks KL(p, q).
                overlap_lower_bound(divergence, f64::INFINITY),
            ]);
        }
    }
    let is_known = drafted.iter().all(|columns| columns.draft_target_cross_entropy.is_some());
    let band = |(index, positions): (usize, &Vec<[f64; 3]>)| {
        let mean = |column: usize| {
            positions.iter().map(|position| position[column]).sum::<f64>() / positions.len() as f64
        };
        (!positions.is_empty()).then(|| EntropyBand {
            from_threshold: if index == 0 { 0.0 } else { EDGES[index - 1] },
            to_threshold: EDGES.get(index).copied(),
            num_positions: positions.len(),
            mean_overlap: mean(0),
            svip_estimate: mean(1),
            overlap_bound: (is_raw && is_known).then(|| mean(2)),
        })
    };
    bands.iter().enumerate().filter_map(band).collect()
}

/// The least entropy of the draft, in nats, at which the ratio of entropies is judged: below, it is rounding.
const LEAST_ENTROPY: f64 = 0.01;

/// What SVIP's estimate assumes, H(q, p) = (1 + 2c)·H(q) (Zhang et al. 2024, section 2), and how it is in the data.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct EntropyRatio {
    /// The number of positions where the draft's entropy is at least 0.01 nats.
    num_positions: usize,
    /// The median of H(q, p) / H(q).
    pub(super) median_ratio: f64,
    /// c = (median ratio − 1) / 2, for `entropy = { scale = c }` in a recipe.
    pub(super) fitted_scale: f64,
    /// The mean lower bound of the overlap by Pinsker, 1 − √(KL/2).
    mean_pinsker_bound: f64,
    /// The mean lower bound by Bretagnolle and Huber, 1 − √(1 − exp(−KL)).
    mean_bretagnolle_huber_bound: f64,
    /// The first mean over the second, minus 1. SVIP (Appendix B) found 0.11 for Qwen2.5, 0.20 for
    /// Pythia and 0.43 for Llama 3.
    pinsker_gain: f64,
    /// The share of positions where Pinsker's is the better one.
    share_pinsker_is_better: f64,
}

/// Computes H(q, p) / H(q) at the positions where the ratio is judged. Served data have none.
pub(super) fn entropy_ratios(drafted: &[&DraftColumns]) -> Vec<f64> {
    entropies(drafted).map(|[cross, own]| cross / own).collect()
}

/// Yields H(q, p) and H(q) at the positions where their ratio is judged.
fn entropies<'a>(drafted: &'a [&DraftColumns]) -> impl Iterator<Item = [f64; 2]> + 'a {
    let pairs = drafted.iter().flat_map(|columns| {
        let cross = columns.draft_target_cross_entropy.iter().flatten();
        cross.zip(&columns.draft_entropy).map(|(cross, own)| [*cross, *own].map(f64::from))
    });
    pairs.filter(|[cross, own]| *own >= LEAST_ENTROPY && cross.is_finite())
}

/// Measures the ratio of entropies in the data, and how well it fits SVIP's estimate. `None` if no position is
/// judged.
pub(super) fn entropy_ratio(drafted: &[&DraftColumns]) -> Option<EntropyRatio> {
    let median_ratio = median_of(entropy_ratios(drafted))?;
    let bounds = || {
        let divergences = entropies(drafted).map(|[cross, own]| (cross - own).max(0.0));
        divergences.map(|kl| [pinsker_bound(kl), bretagnolle_huber_bound(kl)])
    };
    let mean_pinsker_bound = mean(bounds().map(|[pinsker, _]| pinsker))?;
    let mean_bretagnolle_huber_bound = mean(bounds().map(|[_, other]| other))?;
    Some(EntropyRatio {
        num_positions: bounds().count(),
        median_ratio,
        fitted_scale: ((median_ratio - 1.0) / 2.0).max(0.0),
        mean_pinsker_bound,
        mean_bretagnolle_huber_bound,
        pinsker_gain: mean_pinsker_bound / mean_bretagnolle_huber_bound - 1.0,
        share_pinsker_is_better: mean(
            bounds().map(|[pinsker, other]| f64::from(u8::from(pinsker > other))),
        )?,
    })
}

/// Computes E\[L\], including the target's token, at several numbers K of candidates per round, if every candidate
/// is accepted independently with the same probability (Leviathan et al., Eq. 1).
pub(super) fn expected_tokens(acceptance_prob: f64) -> [Value; 8] {
    LENGTHS.map(|length| {
        let tokens = expected_tokens_per_round(acceptance_prob, length);
        json!({ "candidate_length": length, "tokens_per_round": tokens })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds columns with these overlaps, entropies and cross-entropies; all others are zero.
    fn columns(positions: &[[f32; 3]]) -> DraftColumns {
        let column = |index: usize| positions.iter().map(|position| position[index]).collect();
        let zeros = vec![0.0; positions.len()];
        let ids = vec![0; positions.len()];
        DraftColumns {
            response_draft_log_prob: zeros.clone(),
            draft_ids: ids.clone(),
            draft_log_prob: zeros.clone(),
            target_log_prob: zeros.clone(),
            overlap: column(0),
            draft_entropy: column(1),
            draft_target_cross_entropy: Some(column(2)),
            draft_top_ids: ids.clone(),
            target_top_ids: ids,
            draft_top_log_prob: zeros,
        }
    }

    #[test]
    fn bands_are_those_of_svips_thresholds_and_average_their_positions() {
        // √(0.15·0.5) = 0.2739, √(0.15·0.375) = 0.2372, √(0.15·8) = 1.0954. Divergences: 0.5 makes
        // the bound 1 − √0.25 by Pinsker, 0 makes it 1, 3 makes it 1 − √(1 − e⁻³) = 0.025212.
        let first = columns(&[[0.9, 0.5, 1.0]]);
        let second = columns(&[[0.25, 8.0, 11.0], [1.0, 0.375, 0.375]]);
        let bands = by_entropy(&[&first, &second], true);
        let [sure, unsure] = &bands[..] else { panic!("two bands: {bands:?}") };
        assert_eq!((sure.from_threshold, sure.to_threshold), (0.2, Some(0.3)));
        assert_eq!((unsure.from_threshold, unsure.to_threshold), (1.0, None));
        assert_eq!((sure.num_positions, unsure.num_positions), (2, 1));
        // Columns are f32.
        let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-5, "{found}");
        close(sure.mean_overlap, 0.95);
        close(sure.svip_estimate, 1.0 - (0.273_861 + 0.237_171) / 2.0);
        close(sure.overlap_bound.expect("raw"), (0.5 + 1.0) / 2.0);
        close(unsure.mean_overlap, 0.25);
        close(unsure.svip_estimate, 0.0);
        close(unsure.overlap_bound.expect("raw"), 0.025_212);
        let served = by_entropy(&[&first], false);
        assert_eq!(served[0].overlap_bound, None);
        assert_eq!(by_entropy(&[], true), []);
    }

    #[test]
    fn svips_constant_is_fitted_to_the_median_ratio() {
        // Ratios 2, 1.5 and 4, and a position without entropy. KL 0.5, 2 and 0.75.
        let some = columns(&[[0.9, 0.5, 1.0], [0.5, 4.0, 6.0], [0.1, 0.0, 3.0]]);
        let more = columns(&[[0.4, 0.25, 1.0]]);
        let found = entropy_ratio(&[&some, &more]).expect("there are positions");
        assert_eq!((found.num_positions, found.median_ratio, found.fitted_scale), (3, 2.0, 0.5));
        let [pinsker, other] = [found.mean_pinsker_bound, found.mean_bretagnolle_huber_bound];
        assert!((found.pinsker_gain - (pinsker - other) / other).abs() < 1e-12, "{found:?}");
        // Pinsker's is better below a divergence of 1.59.
        assert!((found.share_pinsker_is_better - 2.0 / 3.0).abs() < 1e-12, "{found:?}");
        let served = DraftColumns { draft_target_cross_entropy: None, ..some };
        assert_eq!(entropy_ratio(&[&served]), None);
    }

    #[test]
    fn expected_tokens_are_the_sum_of_powers() {
        let found = expected_tokens(0.5);
        let tokens = |length: usize| {
            let at = found.iter().find(|tokens| tokens["candidate_length"] == length);
            at.expect("listed")["tokens_per_round"].as_f64().expect("a number")
        };
        assert_eq!((tokens(1), tokens(2), tokens(3)), (1.5, 1.75, 1.875));
        assert_eq!(expected_tokens(1.0)[7]["tokens_per_round"], 11.0);
    }
}

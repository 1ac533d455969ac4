//! Whether a greedy answer is plain decoding's own: token for token, but for ties that rounding
//! breaks the other way.

use anyhow::Result;

use crate::decoders::Decoders;

/// How near two logits must be, relative to the larger, for a greedy mismatch to be a tie.
const TIE: f32 = 1e-5;

/// How a greedy answer compares with plain decoding's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// Token for token the same.
    Same,
    /// Apart from where plain decoding's two best logits are equal but for rounding.
    Tie,
    /// Different.
    Different,
}

/// Compares a greedy answer with plain decoding's, up to the first difference.
///
/// # Errors
/// If the target fails where it is asked about that difference.
pub(crate) fn compare(
    decoders: &mut Decoders<'_>,
    prompt_ids: &[u32],
    plain: &[u32],
    other: &[u32],
) -> Result<Agreement> {
    if plain == other {
        return Ok(Agreement::Same);
    }
    let at = num_same(plain, other);
    let ids = [prompt_ids, &plain[..at]].concat();
    let logits = decoders.score(&ids, ids.len() - 1)?;
    Ok(if top_two_gap(logits.row(0)) < TIE { Agreement::Tie } else { Agreement::Different })
}

/// The number of tokens before the first difference.
pub(crate) fn num_same(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// The gap between the two largest logits, relative to the larger magnitude.
fn top_two_gap(logits: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for logit in logits {
        if *logit > first {
            (first, second) = (*logit, first);
        } else if *logit > second {
            second = *logit;
        }
    }
    (first - second) / first.abs().max(second.abs()).max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_is_relative_and_of_the_two_largest() {
        assert_eq!(top_two_gap(&[1.0, 4.0, 3.0, -9.0]), 0.25);
        assert!(top_two_gap(&[100.0, 100.000_01, 0.0]) < TIE);
        assert_eq!(top_two_gap(&[2.0, 2.0]), 0.0);
    }

    #[test]
    fn answers_are_the_same_up_to_the_first_difference_or_the_end_of_one() {
        assert_eq!(num_same(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!(num_same(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(num_same(&[], &[1]), 0);
    }
}

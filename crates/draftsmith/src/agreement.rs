//! Whether a greedy answer is plain decoding's own: token for token, but for ties that rounding
//! breaks the other way. Answers are compared up to their first difference: behind a tie they
//! rightly say different things.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, Rounding};

use crate::decoders::Decoders;

/// How a greedy answer compares with plain decoding's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// Token for token the same.
    Same,
    /// Apart from where the logits of both answers' tokens are the greatest but for rounding.
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
    decoding: &Decoding,
    prompt_ids: &[u32],
    plain: &[u32],
    other: &[u32],
) -> Result<Agreement> {
    if plain == other {
        return Ok(Agreement::Same);
    }
    let at = num_same(plain, other);
    // One that ends where the other goes on is no matter of rounding.
    let (Some(of_plain), Some(of_other)) = (plain.get(at), other.get(at)) else {
        return Ok(Agreement::Different);
    };
    let ids = [prompt_ids, &plain[..at]].concat();
    let logits = decoders.score(&ids, ids.len() - 1)?;
    let logits = decoding.penalised(logits.row(0), ids);
    let is_tie = rounding(decoders.dtype).is_tie(&logits, *of_plain, *of_other);
    Ok(if is_tie { Agreement::Tie } else { Agreement::Different })
}

/// What the logits of a target bear that computes in a type.
pub(crate) fn rounding(dtype: WeightDtype) -> Rounding {
    match dtype {
        WeightDtype::F32 => Rounding::F32,
        WeightDtype::Bf16 => Rounding::Bf16,
    }
}

/// The number of tokens before the first difference.
pub(crate) fn num_same(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_the_same_up_to_the_first_difference_or_the_end_of_one() {
        assert_eq!(num_same(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!(num_same(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(num_same(&[], &[1]), 0);
    }
}

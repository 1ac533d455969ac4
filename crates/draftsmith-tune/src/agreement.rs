//! Compares a greedy answer with plain decoding's, token for token. Rounding may break a tie of logits the
//! other way. After a tie two correct answers may diverge, so we compare only up to the first difference.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, Rounding};

use crate::decoders::Decoders;

/// How a greedy answer compares with plain decoding's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    /// The same tokens.
    Same,
    /// At the first difference both tokens have the greatest logit within rounding.
    Tie,
    /// They differ by more than rounding.
    Different,
}

/// Compares a greedy answer with plain decoding's, up to the first difference.
///
/// # Errors
/// If the target fails to score the text before the difference.
pub fn compare(
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
    // Rounding does not explain an answer that ends early.
    let (Some(of_plain), Some(of_other)) = (plain.get(at), other.get(at)) else {
        return Ok(Agreement::Different);
    };
    let ids = [prompt_ids, &plain[..at]].concat();
    let logits = decoders.score(&ids, ids.len() - 1)?;
    let logits = decoding.penalised(logits.row(0), ids);
    let is_tie = rounding(decoders.dtype).is_tie(&logits, *of_plain, *of_other);
    Ok(if is_tie { Agreement::Tie } else { Agreement::Different })
}

/// Returns the rounding to expect in the logits of a target that computes in `dtype`.
pub fn rounding(dtype: WeightDtype) -> Rounding {
    match dtype {
        WeightDtype::F32 => Rounding::F32,
        WeightDtype::Bf16 => Rounding::Bf16,
    }
}

/// Counts the tokens before the first difference. An answer that ends early differs where it ends.
pub fn num_same(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn num_same_counts_tokens_up_to_the_first_difference_or_an_end() {
        assert_eq!(num_same(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!(num_same(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(num_same(&[], &[1]), 0);
    }
}

//! Comparison of a greedy answer with the answer of plain decoding, token by token. If two logits
//! are equal up to rounding, either token is a correct choice, and the answers may diverge
//! afterwards. So we compare only up to the first difference.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, Rounding};

use crate::decoders::Decoders;

/// The result of comparing a greedy answer with the answer of plain decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    /// Both answers have the same tokens.
    Same,
    /// Both tokens at the first difference have the largest logit up to rounding.
    Tie,
    /// The answers differ by more than rounding.
    Different,
}

/// Compares a greedy answer, `other`, with the answer of plain decoding, up to the first
/// difference.
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
    // Rounding cannot explain an answer that ends early.
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
        WeightDtype::Bf16 | WeightDtype::F16 => Rounding::Bf16,
    }
}

/// Counts the tokens before the first difference. If one answer is a prefix of the other, this is
/// its length.
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

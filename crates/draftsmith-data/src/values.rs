//! Which numbers and token ids a column may hold: one rule a kind of column, for responses and
//! rollouts alike.

use std::fmt::Display;

/// What the numbers of a column are, which says what they may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Log-probabilities; −∞ is that of what cannot happen.
    LogProb,
    /// Log-probabilities of what was drawn or is most probable, and so can happen.
    FiniteLogProb,
    /// Probabilities, and sums of them.
    Prob,
    /// Entropies and cross-entropies, in nats.
    Entropy,
}

impl Numbers {
    fn may_be(self, value: f64) -> bool {
        match self {
            Self::LogProb => value <= 0.0,
            Self::FiniteLogProb => value <= 0.0 && value.is_finite(),
            Self::Prob => (0.0..=1.0).contains(&value),
            Self::Entropy => value >= 0.0 && value.is_finite(),
        }
    }

    /// What is wrong with the first of `values` that may not be, if one is.
    pub(crate) fn problem<T: Copy + Into<f64> + Display>(self, values: &[T]) -> Option<String> {
        let at = values.iter().position(|value| !self.may_be((*value).into()))?;
        let value = values[at];
        let expected = match self {
            Self::LogProb => "at most 0",
            Self::FiniteLogProb => "at most 0 and finite",
            Self::Prob => "within [0, 1]",
            Self::Entropy => "at least 0 and finite",
        };
        Some(format!("is {value} at {at}, it must be {expected}"))
    }
}

/// What is wrong with the first of `ids` that a model of `vocab_size` tokens does not know, if one
/// is: such a model would read another token instead.
pub(crate) fn unknown_id(ids: &[u32], vocab_size: usize) -> Option<String> {
    let (at, id) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size)?;
    Some(format!(
        "has token {id} at {at}, but the model that is to read it has {vocab_size} tokens"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_held_to_what_they_are() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let check = |numbers: Numbers, may_be: &[f64], may_not_be: &[f64]| {
            assert_eq!(numbers.problem(may_be), None, "{numbers:?}");
            for &value in may_not_be {
                let problem = numbers.problem(&[may_be[0], value]).unwrap();
                assert!(problem.starts_with(&format!("is {value} at 1, ")), "{problem}");
            }
        };
        check(Numbers::LogProb, &[-0.0, 0.0, -745.0, -inf], &[f64::MIN_POSITIVE, inf, nan]);
        check(Numbers::FiniteLogProb, &[-0.0, -745.0], &[f64::MIN_POSITIVE, inf, -inf, nan]);
        check(Numbers::Prob, &[0.0, -0.0, 1.0], &[1.0 + f64::EPSILON, -1e-300, inf, -inf, nan]);
        check(Numbers::Entropy, &[0.0, -0.0, 12.0], &[-1e-300, inf, -inf, nan]);
    }

    #[test]
    fn ids_are_below_the_number_of_tokens() {
        assert_eq!(unknown_id(&[], 0), None);
        assert_eq!(unknown_id(&[0, 4095], 4096), None);
        let told = unknown_id(&[0, 4096, u32::MAX], 4096).unwrap();
        assert_eq!(told, "has token 4096 at 1, but the model that is to read it has 4096 tokens");
    }
}

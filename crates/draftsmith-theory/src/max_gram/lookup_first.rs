//! Look-ups that replace a drafter with a model in some rounds.

use std::fmt;
use std::str::FromStr;

use super::{MaxGramConfig, SearchedText};
use crate::TheoryError;
use crate::serialized::serialize_as_string;

/// The condition under which a look-up replaces the drafter's model. `2x4` in names and settings: after
/// a match of at least two tokens, up to four candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupFirst {
    /// The minimum length of a match in tokens, at least 1. Longer matches are rarer and more often
    /// right.
    pub min_match: usize,
    /// The maximum number of candidates, at least 1.
    pub most: usize,
}

impl LookupFirst {
    /// A look-up in the whole sequence.
    pub fn config(self) -> MaxGramConfig {
        MaxGramConfig { searched: SearchedText::Sequence, min_match: self.min_match }
    }
}

impl fmt::Display for LookupFirst {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}x{}", self.min_match, self.most)
    }
}

impl FromStr for LookupFirst {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self, TheoryError> {
        let read = || {
            let (min_match, most) = text.split_once('x')?;
            Some(Self { min_match: min_match.parse().ok()?, most: most.parse().ok()? })
        };
        let is_valid = |it: &Self| it.min_match > 0 && it.most > 0 && it.to_string() == text;
        read().filter(is_valid).ok_or_else(|| TheoryError::LookupFirst(text.to_owned()))
    }
}

serialize_as_string!(LookupFirst);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_only_as_it_is_written() {
        let found: LookupFirst = "2x4".parse().expect("valid");
        assert_eq!(found, LookupFirst { min_match: 2, most: 4 });
        assert_eq!(found.to_string(), "2x4");
        for text in ["", "2", "2x", "x4", "0x4", "2x0", "2x4x1", "02x4", "+2x4", "2X4", "-1x4"] {
            assert_eq!(
                text.parse::<LookupFirst>(),
                Err(TheoryError::LookupFirst(text.into())),
                "{text}"
            );
        }
    }
}

//! When a sequence is looked up before a drafter with a model is asked.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{MaxGramConfig, SearchedText};
use crate::TheoryError;

/// What a look-up must find to go before a drafter with a model. In names and settings `2x4`: behind a
/// match of two tokens or more, up to four candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupFirst {
    /// The fewest tokens of a match, 1 or more. Longer matches are found less often and are right more
    /// often.
    pub min_match: usize,
    /// The most candidates, 1 or more.
    pub most: usize,
}

impl LookupFirst {
    /// How a sequence is looked up: all of it.
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
        let is_one = |it: &Self| it.min_match > 0 && it.most > 0 && it.to_string() == text;
        read().filter(is_one).ok_or_else(|| TheoryError::LookupFirst(text.to_owned()))
    }
}

impl Serialize for LookupFirst {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LookupFirst {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_is_written_and_nothing_else_is() {
        let found: LookupFirst = "2x4".parse().expect("one");
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

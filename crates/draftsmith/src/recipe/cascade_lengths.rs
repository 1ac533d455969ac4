//! The key `lengths` of a cascade: the authors' matrix K, by hand or as `tune` finds it.

use draftsmith_decode::CascadeLengths;
use serde::{Deserialize, Serialize};

use super::found::Found;
use crate::names::DecodingName;

/// K, a row for who reviews and a column for who drafts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a matrix such as `[[4, 6], [0, 8]]`, one for each way of decoding as in \
                 `{ greedy = [[4, 0], [0, 8]], sampled = [[2, 0], [0, 4]] }`, or \"tuned\""
)]
pub(crate) enum Lengths {
    /// One for all ways of decoding.
    Same(CascadeLengths),
    /// One for each.
    Each(LengthsOfEach),
    /// Those that `tune` finds.
    Found(Found),
}

/// K by how tokens are chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LengthsOfEach {
    /// Of the most probable tokens.
    pub(crate) greedy: CascadeLengths,
    /// Of sampled ones.
    pub(crate) sampled: CascadeLengths,
}

impl Lengths {
    /// K under a way of decoding; None where `tune` is to find it.
    pub(crate) fn of(&self, decoding: DecodingName) -> Option<&CascadeLengths> {
        match (self, decoding) {
            (Self::Same(lengths), _) => Some(lengths),
            (Self::Each(each), DecodingName::Greedy) => Some(&each.greedy),
            (Self::Each(each), DecodingName::Sampled) => Some(&each.sampled),
            (Self::Found(Found::Tuned), _) => None,
        }
    }

    /// Each matrix that there is.
    pub(crate) fn all(&self) -> impl Iterator<Item = &CascadeLengths> {
        let (one, other) = match self {
            Self::Same(lengths) => (Some(lengths), None),
            Self::Each(each) => (Some(&each.greedy), Some(&each.sampled)),
            Self::Found(Found::Tuned) => (None, None),
        };
        one.into_iter().chain(other)
    }

    /// Whether `tune` is to find it.
    pub(crate) fn is_tuned(&self) -> bool {
        matches!(self, Self::Found(Found::Tuned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, Serialize)]
    struct Keys {
        lengths: Lengths,
    }

    fn read(text: &str) -> Result<Lengths, toml::de::Error> {
        toml::from_str::<Keys>(&format!("lengths = {text}")).map(|keys| keys.lengths)
    }

    #[test]
    fn a_matrix_is_of_all_decodings_or_of_each_or_to_be_found() {
        use DecodingName::{Greedy, Sampled};
        let same = read("[[2, 1], [0, 3]]").expect("a matrix");
        assert_eq!(same.of(Greedy), Some(&vec![vec![2, 1], vec![0, 3]]));
        assert_eq!(same.of(Sampled), same.of(Greedy));
        let each = read("{ greedy = [[4]], sampled = [[2]] }").expect("two");
        assert_eq!(each.of(Sampled), Some(&vec![vec![2]]));
        assert_eq!(each.all().count(), 2);
        let tuned = read("'tuned'").expect("a word");
        assert!(tuned.is_tuned() && tuned.of(Greedy).is_none() && tuned.all().count() == 0);
        for lengths in [same, each, tuned] {
            let text = toml::to_string(&Keys { lengths: lengths.clone() }).expect("plain numbers");
            assert_eq!(toml::from_str::<Keys>(&text).expect("reads back").lengths, lengths);
        }
    }

    #[test]
    fn what_is_none_is_told_what_it_could_be() {
        for text in ["'best'", "3", "[2, 1]", "{ greedy = [[2]] }", "[[-1]]"] {
            let message = read(text).expect_err("no matrix").to_string();
            assert!(message.contains("\"tuned\"") && message.contains("[[4, 6]"), "{message}");
        }
    }
}

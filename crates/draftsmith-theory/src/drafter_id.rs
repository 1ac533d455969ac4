//! Names of drafters, and the draft forwards of a round, counted by drafter.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::serialized::serialize_as_string;
use crate::{Result, TheoryError};

/// A drafter's name from the recipe. It has 1 to [`MAX_LEN`](Self::MAX_LEN) letters, digits, `-`
/// and `_` and begins with a letter. Names are ordered as text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DrafterId {
    /// The name's bytes, followed by zeros. They are stored inline so that a
    /// [`Round`](crate::Round) stays `Copy`.
    bytes: [u8; Self::MAX_LEN],
}

impl DrafterId {
    /// The maximum length of a name in bytes.
    pub const MAX_LEN: usize = 32;

    /// The default name of a draft model.
    pub const DRAFT: Self = Self::named("draft");

    /// The name of look-ups before another drafter or alone, which recipes cannot use.
    pub const LOOK_UP: Self = Self::named("look-up");

    /// Creates the id for a name that the program chooses.
    ///
    /// # Panics
    /// If `name` is not a valid name.
    pub const fn named(name: &str) -> Self {
        match Self::of(name.as_bytes()) {
            Some(id) => id,
            None => panic!("a drafter's name is a letter and then letters, digits, `-` or `_`"),
        }
    }

    const fn of(name: &[u8]) -> Option<Self> {
        if name.is_empty() || name.len() > Self::MAX_LEN || !name[0].is_ascii_alphabetic() {
            return None;
        }
        let mut bytes = [0; Self::MAX_LEN];
        let mut at = 0;
        while at < name.len() {
            if !name[at].is_ascii_alphanumeric() && name[at] != b'-' && name[at] != b'_' {
                return None;
            }
            bytes[at] = name[at];
            at += 1;
        }
        Some(Self { bytes })
    }

    /// Returns the drafter's name, 1 to [`Self::MAX_LEN`] ASCII characters.
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|byte| *byte == 0).unwrap_or(Self::MAX_LEN);
        std::str::from_utf8(&self.bytes[..len]).expect("names are ASCII")
    }
}

impl fmt::Display for DrafterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

impl fmt::Debug for DrafterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), formatter)
    }
}

impl FromStr for DrafterId {
    type Err = TheoryError;

    fn from_str(name: &str) -> Result<Self> {
        read(name).and_then(|id| if id == Self::LOOK_UP { Err(not_a_name(name)) } else { Ok(id) })
    }
}

serialize_as_string!(DrafterId, read);

/// Reads any name, including [`DrafterId::LOOK_UP`], which occurs in results. Names in recipes go
/// through `FromStr`, which refuses it.
fn read(name: &str) -> Result<DrafterId> {
    DrafterId::of(name.as_bytes()).ok_or_else(|| not_a_name(name))
}

fn not_a_name(name: &str) -> TheoryError {
    TheoryError::invalid(format!(
        "`{name}` is not a drafter's name, which has 1 to 32 letters, digits, `-` and `_`, begins with a letter and is \
         not `look-up`"
    ))
}

/// The maximum number of drafters in a round.
pub const MAX_DRAFTERS: usize = 4;

/// The number of forwards that a drafter takes for the candidates of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundForwards {
    /// One forward for each candidate.
    #[default]
    EachStep,
    /// One forward for all candidates, as with block drafters and a head per position.
    Once,
}

impl RoundForwards {
    /// Returns whether each candidate takes a forward.
    pub fn is_each_step(&self) -> bool {
        *self == Self::EachStep
    }

    /// Returns the number of forwards in a round of `num_steps` draft steps.
    pub fn of_steps(self, num_steps: usize) -> usize {
        match self {
            Self::EachStep => num_steps,
            Self::Once => num_steps.min(1),
        }
    }
}

/// The draft forwards of a round, counted per drafter because their costs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Forwards([Option<(DrafterId, usize)>; MAX_DRAFTERS]);

impl Forwards {
    /// Creates the counts of a round with `count` forwards of one drafter.
    pub fn of(drafter: DrafterId, count: usize) -> Self {
        let mut forwards = Self::default();
        forwards.add(drafter, count);
        forwards
    }

    /// Adds `count` forwards of a drafter.
    ///
    /// # Panics
    /// If there are more than [`MAX_DRAFTERS`] drafters.
    pub fn add(&mut self, drafter: DrafterId, count: usize) {
        if count == 0 {
            return;
        }
        let is_its = |entry: &Option<(DrafterId, usize)>| entry.is_none_or(|(id, _)| id == drafter);
        let entry = self.0.iter_mut().find(|entry| is_its(entry));
        let entry = entry.expect("no more drafters than `MAX_DRAFTERS` take part in a round");
        entry.get_or_insert((drafter, 0)).1 += count;
    }

    /// Yields each drafter that ran, with its number of forwards.
    pub fn iter(&self) -> impl Iterator<Item = (DrafterId, usize)> {
        self.0.iter().flatten().copied()
    }

    /// Returns the number of forwards of one drafter, 0 if it did not run.
    pub(crate) fn of_drafter(&self, drafter: DrafterId) -> usize {
        self.iter().find(|(id, _)| *id == drafter).map_or(0, |(_, count)| count)
    }

    /// Sums the forwards of all drafters.
    pub fn total(&self) -> usize {
        self.iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_words() {
        for name in ["draft", "exit2", "EAGLE-3_b", "a", &"x".repeat(DrafterId::MAX_LEN)] {
            let id: DrafterId = name.parse().expect("a name");
            assert_eq!((id.to_string().as_str(), id), (name, DrafterId::named(name)));
        }
        let long = "x".repeat(DrafterId::MAX_LEN + 1);
        for name in ["", "2x", "a b", "a.b", "a+b", "é", "look-up", &long] {
            assert_eq!(
                name.parse::<DrafterId>().unwrap_err().to_string(),
                format!(
                    "`{name}` is not a drafter's name, which has 1 to 32 letters, digits, `-` and `_`, begins with a \
                     letter and is not `look-up`"
                )
            );
        }
    }

    #[test]
    fn names_are_ordered_as_text() {
        let mut ids = ["exit2", "draft", "exit", "draft-small"].map(DrafterId::named);
        ids.sort();
        assert_eq!(ids, ["draft", "draft-small", "exit", "exit2"].map(DrafterId::named));
    }

    #[test]
    fn forwards_add_up_by_drafter() {
        let exit = DrafterId::named("exit2");
        let mut forwards = Forwards::of(DrafterId::DRAFT, 2);
        forwards.add(exit, 1);
        forwards.add(DrafterId::DRAFT, 3);
        forwards.add(exit, 0);
        assert_eq!(forwards.iter().collect::<Vec<_>>(), [(DrafterId::DRAFT, 5), (exit, 1)]);
        assert_eq!(forwards.total(), 6);
        assert_eq!(Forwards::of(exit, 0), Forwards::default());
    }
}

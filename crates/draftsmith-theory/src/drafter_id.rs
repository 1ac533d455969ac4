//! Drafters' names, and their forwards in a round.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::TheoryError;
use crate::serialized::serialize_as_string;

/// A drafter's name; in the order in which drafters are shown. A string in files: `draft`,
/// `self_draft_1`, `max_gram`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DrafterId {
    /// A separate draft model.
    Draft,
    /// Kangaroo: the target's first layers and an adapter.
    SelfDraft {
        /// The number of layers before the adapter.
        exit_layer: usize,
    },
    /// A second, smaller draft model, in cascades.
    SmallDraft,
    /// Max-Gram: prompt lookup, without a model.
    MaxGram,
    /// CS-Drafting: drafters that review each other's candidates, or take turns.
    Cascade {
        /// The cascade's number in its recipe, counted from 1.
        number: usize,
    },
    /// SpecInfer: several drafters' chains, merged into one tree.
    Merged {
        /// The merged drafter's number in its recipe, counted from 1.
        number: usize,
    },
}

impl DrafterId {
    /// A self-draft's exit layer; None for other drafters.
    pub fn exit_layer(self) -> Option<usize> {
        if let Self::SelfDraft { exit_layer } = self { Some(exit_layer) } else { None }
    }

    /// The drafter in words: `separate draft`, `self-draft, exit 1`.
    pub fn text(self) -> String {
        match self {
            Self::Draft => "separate draft".into(),
            Self::SelfDraft { exit_layer } => format!("self-draft, exit {exit_layer}"),
            Self::SmallDraft => "small draft".into(),
            Self::MaxGram => "prompt lookup (Max-Gram)".into(),
            Self::Cascade { number } => format!("cascade {number}"),
            Self::Merged { number } => format!("merged drafts {number}"),
        }
    }

    /// The prefix of its settings' names, which a separate draft's lack: `exit 1`.
    pub fn prefix(self) -> Option<String> {
        match self {
            Self::Draft => None,
            Self::SelfDraft { exit_layer } => Some(format!("exit {exit_layer}")),
            Self::SmallDraft => Some("small draft".into()),
            Self::MaxGram => Some("lookup".into()),
            Self::Cascade { number } => Some(format!("cascade {number}")),
            Self::Merged { number } => Some(format!("merged {number}")),
        }
    }
}

impl fmt::Display for DrafterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Draft => formatter.write_str("draft"),
            Self::SelfDraft { exit_layer } => write!(formatter, "self_draft_{exit_layer}"),
            Self::SmallDraft => formatter.write_str("small_draft"),
            Self::MaxGram => formatter.write_str("max_gram"),
            Self::Cascade { number } => write!(formatter, "cascade_{number}"),
            Self::Merged { number } => write!(formatter, "merged_{number}"),
        }
    }
}

impl FromStr for DrafterId {
    type Err = TheoryError;

    fn from_str(name: &str) -> Result<Self, TheoryError> {
        let known = match name {
            "draft" => Some(Self::Draft),
            "small_draft" => Some(Self::SmallDraft),
            "max_gram" => Some(Self::MaxGram),
            _ => name.rsplit_once('_').and_then(|(kind, number)| {
                let number = number.parse().ok()?;
                match kind {
                    "self_draft" => Some(Self::SelfDraft { exit_layer: number }),
                    "cascade" => Some(Self::Cascade { number }),
                    "merged" => Some(Self::Merged { number }),
                    _ => None,
                }
            }),
        };
        // `+1` and `01` parse as numbers but are not written that way.
        known
            .filter(|known| known.to_string() == name)
            .ok_or_else(|| TheoryError::UnknownDrafter(name.to_owned()))
    }
}

serialize_as_string!(DrafterId);

/// The maximum number of drafters in a round.
pub const MAX_DRAFTERS: usize = 4;

/// The draft forwards of a round, by drafter, since their costs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Forwards([Option<(DrafterId, usize)>; MAX_DRAFTERS]);

impl Forwards {
    /// Forwards of one drafter.
    pub fn of(drafter: DrafterId, count: usize) -> Self {
        let mut forwards = Self::default();
        forwards.add(drafter, count);
        forwards
    }

    /// Adds forwards of a drafter.
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

    /// Each drafter that ran, with its number of forwards.
    pub fn iter(&self) -> impl Iterator<Item = (DrafterId, usize)> {
        self.0.iter().flatten().copied()
    }

    /// The forwards of one drafter.
    pub(crate) fn of_drafter(&self, drafter: DrafterId) -> usize {
        self.iter().find(|(id, _)| *id == drafter).map_or(0, |(_, count)| count)
    }

    /// The forwards of all drafters.
    pub fn total(&self) -> usize {
        self.iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_only_as_they_are_written() {
        for (id, name) in [
            (DrafterId::Draft, "draft"),
            (DrafterId::SelfDraft { exit_layer: 1 }, "self_draft_1"),
            (DrafterId::SelfDraft { exit_layer: 12 }, "self_draft_12"),
            (DrafterId::SmallDraft, "small_draft"),
            (DrafterId::MaxGram, "max_gram"),
            (DrafterId::Cascade { number: 2 }, "cascade_2"),
            (DrafterId::Merged { number: 1 }, "merged_1"),
        ] {
            assert_eq!(id.to_string(), name);
            assert_eq!(name.parse(), Ok(id));
        }
        for name in
            ["", "none", "Draft", "self_draft_", "self_draft_01", "self_draft_+1", "cascade_"]
        {
            assert_eq!(name.parse::<DrafterId>(), Err(TheoryError::UnknownDrafter(name.into())));
        }
    }

    #[test]
    fn forwards_add_up_by_drafter() {
        let exit = DrafterId::SelfDraft { exit_layer: 2 };
        let mut forwards = Forwards::of(DrafterId::Draft, 2);
        forwards.add(exit, 1);
        forwards.add(DrafterId::Draft, 3);
        forwards.add(exit, 0);
        assert_eq!(forwards.iter().collect::<Vec<_>>(), [(DrafterId::Draft, 5), (exit, 1)]);
        assert_eq!(forwards.total(), 6);
        assert_eq!(Forwards::of(exit, 0), Forwards::default());
    }
}

//! What drafters, ways of decoding and costs are called, in the file and in words. The names of stop
//! rules come from their table in the theory crate.

use std::fmt;

use draftsmith_theory::{Decoding, DrafterId};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What proposes candidates; in the order rows are shown. In the file a string: `none`, `draft`,
/// `self_draft_1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DrafterName {
    /// Nothing: the target decodes alone.
    None,
    /// A separate draft model.
    Draft,
    /// Kangaroo: the target's own first layers and an adapter.
    SelfDraft {
        /// The layers run before the adapter.
        exit_layer: usize,
    },
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DecodingName {
    /// The most probable token.
    Greedy,
    /// A token drawn from the warped distribution.
    Sampled,
}

/// The two roads to candidates. What lies on different ones takes different files to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Road {
    /// A second, smaller model.
    SeparateDraft,
    /// The target's own first layers and an adapter, wherever they are left.
    SelfDraft,
}

impl From<DrafterId> for DrafterName {
    fn from(id: DrafterId) -> Self {
        match id {
            DrafterId::Draft => Self::Draft,
            DrafterId::SelfDraft { exit_layer } => Self::SelfDraft { exit_layer },
        }
    }
}

impl DrafterName {
    /// The drafter, if there is one.
    pub(crate) fn id(self) -> Option<DrafterId> {
        match self {
            Self::None => None,
            Self::Draft => Some(DrafterId::Draft),
            Self::SelfDraft { exit_layer } => Some(DrafterId::SelfDraft { exit_layer }),
        }
    }

    /// The road the drafter lies on; None for the target alone.
    pub(crate) fn road(self) -> Option<Road> {
        match self {
            Self::None => None,
            Self::Draft => Some(Road::SeparateDraft),
            Self::SelfDraft { .. } => Some(Road::SelfDraft),
        }
    }

    /// The drafter in words: `separate draft`, `self-draft, exit 1`; nothing for the target alone.
    pub(crate) fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::Draft => "separate draft".into(),
            Self::SelfDraft { exit_layer } => format!("self-draft, exit {exit_layer}"),
        }
    }
}

/// What a self-draft's name begins with in the file; its exit layer follows.
const SELF_DRAFT: &str = "self_draft_";

impl fmt::Display for DrafterName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => formatter.write_str("none"),
            Self::Draft => formatter.write_str("draft"),
            Self::SelfDraft { exit_layer } => write!(formatter, "{SELF_DRAFT}{exit_layer}"),
        }
    }
}

impl Serialize for DrafterName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DrafterName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let exit_layer = || name.strip_prefix(SELF_DRAFT)?.parse().ok();
        let known = match name.as_str() {
            "none" => Some(Self::None),
            "draft" => Some(Self::Draft),
            _ => exit_layer().map(|exit_layer| Self::SelfDraft { exit_layer }),
        };
        // `+1` and `01` are numbers too, but no name of ours: what is read is what would be
        // written.
        known.filter(|known| known.to_string() == name).ok_or_else(|| {
            let expected = "`none`, `draft` or `self_draft_` and an exit layer";
            de::Error::custom(format!("unknown drafter `{name}`, expected {expected}"))
        })
    }
}

impl DecodingName {
    /// The name of a way of decoding.
    pub(crate) fn of(decoding: &Decoding) -> Self {
        match decoding {
            Decoding::Greedy => Self::Greedy,
            Decoding::Sampled(_) => Self::Sampled,
        }
    }

    /// The way of decoding in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Sampled => "sampled",
        }
    }
}

/// Whose costs a replay is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CostSource {
    /// Measured here.
    Machine,
    /// SpecDec++'s: (0.0234, 0.112) s, rows for nothing.
    Paper,
}

impl CostSource {
    /// Whose costs in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Machine => "costs of this machine",
            Self::Paper => "costs of the SpecDec++ paper",
        }
    }
}

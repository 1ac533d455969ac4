//! The names of drafters, ways of decoding and sources of costs in files and messages. The theory
//! crate owns the names of stop rules.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::decoding::{Decoding, TokenChoice};
use crate::drafter_id::DrafterId;
use crate::error::Result;
use crate::max_gram::LookupFirst;
use crate::serialized::serialize_as_string;
use crate::stop_rule::StopRuleConfig;
use crate::tree::TreeShape;

/// The name of a drafter, ordered as in tables. In files it is a string: `none`, or a name such as
/// `draft`. The shape of trees may follow, as in `draft+tree_3-2x2x8`, or a prompt lookup that runs
/// first, as in `draft+lookup_2x4`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrafterName {
    /// No drafter, so the target decodes by itself.
    #[default]
    None,
    /// A drafter that proposes chains.
    Of(DrafterId),
    /// A drafter that proposes trees.
    Tree(DrafterId, TreeShape),
    /// A drafter that runs if prompt lookup finds nothing. [`DrafterId::LOOK_UP`] stands for prompt
    /// lookup without another drafter.
    After(LookupFirst, DrafterId),
}

/// A way of decoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecodingName {
    /// Decoding that takes the most probable token.
    #[default]
    Greedy,
    /// Decoding that draws a token from the distribution.
    Sampled,
}

/// The kind of a drafter by which reports compare, which says what files serving the drafter needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Road {
    /// A separate, smaller draft model.
    SeparateDraft,
    /// A self-draft, which builds on the target's own layers or hidden states.
    SelfDraft,
    /// Prompt lookup, which needs no files.
    Lookup,
    /// Several drafters together.
    Several,
}

impl From<DrafterId> for DrafterName {
    fn from(id: DrafterId) -> Self {
        Self::Of(id)
    }
}

impl DrafterName {
    /// Returns the drafter, if there is one.
    pub fn id(self) -> Option<DrafterId> {
        match self {
            Self::None => None,
            Self::Of(id) | Self::Tree(id, _) | Self::After(_, id) => Some(id),
        }
    }

    /// Returns the prompt lookup before the drafter, if there is one.
    pub fn lookup_first(self) -> Option<LookupFirst> {
        match self {
            Self::After(first, _) => Some(first),
            Self::None | Self::Of(_) | Self::Tree(..) => None,
        }
    }

    /// Adds a prompt lookup before the drafter, which replaces a tree. Changes nothing if `first`
    /// is `None` or there is no drafter.
    pub fn with_lookup(self, first: Option<LookupFirst>) -> Self {
        match (first, self.id()) {
            (Some(first), Some(id)) => Self::After(first, id),
            _ => self,
        }
    }

    /// Names prompt lookup with these settings and no other drafter.
    pub fn look_ups_alone(first: LookupFirst) -> Self {
        Self::After(first, DrafterId::LOOK_UP)
    }

    /// Returns the settings of prompt lookup if it is the only drafter.
    pub fn as_look_ups_alone(self) -> Option<LookupFirst> {
        self.lookup_first().filter(|_| self.id() == Some(DrafterId::LOOK_UP))
    }

    /// Returns the prefix for labels of the drafter's settings, such as `exit1`, `tree 3-2x2x8` or
    /// `lookup 2x4, then exit1`.
    pub fn prefix(self) -> Option<String> {
        match self {
            // The default name is left out.
            Self::None | Self::Of(DrafterId::DRAFT) => None,
            Self::Tree(DrafterId::DRAFT, shape) => Some(format!("tree {shape}")),
            _ => Some(self.text()),
        }
    }

    /// Names the drafter and a way of decoding, such as `exit1, greedy`.
    pub fn under(self, decoding: DecodingName) -> String {
        format!("{}, {}", self.text(), decoding.text())
    }

    /// Names the drafter in words, such as `exit1` or `lookup 2x4, then exit1`. Empty without a
    /// drafter.
    pub fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::Of(id) => id.to_string(),
            Self::Tree(id, shape) => format!("{id}, tree {shape}"),
            Self::After(first, DrafterId::LOOK_UP) => format!("prompt lookup {first} by itself"),
            Self::After(first, id) => format!("lookup {first}, then {id}"),
        }
    }
}

/// Labels a stop rule and the prompt lookup before it: `K = 4` or `lookup 2x4, then confidence 0.6`.
pub fn rule_label(lookup_first: Option<LookupFirst>, rule: &StopRuleConfig) -> String {
    let label = rule.name().label(Some(rule.parameter()));
    match lookup_first {
        None => label,
        Some(first) => format!("lookup {first}, then {label}"),
    }
}

const NONE: &str = "none";
const TREE: &str = "+tree_";
const LOOKUP: &str = "+lookup_";

impl fmt::Display for DrafterName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => formatter.write_str(NONE),
            Self::Of(id) => id.fmt(formatter),
            Self::Tree(id, shape) => write!(formatter, "{id}{TREE}{shape}"),
            Self::After(first, id) => write!(formatter, "{id}{LOOKUP}{first}"),
        }
    }
}

serialize_as_string!(DrafterName, read);

fn read(name: &str) -> Result<DrafterName> {
    // Look-ups by themselves have a name that no recipe can use.
    let id = |name: &str| match name == DrafterId::LOOK_UP.as_str() {
        true => Ok(DrafterId::LOOK_UP),
        false => name.parse(),
    };
    match (name.split_once(TREE), name.split_once(LOOKUP)) {
        _ if name == NONE => Ok(DrafterName::None),
        (Some((name, shape)), _) => Ok(DrafterName::Tree(id(name)?, shape.parse()?)),
        (_, Some((name, first))) => Ok(DrafterName::After(first.parse()?, id(name)?)),
        (None, None) => id(name).map(DrafterName::Of),
    }
}

impl DecodingName {
    /// Returns the name of a way of decoding.
    pub fn of(decoding: &Decoding) -> Self {
        match decoding.choice {
            TokenChoice::Greedy => Self::Greedy,
            TokenChoice::Sampled(_) => Self::Sampled,
        }
    }

    /// Returns the way of decoding in words: `greedy` or `sampled`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Sampled => "sampled",
        }
    }
}

/// The source of costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostSource {
    /// Costs that were measured on this machine.
    #[default]
    Machine,
    /// Costs that the user gave.
    Given,
    /// The costs in SpecDec++, §4.2: 0.0234 s per draft forward, and 0.112 s per target forward with
    /// any number of rows, or 0.108 s by itself.
    Paper,
}

impl CostSource {
    /// Returns whether the costs were measured on this machine, the default in files.
    pub fn is_machine(&self) -> bool {
        *self == Self::Machine
    }

    /// Describes the source in words, as in `costs of this machine`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Machine => "costs of this machine",
            Self::Given => "costs as given",
            Self::Paper => "costs of the SpecDec++ paper",
        }
    }
}

/// A model, head or adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// The role: `target`, `draft`, `head` or `adapter`.
    pub role: String,
    /// The name in the recipe.
    pub name: String,
    /// The architecture, layers, sizes and parameters, in words.
    pub description: String,
    /// The hash of the model's files; empty if there is none.
    pub hash: String,
}

//! The shape of a tree: how many children its nodes have, by their depth or node by node, and which of
//! them are read.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::TheoryError;

/// The most depths whose widths are told apart.
const MAX_DEPTHS: usize = 8;
/// The most nodes that are told one by one: a verification of as many rows is what packed weights are
/// quick at, and Medusa's largest has 63.
const MAX_STATIC_NODES: usize = 64;
/// The most children that a node of a static shape can have.
pub const MAX_CHILDREN: u32 = MAX_STATIC_NODES as u32;

/// How a tree grows. Written as widths by depth, `3-2-1x4x16`, and then each draft forward reads the most
/// probable nodes; or as the number of children of every node, `3-2.0.1-1`, and then forwards read all
/// nodes that have children. The suffix `-drawn` says that children are drawn. A list of paths, as in
/// Medusa's settings, is accepted too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeShape {
    branching: Branching,
    /// Nodes that a draft forward reads, one of them the chain's.
    pub num_read: u16,
    /// The most nodes of a proposal beside its chain.
    pub num_beside: u16,
    /// What children are.
    pub children: TreeChildren,
}

/// How many children nodes have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Branching {
    /// By depth, first those behind the sequence that stands; the last one's serves all that are deeper.
    /// 0 stands behind the last.
    ByDepth([u8; MAX_DEPTHS]),
    /// Of the sequence that stands, and then of every node, level by level and in each in the order of
    /// parents and ranks.
    OfEach([u8; MAX_STATIC_NODES + 1]),
}

/// A place in a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Tokens of the round up to it; the sequence that stands is at 0.
    pub(crate) depth: usize,
    /// Its number among the nodes of a shape that tells them one by one, from 1 on; None behind those.
    number: Option<usize>,
}

impl Place {
    /// The sequence that stands.
    pub(crate) const ROOT: Self = Self { depth: 0, number: Some(0) };
}

/// The nodes of one depth of a static shape, or the sequence that stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    /// Those that have children.
    pub(crate) num_parents: usize,
    /// The children of all of them.
    pub(crate) num_children: usize,
}

/// What a node's children are where tokens are sampled; where the most probable token is decoded they
/// are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TreeChildren {
    /// The drafter's most probable tokens.
    #[default]
    Top,
    /// Drawn without replacement.
    Drawn,
}

impl TreeShape {
    /// A shape by widths.
    ///
    /// # Errors
    /// If there are no widths or more than eight, one is 0, or a forward reads no node.
    pub fn new(
        widths: &[u8],
        num_read: u16,
        num_beside: u16,
        children: TreeChildren,
    ) -> Result<Self, TheoryError> {
        let are_some = (1..=MAX_DEPTHS).contains(&widths.len()) && !widths.contains(&0);
        if !are_some || num_read == 0 {
            return Err(TheoryError::TreeShape);
        }
        let mut all = [0; MAX_DEPTHS];
        all[..widths.len()].copy_from_slice(widths);
        Ok(Self { branching: Branching::ByDepth(all), num_read, num_beside, children })
    }

    /// A static shape, as Medusa's settings have it: the path to every node from the sequence that
    /// stands, each step the rank of a child among its siblings. In any order.
    ///
    /// # Errors
    /// If there are none, more than 64, or one is empty, is there twice, or follows a node or a sibling
    /// that is not there.
    pub fn of_paths(paths: &[Vec<u8>]) -> Result<Self, TheoryError> {
        let problem =
            |path: &[u8], problem| Err(TheoryError::TreePaths { path: path.to_vec(), problem });
        if paths.is_empty() || paths.len() > MAX_STATIC_NODES {
            return problem(&[], "is one of none or of more than 64");
        }
        let mut sorted: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
        // Level by level, and in each by parents and ranks.
        sorted.sort_by(|one, other| one.len().cmp(&other.len()).then(one.cmp(other)));
        let mut counts = [0; MAX_STATIC_NODES + 1];
        for (at, path) in sorted.iter().enumerate() {
            let Some((rank, parent)) = path.split_last() else {
                return problem(path, "is empty");
            };
            if sorted[..at].contains(path) {
                return problem(path, "is there twice");
            }
            let number = match parent {
                [] => 0,
                parent => match sorted[..at].iter().position(|other| other == &parent) {
                    Some(before) => before + 1,
                    None => return problem(path, "follows one that is not there"),
                },
            };
            if counts[number] != *rank {
                return problem(path, "is a child without the one of the rank before it");
            }
            counts[number] += 1;
        }
        Ok(Self::of_each(counts))
    }

    /// Forwards read all nodes that have children, and all nodes are proposed.
    fn of_each(counts: [u8; MAX_STATIC_NODES + 1]) -> Self {
        Self {
            branching: Branching::OfEach(counts),
            num_read: u16::MAX,
            num_beside: u16::MAX,
            children: TreeChildren::default(),
        }
    }

    /// Whether the children of every node are told, all of which are proposed.
    pub fn is_static(&self) -> bool {
        matches!(self.branching, Branching::OfEach(_))
    }

    /// What a static shape has behind the sequence that stands and behind the nodes of each depth, as
    /// far as nodes have children; None of others.
    pub(crate) fn levels(&self) -> Option<Vec<Level>> {
        let Branching::OfEach(counts) = &self.branching else { return None };
        let of_level = |own: Vec<u8>| Level {
            num_parents: own.iter().filter(|count| **count > 0).count(),
            num_children: own.iter().map(|count| usize::from(*count)).sum(),
        };
        Some(levels(counts).into_iter().map(of_level).collect())
    }

    /// How deep a static shape is; None of others.
    pub fn depth(&self) -> Option<usize> {
        self.levels().map(|levels| levels.len())
    }

    /// The children of a node.
    pub(crate) fn width(&self, place: Place) -> usize {
        match &self.branching {
            Branching::ByDepth(widths) => {
                let len = num_told(widths);
                usize::from(widths[place.depth.min(len - 1)])
            }
            Branching::OfEach(counts) => {
                place.number.map_or(0, |number| usize::from(counts[number]))
            }
        }
    }

    /// Where a child is. A chain may go on where a shape has no child.
    pub(crate) fn child(&self, parent: Place, rank: usize) -> Place {
        let number = match &self.branching {
            Branching::ByDepth(_) => None,
            Branching::OfEach(counts) => {
                let of = parent.number.filter(|number| rank < usize::from(counts[*number]));
                let before = |number| {
                    counts[..number].iter().map(|count| usize::from(*count)).sum::<usize>()
                };
                of.map(|number| 1 + before(number) + rank)
            }
        };
        Place { depth: parent.depth + 1, number }
    }
}

/// The widths that are told.
fn num_told(widths: &[u8; MAX_DEPTHS]) -> usize {
    widths.iter().position(|width| *width == 0).unwrap_or(MAX_DEPTHS)
}

/// The children of every node, level by level; none behind the last that has some in its level.
fn levels(counts: &[u8; MAX_STATIC_NODES + 1]) -> Vec<Vec<u8>> {
    let (mut levels, mut level) = (Vec::new(), 0..1);
    loop {
        let own = &counts[level.clone()];
        let num_next: usize = own.iter().map(|count| usize::from(*count)).sum();
        if num_next == 0 {
            return levels;
        }
        let last = own.iter().rposition(|count| *count > 0).unwrap_or(0);
        levels.push(own[..=last].to_vec());
        level = level.end..level.end + num_next;
    }
}

/// The same read back; None of more nodes than there may be, or a level of more nodes than it has.
fn of_levels(text: &str) -> Option<[u8; MAX_STATIC_NODES + 1]> {
    let mut counts = [0; MAX_STATIC_NODES + 1];
    let (mut first, mut num_nodes) = (0, 1);
    for level in text.split('-') {
        let own: Vec<u8> =
            level.split('.').map(|count| count.parse().ok()).collect::<Option<_>>()?;
        if own.len() > num_nodes {
            return None;
        }
        let next = first + num_nodes;
        counts[first..first + own.len()].copy_from_slice(&own);
        num_nodes = own.iter().map(|count| usize::from(*count)).sum();
        first = next;
        if first + num_nodes > MAX_STATIC_NODES + 1 {
            return None;
        }
    }
    Some(counts)
}

const DRAWN: &str = "-drawn";

impl fmt::Display for TreeShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined = |numbers: &[u8], by: &str| {
            numbers.iter().map(u8::to_string).collect::<Vec<_>>().join(by)
        };
        match &self.branching {
            Branching::ByDepth(widths) => {
                let widths = joined(&widths[..num_told(widths)], "-");
                write!(formatter, "{widths}x{}x{}", self.num_read, self.num_beside)?;
            }
            Branching::OfEach(counts) => {
                let levels = levels(counts).into_iter().map(|level| joined(&level, "."));
                formatter.write_str(&levels.collect::<Vec<_>>().join("-"))?;
            }
        }
        let drawn = if self.children == TreeChildren::Drawn { DRAWN } else { "" };
        formatter.write_str(drawn)
    }
}

impl FromStr for TreeShape {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self, TheoryError> {
        let (rest, children) = match text.strip_suffix(DRAWN) {
            Some(rest) => (rest, TreeChildren::Drawn),
            None => (text, TreeChildren::Top),
        };
        let by_depth = |(widths, counts): (&str, &str)| {
            let (num_read, num_beside) = counts.split_once('x')?;
            let widths = widths.split('-').map(|width| width.parse().ok());
            let widths = widths.collect::<Option<Vec<u8>>>()?;
            let (num_read, num_beside) = (num_read.parse().ok()?, num_beside.parse().ok()?);
            Self::new(&widths, num_read, num_beside, children).ok()
        };
        let shape = match rest.split_once('x') {
            Some(parts) => by_depth(parts),
            None => of_levels(rest).map(|counts| Self { children, ..Self::of_each(counts) }),
        };
        let shape = shape.ok_or(TheoryError::TreeShape)?;
        // `+1` and `01` are numbers too: what is read is what would be written.
        if shape.to_string() == text { Ok(shape) } else { Err(TheoryError::TreeShape) }
    }
}

impl Serialize for TreeShape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TreeShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Told)
    }
}

/// A shape as text, or as a list of paths.
struct Told;

impl<'de> de::Visitor<'de> for Told {
    type Value = TreeShape;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(
            "a tree's shape, such as `\"3-2x4x12\"`, or paths, such as `[[0], [1], [0, 0]]`",
        )
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<TreeShape, E> {
        text.parse().map_err(|error| E::custom(format!("`{text}`: {error}")))
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<TreeShape, A::Error> {
        let mut paths: Vec<Vec<u8>> = Vec::new();
        while let Some(path) = seq.next_element()? {
            paths.push(path);
        }
        TreeShape::of_paths(&paths).map_err(de::Error::custom)
    }
}

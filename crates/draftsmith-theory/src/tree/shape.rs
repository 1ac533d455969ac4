//! The shape of a tree: the number of children of its nodes, by depth or node by node, and which nodes are
//! read.
//!
//! With a static shape, the nodes that a round reads and proposes depend only on the shape and the length
//! of its chain, not on the tokens.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::TheoryError;

/// The maximum number of widths by depth.
const MAX_DEPTHS: usize = 8;
/// The maximum number of nodes of a static shape. Packed weights verify that many rows quickly, and
/// Medusa's largest shape has 63.
const MAX_STATIC_NODES: usize = 64;
/// The maximum number of children of a node of a static shape.
pub const MAX_CHILDREN: u32 = MAX_STATIC_NODES as u32;

/// How a tree grows. Written as widths by depth, such as `3-2-1x4x16`: then each draft forward reads the
/// most probable nodes. Or as the number of children of every node, such as `3-2.0.1-1`: then forwards
/// read all nodes with children. With the suffix `-drawn`, children are drawn. A list of paths, as in
/// Medusa's settings, is accepted too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeShape {
    branching: Branching,
    /// The number of nodes that a draft forward reads, including the chain's.
    pub num_read: u16,
    /// The maximum number of nodes beside the chain.
    pub num_beside: u16,
    /// How children are chosen.
    pub children: TreeChildren,
}

/// The number of children of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Branching {
    /// By depth, the root's first; the last also applies to deeper nodes. Padded with 0.
    ByDepth([u8; MAX_DEPTHS]),
    /// Of the root and then of every node, level by level, ordered by parent and rank.
    OfEach([u8; MAX_STATIC_NODES + 1]),
}

/// A position in a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TreePosition {
    /// The number of the round's tokens up to it; 0 at the root.
    depth: usize,
    /// Its index among the nodes of a static shape, counted from 1; None outside the shape.
    number: Option<usize>,
}

impl TreePosition {
    /// The root: the sequence before the round.
    pub(crate) const ROOT: Self = Self { depth: 0, number: Some(0) };
}

/// How a node's children are chosen in sampled decoding; in greedy decoding both are the same.
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
    /// Without widths, with more than eight or a width of 0, or if forwards read no node.
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

    /// A static shape from the path to every node, as in Medusa's settings. A path lists the ranks of
    /// children among their siblings, from the root down. Paths may come in any order.
    ///
    /// # Errors
    /// Without paths or with more than 64, or if a path is empty, a duplicate, or lacks its parent or
    /// the sibling before it.
    pub fn of_paths(paths: &[Vec<u8>]) -> Result<Self, TheoryError> {
        let problem =
            |path: &[u8], problem| Err(TheoryError::TreePaths { path: path.to_vec(), problem });
        if paths.is_empty() || paths.len() > MAX_STATIC_NODES {
            return problem(&[], "must come from a list of 1 to 64 paths");
        }
        let mut sorted: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
        // Level by level, ordered by parent and rank.
        sorted.sort_by(|one, other| one.len().cmp(&other.len()).then(one.cmp(other)));
        let mut counts = [0; MAX_STATIC_NODES + 1];
        for (at, path) in sorted.iter().enumerate() {
            let Some((rank, parent)) = path.split_last() else {
                return problem(path, "is empty");
            };
            if sorted[..at].contains(path) {
                return problem(path, "is listed twice");
            }
            let number = match parent {
                [] => 0,
                parent => match sorted[..at].iter().position(|other| other == &parent) {
                    Some(before) => before + 1,
                    None => return problem(path, "has no parent"),
                },
            };
            if counts[number] != *rank {
                return problem(path, "lacks the sibling before it");
            }
            counts[number] += 1;
        }
        Ok(Self::of_each(counts))
    }

    /// A static shape: forwards read all nodes with children, and all nodes are proposed.
    fn of_each(counts: [u8; MAX_STATIC_NODES + 1]) -> Self {
        Self {
            branching: Branching::OfEach(counts),
            num_read: u16::MAX,
            num_beside: u16::MAX,
            children: TreeChildren::default(),
        }
    }

    /// Whether the shape lists the children of every node.
    pub fn is_static(&self) -> bool {
        matches!(self.branching, Branching::OfEach(_))
    }

    /// The numbers of children of a static shape's nodes, by level from the root down, as far as nodes
    /// have children; None for other shapes.
    pub(crate) fn levels(&self) -> Option<Vec<Vec<u8>>> {
        match &self.branching {
            Branching::ByDepth(_) => None,
            Branching::OfEach(counts) => Some(levels(counts)),
        }
    }

    /// The depth of a static shape; None for other shapes.
    pub fn depth(&self) -> Option<usize> {
        self.levels().map(|levels| levels.len())
    }

    /// The number of children of a node.
    pub(crate) fn width(&self, at: TreePosition) -> usize {
        match &self.branching {
            Branching::ByDepth(widths) => usize::from(widths[at.depth.min(num_widths(widths) - 1)]),
            Branching::OfEach(counts) => at.number.map_or(0, |number| usize::from(counts[number])),
        }
    }

    /// The position of a child. It may be outside the shape, because a chain may be longer.
    pub(crate) fn child(&self, parent: TreePosition, rank: usize) -> TreePosition {
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
        TreePosition { depth: parent.depth + 1, number }
    }
}

/// The number of widths.
fn num_widths(widths: &[u8; MAX_DEPTHS]) -> usize {
    widths.iter().position(|width| *width == 0).unwrap_or(MAX_DEPTHS)
}

/// The numbers of children of every node, level by level, each level up to its last parent.
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

/// Parses the numbers of children, level by level; None if there are too many nodes, or if a level lists
/// more nodes than it has.
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
                let widths = joined(&widths[..num_widths(widths)], "-");
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
        // `+1` and `01` parse as numbers but are not written that way.
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
        deserializer.deserialize_any(TreeShapeVisitor)
    }
}

/// Reads a shape from a string or from a list of paths.
struct TreeShapeVisitor;

impl<'de> de::Visitor<'de> for TreeShapeVisitor {
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

//! The shape of a tree: the number of children of a node by depth, and the numbers of nodes that
//! are read and proposed.

use std::fmt;
use std::str::FromStr;

use crate::serialized::serialize_as_string;
use crate::{Result, TheoryError};

/// The maximum number of widths by depth.
const MAX_DEPTHS: usize = 8;
/// The shape of a draft tree, written `WxRxB`, such as `3-2-1x4x16`: W lists the number of children
/// at each depth, R is the number of nodes that one draft forward reads, and B the most nodes
/// outside the main chain. With the suffix `-drawn`, children are sampled; otherwise they are the
/// most probable tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeShape {
    /// The number of children by depth, beginning with the root. The last width also applies to
    /// deeper nodes. The array is padded with 0.
    widths: [u8; MAX_DEPTHS],
    /// The number of nodes that a draft forward reads, including the chain's.
    pub num_read: u16,
    /// The maximum number of nodes outside the main chain.
    pub num_beside: u16,
    /// The way in which children are chosen.
    pub children: TreeChildren,
}

/// The way in which a node's children are chosen in sampled decoding. In greedy decoding both
/// variants are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TreeChildren {
    /// The drafter's most probable tokens.
    #[default]
    Top,
    /// Tokens drawn without replacement from the drafter's distribution.
    Drawn,
}

impl TreeShape {
    /// Creates a shape with the number of children by depth in `widths`.
    ///
    /// # Errors
    /// If there are no widths or more than eight, if a width is 0, or if `num_read` is 0.
    pub fn new(
        widths: &[u8],
        num_read: u16,
        num_beside: u16,
        children: TreeChildren,
    ) -> Result<Self> {
        let are_some = (1..=MAX_DEPTHS).contains(&widths.len()) && !widths.contains(&0);
        if !are_some || num_read == 0 {
            return Err(not_a_shape());
        }
        let mut all = [0; MAX_DEPTHS];
        all[..widths.len()].copy_from_slice(widths);
        Ok(Self { widths: all, num_read, num_beside, children })
    }

    /// Returns the number of children of a node at `depth`, where the root before the first
    /// candidate has depth 0.
    pub(crate) fn width(&self, depth: usize) -> usize {
        usize::from(self.widths[depth.min(num_widths(&self.widths) - 1)])
    }
}

/// Counts the widths before the padding.
fn num_widths(widths: &[u8; MAX_DEPTHS]) -> usize {
    widths.iter().position(|width| *width == 0).unwrap_or(MAX_DEPTHS)
}

const DRAWN: &str = "-drawn";

impl fmt::Display for TreeShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths[..num_widths(&self.widths)].iter().map(u8::to_string);
        let widths = widths.collect::<Vec<_>>().join("-");
        write!(formatter, "{widths}x{}x{}", self.num_read, self.num_beside)?;
        let drawn = if self.children == TreeChildren::Drawn { DRAWN } else { "" };
        formatter.write_str(drawn)
    }
}

impl FromStr for TreeShape {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self> {
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
        let shape = rest.split_once('x').and_then(by_depth).ok_or_else(not_a_shape)?;
        // `+1` and `01` parse as numbers but are not written that way.
        if shape.to_string() == text { Ok(shape) } else { Err(not_a_shape()) }
    }
}

fn not_a_shape() -> TheoryError {
    TheoryError::invalid(
        "a tree is written as its widths by depth, the nodes that a draft forward reads and the most nodes beside the \
         chain, as in `3-2-1x4x12`: at most eight widths, none of them 0, and a node to read",
    )
}

serialize_as_string!(TreeShape, read);

fn read(text: &str) -> Result<TreeShape, String> {
    text.parse().map_err(|error| format!("`{text}`: {error}"))
}

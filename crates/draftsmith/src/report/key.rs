//! How the settings of a drafter and stop rule look, the same in every picture, and the key that says so.
//!
//! Colour and shape each tell the stop rules of both roads apart, so that neither is needed.

use minijinja::{Value, context};

use super::axis::tenth;
use crate::results::{DrafterName, Group, ResultRow, Road, StopRuleName};

/// The height of a line of the key.
const LINE: f64 = 19.0;
/// From one entry's text to the next one's mark.
const GAP: f64 = 16.0;
/// A mark and the line through it, before its text.
const SWATCH: f64 = 26.0;
/// A character's width, in the widest of the usual fonts.
const ADVANCE: f64 = 7.0;

/// A drafter's and stop rule's colour, as classes of the style sheet, and shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    /// `draft fixed`, `self confidence`: road and rule give the colour.
    pub(super) classes: &'static str,
    /// Self-drafts that leave at another layer than the first: they share its colour and shape, hollow and dashed.
    pub(super) is_other: bool,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Circle,
    /// Corners, for a radius of 1.
    Polygon(&'static [(f64, f64)]),
}

const DIAMOND: Shape = Shape::Polygon(&[(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)]);
const SQUARE: Shape = Shape::Polygon(&[(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)]);
const UP: Shape = Shape::Polygon(&[(0.0, -1.3), (1.2, 0.85), (-1.2, 0.85)]);
const DOWN: Shape = Shape::Polygon(&[(0.0, 1.3), (-1.2, -0.85), (1.2, -0.85)]);
const RIGHT: Shape = Shape::Polygon(&[(1.3, 0.0), (-0.85, 1.2), (-0.85, -1.2)]);

impl Look {
    /// How `row`'s drafter and stop rule look among those of `group`.
    pub(super) fn of(row: &ResultRow, group: &Group<'_>) -> Self {
        use StopRuleName::{ConfidenceThreshold, FixedLength, None as Plain, RejectionThreshold};
        let (classes, shape) = match (row.drafter.road(), row.stop_rule) {
            (None, _) | (_, Plain) => ("plain", Shape::Circle),
            (Some(Road::SeparateDraft), FixedLength) => ("draft fixed", Shape::Circle),
            (Some(Road::SeparateDraft), RejectionThreshold) => ("draft head", DIAMOND),
            (Some(Road::SeparateDraft), ConfidenceThreshold) => ("draft confidence", UP),
            (Some(Road::SeparateDraft), _) => ("draft confidence", UP),
            (Some(Road::SelfDraft), FixedLength) => ("self fixed", SQUARE),
            (Some(Road::SelfDraft), RejectionThreshold) => ("self head", RIGHT),
            (Some(Road::SelfDraft), _) => ("self confidence", DOWN),
        };
        let road = row.drafter.road();
        let first = group.drafters().into_iter().find(|drafter| drafter.road() == road);
        Self { classes, is_other: first.is_some_and(|first| first != row.drafter), shape }
    }

    /// The classes and whether it is another of its road, as one attribute.
    pub(super) fn class(&self) -> String {
        format!("{}{}", self.classes, if self.is_other { " other" } else { "" })
    }

    /// The mark's outline about `centre`, as an SVG path.
    pub(super) fn path(&self, (x, y): (f64, f64), radius: f64) -> String {
        match self.shape {
            Shape::Circle => {
                let (left, across) = (tenth(x - radius), tenth(2.0 * radius));
                let radius = tenth(radius);
                format!(
                    "M{left} {y}a{radius} {radius} 0 1 0 {across} 0a{radius} {radius} 0 1 0 -{across} 0z"
                )
            }
            Shape::Polygon(corners) => {
                let place = |(dx, dy): &(f64, f64)| {
                    format!("{} {}", tenth(x + radius * dx), tenth(y + radius * dy))
                };
                format!("M{}z", corners.iter().map(place).collect::<Vec<_>>().join("L"))
            }
        }
    }
}

/// What the settings of `row`'s drafter and stop rule are called together: `separate draft, K`, `exit 1, η`.
pub(super) fn rule_name(row: &ResultRow) -> String {
    let drafter = match row.drafter {
        DrafterName::None | DrafterName::Draft => row.drafter.text(),
        DrafterName::SelfDraft { exit_layer } => format!("exit {exit_layer}"),
    };
    format!("{drafter}, {}", super::symbol(row))
}

/// The key's entries from `left` to `right`, in as many lines as they take, the first at `top`; and its height.
pub(super) fn key(
    entries: &[(Look, String)],
    (left, right): (f64, f64),
    top: f64,
) -> (Vec<Value>, f64) {
    let (mut x, mut y) = (left, top + LINE / 2.0);
    let mut views = Vec::new();
    for (look, text) in entries {
        let width = SWATCH + text.chars().count() as f64 * ADVANCE;
        if x > left && x + width > right {
            (x, y) = (left, y + LINE);
        }
        views.push(context! {
            class => look.class(),
            path => look.path((tenth(x + 10.0), tenth(y)), 4.5),
            x1 => tenth(x),
            x2 => tenth(x + 20.0),
            y => tenth(y),
            text_x => tenth(x + SWATCH),
            text_y => tenth(y + 4.2),
            text,
        });
        x += width + GAP;
    }
    (views, y + LINE / 2.0 - top)
}

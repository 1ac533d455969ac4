//! The look of each drafter and stop rule, the same in every picture, and the key that lists them.
//!
//! Stop rules that read the same signal form a family. Colour and shape each distinguish families and
//! kinds of drafters, so a reader needs only one of the two. The filling distinguishes the rules of a
//! family: full, hollow, or hollow with a dot; and lines are solid, dashed or dotted.

use draftsmith_theory::{RuleFamily, stop_rules};
use minijinja::{Value, context};

use super::axis::tenth;
use super::text::sentence_case;
use crate::results::{Group, ResultRow, Road, StopRuleName};

/// Height of a line of the key.
const LINE: f64 = 19.0;
/// Space between entries.
const GAP: f64 = 16.0;
/// Width of a mark and the line through it, before the text.
const SWATCH: f64 = 26.0;
/// Width of a character in the widest common font.
pub(super) const ADVANCE: f64 = 7.0;

/// Colour, as classes of the style sheet, shape and filling of a drafter and stop rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    road: Option<Road>,
    family: Option<RuleFamily>,
    filling: Filling,
    /// Whether this is not the first of several self-drafts. They share shapes, in paler colours.
    is_other: bool,
}

/// Distinguishes the rules of a family.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filling {
    Full,
    Hollow,
    Dotted,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Circle,
    /// Corners for a radius of 1.
    Polygon(&'static [(f64, f64)]),
}

const DIAMOND: Shape = Shape::Polygon(&[(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)]);
const SQUARE: Shape = Shape::Polygon(&[(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)]);
const UP: Shape = Shape::Polygon(&[(0.0, -1.3), (1.2, 0.85), (-1.2, 0.85)]);
const DOWN: Shape = Shape::Polygon(&[(0.0, 1.3), (-1.2, -0.85), (1.2, -0.85)]);
const LEFT: Shape = Shape::Polygon(&[(-1.3, 0.0), (0.85, 1.2), (0.85, -1.2)]);
const RIGHT: Shape = Shape::Polygon(&[(1.3, 0.0), (-0.85, 1.2), (-0.85, -1.2)]);
#[rustfmt::skip]
const HEXAGON: Shape = Shape::Polygon(&[
    (0.0, -1.2), (1.04, -0.6), (1.04, 0.6), (0.0, 1.2), (-1.04, 0.6), (-1.04, -0.6),
]);
#[rustfmt::skip]
const PLUS: Shape = Shape::Polygon(&[
    (-0.45, -1.25), (0.45, -1.25), (0.45, -0.45), (1.25, -0.45), (1.25, 0.45), (0.45, 0.45),
    (0.45, 1.25), (-0.45, 1.25), (-0.45, 0.45), (-1.25, 0.45), (-1.25, -0.45), (-0.45, -0.45),
]);
/// [`PLUS`], turned by 45°.
#[rustfmt::skip]
const CROSS: Shape = Shape::Polygon(&[
    (-1.2, -0.57), (-0.57, -1.2), (0.0, -0.63), (0.57, -1.2), (1.2, -0.57), (0.63, 0.0),
    (1.2, 0.57), (0.57, 1.2), (0.0, 0.63), (-0.57, 1.2), (-1.2, 0.57), (-0.63, 0.0),
]);
#[rustfmt::skip]
const FIVE_POINTS: Shape = Shape::Polygon(&[
    (0.0, -1.45), (0.36, -0.49), (1.38, -0.45), (0.58, 0.19), (0.85, 1.17),
    (0.0, 0.61), (-0.85, 1.17), (-0.58, 0.19), (-1.38, -0.45), (-0.36, -0.49),
]);
#[rustfmt::skip]
const FOUR_POINTS: Shape = Shape::Polygon(&[
    (0.0, -1.55), (0.46, -0.46), (1.55, 0.0), (0.46, 0.46),
    (0.0, 1.55), (-0.46, 0.46), (-1.55, 0.0), (-0.46, -0.46),
]);

/// The style sheet's class of a family, and its shapes for separate drafts and self-drafts.
fn family_look(family: Option<RuleFamily>) -> (&'static str, [Shape; 2]) {
    match family {
        None => ("plain", [Shape::Circle; 2]),
        Some(RuleFamily::Length) => ("length", [Shape::Circle, SQUARE]),
        Some(RuleFamily::Head) => ("head", [DIAMOND, RIGHT]),
        Some(RuleFamily::Confidence) => ("confidence", [UP, DOWN]),
        Some(RuleFamily::Entropy) => ("entropy", [PLUS, CROSS]),
        Some(RuleFamily::Cost) => ("cost", [FIVE_POINTS, FOUR_POINTS]),
    }
}

impl Filling {
    /// By the rule's position in its family in the table of rules.
    fn of(rule: StopRuleName) -> Self {
        let family = family_of(rule);
        let earlier =
            stop_rules().filter(|entry| Some(entry.family) == family && entry.name < rule);
        match earlier.count() {
            0 => Self::Full,
            1 => Self::Hollow,
            _ => Self::Dotted,
        }
    }
}

/// The rule's family; None without a rule.
pub(super) fn family_of(rule: StopRuleName) -> Option<RuleFamily> {
    rule.entry().map(|entry| entry.family)
}

impl Look {
    /// The look of `row`'s drafter and stop rule in `group`.
    pub(super) fn of(row: &ResultRow, group: &Group<'_>) -> Self {
        let first = group.pooled().find(|other| other.road == row.road);
        let is_other = first.is_some_and(|first| first.drafter != row.drafter);
        Self { is_other, ..Self::of_only(row.road, row.stop_rule) }
    }

    /// The look of a stop rule with the only drafter of its road.
    pub(super) fn of_only(road: Option<Road>, rule: StopRuleName) -> Self {
        Self { road, family: family_of(rule), filling: Filling::of(rule), is_other: false }
    }

    /// The classes of the style sheet, for the attribute `class`.
    pub(super) fn class(&self) -> String {
        let road = match self.road {
            None => "",
            Some(Road::SeparateDraft) => "draft ",
            Some(Road::SelfDraft) => "self ",
            Some(Road::Lookup) => "lookup ",
            Some(Road::Several) => "cascade ",
        };
        let filling = match self.filling {
            Filling::Full => "",
            Filling::Hollow => " hollow",
            Filling::Dotted => " hollow dotted",
        };
        let other = if self.is_other { " other" } else { "" };
        format!("{road}{}{filling}{other}", family_look(self.family).0)
    }

    fn shape(&self) -> Shape {
        match self.road {
            // These have only fixed lengths.
            Some(Road::Lookup) => return HEXAGON,
            Some(Road::Several) => return LEFT,
            _ => {}
        }
        let (_, [separate, own]) = family_look(self.family);
        if self.road == Some(Road::SelfDraft) { own } else { separate }
    }

    /// The mark's outline about `centre`, as an SVG path.
    pub(super) fn path(&self, centre: (f64, f64), radius: f64) -> String {
        let mut path = self.shape().path(centre, radius);
        if self.filling == Filling::Dotted {
            // The stroke makes this tiny circle a dot.
            path += &Shape::Circle.path(centre, 0.1 * radius);
        }
        path
    }
}

/// A circle's outline, as an SVG path.
pub(super) fn circle(centre: (f64, f64), radius: f64) -> String {
    // Radius and span must be rounded alike, or the two arcs do not meet.
    Shape::Circle.path(centre, tenth(radius))
}

impl Shape {
    fn path(self, (x, y): (f64, f64), radius: f64) -> String {
        match self {
            Self::Circle => {
                let (left, across) = (tenth(x - radius), tenth(2.0 * radius));
                let radius = tenth(radius);
                format!(
                    "M{left} {y}a{radius} {radius} 0 1 0 {across} 0a{radius} {radius} 0 1 0 -{across} 0z"
                )
            }
            Self::Polygon(corners) => {
                let place = |(dx, dy): &(f64, f64)| {
                    format!("{} {}", tenth(x + radius * dx), tenth(y + radius * dy))
                };
                format!("M{}z", corners.iter().map(place).collect::<Vec<_>>().join("L"))
            }
        }
    }
}

/// The key of a picture, laid out in lines.
pub(super) struct Key {
    left: f64,
    right: f64,
    top: f64,
    /// The left end of the next entry.
    x: f64,
    /// The middle of the current line.
    y: f64,
    headings: Vec<Value>,
    entries: Vec<Value>,
}

impl Key {
    /// An empty key from `left` to `right`, with its first line at `top`.
    pub(super) fn new((left, right): (f64, f64), top: f64) -> Self {
        let (headings, entries) = (Vec::new(), Vec::new());
        Self { left, right, top, x: left, y: top + LINE / 2.0, headings, entries }
    }

    fn heading(&mut self, text: String) {
        if !self.entries.is_empty() {
            self.y += LINE;
        }
        self.x = self.left + text.chars().count() as f64 * ADVANCE + GAP;
        self.headings.push(context! { x => tenth(self.left), y => tenth(self.y + 4.2), text });
    }

    /// Adds an entry; `mark` draws the mark around a centre.
    pub(super) fn entry(&mut self, class: &str, text: &str, mark: impl Fn((f64, f64)) -> String) {
        let width = SWATCH + text.chars().count() as f64 * ADVANCE;
        if self.x > self.left && self.x + width > self.right {
            (self.x, self.y) = (self.left, self.y + LINE);
        }
        let (x, y) = (self.x, self.y);
        self.entries.push(context! {
            class, text, path => mark((tenth(x + 10.0), tenth(y))),
            x1 => tenth(x), x2 => tenth(x + 20.0), y => tenth(y),
            text_x => tenth(x + SWATCH), text_y => tenth(y + 4.2),
        });
        self.x += width + GAP;
    }

    /// The key for the template, and its height; 0 without entries.
    pub(super) fn finish(self) -> (Value, f64) {
        let Self { top, y, headings, entries, .. } = self;
        let height = if entries.is_empty() { 0.0 } else { y + LINE / 2.0 - top };
        (context! { headings, entries }, height)
    }
}

/// The key of `rows`: the rules under each drafter's name, from `left` to `right`, with its height.
pub(super) fn key<'a>(
    rows: &[&'a ResultRow],
    group: &Group<'_>,
    text: impl Fn(&'a ResultRow) -> String,
    sides: (f64, f64),
    top: f64,
) -> (Value, f64) {
    let mut key = Key::new(sides, top);
    let mut drafter = None;
    let mut listed: Vec<(Look, String)> = Vec::new();
    for row in rows {
        if drafter.replace(row.drafter) != Some(row.drafter) {
            listed.clear();
            key.heading(sentence_case(&row.drafter.text()));
        }
        let entry = (Look::of(row, group), text(row));
        if !listed.contains(&entry) {
            let (look, text) = &entry;
            key.entry(&look.class(), text, |centre| look.path(centre, 4.5));
            listed.push(entry);
        }
    }
    key.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_looks_differ_both_in_colour_and_in_outline() {
        let of_models = [Road::SeparateDraft, Road::SelfDraft]
            .into_iter()
            .flat_map(|road| stop_rules().map(move |rule| Look::of_only(Some(road), rule.name)));
        let others = [Road::Lookup, Road::Several];
        let others = others.map(|road| Look::of_only(Some(road), StopRuleName::FixedLength));
        let looks: Vec<Look> = of_models.chain(others).collect();
        for (index, look) in looks.iter().enumerate() {
            for other in &looks[..index] {
                assert_ne!(look.class(), other.class());
                let outline =
                    |look: &Look| (look.path((0.0, 0.0), 5.0), look.filling == Filling::Full);
                assert_ne!(outline(look), outline(other), "{look:?} and {other:?}");
            }
        }
    }
}

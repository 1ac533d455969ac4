//! How the settings of a drafter and stop rule look, the same in every picture, and the key that
//! says so.
//!
//! Rules that read alike are a family. Colour and shape each tell families and roads apart, so that
//! neither is needed; within a family the filling does: full, hollow, hollow with a dot, and
//! likewise lines whole, dashed, dotted.

use draftsmith_theory::{RuleFamily, stop_rules};
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
pub(super) const ADVANCE: f64 = 7.0;

/// A drafter's and stop rule's colour, as classes of the style sheet, shape and filling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Look {
    road: Option<Road>,
    family: Option<RuleFamily>,
    filling: Filling,
    /// Self-drafts that leave at another layer than the first: they share its shapes, paler.
    is_other: bool,
}

/// What tells the rules of a family apart.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filling {
    Full,
    Hollow,
    Dotted,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Circle,
    /// Corners, for a radius of 1.
    Polygon(&'static [(f64, f64)]),
}

const DIAMOND: Shape = Shape::Polygon(&[(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)]);
const SQUARE: Shape = Shape::Polygon(&[(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)]);
const HEXAGON: Shape = Shape::Polygon(&[
    (0.0, -1.2),
    (1.04, -0.6),
    (1.04, 0.6),
    (0.0, 1.2),
    (-1.04, 0.6),
    (-1.04, -0.6),
]);
const UP: Shape = Shape::Polygon(&[(0.0, -1.3), (1.2, 0.85), (-1.2, 0.85)]);
const DOWN: Shape = Shape::Polygon(&[(0.0, 1.3), (-1.2, -0.85), (1.2, -0.85)]);
const LEFT: Shape = Shape::Polygon(&[(-1.3, 0.0), (0.85, 1.2), (0.85, -1.2)]);
const RIGHT: Shape = Shape::Polygon(&[(1.3, 0.0), (-0.85, 1.2), (-0.85, -1.2)]);
const PLUS: Shape = Shape::Polygon(&[
    (-0.45, -1.25),
    (0.45, -1.25),
    (0.45, -0.45),
    (1.25, -0.45),
    (1.25, 0.45),
    (0.45, 0.45),
    (0.45, 1.25),
    (-0.45, 1.25),
    (-0.45, 0.45),
    (-1.25, 0.45),
    (-1.25, -0.45),
    (-0.45, -0.45),
]);
/// [`PLUS`], turned.
const CROSS: Shape = Shape::Polygon(&[
    (-1.2, -0.57),
    (-0.57, -1.2),
    (0.0, -0.63),
    (0.57, -1.2),
    (1.2, -0.57),
    (0.63, 0.0),
    (1.2, 0.57),
    (0.57, 1.2),
    (0.0, 0.63),
    (-0.57, 1.2),
    (-1.2, 0.57),
    (-0.63, 0.0),
]);
const FIVE_POINTS: Shape = Shape::Polygon(&[
    (0.0, -1.45),
    (0.36, -0.49),
    (1.38, -0.45),
    (0.58, 0.19),
    (0.85, 1.17),
    (0.0, 0.61),
    (-0.85, 1.17),
    (-0.58, 0.19),
    (-1.38, -0.45),
    (-0.36, -0.49),
]);
const FOUR_POINTS: Shape = Shape::Polygon(&[
    (0.0, -1.55),
    (0.46, -0.46),
    (1.55, 0.0),
    (0.46, 0.46),
    (0.0, 1.55),
    (-0.46, 0.46),
    (-1.55, 0.0),
    (-0.46, -0.46),
]);

/// A family as a class of the style sheet; `plain` is the target alone.
fn class(family: Option<RuleFamily>) -> &'static str {
    match family {
        None => "plain",
        Some(RuleFamily::Length) => "length",
        Some(RuleFamily::Head) => "head",
        Some(RuleFamily::Confidence) => "confidence",
        Some(RuleFamily::Entropy) => "entropy",
        Some(RuleFamily::Cost) => "cost",
    }
}

impl Filling {
    /// By the rule's place among those of its family, as the table has them.
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

/// The rule's family; none of the target alone.
pub(super) fn family_of(rule: StopRuleName) -> Option<RuleFamily> {
    rule.entry().map(|entry| entry.family)
}

impl Look {
    /// How `row`'s drafter and stop rule look among those of `group`.
    pub(super) fn of(row: &ResultRow, group: &Group<'_>) -> Self {
        let road = row.drafter.road();
        let first = group.drafters().into_iter().find(|drafter| drafter.road() == road);
        let is_other = first.is_some_and(|first| first != row.drafter);
        Self { is_other, ..Self::alone(row.drafter, row.stop_rule) }
    }

    /// How a drafter and stop rule look where no other exit is.
    pub(super) fn alone(drafter: DrafterName, rule: StopRuleName) -> Self {
        Self {
            road: drafter.road(),
            family: family_of(rule),
            filling: Filling::of(rule),
            is_other: false,
        }
    }

    /// Road, family, filling and whether it is another exit of its road, as one attribute.
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
        format!("{road}{}{filling}{other}", class(self.family))
    }

    fn shape(&self) -> Shape {
        match self.road {
            // Rounds of one length are all that these have.
            Some(Road::Lookup) => return HEXAGON,
            Some(Road::Several) => return LEFT,
            _ => {}
        }
        let [separate, own] = match self.family {
            None => [Shape::Circle; 2],
            Some(RuleFamily::Length) => [Shape::Circle, SQUARE],
            Some(RuleFamily::Head) => [DIAMOND, RIGHT],
            Some(RuleFamily::Confidence) => [UP, DOWN],
            Some(RuleFamily::Entropy) => [PLUS, CROSS],
            Some(RuleFamily::Cost) => [FIVE_POINTS, FOUR_POINTS],
        };
        if self.road == Some(Road::SelfDraft) { own } else { separate }
    }

    /// The mark's outline about `centre`, as an SVG path.
    pub(super) fn path(&self, centre: (f64, f64), radius: f64) -> String {
        let mut path = self.shape().path(centre, radius);
        if self.filling == Filling::Dotted {
            // A point, which its outline's width makes a dot.
            path += &Shape::Circle.path(centre, 0.1 * radius);
        }
        path
    }
}

/// A circle's outline, as an SVG path.
pub(super) fn circle(centre: (f64, f64), radius: f64) -> String {
    // Two arcs of a radius that is rounded otherwise than what they span are no circle.
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

/// The key of `rows` from `left` to `right`: under each drafter's name its rules, in as many lines
/// as they take, the first at `top`; and its height.
pub(super) fn key<'a>(
    rows: &[&'a ResultRow],
    group: &Group<'_>,
    text: impl Fn(&'a ResultRow) -> String,
    (left, right): (f64, f64),
    top: f64,
) -> (Value, f64) {
    let (mut x, mut y) = (left, top - LINE / 2.0);
    let (mut headings, mut entries) = (Vec::new(), Vec::new());
    let mut drafter = None;
    let mut told: Vec<(Look, String)> = Vec::new();
    for row in rows {
        let entry = (Look::of(row, group), text(row));
        if drafter != Some(row.drafter) {
            drafter = Some(row.drafter);
            told.clear();
            (x, y) = (left, y + LINE);
            let text = super::text::sentence_case(&row.drafter.text());
            x += text.chars().count() as f64 * ADVANCE + GAP;
            headings.push(context! { x => tenth(left), y => tenth(y + 4.2), text });
        }
        if told.contains(&entry) {
            continue;
        }
        let (look, text) = entry.clone();
        told.push(entry);
        let width = SWATCH + text.chars().count() as f64 * ADVANCE;
        if x > left && x + width > right {
            (x, y) = (left, y + LINE);
        }
        entries.push(context! {
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
    (context! { headings, entries }, y + LINE / 2.0 - top)
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::DrafterId;

    use super::*;

    #[test]
    fn no_two_rules_look_alike_on_any_road_in_colour_or_in_outline() {
        let drafters = [
            DrafterName::Of(DrafterId::Draft),
            DrafterName::Of(DrafterId::SelfDraft { exit_layer: 1 }),
        ];
        let of_models = drafters
            .into_iter()
            .flat_map(|drafter| stop_rules().map(move |rule| Look::alone(drafter, rule.name)));
        let others = [DrafterId::MaxGram, DrafterId::Cascade { number: 1 }];
        let others = others.map(|id| Look::alone(DrafterName::Of(id), StopRuleName::FixedLength));
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

//! The look of each drafter and stop rule, which is the same in every picture.
//!
//! Stop rules that read the same signal form a family. Colour and shape each distinguish families
//! and kinds of drafters, so a reader needs only one of the two. The rules of a family differ in
//! their marks, which are full, hollow, or hollow with a dot, and in their lines, which are solid,
//! dashed or dotted.

use std::f64::consts::TAU;

use draftsmith_theory::{RuleFamily, stop_rules};

use crate::results::{Group, ResultRow, Road, StopRuleName};

/// A place in pixels as (x, y), with y downwards.
pub(super) type Place = (f64, f64);

/// The look of marks and lines.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Look {
    /// The colour and filling, as CSS classes of the style sheet.
    pub(super) class: String,
    shape: MarkShape,
    /// Whether the mark has a dot in its middle.
    is_dotted: bool,
}

/// The outline of a mark. It is an arm that is repeated around the centre. Each corner of the arm
/// has an angle in degrees from the top and a distance from the centre, for a mark of radius 1.
/// Without corners the outline is a circle.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MarkShape {
    num_arms: u32,
    turn: f64,
    corners: &'static [(f64, f64)],
}

const fn shape(num_arms: u32, turn: f64, corners: &'static [(f64, f64)]) -> MarkShape {
    MarkShape { num_arms, turn, corners }
}

const CIRCLE: MarkShape = shape(0, 0.0, &[]);
const DIAMOND: MarkShape = shape(4, 0.0, &[(0.0, 1.25)]);
const SQUARE: MarkShape = shape(4, 45.0, &[(0.0, 1.3)]);
const UP: MarkShape = shape(3, 0.0, &[(0.0, 1.4)]);
const RIGHT: MarkShape = shape(3, 90.0, &[(0.0, 1.4)]);
const DOWN: MarkShape = shape(3, 180.0, &[(0.0, 1.4)]);
const LEFT: MarkShape = shape(3, 270.0, &[(0.0, 1.4)]);
const HEXAGON: MarkShape = shape(6, 0.0, &[(0.0, 1.2)]);
const PLUS: MarkShape = shape(4, 0.0, &[(-20.0, 1.33), (20.0, 1.33), (45.0, 0.64)]);
const CROSS: MarkShape = shape(4, 45.0, PLUS.corners);
const FIVE_POINTS: MarkShape = shape(5, 0.0, &[(0.0, 1.45), (36.0, 0.61)]);
const FOUR_POINTS: MarkShape = shape(4, 0.0, &[(0.0, 1.55), (45.0, 0.65)]);

/// Returns the CSS class of a family, and its shapes for separate drafts and self-drafts.
fn family_look(family: Option<RuleFamily>) -> (&'static str, [MarkShape; 2]) {
    match family {
        None => ("plain", [CIRCLE; 2]),
        Some(RuleFamily::Length) => ("length", [CIRCLE, SQUARE]),
        Some(RuleFamily::Head) => ("head", [DIAMOND, RIGHT]),
        Some(RuleFamily::Confidence) => ("confidence", [UP, DOWN]),
        Some(RuleFamily::Entropy) => ("entropy", [PLUS, CROSS]),
        Some(RuleFamily::Cost) => ("cost", [FIVE_POINTS, FOUR_POINTS]),
    }
}

/// Returns the rule's family; `None` without a rule.
pub(super) fn family_of(rule: StopRuleName) -> Option<RuleFamily> {
    rule.entry().map(|entry| entry.family)
}

impl Look {
    /// Returns the look of `row`'s drafter and stop rule in `group`. If there are several drafters
    /// of a kind, all but the first have paler colours.
    pub(super) fn of(row: &ResultRow, group: &Group<'_>) -> Self {
        let mut look = Self::of_only(row.road, row.stop_rule);
        let first = group.pooled().find(|other| other.road == row.road);
        if first.is_some_and(|first| first.drafter != row.drafter) {
            look.class += " other";
        }
        look
    }

    /// Returns the look of a stop rule with the only drafter of its kind.
    pub(super) fn of_only(road: Option<Road>, rule: StopRuleName) -> Self {
        let family = family_of(rule);
        let (name, [separate, own]) = family_look(family);
        // Look-ups and combinations of drafters have only fixed lengths.
        let (road, shape) = match road {
            None => ("", separate),
            Some(Road::SeparateDraft) => ("draft ", separate),
            Some(Road::SelfDraft) => ("self ", own),
            Some(Road::Lookup) => ("lookup ", HEXAGON),
            Some(Road::Several) => ("cascade ", LEFT),
        };
        let earlier =
            stop_rules().filter(|entry| Some(entry.family) == family && entry.name < rule).count();
        let filling = ["", " hollow", " hollow dotted", " dotted"][earlier.min(3)];
        Self { class: format!("{road}{name}{filling}"), shape, is_dotted: earlier > 1 }
    }

    /// Returns a circle with a CSS class of the style sheet.
    pub(super) fn circle(class: &str) -> Self {
        Self { class: class.to_owned(), shape: CIRCLE, is_dotted: false }
    }

    /// Returns the outline of the mark around `centre` as an SVG path.
    pub(super) fn path(&self, centre: Place, radius: f64) -> String {
        // The stroke makes this tiny circle a dot.
        let dot = if self.is_dotted { CIRCLE.path(centre, 0.1 * radius) } else { String::new() };
        self.shape.path(centre, radius) + &dot
    }
}

impl MarkShape {
    fn path(self, (x, y): Place, radius: f64) -> String {
        if self.corners.is_empty() {
            // Radius and span are rounded in the same way, so that the two arcs meet.
            let radius = tenth(radius);
            let (left, across) = (tenth(x - radius), tenth(2.0 * radius));
            let arc = format!("a{radius} {radius} 0 1 0");
            return format!("M{left} {}{arc} {across} 0{arc} -{across} 0z", tenth(y));
        }
        let arms = (0..self.num_arms).map(|arm| f64::from(arm) / f64::from(self.num_arms));
        let corners = arms.flat_map(|arm| {
            self.corners.iter().map(move |(degrees, distance)| {
                let (sin, cos) = (TAU * (arm + (degrees + self.turn) / 360.0)).sin_cos();
                let at = radius * distance;
                format!("{} {}", tenth(x + at * sin), tenth(y - at * cos))
            })
        });
        format!("M{}z", corners.collect::<Vec<_>>().join("L"))
    }
}

/// Rounds to a tenth of a pixel, which is as precise as the page needs.
pub(super) fn tenth(pixels: f64) -> f64 {
    (pixels * 10.0).round() / 10.0
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
                assert_ne!(look.class, other.class);
                let outline =
                    |look: &Look| (look.path((0.0, 0.0), 5.0), !look.class.contains("hollow"));
                assert_ne!(outline(look), outline(other), "{look:?} and {other:?}");
            }
        }
    }
}

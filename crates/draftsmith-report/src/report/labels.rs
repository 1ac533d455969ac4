//! Placement of the labels of crowded points, near their points and without covering anything.

use super::chart::{Rect, Segment, width};
use super::look::Place;

/// A point's mark, with or without a label.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) centre: Place,
    /// The radius of the mark.
    pub(super) radius: f64,
    /// The label. A mark without a label is only an obstacle.
    pub(super) text: Option<String>,
    /// Whether the label is bold. Bold labels are wider and placed first.
    pub(super) bold: bool,
}

/// A placed label.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Label {
    /// The area of the text.
    pub(super) rect: Rect,
    /// A line from the mark to a distant label; None if the label is near.
    pub(super) leader: Option<Segment>,
}

/// The distances in pixels that are tried from the mark's edge to the label's, in order.
const DISTANCES: [f64; 6] = [3.0, 7.0, 14.0, 22.0, 32.0, 44.0];

/// The distance in pixels above which a label needs a leader.
const LEADER_DISTANCE: f64 = 10.0;

/// The number of directions tried at every distance.
const NUM_DIRECTIONS: u32 = 16;

impl Rect {
    /// Returns the area that `text` covers around `centre`, in the widest common font.
    pub(super) fn of_text(text: &str, bold: bool, centre: Place) -> Self {
        let widening = if bold { 1.2 } else { 1.07 };
        Self::about(centre, widening * width(text) / 2.0 + 1.0, 6.0)
    }

    /// Returns a rectangle around `centre`.
    pub(super) fn about((x, y): Place, half_width: f64, half_height: f64) -> Self {
        let (left, top) = (x - half_width, y - half_height);
        Self { left, top, right: x + half_width, bottom: y + half_height }
    }

    pub(super) fn centre(&self) -> Place {
        ((self.left + self.right) / 2.0, (self.top + self.bottom) / 2.0)
    }

    /// Returns whether the rectangle shares area with `other`.
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    /// Returns whether `other` is within the rectangle.
    pub(super) fn holds(&self, other: &Self) -> bool {
        self.left <= other.left
            && other.right <= self.right
            && self.top <= other.top
            && other.bottom <= self.bottom
    }
}

/// Places a label for every mark with a text. Returns the labels in the order of the marks. An
/// entry is `None` if the mark has no text or no place near it is free. Labels stay within `bounds`
/// and outside the areas `taken`.
///
/// Each label takes the first free position of several rings around its mark. Bold labels choose
/// first. This suffices for some dozens of marks.
pub(super) fn place(marks: &[Mark], mut taken: Vec<Rect>, bounds: Rect) -> Vec<Option<Label>> {
    taken.extend(marks.iter().map(|mark| Rect::about(mark.centre, mark.radius, mark.radius)));
    let mut order: Vec<usize> = (0..marks.len()).collect();
    order.sort_by_key(|&index| !marks[index].bold);
    let mut placed = vec![None; marks.len()];
    for index in order {
        let Some(text) = &marks[index].text else { continue };
        let is_free = |label: &Label| {
            bounds.holds(&label.rect) && !taken.iter().any(|other| label.rect.meets(other))
        };
        placed[index] = positions(&marks[index], text).find(is_free);
        taken.extend(placed[index].map(|label: Label| label.rect));
    }
    placed
}

/// Yields positions of a label around a mark, the nearest and upper ones first.
fn positions<'a>(mark: &'a Mark, text: &'a str) -> impl Iterator<Item = Label> + 'a {
    let (x, y) = mark.centre;
    let size = Rect::of_text(text, mark.bold, (0.0, 0.0));
    let directions = move |distance| (0..NUM_DIRECTIONS).map(move |it| (distance, it));
    DISTANCES.into_iter().flat_map(directions).map(move |(distance, direction)| {
        let angle = std::f64::consts::TAU * f64::from(direction) / f64::from(NUM_DIRECTIONS);
        let (dx, dy) = (angle.sin(), -angle.cos());
        let reach = mark.radius + distance;
        let centre = (x + dx * (reach + size.right), y + dy * (reach + size.bottom));
        let rect = Rect::of_text(text, mark.bold, centre);
        let end = (x.clamp(rect.left, rect.right), y.clamp(rect.top, rect.bottom));
        let edge = (x + dx * mark.radius, y + dy * mark.radius);
        Label { rect, leader: (distance > LEADER_DISTANCE).then_some([edge, end]) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Rect = Rect { left: 0.0, top: 0.0, right: 500.0, bottom: 300.0 };

    fn mark(x: f64, y: f64, text: &str) -> Mark {
        Mark { centre: (x, y), radius: 5.0, text: Some(text.into()), bold: false }
    }

    #[test]
    fn a_single_label_is_above_its_mark() {
        let [Some(label)] = place(&[mark(100.0, 100.0, "6")], Vec::new(), BOUNDS)[..] else {
            panic!("one mark, one label")
        };
        assert_eq!((label.rect.centre(), label.leader), ((100.0, 86.0), None));
    }

    #[test]
    fn crowded_labels_cover_neither_each_other_nor_marks() {
        // Sixteen marks on a curve, some of them touching, one in the corner.
        let mut marks: Vec<Mark> = (0..15)
            .map(|index| {
                let along = f64::from(index);
                mark(60.0 + 9.0 * along, 40.0 + 0.8 * along * along, &format!("0.{index}"))
            })
            .collect();
        marks.push(mark(2.0, 2.0, "20"));
        marks.push(Mark { text: None, ..mark(250.0, 150.0, "") });
        let obstacle = Rect::about((60.0, 20.0), 10.0, 6.0);
        let labels = place(&marks, vec![obstacle], BOUNDS);
        assert_eq!(labels.last(), Some(&None));
        let labels: Vec<Label> = labels.into_iter().flatten().collect();
        assert_eq!(labels.len(), marks.len() - 1);
        for (index, label) in labels.iter().enumerate() {
            assert!(BOUNDS.holds(&label.rect), "{label:?} is outside");
            assert!(!label.rect.meets(&obstacle), "{label:?} covers the obstacle");
            for other in &labels[..index] {
                assert!(!label.rect.meets(&other.rect), "{label:?} meets {other:?}");
            }
            for mark in &marks {
                let rect = Rect::about(mark.centre, mark.radius, mark.radius);
                assert!(!label.rect.meets(&rect), "{label:?} covers {mark:?}");
            }
        }
    }

    #[test]
    fn a_label_without_space_is_left_out() {
        assert_eq!(place(&[mark(100.0, 100.0, "6")], vec![BOUNDS], BOUNDS), [None]);
    }
}

//! Places the labels of crowded points: near their point, without covering anything.

use super::axis::{Rect, tenth};

/// A straight line between two points.
pub(super) type Segment = [(f64, f64); 2];

/// A mark with or without a label.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) centre: (f64, f64),
    /// The radius of the mark.
    pub(super) radius: f64,
    /// The label; a mark without one is only an obstacle.
    pub(super) text: Option<String>,
    /// Bold labels are wider and placed first.
    pub(super) bold: bool,
}

/// A placed label.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Label {
    /// The centre of the text.
    pub(super) centre: (f64, f64),
    /// A line from the mark to a distant label.
    pub(super) leader: Option<Segment>,
    /// The area of the text.
    pub(super) rect: Rect,
}

/// The text's height in pixels, as set in the style sheet.
const TEXT_HEIGHT: f64 = 12.0;

/// Distances from the mark's edge to the label's, in the order tried.
const DISTANCES: [f64; 6] = [3.0, 7.0, 14.0, 22.0, 32.0, 44.0];

/// The least distance at which a label needs a leader.
const LEADER_DISTANCE: f64 = 10.0;

/// The number of directions tried at every distance.
const NUM_DIRECTIONS: usize = 16;

impl Rect {
    /// The area of `text` centred at `centre`, in the widest common font.
    pub(super) fn of_text(text: &str, bold: bool, centre: (f64, f64)) -> Self {
        let advance = if bold { 8.4 } else { 7.5 };
        let half_width = text.chars().count() as f64 * advance / 2.0 + 1.0;
        Self::about(centre, half_width, TEXT_HEIGHT / 2.0)
    }

    /// A rectangle around `centre`.
    pub(super) fn about((x, y): (f64, f64), half_width: f64, half_height: f64) -> Self {
        Self {
            left: x - half_width,
            top: y - half_height,
            right: x + half_width,
            bottom: y + half_height,
        }
    }

    /// The area shared with `other`.
    pub(super) fn overlap(&self, other: &Self) -> f64 {
        let width = self.right.min(other.right) - self.left.max(other.left);
        let height = self.bottom.min(other.bottom) - self.top.max(other.top);
        width.max(0.0) * height.max(0.0)
    }

    fn area(&self) -> f64 {
        (self.right - self.left) * (self.bottom - self.top)
    }

    fn nearest_to(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (x.clamp(self.left, self.right), y.clamp(self.top, self.bottom))
    }

    /// The length of the part of `segment` inside, in pixels.
    pub(super) fn length_within(&self, segment: &Segment) -> f64 {
        self.clip(segment).map_or(0.0, |[from, to]| (to.0 - from.0).hypot(to.1 - from.1))
    }

    /// The part of `segment` inside (Liang-Barsky clipping).
    pub(super) fn clip(&self, &[from, to]: &Segment) -> Option<Segment> {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let (mut enter, mut leave) = (0.0f64, 1.0f64);
        for (step, room) in [
            (-dx, from.0 - self.left),
            (dx, self.right - from.0),
            (-dy, from.1 - self.top),
            (dy, self.bottom - from.1),
        ] {
            if step == 0.0 {
                if room < 0.0 {
                    return None;
                }
            } else if step < 0.0 {
                enter = enter.max(room / step);
            } else {
                leave = leave.min(room / step);
            }
        }
        let at = |share: f64| (from.0 + share * dx, from.1 + share * dy);
        (enter < leave).then(|| [at(enter), at(leave)])
    }
}

/// What labels are placed around.
#[derive(Debug, Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) marks: &'a [Mark],
    /// Areas to avoid.
    pub(super) obstacles: &'a [Rect],
    /// Lines to avoid if possible.
    pub(super) lines: &'a [Segment],
    pub(super) bounds: Rect,
}

impl Surroundings<'_> {
    /// A label for every mark with a text, in the order of the marks.
    ///
    /// Each label takes the cheapest of a ring of positions; bold ones choose first. That is enough for
    /// some dozens of marks.
    pub(super) fn place(&self) -> Vec<Option<Label>> {
        let mut order: Vec<usize> = (0..self.marks.len()).collect();
        order.sort_by_key(|&index| !self.marks[index].bold);
        let mut placed: Vec<Option<Label>> = vec![None; self.marks.len()];
        for index in order {
            let Some(text) = &self.marks[index].text else { continue };
            let best = positions(&self.marks[index], text)
                .map(|(label, distance)| (label, distance + self.cost(&label, index, &placed)))
                .reduce(|best, other| if other.1 < best.1 { other } else { best });
            placed[index] = best.map(|(label, _)| label);
        }
        placed
    }

    /// The cost of a position, in pixels: a label moves this far to avoid it.
    fn cost(&self, label: &Label, index: usize, placed: &[Option<Label>]) -> f64 {
        let rect = &label.rect;
        let covered = |other: &Rect| match rect.overlap(other) {
            area if area > 0.0 => 60.0 + area,
            _ => 0.0,
        };
        let crosses =
            |other: &Rect| label.leader.is_some_and(|line| other.length_within(&line) > 0.0);
        let crossed = |other: &Rect| if crosses(other) { 40.0 } else { 0.0 };
        let outside = rect.area() - rect.overlap(&self.bounds);
        let mut cost = if outside > 0.01 { 500.0 + outside } else { 0.0 };
        for (other, mark) in self.marks.iter().enumerate() {
            let mark_rect = Rect::about(mark.centre, mark.radius, mark.radius);
            cost += covered(&mark_rect);
            if other != index {
                cost += crossed(&mark_rect);
            }
        }
        for other in placed.iter().flatten() {
            cost += covered(&other.rect) + crossed(&other.rect);
            cost += other.leader.map_or(0.0, |leader| 4.0 * rect.length_within(&leader));
        }
        cost += self.obstacles.iter().map(|other| covered(other) + crossed(other)).sum::<f64>();
        cost + self.lines.iter().map(|line| 0.6 * rect.length_within(line)).sum::<f64>()
    }
}

/// Positions around a mark with their distances, nearest and upper ones first.
fn positions<'a>(mark: &'a Mark, text: &'a str) -> impl Iterator<Item = (Label, f64)> + 'a {
    let (x, y) = mark.centre;
    let size = Rect::of_text(text, mark.bold, (0.0, 0.0));
    DISTANCES.into_iter().flat_map(move |distance| {
        (0..NUM_DIRECTIONS).map(move |direction| {
            let angle = std::f64::consts::TAU * direction as f64 / NUM_DIRECTIONS as f64;
            let (dx, dy) = (angle.sin(), -angle.cos());
            let reach = mark.radius + distance;
            let centre =
                (tenth(x + dx * (reach + size.right)), tenth(y + dy * (reach + size.bottom)));
            let rect = Rect::of_text(text, mark.bold, centre);
            let leader = (distance > LEADER_DISTANCE).then(|| {
                let end = rect.nearest_to(mark.centre);
                let length = (end.0 - x).hypot(end.1 - y).max(1.0);
                let edge =
                    |end: f64, centre: f64| tenth(centre + (end - centre) * mark.radius / length);
                [(edge(end.0, x), edge(end.1, y)), (tenth(end.0), tenth(end.1))]
            });
            (Label { centre, leader, rect }, distance)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Rect = Rect { left: 0.0, top: 0.0, right: 500.0, bottom: 300.0 };

    fn mark(x: f64, y: f64, text: &str) -> Mark {
        Mark { centre: (x, y), radius: 5.0, text: Some(text.into()), bold: false }
    }

    fn place(marks: &[Mark], lines: &[Segment]) -> Vec<Option<Label>> {
        Surroundings { marks, obstacles: &[], lines, bounds: BOUNDS }.place()
    }

    #[test]
    fn a_single_label_is_above_its_mark() {
        let [Some(label)] = place(&[mark(100.0, 100.0, "6")], &[])[..] else {
            panic!("one mark, one label")
        };
        assert_eq!((label.centre, label.leader), ((100.0, 86.0), None));
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
        let lines: Vec<Segment> =
            marks.windows(2).map(|pair| [pair[0].centre, pair[1].centre]).collect();
        marks.push(Mark { text: None, ..mark(250.0, 150.0, "") });
        let labels = place(&marks, &lines);
        assert_eq!(labels.last(), Some(&None));
        let labels: Vec<Label> = labels.into_iter().flatten().collect();
        assert_eq!(labels.len(), marks.len() - 1);
        for (index, label) in labels.iter().enumerate() {
            assert_eq!(label.rect.overlap(&BOUNDS), label.rect.area(), "{label:?} is outside");
            for other in &labels[..index] {
                assert_eq!(label.rect.overlap(&other.rect), 0.0, "{label:?} meets {other:?}");
            }
            for mark in &marks {
                let rect = Rect::about(mark.centre, mark.radius, mark.radius);
                assert_eq!(label.rect.overlap(&rect), 0.0, "{label:?} covers {mark:?}");
            }
        }
    }

    #[test]
    fn segments_are_clipped_to_the_rectangle() {
        let rect = Rect::about((0.0, 0.0), 1.0, 1.0);
        assert_eq!(rect.length_within(&[(-5.0, 0.0), (5.0, 0.0)]), 2.0);
        assert_eq!(rect.length_within(&[(-5.0, 2.0), (5.0, 2.0)]), 0.0);
        assert_eq!(rect.clip(&[(0.0, 0.5), (0.0, 5.0)]), Some([(0.0, 0.5), (0.0, 1.0)]));
        assert_eq!(rect.clip(&[(2.0, 2.0), (3.0, 3.0)]), None);
    }
}

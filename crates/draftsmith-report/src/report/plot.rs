//! Pictures of a data set's page: lines over an axis, or a histogram.

use minijinja::{Value, context};

use super::Frame;
use super::axis::Rect;
use super::axis::{Axis, picture, round_step, series, tenth};
use super::key::{Key, circle};
use super::text::number;

const LEFT: f64 = 44.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 26.0;
/// Height of the ticks and the axis' name below the plot.
const AXIS: f64 = 48.0;
const RADIUS: f64 = 3.2;
/// Looks of lines, as classes of the style sheet; they differ in more than colour.
const LOOKS: [&str; 6] = [
    "draft length",
    "self length hollow",
    "draft head dotted",
    "draft confidence",
    "self confidence hollow",
    "draft entropy dotted",
];

/// A picture.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Unique on the page: letters and dashes.
    pub id: &'static str,
    /// The title.
    pub title: String,
    /// The text after the title.
    pub caption: String,
    /// The name of the horizontal axis.
    pub x_name: &'static str,
    /// The name of the vertical axis.
    pub y_name: &'static str,
    /// What is drawn.
    pub content: PlotContent,
}

/// The content of a picture.
#[derive(Debug, Clone)]
pub enum PlotContent {
    /// Named lines through points (x, y).
    Lines(Vec<(String, Vec<(f64, f64)>)>),
    /// A histogram: the edges of adjacent bins, and the share in each.
    Bars {
        /// One more than there are shares.
        edges: Vec<f64>,
        /// The share in each bin.
        shares: Vec<f64>,
    },
}

/// The edges of about `num_bins` bins of a round width, from 0 to a last bin with `most`.
pub fn bins(most: f64, num_bins: usize, least_width: f64) -> Vec<f64> {
    let width = round_step((most / num_bins as f64).max(least_width));
    let num_bins = (most / width).floor() as usize + 1;
    (0..=num_bins).map(|bin| bin as f64 * width).collect()
}

/// The index of a value's bin; the last edge belongs to the last bin.
pub fn bin_of(edges: &[f64], value: f64) -> usize {
    edges.partition_point(|edge| *edge <= value).clamp(1, edges.len() - 1) - 1
}

impl PlotContent {
    /// The shares of `values` in the bins between `edges`.
    pub fn histogram(edges: Vec<f64>, values: impl Iterator<Item = f64>) -> Self {
        let mut counts = vec![0usize; edges.len() - 1];
        values.for_each(|value| counts[bin_of(&edges, value)] += 1);
        let all = counts.iter().sum::<usize>().max(1) as f64;
        Self::Bars { shares: counts.iter().map(|count| *count as f64 / all).collect(), edges }
    }

    /// The range of x, and the greatest y.
    fn ranges(&self) -> ((f64, f64), f64) {
        match self {
            Self::Lines(lines) => {
                let all = || lines.iter().flat_map(|(_, points)| points);
                let xs = || all().map(|(x, _)| *x);
                let range = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
                (range, all().map(|(_, y)| *y).fold(1.0, f64::max))
            }
            Self::Bars { edges, shares } => {
                ((edges[0], edges[edges.len() - 1]), shares.iter().copied().fold(0.0, f64::max))
            }
        }
    }
}

impl Plot {
    /// Whether there is nothing to draw.
    fn is_empty(&self) -> bool {
        match &self.content {
            PlotContent::Lines(lines) => lines.iter().all(|(_, points)| points.is_empty()),
            PlotContent::Bars { shares, .. } => shares.iter().all(|share| *share == 0.0),
        }
    }

    /// The picture in each frame; None if there is nothing to draw.
    pub(super) fn view(&self, frames: &[Frame]) -> Option<Value> {
        let charts = || frames.iter().map(|frame| self.chart(*frame)).collect::<Vec<_>>();
        let caption = self.caption.as_str();
        (!self.is_empty())
            .then(|| context! { id => self.id, title => self.title.as_str(), caption, charts => charts() })
    }

    fn chart(&self, frame: Frame) -> Value {
        let (right, bottom) = (frame.width - RIGHT, frame.curves_height - AXIS);
        let (x_range, top) = self.content.ranges();
        let x = Axis::new(x_range, 6, LEFT, right);
        let y = Axis::new((0.0, top), 5, bottom, TOP);
        let mut key = Key::new((LEFT, right), frame.curves_height);
        let (mut lines, mut bars) = (Vec::new(), Vec::new());
        match &self.content {
            PlotContent::Lines(all) => {
                for ((name, points), class) in all.iter().zip(LOOKS.iter().cycle()) {
                    if all.len() > 1 {
                        key.entry(class, name, |centre| circle(centre, RADIUS));
                    }
                    let points = points.iter().map(|(px, py)| {
                        let at = (x.place(*px), y.place(*py));
                        let title = format!("{name}: {} at {}", number(*py, 3), number(*px, 2));
                        (at, circle(at, RADIUS), title)
                    });
                    lines.push(series(class, name, points));
                }
            }
            PlotContent::Bars { edges, shares } => {
                for (edges, share) in edges.windows(2).zip(shares) {
                    let (left, right, top) =
                        (x.place(edges[0]), x.place(edges[1]), y.place(*share));
                    bars.push(context! {
                        x => tenth(left + 0.5), y => top,
                        width => tenth((right - left - 1.0).max(0.5)), height => tenth(bottom - top),
                        title => bin_text(edges, *share),
                    });
                }
            }
        }
        let (key, key_height) = key.finish();
        let content = context! {
            title => self.title.as_str(), x_name => self.x_name, y_name => self.y_name,
            squared => false, series => lines, bars, key, description => self.description(),
        };
        let plot = Rect { left: LEFT, top: TOP, right, bottom };
        let height = frame.curves_height + key_height;
        picture(frame, height, plot, [x.ticks(), y.ticks()], content)
    }

    /// The numbers as text, for screen readers.
    fn description(&self) -> String {
        let mut text = format!("{}.", self.title);
        match &self.content {
            PlotContent::Lines(lines) => {
                for (name, points) in lines {
                    let points = points
                        .iter()
                        .map(|(x, y)| format!("{} at {}", number(*y, 2), number(*x, 2)));
                    text += &format!(" {name}: {}.", points.collect::<Vec<_>>().join(", "));
                }
            }
            PlotContent::Bars { edges, shares } => {
                let bars = edges.windows(2).zip(shares);
                let bars = bars.map(|(edges, share)| bin_text(edges, *share));
                text += &format!(" {}.", bars.collect::<Vec<_>>().join(", "));
            }
        }
        text
    }
}

/// `2.00 to 3.00: 12.5 %`.
fn bin_text(edges: &[f64], share: f64) -> String {
    format!("{} to {}: {:.1} %", number(edges[0], 2), number(edges[1], 2), 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_round_edges_and_cover_all_values() {
        assert_eq!(bins(7.0, 20, 1.0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(bins(160.0, 20, 1.0).len(), 18);
        assert_eq!(bins(0.0, 20, 1.0), [0.0, 1.0]);
        let edges = [0.0, 0.5, 1.0];
        let of = [0.0, 0.49, 0.5, 1.0].map(|value| bin_of(&edges, value));
        assert_eq!(of, [0, 0, 1, 1]);
        let PlotContent::Bars { shares, .. } =
            PlotContent::histogram(edges.to_vec(), [0.1, 0.9, 1.0, 0.6].into_iter())
        else {
            panic!("bars")
        };
        assert_eq!(shares, [0.25, 0.75]);
    }
}

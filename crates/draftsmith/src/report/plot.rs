//! Pictures of numbers by place: lines over an axis, or bars over bins.

use minijinja::{Value, context};

use super::Frame;
use super::axis::{Axis, round_step, tenth};
use super::key::circle;
use super::text::number;

const LEFT: f64 = 44.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 26.0;
/// Below the picture: ticks, and the axis' name.
const AXIS: f64 = 48.0;
const RADIUS: f64 = 3.2;
/// A line of the key, and what its swatch and a character take.
const LINE: f64 = 20.0;
const SWATCH: f64 = 27.0;
const ADVANCE: f64 = 6.4;
const GAP: f64 = 16.0;

/// How lines look, so that they are told apart without colour too.
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
pub(crate) struct Plot {
    /// What it is called among a page's pictures: letters and dashes.
    pub(crate) id: &'static str,
    pub(crate) title: String,
    /// What is said under the title.
    pub(crate) caption: String,
    pub(crate) x_name: &'static str,
    pub(crate) y_name: &'static str,
    pub(crate) content: PlotContent,
}

/// What is drawn.
#[derive(Debug, Clone)]
pub(crate) enum PlotContent {
    /// Lines, each with its name, between points (x, y).
    Lines(Vec<(String, Vec<(f64, f64)>)>),
    /// Bars over bins that follow one another: the edges, and the share of each.
    Bars {
        /// One more than there are bars.
        edges: Vec<f64>,
        shares: Vec<f64>,
    },
}

/// The edges of at most so many bins of a round width, from 0 to where `most` lies in the last.
pub(crate) fn bins(most: f64, num_bins: usize, least_width: f64) -> Vec<f64> {
    let width = round_step((most / num_bins as f64).max(least_width));
    let num_bins = (most / width).floor() as usize + 1;
    (0..=num_bins).map(|bin| bin as f64 * width).collect()
}

/// The number of the bin that a value lies in; the last edge belongs to the last bin.
pub(crate) fn bin_of(edges: &[f64], value: f64) -> usize {
    edges.partition_point(|edge| *edge <= value).clamp(1, edges.len() - 1) - 1
}

impl PlotContent {
    /// The shares of values in bins.
    pub(crate) fn histogram(edges: Vec<f64>, values: impl Iterator<Item = f64>) -> Self {
        let mut counts = vec![0usize; edges.len() - 1];
        values.for_each(|value| counts[bin_of(&edges, value)] += 1);
        let all = counts.iter().sum::<usize>().max(1) as f64;
        Self::Bars { shares: counts.iter().map(|count| *count as f64 / all).collect(), edges }
    }
}

impl Plot {
    /// Whether there is anything to draw.
    fn is_empty(&self) -> bool {
        match &self.content {
            PlotContent::Lines(lines) => lines.iter().all(|(_, points)| points.is_empty()),
            PlotContent::Bars { shares, .. } => shares.iter().all(|share| *share == 0.0),
        }
    }

    /// The picture in each frame; None where there is nothing to draw.
    pub(super) fn view(&self, frames: &[Frame]) -> Option<Value> {
        (!self.is_empty()).then(|| {
            context! {
                id => self.id,
                title => self.title.as_str(),
                caption => self.caption.as_str(),
                x_name => self.x_name,
                y_name => self.y_name,
                description => self.description(),
                charts => frames.iter().map(|frame| self.chart(*frame)).collect::<Vec<_>>(),
            }
        })
    }

    fn chart(&self, frame: Frame) -> Value {
        let (right, bottom) = (frame.width - RIGHT, frame.curves_height - AXIS);
        let (x_range, top) = match &self.content {
            PlotContent::Lines(lines) => {
                let all = || lines.iter().flat_map(|(_, points)| points);
                let xs = || all().map(|(x, _)| *x);
                let range = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
                (range, all().map(|(_, y)| *y).fold(1.0, f64::max))
            }
            PlotContent::Bars { edges, shares } => {
                ((edges[0], edges[edges.len() - 1]), shares.iter().copied().fold(0.0, f64::max))
            }
        };
        let x = Axis::new(x_range, 6, LEFT, right);
        let y = Axis::new((0.0, top), 5, bottom, TOP);
        let (mut series, mut bars) = (Vec::new(), Vec::new());
        let mut names: Vec<&str> = Vec::new();
        match &self.content {
            PlotContent::Lines(all) => {
                for ((name, points), look) in all.iter().zip(LOOKS.iter().cycle()) {
                    names.push(name);
                    let at = |(px, py): &(f64, f64)| (x.place(*px), y.place(*py));
                    let places = points.iter().map(at);
                    let line = places.clone().map(|(px, py)| format!("{px},{py}"));
                    let marks = points.iter().zip(places).map(|((px, py), at)| {
                        context! {
                            path => circle(at, RADIUS),
                            title => format!("{name}: {} at {}", number(*py, 3), number(*px, 2)),
                        }
                    });
                    series.push(context! {
                        class => *look,
                        title => name.as_str(),
                        line => line.collect::<Vec<_>>().join(" "),
                        points => marks.collect::<Vec<_>>(),
                    });
                }
            }
            PlotContent::Bars { edges, shares } => {
                for (edges, share) in edges.windows(2).zip(shares) {
                    let (left, right) = (x.place(edges[0]), x.place(edges[1]));
                    let top = y.place(*share);
                    bars.push(context! {
                        x => tenth(left + 0.5),
                        y => top,
                        width => tenth((right - left - 1.0).max(0.5)),
                        height => tenth(bottom - top),
                        title => format!(
                            "{} to {}: {:.1} %",
                            number(edges[0], 2),
                            number(edges[1], 2),
                            100.0 * share
                        ),
                    });
                }
            }
        }
        let (key, key_height) = key(&names, right, frame.curves_height);
        context! {
            frame => frame.name,
            width => frame.width,
            height => frame.curves_height + key_height,
            left => LEFT,
            right,
            top => TOP,
            bottom,
            x_ticks => ticks(&x),
            y_ticks => ticks(&y),
            series,
            bars,
            key,
        }
    }

    /// The numbers as text, for those who do not see the picture.
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
                let bars = edges.windows(2).zip(shares).map(|(edges, share)| {
                    format!(
                        "{} to {}: {:.1} %",
                        number(edges[0], 2),
                        number(edges[1], 2),
                        100.0 * share
                    )
                });
                text += &format!(" {}.", bars.collect::<Vec<_>>().join(", "));
            }
        }
        text
    }
}

fn ticks(axis: &Axis) -> Vec<Value> {
    let view = |(value, text): (f64, String)| context! { at => axis.place(value), text };
    axis.ticks().into_iter().map(view).collect()
}

/// The key of lines, in as many rows as it takes, and its height; none of one line.
fn key(names: &[&str], right: f64, top: f64) -> (Value, f64) {
    let no_headings = Vec::<Value>::new;
    if names.len() < 2 {
        return (context! { headings => no_headings(), entries => no_headings() }, 0.0);
    }
    let (mut x, mut y) = (LEFT, top + LINE / 2.0);
    let mut entries = Vec::new();
    for (name, look) in names.iter().zip(LOOKS.iter().cycle()) {
        let width = SWATCH + name.chars().count() as f64 * ADVANCE;
        if x > LEFT && x + width > right {
            (x, y) = (LEFT, y + LINE);
        }
        entries.push(context! {
            class => *look,
            path => circle((tenth(x + 10.0), tenth(y)), RADIUS),
            x1 => tenth(x),
            x2 => tenth(x + 20.0),
            y => tenth(y),
            text_x => tenth(x + SWATCH),
            text_y => tenth(y + 4.2),
            text => *name,
        });
        x += width + GAP;
    }
    (context! { headings => no_headings(), entries }, y + LINE / 2.0 - top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_round_and_hold_all_values() {
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

//! Pictures of lines through marked points, and histograms. They show curves over the positions of
//! a round, the reliability of predictions, and the content of a data set.

use minijinja::{Value, context};

use super::chart::{Axis, Frame, Rect, Svg, key, picture, round_step};
use super::look::{Look, family_of};
use crate::results::{Group, ResultRow, SpeedAtLength};
use crate::text::{number, percent, sentence_case, times, typeset};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 30.0;
/// The height of the ticks and the axis name below the plot, in pixels.
const BOTTOM: f64 = 50.0;
const RADIUS: f64 = 3.8;

/// A picture of lines or bars over two axes.
#[derive(Debug, Clone)]
pub struct Plot {
    /// The id, which is unique on the page. It has letters and dashes.
    pub id: String,
    /// The title.
    pub title: String,
    /// The text after the title.
    pub caption: String,
    /// The name of the horizontal axis.
    pub x_name: &'static str,
    /// The name of the vertical axis.
    pub y_name: &'static str,
    /// The content to draw.
    pub content: PlotContent,
}

/// The content of a picture.
#[derive(Debug, Clone)]
pub enum PlotContent {
    /// Lines of shares from 0 to 1.
    Lines(Vec<PlotLine>),
    /// Many thin lines. The axes cover the range of their points.
    Curves(Vec<PlotLine>),
    /// Lines of shares over the positions of a round.
    Positions(Vec<PlotLine>),
    /// Lines through points of two shares, drawn with the diagonal.
    Square(Vec<PlotLine>),
    /// A histogram, with the edges of adjacent bins and the share in each bin.
    Bars {
        /// The edges of the bins, one more than there are shares.
        edges: Vec<f64>,
        /// The share in each bin.
        shares: Vec<f64>,
    },
}

/// A line through marked points.
#[derive(Debug, Clone)]
pub struct PlotLine {
    pub(super) look: Look,
    /// The line's name in the key.
    pub(super) entry: String,
    /// The line's name in titles.
    pub(super) name: String,
    pub(super) points: Vec<PlotPoint>,
}

/// A marked point.
#[derive(Debug, Clone)]
pub(super) struct PlotPoint {
    pub(super) at: (f64, f64),
    pub(super) radius: f64,
    pub(super) title: String,
}

/// Returns the edges of about `num_bins` bins from 0 to the end of the bin that holds `most`. The
/// bin width is a round number and at least `least_width`.
pub fn bins(most: f64, num_bins: usize, least_width: f64) -> Vec<f64> {
    let width = round_step((most / num_bins as f64).max(least_width));
    let num_bins = (most / width).floor() as usize + 1;
    (0..=num_bins).map(|bin| bin as f64 * width).collect()
}

/// Returns the index of a value's bin. The last edge belongs to the last bin.
pub fn bin_of(edges: &[f64], value: f64) -> usize {
    edges.partition_point(|edge| *edge <= value).clamp(1, edges.len() - 1) - 1
}

impl PlotContent {
    /// Plots named lines through points (x, y).
    pub fn lines(lines: Vec<(String, Vec<(f64, f64)>)>) -> Self {
        let looks = LOOKS.iter().cycle().map(|class| Look::circle(class));
        let line = |(look, (name, points)): (Look, (String, Vec<(f64, f64)>))| {
            let points = points.into_iter().map(|at| PlotPoint {
                at,
                radius: RADIUS,
                title: format!("{} at {}", number(at.1, 3), number(at.0, 2)),
            });
            PlotLine { look, entry: name.clone(), name, points: points.collect() }
        };
        Self::Lines(looks.zip(lines).map(line).collect())
    }

    /// Computes the share of `values` in each of the bins between `edges`.
    pub fn histogram(edges: Vec<f64>, values: impl Iterator<Item = f64>) -> Self {
        let mut counts = vec![0usize; edges.len() - 1];
        values.for_each(|value| counts[bin_of(&edges, value)] += 1);
        let all = counts.iter().sum::<usize>().max(1) as f64;
        Self::Bars { shares: counts.iter().map(|count| *count as f64 / all).collect(), edges }
    }

    fn all_lines(&self) -> &[PlotLine] {
        match self {
            Self::Lines(lines) | Self::Curves(lines) => lines,
            Self::Positions(lines) | Self::Square(lines) => lines,
            Self::Bars { .. } => &[],
        }
    }

    /// Yields the edges, the share and the title of each bar.
    fn bars(&self) -> impl Iterator<Item = ([f64; 2], f64, String)> {
        let (edges, shares) = match self {
            Self::Bars { edges, shares } => (&edges[..], &shares[..]),
            _ => (&[][..], &[][..]),
        };
        edges.windows(2).zip(shares).map(|(edges, share)| {
            let [from, to] = [edges[0], edges[1]].map(|edge| number(edge, 2));
            let title = format!("{from} to {to}: {}", typeset(&percent(*share, 1)));
            ([edges[0], edges[1]], *share, title)
        })
    }

    /// Creates the horizontal and the vertical axis of a plot.
    fn axes(&self, plot: Rect) -> [Axis; 2] {
        let points = || self.all_lines().iter().flat_map(|line| &line.points).map(|point| point.at);
        let range = |values: &mut dyn Iterator<Item = f64>, [low, high]: [f64; 2]| {
            values.fold((low, high), |(low, high), value| (low.min(value), high.max(value)))
        };
        let ys = || points().map(|(_, y)| y).chain(self.bars().map(|(_, share, _)| share));
        let xs = || points().map(|(x, _)| x).chain(self.bars().flat_map(|(edges, ..)| edges));
        let (x, y_range) = match self {
            Self::Lines(_) => (None, range(&mut ys(), [0.0, 1.0])),
            Self::Curves(_) => (None, range(&mut ys(), [f64::INFINITY, 0.0])),
            Self::Bars { .. } => (None, range(&mut ys(), [0.0, 0.0])),
            Self::Square(_) => (Some(Axis::new((0.0, 1.0), 5, plot.left, plot.right)), (0.0, 1.0)),
            Self::Positions(_) => {
                let (_, most) = range(&mut xs(), [1.0, 1.0]);
                let x = Axis::of_positions(most, plot.left, plot.right);
                (Some(x), range(&mut ys(), [1.0, 1.0]))
            }
        };
        let x_range = range(&mut xs(), [f64::INFINITY, 0.0]);
        let x = x.unwrap_or_else(|| Axis::new(x_range, 6, plot.left, plot.right));
        [x, Axis::new(y_range, 5, plot.bottom, plot.top)]
    }
}

impl Plot {
    /// Builds the picture with its texts and its key; `None` if there is nothing to draw.
    pub(super) fn view(&self) -> Option<Value> {
        let lines = self.content.all_lines();
        let is_empty = lines.iter().all(|line| line.points.is_empty())
            && self.content.bars().all(|(_, share, _)| share == 0.0);
        // A single line needs no key.
        let keyed = lines.iter().filter(|_| lines.len() > 1);
        let entries = keyed.map(|line| (String::new(), line.look.clone(), line.entry.clone()));
        let draw = |frame, svg: &mut Svg| self.draw(frame, svg);
        let picture = || picture(&self.id, &self.title, &self.description(), draw);
        (!is_empty).then(|| {
            let (title, caption) = (&self.title, &self.caption);
            context! { title, caption, picture => picture(), key => key(entries) }
        })
    }

    fn draw(&self, frame: Frame, svg: &mut Svg) -> f64 {
        let is_square = matches!(self.content, PlotContent::Square(_));
        let are_many = matches!(self.content, PlotContent::Curves(_));
        let height = if is_square || are_many { frame.tall } else { frame.low };
        let width = if are_many { "" } else { " strong" };
        let (right, bottom) = (frame.width - RIGHT, height - BOTTOM);
        let plot = Rect { left: LEFT, top: TOP, right, bottom };
        let [x, y] = self.content.axes(plot);
        svg.x_axis(&x, plot, "", self.x_name, is_square);
        svg.y_axis(&y, plot, self.y_name);
        if is_square {
            svg.line("baseline", &[(LEFT, bottom), (right, TOP)]);
        }
        for ([from, to], share, title) in self.content.bars() {
            let (left, right) = (x.place(from) + 0.5, x.place(to) - 0.5);
            let rect = Rect { left, top: y.place(share), right: right.max(left + 0.5), bottom };
            svg.rect("bar draft length", rect, &title);
        }
        for PlotLine { look, name, points, .. } in self.content.all_lines() {
            let at = |point: &PlotPoint| (x.place(point.at.0), y.place(point.at.1));
            svg.line(
                &format!("curve{width} {}", look.class),
                &points.iter().map(at).collect::<Vec<_>>(),
            );
            svg.open(&format!("series {}", look.class), name);
            for point in points {
                let title = format!("{name}: {}", point.title);
                svg.path("", &look.path(at(point), point.radius), &title);
            }
            svg.close();
        }
        height
    }

    /// Returns the plotted numbers as text, for screen readers.
    fn description(&self) -> String {
        let line = |line: &PlotLine| {
            let points: Vec<&str> = line.points.iter().map(|point| point.title.as_str()).collect();
            format!(" {}: {}.", sentence_case(&line.name), points.join("; "))
        };
        let bars = self.content.bars().map(|(.., title)| format!(" {title}."));
        let parts = self.content.all_lines().iter().map(line).chain(bars);
        format!("{}.{}", self.title, parts.collect::<String>())
    }
}

/// Plots the curves of a group: CTAR(w), acceptance by position among the verified candidates and
/// among all rounds, and the speed-up by answer length.
pub(super) fn curves(group: &Group<'_>, id: &str) -> [Plot; 4] {
    let position = "position in the round \u{2192}";
    let plot = |name, title, x_name, y_name, values| Plot {
        id: format!("{id}-{name}"),
        title: format!("{title}: {}", group.name()),
        caption: String::new(),
        x_name,
        y_name,
        content: PlotContent::Positions(best_lines(group, values)),
    };
    [
        plot(
            "ctar",
            "CTAR",
            "w \u{2192}",
            "\u{2191} share of rounds that yield more than w tokens",
            // All values after the first 0 are 0.
            |row| {
                let first_zero = row.ctar.iter().position(|share| *share == 0.0);
                first_zero.map_or(&row.ctar, |index| &row.ctar[..=index])
            },
        ),
        plot(
            "acceptance",
            "Acceptance by position",
            position,
            "\u{2191} share accepted of the candidates judged",
            |row| &row.acceptance_by_position,
        ),
        plot(
            "unconditional",
            "Unconditional acceptance by position",
            position,
            "\u{2191} share of rounds accepted so far",
            |row| &row.unconditional_acceptance,
        ),
        Plot {
            id: format!("{id}-length"),
            title: format!("Speed-up by length of the answer: {}", group.name()),
            caption: String::new(),
            x_name: "first tokens of an answer \u{2192}",
            y_name: "\u{2191} speed-up, prefill included",
            content: PlotContent::Lines(lines_by_length(group)),
        },
    ]
}

/// Builds a line of speed-ups by answer length for each drafter and family of stop rules, at the
/// fastest setting. There are no lines if only one length was measured.
fn lines_by_length(group: &Group<'_>) -> Vec<PlotLine> {
    let points = |row: &ResultRow| -> Vec<PlotPoint> {
        let point = |at: &SpeedAtLength| PlotPoint {
            at: (at.num_tokens as f64, at.speedup),
            radius: RADIUS,
            title: format!("{} over the first {} tokens", times(Some(at.speedup)), at.num_tokens),
        };
        row.by_length.iter().filter(|_| row.by_length.len() > 1).map(point).collect()
    };
    best_of_families(group, points)
}

/// Builds a line of values at x = 1, 2, 3 and so on for each drafter and family of stop rules, at
/// the fastest setting. More lines would be hard to distinguish.
fn best_lines(group: &Group<'_>, values: fn(&ResultRow) -> &[f64]) -> Vec<PlotLine> {
    let point = |(position, value): (u32, &f64)| PlotPoint {
        at: (f64::from(position), *value),
        radius: RADIUS,
        title: format!("{} at {position}", number(*value, 3)),
    };
    best_of_families(group, |row| (1..).zip(values(row)).map(point).collect())
}

/// Builds a line of `points` for each drafter and family of stop rules, at the fastest setting.
fn best_of_families(
    group: &Group<'_>,
    points: impl Fn(&ResultRow) -> Vec<PlotPoint>,
) -> Vec<PlotLine> {
    let line = |row: &ResultRow| PlotLine {
        look: Look::of(row, group),
        entry: row.label(),
        name: row.label(),
        points: points(row),
    };
    let rows = group.best_by(|row| (row.drafter, family_of(row.stop_rule)));
    rows.into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

/// The CSS classes for the lines of one plot, in turn. They differ in colour, marker and dash.
const LOOKS: [&str; 6] = [
    "draft length",
    "self length hollow",
    "draft head dotted",
    "draft confidence",
    "self confidence hollow",
    "draft entropy dotted",
];

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

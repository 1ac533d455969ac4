//! Pictures of horizontal bars, for the speed-up of each stop rule at its fastest setting and for
//! the gain of each replayed rule.

use draftsmith_theory::rule_label;
use minijinja::{Value, context};

use super::chart::{Axis, Frame, Rect, Svg, picture, width};
use super::look::Look;
use crate::results::{Conclusion, DeployAdvice, Group, ReplayGroup, ReplayRow, ResultRow};
use crate::table::best_of;
use crate::text::{gain, interval, sentence_case, signed, times, typeset};

const TOP: f64 = 24.0;
const BOTTOM: f64 = 44.0;
const ROW: f64 = 23.0;
const BAR: f64 = 12.0;
const CEILING: f64 = 19.0;
/// The height of a flag below its bar, in pixels.
const FLAG: f64 = 16.0;
/// The half height of a whisker's ends, in pixels.
const CAP: f64 = 4.0;
/// The height of a drafter's name and the space above it, in pixels.
const HEADING: f64 = 28.0;
/// The width of the column of numbers, in pixels.
const RIGHT: f64 = 62.0;
/// The width of the mark to the left of a label, in pixels.
const MARK: f64 = 23.0;

/// A picture of bars that begin at 0.
pub(super) struct BarChart {
    pub(super) title: String,
    pub(super) x_name: String,
    /// The unit `x` or `%`, which follows the numbers of the axis.
    pub(super) unit: &'static str,
    /// The value that bars are compared with.
    pub(super) baseline: f64,
    pub(super) bars: Vec<ShownBar>,
    /// The value of the oracle and its text; None without an oracle.
    pub(super) oracle: Option<(f64, String)>,
}

/// A bar with its mark, label and number.
pub(super) struct ShownBar {
    look: Look,
    /// The name of the drafter or look-up, shown above its first bar; may be empty.
    heading: String,
    label: String,
    is_best: bool,
    /// The words below a bar that is framed; empty for others.
    flag: &'static str,
    title: String,
    value: f64,
    text: String,
    /// The cost model's speed-up, drawn as a tick across the bar.
    tick: Option<f64>,
    /// The values of the rule's other settings with their titles, drawn as dots.
    dots: Vec<(f64, String)>,
    /// The gain with a perfect head, drawn as a hollow bar around the bar.
    ceiling: Option<f64>,
    whisker: Option<[f64; 2]>,
}

impl BarChart {
    /// Draws the picture, and says what it shows; `None` without bars.
    pub(super) fn picture(&self, id: &str) -> Option<Value> {
        let text = |bar: &ShownBar| format!(" {}; {}", bar.title, bar.flag);
        let bars = self.bars.iter().map(|bar| text(bar).trim_end_matches("; ").to_owned() + ".");
        let oracle = self.oracle.iter().map(|(_, text)| format!(" Oracle: {text}."));
        let description = format!("{}.{}", self.title, bars.chain(oracle).collect::<String>());
        let draw = |frame, svg: &mut Svg| self.draw(frame, svg);
        let any = |has: fn(&ShownBar) -> bool| self.bars.iter().any(has);
        (!self.bars.is_empty()).then(|| {
            context! {
                has_ticks => any(|bar| bar.tick.is_some()),
                has_dots => any(|bar| !bar.dots.is_empty()),
                has_whiskers => any(|bar| bar.whisker.is_some()),
                has_flag => any(|bar| !bar.flag.is_empty()),
                ..picture(id, &self.title, &description, draw)
            }
        })
    }

    /// Returns the axis from pixel `left` to `right`, and whether the oracle is on it.
    fn axis(&self, left: f64, right: f64) -> (Axis, bool) {
        let values = self.bars.iter().flat_map(|bar| {
            let ends = bar.whisker.into_iter().flatten();
            ends.chain([bar.value]).chain(bar.tick).chain(bar.ceiling)
        });
        let (lowest, highest) = values
            .chain([self.baseline])
            .fold((0.0, 0.0), |(low, high): (f64, f64), value| (low.min(value), high.max(value)));
        // A narrow picture leaves less of its width to an oracle that lies beyond all bars.
        let reach = (1.0 + (right - left) / 250.0) * highest;
        let near = self.oracle.as_ref().map(|(value, _)| *value).filter(|value| *value <= reach);
        let num_ticks = ((right - left) / 60.0).max(3.0) as usize;
        let range = (lowest, highest.max(near.unwrap_or(0.0)));
        (Axis::new(range, num_ticks, left, right), near.is_some())
    }

    fn draw(&self, frame: Frame, svg: &mut Svg) -> f64 {
        let longest = self.bars.iter().map(|bar| width(&bar.label)).fold(0.0, f64::max);
        let (left, right) = (MARK + longest + 7.0, frame.width - RIGHT);
        let (x, is_near) = self.axis(left, right);
        let mut heading = "";
        let mut bottom = TOP;
        let places: Vec<(f64, bool)> = self
            .bars
            .iter()
            .map(|bar| {
                let is_new = std::mem::replace(&mut heading, &bar.heading) != bar.heading;
                let top = bottom + if is_new { HEADING } else { 0.0 };
                bottom = top + ROW + if bar.flag.is_empty() { 0.0 } else { FLAG };
                (top + ROW / 2.0, is_new)
            })
            .collect();
        let plot = Rect { left, top: TOP, right, bottom };
        svg.x_axis(&x, plot, self.unit, &self.x_name, true);
        let baseline = x.place(self.baseline);
        svg.line("baseline", &[(baseline, TOP), (baseline, bottom)]);
        for (bar, (middle, is_new)) in self.bars.iter().zip(places) {
            if is_new {
                svg.text("heading", (0.0, middle - ROW / 2.0 - 7.0), "start", &bar.heading);
            }
            bar.draw(&x, middle, frame.width, svg);
        }
        if let Some((value, text)) = &self.oracle {
            let (end, arrow) = if is_near { (x.place(*value), "") } else { (right, " \u{2192}") };
            if is_near {
                svg.line("oracle", &[(end, TOP - 6.0), (end, bottom)]);
            }
            let text = format!("oracle {text}{arrow}");
            svg.text("oracle", (end, TOP - 12.0), "end", &text);
        }
        bottom + BOTTOM
    }
}

impl ShownBar {
    /// Draws the bar centred vertically at `middle`, and its number at the right end of `width`.
    fn draw(&self, x: &Axis, middle: f64, width: f64, svg: &mut Svg) {
        let class = &self.look.class;
        let best = if self.is_best { " best" } else { "" };
        let span = |value: f64, height: f64| {
            let (zero, end) = (x.place(0.0), x.place(value));
            let (top, bottom) = (middle - height / 2.0, middle + height / 2.0);
            Rect { left: zero.min(end), top, right: zero.max(end), bottom }
        };
        svg.open(&format!("bar {class}{best}"), &self.title);
        svg.open(&format!("series {class}"), "");
        svg.path("", &self.look.path((10.0, middle), 4.5), "");
        svg.close();
        svg.text("", (MARK, middle + 4.2), "start", &self.label);
        if let Some(ceiling) = self.ceiling {
            svg.rect("ceiling", span(ceiling, CEILING), "");
        }
        svg.rect("bar", span(self.value, BAR), "");
        for (value, title) in &self.dots {
            svg.path("dot", &Look::circle("").path((x.place(*value), middle), 2.0), title);
        }
        if let Some(tick) = self.tick.map(|tick| x.place(tick)) {
            let ends = [(tick, middle - 9.0), (tick, middle + 9.0)];
            svg.line("tick-halo", &ends);
            svg.line("tick", &ends);
        }
        if let Some([low, high]) = self.whisker.map(|ends| ends.map(|end| x.place(end))) {
            let (top, bottom) = (middle - CAP, middle + CAP);
            let caps = format!("M{low} {top}V{bottom}M{high} {top}V{bottom}");
            svg.path("whisker", &format!("M{low} {middle}H{high}{caps}"), "");
        }
        svg.text("value", (width - 6.0, middle + 4.2), "end", &self.text);
        if !self.flag.is_empty() {
            let (top, bottom) = (middle - ROW / 2.0, middle + ROW / 2.0 + FLAG - 2.0);
            svg.rect("frame", Rect { left: 1.0, top, right: width - 1.0, bottom }, "");
            svg.text("flag", (MARK, bottom - 6.0), "start", self.flag);
        }
        svg.close();
    }
}

/// Charts the speed-ups of a group: plain decoding, and each stop rule at its fastest setting, with
/// a tick at the cost model's speed-up and a dot for each other setting. The setting that tuning
/// chose takes the place of its rule's fastest and is flagged.
pub(super) fn speedups(group: &Group<'_>, conclusion: &Conclusion) -> BarChart {
    let tuned = group.best_tuned();
    let shown_for = |fastest| {
        let rule = |row: &ResultRow| (row.drafter, row.stop_rule);
        tuned.filter(|tuned| rule(tuned) == rule(fastest)).unwrap_or(fastest)
    };
    let marked = tuned.or(group.best());
    let mut verdicts = conclusion.verdicts.iter().filter(|it| it.group == group.name());
    let flag = match verdicts.any(|it| it.advice == DeployAdvice::Deploy) {
        true => "deploy: tuning chose it on other prompts",
        false => "tuned on other prompts",
    };
    let bar = |row: &ResultRow| {
        let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
        let title = |row: &ResultRow| format!("{}: {}", row.label(), times(row.speedup));
        let others = group.sweep_of(row).filter(|other| other.setting != row.setting);
        let is_best = marked.is_some_and(|marked| std::ptr::eq(marked, row));
        let dot = |other: &ResultRow| Some((finite(other.speedup)?, shown(&title(other))));
        Some(ShownBar {
            look: Look::of(row, group),
            heading: sentence_case(&row.drafter.text()),
            label: row.rule_label(),
            is_best,
            flag: if is_best && tuned.is_some() { flag } else { "" },
            title: shown(&format!("{}, modelled {}", title(row), times(row.modelled_speedup))),
            value: finite(row.speedup)?,
            text: typeset(&times(row.speedup)),
            tick: finite(row.modelled_speedup),
            dots: others.filter_map(dot).collect(),
            ceiling: None,
            whisker: row.speedup_interval,
        })
    };
    let rows = group.plain().into_iter().chain(group.best_of_rules().into_iter().map(shown_for));
    BarChart {
        title: format!("Speed-up over plain decoding by stop rule: {}", group.name()),
        x_name: "speed-up \u{2192}".to_owned(),
        unit: "x",
        baseline: 1.0,
        bars: rows.filter_map(bar).collect(),
        oracle: None,
    }
}

/// Charts the gains of replayed rules over the best fixed length in percent, with confidence
/// intervals and the gains of a perfect head.
pub(super) fn gains(replay: &ReplayGroup) -> BarChart {
    let best = best_of(&replay.rows);
    let finite = |share: f64| Some(100.0 * share).filter(|percent| percent.is_finite());
    let bar = |row: &ReplayRow| {
        let ceiling = row.ceiling.filter(|ceiling| ceiling.value.is_finite());
        let ceiling_text = ceiling.map(|ceiling| format!(", ceiling {}", gain(ceiling.value)));
        let (over, range) = (gain(row.gain.value), interval(row.gain, signed));
        Some(ShownBar {
            look: Look::of_only(Some(replay.road), row.stop_rule),
            heading: row.lookup_first.map_or_else(String::new, |it| format!("Lookup {it}")),
            label: rule_label(None, &row.config),
            is_best: best == Some(row),
            flag: "",
            title: shown(&format!(
                "{}: {over} ({range}){}",
                row.label(),
                ceiling_text.unwrap_or_default()
            )),
            value: finite(row.gain.value)?,
            text: typeset(&over),
            tick: None,
            dots: Vec::new(),
            ceiling: ceiling.and_then(|ceiling| finite(ceiling.value)),
            whisker: finite(row.gain.low).zip(finite(row.gain.high)).map(|(low, high)| [low, high]),
        })
    };
    let fixed = replay.rows.iter().find(|row| row.is_best_fixed());
    let fixed = fixed.map_or_else(|| "the best fixed length".to_owned(), ReplayRow::label);
    let name = replay.drafter.under(replay.decoding);
    let oracle = replay.oracle.and_then(|oracle| finite(oracle.gain.value));
    BarChart {
        title: format!("Gain over {fixed}: {name}, {}", replay.cost_source.text()),
        x_name: format!("gain over {fixed} \u{2192}"),
        unit: "%",
        baseline: 0.0,
        bars: replay.rows.iter().filter(|row| !row.is_best_fixed()).filter_map(bar).collect(),
        oracle: oracle.map(|value| (value, typeset(&gain(value / 100.0)))),
    }
}

/// Typesets a bar's title: a label, a colon and numbers.
fn shown(title: &str) -> String {
    let (label, numbers) = title.split_once(':').unwrap_or((title, ""));
    let numbers: Vec<String> = numbers.split(' ').map(typeset).collect();
    format!("{label}:{}", numbers.join(" "))
}

//! The section on the heads of a sweep, with their table and a plot of the work per token at every
//! threshold (SpecDec++, Figure 4).

use minijinja::{Value, context};

use super::lines::{Plot, PlotContent, PlotLine, PlotPoint};
use super::look::Look;
use crate::results::{CurvePoint, HeadOnSet, HeadRace, JudgedHead, in_order};
use crate::table::head_race_table;
use crate::text::{interval, number, times, typeset};

/// The step between the thresholds of a head's curve that have a mark.
const EVERY: usize = 5;

/// Builds the section on a sweep's heads; `None` without a sweep.
pub(super) fn section(race: Option<&HeadRace>) -> Option<Value> {
    let race = race?;
    let sets = race.heads.iter().flat_map(|head| &head.sets);
    let sets = in_order(sets.map(|set| (set.decoding, set.dataset.as_str())));
    let picture = |(index, (decoding, dataset))| {
        let is_it =
            move |set: &&HeadOnSet| (set.decoding, set.dataset.as_str()) == (decoding, dataset);
        let on_it = |head: &'_ JudgedHead| head.sets.iter().find(is_it).cloned();
        let chosen = race.heads.iter().find(|head| head.is_chosen).and_then(on_it);
        let name = format!("{dataset}, {}", decoding.text());
        context! {
            title => &name,
            speed => chosen.map(|set| format!(
                "{} ({}) with {}",
                typeset(&times(Some(set.speedup.value))),
                interval(set.speedup, |speedup| number(speedup, 2)),
                draftsmith_theory::rule_label(None, &set.config),
            )),
            plot => plot(race, &is_it, format!("heads-{}", index + 1), &name).view(),
        }
    };
    Some(context! {
        verdict => race.verdict(),
        costs => race.cost_source.text(),
        pictures => sets.into_iter().enumerate().map(picture).collect::<Vec<_>>(),
        table => head_race_table(race).view(),
    })
}

fn plot(race: &HeadRace, is_it: &dyn Fn(&&HeadOnSet) -> bool, id: String, name: &str) -> Plot {
    let curve = |head: &'_ JudgedHead| -> Vec<CurvePoint> {
        head.sets.iter().find(is_it).map_or_else(Vec::new, |set| set.curve.clone())
    };
    let line = |head: &JudgedHead| {
        let (look, entry, radius) = match head.is_chosen {
            true => (Look::circle("draft length"), "the fastest head", 3.4),
            false => (Look::circle("plain"), "other heads", 1.2),
        };
        let points = curve(head).into_iter().step_by(EVERY);
        let points = points.map(|at| point(&head.name, at, radius)).collect();
        PlotLine { look, entry: entry.to_owned(), name: head.name.clone(), points }
    };
    let all = race.heads.iter();
    let all = all.flat_map(|head| curve(head).into_iter().map(|at| (head.name.as_str(), at)));
    let frontier = PlotLine {
        look: Look::circle("draft cost"),
        entry: "no head needs less of both".to_owned(),
        name: "frontier".to_owned(),
        points: frontier(all).into_iter().map(|(name, at)| point(name, at, 2.2)).collect(),
    };
    let (chosen, others): (Vec<&JudgedHead>, Vec<_>) =
        race.heads.iter().partition(|head| head.is_chosen);
    let lines = others.into_iter().chain(chosen).map(line).chain([frontier]);
    Plot {
        id,
        title: format!("Work under each head: {name}"),
        caption: String::new(),
        x_name: "discarded candidates per token \u{2192}",
        y_name: "\u{2191} target forwards per token",
        content: PlotContent::Curves(lines.collect()),
    }
}

fn point(head: &str, at: CurvePoint, radius: f64) -> PlotPoint {
    let CurvePoint { threshold, discard_rate, verification_rate, .. } = at;
    let [h, discard, verify] = [(threshold, 2), (discard_rate, 3), (verification_rate, 3)]
        .map(|(x, digits)| number(x, digits));
    let title = format!("{head}, h = {h}: discard rate {discard}, verification rate {verify}");
    PlotPoint { at: (discard_rate, verification_rate), radius, title }
}

/// Returns the points that no other point beats in both rates, from left to right.
fn frontier<'h>(all: impl Iterator<Item = (&'h str, CurvePoint)>) -> Vec<(&'h str, CurvePoint)> {
    let mut all: Vec<_> = all.collect();
    all.sort_by(|(_, one), (_, other)| {
        let by_discard = one.discard_rate.total_cmp(&other.discard_rate);
        by_discard.then(one.verification_rate.total_cmp(&other.verification_rate))
    });
    let mut least = f64::INFINITY;
    all.retain(|(_, at)| {
        let is_better = at.verification_rate < least;
        least = least.min(at.verification_rate);
        is_better
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frontier_has_the_points_that_nothing_beats() {
        let at = |discard_rate, verification_rate| CurvePoint {
            speedup: 1.0,
            threshold: 0.5,
            discard_rate,
            verification_rate,
        };
        let points = [at(0.3, 0.2), at(0.1, 0.5), at(0.1, 0.4), at(0.2, 0.4), at(0.4, 0.3)];
        let found = frontier(points.into_iter().map(|at| ("d1", at)));
        let found: Vec<f64> = found.iter().map(|(_, at)| at.discard_rate).collect();
        assert_eq!(found, [0.1, 0.3]);
    }
}

//! Groups of comparable rows, and the best rows of a group. Only rows of one group may be compared.

use super::{DecodingName, DrafterName, ResultRow, Road, StopRuleName, in_order};

/// The rows of one dataset under one way of decoding.
#[derive(Debug, Clone)]
pub(crate) struct Group<'a> {
    /// The dataset.
    pub(crate) dataset: &'a str,
    /// Greedy or sampled decoding.
    pub(crate) decoding: DecodingName,
    /// Sampling temperature; 0 for greedy decoding.
    pub(crate) temperature: f64,
    rows: Vec<&'a ResultRow>,
}

/// The set of rows in which a row is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// All rows that draft.
    All,
    /// The rows of its kind of drafter.
    Road,
    /// The rows of its drafter and stop rule.
    Rule,
}

impl Standing {
    /// The mark of such a row in the report.
    pub(crate) fn mark(self) -> &'static str {
        match self {
            Self::All => "fastest",
            Self::Road => "best of its kind",
            Self::Rule => "best of its rule",
        }
    }
}

/// The groups of `rows`, in order of appearance.
pub(crate) fn groups(rows: &[ResultRow]) -> Vec<Group<'_>> {
    let key = |row: &ResultRow| (row.decoding, row.temperature);
    let mut groups: Vec<Group<'_>> = Vec::new();
    for row in rows {
        let known = groups.iter_mut().find(|group| {
            group.dataset == row.dataset && (group.decoding, group.temperature) == key(row)
        });
        match known {
            Some(group) => group.rows.push(row),
            None => groups.push(Group {
                dataset: &row.dataset,
                decoding: row.decoding,
                temperature: row.temperature,
                rows: vec![row],
            }),
        }
    }
    groups
}

impl<'a> Group<'a> {
    /// The rows over all prompts.
    pub(crate) fn pooled(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.rows.iter().copied().filter(|row| row.is_pooled())
    }

    /// Plain decoding over all prompts.
    pub(crate) fn plain(&self) -> Option<&'a ResultRow> {
        self.pooled().find(|row| row.stop_rule == StopRuleName::None)
    }

    /// The drafters, in order of appearance.
    pub(crate) fn drafters(&self) -> Vec<DrafterName> {
        in_order(self.drafted().map(|row| row.drafter))
    }

    /// The stop rules of a kind of drafter, sorted.
    pub(crate) fn rules_of_road(&self, road: Road) -> Vec<StopRuleName> {
        let mut rules = in_order(self.of_road(road).map(|row| row.stop_rule));
        rules.sort();
        rules
    }

    /// The fastest row over all prompts that drafts; ties go to the first, here and below.
    pub(crate) fn best(&self) -> Option<&'a ResultRow> {
        fastest(self.drafted())
    }

    /// The fastest row over all prompts whose setting `tune` chose.
    pub(crate) fn best_tuned(&self) -> Option<&'a ResultRow> {
        fastest(self.drafted().filter(|row| row.is_tuned))
    }

    /// The fastest row of a kind of drafter.
    pub(crate) fn best_of_road(&self, road: Road) -> Option<&'a ResultRow> {
        fastest(self.of_road(road))
    }

    /// The fastest row of a kind of drafter, among the rules for which `is_meant` is true.
    pub(crate) fn best_of_road_by(
        &self,
        road: Road,
        is_meant: impl Fn(StopRuleName) -> bool,
    ) -> Option<&'a ResultRow> {
        fastest(self.of_road(road).filter(|row| is_meant(row.stop_rule)))
    }

    /// The fastest row of each drafter and stop rule, in order of appearance.
    pub(crate) fn best_of_rules(&self) -> Vec<&'a ResultRow> {
        let rules = in_order(self.drafted().map(|row| (row.drafter, row.stop_rule)));
        let best = |(drafter, rule)| self.best_of_rule(drafter, rule);
        rules.into_iter().filter_map(best).collect()
    }

    /// The rows of `like`'s drafter and stop rule, including `like`.
    pub(crate) fn sweep_of(&self, like: &ResultRow) -> impl Iterator<Item = &'a ResultRow> + '_ {
        let sweep = (like.drafter, like.stop_rule);
        self.drafted().filter(move |row| (row.drafter, row.stop_rule) == sweep)
    }

    /// The widest set in which `row` is the fastest; None if there is none, or the row is for a category.
    pub(crate) fn standing(&self, row: &ResultRow) -> Option<Standing> {
        let road = row.road.filter(|_| row.is_pooled())?;
        let is = |best: Option<&ResultRow>| best.is_some_and(|best| best.same_setting(row));
        if is(self.best()) {
            Some(Standing::All)
        } else if is(self.best_of_road(road)) {
            Some(Standing::Road)
        } else {
            is(self.best_of_rule(row.drafter, row.stop_rule)).then_some(Standing::Rule)
        }
    }

    /// Whether `row` is the fastest on its road.
    pub(crate) fn is_best_of_road(&self, row: &ResultRow) -> bool {
        matches!(self.standing(row), Some(Standing::All | Standing::Road))
    }

    /// The categories of prompts, in order of appearance.
    pub(crate) fn categories(&self) -> Vec<&'a str> {
        let rows = self.rows.iter().copied();
        in_order(rows.filter(|row| !row.is_pooled()).map(|row| row.category.as_str()))
    }

    /// The row of `category` under the setting of `like`.
    pub(crate) fn in_category(&self, category: &str, like: &ResultRow) -> Option<&'a ResultRow> {
        let mut rows = self.rows.iter().copied().filter(|row| row.category == category);
        rows.find(|row| row.same_setting(like))
    }

    /// The dataset and the way of decoding, in words.
    pub(crate) fn name(&self) -> String {
        format!("{}, {}", self.dataset, self.decoding_text())
    }

    /// The way of decoding, in words: `greedy`, `sampled at T = 0.7`.
    pub(crate) fn decoding_text(&self) -> String {
        match self.decoding {
            DecodingName::Greedy => "greedy".into(),
            DecodingName::Sampled => format!("sampled at T = {}", self.temperature),
        }
    }

    fn drafted(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.pooled().filter(|row| row.drafter != DrafterName::None)
    }

    fn of_road(&self, road: Road) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.drafted().filter(move |row| row.road == Some(road))
    }

    fn best_of_rule(&self, drafter: DrafterName, rule: StopRuleName) -> Option<&'a ResultRow> {
        fastest(self.drafted().filter(|row| (row.drafter, row.stop_rule) == (drafter, rule)))
    }
}

// All rows of a group share one baseline, so the fastest has the greatest speed-up. Speeds are compared
// because the baseline may be missing.
fn fastest<'a>(rows: impl Iterator<Item = &'a ResultRow>) -> Option<&'a ResultRow> {
    rows.filter(|row| row.tokens_per_second.is_finite())
        .reduce(|best, row| if row.tokens_per_second > best.tokens_per_second { row } else { best })
}

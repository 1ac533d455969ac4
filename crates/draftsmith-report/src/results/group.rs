//! Groups of comparable rows, and the best rows of a group. Only rows of one group may be compared.

use super::{DecodingName, DrafterName, ResultRow, StopRuleName, in_order};

/// The rows of one dataset under one way of decoding.
#[derive(Debug, Clone)]
pub(crate) struct Group<'a> {
    /// The dataset.
    pub(crate) dataset: &'a str,
    /// The way of decoding: greedy or sampled.
    pub(crate) decoding: DecodingName,
    /// The sampling temperature; 0 for greedy decoding.
    pub(crate) temperature: f64,
    rows: Vec<&'a ResultRow>,
}

/// Splits `rows` into groups of one dataset, way of decoding and temperature, in order of
/// appearance.
pub(crate) fn groups(rows: &[ResultRow]) -> Vec<Group<'_>> {
    fn key(row: &ResultRow) -> (&str, DecodingName, f64) {
        (&row.dataset, row.decoding, row.temperature)
    }
    let keys = in_order(rows.iter().map(key));
    let group = |(dataset, decoding, temperature)| {
        let of_group = |row: &&ResultRow| key(row) == (dataset, decoding, temperature);
        Group { dataset, decoding, temperature, rows: rows.iter().filter(of_group).collect() }
    };
    keys.into_iter().map(group).collect()
}

impl<'a> Group<'a> {
    /// Yields the rows that cover all prompts.
    pub(crate) fn pooled(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.rows.iter().copied().filter(|row| row.is_pooled())
    }

    /// Returns the row of plain decoding that covers all prompts.
    pub(crate) fn plain(&self) -> Option<&'a ResultRow> {
        self.pooled().find(|row| row.stop_rule == StopRuleName::None)
    }

    /// Returns the drafters, in order of appearance.
    pub(crate) fn drafters(&self) -> Vec<DrafterName> {
        in_order(self.drafted().map(|row| row.drafter))
    }

    /// Returns the fastest row with a drafter, over all prompts, among those that `is_meant`
    /// accepts. The first wins a tie.
    pub(crate) fn fastest(&self, is_meant: impl Fn(&ResultRow) -> bool) -> Option<&'a ResultRow> {
        // All rows of a group share one baseline, so the fastest has the greatest speed-up. Speeds
        // are compared because the baseline may be missing.
        let rows = self.drafted().filter(|row| row.tokens_per_second.is_finite() && is_meant(row));
        rows.reduce(|best, row| match row.tokens_per_second > best.tokens_per_second {
            true => row,
            false => best,
        })
    }

    /// Returns the fastest row with a drafter.
    pub(crate) fn best(&self) -> Option<&'a ResultRow> {
        self.fastest(|_| true)
    }

    /// Returns the fastest row whose setting `tune` chose.
    pub(crate) fn best_tuned(&self) -> Option<&'a ResultRow> {
        self.fastest(|row| row.is_tuned)
    }

    /// Returns the fastest row of each class that `class` distinguishes, in order of appearance.
    pub(crate) fn best_by<T: PartialEq>(
        &self,
        class: impl Fn(&ResultRow) -> T,
    ) -> Vec<&'a ResultRow> {
        let classes = in_order(self.drafted().map(&class));
        let best = |known: T| self.fastest(|row| class(row) == known);
        classes.into_iter().filter_map(best).collect()
    }

    /// Returns the fastest row of each drafter and stop rule, in order of appearance.
    pub(crate) fn best_of_rules(&self) -> Vec<&'a ResultRow> {
        self.best_by(|row| (row.drafter, row.stop_rule))
    }

    /// Yields the rows with the same drafter and stop rule as `like`, including `like`.
    pub(crate) fn sweep_of(&self, like: &ResultRow) -> impl Iterator<Item = &'a ResultRow> + '_ {
        let sweep = (like.drafter, like.stop_rule);
        self.drafted().filter(move |row| (row.drafter, row.stop_rule) == sweep)
    }

    /// Returns the mark of a row: `tuned` if `tune` chose its setting, and `fastest` if it is the
    /// fastest of all. A row with neither gets `best` if it is the fastest of its kind of drafter,
    /// or else `*` if it is the fastest of its drafter and rule. Rows of one category get no mark
    /// but `tuned`.
    pub(crate) fn mark(&self, row: &ResultRow) -> &'static str {
        let is = |is_meant: &dyn Fn(&ResultRow) -> bool| {
            row.is_pooled() && self.fastest(is_meant).is_some_and(|best| best.same_setting(row))
        };
        let rule = |row: &ResultRow| (row.drafter, row.stop_rule);
        match (row.is_tuned, is(&|_| true)) {
            (true, true) => "tuned, fastest",
            (true, false) => "tuned",
            (false, true) => "fastest",
            _ if is(&|other| other.road == row.road) => "best",
            _ if is(&|other| rule(other) == rule(row)) => "*",
            _ => "",
        }
    }

    /// Returns whether `row` is the fastest of its kind of drafter.
    pub(crate) fn is_best_of_road(&self, row: &ResultRow) -> bool {
        self.fastest(|other| other.road == row.road).is_some_and(|best| best.same_setting(row))
    }

    /// Returns whether `row` is the fastest of its drafter and rule.
    pub(crate) fn is_best_of_rule(&self, row: &ResultRow) -> bool {
        self.best_of_rules().iter().any(|best| best.same_setting(row))
    }

    /// Returns the categories of prompts, in order of appearance.
    pub(crate) fn categories(&self) -> Vec<&'a str> {
        let rows = self.rows.iter().copied();
        in_order(rows.filter(|row| !row.is_pooled()).map(|row| row.category.as_str()))
    }

    /// Finds the row of `category` under the setting of `like`.
    pub(crate) fn in_category(&self, category: &str, like: &ResultRow) -> Option<&'a ResultRow> {
        let mut rows = self.rows.iter().copied().filter(|row| row.category == category);
        rows.find(|row| row.same_setting(like))
    }

    /// Names the dataset and the way of decoding, in words.
    pub(crate) fn name(&self) -> String {
        format!("{}, {}", self.dataset, self.decoding_text())
    }

    /// Describes the way of decoding in words, such as `greedy` or `sampled at T = 0.7`.
    pub(crate) fn decoding_text(&self) -> String {
        match self.decoding {
            DecodingName::Greedy => "greedy".into(),
            DecodingName::Sampled => format!("sampled at T = {}", self.temperature),
        }
    }

    /// Yields the rows with a drafter that cover all prompts.
    pub(crate) fn drafted(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.pooled().filter(|row| row.drafter != DrafterName::None)
    }
}

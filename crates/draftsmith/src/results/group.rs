//! The rows of one dataset under one way of decoding, and which of them are best.
//!
//! What may be compared with each other is decided here and nowhere else; the rows themselves are the parent's.

use super::{DecodingName, ResultRow, StopRuleName, in_order};

/// The rows of one dataset under one way of decoding: what may be compared with each other.
#[derive(Debug, Clone)]
pub(crate) struct Group<'a> {
    /// The dataset.
    pub(crate) dataset: &'a str,
    /// How tokens are chosen.
    pub(crate) decoding: DecodingName,
    /// Sampling temperature; 0 for greedy decoding.
    pub(crate) temperature: f64,
    rows: Vec<&'a ResultRow>,
}

/// `rows` by dataset and decoding, in the order they first came.
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
    /// The rows of all prompts together.
    pub(crate) fn pooled(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.rows.iter().copied().filter(|row| row.is_pooled())
    }

    /// The target alone, over all prompts.
    pub(crate) fn plain(&self) -> Option<&'a ResultRow> {
        self.pooled().find(|row| row.stop_rule == StopRuleName::None)
    }

    /// The fastest fixed candidate length over all prompts; the first of equals.
    pub(crate) fn best_fixed_length(&self) -> Option<&'a ResultRow> {
        self.fastest(StopRuleName::FixedLength)
    }

    /// The fastest threshold of the acceptance head over all prompts; the first of equals.
    pub(crate) fn best_head(&self) -> Option<&'a ResultRow> {
        self.fastest(StopRuleName::RejectionThreshold)
    }

    /// Whether `row` is the best fixed length or the best head.
    pub(crate) fn is_best(&self, row: &ResultRow) -> bool {
        [self.best_fixed_length(), self.best_head()]
            .iter()
            .flatten()
            .any(|best| best.is_pooled() == row.is_pooled() && best.same_setting(row))
    }

    /// The prompts' categories, in the order they first came; none where only pooled rows are there.
    pub(crate) fn categories(&self) -> Vec<&'a str> {
        let rows = self.rows.iter().copied();
        in_order(rows.filter(|row| !row.is_pooled()).map(|row| row.category.as_str()))
    }

    /// The row of `category` under the setting of `like`.
    pub(crate) fn in_category(&self, category: &str, like: &ResultRow) -> Option<&'a ResultRow> {
        self.rows.iter().copied().find(|row| row.category == category && row.same_setting(like))
    }

    /// How the group decodes, in words: `greedy`, `sampled at T = 0.7`.
    pub(crate) fn decoding_text(&self) -> String {
        match self.decoding {
            DecodingName::Greedy => "greedy".into(),
            DecodingName::Sampled => format!("sampled at T = {}", self.temperature),
        }
    }

    // Within a group the baseline is one and the same, so the fastest has the greatest speed-up; and there is a
    // fastest also where the target alone was not measured.
    fn fastest(&self, stop_rule: StopRuleName) -> Option<&'a ResultRow> {
        let rows = self.pooled().filter(|row| row.stop_rule == stop_rule);
        rows.filter(|row| row.tokens_per_second.is_finite()).reduce(|best, row| {
            if row.tokens_per_second > best.tokens_per_second { row } else { best }
        })
    }
}

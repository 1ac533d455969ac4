//! The table `[tune.costs]`: the time of forwards on the machine that will serve the drafters.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use draftsmith_theory::DrafterId;
use serde::{Deserialize, Serialize};

use super::keys::{read_keys, require};

/// Given times of forwards on a serving runtime, in milliseconds. They replace measurements. The
/// time of an acceptance head and of a stop rule's signals counts as part of the draft forward.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenCosts {
    /// The time of a draft forward in milliseconds: a number if there is one drafter, or a table by
    /// drafter such as `{ draft = 1.5, exit2 = 0.8 }`. Omitted drafters are measured.
    pub draft_ms: Option<DraftMs>,
    /// The time of a target forward in milliseconds, for any number of rows.
    pub target_ms: Option<f64>,
    /// The times of target forwards over 1, 2, 3 … rows in milliseconds, if the time depends on the
    /// number of rows. Beyond the list, each row adds the average time per row.
    pub rows_ms: Option<Vec<f64>>,
}

/// The time of a draft forward in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected milliseconds, or a table of them by drafter, such as `{ draft = 1.5 }`"
)]
pub enum DraftMs {
    /// The time for the only drafter.
    One(f64),
    /// The times by drafter name.
    Each(BTreeMap<DrafterId, f64>),
}

impl GivenCosts {
    /// Reads the keys of `[tune.costs]` from a separate file.
    ///
    /// # Errors
    /// If the file cannot be read, or a key is unknown or has an invalid value.
    pub fn read(path: &Path) -> Result<Self> {
        read_keys("costs", path, |costs: &Self| costs.check(""))
    }

    /// Returns the drafters named in `draft_ms`; none if it is a single number or absent.
    pub fn names(&self) -> impl Iterator<Item = DrafterId> {
        let each = match &self.draft_ms {
            Some(DraftMs::Each(all)) => Some(all.keys().copied()),
            Some(DraftMs::One(_)) | None => None,
        };
        each.into_iter().flatten()
    }

    /// Returns the times of target forwards over 1, 2, 3 … rows in milliseconds; `None` if no time
    /// is given. A single time applies to any number of rows.
    pub fn rows_ms(&self) -> Option<Vec<f64>> {
        self.rows_ms.clone().or(self.target_ms.map(|target| vec![target]))
    }

    /// Returns the given time of a draft forward in milliseconds; `None` if it must be measured.
    ///
    /// # Errors
    /// If there are several drafters but only one number.
    pub fn draft_ms(&self, drafter: DrafterId, num_drafters: usize) -> Result<Option<f64>> {
        match &self.draft_ms {
            None => Ok(None),
            Some(DraftMs::Each(all)) => Ok(all.get(&drafter).copied()),
            Some(DraftMs::One(ms)) if num_drafters < 2 => Ok(Some(*ms)),
            Some(DraftMs::One(ms)) => bail!(
                "key `draft_ms` of the costs is one number, but there are {num_drafters} drafters; \
                 hint: name the drafter, as in `draft_ms = {{ {drafter} = {ms} }}`"
            ),
        }
    }

    /// Checks the values. Error messages put `prefix` before the names of keys.
    pub(super) fn check(&self, prefix: &str) -> Result<()> {
        let key = |name: &str| format!("{prefix}{name}");
        let is_time = |ms: &f64| *ms > 0.0 && ms.is_finite();
        const TIMES: &str = "has a time that is not above 0 and finite";
        let draft_ms: Vec<f64> = match &self.draft_ms {
            None => Vec::new(),
            Some(DraftMs::One(ms)) => vec![*ms],
            Some(DraftMs::Each(all)) => all.values().copied().collect(),
        };
        require(draft_ms.iter().all(is_time), &key("draft_ms"), TIMES)?;
        require(self.target_ms.iter().all(is_time), &key("target_ms"), TIMES)?;
        let rows_ms = self.rows_ms.as_deref().unwrap_or_default();
        require(rows_ms.iter().all(is_time), &key("rows_ms"), TIMES)?;
        require(
            self.rows_ms.as_ref().is_none_or(|rows| rows.len() > 1),
            &key("rows_ms"),
            "has fewer than two times: give those of 1, 2, 3 … rows, or only `target_ms` if rows cost \
             nothing",
        )?;
        let first = rows_ms.first();
        require(
            first.zip(self.target_ms).is_none_or(|(first, target)| *first == target),
            &key("target_ms"),
            "is not the first of `rows_ms`, the time of one row: leave it out",
        )?;
        let is_given = self.draft_ms.is_some() || self.target_ms.is_some() || !rows_ms.is_empty();
        require(
            !is_given || self.rows_ms().is_some(),
            &key("target_ms"),
            "is missing, as is `rows_ms`: say what a forward of the target takes",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GivenCosts> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("costs.toml");
        std::fs::write(&path, text).expect("written");
        GivenCosts::read(&path)
    }

    #[test]
    fn one_number_needs_one_drafter_and_a_table_names_drafters() {
        let (draft, exit) = (DrafterId::DRAFT, DrafterId::named("exit2"));
        let one = read("draft_ms = 1.5\nrows_ms = [20, 21.5, 22]").expect("reads");
        assert_eq!(one.rows_ms(), Some(vec![20.0, 21.5, 22.0]));
        assert_eq!(one.draft_ms(exit, 1).expect("the only one"), Some(1.5));
        let refused = one.draft_ms(draft, 2).expect_err("whose?").to_string();
        assert!(refused.contains("`draft_ms`") && refused.contains("{ draft = 1.5 }"), "{refused}");
        let each = read("draft_ms = { exit2 = 0.5 }\ntarget_ms = 20").expect("reads");
        assert_eq!(each.rows_ms(), Some(vec![20.0]));
        assert_eq!(each.draft_ms(exit, 2).expect("named"), Some(0.5));
        assert_eq!(each.draft_ms(draft, 2).expect("not named"), None);
        assert_eq!(GivenCosts::default().draft_ms(draft, 3).expect("nothing given"), None);
    }

    #[test]
    fn messages_name_the_invalid_key() {
        for (text, named) in [
            ("draft_ms = 0.0\ntarget_ms = 3", "`draft_ms`"),
            ("draft_ms = 1\ntarget_ms = inf", "`target_ms`"),
            ("draft_ms = 1\nrows_ms = [3, -1]", "`rows_ms`"),
            ("draft_ms = 1\nrows_ms = [3]", "fewer than two"),
            ("draft_ms = 1", "say what a forward of the target takes"),
            ("draft_ms = 1\ntarget_ms = 3\nrows_ms = [4, 5]", "not the first of `rows_ms`"),
            ("draft_ms = 'x'\ntarget_ms = 3", "expected milliseconds"),
            ("draft_ms = { 'a b' = 1 }\ntarget_ms = 3", "expected milliseconds"),
            ("target = 3", "unknown field `target`"),
        ] {
            let message = format!("{:#}", read(text).expect_err("refused"));
            assert!(message.contains(named) && message.contains("costs.toml"), "{message}");
        }
    }
}

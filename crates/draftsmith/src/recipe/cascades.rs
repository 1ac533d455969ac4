//! The tables `[[evaluate.cascades]]`: drafters that review each other's candidates, or take turns.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use draftsmith_decode::{CascadeConfig, CascadeLengths};
use draftsmith_theory::{DrafterId, Lenience, MAX_DRAFTERS};
use serde::{Deserialize, Serialize};

use super::cascade_rules::ChainRuleRecipe;
use super::checks::{require, toml_error};
use super::data::one;
use crate::names::DecodingName;

/// A cascade.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CascadeRecipe {
    /// Its drafters, from the largest on: `draft`, `small_draft`, `self_draft_N`, `max_gram`.
    pub(crate) drafters: Vec<DrafterId>,
    /// The authors' matrix K: a row for the target and for each drafter but the last, a column for each
    /// drafter. Row i gives the number of each drafter's candidates in the chain that i reviews.
    pub(crate) lengths: Lengths,
    /// The factor by which a reviewing drafter overrates the probability of a candidate; 1 reviews
    /// exactly.
    #[serde(default = "one")]
    pub(crate) lenience: f64,
    /// Whether the lenience applies to looked-up candidates too, which are reviewed exactly otherwise.
    #[serde(default)]
    pub(crate) lenient_lookup: bool,
    /// Rules that end chains before their lengths, at most one a reviewer.
    #[serde(default)]
    pub(crate) rules: Vec<ChainRuleRecipe>,
}

/// The matrix K: a row for each reviewer and a column for each drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a matrix such as `[[4, 6], [0, 8]]`, or one for each way of decoding as in \
                 `{ greedy = [[4, 0], [0, 8]], sampled = [[2, 0], [0, 4]] }`"
)]
pub(crate) enum Lengths {
    /// One for all ways of decoding.
    Same(CascadeLengths),
    /// One for each.
    Each(LengthsOfEach),
}

/// K by how tokens are chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LengthsOfEach {
    /// For greedy decoding.
    pub(crate) greedy: CascadeLengths,
    /// For sampled decoding.
    pub(crate) sampled: CascadeLengths,
}

impl Lengths {
    /// K under a way of decoding.
    fn of(&self, decoding: DecodingName) -> &CascadeLengths {
        match (self, decoding) {
            (Self::Same(lengths), _) => lengths,
            (Self::Each(each), DecodingName::Greedy) => &each.greedy,
            (Self::Each(each), DecodingName::Sampled) => &each.sampled,
        }
    }

    /// K under each way of decoding.
    fn all(&self) -> [&CascadeLengths; 2] {
        [DecodingName::Greedy, DecodingName::Sampled].map(|decoding| self.of(decoding))
    }
}

impl CascadeRecipe {
    /// The decoder's settings.
    ///
    /// # Errors
    /// If the lenience or a rule is invalid.
    pub(crate) fn config(&self) -> Result<CascadeConfig> {
        let of_models = Lenience::new(self.lenience)?;
        let lenience = if self.lenient_lookup { of_models.with_look_ups() } else { of_models };
        let mut rules = vec![None; self.drafters.len()];
        for rule in &self.rules {
            let row = self.row_of(rule).context("names a reviewer")?;
            let [greedy, sampled] =
                self.lengths.all().map(|lengths| self.longest_chain(lengths, row));
            rules[row] = Some(rule.config(greedy.max(sampled))?);
        }
        let [greedy, sampled] = self.lengths.all().map(Clone::clone);
        Ok(CascadeConfig { greedy, sampled, lenience, rules })
    }

    /// The row of the chain that a rule ends; None where its reviewer reads none.
    fn row_of(&self, rule: &ChainRuleRecipe) -> Option<usize> {
        let reviewers = &self.drafters[..self.drafters.len() - 1];
        match rule.reviewer {
            None => Some(0),
            Some(id) => reviewers.iter().position(|reviewer| *reviewer == id).map(|at| at + 1),
        }
    }

    /// The drafters whose tokens make the chain that a rule ends.
    pub(crate) fn drafters_of(&self, rule: &ChainRuleRecipe) -> Vec<DrafterId> {
        let Some(row) = self.row_of(rule) else { return Vec::new() };
        let takes_part =
            |column: usize| self.lengths.all().iter().any(|lengths| lengths[row][column] > 0);
        let taking_part =
            self.drafters.iter().enumerate().filter(|(column, _)| takes_part(*column));
        taking_part.map(|(_, id)| *id).collect()
    }

    /// The most candidates that a round can have: those asked for, and those that a last step accepts
    /// beyond them.
    pub(crate) fn longest(&self, decoding: DecodingName) -> usize {
        self.longest_chain(self.lengths.of(decoding), 0)
    }

    /// The same of the chain that a reviewer reads.
    fn longest_chain(&self, lengths: &CascadeLengths, reviewer: usize) -> usize {
        let Some(row) = lengths.get(reviewer) else { return 0 };
        let (mut asked_for, mut longest) = (0, 0);
        for (drafter, length) in row.iter().enumerate().skip(reviewer).filter(|(_, it)| **it > 0) {
            asked_for += length;
            let beyond = match self.drafters[drafter] {
                DrafterId::MaxGram => 0,
                _ => self.longest_chain(lengths, drafter + 1),
            };
            longest = longest.max(asked_for + beyond);
        }
        longest
    }

    /// Checks what `key` says.
    pub(super) fn check(&self, key: &str) -> Result<()> {
        let drafters = &self.drafters;
        let is_one =
            |id: &DrafterId| !matches!(id, DrafterId::Cascade { .. } | DrafterId::Merged { .. });
        require(
            (1..=MAX_DRAFTERS).contains(&drafters.len()) && drafters.iter().all(is_one),
            key,
            "has a cascade whose `drafters` are none, more than four, or cascades: name `draft`, \
             `small_draft`, `self_draft_N` or `max_gram`",
        )?;
        let num_distinct =
            (0..drafters.len()).filter(|at| !drafters[..*at].contains(&drafters[*at]));
        require(
            num_distinct.count() == drafters.len(),
            key,
            "has a cascade that names a drafter twice",
        )?;
        let num_self_drafts = drafters.iter().filter(|id| id.exit_layer().is_some()).count();
        require(
            num_self_drafts <= 1,
            key,
            "has a cascade of two self-drafts: a target runs ahead to one exit layer at a time",
        )?;
        let before_last = &drafters[..drafters.len() - 1];
        require(
            !before_last.contains(&DrafterId::MaxGram),
            key,
            "has a cascade with a drafter behind `max_gram`, which reviews nothing: put it last",
        )?;
        for lengths in self.lengths.all() {
            self.check_lengths(lengths, key)?;
        }
        require(
            !self.lenient_lookup || (self.lenience > 1.0 && drafters.contains(&DrafterId::MaxGram)),
            key,
            "has a cascade with `lenient_lookup` that has no `max_gram`, or no `lenience` above 1: leave \
             it out",
        )?;
        self.check_rules(key)?;
        self.config().map(drop).with_context(|| format!("key `{key}`"))
    }

    fn check_lengths(&self, lengths: &CascadeLengths, key: &str) -> Result<()> {
        let num_drafters = self.drafters.len();
        require(
            lengths.len() == num_drafters && lengths.iter().all(|row| row.len() == num_drafters),
            key,
            "has a cascade whose `lengths` are no matrix with a row and a column for each drafter",
        )?;
        let mut rows = lengths.iter().enumerate();
        require(
            rows.all(|(at, row)| row[..at].iter().all(|length| *length == 0)),
            key,
            "has a cascade with `lengths` below the diagonal: a drafter reviews smaller ones only",
        )?;
        require(
            lengths[0].iter().any(|length| *length > 0),
            key,
            "has a cascade whose first row of `lengths` is 0: the target would review nothing",
        )
    }

    fn check_rules(&self, key: &str) -> Result<()> {
        for (at, rule) in self.rules.iter().enumerate() {
            require(
                self.row_of(rule).is_some(),
                key,
                "has a cascade with a rule whose `reviewer` reads no chain: name a drafter but the \
                 last, or leave it out for the target",
            )?;
            require(
                self.rules[..at].iter().all(|other| other.reviewer != rule.reviewer),
                key,
                "has a cascade with two rules for one reviewer",
            )?;
            let needs = rule.config(1).with_context(|| format!("key `{key}`"))?.needs();
            let drafters = self.drafters_of(rule);
            require(
                needs.is_nothing() || !drafters.contains(&DrafterId::MaxGram),
                key,
                "has a cascade with a rule that reads probabilities for a chain with looked-up \
                 tokens, which have none: put `fixed_length`, or 0 in the column of `max_gram`",
            )?;
            require(
                !needs.acceptance_prob || drafters.len() == 1,
                key,
                "has a cascade with a rule that reads a head for a chain of several drafters: give \
                 the chain one",
            )?;
            require(
                needs.acceptance_prob || rule.head.is_none(),
                key,
                "has a cascade with a `head` for a rule that reads none",
            )?;
        }
        Ok(())
    }
}

/// Drafters as messages list them.
fn listed(drafters: &[DrafterId]) -> String {
    drafters.iter().map(DrafterId::to_string).collect::<Vec<_>>().join(", ")
}

/// The keys of the table on one line, as a flag has them.
impl FromStr for CascadeRecipe {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Line {
            cascade: CascadeRecipe,
        }
        let line = toml::from_str(&format!("cascade = {{ {text} }}")).map_err(|e| toml_error(&e));
        let Line { cascade } = line?;
        cascade.check("--cascade")?;
        Ok(cascade)
    }
}

/// As results and the report describe it.
impl fmt::Display for CascadeRecipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}; lengths ", listed(&self.drafters))?;
        match &self.lengths {
            Lengths::Same(lengths) => write!(formatter, "{lengths:?}, ")?,
            Lengths::Each(each) => {
                write!(formatter, "{:?} greedy, {:?} sampled, ", each.greedy, each.sampled)?;
            }
        }
        let of_look_ups = if self.lenient_lookup { " for look-ups too" } else { "" };
        write!(formatter, "lenience {}{of_look_ups}", self.lenience)?;
        for rule in &self.rules {
            let reviewer = rule.reviewer.map_or("target".to_owned(), |id| id.to_string());
            let symbol = rule.stop_rule.symbol().unwrap_or("K");
            write!(formatter, ", for {reviewer} {symbol} = {}", rule.setting)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> CascadeRecipe {
        toml::from_str(text).expect("TOML")
    }

    #[test]
    fn a_matrix_is_for_all_decodings_or_for_each() {
        let lengths = |text: &str| -> Result<Lengths, toml::de::Error> {
            let keys = format!("drafters = ['draft']\nlengths = {text}");
            toml::from_str::<CascadeRecipe>(&keys).map(|cascade| cascade.lengths)
        };
        let same = lengths("[[2, 1], [0, 3]]").expect("a matrix");
        let two = vec![vec![2, 1], vec![0, 3]];
        assert_eq!(same.all(), [&two; 2]);
        let each = lengths("{ greedy = [[4]], sampled = [[2]] }").expect("two");
        assert_eq!(each.all(), [&vec![vec![4]], &vec![vec![2]]]);
        for text in ["'tuned'", "3", "[2, 1]", "{ greedy = [[2]] }", "[[-1]]"] {
            let message = lengths(text).expect_err("no matrix").to_string();
            assert!(message.contains("[[4, 6]"), "{message}");
        }
    }

    #[test]
    fn the_longest_round_counts_what_a_last_step_lets_stand() {
        let longest = |names: &str, lengths: &str| {
            let cascade = read(&format!("drafters = {names}\nlengths = {lengths}"));
            cascade.check("evaluate.cascades").expect("a cascade");
            cascade.longest(DecodingName::Greedy)
        };
        let two = "['draft', 'max_gram']";
        assert_eq!(longest(two, "[[2, 10], [0, 10]]"), 12);
        assert_eq!(longest(two, "[[5, 0], [0, 10]]"), 15);
        assert_eq!(longest(two, "[[0, 7], [0, 0]]"), 7);
        let three = "['draft', 'small_draft', 'max_gram']";
        assert_eq!(longest(three, "[[5, 14, 10], [0, 1, 10], [0, 0, 10]]"), 29);
        assert_eq!(longest(three, "[[1, 0, 0], [0, 2, 0], [0, 0, 4]]"), 7);
        assert_eq!(longest("['draft']", "[[3]]"), 3);
    }

    #[test]
    fn what_is_no_cascade_is_told_by_its_key() {
        for (keys, problem) in [
            ("drafters = []\nlengths = []", "are none"),
            ("drafters = ['cascade_1']\nlengths = [[1]]", "or cascades"),
            ("drafters = ['draft', 'draft']\nlengths = [[1, 1], [0, 1]]", "twice"),
            ("drafters = ['self_draft_1', 'self_draft_2']\nlengths = [[1, 1], [0, 1]]", "two self"),
            ("drafters = ['max_gram', 'draft']\nlengths = [[1, 1], [0, 1]]", "put it last"),
            ("drafters = ['draft', 'max_gram']\nlengths = [[1, 1]]", "no matrix"),
            ("drafters = ['draft', 'max_gram']\nlengths = [[1, 1], [2, 1]]", "below the diagonal"),
            ("drafters = ['draft', 'max_gram']\nlengths = [[0, 0], [0, 1]]", "review nothing"),
            ("drafters = ['draft']\nlengths = [[1]]\nlenience = 0.5", "lenience must be 1"),
            ("drafters = ['draft']\nlengths = { greedy = [[1]], sampled = [[0]] }", "nothing"),
            (
                "drafters = ['draft', 'max_gram']\nlengths = [[1, 1], [0, 1]]\nlenient_lookup = true",
                "no `lenience` above 1",
            ),
            (
                "drafters = ['draft']\nlengths = [[1]]\nlenience = 2\nlenient_lookup = true",
                "max_gram",
            ),
            (
                "drafters = ['draft', 'max_gram']\nlengths = [[2, 0], [0, 4]]\nrules = \
              [{ reviewer = 'max_gram', stop_rule = 'fixed_length', setting = 2 }]",
                "no chain",
            ),
            (
                "drafters = ['draft', 'max_gram']\nlengths = [[2, 0], [0, 4]]\nrules = \
              [{ reviewer = 'draft', stop_rule = 'joint_confidence', setting = 0.5 }]",
                "have none",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nrules = \
              [{ stop_rule = 'joint_confidence', setting = 2.0 }]",
                "outside 0 to 1",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nrules = \
              [{ stop_rule = 'cost_optimal_confidence', setting = 0.5 }]",
                "fitted",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nrules = \
              [{ stop_rule = 'joint_confidence', setting = 0.5, head = 'x' }]",
                "reads none",
            ),
            (
                "drafters = ['draft', 'small_draft']\nlengths = [[4, 2], [0, 2]]\nrules = \
              [{ stop_rule = 'rejection_threshold', setting = 0.5 }]",
                "several drafters",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nrules = \
              [{ stop_rule = 'joint_confidence', setting = 0.5 }, \
              { stop_rule = 'joint_confidence', setting = 0.6 }]",
                "two rules",
            ),
        ] {
            let message =
                format!("{:#}", read(keys).check("evaluate.cascades").expect_err("refused"));
            assert!(message.contains("`evaluate.cascades`"), "{message}");
            assert!(message.contains(problem), "{message}");
        }
    }

    #[test]
    fn a_flag_has_the_keys_on_one_line() {
        let keys = "drafters = ['draft', 'max_gram'], lengths = [[4, 6], [0, 8]], lenience = 2.0";
        let cascade: CascadeRecipe = keys.parse().expect("a cascade");
        assert_eq!(cascade.to_string(), "draft, max_gram; lengths [[4, 6], [0, 8]], lenience 2");
        let lenience = Lenience::new(2.0).expect("1 or more");
        assert_eq!(cascade.config().expect("valid").lenience, lenience);
        let keys = format!("{keys}, lenient_lookup = true");
        let cascade: CascadeRecipe = keys.parse().expect("a cascade");
        assert!(cascade.to_string().ends_with("lenience 2 for look-ups too"), "{cascade}");
        assert_eq!(cascade.config().expect("valid").lenience, lenience.with_look_ups());
        for (keys, problem) in [
            ("drafters = ['draft']", "lengths"),
            ("drafters = ['draft'], lengths = [[0]]", "`--cascade`"),
            ("drafters = ['draft', 'max_gram'], lengths = 'tuned'", "expected a matrix"),
            ("draft, max_gram", "cascade"),
        ] {
            let message = format!("{:#}", keys.parse::<CascadeRecipe>().expect_err("refused"));
            assert!(message.contains(problem), "{message}");
        }
    }
}

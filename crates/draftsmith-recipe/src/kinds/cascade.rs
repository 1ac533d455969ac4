//! The kind `cascade` (CS-Drafting): several drafters, where larger ones review the candidates of
//! smaller ones, or drafters take turns.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{CascadeConfig, CascadeLengths, CascadeParts, NamedParts};
use draftsmith_theory::{
    Bounds, DecodingName, DrafterId, FixedLengthConfig, Lenience, MAX_DRAFTERS, Road,
    StopRuleConfig, StopRuleEntry, StopRuleName,
};
use serde::{Deserialize, Serialize};

use super::loaded::{LoadedDrafter, Loading};
use super::{DrafterKind, DrafterRecipes, KindEntry, Role, check_members, names_text, read_kind};
use crate::recipe::keys::{one, require};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry =
    KindEntry { name: "cascade", read: read_kind::<CascadeKind>, export: None };

/// The settings of a cascade.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CascadeKind {
    /// The drafters, largest first. Prompt lookup comes last.
    pub drafters: Vec<DrafterId>,
    /// The matrix K of candidate lengths. It has a row for the target and for each drafter except
    /// the last, and a column for each drafter. Row i gives the number of candidates from each
    /// drafter in the chain that reviewer i verifies.
    pub lengths: CascadeMatrix,
    /// The factor by which a reviewing drafter scales up candidates' probabilities; 1 is exact.
    #[serde(default = "one")]
    pub lenience: f64,
    /// Whether the lenience also applies to prompt lookup; if not, its candidates are verified
    /// exactly.
    #[serde(default)]
    pub lenient_lookup: bool,
    /// The rules that can end a chain early, at most one per reviewer.
    #[serde(default)]
    pub chain_rules: Vec<ChainRuleRecipe>,
    /// The number of first tokens of a proposal, including the chain's; `None` for a chain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_first_tokens: Option<usize>,
    /// Whether no look-ups follow the other first tokens.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bare_siblings: bool,
}

/// The matrix K of candidate lengths, for both ways of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a matrix such as `[[4, 6], [0, 8]]`, or one for each way of decoding as in \
                 `{ greedy = [[4, 0], [0, 8]], sampled = [[2, 0], [0, 4]] }`"
)]
pub enum CascadeMatrix {
    /// The same matrix for greedy and sampled decoding.
    Same(CascadeLengths),
    /// One matrix for greedy and one for sampled decoding.
    Each(LengthsOfEach),
}

/// A matrix K for each way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthsOfEach {
    /// The matrix for greedy decoding.
    pub greedy: CascadeLengths,
    /// The matrix for sampled decoding.
    pub sampled: CascadeLengths,
}

impl CascadeMatrix {
    /// Returns the matrix for greedy or for sampled decoding.
    fn of(&self, decoding: DecodingName) -> &CascadeLengths {
        match (self, decoding) {
            (Self::Same(lengths), _) => lengths,
            (Self::Each(each), DecodingName::Greedy) => &each.greedy,
            (Self::Each(each), DecodingName::Sampled) => &each.sampled,
        }
    }

    /// Returns the matrices for greedy and for sampled decoding, in this order.
    fn all(&self) -> [&CascadeLengths; 2] {
        [DecodingName::Greedy, DecodingName::Sampled].map(|decoding| self.of(decoding))
    }
}

impl CascadeKind {
    /// Builds the settings of the cascade decoder.
    ///
    /// # Errors
    /// If the lenience or a rule is invalid.
    pub fn config(&self) -> Result<CascadeConfig> {
        let of_models = Lenience::new(self.lenience)?;
        let lenience = if self.lenient_lookup { of_models.with_look_ups() } else { of_models };
        let mut rules = vec![None; self.drafters.len()];
        for rule in &self.chain_rules {
            let row = self.row_of(rule).context("names a reviewer")?;
            let [greedy, sampled] =
                self.lengths.all().map(|lengths| self.longest_chain(lengths, row));
            rules[row] = Some(rule.config(greedy.max(sampled))?);
        }
        let [greedy, sampled] = self.lengths.all().map(Clone::clone);
        let num_first_tokens = self.num_first_tokens.unwrap_or(1);
        let bare_siblings = self.bare_siblings;
        Ok(CascadeConfig { greedy, sampled, lenience, rules, num_first_tokens, bare_siblings })
    }

    /// Returns the matrix row of the chain that a rule ends; `None` if its reviewer reviews no
    /// chain.
    fn row_of(&self, rule: &ChainRuleRecipe) -> Option<usize> {
        let reviewers = &self.drafters[..self.drafters.len() - 1];
        match rule.reviewer {
            None => Some(0),
            Some(id) => reviewers.iter().position(|reviewer| *reviewer == id).map(|at| at + 1),
        }
    }

    /// Lists the drafters that contribute candidates to the chain that a rule ends.
    pub fn drafters_of(&self, rule: &ChainRuleRecipe) -> Vec<DrafterId> {
        let Some(row) = self.row_of(rule) else { return Vec::new() };
        let takes_part =
            |column: usize| self.lengths.all().iter().any(|lengths| lengths[row][column] > 0);
        let taking_part =
            self.drafters.iter().enumerate().filter(|(column, _)| takes_part(*column));
        taking_part.map(|(_, id)| *id).collect()
    }

    /// Computes the maximum number of candidates in a round. It includes the extra candidates that
    /// the last step of a review can accept beyond the requested number.
    pub fn longest(&self, decoding: DecodingName) -> usize {
        self.longest_chain(self.lengths.of(decoding), 0)
    }

    /// Computes [`CascadeKind::longest`] for the chain that one reviewer verifies.
    fn longest_chain(&self, lengths: &CascadeLengths, reviewer: usize) -> usize {
        let Some(row) = lengths.get(reviewer) else { return 0 };
        let (mut requested, mut longest) = (0, 0);
        for (drafter, length) in row.iter().enumerate().skip(reviewer).filter(|(_, it)| **it > 0) {
            requested += length;
            longest = longest.max(requested + self.longest_chain(lengths, drafter + 1));
        }
        longest
    }

    /// Returns whether the last drafter is a lookup drafter. No other drafter can be one.
    fn has_look_ups(&self, all: &DrafterRecipes) -> bool {
        let last = self.drafters.last().and_then(|id| all.get(*id));
        last.is_some_and(|it| it.kind.role() == Role::LookUp)
    }

    fn check_lengths(&self, lengths: &CascadeLengths, key: &str) -> Result<()> {
        let check = |holds, problem| require(holds, key, problem);
        let num_drafters = self.drafters.len();
        check(
            lengths.len() == num_drafters && lengths.iter().all(|row| row.len() == num_drafters),
            "has `lengths` that are not a matrix with a row and a column for each drafter",
        )?;
        let mut rows = lengths.iter().enumerate();
        check(
            rows.all(|(at, row)| row[..at].iter().all(|length| *length == 0)),
            "has `lengths` below the diagonal: a drafter reviews only smaller ones",
        )?;
        check(
            lengths[0].iter().any(|length| *length > 0),
            "has a first row of `lengths` that is 0: the target would review nothing",
        )
    }

    /// Checks that the first token of every proposal comes from a model, which gives it siblings.
    fn check_first_tokens(&self, key: &str, has_look_ups: bool) -> Result<()> {
        let Some(num) = self.num_first_tokens else {
            let problem = "has `bare_siblings`, but no `num_first_tokens`: give a number such as 8";
            return require(!self.bare_siblings, key, problem);
        };
        require(
            num > 1,
            key,
            "has a `num_first_tokens` of 0 or 1, which is a chain: give a larger number such as 8, \
             or leave it out",
        )?;
        let num_models = self.drafters.len() - usize::from(has_look_ups);
        let begins_with_model =
            |lengths: &CascadeLengths| lengths[0][..num_models].iter().any(|length| *length > 0);
        require(
            self.lengths.all().into_iter().all(begins_with_model),
            key,
            "has `num_first_tokens`, but its first candidate is looked up and has no siblings: in \
             the first row of `lengths`, give a drafter with a model a length above 0",
        )
    }

    fn check_rules(&self, key: &str, has_look_ups: bool) -> Result<()> {
        let check = |holds, problem| require(holds, key, problem);
        let last = self.drafters.last();
        for (at, rule) in self.chain_rules.iter().enumerate() {
            check(
                self.row_of(rule).is_some(),
                "has a rule whose `reviewer` reviews no chain: name a drafter that is not \
                 the last, or leave it out for the target",
            )?;
            check(
                self.chain_rules[..at].iter().all(|other| other.reviewer != rule.reviewer),
                "has two rules for one reviewer",
            )?;
            let needs = rule.config(1).with_context(|| format!("key `{key}`"))?.needs();
            let drafters = self.drafters_of(rule);
            check(
                needs.is_nothing() || !has_look_ups || !drafters.iter().any(|id| Some(id) == last),
                "has a rule that reads probabilities for a chain with looked-up \
                 tokens, which have none: use `fixed_length`, or 0 in the column of the look-ups",
            )?;
            check(
                !needs.acceptance_prob || drafters.len() == 1,
                "has a rule that reads a head for a chain of several drafters: give \
                 the chain one drafter",
            )?;
            check(
                needs.acceptance_prob || rule.head.is_none(),
                "has a `head` for a rule that reads none",
            )?;
        }
        Ok(())
    }
}

/// A stop rule for the chain that a drafter or the target reviews.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainRuleRecipe {
    /// The drafter that reviews the chain; the target if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reviewer: Option<DrafterId>,
    /// The rule's name, as in results.
    pub stop_rule: StopRuleName,
    /// The rule's parameter, as in results.
    pub setting: f64,
    /// The directory of the acceptance head that the rule reads; by default, the chain drafter's
    /// head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<PathBuf>,
}

impl ChainRuleRecipe {
    /// Returns whether the rule reads an acceptance head.
    fn reads_head(&self) -> bool {
        self.stop_rule.entry().is_some_and(|entry| !entry.heads.is_empty())
    }

    /// Builds the stop rule for chains of up to `max` candidates.
    ///
    /// # Errors
    /// If the rule has no tunable parameter, or `setting` is outside its range.
    fn config(&self, max: usize) -> Result<StopRuleConfig> {
        let Some(grid) = self.stop_rule.entry().and_then(StopRuleEntry::grid) else {
            bail!("has a rule that is fitted to rollouts: name one with a threshold")
        };
        if let Some(problem) = grid.values.problem(self.setting) {
            bail!("has a rule whose `setting` {problem}");
        }
        let config = grid.at(self.setting, Bounds { min: 1, max: max.max(1) });
        config.init()?;
        Ok(config)
    }
}

impl DrafterKind for CascadeKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn road(&self) -> Road {
        Road::Several
    }

    fn check(&self, key: &str, all: &DrafterRecipes) -> Result<()> {
        let drafters = &self.drafters;
        let of_drafters = format!("{key}.drafters");
        require(
            (1..=MAX_DRAFTERS).contains(&drafters.len()),
            &of_drafters,
            "is empty or names more than four drafters",
        )?;
        const NO_PART: &str = "names a drafter that can be no part of a cascade, or prompt lookup before the last \
                               place: it reviews nothing";
        let (_, others) = drafters.split_last().context("there is a drafter")?;
        check_members(&of_drafters, drafters, all, |role| role != Role::Neither, NO_PART)?;
        check_members(&of_drafters, others, all, |role| role == Role::Steps, NO_PART)?;
        for lengths in self.lengths.all() {
            self.check_lengths(lengths, key)?;
        }
        let has_look_ups = self.has_look_ups(all);
        require(
            !self.lenient_lookup || (self.lenience > 1.0 && has_look_ups),
            key,
            "has `lenient_lookup` but no prompt lookup, or no `lenience` above 1: leave it out",
        )?;
        self.check_first_tokens(key, has_look_ups)?;
        self.check_rules(key, has_look_ups)?;
        self.config().map(drop).with_context(|| format!("key `{key}`"))
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let vocab_size = loading.workspace.models.vocab_size()?;
        if let Some(num) = self.num_first_tokens.filter(|num| *num > vocab_size) {
            bail!(
                "it has `num_first_tokens = {num}`, but the vocabulary has {vocab_size} tokens; hint: \
                 give fewer, such as 8"
            );
        }
        let members = loading.members(&self.drafters)?;
        let mut drafters: Vec<NamedParts> = members.iter().map(|it| it.parts.clone()).collect();
        for rule in &self.chain_rules {
            let ids = self.drafters_of(rule);
            let [id] = ids[..] else { continue };
            let at = self.drafters.iter().position(|it| *it == id).context("it is a member")?;
            match &rule.head {
                Some(dir) => {
                    let hash_of = |id| {
                        let reviewer = loading.of(id);
                        reviewer.drafter().kind.recorded_hash(&reviewer)
                    };
                    let reviewer = rule.reviewer.map(hash_of).transpose()?;
                    let member = loading.of(id);
                    let kind = &member.drafter().kind;
                    drafters[at] = kind.with_head(&member, dir, reviewer.as_deref())?;
                }
                None if rule.reads_head()
                    && (members[at].head.is_none() || rule.reviewer.is_some()) =>
                {
                    bail!(
                        "it has a rule that reads an acceptance head of `{id}`, but there is none for its \
                         reviewer; hint: train one with the two as draft and target, and name its directory in \
                         the rule's `head`"
                    );
                }
                None => {}
            }
        }
        let parts = CascadeParts { config: self.config()?, drafters };
        Ok(LoadedDrafter::of_members(loading.id, parts, members))
    }

    fn members_text(&self) -> Option<String> {
        let lengths = match &self.lengths {
            CascadeMatrix::Same(lengths) => format!("{lengths:?}"),
            CascadeMatrix::Each(LengthsOfEach { greedy, sampled }) => {
                format!("{greedy:?} greedy, {sampled:?} sampled")
            }
        };
        let of_look_ups = if self.lenient_lookup { " for look-ups too" } else { "" };
        let drafters = names_text(&self.drafters);
        let mut text =
            format!("{drafters}; lengths {lengths}, lenience {}{of_look_ups}", self.lenience);
        for rule in &self.chain_rules {
            let reviewer = rule.reviewer.map_or("target".to_owned(), |id| id.to_string());
            let symbol = rule.stop_rule.symbol().unwrap_or("K");
            text += &format!(", for {reviewer} {symbol} = {}", rule.setting);
        }
        let bare = if self.bare_siblings { ", bare siblings" } else { "" };
        let first = self.num_first_tokens.map(|num| format!(", {num} first tokens{bare}"));
        Some(text + &first.unwrap_or_default())
    }

    /// Returns a fixed length: the length of the longest possible round.
    fn own_rule(&self, decoding: DecodingName) -> Option<StopRuleConfig> {
        Some(FixedLengthConfig { candidate_length: self.longest(decoding) }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, recipes};
    use super::*;

    fn read(text: &str) -> CascadeKind {
        toml::from_str(text).expect("TOML")
    }

    #[test]
    fn a_matrix_is_for_both_decodings_or_for_each() {
        let lengths = |text: &str| -> Result<CascadeMatrix, toml::de::Error> {
            let keys = format!("drafters = ['draft']\nlengths = {text}");
            toml::from_str::<CascadeKind>(&keys).map(|cascade| cascade.lengths)
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
    fn the_longest_round_includes_what_the_last_review_accepts() {
        let longest = |names: &str, lengths: &str| {
            let keys = format!("drafters = {names}\nlengths = {lengths}");
            recipes("cascade", &keys).check().expect("a cascade");
            read(&keys).longest(DecodingName::Greedy)
        };
        let two = "['draft', 'lookup']";
        assert_eq!(longest(two, "[[2, 10], [0, 10]]"), 12);
        assert_eq!(longest(two, "[[5, 0], [0, 10]]"), 15);
        assert_eq!(longest(two, "[[0, 7], [0, 0]]"), 7);
        let three = "['draft', 'small', 'lookup']";
        assert_eq!(longest(three, "[[5, 14, 10], [0, 1, 10], [0, 0, 10]]"), 29);
        assert_eq!(longest(three, "[[1, 0, 0], [0, 2, 0], [0, 0, 4]]"), 7);
        assert_eq!(longest("['draft']", "[[3]]"), 3);
    }

    #[test]
    fn messages_name_the_key_of_an_invalid_cascade() {
        for (keys, problem) in [
            ("drafters = []\nlengths = []", "is empty"),
            ("drafters = ['mix']\nlengths = [[1]]", "no part of a cascade"),
            ("drafters = ['draft', 'draft']\nlengths = [[1, 1], [0, 1]]", "twice"),
            ("drafters = ['exit1', 'exit2']\nlengths = [[1, 1], [0, 1]]", "two self"),
            ("drafters = ['lookup', 'draft']\nlengths = [[1, 1], [0, 1]]", "before the last place"),
            ("drafters = ['draft', 'lookup']\nlengths = [[1, 1]]", "not a matrix"),
            ("drafters = ['draft', 'lookup']\nlengths = [[1, 1], [2, 1]]", "below the diagonal"),
            ("drafters = ['draft', 'lookup']\nlengths = [[0, 0], [0, 1]]", "review nothing"),
            ("drafters = ['draft']\nlengths = [[1]]\nlenience = 0.5", "lenience must be 1"),
            ("drafters = ['draft']\nlengths = { greedy = [[1]], sampled = [[0]] }", "nothing"),
            (
                "drafters = ['draft', 'lookup']\nlengths = [[1, 1], [0, 1]]\nlenient_lookup = true",
                "no `lenience` above 1",
            ),
            (
                "drafters = ['draft']\nlengths = [[1]]\nlenience = 2\nlenient_lookup = true",
                "no prompt lookup",
            ),
            (
                "drafters = ['draft', 'lookup']\nlengths = [[2, 0], [0, 4]]\nchain_rules = \
              [{ reviewer = 'lookup', stop_rule = 'fixed_length', setting = 2 }]",
                "reviews no chain",
            ),
            (
                "drafters = ['draft', 'lookup']\nlengths = [[2, 0], [0, 4]]\nchain_rules = \
              [{ reviewer = 'draft', stop_rule = 'joint_confidence', setting = 0.5 }]",
                "have none",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nchain_rules = \
              [{ stop_rule = 'joint_confidence', setting = 2.0 }]",
                "outside 0 to 1",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nchain_rules = \
              [{ stop_rule = 'cost_confidence', setting = 0.5 }]",
                "fitted",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nchain_rules = \
              [{ stop_rule = 'joint_confidence', setting = 0.5, head = 'x' }]",
                "reads none",
            ),
            (
                "drafters = ['draft', 'small']\nlengths = [[4, 2], [0, 2]]\nchain_rules = \
              [{ stop_rule = 'rejection_threshold', setting = 0.5 }]",
                "several drafters",
            ),
            (
                "drafters = ['draft']\nlengths = [[4]]\nchain_rules = \
              [{ stop_rule = 'joint_confidence', setting = 0.5 }, \
              { stop_rule = 'joint_confidence', setting = 0.6 }]",
                "two rules",
            ),
            ("drafters = ['draft']\nlengths = [[2]]\nnum_first_tokens = 0", "is a chain"),
            ("drafters = ['draft']\nlengths = [[2]]\nnum_first_tokens = 1", "is a chain"),
            (
                "drafters = ['draft']\nlengths = [[2]]\nbare_siblings = true",
                "no `num_first_tokens`",
            ),
            (
                "drafters = ['draft', 'lookup']\nlengths = [[0, 4], [0, 0]]\nnum_first_tokens = 8",
                "is looked up",
            ),
            (
                "drafters = ['draft', 'lookup']\nnum_first_tokens = 8\n\
              lengths = { greedy = [[1, 3], [0, 1]], sampled = [[0, 4], [0, 0]] }",
                "is looked up",
            ),
        ] {
            let message = message("cascade", keys);
            assert!(message.contains("`drafters.it"), "{message}");
            assert!(message.contains(problem), "{message}");
        }
    }

    #[test]
    fn it_describes_itself() {
        let keys = "drafters = ['draft', 'lookup']\nlengths = [[4, 6], [0, 8]]\nlenience = 2.0";
        let text = |cascade: &CascadeKind| cascade.members_text().expect("it has members");
        let cascade = read(keys);
        assert_eq!(text(&cascade), "draft, lookup; lengths [[4, 6], [0, 8]], lenience 2");
        let lenience = Lenience::new(2.0).expect("1 or more");
        assert_eq!(cascade.config().expect("valid").lenience, lenience);
        let cascade = read(&format!("{keys}\nlenient_lookup = true"));
        assert!(text(&cascade).ends_with("lenience 2 for look-ups too"), "{cascade:?}");
        assert_eq!(cascade.config().expect("valid").lenience, lenience.with_look_ups());
        let chain = cascade;
        assert_eq!(chain.config().expect("valid").num_first_tokens, 1);
        let cascade = read(&format!("{keys}\nnum_first_tokens = 8"));
        assert!(text(&cascade).ends_with("lenience 2, 8 first tokens"), "{cascade:?}");
        let config = cascade.config().expect("valid");
        assert_eq!((config.num_first_tokens, config.bare_siblings), (8, false));
        let bare = read(&format!("{keys}\nnum_first_tokens = 8\nbare_siblings = true"));
        assert!(text(&bare).ends_with(", 8 first tokens, bare siblings"), "{bare:?}");
        assert!(bare.config().expect("valid").bare_siblings);
        let greedy = DecodingName::Greedy;
        assert_eq!(cascade.longest(greedy), chain.longest(greedy));
        assert_eq!(cascade.own_rule(greedy), chain.own_rule(greedy));
    }
}

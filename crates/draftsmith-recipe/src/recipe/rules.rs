//! Settings of stop rules by short name, in the recipe's table `[evaluate.rules]` or the flag
//! `--rule`. The theory crate's table of rules defines names, options, allowed values and defaults.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use draftsmith_theory::{Bounds, Grid, StopRuleConfig, StopRuleEntry, stop_rules};
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::keys::{require, require_few};

/// The settings of each rule that a recipe lists, such as `fixed = [1, 2]`, without defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RulesRecipe(BTreeMap<String, RuleRecipe>);

/// The values of a rule's parameter, with the options that differ from their defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list of numbers, or a table with this list and the rule's options: \
                 `{ values = [0.3, 0.5], OPTION = 2 }`"
)]
enum RuleRecipe {
    List(Vec<Number>),
    WithOptions {
        values: Vec<Number>,
        #[serde(flatten)]
        options: BTreeMap<String, Number>,
    },
}

/// Returns the rules that recipes can list, each with its grid of settings.
fn listed() -> impl Iterator<Item = (&'static StopRuleEntry, &'static Grid)> {
    stop_rules().filter_map(|entry| Some((entry, entry.grid()?)))
}

impl RulesRecipe {
    /// Checks all rules' names, options and values. Error messages call the table `key_prefix`.
    pub fn check(&self, key_prefix: &str) -> Result<()> {
        let mut rules = self.0.iter();
        rules.try_for_each(|(name, rule)| rule.check(name, &format!("{key_prefix}.{name}")))
    }

    /// Lists all settings of a drafter's rules, within `bounds`. A rule's settings come from
    /// `over`, else from this table, else from the rule's defaults. Rules that read an acceptance
    /// head are included only if `has_head` is true.
    pub fn configs(
        &self,
        over: Option<&Self>,
        is_self_draft: bool,
        has_head: bool,
        bounds: Bounds,
    ) -> Vec<StopRuleConfig> {
        let readable = listed().filter(|(entry, _)| has_head || entry.heads.is_empty());
        let configs = readable.flat_map(|(entry, grid)| {
            let mut tables = over.into_iter().chain([self]);
            let given = tables.find_map(|table| table.0.get(entry.file_name));
            let default = if is_self_draft { grid.self_draft_default } else { grid.default };
            let (values, options) =
                given.map_or_else(|| (default.to_vec(), BTreeMap::new()), |rule| rule.numbers());
            let options = grid.with_options(options).expect("a recipe's rules are checked");
            values.into_iter().map(move |value| (grid.config)(value, &options, bounds))
        });
        configs.collect()
    }
}

impl RuleRecipe {
    /// Separates the values of the rule's parameter from its options.
    fn numbers(&self) -> (Vec<f64>, BTreeMap<&str, f64>) {
        let (values, options) = match self {
            Self::List(values) => (values, None),
            Self::WithOptions { values, options } => (values, Some(options)),
        };
        let number = |number: &Number| number.as_f64().unwrap_or(f64::NAN);
        let options = options.into_iter().flatten().map(|(name, it)| (name.as_str(), number(it)));
        (values.iter().map(number).collect(), options.collect())
    }

    /// Checks that these are valid settings of the rule `name`. Error messages call them `key`.
    fn check(&self, name: &str, key: &str) -> Result<()> {
        let grid = Grid::of(name).map_err(|problem| anyhow!("key `{key}` {problem}"))?;
        let (values, options) = self.numbers();
        require_few(values.len(), key)?;
        let problem = values.into_iter().find_map(|value| grid.values.problem(value));
        require(problem.is_none(), key, problem.unwrap_or_default())?;
        let options = grid.with_options(options).map(drop);
        options.map_err(|(option, problem)| anyhow!("key `{key}.{option}` {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{EntropyThresholdConfig, NamedRule, RuleOption};

    use super::*;

    /// The expected form of a rule's text, for error messages.
    const EXPECTED: &str = "expected NAME=NUMBER, then options: `entropy=0.3,check_interval=2`";
    const BOUNDS: Bounds = Bounds { min: 1, max: 6 };

    fn read(keys: &str) -> RulesRecipe {
        toml::from_str(keys).expect("reads")
    }

    /// Returns the short name and parameter of every rule as text.
    fn names(configs: &[StopRuleConfig]) -> Vec<String> {
        let name = |config: &StopRuleConfig| {
            format!("{}-{}", config.name().file_name(), config.parameter())
        };
        configs.iter().map(name).collect()
    }

    /// Finds an allowed value that differs from the defaults.
    fn number(problem: impl Fn(f64) -> Option<&'static str>) -> f64 {
        [0.375, 3.0].into_iter().find(|number| problem(*number).is_none()).expect("one")
    }

    #[test]
    fn every_rule_and_option_of_the_table_is_read_and_written() {
        for (entry, grid) in listed() {
            let name = entry.file_name;
            let value = number(|number| grid.values.problem(number));
            let given = |option: &RuleOption| number(|number| option.values.problem(number));
            let all: Vec<f64> = grid.options.iter().map(given).collect();
            // The TOML writer sorts tables alphabetically.
            let mut options: Vec<String> =
                grid.options.iter().map(|it| format!("{} = {}", it.name, given(it))).collect();
            options.sort();
            let line = |option: &String| format!("{option}\n");
            let lines: String = options.iter().map(line).collect();
            for (text, numbers) in [
                (format!("{name} = [{value}]\n"), &grid.with_options([]).expect("the defaults")),
                (format!("[{name}]\nvalues = [{value}]\n{lines}"), &all),
            ] {
                let rules = read(&text);
                rules.check("evaluate.rules").expect("valid");
                assert_eq!(toml::to_string(&rules).expect("TOML"), text);
                let configs = rules.configs(None, false, true, BOUNDS);
                assert!(configs.contains(&(grid.config)(value, numbers, BOUNDS)), "{configs:?}");
            }
            let asked = |text: String| text.parse::<NamedRule>().expect("a rule").config(BOUNDS);
            let with_options = [&[format!("{name}={value}")], &options[..]].concat().join(",");
            assert_eq!(asked(with_options), (grid.config)(value, &all, BOUNDS));
            assert_eq!(asked(format!("{name}={value}")), grid.at(value, BOUNDS));
        }
    }

    #[test]
    fn the_list_of_keys_explains_every_rule_and_option_of_the_table() {
        let list = include_str!("../../../../recipes/KEYS.md");
        let has_row = |row: String| {
            assert!(list.lines().any(|line| line == row), "recipes/KEYS.md has no row {row}");
        };
        for (entry, grid) in listed() {
            let [draft, adapter] = [grid.default, grid.self_draft_default].map(|values| {
                let values: Vec<String> = values.iter().map(f64::to_string).collect();
                format!("[{}]", values.join(", "))
            });
            let name = entry.file_name;
            has_row(format!("| **`{name}`** | {} | {draft} | {adapter} |", grid.doc));
            for RuleOption { name: option, doc, default, .. } in grid.options {
                has_row(format!("| **`{name}`**, `{option}` | {doc} | {default} | {default} |"));
            }
        }
    }

    #[test]
    fn unlisted_rules_have_the_tables_defaults() {
        let none = RulesRecipe::default();
        assert_eq!(toml::to_string(&none).expect("TOML"), "");
        for is_self_draft in [false, true] {
            let defaults = listed().flat_map(|(_, grid)| {
                let values = if is_self_draft { grid.self_draft_default } else { grid.default };
                values.iter().map(|value| grid.at(*value, BOUNDS))
            });
            let configs = none.configs(None, is_self_draft, true, BOUNDS);
            assert_eq!(configs, defaults.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_drafters_own_lists_come_first_and_heads_need_a_head() {
        let rules = read(
            "fixed = [2]\nhead = [0.5]\nconfidence = []\n\
                          entropy = { values = [0.5], scale = 1, check_interval = 2 }",
        );
        let own = read("fixed = [3]\nconfidence = [0.25]");
        let of_draft = |has_head| rules.configs(None, false, has_head, BOUNDS);
        assert_eq!(names(&of_draft(false)), ["fixed-2", "entropy-0.5"]);
        assert_eq!(names(&of_draft(true)), ["fixed-2", "head-0.5", "entropy-0.5"]);
        let of_adapter = rules.configs(Some(&own), true, true, BOUNDS);
        assert_eq!(names(&of_adapter), ["fixed-3", "head-0.5", "confidence-0.25", "entropy-0.5"]);
        let entropy = EntropyThresholdConfig {
            entropy_threshold: 0.5,
            entropy_scale: 1.0,
            check_interval: 2,
            bounds: BOUNDS,
        };
        assert_eq!(of_draft(false)[1], entropy.into());
        // A rule that the recipe lists has the same settings for every drafter.
        let of_adapter = rules.configs(None, true, false, BOUNDS);
        assert_eq!(names(&of_adapter), ["fixed-2", "entropy-0.5"]);
    }

    #[test]
    fn settings_that_are_no_list_are_refused_with_their_line() {
        let refused =
            toml::from_str::<RulesRecipe>("head = [0.5]\nfixed = 3").expect_err("refused");
        let message = refused.to_string();
        for part in ["line 2", "fixed = 3", "expected a list", "OPTION"] {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }

    #[test]
    fn messages_name_the_key_of_an_invalid_setting() {
        for (keys, problem) in [
            (
                "fixed = [1.5]",
                "`rules.fixed` has a length that is not a whole number from 1 to 256",
            ),
            (
                "heads = [0.5]",
                "`rules.heads` is no stop rule, expected one of `fixed`, `heuristic`",
            ),
            ("cost-head = [0.5]", "`rules.cost-head` is fitted by `tune` and takes no value"),
            ("head = [2]", "`rules.head` has a threshold outside 0 to 1"),
            ("entropy = [-1]", "`rules.entropy` has a threshold below 0"),
            (
                "entropy = { values = [], scale = 0 }",
                "`rules.entropy.scale` is not a positive number",
            ),
            (
                "entropy = { values = [], check_interval = 0 }",
                "`rules.entropy.check_interval` is not",
            ),
            ("entropy = { values = [], step = 2 }", "options: [`scale`, `check_interval`]"),
            ("head = { values = [], scale = 2 }", "`rules.head.scale` is not one of the rule's"),
        ] {
            let message = read(keys).check("rules").expect_err("refused").to_string();
            assert!(message.contains(problem), "{message}");
        }
        for (text, problem) in [
            ("head=1.5", "`head` has a threshold outside 0 to 1"),
            ("entropy=0.3,scale=0", "`entropy.scale` is not a positive number"),
            ("heads=0.5", "`heads` is no stop rule, expected one of `fixed`"),
            ("head", EXPECTED),
            ("head=NaN", EXPECTED),
            ("head=0.5,", EXPECTED),
        ] {
            let message = text.parse::<NamedRule>().expect_err("refused").to_string();
            assert!(message.contains(problem), "{message}");
        }
    }
}

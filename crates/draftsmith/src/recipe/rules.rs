//! Settings of stop rules by short name: in a recipe the table `[evaluate.rules]`, in `generate` the flag
//! `--rule`. The theory crate's table of rules says which rules, options, numbers and defaults there are.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, Result};
use draftsmith_theory::{
    Bounds, Grid, RuleOption, StopRuleConfig, StopRuleEntry, StopRuleName, stop_rules,
};
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::require;

/// The settings of each rule that a recipe names: `fixed = [1, 2]`. Written as given, without defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RulesRecipe(BTreeMap<ListedRule, RuleRecipe>);

/// A rule whose settings can be listed; in files its short name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct ListedRule(StopRuleName);

/// The values of a rule's parameter, with its options by name unless they have their defaults.
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

/// The rules whose settings can be listed.
fn listed() -> impl Iterator<Item = (&'static StopRuleEntry, &'static Grid)> {
    stop_rules().filter_map(|entry| Some((entry, entry.grid()?)))
}

impl RulesRecipe {
    /// Checks the options and numbers of every rule. Messages call the table `key_prefix`.
    pub(super) fn check(&self, key_prefix: &str) -> Result<()> {
        let check = |(rule, settings): (&ListedRule, &RuleRecipe)| {
            settings.check(rule.grid(), &format!("{key_prefix}.{}", rule.0.file_name()))
        };
        self.0.iter().try_for_each(check)
    }

    /// Every setting of the rules of a drafter, within `bounds`: those in `over`, else those in this
    /// table, else the rule's default. Rules that read an acceptance head are included only if there is
    /// one.
    pub(crate) fn configs(
        &self,
        over: Option<&Self>,
        is_self_draft: bool,
        has_head: bool,
        bounds: Bounds,
    ) -> Vec<StopRuleConfig> {
        let readable = listed().filter(|(entry, _)| has_head || entry.heads.is_empty());
        let configs = readable.flat_map(|(entry, grid)| {
            let mut tables = over.into_iter().chain([self]);
            let given = tables.find_map(|table| table.0.get(&ListedRule(entry.name)));
            let default = if is_self_draft { grid.self_draft_default } else { grid.default };
            let values = given.map_or(default.to_vec(), |settings| settings.values().collect());
            let options = options(grid, given);
            values.into_iter().map(move |value| (grid.config)(value, &options, bounds))
        });
        configs.collect()
    }
}

impl ListedRule {
    fn grid(self) -> &'static Grid {
        self.0.entry().and_then(StopRuleEntry::grid).expect("only rules with a grid are listed")
    }
}

impl TryFrom<String> for ListedRule {
    type Error = anyhow::Error;

    fn try_from(name: String) -> Result<Self> {
        let found = listed().find(|(entry, _)| entry.file_name == name);
        found.map(|(entry, _)| Self(entry.name)).with_context(|| {
            let known = listed().map(|(entry, _)| entry.file_name);
            format!("unknown stop rule `{name}`, expected one of {}", quoted(known))
        })
    }
}

impl From<ListedRule> for String {
    fn from(rule: ListedRule) -> Self {
        rule.0.file_name().into()
    }
}

impl RuleRecipe {
    fn values(&self) -> impl Iterator<Item = f64> {
        let (Self::List(values) | Self::WithOptions { values, .. }) = self;
        values.iter().filter_map(Number::as_f64)
    }

    fn given_options(&self) -> impl Iterator<Item = (&str, f64)> {
        let options = match self {
            Self::List(_) => None,
            Self::WithOptions { options, .. } => Some(options),
        };
        let options = options.into_iter().flatten();
        options.filter_map(|(name, number)| Some((name.as_str(), number.as_f64()?)))
    }

    fn check(&self, grid: &Grid, key: &str) -> Result<()> {
        let problem = self.values().find_map(|value| grid.values.problem(value));
        require(problem.is_none(), key, problem.unwrap_or_default())?;
        for (name, number) in self.given_options() {
            let known = || grid.options.iter().map(|option| option.name);
            let problem = match grid.options.iter().find(|option| option.name == name) {
                Some(option) => option.values.problem(number).unwrap_or_default().to_owned(),
                None if grid.options.is_empty() => "is unknown: the rule has no options".to_owned(),
                None => format!("is unknown: the rule's options are {}", quoted(known())),
            };
            require(problem.is_empty(), &format!("{key}.{name}"), &problem)?;
        }
        Ok(())
    }
}

/// A number for each option of a rule: the given one, else the default.
fn options(grid: &Grid, given: Option<&RuleRecipe>) -> Vec<f64> {
    let given = |name| given?.given_options().find(|(option, _)| *option == name);
    let number = |option: &RuleOption| given(option.name).map_or(option.default, |(_, it)| it);
    grid.options.iter().map(number).collect()
}

fn quoted(names: impl Iterator<Item = &'static str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A rule at one setting, written `fixed=4` or `entropy=0.3,check_interval=2`.
#[derive(Debug, Clone)]
pub(crate) struct AskedRule {
    grid: &'static Grid,
    value: f64,
    options: Vec<f64>,
}

impl AskedRule {
    /// The rule within `bounds`.
    pub(crate) fn config(&self, bounds: Bounds) -> StopRuleConfig {
        (self.grid.config)(self.value, &self.options, bounds)
    }
}

impl FromStr for AskedRule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = text.split(',').map(|part| {
            let (name, number) = part.split_once('=')?;
            let number = Number::from_f64(number.trim().parse().ok()?)?;
            Some((name.trim().to_owned(), number))
        });
        let parts: Option<Vec<(String, Number)>> = parts.collect();
        let mut parts = parts.context(EXPECTED)?.into_iter();
        let (name, value) = parts.next().context(EXPECTED)?;
        let grid = ListedRule::try_from(name.clone())?.grid();
        let values = vec![value];
        let settings = RuleRecipe::WithOptions { values, options: parts.collect() };
        settings.check(grid, &name)?;
        let value = settings.values().next().context(EXPECTED)?;
        Ok(Self { grid, value, options: options(grid, Some(&settings)) })
    }
}

const EXPECTED: &str = "expected NAME=NUMBER, options after commas: `entropy=0.3,check_interval=2`";

#[cfg(test)]
mod tests {
    use draftsmith_theory::EntropyThresholdConfig;

    use super::*;

    const BOUNDS: Bounds = Bounds { min: 1, max: 6 };

    fn read(keys: &str) -> RulesRecipe {
        toml::from_str(keys).expect("reads")
    }

    /// The short name and parameter of every rule.
    fn names(configs: &[StopRuleConfig]) -> Vec<String> {
        let name = |config: &StopRuleConfig| {
            format!("{}-{}", config.name().file_name(), config.parameter())
        };
        configs.iter().map(name).collect()
    }

    /// An allowed number that differs from the defaults.
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
            // Tables are written in alphabetical order.
            let mut options: Vec<String> =
                grid.options.iter().map(|it| format!("{} = {}", it.name, given(it))).collect();
            options.sort();
            let line = |option: &String| format!("{option}\n");
            let lines: String = options.iter().map(line).collect();
            for (text, numbers) in [
                (format!("{name} = [{value}]\n"), &self::options(grid, None)),
                (format!("[{name}]\nvalues = [{value}]\n{lines}"), &all),
            ] {
                let rules = read(&text);
                rules.check("evaluate.rules").expect("valid");
                assert_eq!(toml::to_string(&rules).expect("TOML"), text);
                let configs = rules.configs(None, false, true, BOUNDS);
                assert!(configs.contains(&(grid.config)(value, numbers, BOUNDS)), "{configs:?}");
            }
            let asked = |text: String| text.parse::<AskedRule>().expect("a rule").config(BOUNDS);
            let with_options = [&[format!("{name}={value}")], &options[..]].concat().join(",");
            assert_eq!(asked(with_options), (grid.config)(value, &all, BOUNDS));
            assert_eq!(asked(format!("{name}={value}")), grid.at(value, BOUNDS));
        }
    }

    #[test]
    fn the_readme_explains_every_rule_and_option_of_the_table() {
        let readme = include_str!("../../../../recipes/README.md");
        let has_row = |row: String| {
            assert!(readme.lines().any(|line| line == row), "recipes/README.md has no row {row}");
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
        // A rule that a recipe names has the same settings for every drafter.
        let of_adapter = rules.configs(None, true, false, BOUNDS);
        assert_eq!(names(&of_adapter), ["fixed-2", "entropy-0.5"]);
    }

    #[test]
    fn an_unknown_rule_is_named_with_its_line_and_all_known_rules() {
        let refused = |keys: &str| toml::from_str::<RulesRecipe>(keys).expect_err("refused");
        let message = refused("fixed = [1]\nheads = [0.5]").to_string();
        for part in ["line 2", "unknown stop rule `heads`", "`head`", "`candidate-prob`"] {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
        assert!(!message.contains("`cost-head`"), "{message}");
        let message = refused("fixed = 3").to_string();
        assert!(message.contains("fixed = 3") && message.contains("expected a list"), "{message}");
    }

    #[test]
    fn messages_name_the_key_of_an_invalid_setting() {
        for (keys, problem) in [
            (
                "fixed = [1.5]",
                "`rules.fixed` has a length that is not a whole number from 1 to 256",
            ),
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
            ("entropy = { values = [], step = 2 }", "options are `scale`, `check_interval`"),
            ("head = { values = [], scale = 2 }", "`rules.head.scale` is unknown: the rule has no"),
        ] {
            let message = read(keys).check("rules").expect_err("refused").to_string();
            assert!(message.contains(problem), "{message}");
        }
        for (text, problem) in [
            ("head=1.5", "`head` has a threshold outside 0 to 1"),
            ("entropy=0.3,scale=0", "`entropy.scale` is not a positive number"),
            ("heads=0.5", "unknown stop rule `heads`, expected one of `fixed`"),
            ("head", EXPECTED),
            ("head=NaN", EXPECTED),
            ("head=0.5,", EXPECTED),
        ] {
            let message = text.parse::<AskedRule>().expect_err("refused").to_string();
            assert!(message.contains(problem), "{message}");
        }
    }
}

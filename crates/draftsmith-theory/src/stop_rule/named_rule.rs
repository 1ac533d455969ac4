//! Stop rules written as text, such as `fixed=4` or `entropy=0.3,check_interval=2`.

use std::str::FromStr;

use super::entry::Grid;
use super::{Bounds, StopRuleConfig};
use crate::{Result, TheoryError};

/// A rule of the table with a value of its parameter and options, but without bounds.
///
/// ```
/// use draftsmith_theory::{Bounds, NamedRule, StopRuleName};
/// let rule: NamedRule = "entropy=0.3,check_interval=2".parse()?;
/// let config = rule.config(Bounds::new(1, 8)?);
/// assert_eq!(config.name(), StopRuleName::EntropyThreshold);
/// assert_eq!(config.init()?.bounds().max, 8);
/// # Ok::<(), draftsmith_theory::TheoryError>(())
/// ```
#[derive(Debug, Clone)]
pub struct NamedRule {
    grid: &'static Grid,
    value: f64,
    /// The numbers of the rule's options, in the order of [`Grid::options`].
    options: Vec<f64>,
}

impl NamedRule {
    /// Builds the rule's configuration, with `bounds`.
    pub fn config(&self, bounds: Bounds) -> StopRuleConfig {
        (self.grid.config)(self.value, &self.options, bounds)
    }
}

impl FromStr for NamedRule {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self> {
        read(text).map_err(|problem| TheoryError::NamedRule { text: text.to_owned(), problem })
    }
}

fn read(text: &str) -> Result<NamedRule, String> {
    let mut settings = text.split(',').map(setting);
    let (rule, value) = settings.next().unwrap_or_else(|| setting(text))?;
    let given = settings.collect::<Result<Vec<_>, _>>()?;
    let grid = Grid::of(rule).map_err(|problem| format!("key `{rule}` {problem}"))?;
    if let Some(problem) = grid.values.problem(value) {
        return Err(format!("key `{rule}` {problem}"));
    }
    let options = grid
        .with_options(given)
        .map_err(|(option, problem)| format!("key `{rule}.{option}` {problem}"))?;
    Ok(NamedRule { grid, value, options })
}

/// Parses `NAME=NUMBER`.
fn setting(text: &str) -> Result<(&str, f64), String> {
    let read = || {
        let (name, number) = text.split_once('=')?;
        Some((name.trim(), number.trim().parse().ok().filter(|number: &f64| number.is_finite())?))
    };
    read().ok_or_else(|| {
        "expected NAME=NUMBER, then options: `entropy=0.3,check_interval=2`".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop_rules;

    const BOUNDS: Bounds = Bounds { min: 1, max: 6 };

    #[test]
    fn every_rule_and_option_of_the_table_has_a_text() {
        for (entry, grid) in stop_rules().filter_map(|entry| Some((entry, entry.grid()?))) {
            let name = entry.file_name;
            let values = [0.375, 3.0];
            let value = values.into_iter().find(|it| grid.values.problem(*it).is_none());
            let value = value.expect("a number is allowed");
            let rule: NamedRule = format!("{name}={value}").parse().expect("a rule");
            assert_eq!(rule.config(BOUNDS), grid.at(value, BOUNDS));
            // 3 is allowed for all kinds of options, and no option has it as its default.
            let all: String = grid.options.iter().map(|it| format!(", {} = 3", it.name)).collect();
            let rule: NamedRule = format!("{name} = {value}{all}").parse().expect("a rule");
            let threes = vec![3.0; grid.options.len()];
            assert_eq!(rule.config(BOUNDS), (grid.config)(value, &threes, BOUNDS));
        }
    }

    #[test]
    fn errors_name_the_text_and_the_problem() {
        for (text, problem) in [
            ("head=1.5", "`head` has a threshold outside 0 to 1"),
            ("entropy=0.3,scale=0", "`entropy.scale` is not a positive number"),
            ("entropy=0.3,step=1", "`entropy.step` is not one of the rule's options: [`scale`"),
            ("heads=0.5", "expected one of `fixed`, `heuristic`"),
            (
                "cost-head=0.5",
                "key `cost-head` is fitted by `tune` and takes no value; hint: `generate --rule tuned=DIR`",
            ),
            ("head", "expected NAME=NUMBER"),
            ("head=NaN", "expected NAME=NUMBER"),
            ("head=0.5,", "expected NAME=NUMBER"),
            ("", "expected NAME=NUMBER"),
        ] {
            let message = text.parse::<NamedRule>().expect_err("refused").to_string();
            assert!(message.contains(problem), "{message}");
            assert!(message.starts_with(&format!("`{text}` ")), "{message}");
        }
    }
}

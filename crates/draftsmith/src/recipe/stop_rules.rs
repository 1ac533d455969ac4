//! The stop rules that `[evaluate]` lists, by the theory crate's table of rules.

use anyhow::Result;
use draftsmith_theory::{
    Bounds, Grid, RecipeKey, RuleSettings, StopRuleConfig, StopRuleEntry, stop_rules,
};

use super::evaluate::EvaluateRecipe;
use super::require;

/// The rules whose settings recipes list.
fn grids() -> impl Iterator<Item = (&'static StopRuleEntry, &'static Grid)> {
    stop_rules().filter_map(|entry| match &entry.settings {
        RuleSettings::Grid(grid) => Some((entry, grid)),
        RuleSettings::Fitted(_) => None,
    })
}

impl EvaluateRecipe {
    /// Every listed setting of the rules for separate drafts or self-drafts, within `bounds`. Rules
    /// that read an acceptance head are included only if there is one.
    pub(crate) fn stop_rules(
        &self,
        is_self_draft: bool,
        has_head: bool,
        bounds: Bounds,
    ) -> Vec<StopRuleConfig> {
        let section = self.as_table();
        let readable = grids().filter(|(entry, _)| has_head || entry.heads.is_empty());
        let configs = readable.flat_map(|(_, grid)| {
            let key = grid.self_draft_key.as_ref().filter(|_| is_self_draft).unwrap_or(&grid.key);
            let options: Vec<f64> =
                grid.options.iter().flat_map(|option| numbers(&section, option)).collect();
            numbers(&section, key)
                .into_iter()
                .map(move |value| (grid.config)(value, &options, bounds))
        });
        configs.collect()
    }

    pub(super) fn check_stop_rules(&self) -> Result<()> {
        let section = self.as_table();
        for key in grids().flat_map(|(_, grid)| grid.keys()) {
            let problem =
                numbers(&section, key).into_iter().find_map(|value| key.values.problem(value));
            let key = format!("evaluate.{}", key.name);
            require(problem.is_none(), &key, problem.unwrap_or_default())?;
        }
        Ok(())
    }

    fn as_table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("every section of a recipe is TOML")
    }
}

/// The numbers under a key of a section, which holds a list or one number.
fn numbers(section: &toml::Table, key: &RecipeKey) -> Vec<f64> {
    let value = &section[key.name];
    let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let number =
        |value: &toml::Value| value.as_float().or(value.as_integer().map(|whole| whole as f64));
    values.iter().filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(recipe: &EvaluateRecipe, key: &RecipeKey) -> Vec<f64> {
        numbers(&recipe.as_table(), key)
    }

    fn read(keys: &str) -> Result<EvaluateRecipe, String> {
        let text = format!("prompts = ['p.jsonl']\n{keys}");
        toml::from_str(&text).map_err(|error: toml::de::Error| error.to_string())
    }

    #[test]
    fn every_key_of_the_table_is_read_and_written() {
        for (_, grid) in grids() {
            for key in grid.keys() {
                let one = if key.values.is_whole() { "3" } else { "0.375" };
                let line = if key.values.is_list() {
                    format!("{} = [{one}]", key.name)
                } else {
                    format!("{} = {one}", key.name)
                };
                let recipe = read(&line).expect("reads");
                assert_eq!(listed(&recipe, key), [one.parse::<f64>().expect("a number")]);
                let text = toml::to_string(&recipe).expect("TOML");
                assert!(text.lines().any(|written| written == line), "no {line} in {text}");
                let again: EvaluateRecipe = toml::from_str(&text).expect("reads back");
                assert_eq!(toml::to_string(&again).expect("TOML"), text);
            }
        }
    }

    #[test]
    fn the_readme_explains_every_key_of_the_table() {
        let readme = include_str!("../../../../recipes/README.md");
        for key in grids().flat_map(|(_, grid)| grid.keys()) {
            let default = if key.values.is_list() {
                let values: Vec<String> = key.default.iter().map(f64::to_string).collect();
                format!("[{}]", values.join(", "))
            } else {
                key.default[0].to_string()
            };
            let row = format!("| `evaluate.{}` | {default} | {} |", key.name, key.doc);
            assert!(readme.lines().any(|line| line == row), "recipes/README.md has no row {row}");
        }
    }

    #[test]
    fn missing_keys_have_the_tables_defaults_and_lengths_are_whole() {
        let recipe = read("").expect("reads");
        for (_, grid) in grids() {
            for key in grid.keys() {
                assert_eq!(listed(&recipe, key), key.default);
            }
        }
        assert!(toml::to_string(&recipe).expect("TOML").contains("self_draft_lengths = [1, 2, 3,"));
        assert_eq!(
            read("entropy_thresholds = [1]").expect("reads").check_stop_rules().ok(),
            Some(())
        );
        let half = read("candidate_lengths = [1.5]").expect_err("refused");
        assert!(half.contains("candidate_lengths") && half.contains("1.5"), "{half}");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_all_known_keys() {
        let message = read("stop_threshold = [0.5]").expect_err("refused");
        for part in
            ["line 2", "unknown field `stop_threshold`", "`stop_thresholds`", "`num_prompts`"]
        {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }

    #[test]
    fn each_kind_of_drafter_gets_its_rules_and_heads_need_a_head() {
        let keys = "candidate_lengths = [2]\nself_draft_lengths = [3]\nstop_thresholds = [0.5]\n\
                    confidence_thresholds = [0.25]\nentropy_thresholds = [0.5]\n\
                    entropy_scale = 1.0\nentropy_check_interval = 2\n";
        let recipe = read(keys).expect("reads");
        let bounds = Bounds { min: 1, max: 6 };
        let names = |is_self_draft, has_head| -> Vec<String> {
            let configs = recipe.stop_rules(is_self_draft, has_head, bounds);
            configs
                .iter()
                .map(|config| format!("{}-{}", config.name().file_name(), config.parameter()))
                .collect()
        };
        assert_eq!(names(false, false), ["fixed-2", "entropy-0.5"]);
        assert_eq!(names(false, true), ["fixed-2", "head-0.5", "entropy-0.5"]);
        assert_eq!(names(true, true), ["fixed-3", "head-0.5", "confidence-0.25", "entropy-0.5"]);
        let entropy = draftsmith_theory::EntropyThresholdConfig {
            entropy_threshold: 0.5,
            entropy_scale: 1.0,
            check_interval: 2,
            bounds,
        };
        assert_eq!(recipe.stop_rules(false, false, bounds)[1], entropy.into());
    }
}

//! The keys of `[evaluate]` that list settings of stop rules, as the theory crate's table has them.
//!
//! Serde forgets unknown keys where it flattens a table into a struct, so the section is read as
//! the struct it is, by [`WithStopRules`], which takes these keys out on the way.

use std::fmt;
use std::sync::OnceLock;

use anyhow::Result;
use draftsmith_theory::{
    Bounds, Grid, KeyValues, RecipeKey, RuleSettings, StopRuleConfig, StopRuleEntry, stop_rules,
};
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer, forward_to_deserialize_any};

use super::checks::require;

/// What every such key holds, in the table's order.
#[derive(Debug, Clone)]
pub(crate) struct StopRuleKeys(Vec<(&'static RecipeKey, Vec<f64>)>);

/// The rules whose settings recipes list.
fn grids() -> impl Iterator<Item = (&'static StopRuleEntry, &'static Grid)> {
    stop_rules().filter_map(|entry| match &entry.settings {
        RuleSettings::Grid(grid) => Some((entry, grid)),
        RuleSettings::Fitted(_) => None,
    })
}

impl Default for StopRuleKeys {
    fn default() -> Self {
        let keys = grids().flat_map(|(_, grid)| grid.keys());
        Self(keys.map(|key| (key, key.default.to_vec())).collect())
    }
}

impl StopRuleKeys {
    /// What the key of this name holds; None if there is no such key.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<(KeyValues, &mut Vec<f64>)> {
        let held = self.0.iter_mut().find(|(key, _)| key.name == name);
        held.map(|(key, values)| (key.values, values))
    }

    fn get(&self, key: &RecipeKey) -> &[f64] {
        let held = self.0.iter().find(|(known, _)| known.name == key.name);
        held.map_or(&[], |(_, values)| values)
    }

    /// The rules with every value that is listed for separate drafts or for self-drafts, within
    /// bounds; those that read an acceptance head only where there is one.
    pub(crate) fn configs(
        &self,
        is_self_draft: bool,
        has_head: bool,
        bounds: Bounds,
    ) -> Vec<StopRuleConfig> {
        let readable = grids().filter(|(entry, _)| has_head || entry.heads.is_empty());
        let configs = readable.flat_map(|(_, grid)| {
            let key = grid.self_draft_key.as_ref().filter(|_| is_self_draft).unwrap_or(&grid.key);
            let options: Vec<f64> =
                grid.options.iter().flat_map(|option| self.get(option)).copied().collect();
            self.get(key).iter().map(move |value| (grid.config)(*value, &options, bounds))
        });
        configs.collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        for (key, values) in &self.0 {
            let problem = values.iter().find_map(|value| key.values.problem(*value));
            let key = format!("evaluate.{}", key.name);
            require(problem.is_none(), &key, problem.unwrap_or_default())?;
        }
        Ok(())
    }
}

impl Serialize for StopRuleKeys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, values) in &self.0 {
            let whole = || values.iter().map(|value| *value as usize);
            match (key.values.is_list(), key.values.is_whole()) {
                (true, true) => map.serialize_entry(key.name, &whole().collect::<Vec<_>>())?,
                (true, false) => map.serialize_entry(key.name, values)?,
                (false, true) => map.serialize_entry(key.name, &whole().next())?,
                (false, false) => map.serialize_entry(key.name, &values.first())?,
            }
        }
        map.end()
    }
}

/// Reads a struct from a table that holds keys of stop rules too. A key that neither knows is an
/// error that names it.
pub(super) struct WithStopRules<'a, D> {
    pub(super) inner: D,
    pub(super) rules: &'a mut StopRuleKeys,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for WithStopRules<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        static KNOWN: OnceLock<Vec<&'static str>> = OnceLock::new();
        let rules = self.rules;
        let known = KNOWN.get_or_init(|| {
            let keys = rules.0.iter().map(|(key, _)| key.name);
            fields.iter().copied().chain(keys).collect()
        });
        self.inner.deserialize_struct(name, known, Split { visitor, rules, known })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Hands a struct its own keys and keeps those of stop rules: visitor and map in one.
struct Split<'a, V> {
    visitor: V,
    rules: &'a mut StopRuleKeys,
    known: &'static [&'static str],
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Split<'_, V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(formatter)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        let Self { visitor, rules, known } = self;
        visitor.visit_map(Split { visitor: map, rules, known })
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Split<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        while let Some(name) = self.visitor.next_key_seed(Key(self.known))? {
            let Some((kind, values)) = self.rules.get_mut(&name) else {
                return seed.deserialize(name.into_deserializer()).map(Some);
            };
            *values = self.visitor.next_value_seed(Values(kind))?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.visitor.next_value_seed(seed)
    }
}

/// One of the known keys.
struct Key(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for Key {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = String;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<String, E> {
        if self.0.contains(&name) { Ok(name.into()) } else { Err(E::unknown_field(name, self.0)) }
    }
}

/// What a key holds, a single number as a list of one.
struct Values(KeyValues);

impl<'de> DeserializeSeed<'de> for Values {
    type Value = Vec<f64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<f64>, D::Error> {
        let whole = |values: Vec<usize>| values.into_iter().map(|value| value as f64).collect();
        Ok(match (self.0.is_list(), self.0.is_whole()) {
            (true, true) => whole(Vec::deserialize(deserializer)?),
            (true, false) => Vec::deserialize(deserializer)?,
            (false, true) => whole(vec![usize::deserialize(deserializer)?]),
            (false, false) => vec![f64::deserialize(deserializer)?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::EvaluateRecipe;

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
                assert_eq!(recipe.stop_rules.get(key), [one.parse::<f64>().expect("a number")]);
                let text = toml::to_string(&recipe).expect("TOML");
                assert!(text.lines().any(|written| written == line), "no {line} in {text}");
                let again: EvaluateRecipe = toml::from_str(&text).expect("reads back");
                assert_eq!(again.stop_rules.0[0].1, recipe.stop_rules.0[0].1);
                assert_eq!(toml::to_string(&again).expect("TOML"), text);
            }
        }
    }

    #[test]
    fn every_key_of_the_table_is_explained_in_its_words() {
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
    fn what_is_left_out_is_the_default_and_wholes_are_wholes() {
        let recipe = read("").expect("reads");
        for (_, grid) in grids() {
            for key in grid.keys() {
                assert_eq!(recipe.stop_rules.get(key), key.default);
            }
        }
        assert!(toml::to_string(&recipe).expect("TOML").contains("self_draft_lengths = [1, 2, 3,"));
        assert_eq!(
            read("entropy_thresholds = [1]").expect("reads").stop_rules.check().ok(),
            Some(())
        );
        let half = read("candidate_lengths = [1.5]").expect_err("refused");
        assert!(half.contains("candidate_lengths") && half.contains("1.5"), "{half}");
    }

    #[test]
    fn an_unknown_key_is_named_where_it_stands_with_all_that_are_known() {
        let message = read("stop_threshold = [0.5]").expect_err("refused");
        for part in
            ["line 2", "unknown field `stop_threshold`", "`stop_thresholds`", "`num_prompts`"]
        {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }

    #[test]
    fn drafters_get_the_rules_of_their_keys_and_of_what_they_have() {
        let keys = "candidate_lengths = [2]\nself_draft_lengths = [3]\nstop_thresholds = [0.5]\n\
                    confidence_thresholds = [0.25]\nentropy_thresholds = [0.5]\n\
                    entropy_scale = 1.0\nentropy_check_interval = 2\n";
        let recipe = read(keys).expect("reads");
        let bounds = Bounds { min: 1, max: 6 };
        let names = |is_self_draft, has_head| -> Vec<String> {
            let configs = recipe.stop_rules.configs(is_self_draft, has_head, bounds);
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
        assert_eq!(recipe.stop_rules.configs(false, false, bounds)[1], entropy.into());
    }
}

//! Tests that the tables in `recipes/KEYS.md` list every recipe key with its default, and no other
//! key.

use std::collections::BTreeMap;

use draftsmith_train::{BlockShape, EagleShape, MedusaShape};
use serde_json::Value;

use super::Recipe;
use super::shared_training::KEYS;
use crate::kinds::prompt_lookup::PromptLookupKind;

const LIST: &str = include_str!("../../../../recipes/KEYS.md");

/// A recipe with every section, and with a value for every key without a default.
const RECIPE: &str = "[models]\ntarget = 'required'\n[data]\nprompts = ['required']\n\
                      [data.server]\nurls = ['required']\nmodel = 'required'\n\
                      states.dirs = ['required']\n\
                      [drafters.draft]\nkind = 'model'\nmodel = 'required'\n[drafters.draft.head.sweep]\n\
                      [drafters.adapter]\nkind = 'adapter'\n[drafters.eagle]\nkind = 'eagle3'\n[tune.costs]\n[evaluate]\n\
                      prompts = ['required']\n[evaluate.trees]\n";

/// The trainings with a table `optimizer`, in the order of the list's columns. There, keys of
/// drafters begin with `head`, `adapter`, `eagle3`, `eagle`, `block`, `medusa` or `lookup` instead of the drafter's name.
const OPTIMIZERS: [&str; 3] = ["head", "adapter", "eagle3"];

/// Default values by full key.
type Keys = BTreeMap<String, Value>;

fn add(keys: &mut Keys, key: &str, value: Value) {
    match value {
        Value::Object(table) if !key.is_empty() && !table.is_empty() => {
            table.into_iter().for_each(|(name, value)| add(keys, &format!("{key}.{name}"), value));
        }
        Value::Object(table) if key.is_empty() => {
            table.into_iter().for_each(|(name, value)| add(keys, &name, value));
        }
        _ => assert!(keys.insert(key.to_owned(), value).is_none(), "`{key}` has two rows"),
    }
}

/// Parses a default value from a row of the list.
fn parse(key: &str, default: &str) -> Value {
    let text = default.trim_matches('`');
    match text {
        "none" => return Value::Null,
        "required" if ["prompts", "urls", "dirs"].iter().any(|list| key.ends_with(list)) => {
            return Value::from(vec![text]);
        }
        "required" => return Value::from(text),
        _ => {}
    }
    let table: toml::Table = toml::from_str(&format!("value = {text}"))
        .unwrap_or_else(|error| panic!("the default of `{key}` is not TOML: {error}"));
    serde_json::to_value(&table["value"]).expect("TOML is JSON")
}

fn with_floats(value: Value) -> Value {
    match value {
        Value::Number(number) => Value::from(number.as_f64()),
        Value::Array(all) => all.into_iter().map(with_floats).collect(),
        other => other,
    }
}

fn documented() -> Keys {
    let mut keys = Keys::new();
    let rows = LIST.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").map(str::trim).collect();
        let (key, cells) = (cells[0].trim_end_matches('`'), &cells[1..]);
        if let Some(shared) = key.strip_prefix("training.") {
            assert!(KEYS.contains(&shared), "`{key}` is not shared");
            for section in ["adapter", "eagle3"] {
                add(&mut keys, &format!("{section}.{shared}"), parse(key, cells[0]));
            }
            continue;
        }
        let sections = if key.starts_with("optimizer.") { &OPTIMIZERS[..] } else { &[] };
        let meaning = cells.get(sections.len().max(1));
        assert!(meaning.is_some_and(|text| !text.is_empty()), "`{key}` is not explained");
        if sections.is_empty() {
            add(&mut keys, key, parse(key, cells[0]));
        }
        for (section, default) in sections.iter().zip(cells) {
            add(&mut keys, &format!("{section}.{key}"), parse(key, default));
        }
    }
    keys
}

#[test]
fn the_list_of_keys_has_every_key_with_its_default() {
    let recipe: Recipe = toml::from_str(RECIPE).expect("every section has defaults");
    let mut sections = serde_json::to_value(&recipe).expect("a recipe is JSON");
    // Drafters become TOML, which omits absent keys, so we serialise each table separately.
    sections.as_object_mut().expect("it has sections").remove("drafters").expect("it is written");
    let head = recipe.trained_head().map(|(_, training)| serde_json::to_value(training));
    let trained = |name: &str| {
        let drafter = recipe.drafters.iter().find(|(_, it)| it.kind.entry().name == name)?.1;
        Some(drafter.kind.training()?.settings())
    };
    let mut keys = Keys::new();
    add(&mut keys, "", sections);
    for (table, value) in [
        ("head", head.expect("the draft has a head")),
        ("adapter", Ok(trained("adapter").expect("there is an adapter"))),
        ("eagle3", Ok(trained("eagle3").expect("there is an EAGLE-3 drafter"))),
        // The other keys of a block drafter are those of EAGLE-3.
        ("block", serde_json::to_value(BlockShape::default())),
        ("eagle", serde_json::to_value(EagleShape::default())),
        ("medusa", serde_json::to_value(MedusaShape::default())),
        ("lookup", serde_json::to_value(PromptLookupKind::default())),
    ] {
        add(&mut keys, table, value.expect("settings are JSON"));
    }
    let mut documented = documented();
    let mut problems = String::new();
    for (key, value) in keys {
        let (value, row) = (with_floats(value), documented.remove(&key).map(with_floats));
        match row {
            None => problems += &format!("`{key}` has no row; its default is {value}\n"),
            Some(row) if row != value => {
                problems += &format!("`{key}` is {value} by default, its row says {row}\n");
            }
            Some(_) => {}
        }
    }
    documented.keys().for_each(|key| problems += &format!("the row `{key}` names no key\n"));
    assert!(problems.is_empty(), "recipes/KEYS.md:\n{problems}");
}

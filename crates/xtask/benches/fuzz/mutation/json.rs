//! Changes of values in a JSON tree, and in a TOML document through a JSON tree.

use serde_json::{Map, Value, json};

use super::{EDGES, Mutator};

/// A placeholder for a value that no tree can hold. It is replaced in the text.
const DEEP: &str = "@deep@";
const NUMBER: &str = "@number@";
/// The largest depth of a nested value.
const MOST_NESTED: usize = 20_000;

impl Mutator<'_> {
    /// A document with some values changed.
    pub(super) fn json(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let Ok(mut value) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
        (0..num_changes).for_each(|_| self.change_value(&mut value));
        let text = match self.one_in(2) {
            true => value.to_string(),
            false => serde_json::to_string_pretty(&value).expect("a tree is text"),
        };
        let mut bytes = self.with_impossible_values(text).into_bytes();
        if self.one_in(8) {
            self.change(&mut bytes);
        }
        bytes
    }

    /// Lines with some values changed in one of them.
    pub(super) fn json_lines(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let mut lines: Vec<Vec<u8>> =
            bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        let at = self.below(lines.len());
        lines[at] = self.json(&lines[at].clone(), num_changes);
        lines.join(&b'\n')
    }

    /// A TOML document with some values changed; changed as text if the tree is not valid TOML.
    pub(super) fn toml(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let text = String::from_utf8_lossy(bytes);
        // Comments are kept, because they may contain `--set` lines.
        let comments: String = text
            .lines()
            .filter(|line| line.starts_with('#'))
            .fold(String::new(), |all, line| all + line + "\n");
        let changed = toml::from_str::<toml::Table>(&text).ok().and_then(|table| {
            let mut value = serde_json::to_value(table).ok()?;
            (0..num_changes).for_each(|_| self.change_value(&mut value));
            Some(comments + &self.with_impossible_values(toml::to_string(&value).ok()?))
        });
        let mut bytes = changed.map_or_else(|| bytes.to_vec(), String::into_bytes);
        if self.one_in(3) {
            self.change(&mut bytes);
        }
        bytes
    }

    /// Replaces placeholders with nested values and with numbers that no type holds.
    fn with_impossible_values(&mut self, text: String) -> String {
        let mut text = text;
        if text.contains(DEEP) {
            let most = if self.one_in(16) { MOST_NESTED } else { 300 };
            let depth = self.below(most);
            let [open, close] =
                *self.one_of(&[&["[", "]"], &["{\"a\":", "}"], &["[{\"content\":", "}]"]]);
            let inner = if self.one_in(2) { "1" } else { "" };
            let deep = open.repeat(depth) + inner + &close.repeat(depth);
            text = text.replacen(&format!("\"{DEEP}\""), &deep, 1);
        }
        if text.contains(NUMBER) {
            let number = self.number();
            text = text.replace(&format!("\"{NUMBER}\""), &number);
        }
        text
    }

    /// Changes one value of a tree, its key, or the number of its copies.
    fn change_value(&mut self, root: &mut Value) {
        let donor = {
            let place = self.below(count(root));
            nth(root, &mut place.clone()).cloned().unwrap_or(Value::Null)
        };
        let mut place = self.below(count(root));
        let Some(value) = nth_mut(root, &mut place) else { return };
        match (self.below(12), value) {
            (0..=2, Value::Object(object)) if !object.is_empty() => {
                let key = object.keys().nth(self.below(object.len())).cloned().unwrap_or_default();
                match self.below(3) {
                    0 => drop(object.shift_remove(&key)),
                    1 => {
                        let moved = object.shift_remove(&key).unwrap_or(Value::Null);
                        object.insert(self.word(), moved);
                    }
                    _ => drop(object.insert(self.word(), donor)),
                }
            }
            (0..=2, Value::Array(list)) if !list.is_empty() => {
                let at = self.below(list.len());
                match self.below(4) {
                    0 => drop(list.remove(at)),
                    1 => list.insert(at, donor),
                    2 => list.truncate(at),
                    _ => {
                        let most = if self.one_in(16) { 1000 } else { 4 };
                        let num_times = self.below(most);
                        let copied = list[at].clone();
                        list.extend(std::iter::repeat_n(copied, num_times));
                    }
                }
            }
            (3, value) => *value = donor,
            (4, Value::String(text)) | (5, Value::String(text)) => {
                let mut bytes = text.clone().into_bytes();
                self.change(&mut bytes);
                *text = String::from_utf8_lossy(&bytes).into_owned();
            }
            (4, Value::Number(number)) => *number = self.near(number),
            (_, value) => *value = self.edge_value(),
        }
    }

    /// A number close to another.
    fn near(&mut self, number: &serde_json::Number) -> serde_json::Number {
        let step = [1, 2, 8, 1000][self.below(4)];
        match number.as_u64() {
            Some(number) if self.one_in(2) => number.wrapping_add(step).into(),
            Some(number) => number.wrapping_sub(step).into(),
            None => {
                let number = number.as_f64().unwrap_or(0.0);
                let other = [-number, number * 2.0, number / 3.0, 1.0 - number][self.below(4)];
                serde_json::Number::from_f64(other).unwrap_or(number_of(0))
            }
        }
    }

    /// An unusual value.
    fn edge_value(&mut self) -> Value {
        match self.below(12) {
            0 => Value::Null,
            1 => json!(self.one_in(2)),
            2 => json!([]),
            3 => json!({}),
            4 | 5 => json!(EDGES[self.below(EDGES.len())]),
            6 => json!(-(EDGES[self.below(EDGES.len())] as f64)),
            7 => json!(NUMBER),
            8 => json!(DEEP),
            9 => json!(self.word()),
            10 => json!([self.word(), self.word()]),
            _ => Value::Object(Map::from_iter([(self.word(), json!(self.word()))])),
        }
    }

    fn word(&mut self) -> String {
        const TEXTS: [&str; 12] = [
            "",
            " ",
            "\0",
            "\u{feff}",
            "\u{10ffff}e\u{301}",
            "../../x",
            "/",
            "a\nb",
            "\"",
            "\u{1b}[31m",
            "{{",
            "0",
        ];
        if self.one_in(16) {
            return "x".repeat(self.below(20_000));
        }
        if self.one_in(2) || self.dictionary.is_empty() {
            return self.one_of(&TEXTS).to_owned();
        }
        self.one_of(self.dictionary).to_owned()
    }
}

fn number_of(number: u64) -> serde_json::Number {
    number.into()
}

/// The number of values of a tree, including the tree.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(object) => object.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// The value with number `left`, in depth-first order.
fn nth<'v>(value: &'v Value, left: &mut usize) -> Option<&'v Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(list) => list.iter().find_map(|value| nth(value, left)),
        Value::Object(object) => object.values().find_map(|value| nth(value, left)),
        _ => None,
    }
}

fn nth_mut<'v>(value: &'v mut Value, left: &mut usize) -> Option<&'v mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|value| nth_mut(value, left)),
        Value::Object(object) => object.values_mut().find_map(|value| nth_mut(value, left)),
        _ => None,
    }
}

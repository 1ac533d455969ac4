//! The selection of prompts by content hashes, splits, weights of sources and bounds on lengths.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Prompt;

/// The first half of the BLAKE3 of a prompt's texts. It depends only on the texts, not on their
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash([u8; 16]);

impl Prompt {
    /// Hashes the system text, all user texts and, with `with_answers`, all answers.
    pub fn content_hash(&self, with_answers: bool) -> ContentHash {
        let mut hasher = blake3::Hasher::new();
        let mut push = |text: Option<&str>| {
            // Each text follows its length, so that no two prompts give the same bytes. A missing
            // text differs from an empty one.
            hasher.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            hasher.update(text.unwrap_or_default().as_bytes());
        };
        push(self.system.as_deref());
        for turn in &self.turns {
            push(Some(&turn.user));
            // Texts without tools hash as they did before tools were read.
            let results = turn.results.iter().map(|it| Value::Object(it.keys.clone()).to_string());
            results.for_each(|result| push(Some(&result)));
            if with_answers {
                push(turn.response.as_deref());
                if !turn.calls.is_empty() {
                    push(Some(&Value::Object(turn.calls.clone()).to_string()));
                }
            }
        }
        ContentHash::first_of(&hasher.finalize())
    }
}

impl ContentHash {
    fn first_of(hash: &blake3::Hash) -> Self {
        let mut first = [0; 16];
        first.copy_from_slice(&hash.as_bytes()[..16]);
        Self(first)
    }

    /// Hashes this hash with a seed. Sorting by the result gives a random order of prompts.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(&self.0);
        Self::first_of(&hasher.finalize())
    }

    /// Converts the hash to a number in [0, 1), a multiple of 2⁻⁵³.
    fn fraction(self) -> f64 {
        let bytes = self.0.first_chunk().expect("there are 16");
        (u64::from_le_bytes(*bytes) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A split of prompt sets: the prompts whose system and user texts hash to a number in \[`from`,
/// `to`), within \[0, 1). Equal prompts are therefore in the same split, even across files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitRange {
    /// The split's name.
    pub name: String,
    /// The lower bound, included.
    pub from: f64,
    /// The upper bound, excluded.
    pub to: f64,
}

impl SplitRange {
    /// Returns whether a prompt is in the split.
    pub fn contains(&self, prompt: &Prompt) -> bool {
        let fraction = prompt.content_hash(false).fraction();
        self.from <= fraction && fraction < self.to
    }
}

/// A source's weight, which determines its share of the prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceWeight {
    /// The number of the source's prompt files.
    pub num_files: usize,
    /// The weight, relative to those of the other sources.
    pub weight: f64,
}

/// Inclusive bounds on lengths in tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthBounds {
    /// The minimum length of a prompt, which is a conversation up to its first answer; `None` for
    /// no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_prompt_tokens: Option<usize>,
    /// The maximum length of a prompt; `None` for no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_prompt_tokens: Option<usize>,
    /// The minimum length of every answer in a prompt file; `None` for no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_response_tokens: Option<usize>,
    /// The maximum length of every answer in a prompt file; `None` for no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_response_tokens: Option<usize>,
}

impl LengthBounds {
    /// Returns whether there are no bounds.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompts::Turn;

    fn prompt(system: Option<&str>, turns: &[(&str, Option<&str>)]) -> Prompt {
        let turn = |(user, response): &(&str, Option<&str>)| Turn {
            user: (*user).to_owned(),
            response: response.map(ToOwned::to_owned),
            ..Turn::default()
        };
        Prompt {
            id: "set#0".to_owned(),
            own_id: None,
            source: "set".to_owned(),
            category: None,
            turns: turns.iter().map(turn).collect(),
            system: system.map(ToOwned::to_owned),
            arguments: Box::default(),
        }
    }

    #[test]
    fn prompts_with_equal_texts_have_equal_hashes() {
        let one = prompt(None, &[("a", Some("b"))]);
        let elsewhere =
            Prompt { id: "other#7".to_owned(), source: "other".to_owned(), ..one.clone() };
        assert_eq!(one.content_hash(true), elsewhere.content_hash(true));
        let all = [
            one.clone(),
            prompt(None, &[("a", Some("c"))]),
            prompt(None, &[("a", None)]),
            prompt(None, &[("ab", None)]),
            prompt(Some(""), &[("a", None)]),
            prompt(Some("a"), &[("a", None)]),
            prompt(None, &[("a", None), ("b", None)]),
            prompt(None, &[("a", None), ("", Some("b"))]),
        ];
        let num_different = |with_answers| {
            let hashes = all.iter().map(|prompt| prompt.content_hash(with_answers));
            hashes.collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!((num_different(true), num_different(false)), (all.len(), all.len() - 2));
        let hash = one.content_hash(false);
        assert_eq!(hash.seeded(1), hash.seeded(1));
        assert_ne!(hash.seeded(1), hash.seeded(2));
    }

    #[test]
    fn each_prompt_is_in_one_split_and_splits_have_their_shares() {
        let range = |from, to| SplitRange { name: String::new(), from, to };
        let splits = [range(0.0, 0.5), range(0.5, 0.8), range(0.8, 1.0)];
        let mut counts = [0_i32; 3];
        for n in 0..10_000 {
            let prompt = prompt(None, &[(&format!("What is {n}?"), None)]);
            let within: Vec<usize> = (0..3).filter(|at| splits[*at].contains(&prompt)).collect();
            assert_eq!(within.len(), 1);
            counts[within[0]] += 1;
        }
        // Four standard deviations of a binomial count, 50 at most.
        let is_near = |count: i32, expected: i32| (count - expected).abs() < 200;
        let [train, tune, test] = counts;
        assert!(
            is_near(train, 5_000) && is_near(tune, 3_000) && is_near(test, 2_000),
            "{counts:?}"
        );
    }
}

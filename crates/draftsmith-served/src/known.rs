//! Parsing of the log-probabilities of each position's most probable tokens, in the formats of vLLM
//! and llama.cpp.
//!
//! The parsed positions share flat lists, so that a malicious answer takes only a few times its own
//! size in memory.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

use draftsmith_theory::TopProbs;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The token ids with known log-probabilities at one position, including the response's own token;
/// empty if the server gives none.
pub(super) type KnownTokens = Vec<(u32, f32)>;

/// The prefix of token ids in vLLM's lists.
const ID: &str = "token_id:";
/// The tolerance by which the sum of rounded probabilities may exceed 1.
pub(super) const SLACK: f64 = 0.01;
/// The log-probability that replaces −∞, which JSON cannot represent.
const LEAST: f32 = -9999.0;
const NO_IDS: &str = "log-probabilities without token ids";

/// Builds the distribution at a position whose token is `id`. `num_requested` is the number of
/// log-probabilities that the request asked for.
pub(super) fn top_probs(id: u32, known: KnownTokens, num_requested: usize) -> TopProbs {
    if known.is_empty() { TopProbs::unknown(id) } else { TopProbs::new(known, num_requested) }
}

/// The value of the key `logprobs` in an answer.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct LogProbLists {
    /// llama.cpp's list, with an entry for most positions.
    content: Option<KnownPositions<LlamaCppPosition>>,
    /// vLLM's lists, with an entry for each position.
    top_logprobs: Option<KnownPositions<VllmPosition>>,
    token_logprobs: Option<Vec<JsonLogProb>>,
}

impl LogProbLists {
    /// Returns the known part of the distribution at each position of `ids`. llama.cpp omits
    /// positions whose token ends within a character, and these are empty.
    ///
    /// # Errors
    /// If no position has log-probabilities, or they belong to other tokens, exceed a sum of 1 or
    /// name a token outside the vocabulary.
    pub(super) fn known(&self, ids: &[u32], vocab_size: usize) -> Result<Vec<KnownTokens>, String> {
        let known = match (&self.content, &self.top_logprobs) {
            (Some(positions), _) => read_llama_cpp(positions, ids)?,
            (None, Some(positions)) => {
                read_vllm(positions, self.token_logprobs.as_deref().unwrap_or_default(), ids)?
            }
            (None, None) => Vec::new(),
        };
        if !ids.is_empty() && known.iter().all(Vec::is_empty) {
            return Err(
                "no log-probabilities by token id (`logprobs`), which sampled responses need; \
                        vLLM and llama.cpp return them"
                    .to_owned(),
            );
        }
        for position in &known {
            let sum: f64 = position.iter().map(|(_, log_prob)| f64::from(*log_prob).exp()).sum();
            if sum > 1.0 + SLACK {
                return Err(format!(
                    "probabilities that add up to {sum:.3}, expected natural logarithms at temperature 1"
                ));
            }
            if let Some((id, _)) = position.iter().find(|(id, _)| *id as usize >= vocab_size) {
                return Err(format!("the token id {id}, but the target has {vocab_size}"));
            }
        }
        Ok(known)
    }
}

/// The known tokens of all positions in one flat list. `F` is the format of one position.
pub(super) struct KnownPositions<F> {
    tokens: KnownTokens,
    /// For each position, the end of its tokens in `tokens`.
    ends: Vec<u32>,
    format: PhantomData<F>,
}

impl<F> KnownPositions<F> {
    pub(super) fn each(&self) -> impl Iterator<Item = &[(u32, f32)]> {
        let mut begin = 0;
        self.ends.iter().map(move |end| {
            let begin = std::mem::replace(&mut begin, *end as usize);
            &self.tokens[begin..*end as usize]
        })
    }
}

impl<'de, F: Deserialize<'de> + ListedTokens> Deserialize<'de> for KnownPositions<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<F>(PhantomData<F>);
        impl<'de, F: Deserialize<'de> + ListedTokens> Visitor<'de> for List<F> {
            type Value = KnownPositions<F>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of log-probabilities")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let (mut tokens, mut ends) = (Vec::new(), Vec::new());
                while let Some(position) = list.next_element::<Option<F>>()? {
                    let added = position.map_or(Ok(()), |position| position.add_to(&mut tokens));
                    added.map_err(A::Error::custom)?;
                    ends.push(tokens.len() as u32);
                }
                Ok(KnownPositions { tokens, ends, format: PhantomData })
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// A position or token in one server's format, which can be added to a flat list.
pub(super) trait ListedTokens {
    /// Appends each token id with its log-probability to `tokens`.
    ///
    /// # Errors
    /// If a token has no id.
    fn add_to(self, tokens: &mut KnownTokens) -> Result<(), &'static str>;
}

/// A log-probability in JSON. A null, which some servers write for −∞, becomes [`LEAST`].
#[derive(Clone, Copy)]
struct JsonLogProb(f32);

impl Default for JsonLogProb {
    fn default() -> Self {
        Self(LEAST)
    }
}

impl<'de> Deserialize<'de> for JsonLogProb {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let log_prob = Option::<f64>::deserialize(deserializer)?;
        Ok(log_prob.map_or_else(Self::default, |log_prob| Self(log_prob as f32)))
    }
}

/// A position in vLLM's format: an object with one key per token.
struct VllmPosition(KnownTokens);

impl<'de> Deserialize<'de> for VllmPosition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KnownKeys;
        impl<'de> Visitor<'de> for KnownKeys {
            type Value = VllmPosition;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of log-probabilities")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tokens = Vec::new();
                while let Some((name, JsonLogProb(log_prob))) = map.next_entry::<String, _>()? {
                    let id = name.strip_prefix(ID).and_then(|id| id.parse().ok());
                    tokens.push((id.ok_or_else(|| A::Error::custom(NO_IDS))?, log_prob));
                }
                Ok(VllmPosition(tokens))
            }
        }
        deserializer.deserialize_map(KnownKeys)
    }
}

impl ListedTokens for VllmPosition {
    fn add_to(self, tokens: &mut KnownTokens) -> Result<(), &'static str> {
        tokens.extend(self.0);
        Ok(())
    }
}

/// A position of vLLM's `prompt_logprobs`: an object with one key per token id.
#[derive(Deserialize)]
pub(super) struct PromptPosition(HashMap<u32, PromptToken>);

#[derive(Deserialize)]
struct PromptToken {
    #[serde(default)]
    logprob: JsonLogProb,
}

impl ListedTokens for PromptPosition {
    fn add_to(self, tokens: &mut KnownTokens) -> Result<(), &'static str> {
        let mut all: KnownTokens =
            self.0.into_iter().map(|(id, token)| (id, token.logprob.0)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        tokens.extend(all);
        Ok(())
    }
}

/// A token in llama.cpp's format.
#[derive(Deserialize)]
struct LlamaCppToken {
    id: Option<u32>,
    #[serde(default)]
    logprob: JsonLogProb,
}

impl ListedTokens for LlamaCppToken {
    fn add_to(self, tokens: &mut KnownTokens) -> Result<(), &'static str> {
        tokens.push((self.id.ok_or(NO_IDS)?, self.logprob.0));
        Ok(())
    }
}

/// A position in llama.cpp's format: the response's token and the most probable tokens.
#[derive(Deserialize)]
struct LlamaCppPosition {
    id: Option<u32>,
    #[serde(default)]
    logprob: JsonLogProb,
    top_logprobs: Option<KnownPositions<LlamaCppToken>>,
}

impl ListedTokens for LlamaCppPosition {
    fn add_to(self, tokens: &mut KnownTokens) -> Result<(), &'static str> {
        let Self { id, logprob, top_logprobs } = self;
        LlamaCppToken { id, logprob }.add_to(tokens)?;
        tokens.extend(top_logprobs.into_iter().flat_map(|top| top.tokens));
        Ok(())
    }
}

fn read_llama_cpp(
    positions: &KnownPositions<LlamaCppPosition>,
    ids: &[u32],
) -> Result<Vec<KnownTokens>, String> {
    let mut positions = positions.each().filter_map(<[_]>::split_first).peekable();
    let mut known = Vec::with_capacity(ids.len());
    for id in ids {
        known.push(match positions.next_if(|((own, _), _)| own == id) {
            None => Vec::new(),
            Some((own, top)) => with_own(top, *own)?,
        });
    }
    match positions.next() {
        None => Ok(known),
        Some(((id, _), _)) => Err(format!("log-probabilities of another token, `{id}`")),
    }
}

fn read_vllm(
    positions: &KnownPositions<VllmPosition>,
    own: &[JsonLogProb],
    ids: &[u32],
) -> Result<Vec<KnownTokens>, String> {
    let lengths = [positions.ends.len(), own.len()];
    if let Some(num) = lengths.into_iter().find(|num| *num != ids.len()) {
        return Err(format!("log-probabilities at {num} of {} positions", ids.len()));
    }
    let one = |(top, (own, id)): (&[(u32, f32)], (&JsonLogProb, &u32))| match top {
        [] => Ok(Vec::new()),
        top => with_own(top, (*id, own.0)),
    };
    positions.each().zip(own.iter().zip(ids)).map(one).collect()
}

/// Returns the most probable tokens, followed by the response's token if it is not among them.
fn with_own(top: &[(u32, f32)], own: (u32, f32)) -> Result<KnownTokens, String> {
    let (mut known, mut ids) = (Vec::with_capacity(top.len() + 1), HashSet::new());
    for (id, log_prob) in top.iter().chain([&own]) {
        if log_prob.is_nan() || f64::from(*log_prob) > SLACK {
            return Err(format!("a log-probability of {log_prob}"));
        }
        if ids.insert(*id) {
            known.push((*id, log_prob.clamp(LEAST, 0.0)));
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(lists: &Value, ids: &[u32]) -> Result<Vec<KnownTokens>, String> {
        let lists: LogProbLists =
            serde_json::from_str(&lists.to_string()).map_err(|error| error.to_string())?;
        lists.known(ids, 9)
    }

    #[test]
    fn both_formats_are_read_and_gaps_are_unknown() {
        let expected = vec![vec![(4, -0.5), (5, -1.5)], vec![(7, -0.25), (5, -2.0), (6, -4.0)]];
        let vllm = json!({
            "tokens": ["token_id:4", "token_id:6"], "token_logprobs": [-0.5, -4.0],
            "top_logprobs": [{ "token_id:4": -0.5, "token_id:5": -1.5 },
                             { "token_id:7": -0.25, "token_id:5": -2.0 }] });
        assert_eq!(read(&vllm, &[4, 6]).expect("reads"), expected);
        let position = |id: u32, log_prob: f64, top: &[(u32, f64)]| {
            let top = top.iter().map(|(id, log)| json!({ "id": id, "logprob": log }));
            json!({ "id": id, "logprob": log_prob, "top_logprobs": top.collect::<Vec<_>>() })
        };
        let content = [
            position(4, -0.5, &[(4, -0.5), (5, -1.5)]),
            position(6, -4.0, &[(7, -0.25), (5, -2.0)]),
        ];
        let llama_cpp = json!({ "content": content });
        let with_gap = vec![expected[0].clone(), Vec::new(), expected[1].clone()];
        assert_eq!(read(&llama_cpp, &[4, 8, 6]).expect("reads"), with_gap);
    }

    #[test]
    fn null_is_the_least_log_probability() {
        let vllm = json!({ "token_logprobs": [-0.5, null],
            "top_logprobs": [null, { "token_id:7": -0.25, "token_id:5": null }] });
        let expected = vec![Vec::new(), vec![(7, -0.25), (5, LEAST), (6, LEAST)]];
        assert_eq!(read(&vllm, &[4, 6]).expect("reads"), expected);
    }

    #[test]
    fn invalid_distributions_are_named() {
        let check = |lists: Value, ids: &[u32], expected: &str| {
            let error = read(&lists, ids).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        };
        check(json!({}), &[4], "no log-probabilities by token id");
        check(json!({ "top_logprobs": [] , "token_logprobs": [] }), &[4], "at 0 of 1 positions");
        let two = json!([{ "token_id:4": -1 }, { "token_id:4": -1 }]);
        check(
            json!({ "top_logprobs": two, "token_logprobs": [-1, -1] }),
            &[4],
            "at 2 of 1 positions",
        );
        check(
            json!({ "top_logprobs": two, "token_logprobs": [-1] }),
            &[4, 4],
            "at 1 of 2 positions",
        );
        let top = |top: Value| json!({ "top_logprobs": [top], "token_logprobs": [-1.0] });
        check(top(json!({ "a": -1.0 })), &[4], "without token ids");
        check(top(json!({ "token_id:-1": -1.0 })), &[4], "without token ids");
        check(top(json!({ "token_id:5": -0.1 })), &[4], "add up to 1.27");
        check(top(json!({ "token_id:5": 2.0 })), &[4], "a log-probability of 2");
        check(top(json!({ "token_id:5": 1e300 })), &[4], "a log-probability of inf");
        check(top(json!({ "token_id:5": "-1" })), &[4], "invalid type: string \"-1\"");
        check(top(json!({ "token_id:12": -2.0 })), &[4], "the token id 12");
        check(top(json!([1])), &[4], "expected an object of log-probabilities");
        check(json!({ "top_logprobs": 7 }), &[4], "expected a list of log-probabilities");
        let content = |position: Value| json!({ "content": [position] });
        let other = json!({ "id": 5, "logprob": -1.0, "top_logprobs": [] });
        check(content(other), &[4], "of another token, `5`");
        check(content(json!({ "token": "a", "logprob": -1.0 })), &[4], "without token ids");
        let unnamed = json!({ "id": 4, "top_logprobs": [{ "token": "a", "logprob": -1.0 }] });
        check(content(unnamed), &[4], "without token ids");
    }
}

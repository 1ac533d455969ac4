//! Reads token ids, and the log-probabilities of each position's most probable tokens, in the formats of
//! vLLM and llama.cpp.

use draftsmith_theory::TopProbs;
use serde_json::Value;

/// The tokens of one position with known log-probabilities, including the response's token; empty if the
/// server gives none.
pub(super) type KnownTokens = Vec<(u32, f32)>;

/// The prefix of ids in vLLM's lists.
const ID: &str = "token_id:";
/// How far rounded probabilities may sum to more than 1.
pub(super) const SLACK: f64 = 0.01;
/// Stands in for −∞, which JSON lacks.
const LEAST: f64 = -9999.0;

/// The distribution of a position whose token is `id`, if `num_requested` log-probabilities were requested.
pub(super) fn top_probs(id: u32, known: KnownTokens, num_requested: usize) -> TopProbs {
    if known.is_empty() { TopProbs::unknown(id) } else { TopProbs::new(known, num_requested) }
}

/// Reads a list of token ids.
///
/// # Errors
/// If it is not a list of ids, or an id is outside the target's vocabulary.
pub(super) fn read_ids(ids: &Value, vocab_size: usize) -> Result<Vec<u32>, String> {
    let ids = ids.as_array().ok_or("token ids that are not a list")?;
    let known = |id: &Value| {
        let id = id.as_u64().ok_or_else(|| format!("a token id that is `{id}`"))?;
        u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            format!(
                "the token id {id}, but `models.target` has {vocab_size}: it serves another model"
            )
        })
    };
    ids.iter().map(known).collect()
}

/// Reads the known part of each position's distribution. llama.cpp omits tokens that end within a
/// character.
///
/// # Errors
/// If nothing is known at any position, log-probabilities belong to other tokens, or they are not a
/// distribution.
pub(super) fn read_known(
    choice: &Value,
    ids: &[u32],
    vocab_size: usize,
) -> Result<Vec<KnownTokens>, String> {
    let log_probs = &choice["logprobs"];
    let known = match (log_probs["content"].as_array(), log_probs["top_logprobs"].as_array()) {
        (Some(positions), _) => read_llama_cpp(positions, ids)?,
        (None, Some(positions)) => read_vllm(positions, &log_probs["token_logprobs"], ids)?,
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
            return Err(format!("the token id {id}, but `models.target` has {vocab_size}"));
        }
    }
    Ok(known)
}

/// llama.cpp's format: an object for most positions.
fn read_llama_cpp(positions: &[Value], ids: &[u32]) -> Result<Vec<KnownTokens>, String> {
    let mut positions = positions.iter().peekable();
    let id_of = |position: &Value| position["id"].as_u64();
    let mut known = Vec::with_capacity(ids.len());
    for id in ids {
        let id = u64::from(*id);
        known.push(match positions.next_if(|position| id_of(position) == Some(id)) {
            None => Vec::new(),
            Some(position) => {
                let top = position["top_logprobs"].as_array().into_iter().flatten();
                let top = top.map(|one| Some((id_of(one)?, one["logprob"].as_f64()?)));
                with_own(top, Some((id, position["logprob"].as_f64().unwrap_or(LEAST))))?
            }
        });
    }
    match positions.next() {
        None => Ok(known),
        Some(position) => Err(format!("log-probabilities of another token, `{}`", position["id"])),
    }
}

/// vLLM's format: parallel lists over all positions.
fn read_vllm(positions: &[Value], own: &Value, ids: &[u32]) -> Result<Vec<KnownTokens>, String> {
    if positions.len() != ids.len() {
        return Err(format!("log-probabilities at {} of {} positions", positions.len(), ids.len()));
    }
    let one = |(at, position): (usize, &Value)| {
        let Some(top) = position.as_object() else { return Ok(Vec::new()) };
        let top = top.iter().map(|(name, log_prob)| {
            Some((name.strip_prefix(ID)?.parse().ok()?, log_prob.as_f64()?))
        });
        with_own(top, own[at].as_f64().map(|log_prob| (u64::from(ids[at]), log_prob)))
    };
    positions.iter().enumerate().map(one).collect()
}

/// The most probable tokens, followed by the response's token if it is not among them.
fn with_own(
    top: impl Iterator<Item = Option<(u64, f64)>>,
    own: Option<(u64, f64)>,
) -> Result<KnownTokens, String> {
    let mut known = Vec::new();
    for one in top.chain([own]) {
        let (id, log_prob) = one.ok_or("log-probabilities without token ids")?;
        let id = u32::try_from(id).map_err(|_| format!("the token id {id}"))?;
        if log_prob.is_nan() || log_prob > SLACK {
            return Err(format!("a log-probability of {log_prob}"));
        }
        if known.iter().all(|(other, _)| *other != id) {
            known.push((id, log_prob.clamp(LEAST, 0.0) as f32));
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_formats_are_read_and_gaps_are_unknown() {
        let expected = vec![vec![(4, -0.5), (5, -1.5)], vec![(7, -0.25), (5, -2.0), (6, -4.0)]];
        let vllm = json!({ "logprobs": {
            "tokens": ["token_id:4", "token_id:6"], "token_logprobs": [-0.5, -4.0],
            "top_logprobs": [{ "token_id:4": -0.5, "token_id:5": -1.5 },
                             { "token_id:7": -0.25, "token_id:5": -2.0 }] } });
        assert_eq!(read_known(&vllm, &[4, 6], 9).expect("reads"), expected);
        let position = |id: u32, log_prob: f64, top: &[(u32, f64)]| {
            let top = top.iter().map(|(id, log)| json!({ "id": id, "logprob": log }));
            json!({ "id": id, "logprob": log_prob, "top_logprobs": top.collect::<Vec<_>>() })
        };
        let content = [
            position(4, -0.5, &[(4, -0.5), (5, -1.5)]),
            position(6, -4.0, &[(7, -0.25), (5, -2.0)]),
        ];
        let llama_cpp = json!({ "logprobs": { "content": content } });
        let with_gap = vec![expected[0].clone(), Vec::new(), expected[1].clone()];
        assert_eq!(read_known(&llama_cpp, &[4, 8, 6], 9).expect("reads"), with_gap);
    }

    #[test]
    fn invalid_distributions_are_named() {
        let check = |logprobs: Value, ids: &[u32], expected: &str| {
            let choice = json!({ "logprobs": logprobs });
            let error = read_known(&choice, ids, 9).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        };
        check(json!(null), &[4], "no log-probabilities by token id");
        check(json!({ "top_logprobs": [] , "token_logprobs": [] }), &[4], "at 0 of 1 positions");
        let top = |top: Value| json!({ "top_logprobs": [top], "token_logprobs": [-1.0] });
        check(top(json!({ "a": -1.0 })), &[4], "without token ids");
        check(top(json!({ "token_id:5": -0.1 })), &[4], "add up to 1.27");
        check(top(json!({ "token_id:5": 2.0 })), &[4], "a log-probability of 2");
        check(top(json!({ "token_id:12": -2.0 })), &[4], "the token id 12");
        let content = json!({ "content": [{ "id": 5, "logprob": -1.0, "top_logprobs": [] }] });
        check(content, &[4], "of another token, `5`");
    }
}

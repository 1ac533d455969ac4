//! What a server says of tokens: their ids, and log-probabilities of the most probable ones at each
//! place, as vLLM and as llama.cpp write them.

use serde_json::Value;

/// The tokens of one place whose log-probabilities are told, the response's own among them; empty where
/// nothing is.
pub(super) type KnownTokens = Vec<(u32, f32)>;

/// What stands before an id in vLLM's lists.
const ID: &str = "token_id:";
/// By how much rounded probabilities may add up to more than 1.
pub(super) const SLACK: f64 = 0.01;
/// The least log-probability that files hold: JSON has no infinity.
const LEAST: f64 = -9999.0;

/// Reads a list of token ids.
///
/// # Errors
/// If it is none, or has one that the target does not.
pub(super) fn read_ids(ids: &Value, vocab_size: usize) -> Result<Vec<u32>, String> {
    let ids = ids.as_array().ok_or("token ids that are no list")?;
    let known = |id: &Value| {
        let id = id.as_u64().ok_or_else(|| format!("a token id that is `{id}`"))?;
        u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            format!(
                "the token id {id}, of which `models.target` has {vocab_size}: it serves another model"
            )
        })
    };
    ids.iter().map(known).collect()
}

/// Reads what each of a response's tokens was drawn from. llama.cpp says nothing of a token that ends
/// within a character.
///
/// # Errors
/// If nothing is told at all, or it is not of these tokens, or no distribution.
pub(super) fn read_known(
    choice: &Value,
    ids: &[u32],
    vocab_size: usize,
) -> Result<Vec<KnownTokens>, String> {
    let told = &choice["logprobs"];
    let known = match (told["content"].as_array(), told["top_logprobs"].as_array()) {
        (Some(places), _) => by_place(places, ids)?,
        (None, Some(places)) => by_list(places, &told["token_logprobs"], ids)?,
        (None, None) => Vec::new(),
    };
    if !ids.is_empty() && known.iter().all(Vec::is_empty) {
        return Err(
            "no log-probabilities by token ids (`logprobs`), which sampled responses need: \
                    vLLM and llama.cpp give them"
                .to_owned(),
        );
    }
    for place in &known {
        let sum: f64 = place.iter().map(|(_, log_prob)| f64::from(*log_prob).exp()).sum();
        if sum > 1.0 + SLACK {
            return Err(format!(
                "probabilities that add up to {sum:.3}: natural logarithms at temperature 1 are \
                 expected"
            ));
        }
        if let Some((id, _)) = place.iter().find(|(id, _)| *id as usize >= vocab_size) {
            return Err(format!("the token id {id}, of which `models.target` has {vocab_size}"));
        }
    }
    Ok(known)
}

/// llama.cpp's: an object a place, of some of the tokens.
fn by_place(places: &[Value], ids: &[u32]) -> Result<Vec<KnownTokens>, String> {
    let mut places = places.iter().peekable();
    let id_of = |place: &Value| place["id"].as_u64();
    let mut known = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(place) = places.next_if(|place| id_of(place) == Some(u64::from(*id))) else {
            known.push(Vec::new());
            continue;
        };
        let top = place["top_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        let top = top.iter().map(|one| Some((id_of(one)?, one["logprob"].as_f64()?)));
        let own = Some((u64::from(*id), place["logprob"].as_f64().unwrap_or(LEAST)));
        known.push(with_own(top, own)?);
    }
    match places.next() {
        None => Ok(known),
        Some(place) => Err(format!("log-probabilities of another token, `{}`", place["id"])),
    }
}

/// vLLM's: lists side by side, of all tokens.
fn by_list(places: &[Value], own: &Value, ids: &[u32]) -> Result<Vec<KnownTokens>, String> {
    if places.len() != ids.len() {
        return Err(format!("log-probabilities at {} of {} places", places.len(), ids.len()));
    }
    let one = |(at, place): (usize, &Value)| {
        let Some(top) = place.as_object() else { return Ok(Vec::new()) };
        let top = top.iter().map(|(name, log_prob)| {
            Some((name.strip_prefix(ID)?.parse().ok()?, log_prob.as_f64()?))
        });
        with_own(top, own[at].as_f64().map(|log_prob| (u64::from(ids[at]), log_prob)))
    };
    places.iter().enumerate().map(one).collect()
}

/// The most probable tokens, and the response's own where it is none of them.
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
    fn both_forms_are_read_and_a_gap_is_none() {
        let expected = vec![vec![(4, -0.5), (5, -1.5)], vec![(7, -0.25), (5, -2.0), (6, -4.0)]];
        let vllm = json!({ "logprobs": {
            "tokens": ["token_id:4", "token_id:6"], "token_logprobs": [-0.5, -4.0],
            "top_logprobs": [{ "token_id:4": -0.5, "token_id:5": -1.5 },
                             { "token_id:7": -0.25, "token_id:5": -2.0 }] } });
        assert_eq!(read_known(&vllm, &[4, 6], 9).expect("reads"), expected);
        let place = |id: u32, log_prob: f64, top: &[(u32, f64)]| {
            let top = top.iter().map(|(id, log)| json!({ "id": id, "logprob": log }));
            json!({ "id": id, "logprob": log_prob, "top_logprobs": top.collect::<Vec<_>>() })
        };
        let content =
            [place(4, -0.5, &[(4, -0.5), (5, -1.5)]), place(6, -4.0, &[(7, -0.25), (5, -2.0)])];
        let llama_cpp = json!({ "logprobs": { "content": content } });
        let with_gap = vec![expected[0].clone(), Vec::new(), expected[1].clone()];
        assert_eq!(read_known(&llama_cpp, &[4, 8, 6], 9).expect("reads"), with_gap);
    }

    #[test]
    fn what_is_no_distribution_of_these_tokens_is_named() {
        let check = |logprobs: Value, ids: &[u32], expected: &str| {
            let choice = json!({ "logprobs": logprobs });
            let error = read_known(&choice, ids, 9).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        };
        check(json!(null), &[4], "no log-probabilities by token ids");
        check(json!({ "top_logprobs": [] , "token_logprobs": [] }), &[4], "at 0 of 1 places");
        let top = |top: Value| json!({ "top_logprobs": [top], "token_logprobs": [-1.0] });
        check(top(json!({ "a": -1.0 })), &[4], "without token ids");
        check(top(json!({ "token_id:5": -0.1 })), &[4], "add up to 1.27");
        check(top(json!({ "token_id:5": 2.0 })), &[4], "a log-probability of 2");
        check(top(json!({ "token_id:12": -2.0 })), &[4], "the token id 12");
        let content = json!({ "content": [{ "id": 5, "logprob": -1.0, "top_logprobs": [] }] });
        check(content, &[4], "of another token, `5`");
    }
}

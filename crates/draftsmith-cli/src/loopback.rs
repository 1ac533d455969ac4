//! A local test server that decodes with the embedded target.

#[path = "../../draftsmith-served/src/loopback.rs"]
pub mod server;

use std::path::Path;

use burn::tensor::Device;
use draftsmith_decode::{Finish, RoundTokens};
use draftsmith_theory::{Decoding, Sampling, SeededDraws, log_softmax};
use serde_json::Value;

use self::server::{Decoded, LogProbs, LoopbackTarget};
pub(crate) use self::server::{Deed, Loopback, Request};
use draftsmith_recipe::{Silent, Workspace, decoding};
use draftsmith_tune::responses::Responder;

/// Serves the embedded target. `deed` decides how to answer each request, given its index.
pub(crate) fn serve(deed: impl Fn(usize, &Request) -> Deed + Send + Sync + 'static) -> Loopback {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny");
    let workspace = Workspace::new(&dir.join("target"), &[], vec![Device::flex()]);
    let text = workspace.text_side().expect("it is committed").clone();
    let target = workspace.target_alone().expect("it is committed").target.clone();
    let tokenizer = text.tokenizer.clone();
    let decode = move |prompt_ids: &[u32], body: &Value| {
        let limits = text.limits(body["max_tokens"].as_u64().expect("a number") as usize);
        let responder = Responder {
            target: &target,
            context: text.context,
            decoding: decoding_of(body),
            limits,
            watch: &Silent,
        };
        let seed = body["seed"].as_u64().expect("a number");
        let mut prompts = [(prompt_ids, SeededDraws::new(seed, &["served"]))];
        let vocab_size = target.shape().vocab_size;
        let num = body["logprobs"].as_u64().unwrap_or(0) as usize;
        let mut log_probs: Vec<LogProbs> = Vec::new();
        let note = |_: usize, tokens: RoundTokens<'_>| {
            for (id, logits) in tokens.kept.iter().zip(tokens.logits.chunks_exact(vocab_size)) {
                let own = log_softmax(logits)[*id as usize] as f32;
                log_probs.push((own, most_probable(logits, num)));
            }
        };
        let generation = responder.respond(&mut prompts, note).expect("it fits").remove(0);
        let is_ended = generation.finish == Finish::Eos;
        Decoded { ids: generation.token_ids, is_ended, log_probs }
    };
    Loopback::serve(LoopbackTarget { tokenizer, decode }, deed)
}

/// Returns the `num` most probable tokens at temperature 1, with their log-probabilities.
fn most_probable(logits: &[f32], num: usize) -> Vec<(u32, f32)> {
    let log_probs = log_softmax(logits);
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|one, other| log_probs[*other as usize].total_cmp(&log_probs[*one as usize]));
    ids.truncate(num);
    ids.into_iter().map(|id| (id, log_probs[id as usize] as f32)).collect()
}

/// Reads the decoding settings from a request.
fn decoding_of(body: &Value) -> Decoding {
    let number = |key: &str| body[key].as_f64().expect("a number");
    let sampling = Sampling {
        temperature: number("temperature"),
        top_p: number("top_p"),
        top_k: usize::try_from(body["top_k"].as_i64().expect("a number")).ok(),
        min_p: Some(number("min_p")).filter(|min_p| *min_p > 0.0),
    };
    decoding(sampling).penalising(number("repetition_penalty"))
}

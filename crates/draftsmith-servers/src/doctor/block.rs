//! Examines block drafters (DFlash, DSpark) as servers read them. Behaviour was measured on llama.cpp
//! b11434, and read from the source of vLLM 0.33 and SGLang 0.5.23.

use anyhow::Result;
use draftsmith_model::{
    BlockDrafterConfig, ConfidenceHead, ModelError, WeightReader, copy_distance,
};
use serde_json::{Map, Value};

use super::Severity::{Breaks, Hurts, Note};
use super::{Patient, SHORT_CONTEXT};

/// The relative distance up to which a matrix is a copy in another type: that of bf16.
const ROUNDING: f64 = 1.0 / 256.0;
const AS_DSPARK: &str = "run `draftsmith export --for dspark`";

/// Finds problems and describes the drafter.
pub(super) fn examine(patient: &mut Patient<'_>) -> Result<String> {
    let files = WeightReader::open_dir(&patient.dir)?;
    patient.find_if(
        files.names().any(|name| name.starts_with("model.")),
        ("prefix", Hurts),
        "names of tensors begin with `model.`",
        "vLLM adds the prefix itself and refuses them; llama.cpp and SGLang load them",
        AS_DSPARK,
    );
    let files = files.without_prefix("model.");
    contradictions(patient);
    if let Some(keys) = patient.readable(BlockDrafterConfig::keys(&patient.dir)) {
        as_written(patient, &files, &keys);
    }
    let config = match BlockDrafterConfig::from_dir(&patient.dir) {
        Ok(config) => config,
        Err(error) => {
            if patient.findings.iter().all(|finding| finding.severity != Breaks) {
                patient.find_unreadable(&error);
            }
            return Ok("of unknown sizes".to_owned());
        }
    };
    as_read(patient, &files, &config);
    Ok(format!(
        "width {}, {} layers, {} candidates, drafts {} of {} tokens",
        config.model.shape.hidden_size,
        config.model.shape.num_layers,
        config.num_candidates(),
        config.num_draft_tokens(),
        config.model.shape.vocab_size
    ))
}

/// Finds keys that have other values at the top level than in `dflash_config`.
fn contradictions(patient: &mut Patient<'_>) {
    let Some(Value::Object(nested)) = patient.keys.get("dflash_config") else { return };
    let other = |(key, value): (&String, &Value)| {
        let outer = patient.keys.get(key).filter(|outer| !outer.is_null() && *outer != value)?;
        Some(format!("`dflash_config.{key}` is {value}, but `{key}` is {outer}"))
    };
    let given = nested.iter().filter(|(_, value)| !value.is_null());
    let found: Vec<String> = given.filter_map(other).collect();
    patient.find_if(
        !found.is_empty(),
        ("contradicting-keys", Hurts),
        found.join("; "),
        "SGLang 0.5.23, llama.cpp b11434, mistral.rs and draftsmith take the value in `dflash_config`; others may \
         not",
        "remove the one that is not meant",
    );
}

/// Finds what is wrong with the keys and tensors themselves. It may keep this program from reading
/// the drafter too.
fn as_written(patient: &mut Patient<'_>, files: &WeightReader, keys: &Map<String, Value>) {
    let has = |name: &str| keys.get(name).is_some_and(|value| !value.is_null());
    patient.find_if(
        !has("mask_token_id"),
        ("no-mask-token", Breaks),
        "`mask_token_id` is missing",
        "llama.cpp crashes at the first request",
        "write the id of the token with which the drafter was trained",
    );
    patient.find_if(
        patient.keys.contains_key("speculators_model_type") && !has("sample_from_anchor"),
        ("no-layout", Breaks),
        "`sample_from_anchor` is missing in the speculators library's form",
        "vLLM and llama.cpp take it as false and the library as true, so one of them drafts every token one place \
         too late",
        "write true if the anchor's row predicts the next token, or else false",
    );
    let is_dflash = keys.get("speculators_model_type").is_some_and(|method| method == "dflash");
    let is_false = keys.get("sliding_window_non_causal") == Some(&Value::Bool(false));
    patient.find_if(
        is_dflash && is_false,
        ("causal-in-vllm", Hurts),
        "`sliding_window_non_causal` is false, and the speculators library trains layers without a window \
         bidirectional",
        "vLLM 0.33 then makes all layers causal, as draftsmith does; others may not",
        "write true for vLLM, or run `draftsmith export --for dspark`",
    );
    let markov = keys.get("markov_head_type").and_then(Value::as_str);
    if let Some(form) = markov.filter(|form| *form != "vanilla") {
        patient.find(
            ("markov-head-type", Breaks),
            format!("`markov_head_type` is `{form}`"),
            "llama.cpp and vLLM refuse it; SGLang runs it",
            "serve it with SGLang, or train one with a `vanilla` head",
        );
    }
    let is_on = keys.get("enable_confidence_head") == Some(&Value::Bool(true));
    confidence_as_written(patient, files, is_on);
    let defaults = [
        ("rope_theta", "vLLM takes 1e6 and llama.cpp 1e4"),
        ("block_size", "llama.cpp takes 16"),
        ("head_dim", "some servers divide the width by the heads"),
    ];
    for (name, servers) in defaults {
        patient.find_if(
            !(has(name) || has("rope_parameters") && name == "rope_theta"),
            ("default-differs", Hurts),
            format!("`{name}` is missing"),
            servers,
            "write the key with its value",
        );
    }
}

fn confidence_as_written(patient: &mut Patient<'_>, files: &WeightReader, is_on: bool) {
    const WEIGHT: &str = "confidence_head.proj.weight";
    let Some(shape) = files.shape(WEIGHT) else { return };
    let (num_read, width) = (shape.last().copied().unwrap_or(0), patient.target.shape.hidden_size);
    patient.find_if(
        files.shape("confidence_head.proj.bias").is_none(),
        ("no-confidence-bias", Breaks),
        "`confidence_head.proj.bias` is missing",
        "vLLM computes with whatever its memory contains; llama.cpp takes 0",
        "write a bias, which may be 0",
    );
    patient.find_if(
        num_read == width,
        ("confidence-of-row", Breaks),
        format!("`{WEIGHT}` reads only the row: its shape is {shape:?}"),
        "llama.cpp expects weights for the Markov head's vector too and refuses the drafter",
        AS_DSPARK,
    );
    patient.find_if(
        !is_on,
        ("confidence-off", Hurts),
        "a confidence head is in the file, but `enable_confidence_head` is not true",
        "llama.cpp uses it, vLLM drops it without a word, and SGLang builds it anyway",
        "write true, or remove the head's tensors",
    );
}

/// Finds what servers do with a drafter that can be read.
fn as_read(patient: &mut Patient<'_>, files: &WeightReader, config: &BlockDrafterConfig) {
    vocabularies(patient, files, config);
    heads(patient, config);
    windows(patient, config);
    copies(patient, config);
    let num_layers = patient.target.shape.num_layers;
    patient.find_if(
        config.target_layers.iter().any(|layer| [0, num_layers].contains(layer)),
        ("uncaptured-layer", Breaks),
        "it reads the target's embeddings, or the state after its last layer",
        "SGLang 0.5.23 refuses the first and captures no state for the second",
        "do not serve it with SGLang, or train with other layers",
    );
    if let Some(named) = config.num_target_layers.filter(|named| *named != num_layers) {
        patient.find(
            ("other-depth", Hurts),
            format!("`num_target_layers` is {named}, and the target has {num_layers} layers"),
            "none checks it; they read other states than it was trained on, unless the key is wrong",
            "use the target that it was trained for, or correct the key",
        );
    }
    let (own, target) = (config.model.shape.context, patient.target.shape.context);
    patient.find_if(
        own < target,
        ("short-context", Hurts),
        format!("`max_position_embeddings` is {own}, and the target reads {target} tokens"),
        SHORT_CONTEXT.0,
        SHORT_CONTEXT.1,
    );
}

/// Compares the embeddings and LM head in the file with the target's, which the drafter was trained on if
/// it has all tokens.
fn copies(patient: &mut Patient<'_>, config: &BlockDrafterConfig) {
    const MATRICES: [(&str, &str); 2] =
        [("embed_tokens", "other-embeddings"), ("lm_head", "other-lm-head")];
    if config.draft_vocabulary.is_some() {
        return;
    }
    for (matrix, name) in MATRICES {
        let what = match copy_distance(&patient.dir, matrix, (patient.target_dir, &patient.target))
        {
            Ok(Some(distance)) if distance > ROUNDING => {
                format!("`{matrix}.weight` differs from the target's by {:.0} %", 100.0 * distance)
            }
            Err(error @ ModelError::Shape(_)) => error.to_string(),
            Ok(Some(_)) if matrix == "lm_head" => {
                patient.find(
                    ("lm-head-dropped", Note),
                    "the file contains a copy of the target's `lm_head.weight`",
                    "llama.cpp and SGLang drop it, and vLLM shares the target's if they are equal",
                    "leave it out",
                );
                continue;
            }
            _ => continue,
        };
        patient.find(
            (name, Breaks),
            what,
            "vLLM computes with it; SGLang drops it; llama.cpp drops an LM head and keeps embeddings; draftsmith drops \
             both",
            "remove it if the drafter was trained with the target's, or serve it with vLLM only",
        );
    }
}

fn windows(patient: &mut Patient<'_>, config: &BlockDrafterConfig) {
    let Some(window) = &config.model.spec.window else { return };
    let is_given = patient.keys.get("is_causal").is_some_and(|value| !value.is_null());
    let has_all = !window.layers.contains(&false);
    let layers = if has_all { "its layers attend" } else { "some of its layers attend" };
    patient.find(
        ("window", if is_given { Note } else { Hurts }),
        format!("{layers} to the last {} tokens only", window.size),
        "vLLM 0.33, SGLang 0.5.23, llama.cpp b11434 and mistral.rs compute the window; unless `is_causal` is given, vLLM \
         makes layers with a window causal, SGLang those of z-lab's form, and llama.cpp none",
        "write `is_causal` if all layers have the same, or serve it with vLLM",
    );
}

fn vocabularies(patient: &mut Patient<'_>, files: &WeightReader, config: &BlockDrafterConfig) {
    let has_all_tokens = config.draft_vocabulary.is_none();
    let has_embeddings = has_all_tokens && files.shape("embed_tokens.weight").is_some();
    patient.find_if(
        has_embeddings && !patient.target.spec.tie_word_embeddings,
        ("embeddings-for-lm-head", Breaks),
        "the file contains `embed_tokens.weight`, and the target's LM head is another matrix",
        "llama.cpp drops `lm_head.weight` and computes logits with the embeddings, without a word",
        AS_DSPARK,
    );
    patient.find_if(
        !has_all_tokens,
        ("draft-vocabulary", Hurts),
        "it drafts a part of the vocabulary",
        "SGLang ignores `d2t` and drafts other tokens",
        "do not serve it with SGLang, or train it for all tokens",
    );
}

fn heads(patient: &mut Patient<'_>, config: &BlockDrafterConfig) {
    patient.find_if(
        config.is_anchor_first && config.markov_rank == 0,
        ("anchor-first-dflash", Breaks),
        "the anchor's row predicts the next token, and there is no Markov head",
        "llama.cpp takes it for a DFlash whose anchor predicts nothing, so it drafts every token one place too late; \
         SGLang refuses it",
        "run `draftsmith export --for dspark`, which adds a Markov head of zeros",
    );
    if config.confidence == ConfidenceHead::Absent {
        patient.find(
            ("no-confidence-head", Note),
            "it has no confidence head",
            "llama.cpp stops speculating if `--spec-draft-p-min` is above 0 (a DFlash is cut by its largest probability \
             instead); vLLM estimates acceptance online; SGLang's ragged modes refuse it",
            "keep the flag at 0, or run `draftsmith attach-head`",
        );
    } else {
        patient.find(
            ("head-never-built", Note),
            "it has a confidence head",
            "SGLang builds it only with `SGLANG_RAGGED_VERIFY_MODE=compact` or `cap-accept`; llama.cpp cuts by it only \
             with `--spec-draft-p-min` above 0",
            "set these if the head should be used",
        );
    }
    patient.find_if(
        !config.is_causal,
        ("bidirectional", Note),
        "its rows read the whole block",
        "with fewer candidates than the block has, servers run a shorter block, whose candidates are not the first \
         ones of the whole",
        "serve it with all its candidates, or expect other acceptance than recorded here",
    );
}

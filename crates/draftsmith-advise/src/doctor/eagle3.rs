//! EAGLE-3 drafters in the three forms that trainers write.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_model::{Eagle3Config, WeightReader};
use serde_json::Value;

use super::{Patient, Severity};

/// The key of the target's layers.
const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
/// The layers whose states it reads.
const NUM_STATES: usize = 3;

/// Shapes by name. 0 stands for a size that only the file knows.
type Shapes = BTreeMap<String, Vec<usize>>;

/// Sizes that the tensors must have.
struct TensorSizes {
    hidden: usize,
    target_hidden: usize,
    inner: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    drafted: usize,
}

/// Finds what is wrong, and describes the drafter.
pub(super) fn examine(patient: &mut Patient<'_>, is_of_speculators: bool) -> Result<String> {
    if let Some(Value::Object(layer)) = patient.keys.remove("transformer_layer_config") {
        patient.keys.extend(layer);
    }
    let mut reader = WeightReader::open_dir(patient.dir)?;
    let usual = |name: &str| match name.strip_prefix("layers.0.") {
        Some(rest) => format!("midlayer.{rest}"),
        None => name.to_owned(),
    };
    let shapes: Shapes = reader
        .names()
        .filter_map(|name| Some((usual(name), reader.shape(name)?.to_vec())))
        .collect();
    let sizes = sizes(patient, &shapes);
    vocabulary(patient, &shapes, &sizes, &mut reader);
    layers(patient);
    norms(patient, is_of_speculators);
    tensors(patient, &shapes, &sizes);
    Ok(format!(
        "width {}, drafts {} of {} tokens, reads a target of width {}",
        sizes.hidden, sizes.drafted, sizes.vocab, sizes.target_hidden
    ))
}

fn sizes(patient: &mut Patient<'_>, shapes: &Shapes) -> TensorSizes {
    let target = patient.target.shape.clone();
    let hidden = patient.number("hidden_size").unwrap_or(target.hidden_size);
    let heads = patient.number("num_attention_heads").unwrap_or(1).max(1);
    let head_dim = patient.number("head_dim").unwrap_or(hidden / heads);
    let vocab = patient.number("vocab_size").unwrap_or(target.vocab_size);
    let offsets = shapes.get("d2t").and_then(|shape| shape.first().copied());
    let drafted = patient.number("draft_vocab_size").or(offsets).unwrap_or(vocab);
    let target_hidden = patient.number("target_hidden_size").unwrap_or(hidden);
    if vocab != target.vocab_size {
        let what = format!("`vocab_size` is {vocab}, but the target's is {}", target.vocab_size);
        patient.find(
            "other-vocabulary",
            Severity::Breaks,
            what,
            "vLLM and SGLang fail or draft other tokens; llama.cpp refuses it",
            "use the target that it was trained for",
        );
    }
    if target_hidden != target.hidden_size {
        let what = format!(
            "it reads states of width {target_hidden}, but the target's have {}",
            target.hidden_size
        );
        patient.find(
            "other-width",
            Severity::Breaks,
            what,
            "all fail when they load it or at the first round",
            "use the target that it was trained for, or set `target_hidden_size` if only the key is missing",
        );
    }
    TensorSizes {
        hidden,
        target_hidden,
        inner: patient.number("intermediate_size").unwrap_or(0),
        heads: heads * head_dim,
        kv_heads: patient.number("num_key_value_heads").unwrap_or(heads) * head_dim,
        vocab,
        drafted,
    }
}

fn vocabulary(
    patient: &mut Patient<'_>,
    shapes: &Shapes,
    sizes: &TensorSizes,
    reader: &mut WeightReader,
) {
    let TensorSizes { vocab, drafted, .. } = *sizes;
    if !patient.keys.contains_key("draft_vocab_size") {
        patient.find(
            "no-draft-vocab-size",
            Severity::Breaks,
            "`config.json` has no `draft_vocab_size`",
            "vLLM works; llama.cpp's converter does not recognise the drafter",
            "add `draft_vocab_size`, also where it equals `vocab_size`",
        );
    }
    match (drafted < vocab, shapes.get("d2t")) {
        (true, None) => patient.find(
            "no-d2t",
            Severity::Breaks,
            format!("it drafts {drafted} of {vocab} tokens, but no tensor `d2t` says which"),
            "vLLM loads it without a word and accepts nothing; llama.cpp refuses it",
            "export it with `d2t`: for each draft id, the target's id less the draft id",
        ),
        (false, Some(_)) => patient.find(
            "surplus-d2t",
            Severity::Breaks,
            format!("it drafts all {vocab} tokens, but has a tensor `d2t`"),
            "vLLM refuses it; llama.cpp loads it",
            "remove `d2t`, or set `draft_vocab_size` to the number of its entries",
        ),
        (true, Some(shape)) => offsets(patient, shape, sizes, reader),
        (false, None) => {}
    }
}

/// Checks that `d2t` has offsets that lead to ascending ids of the target.
fn offsets(
    patient: &mut Patient<'_>,
    shape: &[usize],
    sizes: &TensorSizes,
    reader: &mut WeightReader,
) {
    const HINT: &str =
        "write for each draft id the target's id less the draft id, as 64-bit integers";
    const NAME: &str = "wrong-d2t";
    const FAIL: &str = "all fail or draft other tokens";
    let TensorSizes { vocab, drafted, .. } = *sizes;
    if shape != [drafted] {
        let what = format!("`d2t` is {shape:?}, expected [{drafted}]");
        return patient.find(NAME, Severity::Breaks, what, FAIL, HINT);
    }
    let ascends = |ids: &mut dyn Iterator<Item = u64>| {
        let ids: Vec<u64> = ids.collect();
        ids.is_sorted_by(|one, next| one < next)
            && ids.last().is_some_and(|last| (*last as usize) < vocab)
    };
    match reader.take_ids("d2t", drafted, vocab) {
        Err(error) => patient.find(NAME, Severity::Breaks, error.to_string(), FAIL, HINT),
        Ok(values) => {
            let values: Vec<u64> = values.into_iter().map(u64::from).collect();
            if ascends(&mut (0..).zip(&values).map(|(at, offset)| at + offset)) {
                return;
            }
            match ascends(&mut values.iter().copied()) {
                true => patient.find(
                    "ids-for-offsets",
                    Severity::Breaks,
                    "`d2t` has the target's ids, where servers expect offsets",
                    "all load it without a word and draft other tokens, so nothing is accepted",
                    "subtract each entry's index: `d2t - arange(len(d2t))`",
                ),
                false => patient.find(
                    NAME,
                    Severity::Breaks,
                    format!("`d2t` has offsets whose target ids do not ascend below {vocab}"),
                    "all draft other tokens",
                    HINT,
                ),
            }
        }
    }
}

fn layers(patient: &mut Patient<'_>) {
    if let Some(num) = patient.number("num_hidden_layers").filter(|num| *num != 1) {
        let what = format!("`num_hidden_layers` is {num}, but an EAGLE-3 drafter has one layer");
        patient.find(
            "several-layers",
            Severity::Breaks,
            what,
            "they expect weights of more layers",
            "set it to 1",
        );
    }
    let num_layers = patient.target.shape.num_layers;
    let default = Eagle3Config::default_layers(num_layers);
    let nested = patient.keys.get("eagle_config").and_then(|nested| nested.get(LAYERS)).cloned();
    let top = patient.keys.get(LAYERS).cloned();
    if top.is_none() && nested.is_some() {
        patient.find(
            "nested-layers",
            Severity::Hurts,
            format!("`{LAYERS}` is inside `eagle_config`"),
            "vLLM uses it; llama.cpp ignores it and takes the default layers; SGLang adds 1 to each",
            "move it to the top level of `config.json`",
        );
    }
    let Some(value) = top.or(nested) else { return };
    let ids: Option<Vec<usize>> = serde_json::from_value(value.clone()).ok();
    let Some(ids) = ids.filter(|ids| ids.len() == NUM_STATES) else {
        let what = format!("`{LAYERS}` is {value}, expected {NUM_STATES} numbers of layers");
        return patient.find(
            "wrong-layers",
            Severity::Breaks,
            what,
            "they fail when they load it",
            "name three layers",
        );
    };
    if ids.iter().any(|id| *id > num_layers) {
        let what = format!("`{LAYERS}` is {ids:?}, but the target has {num_layers} layers");
        patient.find(
            "wrong-layers",
            Severity::Breaks,
            what,
            "they fail or read no state",
            "use its own target",
        );
    } else if !ids.is_sorted() {
        patient.find(
            "descending-layers",
            Severity::Breaks,
            format!("`{LAYERS}` is {ids:?}, which does not ascend"),
            "vLLM sorts the layers, llama.cpp takes their order, so one of them reads exchanged states",
            "sort them, and the columns of `fc` with them",
        );
    } else if ids != default {
        patient.find(
            "other-layers",
            Severity::Note,
            format!("it reads the states after layers {ids:?}, not the usual {default:?}"),
            "vLLM and llama.cpp read the key",
            "check that the trainer counted as they do: a state is the input of layer L from 0, or the output after L layers",
        );
    }
}

fn norms(patient: &mut Patient<'_>, is_of_speculators: bool) {
    let is = |key: &str| patient.keys.get(key).and_then(Value::as_bool);
    let (before_fc, before_residual) = (is("norm_before_fc"), is("norm_before_residual"));
    if before_fc == Some(true) {
        patient.find(
            "norm-before-fc",
            Severity::Breaks,
            "`norm_before_fc` is true",
            "llama.cpp and SGLang ignore it and read states that were not normed",
            "serve it with a vLLM that has the key, or train without",
        );
    }
    if before_residual == Some(true) || before_residual.is_none() && is_of_speculators {
        patient.find(
            "norm-before-residual",
            Severity::Hurts,
            "`norm_before_residual` is true, which the speculators library's form implies",
            "vLLM and llama.cpp honour it; SGLang's Llama drafter ignores it, which halves acceptance",
            "for SGLang, train with `norm_before_residual = false`",
        );
    }
}

/// Finds missing, unknown and misshapen tensors.
fn tensors(patient: &mut Patient<'_>, shapes: &Shapes, sizes: &TensorSizes) {
    let TensorSizes { hidden, target_hidden, inner, heads, kv_heads, vocab, drafted } = *sizes;
    let needs_head = drafted < vocab || hidden != target_hidden;
    let needs_embedding = hidden != target_hidden;
    let weights = [
        ("fc", vec![hidden, NUM_STATES * target_hidden], true),
        ("midlayer.input_layernorm", vec![hidden], true),
        ("midlayer.hidden_norm", vec![hidden], true),
        ("midlayer.post_attention_layernorm", vec![hidden], true),
        ("midlayer.self_attn.q_proj", vec![heads, 2 * hidden], true),
        ("midlayer.self_attn.k_proj", vec![kv_heads, 2 * hidden], true),
        ("midlayer.self_attn.v_proj", vec![kv_heads, 2 * hidden], true),
        ("midlayer.self_attn.o_proj", vec![hidden, heads], true),
        ("midlayer.mlp.gate_proj", vec![inner, hidden], true),
        ("midlayer.mlp.up_proj", vec![inner, hidden], true),
        ("midlayer.mlp.down_proj", vec![hidden, inner], true),
        ("norm", vec![hidden], true),
        ("lm_head", vec![drafted, hidden], needs_head),
        ("embed_tokens", vec![vocab, hidden], needs_embedding),
    ];
    let mut known: Vec<String> = vec!["d2t".to_owned(), "t2d".to_owned()];
    for (name, expected, is_needed) in weights {
        let name = format!("{name}.weight");
        match shapes.get(&name) {
            None if is_needed => patient.find(
                if name == "lm_head.weight" { "no-lm-head" } else { "missing-tensor" },
                Severity::Breaks,
                format!("there is no tensor `{name}`"),
                "vLLM loads it without a word and leaves the tensor at its first values; llama.cpp refuses it",
                "export the drafter again with all its tensors",
            ),
            Some(found) if *found != expected => {
                let what = format!("tensor `{name}` is {found:?}, expected {expected:?} by `config.json`");
                patient.find(
                    "wrong-shape",
                    Severity::Breaks,
                    what,
                    "all refuse it, or read it wrongly where sizes happen to fit",
                    "use the target that it was trained for, or correct the sizes in `config.json`",
                );
            }
            _ => {}
        }
        known.push(name);
    }
    let unknown: Vec<&str> =
        shapes.keys().filter(|name| !known.contains(name)).map(String::as_str).collect();
    if !unknown.is_empty() {
        patient.find(
            "unknown-tensor",
            Severity::Breaks,
            format!("unknown tensors: `{}`", unknown.join("`, `")),
            "vLLM and llama.cpp refuse it; SGLang skips them without a word",
            "remove them, or write them under the names of the format",
        );
    }
    if patient.keys.get("tie_word_embeddings").and_then(Value::as_bool) == Some(true) && needs_head
    {
        patient.find(
            "tied-embeddings",
            Severity::Breaks,
            "`tie_word_embeddings` is true, but it has an LM head of its own",
            "servers may take the embeddings for the LM head, which has other tokens",
            "set `tie_word_embeddings` to false",
        );
    }
}

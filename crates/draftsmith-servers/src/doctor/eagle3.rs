//! Examines EAGLE-3 drafters in the three formats of trainers. The model crate finds faults in the
//! files. This file adds what servers do about each fault, and problems that only servers have.

use anyhow::Result;
use draftsmith_model::{
    Activation, Architecture, DraftFaultKind, DraftFiles, Eagle3Config, Eagle3Form, StateNorms,
};
use serde_json::Value;

use super::Severity::{self, Breaks, Hurts, Note};
use super::{Patient, SHORT_CONTEXT};

/// The key that lists the target layers that the drafter reads.
const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";

/// Finds problems and describes the drafter.
pub(super) fn examine(patient: &mut Patient<'_>) -> Result<String> {
    let is_nested =
        patient.keys.get("eagle_config").is_some_and(|nested| !nested[LAYERS].is_null())
            && patient.keys.get(LAYERS).is_none_or(Value::is_null);
    let num_layers = patient.target.shape.num_layers;
    let files = DraftFiles::<Eagle3Form>::read(&patient.dir, num_layers);
    let Some(files) = patient.readable(files) else {
        return Ok("of unknown sizes".to_owned());
    };
    patient.keys = files.keys.clone();
    let config = files.config.clone();
    for fault in files.faults_beside(&patient.target.shape) {
        let (which, servers, hint) = advice(fault.kind);
        let what = fault.error.to_string();
        // The finding has its own hint, so we drop the error's.
        let what = what.split("; hint:").next().unwrap_or_default();
        patient.find(which, what, servers, hint);
    }
    serving(patient, &config, is_nested);
    Ok(format!(
        "width {}, drafts {} of {} tokens, reads a target of width {}",
        config.model.shape.hidden_size,
        config.num_draft_tokens(),
        config.model.shape.vocab_size,
        config.target_hidden_size
    ))
}

/// Returns a fault's name, its severity, the servers' behaviour and the remedy.
fn advice(kind: DraftFaultKind) -> ((&'static str, Severity), &'static str, &'static str) {
    const OFFSETS: &str =
        "write for each draft id the target's id less the draft id, as 64-bit integers";
    const OTHER_TARGET: &str = "use the target that it was trained for";
    const FIRST_VALUES: &str = "vLLM loads it without a word and leaves the tensor at its first values; llama.cpp refuses it";
    const EXPORT_AGAIN: &str = "export the drafter again with all its tensors";
    let (name, servers, hint) = match kind {
        DraftFaultKind::RefusedKey => ("unknown-key", "not known", "ignore the key in a recipe"),
        DraftFaultKind::SeveralLayers => (
            "several-layers",
            "they expect weights of as many layers, and few servers run more than one",
            "train a drafter of one layer, or correct the key if the weights have one",
        ),
        DraftFaultKind::WrongLayers => (
            "wrong-layers",
            "they fail when they load it, or read no state",
            "name three layers of its own target",
        ),
        DraftFaultKind::DescendingLayers => (
            "descending-layers",
            "vLLM sorts the layers, llama.cpp takes their order, so one of them reads exchanged states",
            "sort them, and the columns of `fc` with them",
        ),
        DraftFaultKind::NoOffsets => (
            "no-d2t",
            "vLLM loads it without a word and accepts nothing; llama.cpp refuses it",
            "export it with `d2t`: for each draft id, the target's id less the draft id",
        ),
        DraftFaultKind::SurplusOffsets => (
            "surplus-d2t",
            "vLLM refuses it; llama.cpp loads it",
            "remove `d2t`, or set `draft_vocab_size` to the number of its entries",
        ),
        DraftFaultKind::IdsForOffsets => (
            "ids-for-offsets",
            "all load it without a word and draft other tokens, so nothing is accepted",
            "subtract each entry's index: `d2t - arange(len(d2t))`",
        ),
        DraftFaultKind::WrongOffsets => ("wrong-d2t", "all fail or draft other tokens", OFFSETS),
        DraftFaultKind::NoHead => ("no-lm-head", FIRST_VALUES, EXPORT_AGAIN),
        DraftFaultKind::OtherWidth => (
            "other-width",
            "all fail when they load it or at the first round",
            "use the target that it was trained for, or set `target_hidden_size` if only the key is missing",
        ),
        DraftFaultKind::OtherVocabulary => (
            "other-vocabulary",
            "vLLM and SGLang fail or draft other tokens; llama.cpp refuses it",
            OTHER_TARGET,
        ),
        DraftFaultKind::ShortContext => {
            let (servers, hint) = SHORT_CONTEXT;
            return (("short-context", Hurts), servers, hint);
        }
        DraftFaultKind::MissingTensor => ("missing-tensor", FIRST_VALUES, EXPORT_AGAIN),
        DraftFaultKind::WrongShape => (
            "wrong-shape",
            "all refuse it, or read it wrongly where sizes happen to fit",
            "use the target that it was trained for, or correct the sizes in `config.json`",
        ),
        DraftFaultKind::UnknownTensor => (
            "unknown-tensor",
            "vLLM and llama.cpp refuse it; SGLang skips it without a word",
            "remove it, or write it under a name of the format",
        ),
    };
    ((name, Breaks), servers, hint)
}

/// Finds properties that this program handles but servers interpret differently.
fn serving(patient: &mut Patient<'_>, config: &Eagle3Config, is_nested: bool) {
    let given = |key: &str| patient.keys.get(key).filter(|value| !value.is_null());
    let is_tied = given("tie_word_embeddings").and_then(Value::as_bool) == Some(true);
    patient.find_if(
        given("draft_vocab_size").is_none(),
        ("no-draft-vocab-size", Breaks),
        "`config.json` has no `draft_vocab_size`",
        "vLLM works; llama.cpp's converter does not recognise the drafter",
        "add `draft_vocab_size`, also where it equals `vocab_size`",
    );
    patient.find_if(
        is_nested,
        ("nested-layers", Hurts),
        format!("`{LAYERS}` is inside `eagle_config`"),
        "vLLM uses it; llama.cpp ignores it and takes the default layers; SGLang adds 1 to each",
        "move it to the top level of `config.json`",
    );
    let num_layers = patient.target.shape.num_layers;
    if !config.has_default_layers() {
        let (layers, default) = (&config.target_layers, Eagle3Config::default_layers(num_layers));
        patient.find(
            ("other-layers", Note),
            format!("it reads the states after layers {layers:?}, not the usual {default:?}"),
            "vLLM and llama.cpp read the key",
            "check that the trainer counted as they do: a state is the input of layer L from 0, or the output after L layers",
        );
    }
    patient.find_if(
        config.target_layers.contains(&num_layers),
        ("uncaptured-layer", Breaks),
        format!("it reads the state after the target's last layer, {num_layers}"),
        "vLLM and llama.cpp give it; SGLang 0.5.23 captures only the inputs of layers and fails",
        "do not serve it with SGLang, or train with layers before the last",
    );
    since_3_1(patient, config);
    let activation = config.model.spec.mlp.activation;
    patient.find_if(
        activation != Activation::Silu,
        ("other-activation", Breaks),
        "`hidden_act` is not `silu`",
        "vLLM and SGLang refuse it; llama.cpp computes SiLU all the same, which loses acceptance",
        "train with `silu`; draftsmith's decoder computes what the key says",
    );
    patient.find_if(
        config.norm_before_residual,
        ("norm-before-residual", Hurts),
        "`norm_before_residual` is true, which the speculators library's form implies",
        "vLLM and llama.cpp honour it; SGLang's Llama drafter ignores it, which halves acceptance",
        "for SGLang, train with `norm_before_residual = false`",
    );
    patient.find_if(
        is_tied && config.has_head && config.draft_vocabulary.is_some(),
        ("tied-embeddings", Breaks),
        "`tie_word_embeddings` is true, but it has an LM head of its own",
        "servers may take the embeddings for the LM head, which has other tokens",
        "set `tie_word_embeddings` to false",
    );
}

/// Finds what EAGLE-3.1 and other trainers have added to the layer.
fn since_3_1(patient: &mut Patient<'_>, config: &Eagle3Config) {
    patient.find_if(
        config.norm_output,
        ("norm-output", Hurts),
        "`norm_output` is true: a step reads the normed output of the step before",
        "vLLM 0.33 and SGLang 0.5.23 compute it so; llama.cpp b11434 has no such key and feeds back the state before \
         the norm",
        "serve it with vLLM or SGLang, or train without for llama.cpp",
    );
    if let Some(window) = &config.model.spec.window {
        patient.find(
            ("window", Hurts),
            format!("its layer attends to the last {} tokens only", window.size),
            "vLLM 0.33 computes the window; SGLang 0.5.23 does only with `--speculative-draft-window-size`; llama.cpp \
             b11434 attends to all tokens. The speculators library trains a chain with its first step's window",
            "serve it with vLLM, or with SGLang and the flag",
        );
    }
    patient.find_if(
        config.state_norms == StateNorms::OfEach,
        ("fc-norm", Hurts),
        "`fc_norm` is true: each of the target's states is normed",
        "vLLM 0.33 and SGLang 0.5.23 compute the norms; llama.cpp b11434 does not",
        "serve it with vLLM or SGLang",
    );
    patient.find_if(
        config.model.architecture == Architecture::Qwen3,
        ("qwen3-layer", Hurts),
        "its layer is that of a Qwen 3, with norms of queries and keys",
        "vLLM 0.33 loads it; of SGLang and llama.cpp it is not known",
        "serve it with vLLM, or compare the acceptance with `--prompts`",
    );
}

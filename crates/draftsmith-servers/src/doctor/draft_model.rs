//! Examines draft models together with their target.

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_model::{CausalLm, ModelConfig};
use draftsmith_recipe::exports::servers::served_method;
use draftsmith_recipe::served_path;

use super::Severity::{Breaks, Hurts};
use super::{Patient, SHORT_CONTEXT};

/// Finds problems and describes the draft model.
pub(super) fn examine(patient: &mut Patient<'_>) -> Result<String> {
    let config = match ModelConfig::from_model_dir(&patient.dir) {
        Ok(config) => config,
        Err(error) => {
            patient.find(
                ("unknown-model", Breaks),
                error.to_string(),
                "a server may load it if it knows the architecture; nothing more can be said here",
                "check the architecture in `config.json`",
            );
            return Ok("of an unknown architecture".to_owned());
        }
    };
    let (own, target) = (config.shape.clone(), patient.target.shape.clone());
    patient.find_if(
        own.vocab_size != target.vocab_size,
        ("other-vocabulary", Breaks),
        format!("it has {} tokens, the target {}", own.vocab_size, target.vocab_size),
        "vLLM and SGLang refuse it; llama.cpp allows 128 tokens more or less if the others are the same",
        "use a draft of the same family and version",
    );
    patient.find_if(
        own.context < target.context,
        ("short-context", Hurts),
        format!("its context is {}, the target's {}", own.context, target.context),
        SHORT_CONTEXT.0,
        SHORT_CONTEXT.1,
    );
    if let Some(method) = served_method(&served_path(&patient.dir, true)) {
        patient.find(
            ("method-in-path", Breaks),
            format!("its path contains the name of the method `{method}`"),
            "vLLM 0.33 takes the method from the path, and not from `method`, and loads it as such a drafter",
            "rename the directory",
        );
    }
    let (small, large) = (config.num_parameters(), patient.target.num_parameters());
    patient.find_if(
        3 * small > large,
        ("large-draft", Hurts),
        format!("it has {small} parameters, over a third of the target's {large}"),
        "all run it, but every candidate costs over a third of a target forward",
        "use a smaller one, or an EAGLE-3 drafter",
    );
    if let Err(error) = CausalLm::from_model_dir(&patient.dir, &Device::flex()) {
        patient.find(
            ("broken-weights", Breaks),
            error.to_string(),
            "vLLM leaves missing tensors at their first values; others refuse the model",
            "download or export the model again",
        );
    }
    Ok(format!("{small} parameters, {} layers of width {}", own.num_layers, own.hidden_size))
}

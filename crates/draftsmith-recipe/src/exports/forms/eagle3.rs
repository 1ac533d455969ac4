//! Exports an EAGLE-3 drafter in the subset of the format that vLLM, SGLang and llama.cpp share.

use anyhow::Result;
use draftsmith_model::{Eagle3Form, StateNorms};

use super::{Exporting, Written};

/// Writes the drafter in the source directory without its training record. Reading the drafter
/// first checks that it is complete.
pub(crate) fn export(export: &Exporting<'_>) -> Result<Written> {
    let (config, drafter) = export.self_draft::<Eagle3Form>()?;
    export.write(&drafter, &config)?;
    let window = config.model.spec.window.is_some();
    let lost = [
        (config.norm_before_residual, "`norm_before_residual`, in SGLang"),
        (config.norm_output, "`norm_output`, in llama.cpp b11434"),
        (config.state_norms == StateNorms::OfEach, "`fc_norm`, in llama.cpp b11434"),
        (
            window,
            "its window, in llama.cpp b11434 and, without `--speculative-draft-window-size`, in SGLang",
        ),
    ];
    let lost = lost.into_iter().filter(|(holds, _)| *holds);
    let ignored =
        lost.map(|(_, what)| format!("{what}: its drafts are accepted less there")).collect();
    Ok(Written {
        what: format!(
            "an EAGLE-3 drafter with {} parameters that drafts {} tokens",
            config.num_parameters(),
            config.num_draft_tokens()
        ),
        ignored,
        commands: Vec::new(),
    })
}

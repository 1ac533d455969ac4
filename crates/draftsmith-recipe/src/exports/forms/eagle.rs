//! Exports an EAGLE-1 drafter. vLLM's class has no bias of `fc`, and SGLang's needs one.

use anyhow::Result;
use draftsmith_model::EagleForm;

use super::{Exporting, Written};

/// Writes the drafter without its training record: without the bias, as vLLM loads it, or with one,
/// which is zero if the drafter has none, as SGLang loads it.
pub(crate) fn export(export: &Exporting<'_>, has_bias: bool) -> Result<Written> {
    let (config, drafter) = export.self_draft::<EagleForm>()?;
    let is_lost = config.has_bias && !has_bias;
    let config = config.with(|it| it.has_bias = has_bias);
    export.write(&drafter.with_bias(has_bias), &config)?;
    let lost =
        "the bias of `fc`, which vLLM's class does not have: its drafts are accepted less there";
    Ok(Written {
        what: format!("an EAGLE-1 drafter with {} parameters", config.num_parameters()),
        ignored: is_lost.then(|| lost.to_owned()).into_iter().collect(),
        commands: Vec::new(),
    })
}

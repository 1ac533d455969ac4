//! Exports a block drafter as a DSpark, which llama.cpp, vLLM and SGLang load.

use anyhow::Result;
use draftsmith_model::{BlockDrafterConfig, ConfidenceHead};

use super::{Exporting, Written};

/// Writes the drafter in the source directory in DeepSpec's form, with every key on whose default
/// servers disagree. Reading the drafter first checks that it is complete.
pub(crate) fn export(export: &Exporting<'_>) -> Result<Written> {
    let (config, drafter) = export.self_draft()?;
    let ignored = notes(&config);
    let (drafter, config) = drafter.as_dspark(&config);
    export.write(&drafter, &config)?;
    let what = format!(
        "a DSpark with {} parameters that drafts {} tokens in one forward",
        config.num_parameters(),
        config.num_candidates()
    );
    Ok(Written { what, ignored, commands: Vec::new() })
}

/// Lists what servers lose of a drafter.
fn notes(config: &BlockDrafterConfig) -> Vec<String> {
    let facts = [
        (
            config.draft_vocabulary.is_some(),
            "the draft vocabulary, in SGLang, which then drafts other tokens: do not serve it there",
        ),
        (
            config.confidence == ConfidenceHead::Absent,
            "a confidence head, which the drafter lacks: keep llama.cpp's `--spec-draft-p-min` at 0, because it \
             switches speculation off otherwise",
        ),
        (
            !config.is_causal,
            "blocks that are always whole: servers compute only as many rows as you ask for, and the candidates \
             of fewer rows than the block has differ from those here",
        ),
    ];
    facts.into_iter().filter(|(holds, _)| *holds).map(|(_, text)| text.to_owned()).collect()
}

//! Exports a draft model with its acceptance head for unmodified transformers. A custom `generate`
//! function in the draft's directory stops drafting when the head predicts a rejection.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::{write_json, write_whole};
use draftsmith_model::{DrafterDir, ModelConfig, is_gguf, weight_files};
use draftsmith_theory::{DecodingName, RejectionThresholdConfig, StopRuleConfig};
use serde_json::json;

use super::draft_model::{TEXT_FILES, vocabulary_ignored, write_draft_model};
use super::{Exporting, Written};
use crate::exports::config_keys::write_keys;
use crate::exports::servers::served_path;
use crate::exports::tuned::Tuned;
use crate::exports::{AdapterExport, HeadExport, found_adapter_head, read_model_head};
use crate::out_dir::{OutDir, copy_if_there};
use crate::workspace::Workspace;

/// The Python source of the custom `generate` function.
const GENERATE: &str = include_str!("python/generate.py");
/// The Python source of the acceptance head.
pub(crate) const ACCEPTANCE_HEAD: &str = include_str!("python/acceptance_head.py");

/// A function that writes a draft model and returns its acceptance head and configuration. Its
/// arguments are the source directory, the loaded models, the output directory, and a list to which
/// it adds everything that is not exported.
pub(crate) type WriteDraft =
    fn(&DrafterDir, &Workspace, &Path, &mut Vec<String>) -> Result<(HeadExport, ModelConfig)>;

/// Exports a draft model, which `draft` writes, together with its acceptance head.
pub(crate) fn export(export: &Exporting<'_>, draft: WriteDraft) -> Result<Written> {
    let dir = OutDir::begin_again(export.out)?;
    let mut ignored = Vec::new();
    let rule = write_with_head(export, draft, dir.path(), &mut ignored)?;
    let custom = dir.path().join("custom_generate");
    write_whole(&custom.join("generate.py"), GENERATE)?;
    write_whole(&custom.join("acceptance_head.py"), ACCEPTANCE_HEAD)?;
    dir.finish()?;
    Ok(Written {
        what: format!(
            "a draft that stops when its head's rejection probability exceeds {}",
            rule.stop_threshold
        ),
        ignored,
        commands: vec![
            format!(
                "transformers: assistant = AutoModelForCausalLM.from_pretrained({}, trust_remote_code=True)",
                json!(served_path(export.out, true))
            ),
            "transformers: target.generate(**inputs, assistant_model=assistant)".to_owned(),
            "without trust_remote_code it always drafts the maximum number of candidates"
                .to_owned(),
        ],
    })
}

/// Writes a draft model, its head and the stop settings. Adds what is not exported to `ignored`.
pub(crate) fn write_with_head(
    export: &Exporting<'_>,
    draft: WriteDraft,
    out: &Path,
    ignored: &mut Vec<String>,
) -> Result<RejectionThresholdConfig> {
    let (head, draft) = draft(export.source, &(export.open)()?, out, ignored)?;
    let rule = rule_of(&head, export.stop_threshold, ignored)?;
    write_head(&head, &draft, &rule, out)?;
    let keys = [
        ("num_assistant_tokens", json!(rule.bounds.max)),
        ("num_assistant_tokens_schedule", json!("constant")),
        ("assistant_confidence_threshold", json!(0.0)),
    ];
    write_keys(&out.join("generation_config.json"), keys)?;
    Ok(rule)
}

/// Copies the draft model that the acceptance head in `source` was trained for.
pub(crate) fn drafted_by_head(
    source: &DrafterDir,
    workspace: &Workspace,
    out: &Path,
    _ignored: &mut Vec<String>,
) -> Result<(HeadExport, ModelConfig)> {
    let (id, dir) = workspace.models.draft_dir().context("a head has a draft")?;
    let head = read_model_head(source, id, None, workspace)?;
    copy_model(dir, out)?;
    Ok((head, workspace.models.draft_model_config(id)?.clone()))
}

/// Exports the adapter in `source`, which must have an acceptance head, as a draft model.
pub(crate) fn drafted_by_adapter(
    source: &DrafterDir,
    workspace: &Workspace,
    out: &Path,
    ignored: &mut Vec<String>,
) -> Result<(HeadExport, ModelConfig)> {
    let adapter = AdapterExport::read(source, workspace)?;
    let Some(head) = found_adapter_head(source) else {
        bail!(
            "the adapter in `{}` has no acceptance head; hint: train one with a table `head` of \
             its drafter, or export it with `--for draft-model`",
            source.display()
        );
    };
    let head = adapter.head(&head, workspace)?;
    ignored.extend(vocabulary_ignored(&adapter.config));
    let draft = write_draft_model(&adapter, workspace, out)?;
    Ok((head, draft.config().clone()))
}

/// Copies a checkpoint directory.
fn copy_model(from: &Path, out: &Path) -> Result<()> {
    ensure!(
        !is_gguf(from),
        "`{}` is a GGUF file, and transformers needs a directory; hint: give the draft as a Hugging Face checkpoint",
        from.display()
    );
    let mut names: Vec<String> = weight_files(from)?;
    let beside = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    ];
    names.extend(beside.iter().chain(&TEXT_FILES).map(|name| (*name).to_owned()));
    names.iter().try_for_each(|name| copy_if_there(from, out, name))
}

/// Returns the head's stop rule with the given threshold, or else the tuned threshold, or else the
/// paper's. Adds settings that the export cannot use to `ignored`.
fn rule_of(
    head: &HeadExport,
    given: Option<f64>,
    ignored: &mut Vec<String>,
) -> Result<RejectionThresholdConfig> {
    let StopRuleConfig::RejectionThreshold(default) = StopRuleConfig::by_default(true) else {
        unreachable!("a head's default rule has a threshold")
    };
    let tuned = Tuned::read(&head.dir)?.unwrap_or_default();
    let rules = [DecodingName::Greedy, DecodingName::Sampled].map(|name| tuned.rule(name));
    let mut thresholds = rules.iter().flatten().filter_map(|rule| match &rule.config {
        StopRuleConfig::RejectionThreshold(rule) => Some(*rule),
        _ => None,
    });
    let tuned_for = thresholds.next();
    if let Some(rule) = rules.iter().flatten().next().filter(|_| tuned_for.is_none()) {
        ignored.push(format!(
            "the tuned rule, `{}`, which does not use the head; the exported threshold is {} unless you \
             give `--stop-threshold`",
            rule.config.name().symbol().unwrap_or("K"),
            default.stop_threshold
        ));
    }
    let rule = tuned_for.unwrap_or(default);
    if rule.without_lag {
        ignored.push(
            "deciding before a candidate is drawn: transformers decides after it, as the paper does"
                .to_owned(),
        );
    }
    let stop_threshold = given.unwrap_or(rule.stop_threshold);
    let rule = RejectionThresholdConfig { stop_threshold, ..rule };
    StopRuleConfig::RejectionThreshold(rule).init()?;
    Ok(rule)
}

/// Writes the weights and settings of the acceptance head.
fn write_head(
    head: &HeadExport,
    draft: &ModelConfig,
    rule: &RejectionThresholdConfig,
    out: &Path,
) -> Result<()> {
    head.head.write_weights(&out.join("acceptance_head.safetensors"))?;
    let settings = json!({
        "num_layers": head.config.num_layers,
        "num_stored_blocks": head.config.num_stored_blocks(),
        "form": head.config.reads.form(),
        "inputs": head.config.reads.inputs(),
        "vocab_size": draft.shape.vocab_size,
        "embedding_scale": draft.spec.embedding_scale.unwrap_or(1.0),
        "logit_soft_cap": draft.spec.logit_soft_cap,
        "stop_threshold": rule.stop_threshold,
        "min_candidates": rule.bounds.min,
        "max_candidates": rule.bounds.max,
    });
    Ok(write_json(&out.join("acceptance_head.json"), &settings)?)
}

//! Exports heads and adapters in the formats of the papers' own code.

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_files::write_json;
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, KANGAROO_ROPE_THETA, ModelShape,
    RopeScaling, WeightDtype,
};
use serde_json::json;

use super::{Exporting, Written};
use crate::exports::found_adapter_head;
use crate::exports::tuned::Tuned;
use crate::out_dir::OutDir;

/// Writes an acceptance head in the format that the SpecDec++ authors' Python class loads.
pub(crate) fn specdec_pp(Exporting { source, out, .. }: &Exporting<'_>) -> Result<Written> {
    let config = AcceptanceHeadConfig::from_dir(source)?;
    if !config.is_authors() {
        let why = if config.reads.looks_ahead() {
            "it looks ahead, and the class reads only a candidate's hidden state"
        } else if !config.reads.is_hidden_only() {
            "it has `inputs`, and the class reads only a hidden state"
        } else {
            "its blocks are untied, and the class would keep only the last one"
        };
        bail!(
            "the SpecDec++ authors' class cannot compute the head in `{}`: {why}",
            source.display()
        );
    }
    let (_, head) = AcceptanceHead::from_dir(source, config.hidden_size, &Device::flex())?;
    let dir = OutDir::begin_again(out)?;
    head.write_dir(dir.path(), &config)?;
    // The class accepts only these keys.
    let keys = json!({ "hidden_size": config.hidden_size, "num_layers": config.num_layers });
    write_json(&dir.path().join("config.json"), &keys)?;
    dir.finish()?;
    let tuned = Tuned::read(source)?.unwrap_or_default();
    Ok(Written {
        what: format!(
            "an acceptance head of {} layers for the SpecDec++ authors' class",
            config.num_layers
        ),
        ignored: tuned_sentence(&tuned).into_iter().collect(),
        commands: vec![format!("AcceptancePredictionHead.from_pretrained(\"{}\")", out.display())],
    })
}

/// Writes a trained adapter in the format that the Kangaroo authors' Python class loads.
pub(crate) fn kangaroo(Exporting { source, out, .. }: &Exporting<'_>) -> Result<Written> {
    let config = AdapterConfig::from_dir(*source)?;
    let (exit_layer, model) = (config.exit_layer(), config.model);
    // Reading checks a target's shape. Any target with a layer after the exit will do.
    let target = ModelShape { num_layers: exit_layer + 1, ..model.shape };
    let (config, adapter) = Adapter::from_dir(*source, &target, WeightDtype::F32, &Device::flex())?;
    let dir = OutDir::begin_again(out)?;
    adapter.write_kangaroo(dir.path(), &config)?;
    dir.finish()?;
    let mut ignored = Vec::new();
    if !config.rotates_as_kangaroo() {
        ignored.push(format!(
            "the rotary base: Kangaroo's class always uses {KANGAROO_ROPE_THETA}, but this adapter needs \
             {}{}; change it in the class, or the drafts are useless",
            config.model.spec.rope.theta,
            if config.model.spec.rope.scaling == RopeScaling::None {
                ""
            } else {
                " with scaling"
            }
        ));
    }
    ignored.extend(tuned_sentence(&Tuned::read(source)?.unwrap_or_default()));
    if let Some(head) = found_adapter_head(source) {
        ignored.push(format!("the acceptance head in `{}`", head.display()));
    }
    Ok(Written {
        what: "an adapter for Kangaroo's class".to_owned(),
        ignored,
        commands: vec![format!(
            "--adapter-path {} --exitlayer {}",
            out.display(),
            config.exit_layer()
        )],
    })
}

/// Describes the tuned stop rules, which the authors' formats cannot store. `None` without any.
fn tuned_sentence(tuned: &Tuned) -> Option<String> {
    let rules = [&tuned.greedy, &tuned.sampled];
    let rules: Vec<String> = rules
        .into_iter()
        .flatten()
        .map(|rule| {
            let symbol = rule.config.name().symbol().unwrap_or("K");
            format!("{symbol} = {:.3}", rule.config.parameter())
        })
        .collect();
    (!rules.is_empty())
        .then(|| format!("the tuned rules, {}: set them by hand", rules.join(" and ")))
}

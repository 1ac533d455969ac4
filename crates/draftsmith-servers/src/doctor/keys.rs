//! Finds the keys of a drafter's `config.json` that keep this program from reading it, with what
//! servers do about each.
//!
//! Behaviour was read in the source of vLLM 0.33, SGLang 0.5.23, llama.cpp b11434 and mistral.rs.

use draftsmith_model::ModelError;
use draftsmith_recipe::Kinds;

use super::{FileForm, Finding, Patient, Severity};

/// Finds the keys, and ignores them from here on, so that the rest can be examined.
pub(super) fn examine(patient: &mut Patient<'_>, form: &FileForm) {
    let Some(kind) = form.kind else { return };
    let mut keys = Vec::new();
    while let Some((key, problem)) = refused(patient, kind) {
        patient.dir.ignored_keys.push(key.clone());
        keys.push((key, problem));
    }
    let names: Vec<String> = keys.iter().map(|(key, _)| format!("\"{key}\"")).collect();
    for (key, problem) in &keys {
        let what = problem.split(", which is not").next().unwrap_or_default();
        let what = format!("`{key}` {what}");
        let (name, servers, hint) = advice(problem);
        if let Some(finding) = patient.findings.iter_mut().find(|it| it.name == name) {
            finding.what += &format!("; {what}");
            continue;
        }
        let hint = format!(
            "{hint}; draftsmith does not compute it: `drafters.NAME.ignored_keys = [{}]` in a recipe reads the drafter \
             all the same",
            names.join(", ")
        );
        let severity = Severity::Hurts;
        patient.findings.push(Finding { name, severity, what, servers, hint: hint.into() });
    }
}

/// Returns the first key that the reader of a kind refuses, and its problem; `None` without one.
fn refused(patient: &Patient<'_>, kind: &str) -> Option<(String, String)> {
    let kind = Kinds::default().get(kind)?.in_dir(patient.dir.clone())?;
    let error = kind.origin()?.layers(patient.target.shape.num_layers).err()?;
    match error.downcast().ok()? {
        ModelError::RefusedKey { key, problem, .. } => Some((key, problem)),
        _ => None,
    }
}

/// Returns a finding's name, the servers' behaviour and the remedy.
fn advice(problem: &str) -> (&'static str, &'static str, &'static str) {
    match problem.contains(", but `") {
        true => (
            "contradicting-keys",
            "llama.cpp b11434 takes the value at the top level; others may not",
            "remove the one that is not meant",
        ),
        false => (
            "unknown-key",
            "not known: a server may compute it, ignore it, or refuse the drafter",
            "look the key up in the code of your server",
        ),
    }
}

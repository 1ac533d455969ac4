//! Exports a draft model with its acceptance head as a Python package with a vLLM proposer
//! (drafter).

use std::path::absolute;

use anyhow::{Result, bail};
use draftsmith_files::write_whole;

use super::transformers::{ACCEPTANCE_HEAD, WriteDraft, write_with_head};
use super::{Exporting, Written};
use crate::exports::servers::{quoted, served_path};
use crate::out_dir::OutDir;

/// The Python source of the proposer, with placeholders between `@`s.
const PROPOSER: &str = include_str!("python/proposer.py");

/// The vLLM releases that the proposer supports. vLLM calls its proposer interface unstable.
const VERSIONS: [&str; 2] = ["0.32", "0.33"];

/// The packages that the proposer imports. An export with one of these names would shadow the
/// import.
const IMPORTED: [&str; 9] =
    ["vllm", "torch", "safetensors", "json", "math", "bisect", "dataclasses", "pathlib", "typing"];

/// Explains why a directory's name cannot be a Python package name. `None` if it can.
fn package_problem(name: &str) -> Option<String> {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    if !name.starts_with(is_letter) {
        return Some("cannot name a Python package: it must begin with a letter".to_owned());
    }
    if !name.chars().all(|c| is_letter(c) || c.is_ascii_digit()) {
        let hint = "use only letters, digits and underscores";
        return Some(format!("cannot name a Python package; hint: {hint}"));
    }
    IMPORTED.contains(&name).then(|| {
        format!("would hide the Python package `{name}`; hint: choose another name for it")
    })
}

/// Exports the package for a draft model, which `draft` writes, and its acceptance head.
pub(crate) fn export(export: &Exporting<'_>, draft: WriteDraft) -> Result<Written> {
    let package = export.out.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(problem) = package_problem(&package) {
        bail!("`{package}`, the name of the directory to write, {problem}");
    }
    let dir = OutDir::begin_again(export.out)?;
    let mut ignored = Vec::new();
    let rule = write_with_head(export, draft, dir.path(), &mut ignored)?;
    let versions = VERSIONS.map(|version| format!("\"{version}\"")).join(", ");
    let proposer = PROPOSER
        .replace("@VERSIONS@", &VERSIONS.join(" and "))
        .replace("@VERSION_TUPLE@", &versions)
        .replace("@PACKAGE@", &package)
        .replace("@MOST@", &rule.bounds.max.to_string());
    write_whole(&dir.path().join("__init__.py"), proposer)?;
    write_whole(&dir.path().join("acceptance_head.py"), ACCEPTANCE_HEAD)?;
    dir.finish()?;
    ignored.push(
        "sampled drafts: vLLM verifies such proposals as certain, so candidates are the draft's most \
         probable tokens; train heads for it on greedy labels"
            .to_owned(),
    );
    Ok(Written {
        what: format!(
            "a proposer for vLLM {} that stops when its head's rejection probability exceeds {}",
            VERSIONS.join(" and "),
            rule.stop_threshold
        ),
        ignored,
        commands: vec![format!(
            "PYTHONPATH={} vllm serve {} --speculative-config '{{\"method\": \"custom_class\", \
             \"model\": \"{package}.Proposer\", \"num_speculative_tokens\": {}}}'",
            quoted(&served_path(absolute(export.out)?.parent().unwrap_or(export.out), true)),
            quoted(&served_path((export.open)()?.models.target_dir(), false)),
            rule.bounds.max
        )],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_has_a_name_of_its_own_that_python_can_import() {
        assert_eq!(package_problem("my_draft2"), None);
        let refused = [("1abc", "begin with a letter"), ("a-b", "underscores"), ("vllm", "hide")];
        for (name, expected) in refused {
            let problem = package_problem(name).expect(name);
            assert!(problem.contains(expected), "{problem}");
        }
    }
}

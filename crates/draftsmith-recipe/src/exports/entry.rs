//! What a training writes into a directory: how it is recognised, shown and written for other programs.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Map, Value};

use super::forms::ExportForm;
use super::{forms, inspected};

/// Something that a training writes: a head, or the drafters of a kind.
#[derive(Debug)]
pub struct ExportEntry {
    /// Names it in words, as in `self-draft adapter`.
    pub text: &'static str,
    /// The key of `config.json` by which readers know it, for messages.
    pub known_by: &'static str,
    /// Recognises the keys of its `config.json`.
    pub is_of: fn(&Map<String, Value>) -> bool,
    /// The command that trains it; `None` if this program does not.
    pub command: Option<&'static str>,
    /// The forms in which `export` writes it.
    pub forms: &'static [ExportForm],
    /// Describes the directory as a JSON document.
    pub inspect: fn(&Path) -> Result<Value>,
}

/// An acceptance head, which belongs to a drafter of any kind.
pub static HEAD: ExportEntry = ExportEntry {
    text: "acceptance head",
    known_by: "num_layers",
    is_of: |keys| keys.contains_key("num_layers") && !keys.contains_key("vocab_size"),
    command: Some("train-head"),
    forms: &[
        ExportForm::stopping("transformers", forms::transformers::of_head),
        ExportForm::stopping("vllm", forms::vllm::of_head),
        ExportForm::new("specdec-pp", forms::foreign::specdec_pp),
    ],
    inspect: inspected::head,
};

impl ExportEntry {
    /// Checks that `dir` contains such an export.
    ///
    /// # Errors
    /// If it has no `config.json`.
    pub fn need(&self, dir: &Path) -> Result<()> {
        if dir.join("config.json").is_file() {
            return Ok(());
        }
        let hint = match self.command {
            Some(command) => {
                format!(
                    "run `draftsmith {command}` with this recipe first, or name a trained one with `path`"
                )
            }
            None => "name a directory that has one".to_owned(),
        };
        bail!(
            "there is no {} in `{}`, which has no `config.json`; hint: {hint}",
            self.text,
            dir.display()
        )
    }

    /// Finds the form with this name.
    ///
    /// # Errors
    /// If the export has no such form; the message lists those that it has.
    pub fn form(&self, name: &str, dir: &Path) -> Result<&'static ExportForm> {
        if let Some(form) = self.forms.iter().find(|form| form.name == name) {
            return Ok(form);
        }
        let known: Vec<String> =
            self.forms.iter().map(|form| format!("`--for {}`", form.name)).collect();
        let hint = match known.is_empty() {
            true => "servers load it as it is".to_owned(),
            false => format!("it has {}", known.join(", ")),
        };
        bail!("`{name}` does not support the {} in `{}`; hint: {hint}", self.text, dir.display())
    }
}

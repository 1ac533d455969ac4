//! Describes the kinds of directories that training writes: how each is recognised, shown and
//! exported for other programs.

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Map, Value};

use super::forms::ExportForm;
use super::forms::transformers::{self, drafted_by_head};
use super::{forms, inspected};

/// A kind of export that training writes: an acceptance head, or a drafter of one kind.
#[derive(Debug)]
pub struct ExportEntry {
    /// The export's name in messages, such as `self-draft adapter`.
    pub text: &'static str,
    /// The key of the settings that names the export's directory.
    pub key: &'static str,
    /// The key of `config.json` that identifies this kind of export, for messages.
    pub known_by: &'static str,
    /// A function that returns whether the keys of a `config.json` belong to this kind of export.
    pub is_of: fn(&Map<String, Value>) -> bool,
    /// The command that trains such an export; `None` if this program cannot train it.
    pub command: Option<&'static str>,
    /// The formats that `export --for` can write.
    pub forms: &'static [ExportForm],
    /// A function that describes the export in a directory as a JSON document.
    pub inspect: fn(&Path) -> Result<Value>,
}

/// The entry for acceptance heads, which belong to drafters of any kind.
pub static HEAD: ExportEntry = ExportEntry {
    text: "acceptance head",
    key: "path",
    known_by: "num_layers",
    is_of: |keys| keys.contains_key("num_layers") && !keys.contains_key("vocab_size"),
    command: Some("train-head"),
    forms: &[
        ExportForm::stopping("transformers", |it| transformers::export(it, drafted_by_head)),
        ExportForm::stopping("vllm", |it| forms::vllm::export(it, drafted_by_head)),
        ExportForm::new("specdec-pp", forms::foreign::specdec_pp),
    ],
    inspect: inspected::head,
};

impl ExportEntry {
    /// Checks that `dir` contains an export of this kind.
    ///
    /// # Errors
    /// If `dir` has no `config.json`.
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

    /// Finds the export format with this name.
    ///
    /// # Errors
    /// If this kind of export has no such format. The message lists the available ones.
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

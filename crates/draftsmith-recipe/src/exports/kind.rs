//! Kinds of exports.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_files::parse_json;
use draftsmith_model::Eagle3Config;
use serde_json::{Map, Value};

/// A kind of export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportKind {
    /// An acceptance head for a separate draft.
    Head,
    /// A self-draft adapter.
    Adapter,
    /// An EAGLE-3 drafter.
    Eagle3,
}

impl ExportKind {
    /// Recognises the kind of the export in a directory by the keys of its `config.json`.
    ///
    /// # Errors
    /// If it is neither a head nor a self-draft.
    pub fn of(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        if !path.is_file() {
            bail!(
                "there is no head or adapter in `{}`: it has no `config.json`; hint: give a \
                 directory that `draftsmith train-head` or `draftsmith train-adapter` wrote",
                dir.display()
            );
        }
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let config: Map<String, Value> = parse_json(&path, &bytes)?;
        if Eagle3Config::is_of(&config) {
            Ok(Self::Eagle3)
        } else if config.contains_key("exit_layer") {
            Ok(Self::Adapter)
        } else if config.contains_key("num_layers") && !config.contains_key("vocab_size") {
            Ok(Self::Head)
        } else {
            bail!(
                "`{}` is neither a head's, with `num_layers`, nor an adapter's, with `exit_layer`, nor an EAGLE-3 \
                 drafter's, with `draft_vocab_size`",
                path.display()
            )
        }
    }

    /// Checks that the directory given by a flag does not hold an export of another kind. Anything else is left
    /// to the reader of this kind.
    ///
    /// # Errors
    /// If it holds another kind.
    pub fn check(self, flag: &str, dir: &Path) -> Result<()> {
        let Ok(found) = Self::of(dir) else { return Ok(()) };
        let hint = match found {
            found if found == self => return Ok(()),
            Self::Head => "give it with `--head`, beside the draft it was trained for",
            Self::Adapter => "give it with `--adapter`, without a draft",
            Self::Eagle3 => "give a recipe with a drafter of the kind `eagle3`, and its `path`",
        };
        bail!(
            "`{flag} {}`: expected an export of the kind {}, found one of the kind {}; hint: {hint}",
            dir.display(),
            self.text(),
            found.text()
        )
    }

    /// Names the kind in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Head => "acceptance head",
            Self::Adapter => "self-draft adapter",
            Self::Eagle3 => "EAGLE-3 drafter",
        }
    }
}

//! What an export's directory holds.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_files::parse_json;
use serde_json::{Map, Value};

use crate::recipe::Recipe;

/// What training exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExportKind {
    /// An acceptance head for a separate draft.
    Head,
    /// A self-draft adapter.
    Adapter,
}

impl ExportKind {
    /// What a directory holds, by the keys of its `config.json`.
    ///
    /// # Errors
    /// If that is neither a head nor an adapter.
    pub(crate) fn of(dir: &Path) -> Result<Self> {
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
        if config.contains_key("exit_layer") {
            Ok(Self::Adapter)
        } else if config.contains_key("num_layers") && !config.contains_key("vocab_size") {
            Ok(Self::Head)
        } else {
            bail!(
                "`{}` is neither a head's, with `num_layers`, nor an adapter's, with `exit_layer`",
                path.display()
            )
        }
    }

    /// Checks that what a flag names is no export of the other kind. What is neither is for its
    /// reader to refuse.
    ///
    /// # Errors
    /// If it is.
    pub(crate) fn check(self, flag: &str, dir: &Path) -> Result<()> {
        let Ok(found) = Self::of(dir) else { return Ok(()) };
        let hint = match found {
            found if found == self => return Ok(()),
            Self::Head => "give it with `--head`, beside the draft it was trained for",
            Self::Adapter => "give it with `--adapter`, without a draft",
        };
        bail!(
            "`{flag} {}`: expected an export of the kind {}, found one of the kind {}; hint: {hint}",
            dir.display(),
            self.text(),
            found.text()
        )
    }

    /// The draft that an export of this kind is for, where it has one.
    ///
    /// # Errors
    /// If the recipe names none for a head.
    pub(crate) fn draft_in(self, recipe: &Recipe) -> Result<Option<&Path>> {
        match self {
            Self::Head => recipe.need_draft("an acceptance head").map(Some),
            Self::Adapter => Ok(None),
        }
    }

    /// The kind in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Head => "acceptance head",
            Self::Adapter => "self-draft adapter",
        }
    }
}

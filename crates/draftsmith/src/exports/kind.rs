//! Kinds of exports.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_files::parse_json;
use serde_json::{Map, Value};

use crate::recipe::Recipe;

/// A kind of export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExportKind {
    /// An acceptance head for a separate draft.
    Head,
    /// A self-draft adapter.
    Adapter,
}

impl ExportKind {
    /// The kind of the export in a directory, by the keys of its `config.json`.
    ///
    /// # Errors
    /// If it is neither a head nor an adapter.
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

    /// Checks that the directory given by a flag does not hold an export of the other kind. Anything else
    /// is left to the reader of this kind.
    ///
    /// # Errors
    /// If it holds the other kind.
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

    /// The recipe's draft, for kinds that need one.
    ///
    /// # Errors
    /// If a head needs a draft and the recipe has none.
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

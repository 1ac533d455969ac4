//! The table of drafter kinds, with one entry per kind.
//!
//! An entry gives the kind's name in recipes, reads its settings, and describes its exports. A
//! program adds kinds with [`Kinds::with`]. Only a kind's own file checks which kind a drafter has.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::parse_toml;
use draftsmith_model::DrafterDir;
use draftsmith_theory::DrafterId;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::origin::given_dir;
use super::{
    DrafterKind, DrafterRecipe, Kind, adapter, block, cascade, eagle, eagle3, medusa, merged,
    model, prompt_lookup,
};
use crate::exports::config_keys::read_keys;
use crate::exports::{ExportEntry, HEAD};
use crate::workspace::check_merged;

/// The definition of a kind of drafter.
#[derive(Debug)]
pub struct KindEntry {
    /// The kind's name in recipes.
    pub name: &'static str,
    /// A function that reads a drafter's settings, without the keys that all kinds share.
    pub read: fn(toml::Table) -> Result<Kind, String>,
    /// The export that a directory of this kind contains; `None` for a kind without files.
    pub export: Option<ExportEntry>,
}

impl KindEntry {
    /// Returns whether this program can train drafters of this kind.
    pub fn is_trained(&self) -> bool {
        self.export.as_ref().is_some_and(|export| export.command.is_some())
    }

    /// Checks that a directory contains a drafter of this kind.
    ///
    /// # Errors
    /// If the directory has no `config.json`.
    pub fn need(&self, dir: &Path) -> Result<()> {
        self.export.iter().try_for_each(|export| export.need(dir))
    }

    /// Creates the settings of a drafter in `dir`, without reading it; `None` for a kind without
    /// files.
    pub fn in_dir(&self, dir: impl Into<DrafterDir>) -> Option<Kind> {
        (self.read)(given_dir(self.export.as_ref()?.key, dir.into())).ok()
    }
}

/// Parses settings of the type `T`, for [`KindEntry::read`].
///
/// # Errors
/// If a key is unknown or has an invalid value. The message names the key.
pub fn read_kind<T: DrafterKind + DeserializeOwned>(keys: toml::Table) -> Result<Kind, String> {
    Ok(Arc::new(parse_toml::<T>(keys)?))
}

/// Settings that serialise to a table, as those of every kind do.
pub trait KindSettings {
    /// Returns the settings as a TOML table, without the key `kind`.
    ///
    /// # Panics
    /// If the settings do not serialise to a table.
    fn table(&self) -> toml::Table;
}

impl<T: Serialize> KindSettings for T {
    fn table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("settings are a table of TOML")
    }
}

/// A drafter or acceptance head found in a directory.
#[derive(Debug, Clone, Copy)]
pub struct FoundExport {
    /// The kind of export.
    pub export: &'static ExportEntry,
    /// The kind of drafter; `None` for an acceptance head.
    pub kind: Option<&'static KindEntry>,
}

/// The kinds of drafters that a program supports.
#[derive(Debug, Clone)]
pub struct Kinds(Vec<&'static KindEntry>);

impl Default for Kinds {
    fn default() -> Self {
        Self(vec![
            &model::ENTRY,
            &adapter::ENTRY,
            &eagle3::ENTRY,
            &eagle::ENTRY,
            &block::ENTRY,
            &medusa::ENTRY,
            &prompt_lookup::ENTRY,
            &cascade::ENTRY,
            &merged::ENTRY,
        ])
    }
}

impl Kinds {
    /// Adds a kind before the built-in kinds.
    #[must_use]
    pub fn with(mut self, kind: &'static KindEntry) -> Self {
        self.0.insert(0, kind);
        self
    }

    /// Iterates over the kinds.
    pub fn iter(&self) -> impl Iterator<Item = &'static KindEntry> {
        self.0.iter().copied()
    }

    /// Returns the kind with this name; `None` if it is unknown.
    pub fn get(&self, name: &str) -> Option<&'static KindEntry> {
        self.iter().find(|kind| kind.name == name)
    }

    /// Reads a drafter's settings, whose key `kind` names its kind.
    ///
    /// # Errors
    /// If the kind is missing or unknown, or a key is invalid.
    pub fn read(&self, mut table: toml::Table) -> Result<Kind, String> {
        let known = || {
            let names = self.iter().map(|kind| format!("`{}`", kind.name));
            names.collect::<Vec<_>>().join(", ")
        };
        match table.remove("kind") {
            None => Err(format!("it has no `kind`, expected one of {}", known())),
            Some(kind) => match kind.as_str().and_then(|name| self.get(name)) {
                Some(entry) => (entry.read)(table),
                None => Err(format!("unknown `kind` {kind}, expected one of {}", known())),
            },
        }
    }

    /// Removes the drafters of added kinds from a recipe's table, and returns them with their
    /// indices in it. The parser of the table knows only built-in kinds.
    ///
    /// # Errors
    /// If a drafter's settings are invalid. The message names its table.
    pub(crate) fn take_added(
        &self,
        drafters: &mut toml::Table,
    ) -> Result<Vec<(usize, DrafterId, DrafterRecipe)>> {
        let known = Self::default();
        let is_added = |table: &toml::Value| {
            let name = table.get("kind").and_then(toml::Value::as_str);
            name.is_some_and(|name| known.get(name).is_none() && self.get(name).is_some())
        };
        let places = drafters.iter().enumerate().filter(|(_, (_, table))| is_added(table));
        let places: Vec<(usize, String)> =
            places.map(|(place, (name, _))| (place, name.clone())).collect();
        let mut added = Vec::new();
        for (place, name) in places {
            let Some(toml::Value::Table(table)) = drafters.remove(&name) else { continue };
            let drafter = DrafterRecipe::read(table, self).map_err(anyhow::Error::msg);
            let drafter = drafter.with_context(|| format!("section `[drafters.{name}]`"))?;
            added.push((place, name.parse()?, drafter));
        }
        Ok(added)
    }

    /// Identifies the drafter or acceptance head in a directory by the keys of its `config.json`.
    ///
    /// # Errors
    /// If the directory contains neither.
    pub fn found_in(&self, dir: &Path) -> Result<FoundExport> {
        self.find(dir, |_| true)
    }

    /// Identifies the trained drafter or acceptance head in a directory by its `config.json`.
    ///
    /// # Errors
    /// If the directory contains neither, or a drafter that this program does not train.
    pub fn trained_in(&self, dir: &Path) -> Result<FoundExport> {
        self.find(dir, |export| export.command.is_some())
    }

    fn find(&self, dir: &Path, is_wanted: impl Fn(&ExportEntry) -> bool) -> Result<FoundExport> {
        check_merged("drafter", dir)?;
        let path = dir.join("config.json");
        ensure!(
            path.is_file(),
            "there is no head or drafter in `{}`: it has no `config.json`; hint: give a \
             directory that `draftsmith train-head` or `draftsmith train-drafter` wrote",
            dir.display()
        );
        let keys = read_keys(&path)?;
        let of_kinds = self.iter().filter_map(|kind| Some((kind.export.as_ref()?, Some(kind))));
        let (trained, models): (Vec<_>, Vec<_>) =
            of_kinds.partition(|(export, _)| export.command.is_some());
        // A model has all keys of a drafter of the same architecture, so models are tried last.
        let all = trained.into_iter().chain([(&HEAD, None)]).chain(models);
        let all: Vec<(&'static ExportEntry, Option<&'static KindEntry>)> =
            all.filter(|(export, _)| is_wanted(export)).collect();
        match all.iter().find(|(export, _)| (export.is_of)(&keys)) {
            Some((export, kind)) => Ok(FoundExport { export, kind: *kind }),
            None => {
                let known = all
                    .iter()
                    .map(|(export, _)| format!("{} (`{}`)", export.text, export.known_by));
                let known = known.collect::<Vec<_>>().join(", ");
                bail!("`{}` is of nothing known here: {known}", path.display())
            }
        }
    }
}

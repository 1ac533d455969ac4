//! Drafters that were read: their parts, their heads, and what tuning, costs and reports need to know.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_decode::NamedParts;
use draftsmith_model::CausalLm;
use draftsmith_theory::DrafterId;
use draftsmith_theory::{DrafterName, ModelSummary};

use super::{DrafterRecipe, DrafterRecipes, names_text};
use crate::exports::{HEAD, HeadExport, describe_head, found_adapter_head};
use crate::watch::Silent;
use crate::workspace::{Workspace, hash_dir};

/// What a drafter is read from.
#[derive(Clone)]
pub struct Loading<'a> {
    /// The drafter's name.
    pub id: DrafterId,
    /// The drafters of its recipe.
    pub drafters: &'a DrafterRecipes,
    /// The directory in which their exports lie, unless the recipe names another.
    pub home: PathBuf,
    /// The models at hand.
    pub workspace: &'a Workspace,
}

/// A drafter that was read.
pub struct LoadedDrafter {
    /// What sessions are built from.
    pub parts: NamedParts,
    /// Its acceptance head.
    pub head: Option<HeadExport>,
    /// The directory of its own export, if it is trained.
    pub dir: Option<PathBuf>,
    /// The parameters that a forward reads, by the drafter that it is counted for; 0 for look-ups.
    pub sizes: Vec<(DrafterId, f64)>,
}

impl LoadedDrafter {
    /// The drafter's name.
    pub fn id(&self) -> DrafterId {
        self.parts.id
    }

    /// Returns the directory whose `config.json` holds the tuned rule: the head's, or the drafter's own without
    /// a head. `None` if it has neither.
    pub fn tuned_dir(&self) -> Option<&Path> {
        let head = self.head.as_ref().map(|head| &*head.dir);
        head.or(self.dir.as_deref())
    }
}

impl<'a> Loading<'a> {
    /// Returns a copy for loading another drafter of the recipe.
    pub fn of(&self, id: DrafterId) -> Self {
        Self { id, ..self.clone() }
    }

    /// Returns the drafter's settings in the recipe.
    pub fn drafter(&self) -> &'a DrafterRecipe {
        self.drafters.get(self.id).expect("members were checked with the recipe")
    }

    /// Returns the directory of what the drafter's training exports.
    pub fn export_dir(&self) -> PathBuf {
        self.drafters.export_dir(&self.home, self.id)
    }

    /// Loads another drafter, as a part of this one.
    pub fn member(&self, id: DrafterId) -> Result<LoadedDrafter> {
        let loading = self.of(id);
        loading.drafter().kind.load(&loading)
    }

    /// Finds the directory of the drafter's head; `None` if it has none. A head that the recipe names or trains
    /// must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn head_dir(&self) -> Result<Option<PathBuf>> {
        let dir = self.drafters.head_dir(&self.home, self.id);
        if let Some(dir) = &dir {
            HEAD.need(dir)?;
            return Ok(Some(dir.clone()));
        }
        // An adapter that was trained elsewhere may have brought one along.
        Ok(self.drafter().kind.path().and_then(found_adapter_head))
    }

    /// Summarises a head for a report.
    pub(super) fn head_summary(&self, head: &HeadExport) -> Result<ModelSummary> {
        self.dir_summary(&format!("head of {}", self.id), &head.dir, describe_head(&head.config))
    }

    /// Summarises an export for a report, with a hash of its weights and `config.json`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn dir_summary(&self, role: &str, dir: &Path, description: String) -> Result<ModelSummary> {
        let (role, name) = (role.to_owned(), dir.display().to_string());
        Ok(ModelSummary { role, name, description, hash: hash_dir(dir, &Silent)? })
    }

    /// Summarises a drafter without files for a report.
    pub fn plain_summary(&self, description: String) -> ModelSummary {
        let (role, name) = (self.id.to_string(), self.drafter().kind.text());
        ModelSummary { role, name, description, hash: String::new() }
    }
}

/// Drafters that were read.
#[derive(Default)]
pub struct LoadedDrafters(pub Vec<LoadedDrafter>);

impl LoadedDrafters {
    /// Wraps a draft model in memory, with its head, as the only drafter, [`DrafterId::DRAFT`].
    pub fn of_model(model: &CausalLm, head: Option<HeadExport>) -> Self {
        Self(vec![LoadedDrafter::of_model(DrafterId::DRAFT, model, head)])
    }

    /// Iterates over the drafters, in the order of the recipe.
    pub fn iter(&self) -> impl Iterator<Item = &LoadedDrafter> {
        self.0.iter()
    }

    /// Finds the drafter with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, id: DrafterId) -> Result<&LoadedDrafter> {
        let found = self.iter().find(|drafter| drafter.id() == id);
        found.with_context(|| format!("there is no drafter `{id}` to run"))
    }

    /// Returns the directory whose `config.json` holds a drafter's tuned rule; `None` for drafters that are not
    /// tuned.
    pub fn export_of(&self, drafter: DrafterName) -> Option<PathBuf> {
        let DrafterName::Of(id) = drafter else { return None };
        self.get(id).ok()?.tuned_dir().map(Path::to_path_buf)
    }
}

/// Checks that the drafter asked for is one that the recipe has. Messages call such drafters `what`.
///
/// # Errors
/// If it is not.
pub fn check_known(known: &[DrafterId], asked: DrafterId, what: &str) -> Result<()> {
    if known.contains(&asked) {
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { names_text(known) };
    bail!("the recipe has no {what} `{asked}`; hint: it has {known}")
}

//! Loaded drafters with their heads, and what tuning, costs and reports need to know about them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{DrafterParts, NamedParts};
use draftsmith_model::{CausalLm, DrafterDir};
use draftsmith_theory::{DrafterId, DrafterName, HeadTiming, ModelSummary, StoredAnswers};

use super::{DrafterRecipe, DrafterRecipes, names_text};
use crate::exports::{HEAD, HeadExport, describe_head, found_adapter_head};
use crate::watch::Silent;
use crate::workspace::{Workspace, hash_dir};

/// Everything that is needed to load a drafter.
#[derive(Clone)]
pub struct Loading<'a> {
    /// The drafter's name.
    pub id: DrafterId,
    /// All drafters of the recipe.
    pub drafters: &'a DrafterRecipes,
    /// The directory that contains the drafters' exports, unless the recipe names another.
    pub home: PathBuf,
    /// The models in use.
    pub workspace: &'a Workspace,
}

/// A loaded drafter.
pub struct LoadedDrafter {
    /// The drafter's parts, from which decoding sessions are built.
    pub parts: NamedParts,
    /// The drafter's acceptance head; `None` if it has none.
    pub head: Option<HeadExport>,
    /// The directory of the drafter's export; `None` if it is not trained.
    pub dir: Option<PathBuf>,
    /// The directory for the rule that the recipe tunes, if the drafter's own directory is not the
    /// recipe's to write.
    pub rule_dir: Option<PathBuf>,
    /// The sizes of the drafter, or of those that it consists of.
    pub sizes: Vec<DrafterSize>,
}

/// The size of a drafter in parameters; 0 for prompt lookup.
#[derive(Clone, Copy)]
pub struct DrafterSize {
    /// The drafter.
    pub id: DrafterId,
    /// The number of parameters that one forward reads, including those of the target.
    pub num_read: usize,
    /// The number of parameters of its own.
    pub num_own: usize,
}

impl LoadedDrafter {
    /// Assembles a drafter that consists of others, and has no head of its own.
    pub(super) fn of_members(
        id: DrafterId,
        parts: impl DrafterParts + 'static,
        members: Vec<Self>,
    ) -> Self {
        let parts = NamedParts { id, parts: Arc::new(parts) };
        let sizes = members.into_iter().flat_map(|member| member.sizes).collect();
        Self { parts, head: None, dir: None, rule_dir: None, sizes }
    }

    /// Returns the drafter's name.
    pub fn id(&self) -> DrafterId {
        self.parts.id
    }

    /// Returns when the drafter's acceptance head predicts: the head beside it, or one that is a part
    /// of its own network. `None` without a head.
    pub fn head_timing(&self) -> Option<HeadTiming> {
        let beside = self.head.as_ref().map(|head| head.config.reads.looks_ahead());
        let beside = beside.map(HeadTiming::of_reader);
        beside.or(self.parts.parts.own_head())
    }

    /// Returns the directory whose `config.json` stores the tuned rule: the recipe's own, if it
    /// tuned a drafter of others, or else the head's, or the drafter's. `None` without one.
    pub fn tuned_dir(&self) -> Option<&Path> {
        let own = self.rule_dir.as_deref().filter(|dir| dir.join("config.json").is_file());
        own.or(self.export_dir())
    }

    /// Returns the head's directory, or the drafter's if it has no head. `None` if it has neither.
    fn export_dir(&self) -> Option<&Path> {
        let head = self.head.as_ref().map(|head| &*head.dir);
        head.or(self.dir.as_deref())
    }

    /// Sends tuned rules to the recipe's directory `tuning_dir`, unless the drafter is one of the
    /// recipe's own exports, which are in `checkpoint_dir`.
    pub(crate) fn tuned_by(&mut self, checkpoint_dir: &Path, tuning_dir: &Path) {
        if self.export_dir().is_some_and(|dir| !dir.starts_with(checkpoint_dir)) {
            self.rule_dir = Some(tuning_dir.join(self.id().as_str()));
        }
    }
}

impl<'a> Loading<'a> {
    /// Returns a copy of these arguments for loading another drafter of the recipe.
    pub fn of(&self, id: DrafterId) -> Self {
        Self { id, ..self.clone() }
    }

    /// Returns the drafter's settings in the recipe.
    pub fn drafter(&self) -> &'a DrafterRecipe {
        self.drafters.get(self.id).expect("members were checked with the recipe")
    }

    /// Returns the directory of the drafter's export, with the keys that the recipe ignores in it.
    pub fn export_dir(&self) -> DrafterDir {
        let given = self.drafters.get(self.id).and_then(|it| it.kind.path());
        given.cloned().unwrap_or_else(|| self.drafters.export_dir(&self.home, self.id).into())
    }

    /// Loads the drafter, and tells the keys that the recipe ignores.
    ///
    /// # Errors
    /// If a file is missing or invalid, or was trained for other models.
    pub fn load(&self) -> Result<LoadedDrafter> {
        if let Some(text) = self.export_dir().ignored_text() {
            self.workspace.artifacts.watch.note(format!("drafter `{}`: {text}", self.id));
        }
        self.drafter().kind.load(self)
    }

    /// Loads other drafters that are parts of this one.
    pub(super) fn members(&self, ids: &[DrafterId]) -> Result<Vec<LoadedDrafter>> {
        ids.iter().map(|id| self.of(*id).load()).collect()
    }

    /// Returns the directory of the drafter's acceptance head; `None` if it has none. If the recipe
    /// names or trains a head, it must exist.
    ///
    /// # Errors
    /// If such a head is missing.
    pub fn head_dir(&self) -> Result<Option<PathBuf>> {
        if let Some(dir) = self.drafters.head_dir(&self.home, self.id) {
            HEAD.need(&dir)?;
            return Ok(Some(dir));
        }
        // An adapter that was trained elsewhere may include an acceptance head.
        Ok(self.drafter().kind.path().and_then(|dir| found_adapter_head(dir)))
    }

    /// Summarises an acceptance head for a report.
    pub(super) fn head_summary(&self, head: &HeadExport) -> Result<ModelSummary> {
        self.dir_summary(&format!("head of {}", self.id), &head.dir, describe_head(&head.config))
    }

    /// Summarises an export for a report, with a hash of its weights and `config.json`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn dir_summary(&self, role: &str, dir: &Path, description: String) -> Result<ModelSummary> {
        let (role, name, own) = (role.to_owned(), dir.display().to_string(), self.export_dir());
        let ignored = own.ignored_text().filter(|_| *own == *dir);
        let description =
            description + &ignored.map(|text| format!(", {text}")).unwrap_or_default();
        Ok(ModelSummary { role, name, description, hash: hash_dir(dir, &Silent)? })
    }

    /// Summarises a drafter without files for a report.
    pub fn plain_summary(&self, description: String) -> ModelSummary {
        let (role, name) = (self.id.to_string(), self.drafter().kind.text());
        ModelSummary { role, name, description, hash: String::new() }
    }
}

/// The loaded drafters of a recipe, in its order.
#[derive(Default)]
pub struct LoadedDrafters {
    /// The drafters.
    pub all: Vec<LoadedDrafter>,
    /// The stored answers that look-ups before a drafter search; `None` without any.
    pub answers: Option<Arc<StoredAnswers>>,
}

impl LoadedDrafters {
    /// Wraps a draft model in memory, with its head, as the only drafter [`DrafterId::DRAFT`].
    pub fn of_model(model: &CausalLm, head: Option<HeadExport>) -> Self {
        let all = vec![LoadedDrafter::of_model(DrafterId::DRAFT, model, head)];
        Self { all, answers: None }
    }

    /// Iterates over the drafters, in the order of the recipe.
    pub fn iter(&self) -> impl Iterator<Item = &LoadedDrafter> {
        self.all.iter()
    }

    /// Returns the drafter with this name.
    ///
    /// # Errors
    /// If there is no such drafter.
    pub fn get(&self, id: DrafterId) -> Result<&LoadedDrafter> {
        let found = self.iter().find(|drafter| drafter.id() == id);
        found.with_context(|| format!("there is no drafter `{id}` to run"))
    }

    /// Returns the directory into whose `config.json` a drafter's tuned rule is written. `None` for
    /// drafters that are not tuned.
    pub fn tuned_into(&self, drafter: DrafterName) -> Option<PathBuf> {
        let DrafterName::Of(id) = drafter else { return None };
        let drafter = self.get(id).ok()?;
        drafter.rule_dir.as_deref().or(drafter.export_dir()).map(Path::to_path_buf)
    }
}

/// Checks that the recipe has the requested drafter. Messages call the drafter `what`.
///
/// # Errors
/// If the recipe does not have it.
pub fn check_known(known: &[DrafterId], asked: DrafterId, what: &str) -> Result<()> {
    if known.contains(&asked) {
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { names_text(known) };
    bail!("the recipe has no {what} `{asked}`; hint: it has {known}")
}

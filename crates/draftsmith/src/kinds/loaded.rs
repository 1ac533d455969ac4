//! Drafters that were read: their parts, their heads, and what tuning, costs and reports need to know.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_decode::NamedParts;
use draftsmith_model::{CausalLm, ModelConfig};
use draftsmith_theory::DrafterId;

use super::{DrafterRecipe, Role, head_within};
use crate::console::Console;
use crate::exports::{
    AdapterExport, ExportKind, HeadExport, describe_head, need_export, summary_of,
};
use crate::recipe::Recipe;
use crate::workspace::{Workspace, hash_dir};
use draftsmith_report::{DrafterName, ModelSummary, Road};

/// What a drafter is read from.
#[derive(Clone, Copy)]
pub(crate) struct Loading<'a> {
    /// The drafter's name.
    pub(crate) id: DrafterId,
    /// The recipe that names it.
    pub(crate) recipe: &'a Recipe,
    /// The models at hand.
    pub(crate) workspace: &'a Workspace,
}

/// A drafter that was read.
pub(crate) struct LoadedDrafter {
    /// What sessions are built from.
    pub(crate) parts: NamedParts,
    /// What reports compare it by.
    pub(crate) road: Road,
    /// Its acceptance head.
    pub(crate) head: Option<HeadExport>,
    /// Its adapter, which runtimes may load as a draft model.
    pub(crate) adapter: Option<Arc<AdapterExport>>,
    /// Whether runtimes load it as a draft model as it is.
    pub(crate) is_draft_model: bool,
    /// Whether it drafts step by step, so that it is recorded and tuned.
    pub(crate) has_steps: bool,
    /// The hash of its weights; empty without.
    pub(crate) hash: String,
    /// The parameters that one of its forwards reads; 0 for look-ups.
    pub(crate) num_read: f64,
    /// The same for the drafters that it is made of, whose forwards are counted instead of its own.
    pub(crate) sizes_of_members: Vec<(DrafterId, f64)>,
    /// What a report says about its files.
    pub(crate) summaries: Vec<ModelSummary>,
}

impl LoadedDrafter {
    /// A drafter without weights. The caller replaces the parts.
    pub(super) fn new(id: DrafterId, head: Option<HeadExport>) -> Self {
        let parts = Arc::new(draftsmith_decode::LookUpParts {
            config: draftsmith_theory::MaxGramConfig::default(),
            bigrams: None,
        });
        Self {
            parts: NamedParts { id, parts },
            road: Road::SeparateDraft,
            head,
            adapter: None,
            is_draft_model: false,
            has_steps: false,
            hash: String::new(),
            num_read: 0.0,
            sizes_of_members: Vec::new(),
            summaries: Vec::new(),
        }
    }

    /// The drafter's name.
    pub(crate) fn id(&self) -> DrafterId {
        self.parts.id
    }

    /// The parameters that forwards read, by the drafter that they are counted for.
    pub(crate) fn sizes(&self) -> Vec<(DrafterId, f64)> {
        match self.sizes_of_members.is_empty() {
            true => vec![(self.id(), self.num_read)],
            false => self.sizes_of_members.clone(),
        }
    }

    /// The directory whose `config.json` holds the tuned rule: the head's, or the adapter's without a head.
    pub(crate) fn tuned_dir(&self) -> Option<&Path> {
        let head = self.head.as_ref().map(|head| &*head.dir);
        head.or(self.adapter.as_ref().map(|adapter| &*adapter.dir))
    }

    /// Adds what a report says about the head, if there is one.
    pub(super) fn add_head_summary(&mut self, loading: &Loading<'_>) -> Result<()> {
        let Some(head) = &self.head else { return Ok(()) };
        let description = describe_head(&head.config);
        let summary =
            loading.dir_summary(&format!("head of {}", loading.id), &head.dir, description);
        self.summaries.push(summary?);
        Ok(())
    }
}

impl<'a> Loading<'a> {
    /// The same for another drafter of the recipe.
    pub(crate) fn of(&self, id: DrafterId) -> Self {
        Self { id, ..*self }
    }

    /// The drafter's settings.
    pub(crate) fn drafter(&self) -> &'a DrafterRecipe {
        self.recipe.drafters.get(self.id).expect("members were checked with the recipe")
    }

    /// Reads another drafter, as a part of this one.
    pub(crate) fn member(&self, id: DrafterId) -> Result<LoadedDrafter> {
        let loading = self.of(id);
        loading.drafter().kind.load(&loading)
    }

    /// The directory of the drafter's head, if it has one. A head that the recipe names or trains must be there.
    ///
    /// # Errors
    /// If it is not.
    pub(crate) fn head_dir(&self) -> Result<Option<PathBuf>> {
        let dir = self.recipe.head_dir(self.id);
        if let Some(dir) = &dir {
            need_export(ExportKind::Head, dir)?;
            return Ok(Some(dir.clone()));
        }
        // An adapter that was trained elsewhere may have brought one along.
        let beside = self.drafter().kind.path().map(head_within);
        Ok(beside.filter(|dir| dir.join("config.json").is_file()))
    }

    /// What a report says about a model.
    pub(crate) fn summary(&self, dir: &Path, config: &ModelConfig, hash: &str) -> ModelSummary {
        summary_of(self.id.as_str(), dir, config, hash)
    }

    /// What a report says about an export.
    pub(crate) fn dir_summary(
        &self,
        role: &str,
        dir: &Path,
        description: String,
    ) -> Result<ModelSummary> {
        let (role, name) = (role.to_owned(), dir.display().to_string());
        Ok(ModelSummary { role, name, description, hash: hash_dir(dir, &Console::silent())? })
    }

    /// What a report says about a drafter without files.
    pub(crate) fn plain_summary(&self, description: String) -> ModelSummary {
        let (role, name) = (self.id.to_string(), self.drafter().kind.text());
        ModelSummary { role, name, description, hash: String::new() }
    }
}

/// Drafters that were read.
#[derive(Default)]
pub(crate) struct LoadedDrafters(pub(crate) Vec<LoadedDrafter>);

impl LoadedDrafters {
    /// Reads the drafters of a recipe; only those with steps unless `all`.
    ///
    /// # Errors
    /// If one is missing or invalid, or belongs to other models than the workspace's.
    pub(crate) fn read(recipe: &Recipe, workspace: &Workspace, all: bool) -> Result<Self> {
        let wanted = recipe.evaluated().filter(|(_, it)| all || it.kind.role() == Role::Steps);
        let read = |(id, drafter): (DrafterId, &DrafterRecipe)| {
            let loaded = drafter.kind.load(&Loading { id, recipe, workspace });
            let loaded = loaded.with_context(|| format!("the drafter `{id}`"))?;
            Ok(LoadedDrafter { road: drafter.kind.road(), ..loaded })
        };
        Ok(Self(wanted.map(read).collect::<Result<_>>()?))
    }

    /// The target's draft, in memory.
    pub(crate) fn of_model(model: &CausalLm, head: Option<HeadExport>) -> Self {
        Self(vec![LoadedDrafter::of_model(DrafterId::DRAFT, model, head)])
    }

    /// The drafters, in the order of the recipe.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &LoadedDrafter> {
        self.0.iter()
    }

    /// The drafter with this name.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn get(&self, id: DrafterId) -> Result<&LoadedDrafter> {
        let found = self.iter().find(|drafter| drafter.id() == id);
        found.with_context(|| format!("there is no drafter `{id}` to run"))
    }

    /// A hash of the weights of the target and a drafter.
    ///
    /// # Errors
    /// If the drafter is unknown, or a file cannot be read.
    pub(crate) fn models_hash(&self, id: DrafterId, workspace: &Workspace) -> Result<String> {
        let all = [workspace.target_hash()?, &*self.get(id)?.hash];
        Ok(draftsmith_data::hash_bytes(all.join(" ").as_bytes()))
    }

    /// The directory whose `config.json` holds a drafter's tuned rule; `None` for drafters that are not tuned.
    pub(crate) fn export_of(&self, drafter: DrafterName) -> Option<PathBuf> {
        let DrafterName::Of(id) = drafter else { return None };
        self.get(id).ok()?.tuned_dir().map(Path::to_path_buf)
    }
}

/// The only drafter of several, or the one that was asked for.
///
/// # Errors
/// If it is missing, or there are several and none was asked for.
pub(crate) fn one_of(
    found: Vec<DrafterId>,
    asked: Option<DrafterId>,
    what: &str,
) -> Result<DrafterId> {
    match (asked, &found[..]) {
        (Some(id), _) if found.contains(&id) => Ok(id),
        (Some(id), _) => bail!(
            "the recipe has no {what} `{id}`; hint: it has {}",
            if found.is_empty() { "none".to_owned() } else { super::names_text(&found) }
        ),
        (None, [id]) => Ok(*id),
        (None, []) => bail!("the recipe has no {what}"),
        (None, several) => {
            bail!("the recipe has several: {}; hint: name the {what}", super::names_text(several))
        }
    }
}

//! Reads heads and adapters that a recipe names or trains.
//!
//! Every export is checked against the models at hand, and messages name each difference.

pub(crate) mod calibration;
pub(crate) mod cascades;
pub(crate) mod config_keys;
pub(crate) mod draft_model;
mod kind;
pub(crate) mod lookup;
pub(crate) mod tuned;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_data::hash_bytes;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, CausalLm};
use draftsmith_report::DrafterName;
use draftsmith_theory::DrafterId;
use serde_json::{Map, Value};

use self::calibration::HeadCalibration;
use self::cascades::Cascades;
pub(crate) use self::kind::ExportKind;
use self::lookup::Lookup;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::workspace::Workspace;

/// Heads and adapters of a pair of models, and what else its drafters need.
#[derive(Default)]
pub(crate) struct Exports {
    pub(crate) head: Option<HeadExport>,
    /// Sorted by exit layer.
    pub(crate) adapters: Vec<AdapterExport>,
    /// The second, smaller draft, if a cascade uses it.
    pub(crate) small_draft: Option<CausalLm>,
    /// Prompt lookup as a drafter, if it is measured.
    pub(crate) lookup: Option<Lookup>,
    /// Cascades and merged drafts, if there are any.
    pub(crate) cascades: Option<Cascades>,
}

impl Exports {
    /// Reads the head and the adapters that the recipe's evaluation names, or those that it trains.
    ///
    /// # Errors
    /// If one is missing or invalid, or belongs to other models than the workspace's.
    pub(crate) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        workspace: &Workspace,
    ) -> Result<Self> {
        let head = read_head(recipe, evaluate, workspace)?;
        let dirs = adapter_dirs(recipe, evaluate);
        for dir in &dirs {
            need_adapter_head(recipe, evaluate, dir)?;
        }
        let adapters = read_adapters(&dirs, workspace)?;
        Ok(Self { head, adapters, ..Self::default() })
    }

    /// Adds the evaluation's prompt lookup, cascades, merged drafts and small draft.
    ///
    /// # Errors
    /// If a cascade or merged draft names a missing drafter, or a file cannot be read.
    pub(crate) fn with_others(
        self,
        evaluate: &EvaluateRecipe,
        workspace: &Workspace,
    ) -> Result<Self> {
        self.check_drafters(evaluate, workspace)?;
        let read = || Lookup::of_recipe(evaluate, workspace);
        let lookup = evaluate.max_gram.as_ref().map(|_| read()).transpose()?;
        let (head, adapters) = (self.head.as_ref(), &self.adapters[..]);
        let asked = (&evaluate.cascades[..], &evaluate.merged[..]);
        let shared = || lookup.clone().map_or_else(read, Ok);
        let cascades = Cascades::read(asked, shared, head, adapters, workspace)?;
        let merged = evaluate.merged.iter().flat_map(|it| &it.drafters);
        let drafters = evaluate.cascades.iter().flat_map(|it| &it.drafters).chain(merged);
        Self { lookup, cascades, ..self }.with_small_draft(drafters, workspace)
    }

    /// Checks that the drafters of cascades and merged drafts exist.
    ///
    /// # Errors
    /// If one does not exist.
    fn check_drafters(&self, evaluate: &EvaluateRecipe, workspace: &Workspace) -> Result<()> {
        let of_cascades = evaluate.cascades.iter().map(|it| ("evaluate.cascades", &it.drafters));
        let of_merged = evaluate.merged.iter().map(|it| ("evaluate.merged", &it.drafters));
        let all = of_cascades.chain(of_merged);
        let named = || all.clone().flat_map(|(key, ids)| ids.iter().map(move |id| (key, *id)));
        if let Some((key, _)) = named().find(|(_, id)| *id == DrafterId::Draft)
            && workspace.draft_dir().is_none()
        {
            bail!(
                "key `{key}` has the drafter `draft`; hint: set `models.draft` to its checkpoint \
                 directory"
            );
        }
        let mut exits = named().filter_map(|(key, id)| Some((key, id.exit_layer()?)));
        if let Some((key, exit_layer)) =
            exits.find(|(_, exit_layer)| self.adapter_at(*exit_layer).is_none())
        {
            bail!(
                "key `{key}` has the drafter `self_draft_{exit_layer}`, but there is no adapter after \
                 layer {exit_layer}; hint: name its directory in `evaluate.adapters`"
            );
        }
        Ok(())
    }

    /// The adapter after this number of the target's layers.
    fn adapter_at(&self, exit_layer: usize) -> Option<&AdapterExport> {
        self.adapters.iter().find(|adapter| adapter.config.exit_layer == exit_layer)
    }

    /// Adds the small draft if it is one of `drafters`.
    ///
    /// # Errors
    /// If it cannot be read, or has another tokenizer.
    pub(crate) fn with_small_draft<'d>(
        self,
        mut drafters: impl Iterator<Item = &'d DrafterId>,
        workspace: &Workspace,
    ) -> Result<Self> {
        let takes_part = drafters.any(|id| *id == DrafterId::SmallDraft);
        let small_draft = takes_part.then(|| workspace.small_draft().cloned()).transpose()?;
        Ok(Self { small_draft, ..self })
    }

    /// Reads the head or adapter in `dir`.
    ///
    /// # Errors
    /// If it is invalid, or belongs to other models than the workspace's.
    pub(crate) fn read_export(kind: ExportKind, dir: &Path, workspace: &Workspace) -> Result<Self> {
        Ok(match kind {
            ExportKind::Head => {
                let head = read_draft_head(dir, workspace)?;
                Self { head: Some(head), ..Self::default() }
            }
            ExportKind::Adapter => {
                let adapters = read_adapters(&[dir.to_path_buf()], workspace)?;
                Self { adapters, ..Self::default() }
            }
        })
    }

    /// The heads of all drafters.
    pub(crate) fn heads(&self) -> impl Iterator<Item = &HeadExport> {
        let of_adapters = self.adapters.iter().filter_map(|adapter| adapter.head.as_ref());
        self.head.iter().chain(of_adapters)
    }

    /// A hash of the weights of the target and a drafter.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn models_hash(&self, drafter: DrafterId, workspace: &Workspace) -> Result<String> {
        let target = workspace.target_hash()?;
        let hash = match drafter {
            DrafterId::SelfDraft { exit_layer } => self
                .adapter_at(exit_layer)
                .map(|it| workspace.adapter_hash(&it.dir, &it.config))
                .transpose()?,
            _ => workspace.draft_hash()?.map(str::to_owned),
        };
        let all = [target.to_owned(), hash.unwrap_or_default()];
        Ok(hash_bytes(all.join(" ").as_bytes()))
    }

    /// The directory whose `config.json` holds a drafter's tuned rule: the head's, or the adapter's if it
    /// has no head.
    pub(crate) fn export_of(&self, drafter: DrafterName) -> Option<PathBuf> {
        match drafter {
            DrafterName::Of(DrafterId::Draft) => self.head.as_ref().map(|head| head.dir.clone()),
            DrafterName::Of(DrafterId::SelfDraft { exit_layer }) => {
                let found = self.adapter_at(exit_layer);
                found.map(|adapter| adapter.tuned_dir().to_path_buf())
            }
            // Other drafters are not tuned.
            _ => None,
        }
    }
}

/// The directories of the evaluated adapters.
pub(crate) fn adapter_dirs(recipe: &Recipe, evaluate: &EvaluateRecipe) -> Vec<PathBuf> {
    match &evaluate.adapters {
        Some(dirs) => dirs.clone(),
        None => recipe.adapter_dirs().into_iter().map(|(_, dir)| dir).collect(),
    }
}

/// The directory of the evaluated head, if there is one.
pub(crate) fn head_dir(recipe: &Recipe, evaluate: &EvaluateRecipe) -> Option<PathBuf> {
    let own = recipe.head.as_ref().map(|_| recipe.head_dir());
    evaluate.head.clone().or(own)
}

/// An adapter and its directory.
pub(crate) struct AdapterExport {
    pub(crate) adapter: Adapter,
    pub(crate) config: AdapterConfig,
    pub(crate) dir: PathBuf,
    /// The adapter's acceptance head, if it has one.
    pub(crate) head: Option<HeadExport>,
}

impl AdapterExport {
    /// Reads the adapter in a directory without its head, and checks that it was trained for the target.
    ///
    /// # Errors
    /// If it is invalid, or belongs to another target.
    pub(crate) fn without_head(dir: &Path, workspace: &Workspace) -> Result<Self> {
        need_export(ExportKind::Adapter, dir)?;
        let (config, adapter) = workspace.adapter_in(dir, workspace.dtype)?;
        let target = ("target", &config.target_hash, workspace.target_hash()?);
        check_models("adapter", dir, &[target])?;
        check_text("adapter", dir, &config.training, workspace)?;
        Ok(Self { adapter, config, dir: dir.to_path_buf(), head: None })
    }

    /// The self-draft at the adapter's exit layer.
    pub(crate) fn drafter(&self) -> DrafterId {
        DrafterId::SelfDraft { exit_layer: self.config.exit_layer }
    }

    fn tuned_dir(&self) -> &Path {
        self.head.as_ref().map_or(&self.dir, |head| &head.dir)
    }
}

/// The directory for an adapter's head, inside the adapter's.
pub(crate) fn adapter_head_dir(adapter_dir: &Path) -> PathBuf {
    adapter_dir.join("head")
}

/// The directory of an adapter's head, if it has one.
pub(crate) fn found_adapter_head(adapter_dir: &Path) -> Option<PathBuf> {
    Some(adapter_head_dir(adapter_dir)).filter(|dir| dir.join("config.json").is_file())
}

/// Reads the head of the adapter in `dir`, if it has one.
///
/// # Errors
/// If it is invalid, or belongs to another adapter or target.
pub(crate) fn read_adapter_head(
    dir: &Path,
    config: &AdapterConfig,
    workspace: &Workspace,
) -> Result<Option<HeadExport>> {
    let Some(head_dir) = found_adapter_head(dir) else {
        return Ok(None);
    };
    let head = HeadExport::read(&head_dir, config.model.shape.hidden_size, workspace)?;
    let adapter_hash = workspace.adapter_hash(dir, config)?;
    let adapter = ("adapter", &head.config.draft_hash, adapter_hash.as_str());
    let target = ("target", &head.config.target_hash, workspace.target_hash()?);
    check_models("head", &head_dir, &[adapter, target])?;
    check_text("head", &head_dir, &head.config.training, workspace)?;
    Ok(Some(head))
}

/// Checks that the adapter in `dir` has a head, if the recipe trains heads for its adapters.
///
/// # Errors
/// If it has none.
pub(crate) fn need_adapter_head(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    dir: &Path,
) -> Result<()> {
    let is_own = recipe.adapter_head.is_some() && evaluate.adapters.is_none();
    need_export(ExportKind::Adapter, dir)?;
    if !is_own || found_adapter_head(dir).is_some() {
        return Ok(());
    }
    bail!(
        "there is no acceptance head in `{}`; hint: run `draftsmith train-adapter` with this \
         recipe first, which has a section `[adapter_head]`",
        adapter_head_dir(dir).display()
    )
}

/// Reads adapters with their heads, and checks that their exit layers differ.
fn read_adapters(dirs: &[PathBuf], workspace: &Workspace) -> Result<Vec<AdapterExport>> {
    let mut adapters: Vec<AdapterExport> = Vec::with_capacity(dirs.len());
    for dir in dirs {
        let mut adapter = AdapterExport::without_head(dir, workspace)?;
        adapter.head = read_adapter_head(dir, &adapter.config, workspace)?;
        if adapters.iter().any(|other| other.config.exit_layer == adapter.config.exit_layer) {
            bail!(
                "two adapters have the exit layer {}, the second in `{}`; hint: evaluate one at a time",
                adapter.config.exit_layer,
                dir.display()
            );
        }
        adapters.push(adapter);
    }
    adapters.sort_by_key(|adapter| adapter.config.exit_layer);
    Ok(adapters)
}

/// A head and its directory.
pub(crate) struct HeadExport {
    pub(crate) head: AcceptanceHead,
    pub(crate) config: AcceptanceHeadConfig,
    /// The calibration of its predictions.
    pub(crate) calibration: HeadCalibration,
    pub(crate) dir: PathBuf,
}

impl HeadExport {
    /// Reads the head in a directory, for a drafter with this hidden size.
    ///
    /// # Errors
    /// If it is missing or invalid, or has another hidden size.
    pub(crate) fn read(dir: &Path, hidden_size: usize, workspace: &Workspace) -> Result<Self> {
        let (config, head) = workspace.head(dir, hidden_size)?;
        Ok(Self { head, config, calibration: HeadCalibration::read(dir)?, dir: dir.to_path_buf() })
    }
}

/// Reads the head that the recipe names or trains.
fn read_head(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    workspace: &Workspace,
) -> Result<Option<HeadExport>> {
    let Some(dir) = head_dir(recipe, evaluate) else {
        return Ok(None);
    };
    need_export(ExportKind::Head, &dir)?;
    read_draft_head(&dir, workspace).map(Some)
}

/// Checks that `dir` contains an export of this kind.
///
/// # Errors
/// If it has no `config.json`.
pub(crate) fn need_export(kind: ExportKind, dir: &Path) -> Result<()> {
    if dir.join("config.json").is_file() {
        return Ok(());
    }
    let (what, command, key) = match kind {
        ExportKind::Head => ("acceptance head", "train-head", "evaluate.head"),
        ExportKind::Adapter => ("adapter", "train-adapter", "evaluate.adapters"),
    };
    bail!(
        "there is no {what} in `{}`, which has no `config.json`; \
         hint: run `draftsmith {command}` with this recipe first, or set `{key}`",
        dir.display()
    )
}

/// Checks the hashes of models that an export names. An entry of `models` is a role, the hash in the
/// export and the current hash.
fn check_models(what: &str, dir: &Path, models: &[(&str, &Option<String>, &str)]) -> Result<()> {
    for (of, found, now) in models {
        let Some(found) = found.as_ref().filter(|hash| hash != now) else { continue };
        bail!(
            "the {what} in `{}` was trained with another {of} (hash {found}, this one's is {now}); \
             hint: train it again, or use the {of} it belongs to",
            dir.display()
        );
    }
    Ok(())
}

/// Reads the draft's head in a directory, and checks that it was trained with this draft and target.
///
/// # Errors
/// If it is missing or invalid, or belongs to another draft or target.
pub(crate) fn read_draft_head(dir: &Path, workspace: &Workspace) -> Result<HeadExport> {
    const NO_DRAFT: &str =
        "an acceptance head needs its draft; hint: set `models.draft`, or drop the head";
    let draft = workspace.draft_shape()?.context(NO_DRAFT)?;
    let head = HeadExport::read(dir, draft.hidden_size, workspace)?;
    let AcceptanceHeadConfig { draft_hash, target_hash, training, .. } = &head.config;
    // Heads from elsewhere have no hashes. A model is hashed only for a comparison.
    if draft_hash.is_some() {
        let draft = ("draft", draft_hash, workspace.draft_hash()?.context(NO_DRAFT)?);
        check_models("head", dir, &[draft])?;
    }
    if target_hash.is_some() {
        check_models("head", dir, &[("target", target_hash, workspace.target_hash()?)])?;
    }
    check_text("head", dir, training, workspace)?;
    Ok(head)
}

/// The key of the training data, in an export's training settings.
pub(crate) const TRAINED_ON: &str = "data";

/// Checks that tokenizer, chat template and ends of answers are those of an export's training data, as
/// far as the export names them.
fn check_text(
    what: &str,
    dir: &Path,
    training: &Map<String, Value>,
    workspace: &Workspace,
) -> Result<()> {
    let Some(Value::Object(then)) = training.get(TRAINED_ON) else { return Ok(()) };
    let Value::Object(now) = serde_json::to_value(workspace.text_identity()?)? else {
        return Ok(());
    };
    for (key, now) in now {
        let differs = |then: &&Value| **then != now && !workspace.ends.leave_open(&key);
        let Some(then) = then.get(&key).filter(differs) else { continue };
        bail!(
            "the {what} in `{}` was trained with `{key}` = {then}, which is {now} now; hint: train it \
             again, or take the change back",
            dir.display()
        );
    }
    Ok(())
}

//! The drafters of a recipe, `[drafters.NAME]`. Each is a named instance of a kind.
//!
//! Each kind has its own file, with its settings and one [`KindEntry`]. The file defines what
//! drafters of the kind load, what they can be part of, how they are trained, which stop rules they
//! are measured under and how much a forward reads. All other code identifies a drafter by its name
//! and calls [`DrafterKind`] for the rest.

pub mod adapter;
pub mod block;
pub mod cascade;
pub mod eagle;
pub mod eagle3;
pub mod loaded;
pub mod medusa;
pub mod merged;
pub mod model;
pub mod origin;
pub mod prompt_lookup;
pub mod self_draft;
mod table;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_data::ResponseRow;
use draftsmith_decode::NamedParts;
use draftsmith_files::parse_toml;
use draftsmith_model::{CausalLm, DrafterDir, DrafterModel, HeadForm, ModelConfig, WeightDtype};
use draftsmith_theory::{
    Bounds, DecodingName, DrafterId, HeadTiming, ModelSummary, Road, RoundForwards, StopRuleConfig,
};
use draftsmith_train::{
    Ending, FeatureFormat, HeadLabels, HeadTraining, LessonSettings, TrainError, TrainedExport,
    TrainingRun,
};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value};

use self::loaded::{LoadedDrafter, Loading};
use self::origin::Origin;
use self::self_draft::SelfDraftOrigin;
pub use self::table::{FoundExport, KindEntry, KindSettings, Kinds, read_kind};
use crate::exports::head_within;
use crate::exports::servers::ServerFlags;
use crate::recipe::keys::{require, require_few};
use crate::recipe::rules::RulesRecipe;
use crate::workspace::LayersNeeded;

/// The kind of a drafter, with its settings.
pub type Kind = Arc<dyn DrafterKind>;

/// The error message for a recipe without a drafter to record, tune or measure.
pub const NOTHING_DRAFTS: &str = "the recipe has no drafter for this; hint: add a table `[drafters.NAME]` with its `kind`: `model` and its \
     checkpoint directory `model`, or `adapter` and its `exit_layer`, or `eagle3`";

/// What a training computes and stores, for each token.
#[derive(Debug, Clone, Copy)]
pub struct TrainingWork {
    /// The number of weights in the drafter's file.
    pub num_parameters: usize,
    /// The number of weights of the LM head that it computes with.
    pub num_head_weights: usize,
    /// Whether this LM head is in its file.
    pub has_head: bool,
    /// The number of unrolled steps.
    pub num_steps: usize,
    /// The size of one hidden state on the disk, in bytes.
    pub state_bytes: usize,
    /// The number of hidden states that it reads.
    pub num_states: usize,
}

/// The training of a drafter that reads the target's hidden states.
pub trait KindTraining: Any {
    /// Returns the settings that all self-drafts have for what they learn from.
    fn lessons(&self) -> LessonSettings;

    /// Returns the number format in which states of servers are stored; `None` if servers give none.
    fn served_format(&self) -> Option<FeatureFormat> {
        self.lessons().served_format()
    }

    /// Returns whether servers give the target's hidden states.
    fn is_served(&self) -> bool {
        self.served_format().is_some()
    }

    /// Checks that a target of `num_layers` layers has all layers that the drafter reads.
    ///
    /// # Errors
    /// If a layer is missing.
    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError>;

    /// Describes what a training of this drafter for a target computes and stores.
    ///
    /// # Errors
    /// If the settings do not suit the target.
    fn work(&self, target: &ModelConfig) -> Result<TrainingWork, TrainError>;

    /// Returns all settings. Together with the data, they identify the training.
    fn settings(&self) -> Value;

    /// Returns the settings that drafters must share to be trained in one pass over the data.
    fn pass(&self) -> LessonSettings {
        self.lessons().of_pass()
    }

    /// Returns the names of the validation scores to show after each epoch.
    fn shown(&self) -> &'static [&'static str];

    /// Trains all drafters of this kind that share a pass over the data, this one included, in
    /// order. Each gets exactly the weights that it would get alone. `target` stays frozen.
    ///
    /// # Errors
    /// If a setting or data row is invalid, a number is not finite, or a file cannot be written.
    fn train(
        &self,
        all: &[&dyn KindTraining],
        target: &CausalLm,
        rows: &[ResponseRow],
        seed: u64,
        run: TrainingRun<'_>,
    ) -> Result<Ending<Vec<TrainedExport>>, TrainError>;

    /// Describes a trained drafter for a target of `num_layers` layers, from its directory and the
    /// validation scores of its best epoch.
    ///
    /// # Errors
    /// If its files are invalid.
    fn describe(&self, dir: &Path, num_layers: usize, scores: &Value) -> Result<TrainedText>;
}

/// Selects the trainings of one kind.
fn trainings_of<'t, T: KindTraining>(all: &'t [&dyn KindTraining]) -> impl Iterator<Item = &'t T> {
    all.iter().filter_map(|one| (*one as &dyn Any).downcast_ref())
}

/// The description of a trained drafter that a command shows.
#[derive(Debug, Clone)]
pub struct TrainedText {
    /// Where the drafter reads the target's hidden states, such as `behind layer 2`.
    pub place: String,
    /// The drafter's size and scores, as lines of text.
    pub lines: String,
    /// The drafter's properties, as keys and values of JSON.
    pub properties: Map<String, Value>,
    /// Advice on a drafter that agrees with its target too little to serve it; `None` for any other.
    pub advice: Option<String>,
}

/// What the files of a trained drafter say about it.
#[derive(Debug, Clone)]
pub struct DrafterFiles {
    /// The properties that, together with the weights, identify the drafter in recordings.
    pub shape: String,
    /// The description in reports.
    pub description: String,
}

/// The interface of a kind of drafter. The defaults suit self-drafts, and kinds that do not draft step
/// by step.
pub trait DrafterKind: KindSettings + Any + fmt::Debug + Send + Sync {
    /// Returns the entry in the table of kinds.
    fn entry(&self) -> &'static KindEntry;

    /// Returns the settings of a self-draft; `None` for other kinds.
    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        None
    }

    /// Describes the drafter in words, such as `separate draft` or `self-draft, exit 2`; by default as
    /// its directories are called.
    fn text(&self) -> String {
        let KindEntry { name, export, .. } = self.entry();
        export.as_ref().map_or(*name, |export| export.text).to_owned()
    }

    /// Returns the drafter's [`Road`], a coarse class by which reports compare drafters.
    fn road(&self) -> Road {
        Road::SelfDraft
    }

    /// Checks the settings. Error messages refer to the drafter's table as `key`.
    ///
    /// # Errors
    /// If a setting is invalid, or names a drafter that `all` lacks or that cannot be part of this
    /// one.
    fn check(&self, key: &str, _all: &DrafterRecipes) -> Result<()> {
        self.origin().map_or(Ok(()), |origin| origin.check(key))
    }

    /// Loads the drafter's parts for decoding, its acceptance head, and what costs and reports
    /// need.
    ///
    /// # Errors
    /// If a file is missing or invalid, or was trained for other models.
    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter>;

    /// Returns the role that the drafter can have inside another drafter. Self-drafts draft step by
    /// step.
    fn role(&self) -> Role {
        if self.origin().is_some() { Role::Steps } else { Role::Neither }
    }

    /// Returns whether the drafter's rollouts are recorded and its stop rules tuned on them.
    fn is_recorded(&self) -> bool {
        self.role() == Role::Steps
    }

    /// Returns the number of draft forwards in a round: one per candidate or one in all.
    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::EachStep
    }

    /// Returns when an acceptance head predicts that is a part of the drafter's own files; `None`
    /// without one.
    fn own_head(&self) -> Option<HeadTiming> {
        None
    }

    /// Returns whether stop rules may read the drafter's probabilities.
    fn has_signals(&self) -> bool {
        self.role() == Role::Steps
    }

    /// Returns the draft model's directory or name on the Hub; `None` if it is no separate model.
    fn model(&self) -> Option<&Path> {
        None
    }

    /// Returns the settings that make inference servers draft with this drafter; `None` if none can.
    fn served(&self) -> Option<&'static ServerFlags> {
        None
    }

    /// Returns the directory of a trained export, if the recipe names one, with the keys that it
    /// ignores; `None` otherwise.
    fn path(&self) -> Option<&DrafterDir> {
        self.origin()?.dir()
    }

    /// Returns the training on the target's hidden states; `None` if the recipe has no such
    /// training.
    fn training(&self) -> Option<&dyn KindTraining> {
        self.origin()?.kind_training()
    }

    /// Returns which of the target's layers drafting and training need: all for a self-draft, which
    /// reads hidden states of deep layers, and none for others.
    fn layers_needed(&self) -> LayersNeeded {
        self.origin().map_or(LayersNeeded::First(0), |_| LayersNeeded::All)
    }

    /// Returns the layers of a target whose hidden states the drafter reads at every token, each as
    /// the number of layers before the state; empty for a drafter that reads none.
    ///
    /// # Errors
    /// If the drafter's files are missing or invalid.
    fn state_layers(&self, target: &ModelConfig) -> Result<Vec<usize>> {
        let origin = self.origin().filter(|_| !self.has_exit());
        origin.map_or(Ok(Vec::new()), |origin| origin.layers(target.shape.num_layers))
    }

    /// Returns whether drafting runs the target's first layers ahead of the others (early exit). In
    /// one session, a target can exit after only one layer.
    fn has_exit(&self) -> bool {
        false
    }

    /// Returns the default maximum of candidates in a round. Fixed lengths ignore it.
    fn max_candidate_length(&self) -> usize {
        self.most_candidates().unwrap_or(20)
    }

    /// Returns the number of candidates beyond which the drafter proposes none, in rounds of fixed
    /// lengths too; `None` without such a limit.
    fn most_candidates(&self) -> Option<usize> {
        None
    }

    /// Returns the only stop rule to measure the drafter under; `None` if the recipe's rules apply.
    fn own_rule(&self, _decoding: DecodingName) -> Option<StopRuleConfig> {
        None
    }

    /// Reads the files of a trained drafter in `dir`; `None` for a kind without its own files.
    ///
    /// # Errors
    /// If a file is missing or invalid.
    fn files(&self, loading: &Loading<'_>, dir: &DrafterDir) -> Result<Option<DrafterFiles>> {
        let Some(origin) = self.origin() else { return Ok(None) };
        origin.files(dir, loading.workspace.models.target_shape()?.num_layers).map(Some)
    }

    /// Returns the hash that identifies the drafter in recordings, without the acceptance head.
    ///
    /// # Errors
    /// If the drafter cannot be recorded, or a file cannot be read.
    fn recorded_hash(&self, loading: &Loading<'_>) -> Result<String> {
        let dir = loading.export_dir();
        self.entry().need(&dir)?;
        let Some(files) = self.files(loading, &dir)? else {
            bail!("the drafter `{}` has no model, and so no probabilities to record", loading.id)
        };
        loading.workspace.artifacts.export_hash(&dir, &files.shape)
    }

    /// Returns the hash of the drafter's weights, or an empty string for a kind without weights.
    /// Loading does not compute this hash.
    ///
    /// # Errors
    /// If a file cannot be read.
    fn weights_hash(&self, loading: &Loading<'_>) -> Result<String> {
        self.entry().export.as_ref().map_or(Ok(String::new()), |_| self.recorded_hash(loading))
    }

    /// Describes the drafters that the drafter consists of; `None` if it has files, or nothing to
    /// describe.
    fn members_text(&self) -> Option<String> {
        None
    }

    /// Summarises the drafter's files and its acceptance head for a report.
    ///
    /// # Errors
    /// If a file cannot be read.
    fn summaries(
        &self,
        loading: &Loading<'_>,
        loaded: &LoadedDrafter,
    ) -> Result<Vec<ModelSummary>> {
        let dir = loading.export_dir();
        let Some(files) = self.files(loading, &dir)? else {
            let text = self.members_text();
            return Ok(text.map(|text| loading.plain_summary(text)).into_iter().collect());
        };
        let own = loading.dir_summary(loading.id.as_str(), &dir, files.description);
        let head = loaded.head.as_ref().map(|head| loading.head_summary(head));
        [own].into_iter().chain(head).collect()
    }

    /// Loads the model whose hidden states the drafter's acceptance head reads, to train the head.
    ///
    /// # Errors
    /// If the drafter has no such model, or a file is missing or broken.
    fn frozen(&self, loading: &Loading<'_>, _dtype: WeightDtype) -> Result<DrafterModel> {
        bail!("the drafter `{}` has no hidden states that a head could read", loading.id)
    }

    /// Builds the drafter's parts with the acceptance head in `dir`, for a stop rule of a chain in
    /// a cascade. The head must have been trained for the reviewer with this hash, or for the
    /// target if `reviewer` is `None`.
    ///
    /// # Errors
    /// If the drafter cannot use another head, or the head was trained for other models.
    fn with_head(
        &self,
        _loading: &Loading<'_>,
        _dir: &Path,
        _reviewer: Option<&str>,
    ) -> Result<NamedParts> {
        bail!(
            "a rule of a chain can name only the head of a separate draft: an adapter's head is used if the \
             target reviews its chain"
        )
    }
}

/// The role that a drafter can have inside another drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A drafter that drafts step by step.
    Steps,
    /// A drafter that looks up candidates in the text.
    LookUp,
    /// A drafter that cannot be part of another.
    Neither,
}

/// A drafter: its kind with settings, and the settings that drafters of all kinds have.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "toml::Table", into = "toml::Table")]
pub struct DrafterRecipe {
    /// The drafter's kind, with its settings.
    pub kind: Kind,
    /// The drafter's acceptance head, as training settings or a directory; `None` for no head.
    pub head: Option<Origin<HeadTraining>>,
    /// The drafter's stop rule settings, which override those of `[evaluate.rules]`.
    pub rules: RulesRecipe,
    /// The maximum number of candidates in a round; by default the kind's. Fixed lengths ignore it.
    pub max_candidate_length: Option<usize>,
}

impl DrafterRecipe {
    /// Creates a drafter of a kind, without a head and with default rules.
    pub fn new(kind: Kind) -> Self {
        Self { kind, head: None, rules: RulesRecipe::default(), max_candidate_length: None }
    }

    /// Returns the training settings of the acceptance head; `None` if the recipe does not train
    /// one.
    pub fn head_training(&self) -> Option<&HeadTraining> {
        self.head.as_ref().and_then(Origin::training)
    }

    /// Lists the stop rules that the drafter is measured under. The drafter's own settings override
    /// those in `rules`, the table `[evaluate.rules]`. Rules that need a signal or head that the
    /// drafter lacks are left out. A kind with its own rule has only that rule.
    pub fn stop_rules(
        &self,
        rules: &RulesRecipe,
        decoding: DecodingName,
        has_head: bool,
    ) -> Vec<StopRuleConfig> {
        if let Some(rule) = self.kind.own_rule(decoding) {
            return vec![rule];
        }
        let max = self.max_candidate_length.unwrap_or(self.kind.max_candidate_length());
        let bounds = Bounds { min: 1, max };
        let mut all = rules.configs(Some(&self.rules), self.kind.has_exit(), has_head, bounds);
        if !self.kind.has_signals() {
            all.retain(|rule| rule.needs().is_nothing());
        }
        all
    }

    fn check(&self, key: &str, all: &DrafterRecipes) -> Result<()> {
        self.rules.check(&format!("{key}.rules"))?;
        let max = self.max_candidate_length.unwrap_or(1);
        Bounds::new(1, max).with_context(|| format!("key `{key}.max_candidate_length`"))?;
        self.kind.check(key, all)?;
        let key = format!("{key}.head");
        require(
            self.head.is_none() || self.kind.is_recorded(),
            &key,
            "is set for a drafter that can have none: only a draft model, an adapter and an EAGLE-3 drafter can have a head",
        )?;
        require(
            self.head.iter().filter_map(Origin::path).all(|dir| dir.ignored_keys.is_empty()),
            &format!("{key}.ignored_keys"),
            "is set, but the keys of heads are all read: only drafters can ignore some",
        )?;
        let Some(head) = self.head_training() else { return Ok(()) };
        if self.kind.model().is_some() {
            return head.validate().with_context(|| format!("section `[{key}]`"));
        }
        head.validate().with_context(|| format!("section `[{key}]`"))?;
        require(
            self.kind.has_exit() || head.form == HeadForm::LookAhead,
            &format!("{key}.form"),
            "is not `look-ahead`, the form of a head of an EAGLE-3 drafter",
        )?;
        require(
            head.labels == HeadLabels::Rollouts,
            &format!("{key}.labels"),
            "is not `rollouts`: the candidates in the data come from the draft model, not from this drafter",
        )?;
        require(
            head.sweep.is_none(),
            &format!("{key}.sweep"),
            "is set: only the draft model's heads can be swept",
        )
    }

    /// Reads a drafter whose kind is one of `kinds`.
    ///
    /// # Errors
    /// If a key is unknown or has an invalid value. The message names the key.
    pub fn read(mut table: toml::Table, kinds: &Kinds) -> Result<Self, String> {
        fn take<T: de::DeserializeOwned + Default>(
            table: &mut toml::Table,
            key: &str,
        ) -> Result<T, String> {
            let value = table.remove(key).map(parse_toml).transpose();
            value.map(Option::unwrap_or_default).map_err(|problem| {
                match problem.starts_with("is ") {
                    true => format!("`{key}` {problem}"),
                    false => format!("`{key}`: {problem}"),
                }
            })
        }
        Ok(Self {
            head: take(&mut table, "head")?,
            rules: take(&mut table, "rules")?,
            max_candidate_length: take(&mut table, "max_candidate_length")?,
            kind: kinds.read(table)?,
        })
    }
}

impl TryFrom<toml::Table> for DrafterRecipe {
    type Error = String;

    fn try_from(table: toml::Table) -> Result<Self, String> {
        Self::read(table, &Kinds::default())
    }
}

impl From<DrafterRecipe> for toml::Table {
    fn from(drafter: DrafterRecipe) -> Self {
        const TOML: &str = "settings are TOML";
        let name = drafter.kind.entry().name;
        let mut table = Self::from_iter([("kind".to_owned(), name.into())]);
        table.extend(drafter.kind.table());
        if let Some(most) = drafter.max_candidate_length {
            table.insert("max_candidate_length".to_owned(), (most as i64).into());
        }
        if drafter.rules != RulesRecipe::default() {
            let rules = toml::Value::try_from(&drafter.rules).expect(TOML);
            table.insert("rules".to_owned(), rules);
        }
        if let Some(head) = drafter.head {
            table.insert("head".to_owned(), toml::Value::try_from(head).expect(TOML));
        }
        table
    }
}

/// The drafters of a recipe, in the recipe's order.
#[derive(Debug, Clone, Default)]
pub struct DrafterRecipes(Vec<(DrafterId, DrafterRecipe)>);

impl DrafterRecipes {
    /// Creates a list of one drafter.
    pub fn one(id: DrafterId, drafter: DrafterRecipe) -> Self {
        Self(vec![(id, drafter)])
    }

    /// Iterates over the drafters with their names, in the recipe's order.
    pub fn iter(&self) -> impl Iterator<Item = (DrafterId, &DrafterRecipe)> {
        self.0.iter().map(|(id, drafter)| (*id, drafter))
    }

    /// Returns the drafter with this name; `None` if there is none.
    pub fn get(&self, id: DrafterId) -> Option<&DrafterRecipe> {
        self.iter().find(|(name, _)| *name == id).map(|(_, drafter)| drafter)
    }

    /// Returns the drafter with this name for modification; `None` if there is none.
    pub fn get_mut(&mut self, id: DrafterId) -> Option<&mut DrafterRecipe> {
        self.0.iter_mut().find(|(other, _)| *other == id).map(|(_, drafter)| drafter)
    }

    /// Keeps only the drafters for which `is_kept` returns true.
    pub fn retain(&mut self, mut is_kept: impl FnMut(DrafterId) -> bool) {
        self.0.retain(|(id, _)| is_kept(*id));
    }

    /// Inserts a drafter at an index, at most the length. Does not check that its name is new.
    pub(crate) fn insert(&mut self, place: usize, id: DrafterId, drafter: DrafterRecipe) {
        self.0.insert(place.min(self.0.len()), (id, drafter));
    }

    /// Adds a drafter at the end. Does not check that its name is new.
    pub fn push(&mut self, id: DrafterId, drafter: DrafterRecipe) {
        self.0.push((id, drafter));
    }

    /// Returns the directory of a drafter's export: the one that the recipe names, or else a
    /// subdirectory of `home` named after the drafter.
    pub(crate) fn export_dir(&self, home: &Path, id: DrafterId) -> PathBuf {
        let given = self.get(id).and_then(|it| it.kind.path());
        given.map_or_else(|| home.join(id.as_str()), |dir| dir.path.clone())
    }

    /// Returns the directory of a drafter's acceptance head; `None` if the recipe has no head for
    /// it.
    pub(crate) fn head_dir(&self, home: &Path, id: DrafterId) -> Option<PathBuf> {
        let head = self.get(id)?.head.as_ref()?;
        let beside = || head_within(&self.export_dir(home, id));
        Some(head.path().map_or_else(beside, |dir| dir.path.clone()))
    }

    /// Lists the draft models with their checkpoint directories or names on the Hub. `build-data`
    /// writes the candidates and labels of the first one.
    pub fn models(&self) -> Vec<(DrafterId, &Path)> {
        self.iter().filter_map(|(id, it)| Some((id, it.kind.model()?))).collect()
    }

    /// Checks every drafter.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn check(&self) -> Result<()> {
        require_few(self.0.len(), "drafters")?;
        let draft = self.models().first().map(|(id, _)| *id);
        for (id, drafter) in self.iter() {
            let key = format!("drafters.{id}");
            drafter.check(&key, self)?;
            require(
                drafter.kind.model().is_none()
                    || draft == Some(id)
                    || drafter.head_training().is_none(),
                &format!("{key}.head"),
                "trains a head of another draft than the first, whose candidates the data has: put this \
                 drafter first, or name a trained head with `path`",
            )?;
        }
        let trained = self.iter().filter_map(|(id, it)| Some((id, it.kind.training()?.settings())));
        let trained: Vec<(DrafterId, Value)> = trained.collect();
        for (at, (id, settings)) in trained.iter().enumerate() {
            if let Some((other, _)) = trained[..at].iter().find(|(_, known)| known == settings) {
                bail!(
                    "the drafters `{other}` and `{id}` would be trained to the same weights; hint: train one, and give \
                     the other its directory as `path`"
                );
            }
        }
        Ok(())
    }
}

impl Serialize for DrafterRecipes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for DrafterRecipes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RecipesVisitor)
    }
}

struct RecipesVisitor;

impl<'de> Visitor<'de> for RecipesVisitor {
    type Value = DrafterRecipes;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a table of drafters by name, such as `[drafters.draft]`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DrafterRecipes, A::Error> {
        let mut all = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            let id = name.parse().map_err(de::Error::custom)?;
            all.push((id, map.next_value()?));
        }
        Ok(DrafterRecipes(all))
    }
}

/// Sets `dtype` for each training in a table of drafters that does not set it.
pub fn default_dtype(drafters: &mut toml::Table, dtype: &str, kinds: &Kinds) {
    let tables = drafters.iter_mut().filter_map(|(_, it)| it.as_table_mut());
    for table in tables {
        let set = |table: &mut toml::Table| {
            if !table.contains_key("path") {
                table.entry("dtype").or_insert_with(|| dtype.into());
            }
        };
        if let Some(head) = table.get_mut("head").and_then(toml::Value::as_table_mut) {
            set(head);
        }
        let kind = table.get("kind").and_then(toml::Value::as_str);
        if kind.and_then(|kind| kinds.get(kind)).is_some_and(KindEntry::is_trained) {
            set(table);
        }
    }
}

/// Checks the drafters, `members`, that another drafter consists of. Each must be in `all` and have
/// an allowed role, none may be repeated, and at most one may exit the target early. Error messages
/// name `key`; `problem` explains why a role is not allowed.
pub fn check_members(
    key: &str,
    members: &[DrafterId],
    all: &DrafterRecipes,
    is_allowed: impl Fn(Role) -> bool,
    problem: &str,
) -> Result<()> {
    for id in members {
        let Some(member) = all.get(*id) else {
            bail!("key `{key}` names the drafter `{id}`; hint: add a table `[drafters.{id}]`")
        };
        require(is_allowed(member.kind.role()), key, problem)?;
    }
    let is_twice = (1..members.len()).any(|at| members[..at].contains(&members[at]));
    require(!is_twice, key, "names a drafter twice")?;
    let num_exits = members.iter().filter_map(|id| all.get(*id)).filter(|it| it.kind.has_exit());
    require(
        num_exits.count() <= 1,
        key,
        "names two self-drafts: the target can exit at only one layer",
    )
}

/// Joins the first 12 names with commas, and counts the others.
pub fn names_text(names: &[impl fmt::Display]) -> String {
    let (shown, more) = names.split_at(names.len().min(12));
    let text = shown.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if more.is_empty() { text } else { format!("{text} and {} more", more.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a recipe with several drafters, and a drafter `it` of this kind with these keys.
    pub(super) fn recipes(kind: &str, keys: &str) -> DrafterRecipes {
        let text = format!(
            "[it]\nkind = '{kind}'\n{keys}\n[draft]\nkind = 'model'\nmodel = 'd'\n\
             [small]\nkind = 'model'\nmodel = 's'\n[lookup]\nkind = 'prompt-lookup'\n\
             [exit1]\nkind = 'adapter'\nexit_layer = 1\n[exit2]\nkind = 'adapter'\nexit_layer = 2\n\
             [mix]\nkind = 'cascade'\ndrafters = ['draft', 'lookup']\nlengths = [[2, 2], [0, 2]]\n"
        );
        toml::from_str(&text).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the error message for an invalid drafter `it`.
    pub(super) fn message(kind: &str, keys: &str) -> String {
        format!("{:#}", recipes(kind, keys).check().expect_err("refused"))
    }

    fn unreadable(text: &str) -> String {
        toml::from_str::<DrafterRecipes>(text).expect_err("refused").to_string()
    }

    #[test]
    fn many_names_are_cut() {
        let text = |num: usize| names_text(&(0..num).collect::<Vec<_>>());
        assert_eq!(text(3), "0, 1, 2");
        assert!(text(12).ends_with("10, 11"));
        assert!(text(256).ends_with("10, 11 and 244 more"));
    }

    #[test]
    fn drafters_read_back_as_they_are_written() {
        let keys = "exit_layer = 3\nmax_candidate_length = 5\nrules = { fixed = [1, 2] }\n\
                    head = { labels = 'rollouts' }\noptimizer = { num_epochs = 2 }";
        let all = recipes("adapter", keys);
        all.check().expect("valid");
        let text = toml::to_string(&all).expect("TOML");
        let again: DrafterRecipes = toml::from_str(&text).expect("reads back");
        assert_eq!(toml::to_string(&again).expect("TOML"), text);
        let names: Vec<String> = again.iter().map(|(id, _)| id.to_string()).collect();
        assert_eq!(names, ["it", "draft", "small", "lookup", "exit1", "exit2", "mix"]);
        assert_eq!(again.models().len(), 2);
        let it = again.get(DrafterId::named("it")).expect("it is there");
        assert_eq!(it.kind.text(), "self-draft, exit 3");
        assert_eq!(it.head_training().expect("trained").labels, HeadLabels::Rollouts);
    }

    #[test]
    fn messages_name_what_a_drafter_lacks_or_has_too_much() {
        let unknown = unreadable("[a]\nkind = 'lookahead'\n");
        assert!(unknown.contains("lookahead") && unknown.contains("prompt-lookup"), "{unknown}");
        assert!(unreadable("[a]\nmodel = 'x'\n").contains("kind"));
        assert!(unreadable("[a]\nkind = 'model'\nmodels = 'x'\n").contains("models"));
        assert!(unreadable("['a b']\nkind = 'model'\nmodel = 'x'\n").contains("`a b`"));
        let list = unreadable("[a]\nkind = 'adapter'\nexit_layer = [1, 2]\n");
        assert!(list.contains("`exit_layer` is an array"), "{list}");
        let head = unreadable("[a]\nkind = 'model'\nmodel = 'x'\nhead = { layers = 2 }\n");
        assert!(head.contains("`head`") && head.contains("layers"), "{head}");
        let both = "[a]\nkind = 'adapter'\npath = 'x'\nexit_layer = 2\n";
        assert!(unreadable(both).contains("no other keys"));
        for (kind, keys, problem) in [
            ("prompt-lookup", "head = { path = 'x' }", "`drafters.it.head`"),
            ("prompt-lookup", "min_match = 0", "`drafters.it.min_match`"),
            (
                "adapter",
                "exit_layer = 1\nhead = { labels = 'sampled' }",
                "`drafters.it.head.labels`",
            ),
            (
                "adapter",
                "exit_layer = 1\nmax_candidate_length = 0",
                "`drafters.it.max_candidate_length`",
            ),
            ("model", "model = 'x'\nrules = { fixed = [0] }", "`drafters.it.rules.fixed`"),
        ] {
            let message = message(kind, keys);
            assert!(message.contains(problem), "{message}");
        }
        let many = |num: usize| {
            let tables = (0..num).map(|n| format!("[d{n}]\nkind = 'prompt-lookup'\n"));
            toml::from_str::<DrafterRecipes>(&tables.collect::<String>()).expect("reads").check()
        };
        many(256).expect("as many as allowed");
        let message = many(10_000).expect_err("refused").to_string();
        assert!(message.starts_with("key `drafters` has 10000 entries, expected"), "{message}");
        let values = format!("model = 'x'\nrules = {{ fixed = {:?} }}", [1; 257]);
        let message = self::tests::message("model", &values);
        assert!(message.starts_with("key `drafters.it.rules.fixed` has 257 entries"), "{message}");
        let second = toml::from_str::<DrafterRecipes>(
            "[a]\nkind = 'model'\nmodel = 'x'\n[b]\nkind = 'model'\nmodel = 'y'\nhead = {}\n",
        );
        let message = second.expect("reads").check().expect_err("refused").to_string();
        assert!(message.contains("`drafters.b.head`") && message.contains("first"), "{message}");
    }
}

//! Drafters of a recipe, `[drafters.NAME]`: named instances of kinds.
//!
//! A kind is one [`KindEntry`] in a file of its own, beside its settings: what it loads, what it can be part of, how
//! it is trained, which rules it is measured under and what its forwards read. Everything else goes by the drafter's
//! name and asks the kind through [`DrafterKind`].

pub mod adapter;
pub mod cascade;
pub mod eagle3;
pub mod loaded;
pub mod merged;
pub mod model;
pub mod origin;
pub mod prompt_lookup;
mod table;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_data::ResponseRow;
use draftsmith_decode::NamedParts;
use draftsmith_model::{CausalLm, DraftVocabulary, DrafterModel, HeadForm, WeightDtype};
use draftsmith_theory::{Bounds, DrafterId, RoundForwards, StopRuleConfig};
use draftsmith_theory::{DecodingName, ModelSummary, Road};
use draftsmith_train::{
    Ending, HeadLabels, HeadTraining, OptimizerSettings, Teaching, TrainError, TrainedExport,
    TrainingRun,
};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value, json};

use self::loaded::{LoadedDrafter, Loading};
use self::origin::{Origin, read_keys};
pub use self::table::{FoundExport, KindDirectory, KindEntry, Kinds, read_kind, settings_table};
use crate::exports::head_within;
use crate::exports::servers::{AS_DRAFT_MODEL, ServerFlags};
use crate::recipe::keys::require;
use crate::recipe::rules::RulesRecipe;

/// A drafter's kind, with its settings.
pub type Kind = Arc<dyn DrafterKind>;

/// Why there is nothing to record, tune or measure.
pub const NOTHING_DRAFTS: &str = "the recipe has no drafter for this; hint: add a table `[drafters.NAME]` with its `kind`: `model` and its \
     checkpoint directory `model`, or `adapter` and its `exit_layer`, or `eagle3`";

/// The training of a drafter on the target's hidden states.
pub trait KindTraining: Any {
    /// Returns the settings of its optimizer.
    fn optimizer(&self) -> &OptimizerSettings;

    /// Returns the type that it computes in.
    fn dtype(&self) -> WeightDtype;

    /// Returns what it learns from.
    fn teacher(&self) -> Teaching;

    /// Checks that a target of `num_layers` layers has those that the drafter reads.
    ///
    /// # Errors
    /// If it has not.
    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError>;

    /// Returns all settings, which identify the training together with its data.
    fn settings(&self) -> Value;

    /// Returns the settings that drafters of this kind must share to be trained in one pass over the data.
    fn pass(&self) -> Value;

    /// Names the validation scores that are shown after each epoch.
    fn shown(&self) -> &'static [&'static str];

    /// Trains drafters of this kind that share a pass, this one among them, in order. Each ends with the same bits as if
    /// it were trained alone. `target` is frozen.
    ///
    /// # Errors
    /// If a setting is invalid, a row is broken, a number is not finite, or a file cannot be written.
    fn train(
        &self,
        all: &[&dyn KindTraining],
        target: &CausalLm,
        rows: &[ResponseRow],
        seed: u64,
        run: TrainingRun<'_>,
    ) -> Result<Ending<Vec<TrainedExport>>, TrainError>;

    /// Describes a trained drafter from its directory and the scores of its best epoch, for a target of `num_layers`
    /// layers.
    ///
    /// # Errors
    /// If its files are invalid.
    fn describe(&self, dir: &Path, num_layers: usize, scores: &Value) -> Result<TrainedText>;
}

/// What a command shows of a trained drafter.
#[derive(Debug, Clone)]
pub struct TrainedText {
    /// Where it reads the target, as in `behind layer 2`.
    pub place: String,
    /// Its size and scores, in lines.
    pub lines: String,
    /// Its properties, by their keys in JSON.
    pub properties: Map<String, Value>,
}

impl TrainedText {
    /// Builds the text of a drafter with a draft vocabulary, or with all tokens.
    pub fn with_vocabulary(
        mut self,
        vocabulary: Option<&DraftVocabulary>,
        coverage: Option<f64>,
    ) -> Self {
        let size = vocabulary.map(|all| all.ids().len());
        self.properties.insert("draft_vocabulary".to_owned(), json!(size));
        self.properties.insert("vocabulary_coverage".to_owned(), json!(coverage));
        self
    }
}

/// What a kind of drafter says about itself. Most methods have a default: that of a kind without steps.
pub trait DrafterKind: Any + fmt::Debug + Send + Sync {
    /// Returns the entry of its kind.
    fn entry(&self) -> &'static KindEntry;

    /// Returns the settings as a table, without the name of the kind.
    fn settings(&self) -> toml::Table;

    /// Describes the drafter in words, such as `separate draft` or `self-draft, exit 2`.
    fn text(&self) -> String;

    /// Returns the drafter's [`Road`], by which reports compare drafters.
    fn road(&self) -> Road;

    /// Checks the settings. Messages name the drafter's table, `key`.
    ///
    /// # Errors
    /// If a setting is invalid, or names a drafter that `all` lacks or that cannot take part.
    fn check(&self, key: &str, all: &DrafterRecipes) -> Result<()>;

    /// Loads the drafter: the parts that sessions are built from, its head, and what costs and reports need.
    ///
    /// # Errors
    /// If something is missing or invalid, or belongs to other models.
    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter>;

    /// Returns what the drafter can be inside another drafter.
    fn role(&self) -> Role {
        Role::Neither
    }

    /// Returns whether rollouts of the drafter are recorded, and its stop rules tuned on them.
    fn is_recorded(&self) -> bool {
        self.role() == Role::Steps
    }

    /// Returns the forwards that a round of it takes.
    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::EachStep
    }

    /// Returns whether stop rules may read the drafter's probabilities.
    fn has_signals(&self) -> bool {
        self.role() == Role::Steps
    }

    /// Returns the checkpoint directory or the name on the Hub; `None` if the drafter is not a model.
    fn model(&self) -> Option<&Path> {
        None
    }

    /// Returns how servers are told to draft with it.
    fn served(&self) -> &'static ServerFlags {
        &AS_DRAFT_MODEL
    }

    /// Returns the directory of a trained export that the recipe names; `None` for any other drafter.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Returns its training on the target's hidden states; `None` if the recipe does not train it in this way.
    fn training(&self) -> Option<&dyn KindTraining> {
        None
    }

    /// Returns the number of the target's first layers that drafting and training need.
    fn num_first_layers(&self) -> usize {
        0
    }

    /// Returns whether the drafter runs the target's first layers ahead of the others. A target can do that
    /// after only one layer.
    fn has_exit(&self) -> bool {
        false
    }

    /// Returns the maximum number of candidates in a round, under every rule except a fixed length.
    fn max_candidate_length(&self) -> usize {
        20
    }

    /// Returns the only rule that the drafter is measured under; `None` if the recipe's rules apply.
    fn own_rule(&self, _decoding: DecodingName) -> Option<StopRuleConfig> {
        None
    }

    /// Returns the hash by which recordings identify the drafter; its head is not part of it.
    ///
    /// # Errors
    /// If it cannot be recorded, or a file cannot be read.
    fn recorded_hash(&self, loading: &Loading<'_>) -> Result<String> {
        bail!("the drafter `{}` has no model, and so no probabilities to record", loading.id)
    }

    /// Returns the hash of the drafter's weights; an empty string for a kind without weights of its own.
    /// Loading does not compute it.
    ///
    /// # Errors
    /// If a file cannot be read.
    fn weights_hash(&self, _loading: &Loading<'_>) -> Result<String> {
        Ok(String::new())
    }

    /// Summarises the drafter's files and its head for a report.
    ///
    /// # Errors
    /// If a file cannot be read.
    fn summaries(
        &self,
        _loading: &Loading<'_>,
        _loaded: &LoadedDrafter,
    ) -> Result<Vec<ModelSummary>> {
        Ok(Vec::new())
    }

    /// Loads the model whose hidden states the drafter's head reads, for training the head.
    ///
    /// # Errors
    /// If it has no model, or a file is missing or broken.
    fn frozen(&self, loading: &Loading<'_>, _dtype: WeightDtype) -> Result<DrafterModel> {
        bail!("the drafter `{}` has no hidden states that a head could read", loading.id)
    }

    /// Builds the drafter's parts with the head in a directory, for a cascade in which a rule of a chain reads
    /// that head. The head must have been trained for a reviewer with this hash; for the target if `None`.
    ///
    /// # Errors
    /// If it cannot have another head, or the head belongs to other models.
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

/// What a drafter can be inside another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It drafts step by step.
    Steps,
    /// It looks tokens up.
    LookUp,
    /// It cannot be part of another.
    Neither,
}

/// A drafter: its kind with settings, and what drafters of all kinds may have.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "toml::Table", into = "toml::Table")]
pub struct DrafterRecipe {
    /// The kind, with its settings.
    pub kind: Kind,
    /// Its acceptance head: how it is trained, or its directory.
    pub head: Option<Origin<HeadTraining>>,
    /// Settings of stop rules, instead of those of `[evaluate.rules]`.
    pub rules: RulesRecipe,
    /// The most candidates of a round, under every rule except a fixed length; the kind's if absent.
    pub max_candidate_length: Option<usize>,
}

impl DrafterRecipe {
    /// Creates a drafter of a kind, without a head and with default rules.
    pub fn new(kind: Kind) -> Self {
        Self { kind, head: None, rules: RulesRecipe::default(), max_candidate_length: None }
    }

    /// Returns the training settings of the drafter's head; `None` if the recipe does not train one.
    pub fn head_training(&self) -> Option<&HeadTraining> {
        self.head.as_ref().and_then(Origin::training)
    }

    /// Lists the stop rules that the drafter is measured under. Settings in `rules`, the table
    /// `[evaluate.rules]`, apply where the drafter has none of its own. Rules that read what the drafter lacks
    /// are left out; a kind with a rule of its own has only that rule.
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
}

impl TryFrom<toml::Table> for DrafterRecipe {
    type Error = String;

    fn try_from(table: toml::Table) -> Result<Self, String> {
        Self::read(table, &Kinds::default())
    }
}

impl DrafterRecipe {
    /// Reads a drafter of one of `kinds`.
    ///
    /// # Errors
    /// If a key is unknown or has another form; the message names it.
    pub fn read(mut table: toml::Table, kinds: &Kinds) -> Result<Self, String> {
        fn take<T: de::DeserializeOwned + Default>(
            table: &mut toml::Table,
            key: &str,
        ) -> Result<T, String> {
            let value = table.remove(key).map(read_keys).transpose();
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

impl From<DrafterRecipe> for toml::Table {
    fn from(drafter: DrafterRecipe) -> Self {
        const TOML: &str = "settings are TOML";
        let name = drafter.kind.entry().name;
        let mut table = Self::from_iter([("kind".to_owned(), name.into())]);
        table.extend(drafter.kind.settings());
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

/// The drafters of a recipe, in its order.
#[derive(Debug, Clone, Default)]
pub struct DrafterRecipes(Vec<(DrafterId, DrafterRecipe)>);

impl DrafterRecipes {
    /// Creates a list of one drafter.
    pub fn one(id: DrafterId, drafter: DrafterRecipe) -> Self {
        Self(vec![(id, drafter)])
    }

    /// Iterates over names and drafters, in order.
    pub fn iter(&self) -> impl Iterator<Item = (DrafterId, &DrafterRecipe)> {
        self.0.iter().map(|(id, drafter)| (*id, drafter))
    }

    /// Finds the drafter with this name.
    pub fn get(&self, id: DrafterId) -> Option<&DrafterRecipe> {
        self.iter().find(|(name, _)| *name == id).map(|(_, drafter)| drafter)
    }

    /// Finds the drafter with this name, to change it.
    pub fn get_mut(&mut self, id: DrafterId) -> Option<&mut DrafterRecipe> {
        self.0.iter_mut().find(|(other, _)| *other == id).map(|(_, drafter)| drafter)
    }

    /// Keeps only the drafters for which `is_kept` returns true.
    pub fn retain(&mut self, mut is_kept: impl FnMut(DrafterId) -> bool) {
        self.0.retain(|(id, _)| is_kept(*id));
    }

    /// Adds a drafter at a place. Does not check that its name is new.
    pub(crate) fn insert(&mut self, place: usize, id: DrafterId, drafter: DrafterRecipe) {
        self.0.insert(place.min(self.0.len()), (id, drafter));
    }

    /// Adds a drafter at the end. Does not check that its name is new.
    pub fn push(&mut self, id: DrafterId, drafter: DrafterRecipe) {
        self.0.push((id, drafter));
    }

    /// Returns the directory of what a drafter's training exports: the one that the recipe names, or else the
    /// drafter's within `home`.
    pub(crate) fn export_dir(&self, home: &Path, id: DrafterId) -> PathBuf {
        let given = self.get(id).and_then(|it| it.kind.path());
        given.map_or_else(|| home.join(id.as_str()), Path::to_path_buf)
    }

    /// Returns the directory of a drafter's head; `None` if the recipe neither names nor trains one.
    pub(crate) fn head_dir(&self, home: &Path, id: DrafterId) -> Option<PathBuf> {
        let head = self.get(id)?.head.as_ref()?;
        Some(head.path().map_or_else(|| head_within(&self.export_dir(home, id)), Path::to_path_buf))
    }

    /// Lists the draft models with their checkpoint directories or names on the Hub. The first is the draft
    /// whose candidates and labels `build-data` writes.
    pub fn models(&self) -> Vec<(DrafterId, &Path)> {
        self.iter().filter_map(|(id, it)| Some((id, it.kind.model()?))).collect()
    }

    /// Checks every drafter.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn check(&self) -> Result<()> {
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

/// Sets `dtype` for each training in a table of drafters, unless it has one.
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

/// Checks that `all` has each of `members` in an allowed role, that none is named twice, and that at most one
/// exits the target early. Messages name `key`; `problem` says why a role is not allowed.
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

/// Joins drafters' names with commas.
pub fn names_text(ids: &[DrafterId]) -> String {
    ids.iter().map(DrafterId::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads drafters of several kinds, and `it` of this kind with these keys.
    pub(super) fn recipes(kind: &str, keys: &str) -> DrafterRecipes {
        let text = format!(
            "[it]\nkind = '{kind}'\n{keys}\n[draft]\nkind = 'model'\nmodel = 'd'\n\
             [small]\nkind = 'model'\nmodel = 's'\n[lookup]\nkind = 'prompt-lookup'\n\
             [exit1]\nkind = 'adapter'\nexit_layer = 1\n[exit2]\nkind = 'adapter'\nexit_layer = 2\n\
             [mix]\nkind = 'cascade'\ndrafters = ['draft', 'lookup']\nlengths = [[2, 2], [0, 2]]\n"
        );
        toml::from_str(&text).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the message with which `it` is refused.
    pub(super) fn message(kind: &str, keys: &str) -> String {
        format!("{:#}", recipes(kind, keys).check().expect_err("refused"))
    }

    fn unreadable(text: &str) -> String {
        toml::from_str::<DrafterRecipes>(text).expect_err("refused").to_string()
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
        let unknown = unreadable("[a]\nkind = 'medusa'\n");
        assert!(unknown.contains("medusa") && unknown.contains("prompt-lookup"), "{unknown}");
        assert!(unreadable("[a]\nmodel = 'x'\n").contains("kind"));
        assert!(unreadable("[a]\nkind = 'model'\nmodels = 'x'\n").contains("models"));
        assert!(unreadable("['a b']\nkind = 'model'\nmodel = 'x'\n").contains("`a b`"));
        let head = unreadable("[a]\nkind = 'model'\nmodel = 'x'\nhead = { layers = 2 }\n");
        assert!(head.contains("`head`") && head.contains("layers"), "{head}");
        let both = "[a]\nkind = 'adapter'\npath = 'x'\nexit_layer = 2\n";
        assert!(unreadable(both).contains("no other keys"));
        for (kind, keys, problem) in [
            ("prompt-lookup", "head = { path = 'x' }", "`drafters.it.head`"),
            ("prompt-lookup", "min_match = 0", "`drafters.it.min_match`"),
            ("adapter", "exit_layer = [1, 2]", "`drafters.it.exit_layer`"),
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
        let second = toml::from_str::<DrafterRecipes>(
            "[a]\nkind = 'model'\nmodel = 'x'\n[b]\nkind = 'model'\nmodel = 'y'\nhead = {}\n",
        );
        let message = second.expect("reads").check().expect_err("refused").to_string();
        assert!(message.contains("`drafters.b.head`") && message.contains("first"), "{message}");
    }
}

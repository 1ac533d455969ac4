//! What proposes candidates, and how it is loaded for a target.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use draftsmith_data::TextTokenizer;
use draftsmith_decode::{DraftModelParts, DrafterParts, LookUpParts, NamedParts, SelfDraftParts};
use draftsmith_files::{parse_json, read_file};
use draftsmith_model::{
    AcceptanceHead, Adapter, WeightDtype, check_trained_with, hash_adapter_dir,
};
use draftsmith_report::DrafterName;
use draftsmith_theory::{
    Decoding, DrafterId, HeadTiming, LookupFirst, MaxGramConfig, StopRuleConfig,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Error, Model};

/// Proposes the candidates that a target verifies. A [`Generator`](crate::Generator) loads its files.
#[derive(Debug, Clone)]
pub struct Drafter {
    source: DrafterSource,
    head: Option<PathBuf>,
    lookup_first: Option<LookupFirst>,
}

#[derive(Debug, Clone)]
enum DrafterSource {
    Model(Box<Model>),
    Adapter(PathBuf),
    Lookup(MaxGramConfig),
}

impl From<DrafterSource> for Drafter {
    fn from(source: DrafterSource) -> Self {
        Self { source, head: None, lookup_first: None }
    }
}

impl Drafter {
    /// Creates a drafter that runs a separate, smaller model with the target's tokenizer.
    pub fn model(draft: &Model) -> Self {
        DrafterSource::Model(Box::new(draft.clone())).into()
    }

    /// Creates a drafter from the self-draft adapter (Kangaroo) in a directory: the target's first
    /// layers draft. A head in the directory's `head` is used.
    pub fn adapter(dir: impl Into<PathBuf>) -> Self {
        DrafterSource::Adapter(dir.into()).into()
    }

    /// Creates a drafter by prompt lookup (Max-Gram), which proposes what followed the same tokens
    /// earlier in the text.
    pub fn prompt_lookup(config: MaxGramConfig) -> Self {
        DrafterSource::Lookup(config).into()
    }

    /// Adds the acceptance head in a directory to the drafter.
    #[must_use]
    pub fn with_head(self, dir: impl Into<PathBuf>) -> Self {
        Self { head: Some(dir.into()), ..self }
    }

    /// Adds a look-up before the drafter, which then drafts only where the look-up finds nothing.
    #[must_use]
    pub fn after_lookup(self, first: LookupFirst) -> Self {
        Self { lookup_first: Some(first), ..self }
    }

    /// Reads what the drafter needs to draft for `target`.
    pub(crate) fn load(self, target: &Model) -> Result<OpenedDrafter, Error> {
        let loaded = match (self.source, self.head) {
            (DrafterSource::Model(draft), head) => of_model(&draft, head, target)?,
            (DrafterSource::Adapter(dir), head) => of_adapter(&dir, head, target)?,
            (DrafterSource::Lookup(_), Some(dir)) => return Err(Error::HeadOfLookup(dir)),
            (DrafterSource::Lookup(config), None) => {
                OpenedDrafter::new("lookup", LookUpParts { config, bigrams: None }, usize::MAX)
            }
        };
        Ok(OpenedDrafter { lookup_first: self.lookup_first, ..loaded })
    }
}

/// A drafter that was read.
#[derive(Debug)]
pub(crate) struct OpenedDrafter {
    pub(crate) parts: NamedParts,
    /// The longest sequence that it can read.
    pub(crate) context: usize,
    /// The most candidates of a round, unless the rule says otherwise.
    pub(crate) max_candidates: usize,
    /// When its head predicts, if it has one.
    pub(crate) head: Option<HeadTiming>,
    pub(crate) lookup_first: Option<LookupFirst>,
    tuned: TunedKeys,
}

impl OpenedDrafter {
    fn new(name: &str, parts: impl DrafterParts + 'static, context: usize) -> Self {
        let parts = NamedParts { id: DrafterId::named(name), parts: Arc::new(parts) };
        let tuned = TunedKeys::default();
        Self { parts, context, max_candidates: 20, head: None, lookup_first: None, tuned }
    }

    /// Finds the rule that `draftsmith tune` wrote for this way of decoding.
    pub(crate) fn tuned(&self, decoding: &Decoding, dtype: WeightDtype) -> Option<&SavedRule> {
        let tuned = self.tuned.tuned.as_ref()?.of(decoding)?;
        let penalty = decoding.repetition_penalty;
        (tuned.dtype == dtype && tuned.repetition_penalty == penalty).then_some(tuned)
    }
}

/// The keys that tuning adds to an export's `config.json`.
#[derive(Debug, Default, Deserialize)]
struct TunedKeys {
    tuned: Option<ByDecoding<SavedRule>>,
}

impl TunedKeys {
    fn read(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("config.json");
        Ok(parse_json(&path, &read_file(&path)?)?)
    }
}

/// One value for greedy and one for sampled decoding.
#[derive(Debug, Deserialize)]
struct ByDecoding<T> {
    greedy: Option<T>,
    sampled: Option<T>,
}

impl<T> ByDecoding<T> {
    fn of(&self, decoding: &Decoding) -> Option<&T> {
        if decoding.is_greedy() { self.greedy.as_ref() } else { self.sampled.as_ref() }
    }
}

/// A tuned rule, with the name that also names the look-ups before its drafter.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedRule {
    pub(crate) drafter: DrafterName,
    pub(crate) config: StopRuleConfig,
    #[serde(default)]
    dtype: WeightDtype,
    #[serde(default = "draftsmith_data::no_penalty")]
    repetition_penalty: f64,
}

/// A head that was read: its network, when it predicts, and its tuning.
type ReadHead = (AcceptanceHead, HeadTiming, TunedKeys);

fn of_model(draft: &Model, head: Option<PathBuf>, target: &Model) -> Result<OpenedDrafter, Error> {
    TextTokenizer::check_shared(target.tokenizer(), draft.tokenizer())?;
    let model = draft.network().clone();
    let (hidden_size, context) = (model.shape().hidden_size, model.shape().context);
    let Some(dir) = head else {
        return Ok(OpenedDrafter::new("draft", DraftModelParts { model, head: None }, context));
    };
    let hash = || Ok(draft.hash()?.to_owned());
    let (network, timing, tuned) = read_head(&dir, hidden_size, ("draft", hash), target)?;
    let parts = DraftModelParts { model, head: Some(network) };
    let loaded = OpenedDrafter::new("draft", parts, context);
    Ok(OpenedDrafter { head: Some(timing), tuned, ..loaded })
}

fn of_adapter(dir: &Path, head: Option<PathBuf>, target: &Model) -> Result<OpenedDrafter, Error> {
    let network = target.network();
    let (shape, device) = (network.shape(), network.device());
    let (config, adapter) = Adapter::from_dir(dir, shape, network.dtype(), &device)?;
    check_target(("adapter", dir), config.target_hash.as_deref(), &config.training, target)?;
    let exit_layer = config.exit_layer;
    let mut parts = SelfDraftParts { exit_layer, adapter, head: None };
    let (mut head_timing, mut tuned) = (None, TunedKeys::read(dir)?);
    let beside = dir.join("head");
    if let Some(of_head) = head.or_else(|| beside.join("config.json").is_file().then_some(beside)) {
        let hash = || Ok(hash_adapter_dir(dir, exit_layer)?);
        let (size, of) = (config.model.shape.hidden_size, ("adapter", hash));
        let (network, timing, of_tuning) = read_head(&of_head, size, of, target)?;
        (parts.head, head_timing, tuned) = (Some(network), Some(timing), of_tuning);
    }
    let loaded = OpenedDrafter::new("adapter", parts, shape.context);
    // Kangaroo's γ.
    Ok(OpenedDrafter { max_candidates: 6, head: head_timing, tuned, ..loaded })
}

/// Reads a head of a drafter with this hidden size, name and hash.
fn read_head(
    dir: &Path,
    hidden_size: usize,
    (drafter, hash): (&'static str, impl FnOnce() -> Result<String, Error>),
    target: &Model,
) -> Result<ReadHead, Error> {
    let (config, head) = AcceptanceHead::from_dir(dir, hidden_size, &target.network().device())?;
    check_trained_with(("head", dir), drafter, config.draft_hash.as_deref(), hash)?;
    check_target(("head", dir), config.target_hash.as_deref(), &config.training, target)?;
    let looks_ahead = config.reads.looks_ahead();
    let timing = if looks_ahead { HeadTiming::AtDraw } else { HeadTiming::AfterRead };
    Ok((head, timing, TunedKeys::read(dir)?))
}

/// Checks the target, and the tokenizer of the training data if the record of the training names it.
fn check_target(
    export: (&'static str, &Path),
    hash: Option<&str>,
    record: &Map<String, Value>,
    target: &Model,
) -> Result<(), Error> {
    check_trained_with(export, "target", hash, || Ok::<_, Error>(target.hash()?.to_owned()))?;
    let tokenizer = record.get("data").and_then(|data| data.get("tokenizer")?.as_str());
    check_trained_with(export, "tokenizer", tokenizer, || Ok(target.tokenizer().hash()?))
}

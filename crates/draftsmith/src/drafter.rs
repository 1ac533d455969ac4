//! What proposes candidates, and how it is loaded for a target.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use draftsmith_data::TextTokenizer;
use draftsmith_decode::{DraftModelParts, LookUpParts, NamedParts, SelfDraftParts};
use draftsmith_files::{hash_bytes, hash_file, parse_json, read_file};
use draftsmith_model::{AcceptanceHead, Adapter, WeightDtype, weight_files};
use draftsmith_report::{DrafterName, FittedCalibration};
use draftsmith_theory::{
    Calibration, Decoding, DrafterId, HeadTiming, LookupFirst, MaxGramConfig, StopRuleConfig,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Error, Model};

/// Proposes the candidates that a target verifies. A [`Generator`](crate::Generator) loads its files.
#[derive(Debug, Clone)]
pub struct Drafter {
    kind: Kind,
    head: Option<PathBuf>,
    lookup_first: Option<LookupFirst>,
}

#[derive(Debug, Clone)]
enum Kind {
    Model(Box<Model>),
    Adapter(PathBuf),
    PromptLookup(MaxGramConfig),
}

impl From<Kind> for Drafter {
    fn from(kind: Kind) -> Self {
        Self { kind, head: None, lookup_first: None }
    }
}

impl Drafter {
    /// A separate, smaller model with the target's tokenizer.
    pub fn model(draft: &Model) -> Self {
        Kind::Model(Box::new(draft.clone())).into()
    }

    /// A self-draft adapter (Kangaroo) in a directory: the target's first layers draft. A head in the
    /// directory's `head` is used.
    pub fn adapter(dir: impl Into<PathBuf>) -> Self {
        Kind::Adapter(dir.into()).into()
    }

    /// Prompt lookup (Max-Gram), which proposes what followed the same tokens earlier in the text.
    pub fn prompt_lookup(config: MaxGramConfig) -> Self {
        Kind::PromptLookup(config).into()
    }

    /// The same drafter with the acceptance head in a directory.
    #[must_use]
    pub fn with_head(self, dir: impl Into<PathBuf>) -> Self {
        Self { head: Some(dir.into()), ..self }
    }

    /// The same drafter after a look-up: it drafts only where the look-up finds nothing.
    #[must_use]
    pub fn after_lookup(self, first: LookupFirst) -> Self {
        Self { lookup_first: Some(first), ..self }
    }

    /// Reads what the drafter needs to draft for `target`.
    pub(crate) fn load(self, target: &Model) -> Result<LoadedDrafter, Error> {
        let Self { kind, head, lookup_first } = self;
        let mut loaded = match kind {
            Kind::Model(draft) => of_model(&draft, head, target)?,
            Kind::Adapter(dir) => of_adapter(&dir, head, target)?,
            Kind::PromptLookup(config) => {
                if let Some(dir) = head {
                    return Err(Error::HeadOfLookup(dir));
                }
                LoadedDrafter {
                    parts: named("lookup", LookUpParts { config, bigrams: None }),
                    context: usize::MAX,
                    max_candidates: 20,
                    head: None,
                    tuned: ByDecoding::default(),
                    lookup_first: None,
                }
            }
        };
        loaded.lookup_first = lookup_first;
        Ok(loaded)
    }
}

/// A drafter that was read.
#[derive(Debug)]
pub(crate) struct LoadedDrafter {
    pub(crate) parts: NamedParts,
    /// The longest sequence that it can read.
    pub(crate) context: usize,
    /// The most candidates of a round, unless the rule says otherwise.
    pub(crate) max_candidates: usize,
    pub(crate) head: Option<LoadedHead>,
    pub(crate) lookup_first: Option<LookupFirst>,
    tuned: ByDecoding<TunedRule>,
}

impl LoadedDrafter {
    /// The rule that `draftsmith tune` wrote for this way of decoding, with its look-ups.
    pub(crate) fn tuned(
        &self,
        decoding: &Decoding,
        dtype: WeightDtype,
    ) -> Option<(StopRuleConfig, Option<LookupFirst>)> {
        let tuned = self.tuned.of(decoding)?;
        let is_for_this =
            tuned.dtype == dtype && tuned.repetition_penalty == decoding.repetition_penalty;
        is_for_this.then(|| (tuned.config.clone(), tuned.drafter.lookup_first()))
    }
}

/// What decoding needs to know of a head.
#[derive(Debug)]
pub(crate) struct LoadedHead {
    pub(crate) timing: HeadTiming,
    calibration: ByDecoding<FittedCalibration>,
}

impl LoadedHead {
    pub(crate) fn calibration(&self, decoding: &Decoding) -> Option<&Calibration> {
        self.calibration.of(decoding).map(|fitted| &fitted.map)
    }
}

/// The keys that tuning adds to an export's `config.json`.
#[derive(Deserialize)]
struct TunedKeys {
    #[serde(default)]
    tuned: ByDecoding<TunedRule>,
    #[serde(default)]
    calibration: ByDecoding<FittedCalibration>,
}

/// One value for greedy and one for sampled decoding.
#[derive(Debug, Deserialize)]
struct ByDecoding<T> {
    greedy: Option<T>,
    sampled: Option<T>,
}

impl<T> Default for ByDecoding<T> {
    fn default() -> Self {
        Self { greedy: None, sampled: None }
    }
}

impl<T> ByDecoding<T> {
    fn of(&self, decoding: &Decoding) -> Option<&T> {
        if decoding.is_greedy() { self.greedy.as_ref() } else { self.sampled.as_ref() }
    }
}

#[derive(Debug, Deserialize)]
struct TunedRule {
    drafter: DrafterName,
    config: StopRuleConfig,
    #[serde(default)]
    dtype: WeightDtype,
    #[serde(default = "draftsmith_data::no_penalty")]
    repetition_penalty: f64,
}

fn tuned_keys(dir: &Path) -> Result<TunedKeys, Error> {
    let path = dir.join("config.json");
    Ok(parse_json(&path, &read_file(&path)?)?)
}

fn named(name: &str, parts: impl draftsmith_decode::DrafterParts + 'static) -> NamedParts {
    NamedParts { id: DrafterId::named(name), parts: Arc::new(parts) }
}

fn of_model(draft: &Model, head: Option<PathBuf>, target: &Model) -> Result<LoadedDrafter, Error> {
    TextTokenizer::check_shared(target.tokenizer(), draft.tokenizer())?;
    let network = draft.network();
    let mut loaded = LoadedDrafter {
        parts: named("draft", DraftModelParts { model: network.clone(), head: None }),
        context: network.shape().context,
        max_candidates: 20,
        head: None,
        tuned: ByDecoding::default(),
        lookup_first: None,
    };
    if let Some(dir) = head {
        let draft_hash = || Ok(draft.hash()?.to_owned());
        let head =
            loaded.read_head(&dir, network.shape().hidden_size, ("draft", &draft_hash), target)?;
        loaded.parts = named("draft", DraftModelParts { model: network.clone(), head: Some(head) });
    }
    Ok(loaded)
}

fn of_adapter(dir: &Path, head: Option<PathBuf>, target: &Model) -> Result<LoadedDrafter, Error> {
    let network = target.network();
    let read = Adapter::from_dir(dir, network.shape(), network.dtype(), &network.device());
    let (config, adapter) = read?;
    if let Some(then) = &config.target_hash {
        check_hash(("adapter", dir), ("target", then), target.hash()?)?;
    }
    check_tokenizer(("adapter", dir), &config.training, target)?;
    let exit_layer = config.exit_layer;
    let parts = |head| SelfDraftParts { exit_layer, adapter: adapter.clone(), head };
    let mut loaded = LoadedDrafter {
        parts: named("adapter", parts(None)),
        context: network.shape().context,
        // Kangaroo's γ.
        max_candidates: 6,
        head: None,
        tuned: tuned_keys(dir)?.tuned,
        lookup_first: None,
    };
    let beside = dir.join("head");
    if let Some(head) = head.or_else(|| beside.join("config.json").is_file().then_some(beside)) {
        let adapter_hash = || hash_of_adapter(dir, exit_layer);
        let hidden_size = config.model.shape.hidden_size;
        let head = loaded.read_head(&head, hidden_size, ("adapter", &adapter_hash), target)?;
        loaded.parts = named("adapter", parts(Some(head)));
    }
    Ok(loaded)
}

impl LoadedDrafter {
    /// Reads the head in a directory, and checks that it belongs to the target and to the drafter, whose hash
    /// is computed only for a comparison.
    fn read_head(
        &mut self,
        dir: &Path,
        hidden_size: usize,
        (of, drafter_hash): (&'static str, &dyn Fn() -> Result<String, Error>),
        target: &Model,
    ) -> Result<AcceptanceHead, Error> {
        let (config, head) =
            AcceptanceHead::from_dir(dir, hidden_size, &target.network().device())?;
        if let Some(then) = &config.draft_hash {
            check_hash(("head", dir), (of, then), &drafter_hash()?)?;
        }
        if let Some(then) = &config.target_hash {
            check_hash(("head", dir), ("target", then), target.hash()?)?;
        }
        check_tokenizer(("head", dir), &config.training, target)?;
        let timing = match config.reads.looks_ahead() {
            true => HeadTiming::AtDraw,
            false => HeadTiming::AfterRead,
        };
        let TunedKeys { tuned, calibration } = tuned_keys(dir)?;
        (self.tuned, self.head) = (tuned, Some(LoadedHead { timing, calibration }));
        Ok(head)
    }
}

fn check_hash(
    (what, dir): (&'static str, &Path),
    (of, then): (&'static str, &str),
    now: &str,
) -> Result<(), Error> {
    if then == now {
        return Ok(());
    }
    let (then, now) = (then.to_owned(), now.to_owned());
    Err(Error::OtherModel { what, path: dir.to_path_buf(), of, then, now })
}

/// Compares the tokenizer of the training data, if the record of the training names it.
fn check_tokenizer(
    export: (&'static str, &Path),
    training: &Map<String, Value>,
    target: &Model,
) -> Result<(), Error> {
    match training.get("data").and_then(|data| data.get("tokenizer")).and_then(Value::as_str) {
        Some(then) => check_hash(export, ("tokenizer", then), &target.tokenizer().hash()?),
        None => Ok(()),
    }
}

/// The hash by which a head names its adapter: of the weights and the exit layer.
fn hash_of_adapter(dir: &Path, exit_layer: usize) -> Result<String, Error> {
    let hashes: Result<Vec<String>, _> =
        weight_files(dir)?.iter().map(|name| hash_file(&dir.join(name))).collect();
    Ok(hash_bytes(format!("{} {exit_layer}", hashes?.join(" ")).as_bytes()))
}

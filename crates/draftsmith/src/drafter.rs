//! Drafters, which propose candidates, and how they are loaded for a target.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use draftsmith_data::TextTokenizer;
use draftsmith_decode::{DrafterParts, NamedParts};
use draftsmith_model::WeightDtype;
use draftsmith_recipe::kinds::Kind;
use draftsmith_recipe::kinds::model::ModelKind;
use draftsmith_recipe::kinds::prompt_lookup::PromptLookupKind;
use draftsmith_recipe::{
    DrafterKind, DrafterRecipe, DrafterRecipes, KindEntry, Kinds, LoadedDrafter, Loading, Origin,
    Role, Tuned, TunedRule, Workspace,
};
use draftsmith_report::{DecodingName, Road};
use draftsmith_theory::{
    Decoding, DrafterId, HeadTiming, LookupFirst, MaxGramConfig, StopRuleConfig, StoredAnswers,
};
use serde::Serialize;

use crate::{Error, Model, Result};

/// A drafter, which proposes candidates. [`Generator`](crate::Generator) loads its files.
#[derive(Debug, Clone)]
pub struct Drafter {
    drafter: DrafterRecipe,
    /// The draft model, if it is already loaded.
    model: Option<Model>,
    lookup_first: Option<LookupFirst>,
    answers: Option<PathBuf>,
}

impl Drafter {
    /// Creates a drafter from the settings of its kind.
    pub fn of_kind(kind: Kind) -> Self {
        Self { drafter: DrafterRecipe::new(kind), model: None, lookup_first: None, answers: None }
    }

    /// Creates a custom drafter from your own [`DrafterParts`].
    /// [`TextParts`](draftsmith_decode::TextParts) makes them from a function.
    pub fn of_parts(parts: impl DrafterParts + 'static) -> Self {
        Self::of_kind(Arc::new(OwnKind { parts: Arc::new(parts) }))
    }

    /// Recognises the drafter in a directory by its `config.json`: an adapter (Kangaroo), an
    /// EAGLE-3 drafter, a block drafter, a draft model, or another built-in kind. Uses the acceptance
    /// head in the subdirectory `head` and the stop rule written by `draftsmith tune`, if they exist.
    ///
    /// # Errors
    /// If the directory contains no known drafter, or only an acceptance head.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_of(&Kinds::default(), dir)
    }

    /// Recognises the drafter in a directory, which must be of one of `kinds`.
    ///
    /// # Errors
    /// As [`Drafter::open`].
    pub fn open_of(kinds: &Kinds, dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let found = kinds.found_in(dir)?;
        let kind = found.kind.and_then(|kind| kind.in_dir(dir));
        Ok(Self::of_kind(kind.ok_or_else(|| Error::NotADrafter(dir.to_path_buf()))?))
    }

    /// Creates a drafter that uses a separate, smaller model with the target's tokenizer.
    pub fn model(draft: &Model) -> Self {
        let kind = ModelKind { model: draft.dir().to_path_buf() };
        Self { model: Some(draft.clone()), ..Self::of_kind(Arc::new(kind)) }
    }

    /// Creates a drafter by prompt lookup (Max-Gram), which proposes the tokens that followed the
    /// same tokens earlier in the text.
    pub fn prompt_lookup(config: MaxGramConfig) -> Self {
        Self::of_kind(Arc::new(PromptLookupKind::from(config)))
    }

    /// Adds a file of `draftsmith build-datastore`, with answers that look-ups search.
    #[must_use]
    pub fn with_answers(self, path: impl Into<PathBuf>) -> Self {
        Self { answers: Some(path.into()), ..self }
    }

    /// Adds the acceptance head in a directory to the drafter.
    #[must_use]
    pub fn with_head(mut self, dir: impl Into<PathBuf>) -> Self {
        self.drafter.head = Some(Origin::Path(dir.into().into()));
        self
    }

    /// Adds prompt lookup before the drafter, which then drafts only where lookup finds no match.
    #[must_use]
    pub fn after_lookup(self, first: LookupFirst) -> Self {
        Self { lookup_first: Some(first), ..self }
    }

    /// Loads what the drafter needs to draft for `target`.
    pub(crate) fn load(self, target: &Model) -> Result<OpenedDrafter> {
        let Self { drafter, model, lookup_first, answers } = self;
        let kind = drafter.kind.clone();
        if let (Some(Origin::Path(dir)), true) = (&drafter.head, kind.role() != Role::Steps) {
            return Err(Error::HeadOfLookup(dir.path.clone()));
        }
        let id = match kind.model() {
            Some(_) => DrafterId::DRAFT,
            None => DrafterId::named(kind.entry().name),
        };
        let device = target.network().device();
        let model = match (model, kind.model()) {
            (None, Some(dir)) => Some(Model::load_as(dir, target.network().dtype(), &device)?),
            (model, _) => model,
        };
        if let Some(draft) = &model {
            TextTokenizer::check_shared(target.tokenizer(), draft.tokenizer())?;
        }
        let draft = model.as_ref().map(|draft| (id, draft.dir(), draft.network()));
        let mut workspace =
            Workspace::of_models((target.dir(), target.network()), draft, target.chat_template());
        workspace.stored_answers = answers;
        let most = drafter.max_candidate_length.unwrap_or(kind.max_candidate_length());
        let drafters = DrafterRecipes::one(id, drafter);
        let home = PathBuf::new();
        let loaded =
            kind.load(&Loading { id, drafters: &drafters, home, workspace: &workspace })?;
        let tuned = loaded.tuned_dir().map(Tuned::read).transpose()?.flatten();
        let head = loaded.head_timing();
        Ok(OpenedDrafter {
            parts: loaded.parts,
            context: workspace.models.context()?,
            max_candidates: most,
            own_rule: [DecodingName::Greedy, DecodingName::Sampled].map(|it| kind.own_rule(it)),
            head,
            lookup_first,
            answers: workspace.answers()?,
            tuned: tuned.unwrap_or_default(),
        })
    }
}

/// A loaded drafter.
#[derive(Debug)]
pub(crate) struct OpenedDrafter {
    pub(crate) parts: NamedParts,
    /// The maximum sequence length that both drafter and target can read, in tokens.
    pub(crate) context: usize,
    /// The maximum number of candidates in a round, unless the stop rule sets another.
    pub(crate) max_candidates: usize,
    /// The drafter's only rules for greedy and sampled decoding; `None` if it supports any rule.
    own_rule: [Option<StopRuleConfig>; 2],
    /// The moment at which the acceptance head predicts; `None` without a head.
    pub(crate) head: Option<HeadTiming>,
    pub(crate) lookup_first: Option<LookupFirst>,
    pub(crate) answers: Option<Arc<StoredAnswers>>,
    tuned: Tuned,
}

impl OpenedDrafter {
    /// Returns the stop rule that `draftsmith tune` wrote for these settings and this dtype, if
    /// any.
    pub(crate) fn tuned(&self, decoding: &Decoding, dtype: WeightDtype) -> Option<&TunedRule> {
        let rule = self.tuned.rule(DecodingName::of(decoding))?;
        rule.fits(dtype, Some(decoding)).then_some(rule)
    }

    /// Returns the only stop rule that the drafter supports; `None` if it supports any.
    pub(crate) fn own_rule(&self, decoding: &Decoding) -> Option<&StopRuleConfig> {
        self.own_rule[usize::from(!decoding.is_greedy())].as_ref()
    }
}

/// The kind of a custom drafter, which the calling program built.
#[derive(Debug, Serialize)]
struct OwnKind {
    #[serde(skip)]
    parts: Arc<dyn DrafterParts>,
}

static OWN: KindEntry = KindEntry {
    name: "own",
    read: |_| Err("names a drafter that only its program can build".to_owned()),
    export: None,
};

impl DrafterKind for OwnKind {
    fn entry(&self) -> &'static KindEntry {
        &OWN
    }

    fn text(&self) -> String {
        "own drafter".to_owned()
    }

    fn road(&self) -> Road {
        Road::SeparateDraft
    }

    fn check(&self, _key: &str, _all: &DrafterRecipes) -> anyhow::Result<()> {
        Ok(())
    }

    fn load(&self, loading: &Loading<'_>) -> anyhow::Result<LoadedDrafter> {
        let parts = NamedParts { id: loading.id, parts: self.parts.clone() };
        Ok(LoadedDrafter { parts, head: None, dir: None, rule_dir: None, sizes: Vec::new() })
    }

    fn role(&self) -> Role {
        Role::Steps
    }
}

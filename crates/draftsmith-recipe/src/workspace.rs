//! The inputs of a run: models, their tokenizers and chat templates, and the data, heads and
//! adapters built from them. Each is loaded and hashed on first use, and shared by all stages.
//!
//! Only this module decides how provenance identifies an input. A model is identified by the hash
//! of its files, the text side by [`TextIdentity`], data by the hash of its rows, and a head or
//! adapter by the hash of its weights.

mod artifacts;
mod model_dir;
mod models;
mod text;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use draftsmith_data::{Provenance, hash_bytes};
use draftsmith_model::{CausalLm, check_trained_with, config_file};
use draftsmith_theory::{DrafterId, StoredAnswers};

pub use self::artifacts::Artifacts;
pub(crate) use self::model_dir::check_merged;
pub use self::model_dir::hash_dir;
use self::model_dir::{ModelDir, TARGET, get_or_read};
pub use self::models::{LayersNeeded, Models};
pub use self::text::{TextIdentity, TextSource, text_files};
use crate::answer_files::read_answers;
use crate::hub::{HubWeights, model_dir};
use crate::pair::Pair;
use crate::text_side::TextSide;
use crate::watch::Watch;

/// The inputs of a run.
#[derive(Default)]
pub struct Workspace {
    /// The target and the draft models.
    pub models: Models,
    /// The source of the target's tokenizer, chat template and end markers.
    pub text: TextSource,
    /// Built data, acceptance heads and adapters.
    pub artifacts: Artifacts,
    /// Whether drafters that were trained for another target are loaded too.
    pub takes_others: bool,
    /// The file of the stored answers that look-ups search; `None` for none.
    pub stored_answers: Option<PathBuf>,
    answers: OnceLock<Arc<StoredAnswers>>,
    text_side: OnceLock<TextSide>,
    pair: OnceLock<Pair>,
    target_alone: OnceLock<Pair>,
}

impl Workspace {
    /// Creates a workspace for models in directories, still unread. `devices` must not be empty.
    pub fn new(target: &Path, drafts: &[(DrafterId, &Path)], devices: Vec<Device>) -> Self {
        let draft = |(id, dir): &(DrafterId, &Path)| (*id, ModelDir::new(&id.to_string(), dir));
        let models = Models {
            devices,
            target: ModelDir::new(TARGET, target),
            drafts: drafts.iter().map(draft).collect(),
            first_layers: ModelDir::new("first layers of the target", target),
            ..Models::default()
        };
        Self { models, ..Self::default() }
    }

    /// Creates a workspace from loaded models with their directories: the target, and optionally a
    /// draft model. `chat_template` replaces the target's.
    pub fn of_models(
        target: (&Path, &CausalLm),
        draft: Option<(DrafterId, &Path, &CausalLm)>,
        chat_template: Option<&str>,
    ) -> Self {
        let mut workspace = Self::new(target.0, &[], vec![target.1.device()]);
        let models = &mut workspace.models;
        models.dtype = target.1.dtype();
        models.target = ModelDir::holding(TARGET, target.0, target.1);
        let draft = draft.map(|(id, dir, model)| (id, ModelDir::holding(id.as_str(), dir, model)));
        models.drafts.extend(draft);
        workspace.text.chat_template = chat_template.map(str::to_owned);
        workspace
    }

    /// Creates a workspace for models in directories or on the Hugging Face Hub, and downloads
    /// missing files from the Hub. If the target runs on servers, `served_as` is its name there,
    /// and its weights are not needed. `chat_template` replaces the target's.
    ///
    /// # Errors
    /// If a model on the Hub cannot be downloaded.
    pub fn open(
        target: &Path,
        served_as: Option<&str>,
        drafts: &[(DrafterId, &Path)],
        chat_template: Option<&str>,
        devices: Vec<Device>,
        watch: &dyn Watch,
    ) -> Result<Self> {
        let weights = if served_as.is_none() { HubWeights::All } else { HubWeights::Without };
        let target = model_dir(target, weights, watch)?;
        let local =
            |(id, dir): &(DrafterId, &Path)| Ok((*id, model_dir(dir, HubWeights::All, watch)?));
        let drafts: Vec<(DrafterId, PathBuf)> = drafts.iter().map(local).collect::<Result<_>>()?;
        let drafts: Vec<(DrafterId, &Path)> =
            drafts.iter().map(|(id, dir)| (*id, &**dir)).collect();
        let mut workspace = Self::new(&target, &drafts, devices);
        workspace.models.served_as = served_as.map(str::to_owned);
        workspace.models.target.is_elsewhere = served_as.is_some();
        workspace.models.first_layers.is_elsewhere = served_as.is_some();
        workspace.text.chat_template = chat_template.map(str::to_owned);
        (workspace.models.watch, workspace.artifacts.watch) = (watch.share(), watch.share());
        Ok(workspace)
    }

    /// Loads target and draft model with their text side, and checks that their tokenizers match.
    ///
    /// # Errors
    /// If a file is missing or broken, or the tokenizers differ.
    pub fn pair(&self) -> Result<&Pair> {
        get_or_read(&self.pair, || {
            let text = self.text_side()?.clone();
            let models = &self.models;
            let draft = models.draft_in(models.dtype)?.cloned();
            Ok(Pair { target: models.target_in(models.dtype)?.clone(), draft, text })
        })
    }

    /// Loads the text side but no weights, and checks that the models' tokenizers match.
    ///
    /// # Errors
    /// If a file is missing or broken, or the tokenizers differ.
    pub fn text_side(&self) -> Result<&TextSide> {
        get_or_read(&self.text_side, || {
            let models = &self.models;
            let text = self.text.of_target(models)?.clone();
            if let Some(draft) = models.draft() {
                self.text.check_tokenizer(models, draft)?;
            }
            Ok(TextSide { context: models.context()?, ..text })
        })
    }

    /// Loads the target without a draft model, whose context might be shorter than the target's.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_alone(&self) -> Result<&Pair> {
        get_or_read(&self.target_alone, || {
            let models = &self.models;
            let text = self.text.of_target(models)?.clone();
            Ok(Pair { target: models.target_in(models.dtype)?.clone(), draft: None, text })
        })
    }

    /// Loads the stored answers that look-ups search; `None` if no file is named.
    ///
    /// # Errors
    /// If the file is missing or broken, or was built for another tokenizer.
    pub fn answers(&self) -> Result<Option<Arc<StoredAnswers>>> {
        let read = |path: &PathBuf| {
            let tokenizer = &self.text.identity(&self.models)?.tokenizer;
            let vocab_size = self.models.vocab_size()?;
            let read = || Ok(Arc::new(read_answers(path, tokenizer, vocab_size)?));
            get_or_read(&self.answers, read).cloned()
        };
        self.stored_answers.as_ref().map(read).transpose()
    }

    /// Loads the stored answers, which a look-up searches.
    ///
    /// # Errors
    /// As [`Self::answers`], or if there is no file of them.
    pub(crate) fn need_answers(&self) -> Result<Arc<StoredAnswers>> {
        self.answers()?.context(
            "look-ups search earlier answers, and none are given; hint: name a file of `draftsmith build-datastore` \
             with the recipe's key `answers`, or with `--answers`",
        )
    }

    /// Hashes the file of the stored answers; `None` without one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn answers_hash(&self) -> Result<Option<String>> {
        self.stored_answers.as_ref().map(|path| self.artifacts.file_hash(path)).transpose()
    }

    /// Loads a draft model. Checks that it has the target's tokenizer, and that its context is at
    /// least as long as the one shared by the target and the first draft model.
    ///
    /// # Errors
    /// If a file is missing or broken, or a check fails.
    pub fn draft_model(&self, id: DrafterId) -> Result<&CausalLm> {
        let models = &self.models;
        let draft = models.draft_dir_of(id)?;
        self.text.check_tokenizer(models, draft)?;
        let (context, needed) = (draft.config()?.shape.context, models.context()?);
        ensure!(
            context >= needed,
            "the draft model `{id}` in `{}` has a context of {context} tokens, but that of the other models \
             is {needed}",
            draft.dir.display()
        );
        models.draft_model_in(id, models.dtype)
    }

    /// Checks that the export `what` in a directory was trained for the target. `then` is the target's
    /// hash in its files, if they have one.
    ///
    /// # Errors
    /// If the target is another one, unless such exports are taken too, or cannot be read.
    pub fn check_target(&self, what: (&'static str, &Path), then: Option<&str>) -> Result<()> {
        let now = || self.models.target_hash().map(str::to_owned);
        check_trained_with(what, "target", then.filter(|_| !self.takes_others), now)
    }

    /// Describes the provenance of data that target and draft model produce with this seed and
    /// greedy decoding. Prompts are not included.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn provenance(&self, seed: u64, max_new_tokens: usize) -> Result<Provenance> {
        let TextIdentity { tokenizer, chat_template, special_tokens, eos_token_ids, stop_strings } =
            self.text.identity(&self.models)?.clone();
        Ok(Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            target: self.target_identity()?,
            draft: self.models.draft_hash()?.map(str::to_owned),
            tokenizer,
            chat_template,
            special_tokens,
            eos_token_ids,
            stop_strings,
            served_model: self.models.served_as.clone(),
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_new_tokens: max_new_tokens as u64,
            seed,
            dtype: self.models.arithmetic(),
            ..Provenance::default()
        })
    }

    /// Returns the target's identity in provenance: the hash of its files. For a target on servers,
    /// it is a hash of its `config.json` and its name on the servers.
    fn target_identity(&self) -> Result<String> {
        let Some(name) = &self.models.served_as else {
            return Ok(self.models.target_hash()?.to_owned());
        };
        let config = self.artifacts.file_hash(&config_file(self.models.target_dir()))?;
        Ok(hash_bytes(format!("{config} served as {name}").as_bytes()))
    }
}

#[cfg(test)]
mod tests;

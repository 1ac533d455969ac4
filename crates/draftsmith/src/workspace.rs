//! What a run works with: its models, their tokenizer and chat template, prompt files, built data, and
//! the heads and adapters that it trains. Each is read when it is first needed, and read and hashed
//! once for all stages.
//!
//! What each is called in provenance is computed here and nowhere else: a model by the hash of its
//! files, the text side by [`TextIdentity`], data by the hash of its rows, a head or an adapter by
//! the hash of its weights.
//!
//! Models and prompts do not change while a run lasts. Data, heads and adapters do: whoever writes
//! one calls [`Workspace::forget`].

mod model_dir;
mod served;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_data::{
    ChatFormat, DataError, DataSet, Incomplete, LengthBounds, PromptFile, Provenance, StopStrings,
    TextTokenizer, hash_bytes, hash_file, read_dir,
};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, CausalLm, ModelConfig,
    ModelShape, WeightDtype, weight_files,
};
use serde::Serialize;

pub(crate) use self::model_dir::hash_dir;
use self::model_dir::{ModelDir, get_or_read};
use crate::console::Console;
use crate::ends::{Ends, StopText};
use crate::hub::{Wanted, model_dir};
use crate::pair::Pair;
use crate::prompt_files::files_of;
use crate::text_side::TextSide;

/// The inputs of a run, on its devices.
pub(crate) struct Workspace {
    devices: Vec<Device>,
    dtype: WeightDtype,
    target: ModelDir,
    draft: Option<ModelDir>,
    small_draft: Option<ModelDir>,
    /// The chat template that was chosen instead of the target's own.
    chat_template: Option<String>,
    ends: Ends,
    /// The name that servers serve the target under, where its weights are not read.
    served_as: Option<String>,
    /// How many of a served target's first layers are read where adapters stand on them.
    num_first_layers: usize,
    first_layers: Mutex<Vec<(WeightDtype, CausalLm)>>,
    /// Shows what takes long.
    console: Console,
    text: OnceLock<Text>,
    text_identity: OnceLock<TextIdentity>,
    text_side: OnceLock<TextSide>,
    pair: OnceLock<Pair>,
    target_alone: OnceLock<Pair>,
    files: Kept<String>,
    data: Kept<Arc<DataSet>>,
    incomplete_data: Incomplete,
    heads: Kept<(AcceptanceHeadConfig, AcceptanceHead)>,
    adapters: Kept<(AdapterConfig, Adapter)>,
    /// What was read or hashed, in order.
    #[cfg(test)]
    pub(crate) reads: Mutex<Vec<String>>,
}

/// The text side of the target.
struct Text {
    tokenizer: Arc<TextTokenizer>,
    chat_format: Arc<ChatFormat>,
}

/// What shapes and stops text, as provenance has it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TextIdentity {
    /// Hash of the tokenizer's file.
    pub(crate) tokenizer: String,
    /// Hash of the chat template; None where there is none.
    pub(crate) chat_template: Option<String>,
    /// The special tokens that the chat template may name.
    pub(crate) special_tokens: BTreeMap<String, String>,
    /// The tokens that end a response: those that were chosen, or else those that
    /// `generation_config.json` has, or else `config.json`.
    pub(crate) eos_token_ids: Vec<u32>,
    /// The strings that do; not named where there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stop_strings: Vec<String>,
}

/// What was read of files and directories.
type Kept<T> = Mutex<BTreeMap<PathBuf, T>>;

impl Workspace {
    /// The models in these directories; nothing is read yet. Trainings use all devices, of which
    /// there is one at least, everything else the first.
    pub(crate) fn new(target: &Path, draft: Option<&Path>, devices: Vec<Device>) -> Self {
        Self {
            devices,
            dtype: WeightDtype::F32,
            target: ModelDir::new("target", target),
            draft: draft.map(|dir| ModelDir::new("draft", dir)),
            small_draft: None,
            chat_template: None,
            ends: Ends::default(),
            served_as: None,
            num_first_layers: 0,
            first_layers: Mutex::default(),
            console: Console::silent(),
            text: OnceLock::new(),
            text_identity: OnceLock::new(),
            text_side: OnceLock::new(),
            pair: OnceLock::new(),
            target_alone: OnceLock::new(),
            files: Kept::default(),
            data: Kept::default(),
            incomplete_data: Incomplete::Refused,
            heads: Kept::default(),
            adapters: Kept::default(),
            #[cfg(test)]
            reads: Mutex::default(),
        }
    }

    /// The models in these directories, or of these names on the Hugging Face Hub, which are
    /// downloaded where they are not in its cache. `chat_template` is one instead of the target's
    /// own, as a recipe names it.
    ///
    /// # Errors
    /// If one is a name of the Hub's and cannot be had.
    pub(crate) fn open(
        target: &Path,
        draft: Option<&Path>,
        chat_template: Option<&str>,
        devices: Vec<Device>,
        console: &Console,
    ) -> Result<Self> {
        let target = model_dir(target, Wanted::All, console)?;
        Self::of_dirs(&target, draft, chat_template, devices, console)
    }

    fn of_dirs(
        target: &Path,
        draft: Option<&Path>,
        chat_template: Option<&str>,
        devices: Vec<Device>,
        console: &Console,
    ) -> Result<Self> {
        let draft = draft.map(|draft| model_dir(draft, Wanted::All, console)).transpose()?;
        let chat_template = chat_template.map(str::to_owned);
        let console = console.clone();
        Ok(Self { chat_template, console, ..Self::new(target, draft.as_deref(), devices) })
    }

    /// The same with a second, smaller draft for cascades, if one is named.
    ///
    /// # Errors
    /// If it is a name of the Hub's and cannot be had.
    pub(crate) fn with_small_draft(self, dir: Option<&Path>) -> Result<Self> {
        let dir = dir.map(|dir| model_dir(dir, Wanted::All, &self.console)).transpose()?;
        let small_draft = dir.map(|dir| ModelDir::new("small draft", &dir));
        Ok(Self { small_draft, ..self })
    }

    /// The same, whose answers end so.
    pub(crate) fn ending(self, ends: Ends) -> Self {
        Self { ends, ..self }
    }

    /// What was chosen to end answers.
    pub(crate) fn ends(&self) -> &Ends {
        &self.ends
    }

    /// The same, whose models compute in `dtype`, but for those of a training in another.
    pub(crate) fn computing_in(self, dtype: WeightDtype) -> Self {
        Self { dtype, ..self }
    }

    /// The same, which takes data of which shards are missing.
    pub(crate) fn with_incomplete_data(self, incomplete_data: Incomplete) -> Self {
        Self { incomplete_data, ..self }
    }

    /// The device of everything but trainings.
    pub(crate) fn device(&self) -> &Device {
        &self.devices[0]
    }

    /// What models compute in everywhere but in trainings.
    pub(crate) fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// The devices that a training shares its batches out among.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The models together: weights, tokenizer and chat template, after a check that the draft's
    /// tokenizer is the target's.
    ///
    /// # Errors
    /// If a file is missing or broken, or the models do not belong together.
    pub(crate) fn pair(&self) -> Result<&Pair> {
        get_or_read(&self.pair, || {
            let text = self.text_side()?.clone();
            let draft = self.draft_in(self.dtype)?.cloned();
            Ok(Pair { target: self.target_in(self.dtype)?.clone(), draft, text })
        })
    }

    /// What target and draft share of text, after a check that the draft's tokenizer is the
    /// target's; no weights are read.
    ///
    /// # Errors
    /// If a file is missing or broken, or the models do not belong together.
    pub(crate) fn text_side(&self) -> Result<&TextSide> {
        get_or_read(&self.text_side, || {
            let tokenizer = &self.text()?.tokenizer;
            if let Some(draft) = &self.draft {
                draft.check()?;
                TextTokenizer::check_shared(
                    tokenizer,
                    &TextTokenizer::from_model_dir(&draft.dir)?,
                )?;
            }
            Ok(TextSide { context: self.context()?, ..self.text_of_target()? })
        })
    }

    /// The target with nothing but what it needs by itself: a draft's shorter context is none of
    /// its business.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn target_alone(&self) -> Result<&Pair> {
        get_or_read(&self.target_alone, || {
            let text = self.text_of_target()?;
            Ok(Pair { target: self.target_in(self.dtype)?.clone(), draft: None, text })
        })
    }

    fn text_of_target(&self) -> Result<TextSide> {
        let Text { tokenizer, chat_format } = self.text()?;
        let shape = self.target_shape()?;
        let (known, embedded) = (tokenizer.vocab_size(), shape.vocab_size);
        if known > embedded {
            bail!(
                "`{}` has {known} tokens, but the model has embeddings for {embedded}: \
                 the tokenizer does not belong to this model",
                self.target.dir.join("tokenizer.json").display()
            );
        }
        let eos_token_ids = self.eos_token_ids()?.to_vec();
        if let Some(id) = eos_token_ids.iter().find(|id| **id as usize >= embedded) {
            bail!(
                "end token {id} is none of the target's, which has {embedded} tokens; hint: see \
                 `models.eos_token_ids` or `--eos-token-id`"
            );
        }
        let strings = &self.ends.stop_strings;
        let text_end = if strings.is_empty() {
            None
        } else {
            Some(Arc::new(StopText(StopStrings::new(strings, tokenizer)?)))
        };
        let (tokenizer, chat_format) = (tokenizer.clone(), chat_format.clone());
        let context = shape.context;
        Ok(TextSide { tokenizer, chat_format, eos_token_ids, text_end, context })
    }

    /// The target's weights, to be computed with in a type.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn target_in(&self, dtype: WeightDtype) -> Result<&CausalLm> {
        self.check_weights()?;
        self.model(&self.target, dtype)
    }

    /// The draft's, if there is one.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn draft_in(&self, dtype: WeightDtype) -> Result<Option<&CausalLm>> {
        self.draft.as_ref().map(|draft| self.model(draft, dtype)).transpose()
    }

    /// The second, smaller draft's, after a check that its tokenizer is the target's and that it can
    /// read what the others can.
    ///
    /// # Errors
    /// If there is none, a file is missing or broken, or it does not belong to them.
    pub(crate) fn small_draft(&self) -> Result<&CausalLm> {
        let Some(small) = &self.small_draft else {
            bail!(
                "a cascade has the drafter `small_draft`; hint: set `models.small_draft` to its \
                 checkpoint directory"
            );
        };
        small.check()?;
        let own = TextTokenizer::from_model_dir(&small.dir)?;
        TextTokenizer::check_shared(&self.text()?.tokenizer, &own)?;
        let (context, needed) = (small.config()?.shape.context, self.context()?);
        if context < needed {
            bail!(
                "the small draft `{}` reads {context} tokens, the others {needed}: a cascade's \
                 drafters read what the target reads",
                small.dir.display()
            );
        }
        self.model(small, self.dtype)
    }

    fn model<'w>(&self, model: &'w ModelDir, dtype: WeightDtype) -> Result<&'w CausalLm> {
        model.weights(dtype, |dir| {
            self.note(|| format!("weights of the {}, {dtype:?}", model.role));
            Ok(CausalLm::from_model_dir_in(dir, dtype, self.device())?)
        })
    }

    /// The draft's `config.json`, if there is one, without its weights.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub(crate) fn draft_config(&self) -> Result<Option<&ModelConfig>> {
        self.draft.as_ref().map(ModelDir::config).transpose()
    }

    /// Its sizes.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn draft_shape(&self) -> Result<Option<&ModelShape>> {
        Ok(self.draft_config()?.map(|config| &config.shape))
    }

    /// The target's `config.json`, without its weights.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub(crate) fn target_shape(&self) -> Result<&ModelShape> {
        Ok(&self.target.config()?.shape)
    }

    /// The tokens that end answers: those that were chosen, or the target's own.
    ///
    /// # Errors
    /// If its `config.json` is missing or broken.
    pub(crate) fn eos_token_ids(&self) -> Result<&[u32]> {
        match &self.ends.eos_token_ids {
            Some(chosen) => Ok(chosen),
            None => Ok(&self.target_shape()?.eos_token_ids),
        }
    }

    /// The longest sequence that every model can read, without their weights.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub(crate) fn context(&self) -> Result<usize> {
        let target = self.target_shape()?.context;
        Ok(self.draft_shape()?.map_or(target, |draft| target.min(draft.context)))
    }

    /// How many token ids every model knows, without their weights.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub(crate) fn vocab_size(&self) -> Result<usize> {
        let target = self.target_shape()?.vocab_size;
        Ok(self.draft_shape()?.map_or(target, |draft| target.min(draft.vocab_size)))
    }

    /// The target's directory.
    pub(crate) fn target_dir(&self) -> &Path {
        &self.target.dir
    }

    /// The draft's directory, if there is one.
    pub(crate) fn draft_dir(&self) -> Option<&Path> {
        self.draft.as_ref().map(|draft| draft.dir.as_path())
    }

    /// The target's hash, for provenance; of one that is served, that of what is here of it.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn target_hash(&self) -> Result<&str> {
        self.model_hash(&self.target)
    }

    /// The draft's hash, if there is one.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn draft_hash(&self) -> Result<Option<&str>> {
        self.draft.as_ref().map(|draft| self.model_hash(draft)).transpose()
    }

    /// The second, smaller draft's hash, if there is one.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn small_draft_hash(&self) -> Result<Option<&str>> {
        self.small_draft.as_ref().map(|small| self.model_hash(small)).transpose()
    }

    fn model_hash<'w>(&self, model: &'w ModelDir) -> Result<&'w str> {
        let is_part = self.served_as.is_some() && std::ptr::eq(model, &raw const self.target);
        let note = || self.note(|| format!("hash of the {}", model.role));
        model.hash(&self.console, is_part, note)
    }

    fn text(&self) -> Result<&Text> {
        get_or_read(&self.text, || {
            self.target.check()?;
            self.note(|| "tokenizer".to_owned());
            let tokenizer = Arc::new(TextTokenizer::from_model_dir(&self.target.dir)?);
            let chosen = self.chat_template.as_deref();
            let chat_format = Arc::new(ChatFormat::choose(&self.target.dir, chosen)?);
            Ok(Text { tokenizer, chat_format })
        })
    }

    /// The target's tokenizer.
    ///
    /// # Errors
    /// If a file of the text side is missing or broken.
    pub(crate) fn tokenizer(&self) -> Result<&TextTokenizer> {
        Ok(&self.text()?.tokenizer)
    }

    /// What shapes and stops text.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn text_identity(&self) -> Result<&TextIdentity> {
        get_or_read(&self.text_identity, || {
            let Text { tokenizer, chat_format } = self.text()?;
            self.note(|| "hash of the tokenizer".to_owned());
            Ok(TextIdentity {
                tokenizer: tokenizer.hash()?,
                chat_template: chat_format.hash(),
                special_tokens: chat_format.special_tokens(),
                eos_token_ids: self.eos_token_ids()?.to_vec(),
                stop_strings: self.ends.stop_strings.clone(),
            })
        })
    }

    /// The provenance of what target and draft make of a seed, greedily and without prompts.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn provenance(&self, seed: u64, max_new_tokens: usize) -> Result<Provenance> {
        let TextIdentity { tokenizer, chat_template, special_tokens, eos_token_ids, stop_strings } =
            self.text_identity()?.clone();
        Ok(Provenance {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            target: self.target_identity()?,
            draft: self.draft_hash()?.map(str::to_owned),
            tokenizer,
            chat_template,
            special_tokens,
            eos_token_ids,
            stop_strings,
            prompts: Vec::new(),
            limit: None,
            weights: Vec::new(),
            split: None,
            lengths: LengthBounds::default(),
            keep_duplicates: false,
            existing_responses: false,
            served_model: self.served_as.clone(),
            served_log_probs: None,
            max_outside_mass: None,
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            min_p: None,
            repetition_penalty: 1.0,
            max_new_tokens: max_new_tokens as u64,
            seed,
            dtype: self.dtype.name().to_owned(),
        })
    }

    /// The rows in a directory, which are refused where shards are missing, unless the run takes
    /// incomplete data.
    ///
    /// # Errors
    /// If there is none, or a shard is missing, broken, or not what its name says.
    pub(crate) fn data(&self, dir: &Path) -> Result<Arc<DataSet>> {
        keep(&self.data, dir, || {
            self.note(|| format!("rows in {}", dir.display()));
            match read_dir(dir, self.incomplete_data) {
                Ok(data) => Ok(Arc::new(data)),
                Err(error @ DataError::MissingShards { .. }) => bail!(
                    "{error}; hint: run `draftsmith build-data` with this recipe to its end, or give \
                     `--incomplete-data` to take what is there"
                ),
                Err(error) => Err(error.into()),
            }
        })
    }

    /// What provenance says of the prompt files that paths and patterns name.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(crate) fn prompt_files(&self, paths: &[PathBuf]) -> Result<Vec<PromptFile>> {
        let file = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(PromptFile { name, hash: self.file_hash(path)? })
        };
        files_of(paths)?.iter().map(file).collect()
    }

    fn file_hash(&self, path: &Path) -> Result<String> {
        keep(&self.files, path, || {
            self.note(|| format!("hash of {}", path.display()));
            Ok(hash_file(path)?)
        })
    }

    /// The acceptance head in a directory, for a drafter of this hidden size.
    ///
    /// # Errors
    /// If it is missing, broken, or for another hidden size.
    pub(crate) fn head(
        &self,
        dir: &Path,
        hidden_size: usize,
    ) -> Result<(AcceptanceHeadConfig, AcceptanceHead)> {
        keep(&self.heads, dir, || {
            self.note(|| format!("head {}", dir.display()));
            Ok(AcceptanceHead::from_dir(dir, hidden_size, self.device())?)
        })
    }

    /// The adapter in a directory, for the target, to be computed with in a type. It is kept where
    /// that is the workspace's own.
    ///
    /// # Errors
    /// If it is missing, broken, or for a target of another shape.
    pub(crate) fn adapter_in(
        &self,
        dir: &Path,
        dtype: WeightDtype,
    ) -> Result<(AdapterConfig, Adapter)> {
        let read = || {
            self.note(|| format!("adapter {}, {dtype:?}", dir.display()));
            Ok(Adapter::from_dir_in(dir, self.target_shape()?, dtype, self.device())?)
        };
        if dtype == self.dtype { keep(&self.adapters, dir, read) } else { read() }
    }

    /// The hash of a head's or an adapter's weights and shape. Its `config.json` says more, such as
    /// the rule that was chosen for it by rollouts, and that changes no rollout.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn export_hash(&self, dir: &Path, shape: &str) -> Result<String> {
        let names = weight_files(dir)?;
        let weights = names.iter().map(|name| self.file_hash(&dir.join(name)));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        Ok(hash_bytes(format!("{} {shape}", weights.join(" ")).as_bytes()))
    }

    /// The hash that an adapter's head names its drafter by: of the weights and where they sit, not
    /// of what tuning found out about them since.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn adapter_hash(&self, dir: &Path, config: &AdapterConfig) -> Result<String> {
        self.export_hash(dir, &config.exit_layer.to_string())
    }

    /// Forgets what was read in a directory, because it was written anew.
    pub(crate) fn forget(&self, dir: &Path) {
        drop_within(&self.files, dir);
        drop_within(&self.data, dir);
        drop_within(&self.heads, dir);
        drop_within(&self.adapters, dir);
    }

    /// Takes down what is read or hashed, for the test that it is done once.
    #[cfg(test)]
    fn note(&self, what: impl FnOnce() -> String) {
        self.reads.lock().expect(HELD).push(what());
    }

    #[cfg(not(test))]
    fn note(&self, _: impl FnOnce() -> String) {}
}

const HELD: &str = "nobody panics while holding it";

/// What is kept of a path, or else what `read` gives.
fn keep<T: Clone>(kept: &Kept<T>, path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    if let Some(found) = kept.lock().expect(HELD).get(path) {
        return Ok(found.clone());
    }
    let read = read()?;
    kept.lock().expect(HELD).insert(path.to_path_buf(), read.clone());
    Ok(read)
}

fn drop_within<T>(kept: &Kept<T>, dir: &Path) {
    let mut kept = kept.lock().expect(HELD);
    kept.retain(|path, _| !path.starts_with(dir));
}

#[cfg(test)]
mod tests;

//! The inputs of a run: models with tokenizer and chat template, prompt files, built data, heads and
//! adapters. Each is read when first needed, and read and hashed once for all stages.
//!
//! Only this module decides how provenance identifies an input: a model by the hash of its files, the text
//! side by [`TextIdentity`], data by the hash of its rows, a head or adapter by the hash of its weights.
//!
//! Models and prompts do not change during a run. Data, heads and adapters do: whoever writes one calls
//! [`Workspace::forget`].

mod model_dir;
mod served;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{
    ChatFormat, DataError, DataSet, Incomplete, PromptFile, Provenance, StopStrings, TextTokenizer,
    hash_bytes, hash_file, read_dir,
};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, CausalLm, ModelConfig,
    ModelShape, WeightDtype, hash_first_layers, hash_model_dir, weight_files,
};
use draftsmith_theory::DrafterId;
use serde::Serialize;

pub use self::model_dir::hash_dir;
use self::model_dir::{HashModel, ModelDir, get_or_read, hash_with};
use crate::hub::model_dir;
use crate::pair::Pair;
use crate::prompt_files::files_of;
use crate::text_side::{Ends, StopText, TextSide};
use crate::watch::{Silent, Watch};

/// The inputs of a run and its devices.
#[derive(Default)]
pub struct Workspace {
    /// The devices among which a training splits its batches. Everything else uses the first.
    pub devices: Vec<Device>,
    /// The dtype that models compute in. A training may use another.
    pub dtype: WeightDtype,
    target: ModelDir,
    /// Draft models. The first one's candidates and labels are in the data.
    drafts: Vec<(DrafterId, ModelDir)>,
    /// A chat template that replaces the target's.
    chat_template: Option<String>,
    /// What the user chose to end answers.
    pub ends: Ends,
    /// The target's name on servers, if they run it. Its weights are not read then.
    served_as: Option<String>,
    /// The first layers of a served target, which its adapters need, and their number.
    first_layers: ModelDir,
    /// The number of the target's first layers that adapters need of a served target.
    pub num_first_layers: usize,
    watch: Box<dyn Watch>,
    target_text: OnceLock<TextSide>,
    text_identity: OnceLock<TextIdentity>,
    text_side: OnceLock<TextSide>,
    pair: OnceLock<Pair>,
    target_alone: OnceLock<Pair>,
    file_hashes: Cache<String>,
    data: Cache<Arc<DataSet>>,
    /// Whether data with missing shards is an error.
    pub incomplete_data: Incomplete,
    heads: Cache<(AcceptanceHeadConfig, AcceptanceHead)>,
    adapters: Cache<(AdapterConfig, Adapter)>,
}

/// Everything that shapes and ends text, for provenance.
#[derive(Debug, Clone, Serialize)]
pub struct TextIdentity {
    /// Hash of the tokenizer's file.
    pub tokenizer: String,
    /// Hash of the chat template, if there is one.
    pub chat_template: Option<String>,
    /// The special tokens that the chat template may name.
    pub special_tokens: BTreeMap<String, String>,
    /// The tokens that end a response: the chosen ones, or else those in `generation_config.json`, or else
    /// in `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
}

/// Values read from files or directories.
type Cache<T> = Mutex<BTreeMap<PathBuf, T>>;

impl Workspace {
    /// Models in directories, without reading them yet. There must be at least one device.
    pub fn new(target: &Path, drafts: &[(DrafterId, &Path)], devices: Vec<Device>) -> Self {
        let draft = |(id, dir): &(DrafterId, &Path)| (*id, ModelDir::new(&id.to_string(), dir));
        Self {
            devices,
            target: ModelDir::new("target", target),
            drafts: drafts.iter().map(draft).collect(),
            first_layers: ModelDir::new("first layers of the target", target),
            watch: Box::new(Silent),
            ..Self::default()
        }
    }

    /// Models in directories or on the Hugging Face Hub, from which missing files are downloaded.
    /// `served_as` is the target's name on servers if they run it; its weights are not needed then.
    /// `chat_template` replaces the target's.
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
        let target = model_dir(target, served_as.is_none(), watch)?;
        let local = |(id, dir): &(DrafterId, &Path)| Ok((*id, model_dir(dir, true, watch)?));
        let drafts: Vec<(DrafterId, PathBuf)> = drafts.iter().map(local).collect::<Result<_>>()?;
        let drafts: Vec<(DrafterId, &Path)> =
            drafts.iter().map(|(id, dir)| (*id, &**dir)).collect();
        Ok(Self {
            served_as: served_as.map(str::to_owned),
            chat_template: chat_template.map(str::to_owned),
            watch: watch.share(),
            ..Self::new(&target, &drafts, devices)
        })
    }

    /// The device of everything but trainings.
    pub fn device(&self) -> &Device {
        &self.devices[0]
    }

    /// Target and draft with their text side, after a check that they share a tokenizer.
    ///
    /// # Errors
    /// If a file is missing or broken, or the tokenizers differ.
    pub fn pair(&self) -> Result<&Pair> {
        get_or_read(&self.pair, || {
            let text = self.text_side()?.clone();
            let draft = self.draft_in(self.dtype)?.cloned();
            Ok(Pair { target: self.target_in(self.dtype)?.clone(), draft, text })
        })
    }

    /// The text side of target and draft, after a check that they share a tokenizer. Reads no weights.
    ///
    /// # Errors
    /// If a file is missing or broken, or the tokenizers differ.
    pub fn text_side(&self) -> Result<&TextSide> {
        get_or_read(&self.text_side, || {
            let text = self.target_text()?.clone();
            if let Some(draft) = self.draft() {
                self.check_tokenizer(draft)?;
            }
            Ok(TextSide { context: self.context()?, ..text })
        })
    }

    /// Checks that a model's tokenizer is the target's.
    fn check_tokenizer(&self, model: &ModelDir) -> Result<()> {
        let tokenizer = self.tokenizer()?;
        model.check()?;
        Ok(TextTokenizer::check_shared(tokenizer, &TextTokenizer::from_model_dir(&model.dir)?)?)
    }

    /// The target without a draft, whose context may be shorter.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_alone(&self) -> Result<&Pair> {
        get_or_read(&self.target_alone, || {
            let text = self.target_text()?.clone();
            Ok(Pair { target: self.target_in(self.dtype)?.clone(), draft: None, text })
        })
    }

    fn target_text(&self) -> Result<&TextSide> {
        get_or_read(&self.target_text, || {
            let dir = &self.target.dir;
            self.target.check()?;
            self.watch.reads("tokenizer");
            let tokenizer = Arc::new(TextTokenizer::from_model_dir(dir)?);
            let chat_format = Arc::new(ChatFormat::choose(dir, self.chat_template.as_deref())?);
            let shape = self.target_shape()?;
            let (known, embedded) = (tokenizer.vocab_size(), shape.vocab_size);
            if known > embedded {
                bail!(
                    "`{}` has {known} tokens, but the model has embeddings for {embedded}: the \
                     tokenizer does not belong to this model",
                    dir.join("tokenizer.json").display()
                );
            }
            let chosen = self.ends.eos_token_ids.as_ref();
            let eos_token_ids = chosen.unwrap_or(&shape.eos_token_ids).clone();
            if let Some(id) = eos_token_ids.iter().find(|id| **id as usize >= embedded) {
                bail!(
                    "end token {id} is not in the target's vocabulary of {embedded} tokens; hint: see \
                     `models.eos_token_ids` or `--eos-token-id`"
                );
            }
            let strings = &self.ends.stop_strings;
            let text_end = (!strings.is_empty())
                .then(|| anyhow::Ok(Arc::new(StopText(StopStrings::new(strings, &tokenizer)?))))
                .transpose()?;
            let context = shape.context;
            Ok(TextSide { tokenizer, chat_format, eos_token_ids, text_end, context })
        })
    }

    /// The target, computing in `dtype`.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_in(&self, dtype: WeightDtype) -> Result<&CausalLm> {
        self.check_weights()?;
        self.model(&self.target, dtype)
    }

    /// The draft, if there is one, computing in `dtype`.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn draft_in(&self, dtype: WeightDtype) -> Result<Option<&CausalLm>> {
        self.draft().map(|draft| self.model(draft, dtype)).transpose()
    }

    /// The first draft model.
    fn draft(&self) -> Option<&ModelDir> {
        self.drafts.first().map(|(_, draft)| draft)
    }

    fn draft_dir_of(&self, id: DrafterId) -> Result<&ModelDir> {
        let found = self.drafts.iter().find(|(own, _)| *own == id).map(|(_, draft)| draft);
        found.with_context(|| format!("the draft model `{id}` was not opened"))
    }

    /// A draft model, after a check that its tokenizer is the target's and its context is not shorter than the
    /// first draft's.
    ///
    /// # Errors
    /// If a file is missing or broken, or a check fails.
    pub fn draft_model(&self, id: DrafterId) -> Result<&CausalLm> {
        let draft = self.draft_dir_of(id)?;
        self.check_tokenizer(draft)?;
        let (context, needed) = (draft.config()?.shape.context, self.context()?);
        if context < needed {
            bail!(
                "the draft model `{id}` in `{}` has a context of {context} tokens, but that of the other models \
                 is {needed}",
                draft.dir.display()
            );
        }
        self.draft_model_in(id, self.dtype)
    }

    /// A draft model, computing in `dtype`.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn draft_model_in(&self, id: DrafterId, dtype: WeightDtype) -> Result<&CausalLm> {
        self.model(self.draft_dir_of(id)?, dtype)
    }

    /// The `config.json` of a draft model.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub fn draft_model_config(&self, id: DrafterId) -> Result<&ModelConfig> {
        self.draft_dir_of(id)?.config()
    }

    /// The hash of a draft model.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn draft_model_hash(&self, id: DrafterId) -> Result<&str> {
        self.model_hash(self.draft_dir_of(id)?, hash_model_dir)
    }

    fn model<'w>(&self, model: &'w ModelDir, dtype: WeightDtype) -> Result<&'w CausalLm> {
        model.weights(dtype, |dir| {
            self.watch.reads(&format!("weights of the {}, {dtype:?}", model.role));
            Ok(CausalLm::load(dir, dtype, None, self.device())?)
        })
    }

    /// The draft's `config.json`, if there is a draft.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub fn draft_config(&self) -> Result<Option<&ModelConfig>> {
        self.draft().map(ModelDir::config).transpose()
    }

    /// The draft's shape, if there is a draft.
    ///
    /// # Errors
    /// If its `config.json` is missing or broken.
    pub fn draft_shape(&self) -> Result<Option<&ModelShape>> {
        Ok(self.draft_config()?.map(|config| &config.shape))
    }

    /// The target's `config.json`.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub fn target_config(&self) -> Result<&ModelConfig> {
        self.target.config()
    }

    /// The target's shape.
    ///
    /// # Errors
    /// If its `config.json` is missing or broken.
    pub fn target_shape(&self) -> Result<&ModelShape> {
        Ok(&self.target.config()?.shape)
    }

    /// The longest sequence, in tokens, that target and draft can read.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub fn context(&self) -> Result<usize> {
        self.smaller(|shape| shape.context)
    }

    /// The number of token ids that target and draft both know.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub fn vocab_size(&self) -> Result<usize> {
        self.smaller(|shape| shape.vocab_size)
    }

    fn smaller(&self, size: fn(&ModelShape) -> usize) -> Result<usize> {
        let target = size(self.target_shape()?);
        Ok(self.draft_shape()?.map_or(target, |draft| target.min(size(draft))))
    }

    /// The target's directory.
    pub fn target_dir(&self) -> &Path {
        &self.target.dir
    }

    /// The first draft model's name and directory.
    pub fn draft_dir(&self) -> Option<(DrafterId, &Path)> {
        self.drafts.first().map(|(id, draft)| (*id, draft.dir.as_path()))
    }

    /// The target's hash, for provenance. For a served target, it covers only the files present.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn target_hash(&self) -> Result<&str> {
        match self.served_as {
            None => self.model_hash(&self.target, hash_model_dir),
            Some(_) => self.model_hash(&self.first_layers, hash_first_layers),
        }
    }

    /// The draft's hash, if there is a draft.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn draft_hash(&self) -> Result<Option<&str>> {
        self.draft().map(|draft| self.model_hash(draft, hash_model_dir)).transpose()
    }

    fn model_hash<'w>(&self, model: &'w ModelDir, hash: HashModel) -> Result<&'w str> {
        let hash = get_or_read(&model.hash, || {
            self.watch.reads(&format!("hash of the {}", model.role));
            hash_with(&model.dir, &*self.watch, hash)
        });
        hash.map(String::as_str)
    }

    /// The target's tokenizer.
    ///
    /// # Errors
    /// If a file of the text side is missing or broken.
    pub fn tokenizer(&self) -> Result<&TextTokenizer> {
        Ok(&self.target_text()?.tokenizer)
    }

    /// Everything that shapes and ends text.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn text_identity(&self) -> Result<&TextIdentity> {
        get_or_read(&self.text_identity, || {
            let TextSide { tokenizer, chat_format, eos_token_ids, .. } = self.target_text()?;
            self.watch.reads("hash of the tokenizer");
            Ok(TextIdentity {
                tokenizer: tokenizer.hash()?,
                chat_template: chat_format.hash(),
                special_tokens: chat_format.special_tokens(),
                eos_token_ids: eos_token_ids.clone(),
                stop_strings: self.ends.stop_strings.clone(),
            })
        })
    }

    /// The provenance of what target and draft produce with this seed, decoding greedily. It names no
    /// prompts.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn provenance(&self, seed: u64, max_new_tokens: usize) -> Result<Provenance> {
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
            served_model: self.served_as.clone(),
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_new_tokens: max_new_tokens as u64,
            seed,
            dtype: self.dtype.name().to_owned(),
            ..Provenance::default()
        })
    }

    /// The rows in a directory. Missing shards are an error unless the run allows them.
    ///
    /// # Errors
    /// If there are none, or a shard is missing, broken or misnamed.
    pub fn data(&self, dir: &Path) -> Result<Arc<DataSet>> {
        get_or_insert(&self.data, dir, || {
            self.watch.reads(&format!("rows in {}", dir.display()));
            match read_dir(dir, self.incomplete_data) {
                Err(error @ DataError::MissingShards { .. }) => bail!(
                    "{error}; hint: run `draftsmith build-data` with this recipe to its end, or give \
                     `--incomplete-data` to use the shards built so far"
                ),
                read => Ok(Arc::new(read?)),
            }
        })
    }

    /// The names and hashes of the prompt files that paths and patterns name.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn prompt_files(&self, paths: &[PathBuf]) -> Result<Vec<PromptFile>> {
        let file = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(PromptFile { name, hash: self.file_hash(path)? })
        };
        files_of(paths)?.iter().map(file).collect()
    }

    fn file_hash(&self, path: &Path) -> Result<String> {
        get_or_insert(&self.file_hashes, path, || {
            self.watch.reads(&format!("hash of {}", path.display()));
            Ok(hash_file(path)?)
        })
    }

    /// The acceptance head in a directory, for a drafter of this hidden size.
    ///
    /// # Errors
    /// If it is missing, broken, or for another hidden size.
    pub fn head(
        &self,
        dir: &Path,
        hidden_size: usize,
    ) -> Result<(AcceptanceHeadConfig, AcceptanceHead)> {
        get_or_insert(&self.heads, dir, || {
            self.watch.reads(&format!("head {}", dir.display()));
            Ok(AcceptanceHead::from_dir(dir, hidden_size, self.device())?)
        })
    }

    /// The target's adapter in a directory, computing in `dtype`. Only adapters in the workspace's dtype
    /// are cached.
    ///
    /// # Errors
    /// If it is missing, broken, or for a target of another shape.
    pub fn adapter_in(&self, dir: &Path, dtype: WeightDtype) -> Result<(AdapterConfig, Adapter)> {
        let read = || {
            self.watch.reads(&format!("adapter {}, {dtype:?}", dir.display()));
            Ok(Adapter::from_dir(dir, self.target_shape()?, dtype, self.device())?)
        };
        if dtype == self.dtype { get_or_insert(&self.adapters, dir, read) } else { read() }
    }

    /// The hash of a head's or an adapter's weights and shape. The rest of its `config.json`, such as a
    /// tuned rule, does not affect rollouts and is not hashed.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn export_hash(&self, dir: &Path, shape: &str) -> Result<String> {
        let names = weight_files(dir)?;
        let weights = names.iter().map(|name| self.file_hash(&dir.join(name)));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        Ok(hash_bytes(format!("{} {shape}", weights.join(" ")).as_bytes()))
    }

    /// The hash of an adapter's weights and exit layer, by which its head names it.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn adapter_hash(&self, dir: &Path, config: &AdapterConfig) -> Result<String> {
        self.export_hash(dir, &config.exit_layer.to_string())
    }

    /// Drops everything cached from a directory, because it is about to be rewritten.
    pub fn forget(&self, dir: &Path) {
        forget_within(&self.file_hashes, dir);
        forget_within(&self.data, dir);
        forget_within(&self.heads, dir);
        forget_within(&self.adapters, dir);
    }
}

const HELD: &str = "nobody panics while holding it";

/// The cached value of a path, or what `read` returns.
fn get_or_insert<T: Clone>(
    cache: &Cache<T>,
    path: &Path,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(found) = cache.lock().expect(HELD).get(path) {
        return Ok(found.clone());
    }
    let read = read()?;
    cache.lock().expect(HELD).insert(path.to_path_buf(), read.clone());
    Ok(read)
}

fn forget_within<T>(cache: &Cache<T>, dir: &Path) {
    cache.lock().expect(HELD).retain(|path, _| !path.starts_with(dir));
}

#[cfg(test)]
mod tests;

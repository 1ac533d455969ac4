//! A language model with its tokenizer and chat template.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use burn::tensor::Device;
use draftsmith_data::{ChatFormat, Message, TextTokenizer};
use draftsmith_model::{CausalLm, WeightDtype, hash_model_dir};
use draftsmith_recipe::watch::Silent;

use crate::Error;

/// A language model, its tokenizer and its chat template. Clones share everything.
#[derive(Debug, Clone)]
pub struct Model {
    dir: PathBuf,
    network: CausalLm,
    tokenizer: Arc<TextTokenizer>,
    chat_format: Arc<ChatFormat>,
    /// The chat template that replaces the one of the files.
    chat_template: Option<Arc<str>>,
    hash: Arc<OnceLock<String>>,
}

impl Model {
    /// Loads a checkpoint directory in Hugging Face form: `config.json`, weights, `tokenizer.json`, and the
    /// chat template if there is one. It computes in f32; on the CPU the weights keep the type of their
    /// files in memory.
    ///
    /// # Errors
    /// If a file is missing or broken, or the model's family is unknown.
    pub fn load(dir: impl AsRef<Path>, device: &Device) -> Result<Self, Error> {
        Self::load_as(dir, WeightDtype::F32, device)
    }

    /// Loads a model as [`Model::load`] does, but computes in `dtype`: bf16 is for GPUs.
    ///
    /// # Errors
    /// As there.
    pub fn load_as(
        dir: impl AsRef<Path>,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let tokenizer = TextTokenizer::from_model_dir(dir)?;
        let chat_format = ChatFormat::choose(dir, None)?;
        let network = CausalLm::load(dir, dtype, None, device)?;
        let (known, embedded) = (tokenizer.vocab_size(), network.shape().vocab_size);
        if known > embedded {
            let path = dir.join("tokenizer.json");
            return Err(Error::Tokenizer { path, known, embedded });
        }
        let (tokenizer, chat_format) = (Arc::new(tokenizer), Arc::new(chat_format));
        Ok(Self {
            dir: dir.to_path_buf(),
            network,
            tokenizer,
            chat_format,
            chat_template: None,
            hash: Arc::default(),
        })
    }

    /// Loads a model by its name on the Hugging Face Hub, as in `org/name@revision`. Missing files are downloaded into the
    /// Hub's cache.
    ///
    /// # Errors
    /// If it cannot be downloaded, or as [`Model::load`].
    pub fn from_hub(name: &str, device: &Device) -> Result<Self, Error> {
        Self::load(draftsmith_recipe::hub::model_dir(Path::new(name), true, &Silent)?, device)
    }

    /// Returns the directory of its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the chat template that was chosen in place of the one of its files.
    pub(crate) fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the same model with another chat template: `vicuna`, `llama-2`, `alpaca`, a Jinja file, or `none` for
    /// only the last user message.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_chat_template(self, chosen: &str) -> Result<Self, Error> {
        let chat_format = Arc::new(ChatFormat::choose(&self.dir, Some(chosen))?);
        Ok(Self { chat_format, chat_template: Some(chosen.into()), ..self })
    }

    /// The network, for training and for the lower crates.
    pub fn network(&self) -> &CausalLm {
        &self.network
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Encodes a conversation as token ids, up to where the answer begins.
    ///
    /// # Errors
    /// If the model has no chat template, or the template fails.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// Returns the hash of `config.json` and the weights, by which heads and adapters name their models. Computed once,
    /// from the files.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn hash(&self) -> Result<&str, Error> {
        if self.hash.get().is_none() {
            let hash = hash_model_dir(&self.dir, &mut |_, _| ())?;
            self.hash.get_or_init(|| hash);
        }
        Ok(self.hash.get().expect("it was set above"))
    }
}

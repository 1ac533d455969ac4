//! A language model with its tokenizer and chat template.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use burn::tensor::Device;
use draftsmith_data::{ChatFormat, Message, TextTokenizer};
use draftsmith_model::{CausalLm, WeightDtype, hash_model_dir};
use draftsmith_recipe::Silent;
use draftsmith_recipe::hub::{HubWeights, model_dir};
use draftsmith_recipe::workspace::text_files;

use crate::{Error, Result};

/// A language model, its tokenizer and its chat template. Clones share everything.
#[derive(Debug, Clone)]
pub struct Model {
    dir: PathBuf,
    network: CausalLm,
    tokenizer: Arc<TextTokenizer>,
    chat_format: Arc<ChatFormat>,
    /// The chat template that replaces the checkpoint's own; `None` keeps it.
    chat_template: Option<Arc<str>>,
    hash: Arc<OnceLock<String>>,
}

impl Model {
    /// Loads a checkpoint directory in Hugging Face's format: `config.json`, weights,
    /// `tokenizer.json`, and the chat template if there is one. Instead of a directory, `dir` may be
    /// a GGUF file, with these two beside it or made from it. The model computes in f32. On the CPU, weights keep the
    /// dtype of their files in memory.
    ///
    /// # Errors
    /// If a file is missing or broken, or the model's architecture is unknown.
    pub fn load(dir: impl AsRef<Path>, device: &Device) -> Result<Self> {
        Self::load_as(dir, WeightDtype::F32, device)
    }

    /// Loads a model as [`Model::load`] does, but computes in `dtype`. Use bf16 on GPUs only.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_as(dir: impl AsRef<Path>, dtype: WeightDtype, device: &Device) -> Result<Self> {
        let dir = dir.as_ref();
        let files = text_files(dir)?;
        let tokenizer = TextTokenizer::from_model_dir(files.clone())?;
        let chat_format = ChatFormat::choose(files.clone(), None)?;
        let network = CausalLm::load(dir, dtype, None, device)?;
        let (known, embedded) = (tokenizer.vocab_size(), network.shape().vocab_size);
        if known > embedded {
            let path = files.place().to_path_buf();
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

    /// Loads a model by its name on the Hugging Face Hub, such as `org/name@revision`. Downloads
    /// missing files into the Hub's local cache.
    ///
    /// # Errors
    /// As [`Model::load`], or if the download fails.
    pub fn from_hub(name: &str, device: &Device) -> Result<Self> {
        Self::load(model_dir(Path::new(name), HubWeights::All, &Silent)?, device)
    }

    /// Returns the checkpoint directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the chat template that replaces the checkpoint's own; `None` if it was not replaced.
    pub(crate) fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the same model with another chat template: `vicuna`, `llama-2`, `alpaca`, the path
    /// of a Jinja file, or `none` to use only the last user message.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_chat_template(self, chosen: &str) -> Result<Self> {
        let chat_format = Arc::new(ChatFormat::choose(text_files(&self.dir)?, Some(chosen))?);
        Ok(Self { chat_format, chat_template: Some(chosen.into()), ..self })
    }

    /// Returns the neural network, for training and for the lower crates.
    pub fn network(&self) -> &CausalLm {
        &self.network
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Encodes a conversation as token ids, up to the start of the next answer.
    ///
    /// # Errors
    /// If the model has no chat template, or the template fails.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// Returns the hash of `config.json` and the weights, by which heads and adapters identify
    /// their models. The first call computes it from the files.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn hash(&self) -> Result<&str> {
        if self.hash.get().is_none() {
            let hash = hash_model_dir(&self.dir, &mut |_, _| ())?;
            self.hash.get_or_init(|| hash);
        }
        Ok(self.hash.get().expect("it was set above"))
    }
}

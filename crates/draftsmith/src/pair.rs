//! A target and, where there is one, its draft, with the text side they share.

use std::path::Path;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{ChatTemplate, Message, TextTokenizer, hash_bytes, hash_file};
use draftsmith_model::{Adapter, AdapterConfig, CausalLm, hash_model_dir};

/// Models that belong together.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) target: CausalLm,
    pub(crate) draft: Option<CausalLm>,
    pub(crate) tokenizer: TextTokenizer,
    pub(crate) template: Option<ChatTemplate>,
}

impl Pair {
    /// Loads the target's weights, tokenizer and chat template, and the draft's weights after a
    /// check that its tokenizer is the same.
    pub(crate) fn load(target: &Path, draft: Option<&Path>, device: &Device) -> Result<Self> {
        check_dir(target, "target")?;
        let tokenizer = TextTokenizer::from_model_dir(target)?;
        let template = ChatTemplate::from_model_dir(target)?;
        let draft = match draft {
            Some(dir) => {
                check_dir(dir, "draft")?;
                TextTokenizer::check_shared(&tokenizer, &TextTokenizer::from_model_dir(dir)?)?;
                Some(CausalLm::from_model_dir(dir, device)?)
            }
            None => None,
        };
        let target_model = CausalLm::from_model_dir(target, device)?;
        let (known, embedded) = (tokenizer.vocab_size(), target_model.config().vocab_size);
        if known > embedded {
            bail!(
                "`{}` has {known} tokens, but the model has embeddings for {embedded}: \
                 the tokenizer does not belong to this model",
                target.join("tokenizer.json").display()
            );
        }
        Ok(Self { target: target_model, draft, tokenizer, template })
    }

    /// The ids of a conversation up to where the answer begins.
    pub(crate) fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(self.template.as_ref(), messages)?)
    }

    /// Reads a self-draft adapter, after a check that it was trained for the target at hand (of
    /// hash `target_hash`), where it says for which.
    pub(crate) fn read_adapter(
        &self,
        dir: &Path,
        target_hash: &str,
        device: &Device,
    ) -> Result<(AdapterConfig, Adapter)> {
        let (config, adapter) = Adapter::from_dir(dir, self.target.config(), device)?;
        match &config.target_hash {
            Some(hash) if hash != target_hash => bail!(
                "the adapter in `{}` was trained for another target (hash {hash}, this one's is \
                 {target_hash}): train it again, or point `models.target` at the target it belongs to",
                dir.display()
            ),
            _ => Ok((config, adapter)),
        }
    }

    /// The longest sequence that every model of the pair can read.
    pub(crate) fn context(&self) -> usize {
        let draft = self.draft.iter().map(|draft| draft.config().max_position_embeddings);
        draft.fold(self.target.config().max_position_embeddings, usize::min)
    }

    /// Checks that a prompt leaves room for at least one token.
    pub(crate) fn check_fits(&self, id: &str, prompt: &[u32]) -> Result<()> {
        let context = self.context();
        if prompt.len() >= context {
            bail!(
                "prompt `{id}` has {} tokens, but the models' context holds {context}: \
                 shorten it or take it out of its file",
                prompt.len()
            );
        }
        Ok(())
    }
}

/// The hash of a model directory, for provenance.
pub(crate) fn hash_dir(dir: &Path) -> Result<String> {
    hash_model_dir(dir).with_context(|| format!("cannot hash `{}`", dir.display()))
}

/// The hash of a head's or an adapter's weights and shape. Its `config.json` says more, such as the
/// rule that was chosen for it by rollouts, and that changes no rollout.
pub(crate) fn hash_export(dir: &Path, shape: &str) -> Result<String> {
    let mut weights = Vec::new();
    for entry in
        std::fs::read_dir(dir).with_context(|| format!("cannot read `{}`", dir.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            weights.push(path);
        }
    }
    weights.sort();
    let weights = weights.iter().map(|path| hash_file(path)).collect::<Result<Vec<_>, _>>()?;
    Ok(hash_bytes(format!("{} {shape}", weights.join(" ")).as_bytes()))
}

fn check_dir(dir: &Path, role: &str) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    bail!(
        "the {role} `{}` is not a directory; \
         hint: give a Hugging Face checkpoint directory with config.json and tokenizer.json",
        dir.display()
    )
}

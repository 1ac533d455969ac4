//! A checkpoint directory or GGUF file whose parts are read when first needed.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, bail, ensure};
use draftsmith_model::{CausalLm, ModelConfig, ModelError, WeightDtype, hash_model_dir, is_gguf};
use serde_json::json;

use crate::watch::{Bar, Watch};

/// The role of the verified model.
pub(super) const TARGET: &str = "target";

/// A model's directory, and a cache of what was read from it.
#[derive(Default)]
pub(super) struct ModelDir {
    /// The model's role in messages, such as `target`.
    pub(super) role: String,
    pub(super) dir: PathBuf,
    /// Whether the model's layers run elsewhere, so that its family may be any.
    pub(super) is_elsewhere: bool,
    config: OnceLock<ModelConfig>,
    /// The hash of the weights and `config.json`.
    pub(super) hash: OnceLock<String>,
    f32: OnceLock<CausalLm>,
    bf16: OnceLock<CausalLm>,
}

impl ModelDir {
    pub(super) fn new(role: &str, dir: &Path) -> Self {
        Self { role: role.to_owned(), dir: dir.to_path_buf(), ..Self::default() }
    }

    /// Wraps a model that is already in memory.
    pub(super) fn holding(role: &str, dir: &Path, model: &CausalLm) -> Self {
        let held = Self::new(role, dir);
        let slot = if model.dtype().is_f32() { &held.f32 } else { &held.bf16 };
        slot.get_or_init(|| model.clone());
        held
    }

    /// Checks that the directory exists and can hold a model, or is a GGUF file.
    pub(super) fn check(&self) -> Result<()> {
        let (role, dir) = (&self.role, self.dir.display());
        check_merged(role, &self.dir)?;
        if self.dir.is_dir() || is_gguf(&self.dir) && self.dir.is_file() {
            return Ok(());
        }
        bail!(
            "the {role} `{dir}` is not a directory; \
             hint: give a Hugging Face checkpoint directory with config.json and tokenizer.json, or a GGUF file"
        )
    }

    pub(super) fn config(&self) -> Result<&ModelConfig> {
        get_or_read(&self.config, || {
            self.check()?;
            let of_server = || ModelConfig::ends_from_model_dir(&self.dir);
            if self.is_elsewhere {
                return Ok(of_server()?);
            }
            ModelConfig::from_model_dir(&self.dir).map_err(|error| {
                let is_servable = self.role == TARGET && of_server().is_ok();
                if is_servable { served_instead(&error, &self.dir) } else { error.into() }
            })
        })
    }

    /// Returns whether the weights have not been read in any dtype.
    pub(super) fn is_unread(&self) -> bool {
        self.f32.get().or(self.bf16.get()).is_none()
    }

    /// Returns the weights for computing in `dtype`, read by `load` at the first call.
    pub(super) fn weights(
        &self,
        dtype: WeightDtype,
        load: impl FnOnce(&Path) -> Result<CausalLm>,
    ) -> Result<&CausalLm> {
        let slot = match dtype {
            WeightDtype::F32 => &self.f32,
            WeightDtype::Bf16 | WeightDtype::F16 => &self.bf16,
        };
        get_or_read(slot, || load(&self.dir))
    }
}

/// Checks that a directory is not that of a LoRA adapter.
pub(crate) fn check_merged(role: &str, dir: &Path) -> Result<()> {
    let has = |name: &str| dir.join(name).is_file();
    let dir = dir.display();
    ensure!(
        !has("adapter_config.json") || has("config.json"),
        "the {role} `{dir}` is a LoRA adapter; hint: merge it into its model and copy the model's tokenizer there: \
         `peft.AutoPeftModelForCausalLM.from_pretrained(\"{dir}\").merge_and_unload().save_pretrained(\"merged\")` in \
         Python"
    );
    Ok(())
}

/// Says how a server runs a target that cannot run here.
fn served_instead(error: &ModelError, dir: &Path) -> anyhow::Error {
    let (error, dir) = (error.to_string(), json!(dir.display().to_string()));
    let start = if error.contains("; hint: ") { ", or" } else { "; hint:" };
    anyhow!(
        "{error}{start} let a server run it, with the recipe `models.target = {dir}`, `data.prompts = [\"prompts.jsonl\"]`, \
         `data.responses = \"server\"`, \
         `data.server = {{ urls = [\"http://localhost:8000/v1\"], model = {dir}, states.dirs = [\"/dev/shm/states\"] }}`, \
         `drafters.eagle = {{ kind = \"eagle3\", features = \"server\" }}`; `draftsmith server states RECIPE` prints \
         the `vllm serve` command, to which `--tensor-parallel-size N` is added for N GPUs"
    )
}

/// The minimum number of bytes for which hashing shows a progress bar.
const SHOWN_FROM: u64 = 1 << 28;

/// Hashes the weights and `config.json` in a directory. The hash is not cached.
pub fn hash_dir(dir: &Path, watch: &dyn Watch) -> Result<String> {
    hash_with(dir, watch, hash_model_dir)
}

/// A function that hashes a model's directory and reports bytes read and their total.
pub(super) type HashModel = fn(&Path, &mut dyn FnMut(u64, u64)) -> Result<String, ModelError>;

pub(super) fn hash_with(dir: &Path, watch: &dyn Watch, hash: HashModel) -> Result<String> {
    let megabytes = |bytes: u64| bytes / 1_000_000;
    let (mut shown, mut last): (Option<Box<dyn Bar>>, u64) = (None, 0);
    let hash = hash(dir, &mut |num_read, all| {
        if all >= SHOWN_FROM {
            let bar = || watch.bar("hash", "MB", megabytes(all));
            let more = megabytes(num_read) - megabytes(last);
            shown.get_or_insert_with(bar).advance(more as f64);
            last = num_read;
        }
    });
    hash.with_context(|| format!("cannot hash `{}`", dir.display()))
}

/// Returns the value of a slot. If the slot is empty, fills it with the result of `read`.
pub(super) fn get_or_read<T>(slot: &OnceLock<T>, read: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(found) = slot.get() {
        return Ok(found);
    }
    let read = read()?;
    Ok(slot.get_or_init(|| read))
}

//! Errors of models, heads and weight files. Every message names the file and the key or tensor,
//! and says what to do.

use std::path::{Path, PathBuf};

use draftsmith_files::{FileError, JsonError, parse_json, read_file};

/// An error while reading, checking or writing a model, a head or a weight file.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A malformed JSON file.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// A key of a JSON file with an unusable value.
    #[error("`{path}`: key `{key}` {problem}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: &'static str,
        /// The problem with the value, and the expected values.
        problem: String,
    },
    /// A key of a drafter's `config.json` that changes what it computes, or may do so.
    #[error(
        "`{path}`: key `{key}` {problem}; hint: `ignored_keys = [\"{key}\"]` in the drafter's table of a recipe \
         reads the drafter without it"
    )]
    RefusedKey {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: String,
        /// The problem with the value.
        problem: String,
    },
    /// A number in weights that is not finite.
    #[error(
        "`{path}`: tensor `{tensor}` holds {number}, and weights are finite numbers below 1e18; hint: take a \
         checkpoint from before its training failed"
    )]
    NotFinite {
        /// The file or directory.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The first number that is not finite or too large.
        number: f32,
    },
    /// A directory without weights.
    #[error(
        "`{path}` has no weights: expected `model.safetensors`, `pytorch_model.bin`, or an index of \
         either; hint: give a Hugging Face checkpoint directory"
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// A malformed or truncated safetensors file.
    #[error("`{path}` is not a valid safetensors file: {problem}; download or export it again")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// A description of the inconsistency.
        problem: String,
    },
    /// An export's weights that have changed since they were written.
    #[error(
        "`{path}` was changed since it was exported: its checksum differs from `weights_hash` in \
         config.json; hint: copy the whole directory again, or delete it and train again"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A PyTorch file that is truncated, or holds more than tensors.
    #[error(
        "`{path}` cannot be read as a model written by `torch.save`: {problem}; hint: download it \
         again, or save it as safetensors"
    )]
    Torch {
        /// The file.
        path: PathBuf,
        /// A description of the problem.
        problem: String,
    },
    /// A head or an adapter that was trained with other models.
    #[error(
        "the {what} in `{path}` was trained with another {of} (hash {then}, this one's is {now}); hint: \
         train it again, or use the {of} it belongs to"
    )]
    TrainedWith {
        /// The kind of what was trained: `head` or `adapter`.
        what: &'static str,
        /// The directory of the head or adapter.
        path: PathBuf,
        /// The other model's role: `target`, `draft` or `adapter`; or `tokenizer`.
        of: &'static str,
        /// The hash of the other model in training, as recorded in the head or adapter.
        then: String,
        /// The hash of the other model that is in use now.
        now: String,
    },
    /// A tensor that the architecture needs is missing.
    #[error("`{path}` has no tensor `{tensor}`: the checkpoint does not match its config.json")]
    MissingTensor {
        /// The file or directory.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// Tensors that the architecture does not have.
    #[error(
        "`{path}` has an unexpected tensor `{tensor}`{}: models of its `model_type` do not have it",
        if *.others == 0 { String::new() } else { format!(" (and {} more)", .others) }
    )]
    ExtraTensor {
        /// The file or directory.
        path: PathBuf,
        /// The name of the first such tensor.
        tensor: String,
        /// The number of further such tensors.
        others: usize,
    },
    /// A tensor whose shape contradicts config.json.
    #[error("`{path}`: tensor `{tensor}` has shape {found:?}, config.json implies {expected:?}")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The expected shape.
        expected: Vec<usize>,
    },
    /// A tensor of a type that cannot be read.
    #[error("`{path}`: tensor `{tensor}` is stored as {dtype}, expected f32, f16 or bf16")]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The tensor's type.
        dtype: String,
    },
    /// An exit layer that the target does not have.
    #[error(
        "exit layer {exit_layer} of a target with {num_layers} layers: expected 0 to {}",
        num_layers.saturating_sub(1)
    )]
    ExitLayer {
        /// The number of layers before the adapter.
        exit_layer: usize,
        /// The number of the target's layers.
        num_layers: usize,
    },
    /// An adapter whose computation no layer of the target's family can express.
    #[error(
        "an adapter of architecture `{architecture}` cannot be a draft model, because no layer of \
         {family} computes it; train another architecture, best `decoder-layer`"
    )]
    NoDraftModel {
        /// The adapter's architecture.
        architecture: String,
        /// The target's family.
        family: &'static str,
    },
    /// An adapter that the Kangaroo authors' class cannot load.
    #[error("Kangaroo's class cannot compute this adapter: {problem}")]
    NotKangaroo {
        /// The reason.
        problem: String,
    },
    /// An acceptance head whose tensors match neither of the two supported schemas.
    #[error("`{path}`: {problem}")]
    HeadSchema {
        /// The head's directory or file.
        path: PathBuf,
        /// The problem, and a way to solve it.
        problem: String,
    },
    /// The device failed to return a result.
    #[error("the device failed: {0}")]
    Device(String),
}

impl ModelError {
    /// Wraps an I/O error with the action and the file.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        FileError::new(action, path, source).into()
    }
}

/// Reads a JSON file.
///
/// # Errors
/// If the file cannot be read, or does not have `T`'s form.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    Ok(parse_json(path, &read_file(path)?)?)
}

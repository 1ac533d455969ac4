//! Finds the weight files of a model: a checkpoint directory or a GGUF file.
//!
//! An index may only name files in its own directory. These may be symbolic links to other
//! directories, as in Hugging Face's cache.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use crate::error::{ModelError, Result, read_json};
use crate::gguf::is_gguf;

/// The names of a file with all weights and of an index of several files, in order of preference.
pub const WEIGHT_NAMES: [(&str, &str); 4] = [
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("medusa_lm_head.safetensors", "medusa_lm_head.safetensors.index.json"),
    ("medusa_lm_head.pt", "medusa_lm_head.pt.index.json"),
];

/// The location of a directory's weights.
pub(super) enum WeightFiles {
    /// One file, with this name.
    Single(&'static str),
    /// Several files: an index, and the name of each tensor's file.
    Sharded { index: &'static str, file_of: BTreeMap<String, String> },
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Finds the weight files of a directory.
    ///
    /// # Errors
    /// If there are none, or the index is malformed or names a file of another directory.
    pub(super) fn of_dir(dir: &Path) -> Result<Self> {
        for (single, index) in WEIGHT_NAMES {
            if dir.join(single).exists() {
                return Ok(Self::Single(single));
            }
            let path = dir.join(index);
            if !path.exists() {
                continue;
            }
            let ShardIndex { weight_map: file_of } = read_json(&path)?;
            if let Some((tensor, file)) = file_of.iter().find(|(_, file)| !is_plain_name(file)) {
                let problem = format!(
                    "has tensor `{tensor}` in `{file}`: expected the plain name of a file beside \
                     the index; hint: move the file there and use that name, or download the model \
                     again"
                );
                return Err(ModelError::config(&path, "weight_map", problem));
            }
            return Ok(Self::Sharded { index, file_of });
        }
        Err(ModelError::Invalid(format!(
            "`{}` has no weights: expected `model.safetensors`, `pytorch_model.bin`, or an index of either; hint: give \
             a Hugging Face checkpoint directory",
            dir.display()
        )))
    }
}

/// Returns the file that says what a model computes: `config.json` of a directory, or the GGUF file.
pub fn config_file(model: &Path) -> PathBuf {
    if is_gguf(model) { model.to_path_buf() } else { model.join("config.json") }
}

/// Returns the directory with a model's tokenizer and chat template: the model's own, or that of its GGUF
/// file.
pub fn text_dir(model: &Path) -> &Path {
    let parent = model.parent().filter(|parent| !parent.as_os_str().is_empty());
    if is_gguf(model) { parent.unwrap_or(Path::new(".")) } else { model }
}

/// Lists the names of a checkpoint's weight files: one file, or an index and all files that it
/// names, sorted. A GGUF file is the only one of its model.
///
/// # Errors
/// If there are none, or the index is malformed or names a file of another directory.
pub fn weight_files(dir: &Path) -> Result<Vec<String>> {
    files_of(dir, |_| true)
}

/// Lists the weight files, as [`weight_files`] does, that hold tensors outside the numbered layers,
/// such as embeddings, final norm and LM head.
///
/// # Errors
/// As there.
pub fn end_weight_files(dir: &Path) -> Result<Vec<String>> {
    files_of(dir, |tensor| !is_in_layer(tensor))
}

/// Returns whether a tensor belongs to a numbered layer.
pub(super) fn is_in_layer(tensor: &str) -> bool {
    tensor.split('.').any(|part| part.parse::<u32>().is_ok())
}

fn files_of(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    if is_gguf(dir) {
        let name = dir.file_name().unwrap_or_default();
        return Ok(vec![name.to_string_lossy().into_owned()]);
    }
    match WeightFiles::of_dir(dir)? {
        WeightFiles::Single(name) => Ok(vec![name.to_owned()]),
        WeightFiles::Sharded { index, file_of } => {
            let wanted = file_of.into_iter().filter(|(tensor, _)| wanted(tensor));
            let names = wanted.map(|(_, file)| file).chain([index.to_owned()]);
            Ok(names.collect::<BTreeSet<_>>().into_iter().collect())
        }
    }
}

/// Returns whether a name is a plain file name, without directories.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
}

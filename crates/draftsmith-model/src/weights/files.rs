//! Which files of a checkpoint directory its weights are in.
//!
//! A directory is a border: an index names plain files of its own directory. What those link to is
//! their owner's business: Hugging Face's cache is made of links.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use crate::error::{ModelError, read_json};

/// A file of all weights, and the index of where they are instead: the first that is there counts.
pub const WEIGHT_NAMES: [(&str, &str); 2] = [
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
];

/// Where a directory's weights are.
pub(super) enum WeightFiles {
    /// All in one file.
    Single(&'static str),
    /// In the files that an index names, by tensor.
    Sharded { index: &'static str, file_of: BTreeMap<String, String> },
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Looks for the weights of a directory.
    ///
    /// # Errors
    /// If there are none, or the index is not one or names a file of another directory.
    pub(super) fn of_dir(dir: &Path) -> Result<Self, ModelError> {
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
                let (tensor, file) = (tensor.clone(), file.clone());
                return Err(ModelError::OutsideDir { path, tensor, file });
            }
            return Ok(Self::Sharded { index, file_of });
        }
        Err(ModelError::NoWeights { path: dir.to_path_buf() })
    }
}

/// The names of the files that a checkpoint's weights are read from: one, or else an index and every
/// file that it names, sorted.
///
/// # Errors
/// If there are none, or the index is not one or names a file of another directory.
pub fn weight_files(dir: &Path) -> Result<Vec<String>, ModelError> {
    match WeightFiles::of_dir(dir)? {
        WeightFiles::Single(name) => Ok(vec![name.to_owned()]),
        WeightFiles::Sharded { index, file_of } => {
            let mut names: Vec<String> = file_of.into_values().collect();
            names.push(index.to_owned());
            names.sort();
            names.dedup();
            Ok(names)
        }
    }
}

/// Whether a name is that of a file in a directory, and not of one elsewhere.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
}

//! The tensors of a file that `torch.save` wrote (`pytorch_model.bin`), read without Python and
//! without running anything: a zip archive (`torch/zip.rs`) of one pickle, which names the tensors
//! (`torch/pickle.rs`), and their bytes.

mod pickle;
#[cfg(test)]
mod tests;
mod write;
mod zip;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use self::pickle::TorchTensor;
pub(crate) use self::write::write_torch;
use self::zip::Archive;
use super::stored::StoredTensor;
use crate::error::ModelError;

/// The longest pickle that is read: those of the largest models have a hundredth of it.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// The tensors of a file, by name.
pub(super) fn tensors_of(
    file: &File,
    path: &Path,
) -> Result<BTreeMap<String, StoredTensor>, ModelError> {
    let broken = |problem: String| ModelError::Torch { path: path.to_path_buf(), problem };
    let archive = Archive::read(file).map_err(|e| e.at(path))?;
    // All lie in a directory that is called after the file as it was saved.
    let is_pickle = |name: &&str| name.split_once('/').is_some_and(|(_, rest)| rest == "data.pkl");
    let Some(dir) = archive.names().find(is_pickle).map(|name| name.trim_end_matches("data.pkl"))
    else {
        return Err(broken("it has no `data.pkl`".to_owned()));
    };
    let entry = |name: &str| archive.entry(&format!("{dir}{name}"));
    let read = |name: &str, most: u64| match entry(name) {
        Some(entry) if entry.len > most => {
            Err(broken(format!("its `{name}` has {} bytes, more than {most}", entry.len)))
        }
        Some(entry) => entry.read(file).map(Some).map_err(|e| ModelError::io("read", path, e)),
        None => Ok(None),
    };
    if read("byteorder", 16)?.is_some_and(|order| order != b"little") {
        return Err(broken("its numbers are not little-endian".to_owned()));
    }
    let pickle = read("data.pkl", MAX_PICKLE_BYTES)?.unwrap_or_default();
    let tensors = pickle::tensors(&pickle).map_err(broken)?;
    let stored = |(name, tensor): (String, TorchTensor)| {
        let storage = format!("data/{}", tensor.storage);
        let fail = |problem: String| broken(format!("tensor `{name}`: {problem}"));
        let Some(entry) = entry(&storage) else {
            return Err(fail(format!("its `{storage}` is not there")));
        };
        let width = tensor.dtype.bitsize() / 8;
        let shape = tensor.shape;
        let num = shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
        let end = num.and_then(|num| num.checked_add(tensor.offset)?.checked_mul(width));
        if end.is_none_or(|end| end as u64 > entry.len) {
            let len = entry.len;
            return Err(fail(format!("of shape {shape:?}, it lies beyond the {len} bytes stored")));
        }
        let start = entry.start + (tensor.offset * width) as u64;
        Ok((name, StoredTensor { dtype: tensor.dtype, shape, start }))
    };
    tensors.into_iter().map(stored).collect()
}

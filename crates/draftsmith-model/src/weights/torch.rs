//! Reads the tensors of a file that `torch.save` wrote (`pytorch_model.bin`), without Python and
//! without running anything in it.
//!
//! The file is a zip archive of stored entries: a pickle that names the tensors (`torch/pickle.rs`),
//! and their bytes. A hostile file is an error: memory is bounded by [`MAX_PICKLE_BYTES`] and
//! [`MAX_ENTRIES`].

mod pickle;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use self::pickle::TorchTensor;
pub(crate) use self::write::write_torch;
use super::stored::StoredTensor;
use crate::error::ModelError;

/// The longest pickle that is read, a hundred times that of the largest models.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// The most entries of an archive; torch writes one for each tensor and a few more.
const MAX_ENTRIES: u64 = 100_000;

/// The records that end an archive: the 64-bit record, its locator, and the last record without a
/// comment, which torch never writes.
const END_BYTES: u64 = 56 + 20 + 22;

/// Where an entry's bytes are in the file.
#[derive(Clone, Copy)]
struct Entry {
    start: u64,
    len: u64,
}

/// The tensors of a file by name.
pub(super) fn tensors_of(
    file: &File,
    path: &Path,
) -> Result<BTreeMap<String, StoredTensor>, ModelError> {
    let broken = |problem: String| ModelError::Torch { path: path.to_path_buf(), problem };
    let entries = entries_of(file, path)?;
    // All entries lie in one directory, named after the file as it was saved.
    let is_pickle = |name: &&String| name.split_once('/').is_some_and(|(_, at)| at == "data.pkl");
    let Some(dir) = entries.keys().find(is_pickle).map(|name| name.trim_end_matches("data.pkl"))
    else {
        return Err(broken("it has no `data.pkl`".to_owned()));
    };
    let entry = |name: &str| entries.get(&format!("{dir}{name}")).copied();
    let read = |name: &str, most: u64| match entry(name) {
        Some(Entry { len, .. }) if len > most => {
            Err(broken(format!("its `{name}` has {len} bytes, more than {most}")))
        }
        Some(entry) => read_at(file, entry).map(Some).map_err(|e| ModelError::io("read", path, e)),
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
            return Err(fail(format!("its `{storage}` is missing")));
        };
        let width = tensor.dtype.bitsize() / 8;
        let shape = tensor.shape;
        let num = shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
        let end = num.and_then(|num| num.checked_add(tensor.offset)?.checked_mul(width));
        if end.is_none_or(|end| end as u64 > entry.len) {
            let len = entry.len;
            return Err(fail(format!("of shape {shape:?}, it ends beyond the {len} bytes stored")));
        }
        let start = entry.start + (tensor.offset * width) as u64;
        Ok((name, StoredTensor { dtype: tensor.dtype, shape, start }))
    };
    tensors.into_iter().map(stored).collect()
}

/// The entries of an archive, all stored uncompressed.
fn entries_of(file: &File, path: &Path) -> Result<BTreeMap<String, Entry>, ModelError> {
    let broken = |problem: String| ModelError::Torch { path: path.to_path_buf(), problem };
    let failed = |error| match error {
        ZipError::Io(error) if error.kind() == ErrorKind::UnexpectedEof => {
            broken("it is cut short".to_owned())
        }
        ZipError::Io(error) => ModelError::io("read", path, error),
        error => broken(error.to_string()),
    };
    let file_bytes = file.metadata().map_err(|e| ModelError::io("read", path, e))?.len();
    let end = read_at(file, Entry { start: file_bytes.saturating_sub(END_BYTES), len: END_BYTES });
    check_end(&end.map_err(|e| ModelError::io("read", path, e))?, file_bytes)
        .map_err(|problem| broken(problem.to_owned()))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(failed)?;
    let mut entries = BTreeMap::new();
    for number in 0..archive.len() {
        let stored = archive.by_index_raw(number).map_err(failed)?;
        let name = stored.name().to_owned();
        let entry = Entry { start: stored.data_start(), len: stored.size() };
        let fail = |problem: &str| Err(broken(format!("its entry `{name}` {problem}")));
        if stored.compression() != CompressionMethod::Stored
            || stored.compressed_size() != entry.len
        {
            return fail("is compressed or encrypted, which torch never writes");
        }
        if entry.start.checked_add(entry.len).is_none_or(|end| end > file_bytes) {
            return fail("lies beyond its end");
        }
        if entries.insert(name.clone(), entry).is_some() {
            return Err(broken(format!("it has two entries `{name}`")));
        }
    }
    Ok(entries)
}

/// Checks the last [`END_BYTES`] of an archive: [`ZipArchive`] reserves memory for as many entries
/// as they claim, and searches the whole file for a 64-bit record that is not where they say.
fn check_end(end: &[u8], file_bytes: u64) -> Result<(), &'static str> {
    let (rest, last) = end.split_at(end.len().saturating_sub(22));
    if !last.starts_with(b"PK\x05\x06") {
        return Err("it is cut short, or not a zip archive, which torch before 1.6 did not write");
    }
    let (record, locator) = rest.split_at(rest.len().saturating_sub(20));
    if locator.starts_with(b"PK\x06\x07") {
        let number = |bytes: &[u8], at: usize| {
            let bytes = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u64::from_le_bytes)
        };
        let is_in_place =
            record.starts_with(b"PK\x06\x06") && number(locator, 8) == Some(file_bytes - END_BYTES);
        if !is_in_place || number(record, 32).is_none_or(|num| num > MAX_ENTRIES) {
            return Err("its 64-bit record is malformed");
        }
    }
    Ok(())
}

fn read_at(mut file: &File, entry: Entry) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(entry.start))?;
    file.take(entry.len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

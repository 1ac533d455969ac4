//! Writes tensors as `torch.save` writes a state dictionary: a zip archive of a pickle and of each
//! tensor's numbers, uncompressed.

use std::io::{Seek, Write};
use std::path::Path;

use draftsmith_files::write_whole_with;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::NamedTensor;
use crate::error::{ModelError, Result};

/// Writes a file for `torch.load`, atomically, in f32.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_torch(path: &Path, tensors: &[NamedTensor]) -> Result<()> {
    write_whole_with(path, |file| {
        archive(file, tensors).map_err(|error| ModelError::io("write", path, error.into()))
    })
}

fn archive(file: impl Write + Seek, tensors: &[NamedTensor]) -> Result<(), zip::result::ZipError> {
    let mut zip = ZipWriter::new(file);
    // The archive has no time of day, so that the same tensors give the same bytes.
    let stored = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(zip::DateTime::default())
        .large_file(true);
    let mut entry = |name: &str, bytes: &[u8]| -> Result<(), zip::result::ZipError> {
        zip.start_file(format!("archive/{name}"), stored)?;
        Ok(zip.write_all(bytes)?)
    };
    entry("data.pkl", &pickle(tensors))?;
    entry("byteorder", b"little")?;
    for (number, tensor) in tensors.iter().enumerate() {
        let bytes: Vec<u8> = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        entry(&format!("data/{number}"), &bytes)?;
    }
    entry("version", b"3\n")?;
    zip.finish().map(drop)
}

/// Pickles a dictionary of tensors by name, in protocol 2 without a memo. Each tensor has its own
/// storage.
fn pickle(tensors: &[NamedTensor]) -> Vec<u8> {
    let mut bytes = b"\x80\x02}(".to_vec();
    let text =
        |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let int = |int: usize| [b"\x8a\x08", &(int as u64).to_le_bytes()[..]].concat();
    let ints = |all: &[usize]| {
        let all = all.iter().flat_map(|one| int(*one));
        b"(".iter().copied().chain(all).chain([b't']).collect::<Vec<u8>>()
    };
    for (number, NamedTensor { name, shape, values }) in tensors.iter().enumerate() {
        let mut strides = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim];
        }
        bytes.extend(text(name));
        bytes.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        bytes.extend(text("storage"));
        bytes.extend(b"ctorch\nFloatStorage\n");
        bytes.extend(text(&number.to_string()));
        bytes.extend(text("cpu"));
        bytes.extend(int(values.len()));
        bytes.extend(b"tQ");
        bytes.extend(int(0));
        bytes.extend(ints(shape));
        bytes.extend(ints(&strides));
        bytes.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    bytes.extend(b"u.");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::WeightReader;

    #[test]
    fn a_written_file_reads_back_and_the_same_tensors_give_the_same_bytes() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("pytorch_model.bin");
        let tensor = |name: &str, shape: &[usize]| NamedTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            values: (0..shape.iter().product()).map(|i: usize| i as f32 - 2.5).collect(),
        };
        let tensors = [tensor("norm.weight", &[5]), tensor("layers.0.a.weight", &[3, 40])];
        write_torch(&path, &tensors).expect("written");
        let bytes = std::fs::read(&path).expect("read");
        write_torch(&path, &tensors).expect("written again");
        assert_eq!(std::fs::read(&path).expect("read"), bytes);
        let mut reader = WeightReader::open_file(&path).expect("readable");
        for NamedTensor { name, shape, values } in &tensors {
            assert_eq!(&reader.take(name, shape).expect("there"), values);
        }
        reader.finish().expect("nothing else");
    }
}

//! Reads the tensors of a file that `torch.save` wrote (`pytorch_model.bin`), without Python and
//! without running anything in it.
//!
//! burn's crate `pytorch-reader` parses the archive and its pickle within limits. A tensor can
//! declare more numbers than its file contains (a stride of 0 repeats them). Such a file causes an
//! error here, so no tensor takes more memory than the file is long.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use pytorch_reader::{DType, FileFormat, PytorchError, PytorchReader};
use safetensors::Dtype;

use super::stored::{Place, StoredTensor};
use crate::error::{ModelError, Result};

/// Reads the tensors of a file by name.
///
/// # Errors
/// If it cannot be read, is not an archive of torch 1.6 or later, or a tensor is longer than the file.
pub(super) fn tensors_of(path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let broken = |problem: String| {
        ModelError::Invalid(format!(
            "`{}` cannot be read as a model written by `torch.save`: {problem}; hint: download it again, or save it as \
             safetensors",
            path.display()
        ))
    };
    let num_bytes = path.metadata().map_err(|e| ModelError::io("read", path, e))?.len();
    let reader = PytorchReader::new(path).map_err(|error| match error {
        PytorchError::Io(error) if error.raw_os_error().is_some() => {
            ModelError::io("read", path, error)
        }
        error => broken(error.to_string()),
    })?;
    if reader.metadata().format_type != FileFormat::Zip {
        return Err(broken(
            "it is not a zip archive, which torch before 1.6 did not write".to_owned(),
        ));
    }
    let stored = |(name, tensor): (String, pytorch_reader::Tensor)| {
        if tensor.byte_len() as u64 > num_bytes {
            let shape = tensor.shape();
            return Err(broken(format!(
                "tensor `{name}` of shape {shape:?} is longer than the file of {num_bytes} bytes"
            )));
        }
        let (dtype, shape) = (dtype(tensor.dtype()), tensor.shape().to_vec());
        Ok((name, StoredTensor::plain(dtype, shape, Place::Torch(tensor))))
    };
    reader.into_tensors().into_iter().map(stored).collect()
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

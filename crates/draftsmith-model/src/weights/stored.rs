//! A tensor in a file: its type, shape and offset.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::ModelError;

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// Rows are read in multiples of this, so that panels of packed weights are filled whole.
const ROWS_AT_ONCE: usize = 16;

/// A tensor's type and place in a file, checked against the file's length.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Offset of its first byte in the file.
    pub(super) start: u64,
}

/// Consecutive rows of a tensor as stored: f32, bf16 or f16, little-endian.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) bytes: &'a [u8],
}

impl StoredRows<'_> {
    /// Appends the numbers, widened to f32.
    pub(crate) fn widen_into(self, values: &mut Vec<f32>) {
        let bytes = self.bytes;
        match self.dtype {
            Dtype::F16 => {
                values.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
            }
            Dtype::BF16 => {
                values.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()))
            }
            _ => values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        }
    }
}

impl StoredTensor {
    /// Reads some rows, a few at a time.
    pub(super) fn read_rows(
        &self,
        mut file: &File,
        path: &Path,
        name: &str,
        rows: Range<usize>,
        mut each: impl FnMut(usize, StoredRows<'_>),
    ) -> Result<(), ModelError> {
        let io = |e| ModelError::io("read", path, e);
        let width = match self.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            _ => return Err(self.bad_dtype(path, name)),
        };
        let row_bytes = self.shape.iter().skip(1).product::<usize>() * width;
        let rows_at_once = (READ_BYTES / row_bytes.max(1)).max(1).next_multiple_of(ROWS_AT_ONCE);
        let mut num_left = rows.len() * row_bytes;
        let mut bytes = vec![0_u8; rows_at_once.saturating_mul(row_bytes).min(num_left)];
        let start = self.start + (rows.start * row_bytes) as u64;
        file.seek(SeekFrom::Start(start)).map_err(io)?;
        let mut row = 0;
        while num_left > 0 {
            let bytes = &mut bytes[..num_left.min(rows_at_once.saturating_mul(row_bytes))];
            file.read_exact(bytes).map_err(io)?;
            each(row, StoredRows { dtype: self.dtype, bytes });
            row += rows_at_once;
            num_left -= bytes.len();
        }
        Ok(())
    }

    /// Reads a list of 64-bit integers.
    pub(super) fn read_ids(
        &self,
        mut file: &File,
        path: &Path,
        name: &str,
    ) -> Result<Vec<i64>, ModelError> {
        let io = |e| ModelError::io("read", path, e);
        if self.dtype != Dtype::I64 {
            return Err(self.bad_dtype(path, name));
        }
        let mut bytes = vec![0_u8; self.shape.iter().product::<usize>() * size_of::<i64>()];
        file.seek(SeekFrom::Start(self.start)).map_err(io)?;
        file.read_exact(&mut bytes).map_err(io)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }

    fn bad_dtype(&self, path: &Path, name: &str) -> ModelError {
        let (path, tensor) = (path.to_path_buf(), name.to_owned());
        ModelError::Dtype { path, tensor, dtype: format!("{:?}", self.dtype) }
    }
}

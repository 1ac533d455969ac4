//! A tensor in a file: its type, shape and offset.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::{ModelError, Result};

/// The maximum number of bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// The number of rows that are read at once is a multiple of this, so that panels of packed weights
/// are filled whole.
const ROWS_AT_ONCE: usize = 16;

/// A tensor's type and place in a file, checked against the file's length.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) place: Place,
}

/// The location of a tensor's numbers.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// The offset of the first byte in the file.
    At(u64),
    /// A tensor of a `torch.save` file, which `pytorch-reader` locates.
    Torch(pytorch_reader::Tensor),
}

/// A source of a tensor's bytes, and the position of the first byte in it.
pub(super) struct TensorBytes<'a> {
    source: Box<dyn ReadSeek + 'a>,
    start: u64,
}

trait ReadSeek: Read + Seek {}

impl<T: Read + Seek> ReadSeek for T {}

/// Consecutive rows of a tensor in the type in which they are stored: f32, bf16 or f16,
/// little-endian.
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
    /// Opens a tensor for reading. A tensor of a `torch.save` file is read whole here.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(super) fn open<'a>(&self, file: &'a File) -> io::Result<TensorBytes<'a>> {
        Ok(match &self.place {
            Place::At(start) => TensorBytes { source: Box::new(file), start: *start },
            Place::Torch(tensor) => {
                TensorBytes { source: Box::new(Cursor::new(tensor.read()?)), start: 0 }
            }
        })
    }

    /// Reads some rows of a tensor, and passes them to `each` a few at a time.
    pub(super) fn read_rows(
        &self,
        TensorBytes { source, start }: &mut TensorBytes<'_>,
        path: &Path,
        name: &str,
        rows: Range<usize>,
        mut each: impl FnMut(usize, StoredRows<'_>),
    ) -> Result<()> {
        let io = |e| ModelError::io("read", path, e);
        let width = match self.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => {
                return Err(ModelError::Dtype(format!(
                    "`{}`: tensor `{name}` is stored as {other:?}, expected f32, f16 or bf16",
                    path.display()
                )));
            }
        };
        let row_bytes = self.shape.iter().skip(1).product::<usize>() * width;
        let rows_at_once = (READ_BYTES / row_bytes.max(1)).max(1).next_multiple_of(ROWS_AT_ONCE);
        let mut num_left = rows.len() * row_bytes;
        let mut bytes = vec![0_u8; rows_at_once.saturating_mul(row_bytes).min(num_left)];
        let start = *start + (rows.start * row_bytes) as u64;
        source.seek(SeekFrom::Start(start)).map_err(io)?;
        let mut row = 0;
        while num_left > 0 {
            let bytes = &mut bytes[..num_left.min(rows_at_once.saturating_mul(row_bytes))];
            source.read_exact(bytes).map_err(io)?;
            each(row, StoredRows { dtype: self.dtype, bytes });
            row += rows_at_once;
            num_left -= bytes.len();
        }
        Ok(())
    }

    /// Reads a list of integers of 32 or 64 bits, or of booleans as 0 and 1.
    pub(super) fn read_ids(&self, file: &File, path: &Path, name: &str) -> Result<Vec<i64>> {
        let io = |e| ModelError::io("read", path, e);
        let size = match self.dtype {
            Dtype::I64 => size_of::<i64>(),
            Dtype::I32 => size_of::<i32>(),
            Dtype::BOOL => 1,
            other => {
                let problem = format!(
                    "tensor `{name}` is stored as {other:?}, expected integers of 32 or 64 bits"
                );
                return Err(ModelError::safetensors(path, problem));
            }
        };
        let mut bytes = vec![0_u8; self.shape.iter().product::<usize>() * size];
        let TensorBytes { mut source, start } = self.open(file).map_err(io)?;
        source.seek(SeekFrom::Start(start)).map_err(io)?;
        source.read_exact(&mut bytes).map_err(io)?;
        Ok(match size {
            1 => bytes.into_iter().map(i64::from).collect(),
            4 => bytes.as_chunks().0.iter().map(|it| i32::from_le_bytes(*it).into()).collect(),
            _ => bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        })
    }
}

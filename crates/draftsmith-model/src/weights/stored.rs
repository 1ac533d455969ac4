//! A tensor in a file: its number format, shape and offset.

use std::fmt;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;

use super::quantised::QuantType;
use crate::error::{ModelError, Result};

/// The maximum number of bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// The number of rows that are read at once is a multiple of this, so that panels of packed weights
/// are filled whole.
const ROWS_AT_ONCE: usize = 16;

/// A tensor's format and place in a file, checked against the file's length.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) format: StoredFormat,
    pub(super) shape: Vec<usize>,
    pub(super) place: Place,
    /// The order of the rows in the file, if it is another one.
    pub(super) swap: Option<RowSwap>,
    /// The number that is added to each number of the file.
    pub(super) offset: f32,
}

/// The number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredFormat {
    /// One number after another, little-endian.
    Plain(Dtype),
    /// Blocks of a GGUF file, which are consecutive weights of a row.
    Quantised(QuantType),
}

impl StoredFormat {
    /// Returns the number of weights in the smallest unit that can be read.
    pub(super) fn block_len(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Quantised(kind) => kind.block_len(),
        }
    }

    /// Returns the number of bytes of that unit.
    pub(super) fn block_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.bitsize() / 8,
            Self::Quantised(kind) => kind.block_bytes(),
        }
    }
}

impl fmt::Display for StoredFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(out, "{dtype:?}"),
            Self::Quantised(kind) => out.write_str(kind.name()),
        }
    }
}

/// A file's order of rows, in which two of their indices are swapped: row `[.., outer, inner, strip]`
/// is stored at `[.., inner, outer, strip]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowSwap {
    pub(super) outer: usize,
    pub(super) inner: usize,
    /// The number of rows that stay together.
    pub(super) strip: usize,
}

impl RowSwap {
    /// Returns the number of rows among which rows change places.
    pub(super) fn num_rows(self) -> usize {
        self.outer * self.inner * self.strip
    }

    /// Returns the place of a row in the file.
    fn stored(self, row: usize) -> usize {
        let Self { outer, inner, strip } = self;
        let [block, of_strip] = [row / self.num_rows() * self.num_rows(), row % strip];
        let (of_outer, of_inner) = (row / (inner * strip) % outer, row / strip % inner);
        block + (of_inner * outer + of_outer) * strip + of_strip
    }
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

/// Consecutive rows of a tensor in the format in which they are stored: f32, bf16, f16, or quantised
/// blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    pub(crate) format: StoredFormat,
    pub(crate) bytes: &'a [u8],
}

impl StoredRows<'_> {
    /// Appends the numbers, widened to f32.
    pub(crate) fn widen_into(self, values: &mut Vec<f32>) {
        let bytes = self.bytes;
        match self.format {
            StoredFormat::Quantised(kind) => kind.widen_into(bytes, values),
            StoredFormat::Plain(Dtype::F16) => {
                values.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
            }
            StoredFormat::Plain(Dtype::BF16) => {
                values.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()))
            }
            StoredFormat::Plain(_) => {
                values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)))
            }
        }
    }
}

impl StoredTensor {
    /// Describes a tensor whose rows are stored as they are read.
    pub(super) fn plain(dtype: Dtype, shape: Vec<usize>, place: Place) -> Self {
        Self { format: StoredFormat::Plain(dtype), shape, place, swap: None, offset: 0.0 }
    }

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
        let format = self.format;
        if let StoredFormat::Plain(other) = format
            && !matches!(other, Dtype::F32 | Dtype::F16 | Dtype::BF16)
        {
            return Err(ModelError::Dtype(format!(
                "`{}`: tensor `{name}` is stored as {other:?}, expected f32, f16 or bf16",
                path.display()
            )));
        }
        let row_len = self.shape.iter().skip(1).product::<usize>();
        let row_bytes = row_len / format.block_len() * format.block_bytes();
        let rows_at_once = (READ_BYTES / row_bytes.max(1)).max(1).next_multiple_of(ROWS_AT_ONCE);
        let mut num_left = rows.len() * row_bytes;
        let mut bytes = vec![0_u8; rows_at_once.saturating_mul(row_bytes).min(num_left)];
        let place = |row: usize| SeekFrom::Start(*start + (row * row_bytes) as u64);
        source.seek(place(rows.start)).map_err(io)?;
        let mut row = 0;
        while num_left > 0 {
            let bytes = &mut bytes[..num_left.min(rows_at_once.saturating_mul(row_bytes))];
            match self.swap {
                None => source.read_exact(bytes).map_err(io)?,
                Some(swap) => {
                    for (nth, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                        let stored = swap.stored(rows.start + row + nth);
                        source.seek(place(stored)).map_err(io)?;
                        source.read_exact(bytes).map_err(io)?;
                    }
                }
            }
            each(row, StoredRows { format, bytes });
            row += rows_at_once;
            num_left -= bytes.len();
        }
        Ok(())
    }

    /// Reads a list of integers of 32 or 64 bits, or of booleans as 0 and 1.
    pub(super) fn read_ids(&self, file: &File, path: &Path, name: &str) -> Result<Vec<i64>> {
        let io = |e| ModelError::io("read", path, e);
        let size = match self.format {
            StoredFormat::Plain(Dtype::I64) => size_of::<i64>(),
            StoredFormat::Plain(Dtype::I32) => size_of::<i32>(),
            StoredFormat::Plain(Dtype::BOOL) => 1,
            other => {
                let problem = format!(
                    "tensor `{name}` is stored as {other}, expected integers of 32 or 64 bits"
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

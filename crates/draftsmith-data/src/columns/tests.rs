//! Helpers for the tests of both tables: noise, tables to break, and damaged files.

use std::fs::{self, File};
use std::path::Path;

use arrow_array::{Array, ArrayRef, ListArray, RecordBatch};
use arrow_buffer::OffsetBuffer;
use parquet::arrow::ArrowWriter;

use super::*;
use crate::error::Result;

/// A small random number generator (SplitMix64) with a fixed seed.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In (0, 1].
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// A token of a 4,096 vocabulary; small ids are more frequent, as in trained BPE.
    pub(crate) fn id(&mut self) -> u32 {
        (4096.0 * self.unit().powf(1.7)).ceil() as u32 - 1
    }

    /// A log-probability with a spread like that of a language model.
    pub(crate) fn log_prob(&mut self) -> f64 {
        self.unit().powi(2).ln() * self.unit()
    }
}

/// A table whose columns a test changes before it is written.
pub(crate) struct Table<R: 'static> {
    columns: &'static [Column<R>],
    arrays: Vec<(Field, ArrayRef)>,
}

impl<R> Table<R> {
    pub(crate) fn of(columns: &'static [Column<R>], rows: &[R]) -> Self {
        let schema = arrow_schema(columns);
        let fields = schema.fields().iter().map(|field| field.as_ref().clone());
        let arrays = fields.zip(columns.iter().map(|column| to_array(rows, column).unwrap()));
        Self { columns, arrays: arrays.collect() }
    }

    pub(crate) fn set(&mut self, column: &str, array: ArrayRef) {
        let (field, old) =
            self.arrays.iter_mut().find(|(field, _)| field.name() == column).unwrap();
        *field = Field::new(column, array.data_type().clone(), true);
        *old = array;
    }

    pub(crate) fn remove(&mut self, column: &str) {
        self.arrays.retain(|(field, _)| field.name() != column);
    }

    /// Reverses the columns and adds an unknown one, as other tools may.
    pub(crate) fn reorder(&mut self) {
        self.arrays.reverse();
        let array = self.arrays[0].1.clone();
        self.arrays.push((Field::new("new", array.data_type().clone(), true), array));
    }

    pub(crate) fn write(self, path: &Path, entries: Vec<(String, String)>) {
        let properties = writer_properties(self.columns, entries);
        let (fields, arrays): (Vec<_>, Vec<_>) = self.arrays.into_iter().unzip();
        let schema = Arc::new(Schema::new(fields));
        let batch = RecordBatch::try_new(schema.clone(), arrays).unwrap();
        let mut writer =
            ArrowWriter::try_new(File::create(path).unwrap(), schema, Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    }
}

/// A list column with one row, whose elements are `element`.
pub(crate) fn list(element: &Arc<Field>, values: ArrayRef) -> ArrayRef {
    let offsets = OffsetBuffer::from_lengths([values.len()]);
    Arc::new(ListArray::new(element.clone(), offsets, values, None))
}

/// A list column with one row, which is null.
pub(crate) fn null_list(element: DataType) -> ArrayRef {
    let element = Arc::new(Field::new("element", element, false));
    Arc::new(ListArray::new_null(element, 1))
}

/// A list column with one row, whose elements are nullable and have another name.
pub(crate) fn nullable(values: ArrayRef) -> ArrayRef {
    list(&Arc::new(Field::new("item", values.data_type().clone(), true)), values)
}

/// Checks that a file that is truncated, or that lacks bytes in its middle, is an error.
pub(crate) fn check_cut_files<T: std::fmt::Debug>(path: &Path, read: impl Fn(&Path) -> Result<T>) {
    let bytes = fs::read(path).unwrap();
    for end in (0..bytes.len()).step_by(7).chain(bytes.len() - 20..bytes.len()) {
        fs::write(path, &bytes[..end]).unwrap();
        let error = read(path).unwrap_err().to_string();
        let expected = format!("`{}` is not a whole Parquet file: ", path.display());
        assert!(error.starts_with(&expected), "{end}: {error}");
        assert!(error.ends_with("; build or fetch it again"), "{end}: {error}");
    }
    // Cut in the middle, with the footer whole.
    for cut in [1, 100, 1000] {
        let holed = [&bytes[..50], &bytes[50 + cut..]].concat();
        fs::write(path, holed).unwrap();
        read(path).unwrap_err();
    }
    fs::write(path, [&bytes[..bytes.len() - 4], b"PARX"].concat()).unwrap();
    read(path).unwrap_err();
}

/// Changes each byte of a file, then several at a time. The result is an error that names the file
/// or valid rows; Parquet pages have no checksum, so no more can be checked.
pub(crate) fn check_flipped_bytes<T>(
    path: &Path,
    seed: u64,
    read: impl Fn(&Path) -> Result<T>,
    check: impl Fn(T),
) {
    let bytes = fs::read(path).unwrap();
    let mut noise = Noise(seed);
    let mut num_count_errors = 0;
    // Also flip the second bit of each footer byte, which changes the number of rows.
    let footer = bytes.len().saturating_sub(4096)..bytes.len();
    let any_bit: Vec<(usize, u8)> =
        (0..bytes.len()).map(|at| (at, 1 << (noise.next() % 8))).collect();
    let flips: Vec<(usize, u8)> = footer.map(|at| (at, 2)).chain(any_bit).collect();
    for round in 0..flips.len() + 3000 {
        let mut broken = bytes.clone();
        if let Some((at, bit)) = flips.get(round) {
            broken[*at] ^= bit;
        } else {
            for _ in 0..1 + noise.next() % 4 {
                let at = noise.next() as usize % broken.len();
                broken[at] = noise.next() as u8;
            }
        }
        fs::write(path, &broken).unwrap();
        match read(path) {
            Ok(read) => check(read),
            Err(error) => {
                let error = error.to_string();
                assert!(error.starts_with(&format!("`{}`", path.display())), "{error}");
                num_count_errors += usize::from(error.contains("its footer claims"));
            }
        }
    }
    assert!(num_count_errors > 0, "the footer's number of rows is checked");
}

#[test]
fn numbers_out_of_range_are_named() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let check = |range: ValueRange, inside: &[f64], outside: &[f64]| {
        assert_eq!(range.problem(inside), None, "{range:?}");
        for &value in outside {
            let problem = range.problem(&[inside[0], value]).unwrap();
            assert!(problem.starts_with(&format!("is {value} at 1, ")), "{problem}");
        }
    };
    check(ValueRange::LogProb, &[-0.0, 0.0, -745.0, -inf], &[f64::MIN_POSITIVE, inf, nan]);
    check(ValueRange::FiniteLogProb, &[-0.0, -745.0], &[f64::MIN_POSITIVE, inf, -inf, nan]);
    check(ValueRange::Prob, &[0.0, -0.0, 1.0], &[1.0 + f64::EPSILON, -1e-300, inf, -inf, nan]);
    check(ValueRange::Entropy, &[0.0, -0.0, 12.0], &[-1e-300, inf, -inf, nan]);
}

#[test]
fn ids_must_be_below_the_vocabulary_size() {
    assert_eq!(unknown_id(&[], 0), None);
    assert_eq!(unknown_id(&[0, 4095], 4096), None);
    let problem = unknown_id(&[0, 4096, u32::MAX], 4096).unwrap();
    assert_eq!(problem, "has token 4096 at 1, but the model that is to read it has 4096 tokens");
}

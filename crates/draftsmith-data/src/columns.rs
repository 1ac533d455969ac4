//! The types, storage and permitted values of columns in the Parquet tables that draftsmith writes.
//! `responses` and `rollouts` define which columns a table has and what they mean.
//!
//! `columns/write.rs` writes a whole table or nothing; `columns/read.rs` reads untrusted files.
//! Code that reads rows for a model passes its vocabulary size, so that tokens outside the
//! vocabulary are refused.

mod read;
mod write;

use std::fmt::Display;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

pub(crate) use read::{
    bad_provenance, check_encodings, entries, guard, not_whole, open, read_rows,
};
#[cfg(test)]
pub(crate) use write::to_array;
pub(crate) use write::write_rows;

/// The zstd level. A table is small and written once. A high level makes it 5 % smaller than the
/// default level, and the time is negligible next to that of the models.
const ZSTD_LEVEL: i32 = 15;

/// A column of a table whose rows have type `R`: its name, its type, and access to its value in a
/// row. Schema, reading, writing and checks follow from this description. The macro [`column`]
/// makes a column from a field.
pub(crate) struct Column<R> {
    pub(crate) name: &'static str,
    /// The optional part of a row that the column belongs to, in words. The column is null in rows
    /// without that part. None if the column is never null.
    pub(crate) part_of: Option<&'static str>,
    /// Whether a file may lack the column, which then reads as null.
    pub(crate) may_lack: bool,
    cell: Cell<R>,
}

/// The type of a column's values, with access to the value in a row.
pub(crate) enum Cell<R> {
    /// A UTF-8 text.
    Text(ColumnPlace<R, String>),
    /// One of a fixed set of names. Setting any other name returns an error message.
    Name(fn(&R) -> &'static str, fn(&mut R, &str) -> Result<(), String>),
    /// A boolean.
    Flag(ColumnPlace<R, bool>),
    /// A `u32`.
    Number(ColumnPlace<R, u32>),
    /// A list of token ids.
    Ids(ColumnPlace<R, Vec<u32>>),
    /// A list of `f32`.
    Floats(ValueRange, ColumnPlace<R, Vec<f32>>),
    /// A list of `f64`.
    Doubles(ValueRange, ColumnPlace<R, Vec<f64>>),
}

/// Access to a value in a row.
pub(crate) struct ColumnPlace<R, T> {
    /// The function that returns the value; None if the optional part that holds it is absent.
    pub(crate) get: fn(&R) -> Option<&T>,
    /// The function that returns the slot for the value. It creates the optional part that holds
    /// the value if this is absent.
    pub(crate) slot: fn(&mut R) -> &mut T,
}

/// A field of type `T` or `Option<T>`, accessed in the same way.
pub(crate) trait Held<T> {
    fn held(&self) -> Option<&T>;
    fn slot(&mut self) -> &mut T;
}

impl<T> Held<T> for T {
    fn held(&self) -> Option<&T> {
        Some(self)
    }

    fn slot(&mut self) -> &mut T {
        self
    }
}

impl<T: Default> Held<T> for Option<T> {
    fn held(&self) -> Option<&T> {
        self.as_ref()
    }

    fn slot(&mut self) -> &mut T {
        self.get_or_insert_default()
    }
}

/// Makes the column of a field, as in `column!(Ids, prompt_ids)` or `column!(Floats(Prob),
/// draft?.overlap)`.
macro_rules! column {
    (@ $cell:ident $(($range:ident))?, $field:ident, $get:expr, $slot:expr) => {
        Column::new(
            stringify!($field),
            Cell::$cell($(ValueRange::$range,)? ColumnPlace { get: $get, slot: $slot }),
        )
    };
    ($cell:ident $(($range:ident))?, $field:ident) => {
        column!(@ $cell $(($range))?, $field, |row| Held::held(&row.$field), |row| {
            Held::slot(&mut row.$field)
        })
    };
    ($cell:ident $(($range:ident))?, $part:ident.$field:ident) => {
        column!(@ $cell $(($range))?, $field, |row| Held::held(&row.$part.$field), |row| {
            Held::slot(&mut row.$part.$field)
        })
    };
    ($cell:ident $(($range:ident))?, $part:ident?.$field:ident) => {
        column!(@ $cell $(($range))?, $field, |row| Held::held(&row.$part.as_ref()?.$field), |row| {
            Held::slot(&mut row.$part.get_or_insert_default().$field)
        })
    };
}

impl<R> Column<R> {
    /// Creates a column that is never null.
    pub(crate) const fn new(name: &'static str, cell: Cell<R>) -> Self {
        Self { name, part_of: None, may_lack: false, cell }
    }

    /// Turns `column` into one that is null in rows without the optional part `owner`.
    pub(crate) const fn part_of(owner: &'static str, column: Self) -> Self {
        Self { part_of: Some(owner), ..column }
    }

    /// Turns `column` into one that a file may lack, and that is null in rows without `owner`.
    pub(crate) const fn optional(owner: &'static str, column: Self) -> Self {
        Self { part_of: Some(owner), may_lack: true, ..column }
    }

    /// Returns the Arrow type and its name in words. List elements are never null.
    fn data_type(&self) -> (DataType, &'static str) {
        let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
        match self.cell {
            Cell::Text(_) | Cell::Name(..) => (DataType::Utf8, "text (utf8)"),
            Cell::Flag(_) => (DataType::Boolean, "true or false (bool)"),
            Cell::Number(_) => (DataType::UInt32, "a number (u32)"),
            Cell::Ids(_) => (list(DataType::UInt32), "a list of u32"),
            Cell::Floats(..) => (list(DataType::Float32), "a list of f32"),
            Cell::Doubles(..) => (list(DataType::Float64), "a list of f64"),
        }
    }

    /// Returns whether `found` is this column's type. Element names and nullability may differ,
    /// because other tools rewrite them.
    fn accepts(&self, found: &DataType) -> bool {
        match (self.data_type().0, found) {
            (DataType::List(expected), DataType::List(found)) => {
                expected.data_type() == found.data_type()
            }
            (expected, found) => expected == *found,
        }
    }

    /// Returns the Parquet path of the column's numbers; `None` if the column holds no numbers.
    fn numbers_path(&self) -> Option<ColumnPath> {
        let parts: &[&str] = match self.cell {
            Cell::Text(_) | Cell::Name(..) | Cell::Flag(_) => return None,
            Cell::Number(_) => &[self.name],
            Cell::Ids(_) | Cell::Floats(..) | Cell::Doubles(..) => &[self.name, "list", "element"],
        };
        Some(ColumnPath::new(parts.iter().map(|&part| part.to_owned()).collect()))
    }

    /// Returns the row's token ids; `None` if they are null or the column holds no ids.
    pub(crate) fn ids<'r>(&self, row: &'r R) -> Option<&'r Vec<u32>> {
        match &self.cell {
            Cell::Ids(place) => (place.get)(row),
            _ => None,
        }
    }

    /// Returns the length of the row's list; `None` if it is null or the column holds no lists.
    pub(crate) fn list_len(&self, row: &R) -> Option<usize> {
        match &self.cell {
            Cell::Ids(place) => (place.get)(row).map(Vec::len),
            Cell::Floats(_, place) => (place.get)(row).map(Vec::len),
            Cell::Doubles(_, place) => (place.get)(row).map(Vec::len),
            Cell::Text(_) | Cell::Name(..) | Cell::Flag(_) | Cell::Number(_) => None,
        }
    }

    /// Describes a list whose length differs from that of the list `of`; `None` for the prompt.
    pub(crate) fn length_problem(&self, row: &R, (of, expected): (&str, usize)) -> Option<String> {
        let len = self.list_len(row).filter(|_| self.name != "prompt_ids")?;
        (len != expected).then(|| format!("has {len} values, `{of}` has {expected}"))
    }

    /// Describes the first number out of range among the first `num` numbers of the row's list.
    /// None if all are in range.
    pub(crate) fn problem(&self, row: &R, num: usize) -> Option<String> {
        match &self.cell {
            Cell::Floats(range, place) => range.problem(&(place.get)(row)?[..num]),
            Cell::Doubles(range, place) => range.problem(&(place.get)(row)?[..num]),
            _ => None,
        }
    }

    /// Describes the row's first token id outside the vocabulary, as [`unknown_id`] does.
    pub(crate) fn unknown_id(&self, row: &R, vocab_size: usize) -> Option<String> {
        unknown_id(self.ids(row)?, vocab_size)
    }

    /// Applies `change` to the row's values, if the column holds `f32`.
    pub(crate) fn map_floats(&self, row: &mut R, change: impl Fn(f32) -> f32) {
        let Cell::Floats(_, place) = &self.cell else { return };
        if (place.get)(row).is_some() {
            (place.slot)(row).iter_mut().for_each(|value| *value = change(*value));
        }
    }

    /// Appends the row's value to `bytes` after its length, so that no two values give equal bytes.
    pub(crate) fn push_bytes(&self, row: &R, bytes: &mut Vec<u8>) {
        let mut push = |len: usize, content: &mut dyn Iterator<Item = u8>| {
            bytes.extend((len as u64).to_le_bytes());
            bytes.extend(content);
        };
        let mut text = |text: &str| push(text.len(), &mut text.bytes());
        match &self.cell {
            Cell::Text(place) => (place.get)(row).map_or((), |it| text(it)),
            Cell::Name(get, _) => text(get(row)),
            Cell::Ids(place) => {
                let Some(ids) = (place.get)(row) else { return };
                push(ids.len(), &mut ids.iter().flat_map(|id| id.to_le_bytes()));
            }
            Cell::Floats(_, place) => {
                let Some(all) = (place.get)(row) else { return };
                push(all.len(), &mut all.iter().flat_map(|it| it.to_bits().to_le_bytes()));
            }
            Cell::Flag(_) | Cell::Number(_) | Cell::Doubles(..) => {
                unreachable!("only responses are hashed")
            }
        }
    }
}

/// Checks that no column has a problem. The error is the first one, with the column's name.
pub(crate) fn check_columns<R>(
    columns: &[Column<R>],
    problem: impl Fn(&Column<R>) -> Option<String>,
) -> Result<(), (&'static str, String)> {
    let mut problems = columns.iter().filter_map(|column| Some((column.name, problem(column)?)));
    problems.next().map_or(Ok(()), Err)
}

/// Builds the Arrow schema of a table.
fn arrow_schema<R>(columns: &[Column<R>]) -> SchemaRef {
    let fields = columns
        .iter()
        .map(|column| Field::new(column.name, column.data_type().0, column.part_of.is_some()));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Returns the settings with which a table is stored: zstd compression and no statistics. Numbers
/// are byte-stream-split without a dictionary, so that similar bytes (exponents, high bytes of ids,
/// bytes that rounding zeroed) are adjacent. `entries` become the key-value metadata.
fn writer_properties<R>(columns: &[Column<R>], entries: Vec<(String, String)>) -> WriterProperties {
    let level = ZstdLevel::try_new(ZSTD_LEVEL).expect("the level is within zstd's range");
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_key_value_metadata(Some(
            entries.into_iter().map(|(key, value)| KeyValue::new(key, value)).collect(),
        ));
    for path in columns.iter().filter_map(|column| column.numbers_path()) {
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::BYTE_STREAM_SPLIT);
    }
    properties.build()
}

/// The values that a column of numbers may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueRange {
    /// Log-probabilities: at most 0, with −∞ for impossible tokens.
    LogProb,
    /// Finite log-probabilities, of tokens that were drawn or are the most probable.
    FiniteLogProb,
    /// Probabilities and sums of them, within [0, 1].
    Prob,
    /// Entropies and cross-entropies in nats: finite and at least 0.
    Entropy,
}

impl ValueRange {
    fn contains(self, value: f64) -> bool {
        match self {
            Self::LogProb => value <= 0.0,
            Self::FiniteLogProb => value <= 0.0 && value.is_finite(),
            Self::Prob => (0.0..=1.0).contains(&value),
            Self::Entropy => value >= 0.0 && value.is_finite(),
        }
    }

    /// Describes the first of `values` that is out of range; None if all are in range.
    fn problem<T: Copy + Into<f64> + Display>(self, values: &[T]) -> Option<String> {
        let at = values.iter().position(|value| !self.contains((*value).into()))?;
        let value = values[at];
        let expected = match self {
            Self::LogProb => "at most 0",
            Self::FiniteLogProb => "at most 0 and finite",
            Self::Prob => "within [0, 1]",
            Self::Entropy => "at least 0 and finite",
        };
        Some(format!("is {value} at {at}, it must be {expected}"))
    }
}

/// Describes the first of `ids` that is outside a vocabulary of `vocab_size` tokens; None if all
/// are inside.
fn unknown_id(ids: &[u32], vocab_size: usize) -> Option<String> {
    let (at, id) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size)?;
    Some(format!(
        "has token {id} at {at}, but the model that is to read it has {vocab_size} tokens"
    ))
}

pub(crate) use column;

#[cfg(test)]
pub(crate) mod tests;

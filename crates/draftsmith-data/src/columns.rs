//! The columns of the Parquet tables that draftsmith writes: types, storage and permitted values.
//! `responses` and `rollouts` own which columns a table has and what they mean.
//!
//! `columns/write.rs` writes a whole table or nothing; `columns/read.rs` reads untrusted files. Code
//! that reads rows for a model states its vocabulary size, so that no unknown token is read as
//! another.

mod read;
mod write;

use std::fmt::Display;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

pub(crate) use read::{TableRow, bad_provenance, check_encodings, entries, guard, open, read_rows};
pub(crate) use write::{flags, lists, numbers, texts, write_rows};

/// The zstd level. A table is small and written once. High levels make it 5 % smaller than the
/// default does, and their time is negligible next to that of the models.
const ZSTD_LEVEL: i32 = 15;

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// UTF-8 text.
    Text,
    /// True or false.
    Flag,
    /// A `u32`.
    Number,
    /// A list of token ids.
    Ids,
    /// A list of `f32`.
    Floats,
    /// A list of `f64`.
    Doubles,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The owner of a nullable column, in words. The column is null where its owner is absent.
    pub(crate) part_of: Option<&'static str>,
    /// Whether a file may lack the column, which then reads as null.
    pub(crate) may_lack: bool,
}

impl Column {
    /// A column that is never null.
    pub(crate) const fn new(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, part_of: None, may_lack: false }
    }

    /// A list column that is null where `owner` is absent.
    pub(crate) const fn part_of(owner: &'static str, name: &'static str, kind: Kind) -> Self {
        Self { name, kind, part_of: Some(owner), may_lack: false }
    }

    /// A list column that is null where `owner` is absent and that a file may lack.
    pub(crate) const fn optional(owner: &'static str, name: &'static str, kind: Kind) -> Self {
        Self { name, kind, part_of: Some(owner), may_lack: true }
    }

    /// The Arrow type; list elements are never null.
    fn data_type(self) -> DataType {
        let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
        match self.kind {
            Kind::Text => DataType::Utf8,
            Kind::Flag => DataType::Boolean,
            Kind::Number => DataType::UInt32,
            Kind::Ids => list(DataType::UInt32),
            Kind::Floats => list(DataType::Float32),
            Kind::Doubles => list(DataType::Float64),
        }
    }

    /// Whether `found` is this column's type. Element names and nullability may differ, because other
    /// tools rewrite them.
    fn accepts(self, found: &DataType) -> bool {
        match (self.data_type(), found) {
            (DataType::List(expected), DataType::List(found)) => {
                expected.data_type() == found.data_type()
            }
            (expected, found) => expected == *found,
        }
    }

    /// The column's type in words.
    fn expected(self) -> &'static str {
        match self.kind {
            Kind::Text => "text (utf8)",
            Kind::Flag => "true or false (bool)",
            Kind::Number => "a number (u32)",
            Kind::Ids => "a list of u32",
            Kind::Floats => "a list of f32",
            Kind::Doubles => "a list of f64",
        }
    }

    /// The Parquet path of the column's numbers; `None` if it holds none.
    fn numbers_path(self) -> Option<ColumnPath> {
        let parts: &[&str] = match self.kind {
            Kind::Text | Kind::Flag => return None,
            Kind::Number => &[self.name],
            Kind::Ids | Kind::Floats | Kind::Doubles => &[self.name, "list", "element"],
        };
        Some(ColumnPath::new(parts.iter().map(|&part| part.to_owned()).collect()))
    }
}

/// The Arrow schema of a table.
fn arrow_schema(columns: &[Column]) -> SchemaRef {
    let fields = columns
        .iter()
        .map(|column| Field::new(column.name, column.data_type(), column.part_of.is_some()));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// How a table is stored: zstd, no statistics, numbers byte-stream-split without a dictionary, so
/// that similar bytes (exponents, high bytes of ids, bytes that rounding zeroed) are adjacent.
/// `entries` become the key-value metadata.
fn writer_properties(columns: &[Column], entries: Vec<(String, String)>) -> WriterProperties {
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
    /// Log-probabilities: at most 0; −∞ for impossible tokens.
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

    /// A description of the first of `values` that is out of range, if any is.
    pub(crate) fn problem<T: Copy + Into<f64> + Display>(self, values: &[T]) -> Option<String> {
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

/// A description of the first of `ids` that is outside a vocabulary of `vocab_size` tokens, if any
/// is.
pub(crate) fn unknown_id(ids: &[u32], vocab_size: usize) -> Option<String> {
    let (at, id) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size)?;
    Some(format!(
        "has token {id} at {at}, but the model that is to read it has {vocab_size} tokens"
    ))
}

#[cfg(test)]
pub(crate) mod tests;

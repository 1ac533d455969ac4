//! The columns of the tables that draftsmith writes as Parquet, and how they are stored. Which
//! columns a table has, and what they mean, is its owner's to say: `responses`, `rollouts`.
//!
//! `columns/write.rs` writes rows whole or not at all; `columns/read.rs` reads rows from files that
//! are not trusted.

mod read;
mod write;

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

pub(crate) use read::{TableRow, bad_provenance, check_encodings, entries, guard, open, read_rows};
pub(crate) use write::{flags, lists, numbers, texts, write_rows};

/// The zstd level. A table is small and written once: the optimal parser of the high levels takes
/// 5 % off the default level's size, and still costs nothing beside the models that made the rows.
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
    /// What the column is of, in words, where that may be absent: the column is then null.
    pub(crate) part_of: Option<&'static str>,
    /// Whether a file may lack it, as those of builds that did not know it: it is then null.
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

    /// A list column that is null where `owner` is absent, and that a file may lack.
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

    /// Whether `found` is this column's type, whatever its elements are called and whether or not
    /// they may be null: other tools rewrite both.
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

    /// Where the column's numbers are in Parquet's tree, if it holds numbers.
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

/// How a table is stored: zstd; numbers byte-stream-split without dictionary, so that the bytes
/// which are alike (exponents, high bytes of ids, what rounding zeroed) lie together; no
/// statistics, which say nothing about noise. `entries` become the key-value metadata.
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

#[cfg(test)]
pub(crate) mod tests;

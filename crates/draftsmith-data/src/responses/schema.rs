//! The columns of a response shard, and how they are stored.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

use crate::provenance::Provenance;

/// The zstd level. A shard is small and written once: the optimal parser of the high levels takes
/// 5 % off the default level's size, and still costs nothing beside the models that made the rows.
const ZSTD_LEVEL: i32 = 15;

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// UTF-8 text, never null.
    Text,
    /// A list of token ids.
    Ids,
    /// A list of `f32`.
    Floats,
}

/// A column of the schema.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Whether it is of the draft, and so null where no draft was given.
    pub(super) of_draft: bool,
}

const fn column(name: &'static str, kind: Kind) -> Column {
    Column { name, kind, of_draft: false }
}

const fn of_draft(name: &'static str, kind: Kind) -> Column {
    Column { name, kind, of_draft: true }
}

/// All columns, in the order of the file.
pub(super) const COLUMNS: [Column; 16] = [
    column("id", Kind::Text),
    column("source", Kind::Text),
    column("prompt_ids", Kind::Ids),
    column("response_ids", Kind::Ids),
    column("response_target_log_prob", Kind::Floats),
    of_draft("response_draft_log_prob", Kind::Floats),
    of_draft("draft_ids", Kind::Ids),
    of_draft("draft_log_prob", Kind::Floats),
    of_draft("target_log_prob", Kind::Floats),
    of_draft("overlap", Kind::Floats),
    of_draft("draft_entropy", Kind::Floats),
    of_draft("draft_target_cross_entropy", Kind::Floats),
    of_draft("draft_top_ids", Kind::Ids),
    of_draft("target_top_ids", Kind::Ids),
    of_draft("draft_top_log_prob", Kind::Floats),
    column("finish_reason", Kind::Text),
];

impl Column {
    /// The Arrow type; list elements are never null.
    pub(super) fn data_type(self) -> DataType {
        let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
        match self.kind {
            Kind::Text => DataType::Utf8,
            Kind::Ids => list(DataType::UInt32),
            Kind::Floats => list(DataType::Float32),
        }
    }

    /// Whether `found` is this column's type, whatever its elements are called and whether or not
    /// they may be null: other tools rewrite both.
    pub(super) fn accepts(self, found: &DataType) -> bool {
        match (self.data_type(), found) {
            (DataType::List(expected), DataType::List(found)) => {
                expected.data_type() == found.data_type()
            }
            (expected, found) => expected == *found,
        }
    }

    /// The column's type in words.
    pub(super) fn expected(self) -> &'static str {
        match self.kind {
            Kind::Text => "text (utf8)",
            Kind::Ids => "a list of u32",
            Kind::Floats => "a list of f32",
        }
    }
}

/// The Arrow schema of a shard.
pub(super) fn arrow_schema() -> SchemaRef {
    let fields = COLUMNS.map(|column| Field::new(column.name, column.data_type(), column.of_draft));
    Arc::new(Schema::new(fields.to_vec()))
}

/// How a shard is stored: zstd; token ids and floats byte-stream-split without dictionary, so that
/// the bytes which are alike (exponents, high bytes of ids, what rounding zeroed) lie together; no
/// statistics, which say nothing about noise.
pub(super) fn writer_properties(provenance: &Provenance) -> WriterProperties {
    let entries = provenance.to_entries();
    let level = ZstdLevel::try_new(ZSTD_LEVEL).expect("the level is within zstd's range");
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_key_value_metadata(Some(
            entries.into_iter().map(|(key, value)| KeyValue::new(key, value)).collect(),
        ));
    for column in COLUMNS.iter().filter(|column| column.kind != Kind::Text) {
        let path =
            ColumnPath::new(vec![column.name.to_owned(), "list".to_owned(), "element".to_owned()]);
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::BYTE_STREAM_SPLIT);
    }
    properties.build()
}

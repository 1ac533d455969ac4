//! The columns of a response shard.

use crate::columns::{Column, Kind};

const fn of_draft(name: &'static str, kind: Kind) -> Column {
    Column::part_of("the draft", name, kind)
}

/// All columns, in the order of the file.
pub(super) const COLUMNS: [Column; 16] = [
    Column::new("id", Kind::Text),
    Column::new("source", Kind::Text),
    Column::new("prompt_ids", Kind::Ids),
    Column::new("response_ids", Kind::Ids),
    Column::new("response_target_log_prob", Kind::Floats),
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
    Column::new("finish_reason", Kind::Text),
];

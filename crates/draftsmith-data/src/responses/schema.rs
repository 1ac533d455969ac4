//! The columns of a response shard.

use crate::columns::{Column, Kind};

/// What the draft's columns are part of.
pub(super) const DRAFT: &str = "the draft";

const fn of_draft(name: &'static str, kind: Kind) -> Column {
    Column::part_of(DRAFT, name, kind)
}

/// All columns, in the order of the file.
pub(super) const COLUMNS: [Column; 17] = [
    Column::new("id", Kind::Text),
    Column::new("source", Kind::Text),
    Column::new("prompt_ids", Kind::Ids),
    Column::new("response_ids", Kind::Ids),
    Column::new("response_target_log_prob", Kind::Floats),
    Column::optional("a server", "target_outside_mass", Kind::Floats),
    of_draft("response_draft_log_prob", Kind::Floats),
    of_draft("draft_ids", Kind::Ids),
    of_draft("draft_log_prob", Kind::Floats),
    of_draft("target_log_prob", Kind::Floats),
    of_draft("overlap", Kind::Floats),
    of_draft("draft_entropy", Kind::Floats),
    Column::optional("the target's weights", "draft_target_cross_entropy", Kind::Floats),
    of_draft("draft_top_ids", Kind::Ids),
    of_draft("target_top_ids", Kind::Ids),
    of_draft("draft_top_log_prob", Kind::Floats),
    Column::new("finish_reason", Kind::Text),
];

//! The columns of a rollouts file.

use crate::columns::{Column, Kind};

/// All columns, in the order of the file.
pub(super) const COLUMNS: [Column; 14] = [
    Column::new("id", Kind::Text),
    Column::new("prompt_ids", Kind::Ids),
    Column::new("start", Kind::Number),
    Column::new("is_response", Kind::Flag),
    Column::new("limit", Kind::Number),
    Column::new("candidate_ids", Kind::Ids),
    Column::new("candidate_prob", Kind::Doubles),
    Column::new("confidence", Kind::Doubles),
    Column::new("confidence_of_ten", Kind::Doubles),
    Column::new("draft_entropy", Kind::Doubles),
    Column::part_of("the acceptance head", "predicted_acceptance_prob", Kind::Doubles),
    Column::new("draft_log_prob", Kind::Doubles),
    Column::new("target_log_prob", Kind::Doubles),
    Column::optional("a greedy response", "draft_rank", Kind::Ids),
];

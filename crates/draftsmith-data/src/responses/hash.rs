//! The hash of rows, which identifies a data set. It depends on the rows and their order, not on
//! how they are divided into shards or encoded.

use draftsmith_files::hex;
use sha2::{Digest, Sha256};

use super::row::{COLUMNS, DRAFT, ResponseRow, SERVER, WEIGHTS};

/// Computes the SHA-256 of all columns of all rows, in order, as hex.
pub(super) fn hash_rows(rows: &[ResponseRow]) -> String {
    let mut hasher = Sha256::new();
    let mut bytes = Vec::new();
    for row in rows {
        bytes.clear();
        push_row(&mut bytes, row);
        hasher.update(&bytes);
    }
    hex(&hasher.finalize())
}

/// Appends the columns, each preceded by its length, so that no two rows give the same bytes.
/// Columns are grouped by the optional part that they belong to, and in each group by type: texts,
/// ids, floats.
fn push_row(bytes: &mut Vec<u8>, row: &ResponseRow) {
    let push = |bytes: &mut Vec<u8>, owner: Option<&str>| {
        let mut columns: Vec<_> = COLUMNS.iter().filter(|column| column.part_of == owner).collect();
        columns.sort_by_key(|column| (column.list_len(row).is_some(), column.ids(row).is_none()));
        columns.iter().for_each(|column| column.push_bytes(row, bytes));
    };
    push(bytes, None);
    if row.target_outside_mass.is_some() {
        bytes.push(2);
        push(bytes, Some(SERVER));
    }
    bytes.push(u8::from(row.draft.is_some()));
    let Some(draft) = &row.draft else { return };
    push(bytes, Some(DRAFT));
    bytes.push(u8::from(draft.draft_target_cross_entropy.is_some()));
    push(bytes, Some(WEIGHTS));
}

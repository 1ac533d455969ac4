//! The hash of rows, which identifies a data set. It depends on the rows and their order, not on how
//! they are divided into shards or encoded.

use draftsmith_files::hex;
use sha2::{Digest, Sha256};

use super::row::ResponseRow;

/// The SHA-256 of all columns of all rows, in order, as hex.
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

/// Appends the columns, each after its length, so that no two rows give the same bytes.
fn push_row(bytes: &mut Vec<u8>, row: &ResponseRow) {
    for text in [&row.id, &row.source, row.finish_reason.as_str()] {
        push_len(bytes, text.len());
        bytes.extend(text.as_bytes());
    }
    push_ids(bytes, &row.prompt_ids);
    push_ids(bytes, &row.response_ids);
    push_floats(bytes, &row.response_target_log_prob);
    if let Some(masses) = &row.target_outside_mass {
        bytes.push(2);
        push_floats(bytes, masses);
    }
    bytes.push(u8::from(row.draft.is_some()));
    let Some(draft) = &row.draft else { return };
    for (_, ids) in draft.ids() {
        push_ids(bytes, ids);
    }
    for (.., floats) in draft.floats() {
        push_floats(bytes, floats);
    }
    bytes.push(u8::from(draft.draft_target_cross_entropy.is_some()));
    if let Some(floats) = &draft.draft_target_cross_entropy {
        push_floats(bytes, floats);
    }
}

fn push_ids(bytes: &mut Vec<u8>, ids: &[u32]) {
    push_len(bytes, ids.len());
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
}

fn push_floats(bytes: &mut Vec<u8>, floats: &[f32]) {
    push_len(bytes, floats.len());
    bytes.extend(floats.iter().flat_map(|value| value.to_bits().to_le_bytes()));
}

fn push_len(bytes: &mut Vec<u8>, len: usize) {
    bytes.extend((len as u64).to_le_bytes());
}

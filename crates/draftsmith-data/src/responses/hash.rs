//! The hash of rows: what tells one data set from another, however the rows are stored.

use draftsmith_files::hex;
use sha2::{Digest, Sha256};

use super::row::{DraftColumns, ResponseRow};

/// The SHA-256 of rows, all columns and their order included, as hex.
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

/// The columns one after another, each behind its length, so that none runs into the next.
fn push_row(bytes: &mut Vec<u8>, row: &ResponseRow) {
    // Columns are named, so that one that is added is not forgotten here.
    let ResponseRow {
        id,
        source,
        prompt_ids,
        response_ids,
        response_target_log_prob,
        target_outside_mass,
        draft,
        finish_reason,
    } = row;
    push_text(bytes, id);
    push_text(bytes, source);
    push_text(bytes, finish_reason.as_str());
    push_ids(bytes, prompt_ids);
    push_ids(bytes, response_ids);
    push_floats(bytes, response_target_log_prob);
    if let Some(masses) = target_outside_mass {
        bytes.push(2);
        push_floats(bytes, masses);
    }
    bytes.push(u8::from(draft.is_some()));
    let Some(draft) = draft else { return };
    let DraftColumns {
        response_draft_log_prob,
        draft_ids,
        draft_log_prob,
        target_log_prob,
        overlap,
        draft_entropy,
        draft_target_cross_entropy,
        draft_top_ids,
        target_top_ids,
        draft_top_log_prob,
    } = draft;
    for ids in [draft_ids, draft_top_ids, target_top_ids] {
        push_ids(bytes, ids);
    }
    for floats in [
        response_draft_log_prob,
        draft_log_prob,
        target_log_prob,
        overlap,
        draft_entropy,
        draft_top_log_prob,
    ] {
        push_floats(bytes, floats);
    }
    bytes.push(u8::from(draft_target_cross_entropy.is_some()));
    if let Some(floats) = draft_target_cross_entropy {
        push_floats(bytes, floats);
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    push_len(bytes, text.len());
    bytes.extend(text.as_bytes());
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

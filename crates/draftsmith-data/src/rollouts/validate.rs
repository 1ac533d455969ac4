//! The rules that rows keep together: those of one id, and those of a file with its provenance.

use std::collections::HashSet;

use super::provenance::{RolloutDecoding, RolloutProvenance};
use super::row::{DRAFT_RANK, RolloutRow, TARGET_LOG_PROB};
use crate::error::DataError;

/// Checks every row ([`RolloutRow::validate`]), and the rules that the rows of one id keep
/// together.
///
/// They follow one another: first the response's, then the others by ascending `start`, at most one
/// a position, and none begins with the response's token, whose rank is 0 where there is none.
///
/// # Errors
/// [`DataError::Rollout`] with the first row and column that break a rule.
pub fn validate_rollouts(rows: &[RolloutRow]) -> Result<(), DataError> {
    let mut ids = HashSet::new();
    for rows in rows.chunk_by(|one, next| one.id == next.id) {
        rows.iter().try_for_each(RolloutRow::validate)?;
        if !ids.insert(rows[0].id.as_str()) {
            let problem = "comes again after rows of other ids: rows of one id follow one another";
            return Err(rows[0].error("id", problem));
        }
        validate_id(&rows[0], &rows[1..])?;
    }
    Ok(())
}

/// Checks rows, and that they fit their provenance: predictions are there iff there was a head; no
/// row continues after an end token; and a row ends before its limit (a rollout also at
/// `max_length`) only with one, or where there were stop strings, so that a replay of up to
/// `max_length` candidates runs out of them where a response ends alone.
pub(super) fn validate_file(
    rows: &[RolloutRow],
    provenance: &RolloutProvenance,
) -> Result<(), DataError> {
    validate_rollouts(rows)?;
    rows.iter().try_for_each(|row| validate_in_file(row, provenance))
}

fn validate_in_file(row: &RolloutRow, provenance: &RolloutProvenance) -> Result<(), DataError> {
    let column = "predicted_acceptance_prob";
    match (&row.candidates.predicted_acceptance_prob, &provenance.head) {
        (None, Some(_)) => {
            return Err(row.error(column, "is null, but the provenance names a `head`"));
        }
        (Some(_), None) => {
            return Err(row.error(column, "is not null, but the provenance names no `head`"));
        }
        (None, None) | (Some(_), Some(_)) => (),
    }
    let is_sampled = provenance.decoding() == RolloutDecoding::Sampled;
    // What a served target would say behind a candidate that it rejected nobody knows.
    let is_served = provenance.responses.served_model.is_some();
    if !is_served && !row.is_judged() {
        let needed_by = if provenance.head.is_some() || provenance.data.is_some() {
            Some("a head is judged by it or trained on it")
        } else if row.is_response && is_sampled {
            Some("a look-up along a sampled response stands by it")
        } else {
            None
        };
        if let Some(why) = needed_by {
            return Err(row.error(TARGET_LOG_PROB, format!("is NaN, but {why}")));
        }
    }
    if is_sampled && row.candidates.draft_rank.is_some() {
        return Err(row.error(DRAFT_RANK, "is not null, but only greedy responses have ranks"));
    }
    let ids = &row.candidates.candidate_ids;
    let max_length = provenance.max_length as usize;
    let most = if row.is_response {
        row.limit as usize
    } else {
        // Valid rows start before their limit.
        max_length.min((row.limit - row.start) as usize - 1)
    };
    let problem = if ids.len() > most {
        format!("has {} tokens, the provenance's `max_length` is {max_length}", ids.len())
    } else {
        let end = ids.iter().position(|id| provenance.responses.eos_token_ids.contains(id));
        match end {
            Some(end) if end + 1 < ids.len() => format!("continues after the end token at {end}"),
            None if ids.len() < most && provenance.responses.stop_strings.is_empty() => {
                format!("has {} tokens and no end token, there is room for {most}", ids.len())
            }
            Some(_) | None => return Ok(()),
        }
    };
    Err(row.error("candidate_ids", problem))
}

/// Checks the rows of one id, each of which keeps its own rules.
fn validate_id(first: &RolloutRow, rollouts: &[RolloutRow]) -> Result<(), DataError> {
    if !first.is_response {
        let problem = "is false, the first row of an id is the response's";
        return Err(first.error("is_response", problem));
    }
    let response = &first.candidates.candidate_ids;
    // The positions before it have been seen.
    let mut next = 0;
    for rollout in rollouts {
        let start = rollout.start as usize;
        validate_beside(first, rollout, next)?;
        if rollout.candidates.candidate_ids[0] == response[start] {
            let problem = format!(
                "begins with {}, which is the response's token: a rollout begins with another",
                response[start]
            );
            return Err(rollout.error("candidate_ids", problem));
        }
        next = start + 1;
    }
    validate_ranks(first, rollouts)
}

/// Checks that ranks say of the same positions as rollouts that the drafter has the response's token:
/// of all but the last that the limit allows, where nothing is drafted.
fn validate_ranks(first: &RolloutRow, rollouts: &[RolloutRow]) -> Result<(), DataError> {
    let mut starts = rollouts.iter().map(|rollout| rollout.start as usize).peekable();
    let ranks = first.candidates.draft_rank.iter().flatten().enumerate();
    for (at, rank) in ranks.take(first.limit as usize - 1) {
        let problem = match (rank, starts.next_if_eq(&at)) {
            (0, Some(_)) => format!("is 0 at {at}, where a rollout has another token"),
            (rank, None) if *rank > 0 => format!("is {rank} at {at}, where there is no rollout"),
            _ => continue,
        };
        return Err(first.error(DRAFT_RANK, problem));
    }
    Ok(())
}

/// Checks a row beside the response's row and the row before it, which starts before `next`.
fn validate_beside(first: &RolloutRow, rollout: &RolloutRow, next: usize) -> Result<(), DataError> {
    let num_tokens = first.candidates.candidate_ids.len();
    if rollout.is_response {
        let problem = "is true, but the id has the response's row already";
        return Err(rollout.error("is_response", problem));
    }
    if rollout.limit != first.limit {
        let problem = format!("is {}, that of the response is {}", rollout.limit, first.limit);
        return Err(rollout.error("limit", problem));
    }
    let start = rollout.start as usize;
    if start >= num_tokens {
        let problem = format!("is not a position of the response, which has {num_tokens} tokens");
        return Err(rollout.error("start", problem));
    }
    if start < next {
        let problem = "does not ascend: the row before it starts there or later";
        return Err(rollout.error("start", problem));
    }
    Ok(())
}

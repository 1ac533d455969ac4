//! Rules between the rows of one id, and between the rows of a file and its provenance.

use std::collections::HashSet;

use super::provenance::RolloutProvenance;
use super::row::{RolloutRow, TARGET_LOG_PROB};
use crate::error::Result;

/// Checks every row ([`RolloutRow::validate`]) and the rows of each id together.
///
/// Rows of one id are consecutive: first the response, then the rollouts by ascending `start`, at
/// most one per position. A rollout does not begin with the response's token, unless there is a
/// rollout at every drafted position. The rollouts are then whole rounds.
///
/// # Errors
/// If a row is invalid. The error names the first one and its column.
pub fn validate_rollouts(rows: &[RolloutRow]) -> Result<()> {
    let mut ids = HashSet::new();
    for rows in rows.chunk_by(|one, next| one.id == next.id) {
        rows.iter().try_for_each(RolloutRow::validate)?;
        if !ids.insert(rows[0].id.as_str()) {
            let problem = "comes again after rows of other ids: rows of one id must be consecutive";
            return Err(rows[0].error("id", problem));
        }
        validate_id(&rows[0], &rows[1..])?;
    }
    Ok(())
}

/// Checks rows by themselves and against their provenance. Predictions must exist if and only if
/// there was a head. No row may continue after an end token. Without stop strings, a row that ends
/// before its limit must end with an end token, where the limit of a rollout is also `max_length`.
/// So a replay of up to `max_length` candidates runs out of candidates only where the response
/// ends.
pub(super) fn validate_file(rows: &[RolloutRow], provenance: &RolloutProvenance) -> Result<()> {
    validate_rollouts(rows)?;
    rows.iter().try_for_each(|row| validate_in_file(row, provenance))
}

fn validate_in_file(row: &RolloutRow, provenance: &RolloutProvenance) -> Result<()> {
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
    let is_sampled = !provenance.is_greedy();
    // After a rejected candidate, the probabilities of a served target are unknown.
    let is_served = provenance.responses.served_model.is_some();
    if !is_served && !row.is_judged() {
        let needed_by = if provenance.head.is_some() || provenance.data.is_some() {
            Some("a head is evaluated or trained with it")
        } else if row.is_response && is_sampled {
            Some("look-ups along a sampled response need it")
        } else {
            None
        };
        if let Some(why) = needed_by {
            return Err(row.error(TARGET_LOG_PROB, format!("is NaN, but {why}")));
        }
    }
    let ids = &row.candidates.candidate_ids;
    let max_length = provenance.max_length as usize;
    let max_candidates = if row.is_response {
        row.limit as usize
    } else {
        // Valid rows start before their limit.
        max_length.min((row.limit - row.start) as usize - 1)
    };
    let problem = if ids.len() > max_candidates {
        format!("has {} tokens, the provenance's `max_length` is {max_length}", ids.len())
    } else {
        let end = ids.iter().position(|id| provenance.responses.eos_token_ids.contains(id));
        match end {
            Some(end) if end + 1 < ids.len() => format!("continues after the end token at {end}"),
            None if ids.len() < max_candidates && provenance.responses.stop_strings.is_empty() => {
                format!(
                    "has {} tokens and no end token, there is room for {max_candidates}",
                    ids.len()
                )
            }
            Some(_) | None => return Ok(()),
        }
    };
    Err(row.error("candidate_ids", problem))
}

/// Checks the rows of one id against each other. Each row is valid by itself.
fn validate_id(first: &RolloutRow, rollouts: &[RolloutRow]) -> Result<()> {
    if !first.is_response {
        let problem = "is false, the first row of an id is the response's";
        return Err(first.error("is_response", problem));
    }
    let response = &first.candidates.candidate_ids;
    let num_drafted = response.len().min(first.limit as usize - 1);
    let are_rounds = rollouts.len() == num_drafted;
    // The first position at which the next rollout may start.
    let mut next = 0;
    for rollout in rollouts {
        let start = rollout.start as usize;
        validate_rollout(first, rollout, next)?;
        if !are_rounds && rollout.candidates.candidate_ids[0] == response[start] {
            let problem = format!(
                "begins with {}, which is the response's token: a rollout must begin with another, or there must \
                 be one at each position",
                response[start]
            );
            return Err(rollout.error("candidate_ids", problem));
        }
        next = start + 1;
    }
    Ok(())
}

/// Checks a rollout against its response, `first`. Its `start` must be at least `next`, the
/// position after the previous rollout's start.
fn validate_rollout(first: &RolloutRow, rollout: &RolloutRow, next: usize) -> Result<()> {
    let num_tokens = first.candidates.candidate_ids.len();
    if rollout.is_response {
        let problem = "is true, but the id already has a response row";
        return Err(rollout.error("is_response", problem));
    }
    if rollout.limit != first.limit {
        let problem = format!("is {}, but the response's is {}", rollout.limit, first.limit);
        return Err(rollout.error("limit", problem));
    }
    let start = rollout.start as usize;
    if start >= num_tokens {
        let problem = format!("is not a position of the response, which has {num_tokens} tokens");
        return Err(rollout.error("start", problem));
    }
    if start < next {
        let problem = "does not ascend: the row before starts there or later";
        return Err(rollout.error("start", problem));
    }
    Ok(())
}

//! Violates each rule of rows in turn.

use super::*;

fn predicted(row: &mut RolloutRow) -> &mut Vec<f64> {
    row.candidates.predicted_acceptance_prob.as_mut().unwrap()
}

#[test]
fn the_column_of_an_invalid_row_is_named() {
    validate_rollouts(&small_rows()).unwrap();
    let check = |break_it: fn(&mut [RolloutRow]), at: usize, expected: &str| {
        let mut rows = small_rows();
        break_it(&mut rows);
        let error = rows[at].validate().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(validate_rollouts(&rows).unwrap_err().to_string(), error);
    };
    let row = "rollout `set#0` at 0: column";
    let one_short = |column: &str| format!("{row} `{column}` has 2 values, `candidate_ids` has 3");
    check(|r| r[0].candidates.confidence.truncate(2), 0, &one_short("confidence"));
    check(|r| predicted(&mut r[0]).truncate(2), 0, &one_short("predicted_acceptance_prob"));
    check(|r| r[0].candidates.target_log_prob.truncate(2), 0, &one_short("target_log_prob"));
    check(
        |r| r[1].candidates.candidate_ids.push(1),
        1,
        &format!("{row} `candidate_prob` has 2 values, `candidate_ids` has 3"),
    );
    check(
        |r| r[1].candidates = RolloutCandidates::default(),
        1,
        &format!("{row} `candidate_ids` is empty, a row must have a candidate"),
    );
    check(
        |r| r[0].candidates.target_log_prob[1..].fill(f64::NAN),
        0,
        &format!("{row} `target_log_prob` is NaN at 1"),
    );
    check(
        |r| r[1].candidates.target_log_prob[0] = f64::NAN,
        1,
        &format!("{row} `target_log_prob` is NaN at 0"),
    );
    check(|r| r[0].prompt_ids.clear(), 0, &format!("{row} `prompt_ids` is empty"));
    check(|r| r[1].prompt_ids.push(1), 1, &format!("{row} `prompt_ids` is not empty"));
    check(|r| r[0].start = 1, 0, "rollout `set#0` at 1: column `start` is not 0");
    check(|r| r[0].limit = 2, 0, &format!("{row} `limit` is 2, too few for 3 tokens from 0 on"));
    check(
        |r| r[2].start = 2,
        2,
        "rollout `set#0` at 2: column `limit` is 3, too few for 1 tokens from 2 on",
    );
    check(
        |r| r[1].candidates.draft_log_prob[1] = 1e-9,
        1,
        &format!("{row} `draft_log_prob` is 0.000000001 at 1, it must be at most 0"),
    );
    check(
        |r| r[0].candidates.target_log_prob[1] = f64::NAN,
        0,
        &format!("{row} `target_log_prob` is NaN at 1"),
    );
    check(
        |r| r[1].candidates.draft_entropy[0] = f64::INFINITY,
        1,
        &format!("{row} `draft_entropy` is inf at 0, it must be at least 0 and finite"),
    );
    check(
        |r| r[1].candidates.draft_entropy[1] = -1e-9,
        1,
        &format!("{row} `draft_entropy` is -0.000000001 at 1"),
    );
    check(
        |r| r[1].candidates.target_log_prob[0] = f64::INFINITY,
        1,
        &format!("{row} `target_log_prob` is inf at 0, it must be at most 0"),
    );
    check(
        |r| predicted(&mut r[1])[0] = f64::NAN,
        1,
        &format!("{row} `predicted_acceptance_prob` is NaN at 0, it must be within [0, 1]"),
    );
    check(
        |r| predicted(&mut r[1])[1] = 2.0,
        1,
        &format!("{row} `predicted_acceptance_prob` is 2 at 1"),
    );
    check(|r| r[1].candidates.confidence[1] = -0.1, 1, &format!("{row} `confidence` is -0.1 at 1"));
    check(
        |r| r[1].candidates.candidate_prob[1] = f64::NAN,
        1,
        &format!("{row} `candidate_prob` is NaN at 1"),
    );
}

#[test]
fn unknown_tokens_are_named_with_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let rows = sample_rows(true);
    let ids = |row: &RolloutRow| [&row.prompt_ids[..], &row.candidates.candidate_ids].concat();
    let largest = rows.iter().flat_map(ids).max().unwrap();
    write_rollouts(&path, &rows, &provenance(true)).unwrap();
    let largest = largest as usize;
    assert!(all_bits(&read_rollouts(&path, Some(largest + 1)).unwrap().0) == all_bits(&rows));
    let error = read_rollouts(&path, Some(largest)).unwrap_err().to_string();
    assert!(error.starts_with(&format!("`{}`: rollout `set#", path.display())), "{error}");
    assert!(error.contains(&format!("_ids` has token {largest} at")), "{error}");
}

#[test]
fn violated_rules_between_rows_are_named() {
    let check = |break_it: fn(&mut Vec<RolloutRow>), expected: &str| {
        let mut rows = small_rows();
        break_it(&mut rows);
        let error = validate_rollouts(&rows).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    let at_0 = |rest: &str| format!("rollout `set#0` at 0: column {rest}");
    check(|r| drop(r.remove(0)), &at_0("`is_response` is false, the first row of an id"));
    check(|r| r.insert(1, r[0].clone()), &at_0("`is_response` is true, but the id already has"));
    check(|r| r.swap(0, 2), "rollout `set#0` at 1: column `is_response` is false");
    check(|r| r.swap(1, 2), &at_0("`start` does not ascend"));
    check(|r| r.push(r[1].clone()), &at_0("`start` does not ascend"));
    check(|r| r.push(r[2].clone()), "rollout `set#0` at 1: column `start` does not ascend");
    check(
        |r| {
            r.iter_mut().for_each(|row| row.limit = 5);
            r[2].start = 3;
        },
        "rollout `set#0` at 3: column `start` is not a position of the response, which has 3",
    );
    check(|r| r[2].limit = 4, "rollout `set#0` at 1: column `limit` is 4, but the response's is 3");
    check(
        |r| {
            r[2].candidates.candidate_ids[0] = 11;
            drop(r.remove(1));
        },
        "rollout `set#0` at 1: column `candidate_ids` begins with 11, which is the response's",
    );
    check(
        |r| {
            let mut other = r[0].clone();
            other.id = "set#1".into();
            let again = r.clone();
            r.push(other);
            r.extend(again);
        },
        &at_0("`id` comes again after rows of other ids"),
    );
}

#[test]
fn rounds_may_begin_with_the_responses_tokens() {
    let mut rows = small_rows();
    rows[2].candidates.candidate_ids[0] = 11;
    validate_rollouts(&rows).unwrap();
}

#[test]
fn repeated_rollouts_and_rollouts_without_a_response_are_refused() {
    let rows = sample_rows(true);
    for at in 0..rows.len() {
        let mut more = rows.clone();
        more.insert(at, rows[at].clone());
        assert!(validate_rollouts(&more).is_err(), "{at}");
        let mut fewer = rows.clone();
        fewer.remove(at);
        let is_free = !rows[at].is_response || rows.get(at + 1).is_none_or(|next| next.is_response);
        assert_eq!(validate_rollouts(&fewer).is_ok(), is_free, "{at}");
    }
}

/// Removes a row's last candidates.
fn truncate(row: &mut RolloutRow, len: usize) {
    let candidates = &mut row.candidates;
    candidates.candidate_ids.truncate(len);
    let lists = [
        &mut candidates.candidate_prob,
        &mut candidates.confidence,
        &mut candidates.confidence_of_ten,
        &mut candidates.draft_entropy,
        candidates.predicted_acceptance_prob.as_mut().unwrap(),
        &mut candidates.draft_log_prob,
        &mut candidates.target_log_prob,
    ];
    lists.into_iter().for_each(|list| list.truncate(len));
}

#[test]
fn rows_that_end_too_early_or_too_late_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let mut num_cut = 0;
    let rows = sample_rows(true);
    for at in 0..rows.len() {
        let num_candidates = rows[at].candidates.candidate_ids.len();
        if num_candidates > 1 {
            let mut shorter = rows.clone();
            truncate(&mut shorter[at], num_candidates - 1);
            // The error may also name a rollout after the new end of the response.
            write_rollouts(&path, &shorter, &provenance(true)).unwrap_err();
            num_cut += 1;
            let mut longer = rows.clone();
            longer[at].candidates.candidate_ids[0] = if rows[at].is_response { 2 } else { 7 };
            let error = write_rollouts(&path, &longer, &provenance(true)).unwrap_err().to_string();
            assert!(error.ends_with("continues after the end token at 0"), "{error}");
        }
    }
    assert!(num_cut > 10);
    let mut shorter = small_rows();
    truncate(&mut shorter[1], 1);
    let error = write_rollouts(&path, &shorter, &provenance(true)).unwrap_err().to_string();
    let expected = "has 1 tokens and no end token, there is room for 2";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn invalid_rows_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let refuse = |rows: &[RolloutRow], provenance: &RolloutProvenance, expected: &str| {
        let error = write_rollouts(&path, rows, provenance).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    let rows = small_rows();
    refuse(&rows[1..], &provenance(true), "rollout `set#0` at 0: column `is_response` is false");
    refuse(
        &rows,
        &provenance(false),
        "`predicted_acceptance_prob` is not null, but the provenance names no `head`",
    );
    let mut without = rows.clone();
    without[2].candidates.predicted_acceptance_prob = None;
    refuse(
        &without,
        &provenance(true),
        "at 1: column `predicted_acceptance_prob` is null, but the provenance names a `head`",
    );
    refuse(
        &rows,
        &RolloutProvenance { max_length: 1, ..provenance(true) },
        "column `candidate_ids` has 2 tokens, the provenance's `max_length` is 1",
    );
    refuse(
        &rows,
        &RolloutProvenance { max_length: 0, ..provenance(true) },
        "its provenance cannot be used: `max_length` is 0",
    );
    let responses = Provenance { draft: None, ..provenance_tests::provenance() };
    refuse(
        &rows,
        &RolloutProvenance { responses, ..provenance(true) },
        "rollouts-self_draft_2-validation-sampled.parquet`: its provenance cannot be used: `draft` is null",
    );
}

#[test]
fn heads_need_the_targets_probabilities() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let unjudged = |with_head| {
        let mut rows = sample_rows(with_head);
        for row in rows.iter_mut().filter(|row| !row.is_response) {
            row.candidates.target_log_prob[1..].fill(f64::NAN);
        }
        rows
    };
    let for_rules = RolloutProvenance { data: None, ..provenance(false) };
    write_rollouts(&path, &unjudged(false), &for_rules).unwrap();
    let (rows, _) = read_rollouts(&path, None).unwrap();
    let expected = unjudged(false);
    assert!(all_bits(&rows) == all_bits(&expected));
    assert!(rows.iter().any(|row| !row.is_judged()) && rows.iter().any(RolloutRow::is_judged));
    for (with_head, provenance) in [
        (true, provenance(true)),
        (false, RolloutProvenance { data: Some("cc".to_owned()), ..for_rules }),
    ] {
        let error =
            write_rollouts(&path, &unjudged(with_head), &provenance).unwrap_err().to_string();
        assert!(error.contains("`target_log_prob` is NaN, but a head"), "{error}");
    }
}

#[test]
fn only_greedy_responses_may_lack_the_targets_probabilities() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let mut rows = sample_rows(false);
    for row in &mut rows {
        row.candidates.target_log_prob.fill(f64::NAN);
    }
    let sampled = RolloutProvenance { data: None, ..provenance(false) };
    let error = write_rollouts(&path, &rows, &sampled).unwrap_err().to_string();
    assert!(error.contains("`target_log_prob` is NaN, but look-ups"), "{error}");
    let responses = Provenance { temperature: 0.0, ..sampled.responses.clone() };
    let greedy = RolloutProvenance { responses, ..sampled };
    write_rollouts(&path, &rows, &greedy).unwrap();
    assert!(all_bits(&read_rollouts(&path, None).unwrap().0) == all_bits(&rows));
    // All or none of a response must be known.
    assert!(rows[1].is_response);
    rows[1].candidates.target_log_prob[5] = -1.0;
    let error = write_rollouts(&path, &rows, &greedy).unwrap_err().to_string();
    assert!(error.contains("`target_log_prob` is NaN at 0"), "{error}");
}

//! Choices at known costs, and files held to each server's own rules.

use draftsmith_recipe::kinds::ServedAs;
use draftsmith_theory::{DrafterId, ServerCell};
use serde_json::Value;

use super::*;

/// Responses whose candidates are accepted with a chance.
fn recordings(accepted: f64, name: &str) -> Recordings {
    crate::judging::tests::recordings([40, 81], accepted, ["servers", name])
}

/// Rounds of 10 ms for up to four rows and 2.5 ms for each further one, and 1 ms for a candidate.
fn costs(sizes: &[usize]) -> ServerCosts {
    let cell = |batch_size: usize, num_candidates: usize| {
        let rows = (batch_size * (1 + num_candidates)) as f64;
        let seconds = 0.01 + 0.0025 * (rows - 4.0).max(0.0) + 0.001 * num_candidates as f64;
        ServerCell { batch_size, num_candidates, block_seconds: vec![seconds; 5] }
    };
    let cells = sizes.iter().flat_map(|size| [0, 1, 2, 3, 5].map(|length| cell(*size, length)));
    ServerCosts::new(cells.collect()).expect("valid")
}

fn settings(accepted: f64, load: ServerLoad) -> ServerSettings {
    let tuning = ServerTuning { kind: ServerKind::Vllm, costs: costs(&[1, 2, 4, 8]), load };
    let [validation, test] = ["validation", "test"].map(|name| {
        TokensByLength::new(&recordings(accepted, name), &tuning.costs).expect("lengths")
    });
    let choosing = Choosing { tuning: &tuning, validation, test, seed: 3 };
    choosing.settings(DrafterId::DRAFT.into(), DecodingName::Greedy).expect("chosen")
}

fn one_client() -> ServerLoad {
    ServerLoad::Shares(vec![(1.0, 1.0)])
}

#[test]
fn the_number_that_pays_falls_with_the_batch_and_speeds_are_those_of_the_formula() {
    let found = settings(0.8, one_client());
    let bests: Vec<usize> = found.rows.iter().map(|row| row.best).collect();
    assert!(bests[0] >= 3 && bests.is_sorted_by(|one, other| one >= other), "{bests:?}");
    assert_eq!(bests[3], 0, "eight requests fill the machine: {bests:?}");
    assert_eq!(found.single, bests[0]);
    for row in &found.rows {
        for cell in &row.cells {
            let rows = (row.batch_size * (1 + cell.num_candidates)) as f64;
            let seconds =
                |rows: f64, k: usize| 0.01 + 0.0025 * (rows - 4.0).max(0.0) + 0.001 * k as f64;
            let plain = seconds(row.batch_size as f64, 0);
            let expected = cell.tokens_per_round * plain / seconds(rows, cell.num_candidates);
            assert!((cell.speedup - expected).abs() < 1e-9, "{row:?}");
            // 1 + β + … + β^K, give or take the sample.
            let ideal: f64 =
                (0..=cell.num_candidates as i32).map(|power| 0.8_f64.powi(power)).sum();
            assert!((cell.tokens_per_round / ideal - 1.0).abs() < 0.05, "{cell:?} {ideal}");
        }
    }
    let speedup = found.single_speedup.expect("it pays");
    assert!(speedup.low < speedup.value && speedup.value < speedup.high && speedup.low > 1.5);
}

#[test]
fn a_drafter_that_is_seldom_right_is_off() {
    let found = settings(0.05, one_client());
    assert!(found.rows.iter().all(|row| row.best == 0 && row.speedup.is_none()), "{found:?}");
    assert_eq!((found.single, found.single_speedup), (0, None));
    for kind in KINDS {
        let served = Served {
            drafter: DrafterId::DRAFT.into(),
            form: ServedAs::Eagle3,
            model: "m".to_owned(),
        };
        let (files, notes) = kind.write(&found, &served);
        assert!(files.is_empty() && notes[0].contains("without it"), "{kind:?} {notes:?}");
    }
}

#[test]
fn one_number_for_a_mixed_load_lies_between_and_its_loss_is_told() {
    let mixed = settings(0.8, ServerLoad::Shares(vec![(1.0, 0.1), (8.0, 0.9)]));
    let alone = settings(0.8, one_client());
    assert!(mixed.single < alone.single, "{} {}", mixed.single, alone.single);
    assert!(mixed.lost_by_single > 0.01 && alone.lost_by_single < 0.01);
    // 50 requests a second of one token are few: one at a time keeps up.
    let calm = settings(0.8, ServerLoad::Rate(5.0, 10.0));
    assert_eq!(calm.single, alone.single);
    let tuning = ServerTuning {
        kind: ServerKind::Vllm,
        costs: costs(&[1, 2]),
        load: ServerLoad::Rate(1e6, 1e3),
    };
    let tokens =
        |name| TokensByLength::new(&recordings(0.8, name), &tuning.costs).expect("lengths");
    let choosing =
        Choosing { tuning: &tuning, validation: tokens("a"), test: tokens("b"), seed: 3 };
    let error =
        choosing.settings(DrafterId::DRAFT.into(), DecodingName::Greedy).expect_err("too much");
    assert!(error.to_string().contains("--batch-sizes"), "{error}");
}

#[test]
fn the_first_token_of_a_response_is_not_speculated() {
    let recordings = recordings(1.0, "all");
    let later = recordings.after_first_token();
    assert!(
        later
            .responses
            .iter()
            .all(|it| it.places.len() == 80 && it.prompt == [7] && it.limit == 80)
    );
    // 80 tokens in rounds of 1 + 3.
    let tokens = TokensByLength::new(&recordings, &costs(&[1])).expect("lengths");
    assert_eq!(tokens.mean(3), 4.0);
    assert_eq!(tokens.mean(0), 1.0);
}

const KINDS: [ServerKind; 5] = [
    ServerKind::LlamaCpp,
    ServerKind::Vllm,
    ServerKind::Sglang,
    ServerKind::TrtLlm(ScheduleKeys::UpperBounds),
    ServerKind::TrtLlm(ScheduleKeys::LowerBounds),
];

/// The numbers that the settings of a server give a batch, by the server's own reading; 0 is off.
fn given(kind: ServerKind, files: &[SettingsFile], batch_size: usize) -> usize {
    let text =
        |name: &str| files.iter().find(|file| file.name == name).map(|file| file.text.as_str());
    match kind {
        ServerKind::Vllm => {
            let config: Value =
                serde_json::from_str(text("speculative.json").expect("written")).expect("JSON");
            let most = config["num_speculative_tokens"].as_u64().expect("a number");
            let table = config["num_speculative_tokens_per_batch_size"].as_array().expect("a list");
            let mut next = 1;
            let mut found = None;
            for entry in table {
                let [from, to, k] = [0, 1, 2].map(|at| entry[at].as_u64().expect("a number"));
                // Three numbers, the first range from 1, no gap or overlap, no more than the maximum.
                assert_eq!(entry.as_array().map(Vec::len), Some(3));
                assert!(from == next && from <= to && k <= most && most > 0, "{config}");
                next = to + 1;
                if (from..=to).contains(&(batch_size as u64)) {
                    found = Some(k as usize);
                }
            }
            found.expect("a range")
        }
        ServerKind::Sglang => {
            let flags = text("flags.txt").expect("written");
            let number = |flag: &str| -> usize {
                let after = flags.split(flag).nth(1).expect("the flag").split_whitespace().next();
                after.expect("a number").parse().expect("a number")
            };
            let steps = number("--speculative-num-steps ");
            assert_eq!(number("--speculative-eagle-topk "), 1);
            assert_eq!(number("--speculative-num-draft-tokens "), steps + 1);
            let Some(adaptive) = text("adaptive.json") else { return steps };
            let slots: serde_json::Map<String, Value> =
                serde_json::from_str(adaptive).expect("JSON");
            let slot = |key: &String| key.parse::<usize>().expect("a decimal");
            let all: Vec<u64> = slots
                .values()
                .flat_map(|it| it["candidate_steps"].as_array().cloned().expect("steps"))
                .map(|it| it.as_u64().expect("a number"))
                .collect();
            assert!(
                all.contains(&(steps as u64)),
                "the flag's number is one of the slots': {adaptive}"
            );
            let key =
                slots.keys().filter(|key| slot(key) <= batch_size).max_by_key(|key| slot(key));
            let key = key.or(slots.keys().min_by_key(|key| slot(key))).expect("a slot");
            slots[key]["candidate_steps"][0].as_u64().expect("a number") as usize
        }
        ServerKind::TrtLlm(keys) => {
            let text = text("speculative.yaml").expect("written");
            let entries: Vec<(usize, usize)> = text
                .lines()
                .filter_map(|line| {
                    let (key, value) = line.trim().split_once(": ")?;
                    Some((key.parse().ok()?, value.parse().ok()?))
                })
                .collect();
            let most: usize = text
                .split("max_draft_len: ")
                .nth(1)
                .expect("it")
                .lines()
                .next()
                .expect("it")
                .parse()
                .expect("a number");
            assert!(
                entries.is_sorted_by(|one, other| one.0 < other.0) && entries[0].0 >= 1,
                "{text}"
            );
            assert_eq!(entries[0].1, most, "the smallest key has the greatest length: {text}");
            match keys {
                ScheduleKeys::UpperBounds => {
                    assert!(entries.iter().all(|(_, k)| *k > 0), "no inner 0: {text}");
                    entries.iter().find(|(key, _)| batch_size <= *key).map_or(0, |(_, k)| *k)
                }
                ScheduleKeys::LowerBounds => {
                    assert_eq!(entries[0].0, 1, "{text}");
                    entries.iter().rfind(|(key, _)| *key <= batch_size).map_or(0, |(_, k)| *k)
                }
            }
        }
        ServerKind::LlamaCpp => {
            let flags = text("flags.txt").expect("written");
            assert!(
                flags.contains("--spec-draft-n-min 0 ")
                    && flags.trim_end().ends_with("--spec-draft-p-min 0")
            );
            let after = flags.split("--spec-draft-n-max ").nth(1).expect("the flag");
            after.split_whitespace().next().expect("a number").parse().expect("a number")
        }
    }
}

#[test]
fn each_server_reads_the_chosen_numbers_in_its_own_way() {
    let found = settings(0.8, one_client());
    for form in [ServedAs::DraftModel, ServedAs::Eagle3] {
        for kind in KINDS {
            let served =
                Served { drafter: DrafterId::DRAFT.into(), form, model: "path/to/it".to_owned() };
            let (files, notes) = kind.write(&found, &served);
            assert!(files[0].text.contains("path/to/it") || matches!(kind, ServerKind::TrtLlm(_)));
            assert!(!notes.is_empty() && !notes.concat().contains("  "), "{notes:?}");
            let takes_one = kind == ServerKind::LlamaCpp
                || kind == ServerKind::Sglang && form == ServedAs::DraftModel;
            for row in &found.rows {
                let expected = if takes_one { found.single } else { row.best };
                assert_eq!(given(kind, &files, row.batch_size), expected, "{kind:?} {files:?}");
            }
            // Between two measured sizes, that of the larger one.
            let expected = if takes_one { found.single } else { found.rows[2].best };
            assert_eq!(given(kind, &files, 3), expected, "{kind:?}");
        }
    }
}

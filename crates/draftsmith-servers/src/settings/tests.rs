//! Tests of choices at known costs, and of files against each server's own rules.

use draftsmith_theory::{RecordedCandidate, RecordedPlace, Recording, ServerCell};
use serde_json::Value;

use draftsmith_recipe::{AS_DRAFT_MODEL, AS_EAGLE3, ServerFlags};

use super::*;

/// Simulates recordings of 40 responses with 81 tokens. Candidates are accepted with probability
/// `accepted`. The drafter gives accepted candidates a probability of 0.95 or 0.6, and others 0.6
/// or 0.2, each half of the time.
fn recordings(accepted: f64, name: &str) -> Recordings {
    let mut draws = SeededDraws::new(1, &["servers", name]);
    let candidate = |token_id, prob| RecordedCandidate {
        token_id,
        candidate_prob: prob,
        confidence: prob,
        confidence_of_ten: prob,
        entropy: 1.0,
        predicted_acceptance_prob: None,
        draft_log_prob: -1.0,
        target_log_prob: -1.0,
    };
    // Each response repeats nine tokens.
    let mut place = |at: u32| {
        let is_likely = draws.uniform() < 0.5;
        let is_accepted = draws.uniform() < accepted;
        let rejected = candidate(8, if is_likely { 0.6 } else { 0.2 });
        RecordedPlace {
            candidate: candidate(10 + at % 9, if is_likely { 0.95 } else { 0.6 }),
            rollout: (!is_accepted).then(|| vec![rejected; 8]),
        }
    };
    let mut response = |_| Recording::new(vec![1; 10], (0..81).map(&mut place).collect(), 81);
    Recordings {
        drafter: DrafterId::DRAFT,
        max_length: 8,
        eos_token_ids: vec![0],
        head: None,
        responses: (0..40).map(&mut response).collect(),
        answers: None,
    }
}

/// Returns costs of 10 ms for a round of up to four rows, 2.5 ms for each further row, and 1 ms for
/// each candidate of a request.
fn costs(sizes: &[usize]) -> ServerCosts {
    let cell = |batch_size: usize, num_candidates: usize| {
        let rows = (batch_size * (1 + num_candidates)) as f64;
        let seconds = 0.01 + 0.0025 * (rows - 4.0).max(0.0) + 0.001 * num_candidates as f64;
        let block_seconds = vec![seconds; 5];
        ServerCell { batch_size, num_candidates, block_seconds, prompt_token_seconds: 0.0 }
    };
    let cells = sizes.iter().flat_map(|size| [0, 1, 2, 3, 5].map(|length| cell(*size, length)));
    ServerCosts::new(cells.collect()).expect("valid")
}

fn recorded<'a>([chosen_on, judged_on]: [&'a Recordings; 2]) -> Recorded<'a> {
    Recorded { chosen_on, judged_on, decoding: DecodingName::Greedy, seed: 3 }
}

const LENGTHS: [usize; 4] = [1, 2, 3, 5];

fn choosing(tuning: &ServerTuning, accepted: f64) -> Choosing<'_> {
    let [one, other] = ["validation", "test"].map(|name| recordings(accepted, name));
    let tried = LENGTHS.map(Drafting::fixed).to_vec();
    tuning.choosing(recorded([&one, &other]), tried).expect("lengths")
}

fn settings(accepted: f64, load: ServerLoad) -> ServerSettings {
    let tuning = ServerTuning {
        source: String::new(),
        drafter: Some("draft".to_owned()),
        kind: ServerKind::Vllm,
        costs: costs(&[1, 2, 4, 8]),
        load,
    };
    let choosing = choosing(&tuning, accepted);
    choosing.settings(DrafterId::DRAFT.into(), DecodingName::Greedy).expect("chosen")
}

fn single(settings: &ServerSettings) -> usize {
    settings.single.map_or(0, |it| it.num_candidates)
}

fn served(flags: &'static ServerFlags, model: &str) -> ServedDrafter {
    let (target, model) = ("t".to_owned(), model.to_owned());
    ServedDrafter { flags, target, model, export: None, whole_block: None, window: None }
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
    assert_eq!(single(&found), bests[0]);
    for row in &found.rows {
        for cell in &row.cells {
            let num_candidates = cell.drafting.num_candidates;
            let rows = (row.batch_size * (1 + num_candidates)) as f64;
            let seconds =
                |rows: f64, k: usize| 0.01 + 0.0025 * (rows - 4.0).max(0.0) + 0.001 * k as f64;
            let plain = seconds(row.batch_size as f64, 0);
            let expected = cell.tokens_per_round * plain / seconds(rows, num_candidates);
            assert!((cell.speedup - expected).abs() < 1e-9, "{row:?}");
            // The ideal is 1 + β + … + β^K, apart from sampling error.
            let ideal: f64 = (0..=num_candidates as i32).map(|power| 0.8_f64.powi(power)).sum();
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
    assert_eq!((found.single, found.single_speedup), (None, None));
    for kind in KINDS {
        let served = served(&AS_EAGLE3, "m");
        let mut found = found.clone();
        kind.write(&mut found, &served);
        let ServerSettings { files, notes, .. } = &found;
        assert!(files.is_empty() && notes[0].contains("without it"), "{kind:?} {notes:?}");
    }
}

#[test]
fn one_number_for_a_mixed_load_lies_between_and_its_loss_is_told() {
    let mixed = settings(0.8, ServerLoad::Shares(vec![(1.0, 0.1), (8.0, 0.9)]));
    let alone = settings(0.8, one_client());
    assert!(single(&mixed) < single(&alone), "{mixed:?}");
    assert!(mixed.lost_by_single > 0.01 && alone.lost_by_single < 0.01);
    // At 50 tokens per second (5 requests of 10 tokens), a batch of one keeps up.
    let calm = settings(0.8, ServerLoad::Rate(5.0, 10.0));
    assert_eq!(calm.single, alone.single);
    let tuning = ServerTuning {
        source: String::new(),
        drafter: Some("draft".to_owned()),
        kind: ServerKind::Vllm,
        costs: costs(&[1, 2]),
        load: ServerLoad::Rate(1e6, 1e3),
    };
    let choosing = choosing(&tuning, 0.8);
    let error =
        choosing.settings(DrafterId::DRAFT.into(), DecodingName::Greedy).expect_err("too much");
    assert!(error.to_string().contains("--concurrency"), "{error}");
}

#[test]
fn the_first_token_of_a_response_is_not_speculated() {
    let recordings = recordings(1.0, "all");
    let later = recordings.after_first_token();
    assert!(
        later
            .responses
            .iter()
            .all(|it| it.places.len() == 80 && it.prompt.last() == Some(&10) && it.limit == 80)
    );
    // The 80 later tokens take rounds of 1 + 3 tokens.
    let three = Drafting::fixed(3);
    let replayed = Replayed::new(&recordings, &[three]).expect("lengths");
    assert_eq!(replayed.tokens_per_round(three, &replayed.all()), 4.0);
    // Without candidates, 81 tokens take 80 rounds of 10 ms.
    let speed = replayed.throughput(&costs(&[1]).table(), 1.0, None, &replayed.all());
    assert!((speed.expect("measured") - 81.0 / 0.8).abs() < 1e-9, "{speed:?}");
}

#[test]
fn llama_cpp_stops_below_a_probability_and_looks_up_where_that_pays() {
    // Rows are expensive, and the drafter's probability identifies every second rejection.
    let target = |rows: usize| 0.01 + 0.004 * (rows - 1) as f64;
    let cell = |batch_size: usize, num_candidates: usize| {
        let rows = batch_size * (1 + num_candidates);
        let block_seconds = vec![target(rows) + 0.0001 * num_candidates as f64; 5];
        ServerCell { batch_size, num_candidates, block_seconds, prompt_token_seconds: 1e-4 }
    };
    let plain = (1..=12).map(|size| cell(size, 0));
    let cells = plain.chain([1, 2].into_iter().flat_map(|size| LENGTHS.map(|k| cell(size, k))));
    let tuning = ServerTuning {
        source: String::new(),
        drafter: Some("draft".to_owned()),
        kind: ServerKind::LlamaCpp,
        costs: ServerCosts::new(cells.collect()).expect("valid"),
        load: ServerLoad::Shares(vec![(2.0, 1.0)]),
    };
    let [one, other] = ["validation", "test"].map(|name| recordings(0.7, name));
    let greedy = recorded([&one, &other]);
    let served = served(&AS_EAGLE3, "m");
    let found = tuning
        .settings(
            Recorded { decoding: DecodingName::Sampled, ..greedy },
            DrafterId::DRAFT.into(),
            &served,
        )
        .expect("settings");
    let single = found.single.expect("it pays");
    assert!(single.least_prob > 0.0, "{single:?}");
    let flags = &found.files[0].text;
    for part in [
        format!("--spec-draft-n-max {} ", single.num_candidates),
        format!("--spec-draft-p-min {} ", single.least_prob),
        "--spec-draft-sampling probabilistic".to_owned(),
        "--spec-draft-n-min 0 ".to_owned(),
        "--no-spec-draft-backend-sampling".to_owned(),
        "--kv-unified".to_owned(),
    ] {
        assert!(flags.contains(&part), "`{part}`: {flags}");
    }
    let at_two = &found.rows[1].cells;
    let speed = |it: Drafting| at_two.iter().find(|cell| cell.drafting == it).map(|it| it.speedup);
    assert!(speed(single) > speed(Drafting::fixed(single.num_candidates)), "{at_two:?}");
    // Reading the prompts of ten tokens takes time too: 1 ms for each of the two.
    let fixed = at_two.iter().find(|it| it.drafting == Drafting::fixed(1)).expect("tried");
    let seconds = |rounds: f64, each: f64| 40.0 * rounds * each + 2.0 * 40.0 * 10.0 * 1e-4;
    let rounds = 80.0 / fixed.tokens_per_round;
    let expected = seconds(80.0, target(2)) / seconds(rounds, target(4) + 0.0001);
    assert!((fixed.speedup / expected - 1.0).abs() < 1e-9, "{} {expected}", fixed.speedup);
    // All lookups are right here. With two requests, each has room for four candidates.
    let found = tuning.look_ups(greedy, &served).expect("tried");
    let found = found.expect("rows were measured");
    let single = found.single.expect("it pays");
    assert_eq!(single.num_candidates, 4, "{found:?}");
    let flags = &found.files[0].text;
    let n = single.num_matched.expect("a look-up");
    assert!(
        flags.contains(&format!("--spec-ngram-simple-size-n {n} --spec-ngram-simple-size-m 4"))
    );
    let faster = tuning.fastest(greedy, DrafterId::DRAFT.into(), &served).expect("both");
    assert_eq!(faster.single, found.single);
    // Without round times for that many rows, lookup is not considered.
    let few = ServerTuning { costs: costs(&[1, 2]), ..tuning.clone() };
    assert!(few.look_ups(greedy, &served).expect("tried").is_none());
    let found = few.settings(greedy, DrafterId::DRAFT.into(), &served).expect("settings");
    assert!(found.notes.iter().any(|note| note.contains("--concurrency")), "{:?}", found.notes);
}

const KINDS: [ServerKind; 5] = [
    ServerKind::LlamaCpp,
    ServerKind::Vllm,
    ServerKind::Sglang,
    ServerKind::TrtLlm(ScheduleKeys::UpperBounds),
    ServerKind::TrtLlm(ScheduleKeys::LowerBounds),
];

/// Reads a batch's number of candidates from settings, as the server itself would; 0 means off.
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
                // An entry has three numbers. Ranges start at 1, have no gap or overlap, and
                // respect the maximum.
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
            assert!(flags.contains("--spec-draft-n-min 0 --spec-draft-p-min 0"), "{flags}");
            let after = flags.split("--spec-draft-n-max ").nth(1).expect("the flag");
            after.split_whitespace().next().expect("a number").parse().expect("a number")
        }
    }
}

#[test]
fn each_server_reads_the_chosen_numbers_in_its_own_way() {
    let found = settings(0.8, one_client());
    for flags in [&AS_DRAFT_MODEL, &AS_EAGLE3] {
        for kind in KINDS {
            let served = served(flags, "/path/to/it");
            let mut found = found.clone();
            kind.write(&mut found, &served);
            let ServerSettings { files, notes, .. } = &found;
            assert!(files[0].text.contains("/path/to/it") || matches!(kind, ServerKind::TrtLlm(_)));
            assert!(!notes.is_empty() && !notes.concat().contains("  "), "{notes:?}");
            let takes_one =
                kind == ServerKind::LlamaCpp || kind == ServerKind::Sglang && !flags.sglang_adapts;
            for row in &found.rows {
                let expected = if takes_one { single(&found) } else { row.best };
                assert_eq!(given(kind, files, row.batch_size), expected, "{kind:?} {files:?}");
            }
            // Between two measured sizes, the number of the larger one applies.
            let expected = if takes_one { single(&found) } else { found.rows[2].best };
            assert_eq!(given(kind, files, 3), expected, "{kind:?}");
        }
    }
}

#[test]
fn a_benchmark_accepts_as_often_as_the_recordings_and_is_no_setting_to_serve() {
    let [one, other] = ["validation", "test"].map(|name| recordings(0.8, name));
    let served = served(&AS_DRAFT_MODEL, "m");
    for (kind, decoding) in [
        (ServerKind::Vllm, DecodingName::Sampled),
        (ServerKind::LlamaCpp, DecodingName::Greedy),
        (ServerKind::Sglang, DecodingName::Greedy),
    ] {
        let tuning = ServerTuning {
            source: String::new(),
            drafter: Some("draft".to_owned()),
            kind,
            costs: costs(&[1, 2, 4, 8]),
            load: one_client(),
        };
        let recorded = Recorded { decoding, ..recorded([&one, &other]) };
        let found = tuning.settings(recorded, DrafterId::DRAFT.into(), &served).expect("settings");
        let to_serve = |part: &str| found.files.iter().any(|file| file.text.contains(part));
        assert!(!to_serve("synth") && !found.start.join(" ").contains("benchmark"), "{found:?}");
        let Some(SettingsFile { text, .. }) = &found.benchmark else {
            assert_eq!(kind, ServerKind::Sglang, "SGLang has no rates by position");
            continue;
        };
        let rates: Vec<f64> = if kind == ServerKind::Vllm {
            let config: Value = serde_json::from_str(text).expect("JSON");
            assert_eq!(config["rejection_sample_method"], "synthetic");
            assert_eq!(config["draft_sample_method"], Value::Null, "not beside synthetic rates");
            assert!(to_serve("draft_sample_method"));
            let rates = config["synthetic_acceptance_rates"].as_array().expect("a list");
            assert_eq!(config["num_speculative_tokens"], rates.len(), "{text}");
            rates.iter().map(|rate| rate.as_f64().expect("a number")).collect()
        } else {
            let (flags, rates) = text.split_once(" --spec-synth-rates ").expect("rates");
            let rates: Vec<f64> =
                rates.trim().split(',').map(|rate| rate.parse().expect("a number")).collect();
            assert!(flags.contains(&format!("--spec-draft-n-max {} ", rates.len())), "{text}");
            rates
        };
        assert!(rates.is_sorted_by(|one, next| one >= next), "{rates:?}");
        // Candidates are accepted with probability 0.8 each, apart from sampling error, unless only likely
        // ones are drafted.
        let ideal = |position: usize| 0.8_f64.powi(position as i32 + 1);
        let least = found.single.expect("it pays").least_prob;
        for (position, rate) in rates.iter().enumerate() {
            let error = rate - ideal(position);
            assert!(error > -0.05 && (least > 0.0 || error < 0.05), "{kind:?} {rates:?}");
        }
    }
}

#[test]
fn a_table_of_vllm_that_falls_to_no_candidates_warns_of_a_collapse() {
    let found = settings(0.8, one_client());
    let warning = |mut found: ServerSettings| {
        ServerKind::Vllm.write(&mut found, &served(&AS_EAGLE3, "m"));
        found.notes.into_iter().find(|note| note.contains("#49548"))
    };
    let last_on = found.rows.iter().rfind(|row| row.best > 0).expect("it pays for one").batch_size;
    assert!(last_on < 8, "eight requests fill the machine");
    let mut few = found.clone();
    few.rows.retain(|row| row.batch_size <= last_on);
    assert_eq!(warning(few), None);
    let (note, from) = (warning(found).expect("a warning"), last_on + 1);
    assert!(note.starts_with(&format!("From {from} concurrent requests on")), "{note}");
}

//! Tests of the files of rows and summaries, and of the order and groups of rows.

use std::time::Duration;

use draftsmith_theory::{
    CostFit, CostModel, DrafterId, Forwards, LookupFirst, ModelSummary, Rounding, Sampling,
};
use serde_json::{Value, json};

use super::*;

/// Columns in the order of the file.
const COLUMNS: [&str; 43] = [
    "dataset",
    "category",
    "drafter",
    "road",
    "num_parameters",
    "stop_rule",
    "setting",
    "is_tuned",
    "decoding",
    "temperature",
    "num_prompts",
    "num_tokens",
    "num_target_forwards",
    "num_draft_forwards",
    "num_drafted",
    "num_accepted",
    "num_discarded",
    "verification_rate",
    "discard_rate",
    "compression_rate",
    "draft_length",
    "accepted_length",
    "acceptance_rate",
    "expected_tokens_per_round",
    "tokens_per_round",
    "ctar",
    "acceptance_by_position",
    "unconditional_acceptance",
    "tokens_per_second",
    "speedup",
    "speedup_over_prompts",
    "speedup_over_prompts_interval",
    "speedup_sd",
    "by_length",
    "speedup_interval",
    "rate_intervals",
    "modelled_speedup",
    "speedup_at_paper_costs",
    "improvement_by_size",
    "improvement_by_time",
    "improvement_at",
    "lossless",
    "num_forgiven_ties",
];

const SELF_DRAFT: DrafterName = DrafterName::Of(DrafterId::named("exit1"));

/// Builds two rounds that yield 4 + 2 = 6 tokens in 50 ms, with a prefill of 10 ms.
fn trace() -> Trace {
    let round = |num_drafted: usize, num_accepted| Round {
        num_drafted,
        depth: num_drafted,
        forwards: Forwards::of(DrafterId::DRAFT, num_drafted),
        num_accepted,
        draft_time: Duration::from_millis(5),
        verify_time: Duration::from_millis(20),
    };
    Trace {
        rounds: vec![round(3, 3), round(4, 1)],
        num_tokens: 6,
        prefill_time: Duration::from_millis(10),
    }
}

fn row(stop_rule: StopRuleName, setting: Option<f64>) -> ResultRow {
    ResultRow {
        dataset: "alpaca".into(),
        drafter: DrafterName::Of(DrafterId::DRAFT),
        road: Some(Road::SeparateDraft),
        stop_rule,
        setting,
        num_prompts: 1,
        speedup: Some(2.0),
        speedup_interval: Some([1.9, 2.1]),
        modelled_speedup: Some(1.9),
        improvement_by_size: Some(1.5),
        lossless: Some(true),
        ..ResultRow::of(&trace(), &Decoding::GREEDY)
    }
}

fn self_draft(stop_rule: StopRuleName, setting: Option<f64>) -> ResultRow {
    ResultRow { drafter: SELF_DRAFT, road: Some(Road::SelfDraft), ..row(stop_rule, setting) }
}

#[test]
fn a_row_has_the_numbers_of_its_trace() {
    let row = row(StopRuleName::FixedLength, Some(4.0));
    assert_eq!(row.counts, trace().counts());
    assert_eq!((row.verification_rate, row.discard_rate), (2.0 / 6.0, 3.0 / 6.0));
    assert_eq!(row.compression_rate, 3.0);
    assert_eq!(row.ctar, [1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    // 6 tokens in 60 ms, to f64's rounding of a Duration.
    assert!((row.tokens_per_second - 100.0).abs() < 1e-9);
}

#[test]
fn acceptance_by_position_counts_only_judged_candidates() {
    let rounds = |count, num_drafted, num_accepted| {
        let round = Round {
            num_drafted,
            depth: num_drafted,
            forwards: Forwards::of(DrafterId::DRAFT, num_drafted),
            num_accepted,
            ..Round::default()
        };
        std::iter::repeat_n(round, count)
    };
    let of = |rounds: Vec<Round>| {
        let trace = Trace { num_tokens: rounds.len(), rounds, ..Trace::default() };
        ResultRow::of(&trace, &Decoding::GREEDY).acceptance_by_position
    };
    // 50 first candidates, 40 of them accepted; 30 of those have a second, 20 accepted; 20 third
    // ones are judged, 5 accepted, and of the fourth ones only 5.
    let all: Vec<Round> = rounds(10, 4, 0)
        .chain(rounds(10, 1, 1))
        .chain(rounds(10, 4, 1))
        .chain(rounds(15, 4, 2))
        .chain(rounds(5, 4, 3))
        .collect();
    assert_eq!(of(all), [40.0 / 50.0, 20.0 / 30.0, 5.0 / 20.0]);
    assert_eq!(of(rounds(19, 2, 2).collect()), [0.0; 0]);
    assert_eq!(of(rounds(20, 14, 14).collect()), [1.0; 10]);
    assert_eq!(of(rounds(30, 0, 0).collect()), [0.0; 0]);
}

#[test]
fn drafters_are_strings_and_errors_show_impossible_names() {
    let tree = |id, shape: &str| DrafterName::Tree(id, shape.parse().expect("a shape"));
    for (drafter, name) in [
        (DrafterName::None, "none"),
        (DrafterName::Of(DrafterId::DRAFT), "draft"),
        (DrafterName::Of(DrafterId::named("exit12")), "exit12"),
        (tree(DrafterId::DRAFT, "3-2x4x12"), "draft+tree_3-2x4x12"),
        (tree(DrafterId::named("exit2"), "2x1x4-drawn"), "exit2+tree_2x1x4-drawn"),
        (DrafterName::After(LookupFirst::new(2, 4), DrafterId::named("exit2")), "exit2+lookup_2x4"),
    ] {
        assert_eq!(serde_json::to_value(drafter).expect("JSON"), json!(name));
        assert_eq!(serde_json::from_value::<DrafterName>(json!(name)).expect("known"), drafter);
    }
    for name in ["a b", "2x", ""] {
        let error = serde_json::from_value::<DrafterName>(json!(name)).expect_err("refused");
        assert!(
            error.to_string().contains(&format!("`{name}` is not a drafter's name")),
            "{error}"
        );
    }
}

#[test]
fn unconditional_acceptance_counts_all_rounds_that_are_long_enough() {
    let round = |num_drafted: usize, num_accepted: usize| Round {
        num_drafted,
        depth: num_drafted,
        num_accepted,
        ..Round::default()
    };
    let of = |rounds| unconditional_acceptance(&Trace { rounds, ..Trace::default() });
    let rounds = [vec![round(3, 3); 10], vec![round(3, 1); 10], vec![round(1, 0); 20]].concat();
    assert_eq!(of(rounds), [0.5, 0.5, 0.5]);
    assert_eq!(of(vec![round(40, 40); 20]), [1.0; 30]);
    assert_eq!(of(vec![round(2, 2); 19]), [0.0; 0]);
}

#[test]
fn results_are_written_in_order_and_read_back() {
    let rows = vec![
        ResultRow { lossless: None, ..row(StopRuleName::None, None) },
        row(StopRuleName::FixedLength, Some(4.0)),
        row(StopRuleName::RejectionThreshold, Some(0.7)),
        self_draft(StopRuleName::ConfidenceThreshold, Some(0.6)),
    ];
    let text = results_to_json(&rows).expect("rows are JSON");
    assert_eq!(text.lines().count(), rows.len() + 2);

    let list: Vec<serde_json::Map<String, Value>> =
        serde_json::from_str(&text).expect("a list of objects");
    for row in &list {
        assert_eq!(row.keys().collect::<Vec<_>>(), COLUMNS);
    }
    assert_eq!(list[0]["lossless"], Value::Null);
    assert_eq!((&list[0]["stop_rule"], &list[0]["setting"]), (&json!("none"), &Value::Null));
    assert!(text.contains(
        r#""road":"separate_draft","num_parameters":null,"stop_rule":"fixed_length","setting":4,"#
    ));
    assert!(text.contains(r#""stop_rule":"rejection_threshold","setting":0.7,"#));
    assert!(text.contains(
        r#""road":"self_draft","num_parameters":null,"stop_rule":"confidence_threshold","setting":0.6,"#
    ));

    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("results.json");
    std::fs::write(&path, &text).expect("writable");
    assert_eq!(read_results(&path).expect("readable"), rows);
}

#[test]
fn what_is_not_a_number_is_null() {
    let row = ResultRow {
        stop_rule: StopRuleName::FixedLength,
        setting: Some(f64::NAN),
        modelled_speedup: Some(f64::NAN),
        ..ResultRow::of(&Trace::default(), &Decoding::GREEDY)
    };
    assert!(row.verification_rate.is_nan());
    let text = results_to_json(std::slice::from_ref(&row)).expect("rows are JSON");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    for column in ["setting", "verification_rate", "discard_rate", "compression_rate"] {
        assert_eq!(value[0][column], Value::Null, "{column}");
    }
    for column in ["tokens_per_second", "speedup", "modelled_speedup"] {
        assert_eq!(value[0][column], Value::Null, "{column}");
    }
    assert_eq!(value[0]["ctar"], json!([]));
    let back: Vec<ResultRow> = serde_json::from_str(&text).expect("rows");
    assert!(back[0].discard_rate.is_nan() && back[0].speedup.is_none());

    // Also by a writer that is not ours, and in numbers put in afterwards.
    let row = ResultRow { speedup: Some(f64::INFINITY), ..row };
    assert_eq!(serde_json::to_value(&row).expect("JSON")["speedup"], Value::Null);
}

#[test]
fn an_invalid_results_file_is_named() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("results.json");
    std::fs::write(&path, "[{}]").expect("writable");
    let error = read_results(&path).expect_err("columns are missing");
    assert!(error.to_string().contains("is not a list of result rows; hint:"), "{error}");
    let cause = std::error::Error::source(&error).expect("the key").to_string();
    assert!(cause.contains("key `[0].dataset` is missing"), "{cause}");
}

#[test]
fn settings_have_few_digits() {
    let shown = |setting| StopRuleName::CostHead.label(setting);
    for (setting, text) in [
        (Some(6.0), "6"),
        (Some(0.05), "0.05"),
        (Some(0.3187236), "0.319"),
        (Some(0.0123456), "0.0123"),
        (Some(0.00049999), "0.0005"),
        (Some(12345678.5), "12345678"),
        (None, "?"),
    ] {
        assert_eq!(shown(setting), format!("cost-head {text}"));
    }
    assert_eq!(StopRuleName::None.label(None), "target alone");
}

#[test]
fn rows_are_sorted_for_display() {
    use StopRuleName::{FixedLength, None as Plain, RejectionThreshold};
    let make = |dataset: &str, category: &str, stop_rule, setting| ResultRow {
        dataset: dataset.into(),
        category: category.into(),
        ..row(stop_rule, setting)
    };
    let mut rows = vec![
        make("gsm8k", "all", RejectionThreshold, Some(0.3)),
        make("alpaca", "all", FixedLength, Some(10.0)),
        make("gsm8k", "writing", FixedLength, Some(2.0)),
        make("gsm8k", "all", FixedLength, Some(10.0)),
        make("gsm8k", "coding", Plain, None),
        make("gsm8k", "all", FixedLength, Some(2.0)),
        make("alpaca", "all", Plain, None),
        make("gsm8k", "all", Plain, None),
    ];
    sort_rows(&mut rows);
    let shown: Vec<String> = rows
        .iter()
        .map(|row| format!("{} {} {}", row.dataset, row.category, row.label()))
        .collect();
    assert_eq!(
        shown,
        [
            "gsm8k all target alone",
            "gsm8k all K = 2",
            "gsm8k all K = 10",
            "gsm8k all head 0.3",
            "gsm8k writing K = 2",
            "gsm8k coding target alone",
            "alpaca all target alone",
            "alpaca all K = 10",
        ]
    );
}

#[test]
fn kinds_of_drafters_are_sorted_one_after_the_other() {
    use StopRuleName::{ConfidenceThreshold, FixedLength, None as Plain, RejectionThreshold};
    let at = |exit_layer, stop_rule, setting| ResultRow {
        drafter: DrafterName::Of(format!("exit{exit_layer}").parse().expect("a name")),
        road: Some(Road::SelfDraft),
        ..row(stop_rule, Some(setting))
    };
    let mut rows = vec![
        at(3, FixedLength, 2.0),
        at(2, ConfidenceThreshold, 0.6),
        at(2, FixedLength, 4.0),
        row(RejectionThreshold, Some(0.5)),
        at(2, FixedLength, 3.0),
        row(FixedLength, Some(6.0)),
        ResultRow { drafter: DrafterName::None, ..row(Plain, None) },
    ];
    sort_rows(&mut rows);
    let labels: Vec<String> = rows.iter().map(ResultRow::label).collect();
    assert_eq!(
        labels,
        [
            "target alone",
            "K = 6",
            "head 0.5",
            "exit2, K = 3",
            "exit2, K = 4",
            "exit2, confidence 0.6",
            "exit3, K = 2",
        ]
    );
}

#[test]
fn the_best_are_the_fastest_of_their_group_over_all_prompts() {
    use StopRuleName::{ConfidenceThreshold, FixedLength, None as Plain, RejectionThreshold};
    let make = |stop_rule, setting, tokens_per_second| ResultRow {
        drafter: if stop_rule == Plain {
            DrafterName::None
        } else {
            DrafterName::Of(DrafterId::DRAFT)
        },
        tokens_per_second,
        ..row(stop_rule, setting)
    };
    let self_made = |stop_rule, setting, tokens_per_second| ResultRow {
        tokens_per_second,
        ..self_draft(stop_rule, setting)
    };
    let rows = vec![
        make(Plain, None, 50.0),
        make(FixedLength, Some(2.0), 80.0),
        make(FixedLength, Some(4.0), 90.0),
        make(FixedLength, Some(6.0), 90.0),
        make(RejectionThreshold, Some(0.3), f64::NAN),
        make(RejectionThreshold, Some(0.7), 95.0),
        self_made(FixedLength, Some(3.0), 85.0),
        self_made(ConfidenceThreshold, Some(0.6), 92.0),
        ResultRow { category: "coding".into(), ..make(FixedLength, Some(2.0), 120.0) },
        ResultRow {
            decoding: DecodingName::Sampled,
            temperature: 0.7,
            ..make(FixedLength, Some(2.0), 70.0)
        },
    ];
    let groups = groups(&rows);
    assert_eq!(groups.len(), 2);
    let label = |row: Option<&ResultRow>| row.map(ResultRow::label);
    assert_eq!(label(groups[0].plain()).as_deref(), Some("target alone"));
    let best_by = |group: &Group<'_>, rule| {
        let is_meant =
            |row: &ResultRow| (row.road, row.stop_rule) == (Some(Road::SeparateDraft), rule);
        group.fastest(is_meant).map(ResultRow::label)
    };
    assert_eq!(best_by(&groups[0], FixedLength).as_deref(), Some("K = 4"));
    assert_eq!(best_by(&groups[0], RejectionThreshold).as_deref(), Some("head 0.7"));
    assert_eq!(groups[0].sweep_of(&rows[1]).count(), 3);
    assert!(groups[0].is_best_of_road(&rows[7]) && !groups[0].is_best_of_road(&rows[6]));
    assert_eq!(groups[0].categories(), ["coding"]);
    let marks: Vec<&str> = rows.iter().map(|row| groups[0].mark(row)).collect();
    assert_eq!(marks[..8], ["", "", "*", "", "", "fastest", "*", "best"]);
    assert!(groups[0].is_best_of_rule(&rows[6]) && !groups[0].is_best_of_rule(&rows[1]));
    assert_eq!(marks[8], "", "a row by category");
    assert_eq!(label(groups[0].best()).as_deref(), Some("head 0.7"));
    assert_eq!(
        label(groups[0].fastest(|row| row.road == Some(Road::SelfDraft))).as_deref(),
        Some("exit1, confidence 0.6")
    );
    assert_eq!(groups[0].best_of_rules().len(), 4);
    assert_eq!(groups[0].in_category("coding", &rows[1]), Some(&rows[8]));
    assert_eq!(best_by(&groups[1], FixedLength).as_deref(), Some("K = 2"));
    assert_eq!(best_by(&groups[1], RejectionThreshold), None);
    assert_eq!(groups[1].decoding_text(), "sampled at T = 0.7");
}

#[test]
fn summaries_read_back() {
    let fit = CostFit {
        model: CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.0 },
        rows_separable: false,
        r_squared: 0.99,
        mean_relative_error: 0.01,
        max_relative_error: 0.05,
    };
    let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: None, min_p: None };
    let group = |decoding, costs| GroupSummary {
        dataset: "alpaca".into(),
        decoding,
        num_forgiven_ties: 1,
        costs,
        promises: Vec::new(),
    };
    let summary = EvaluationSummary {
        papers: Vec::new(),
        recipe: "tiny".into(),
        conclusion: Conclusion::default(),
        version: "0.1.0".into(),
        device: "cuda:0".into(),
        dtype: Rounding::Bf16,
        machine: "8 cores".into(),
        foreign_load: Some(0.25),
        versions: vec![Version { name: "burn".into(), version: "0.22.1".into() }],
        models: vec![ModelSummary {
            role: "target".into(),
            name: "tiny/target".into(),
            description: "llama".into(),
            hash: "00ff".into(),
        }],
        max_new_tokens: 128,
        batch_size: 1,
        seeds: vec![7],
        datasets: vec![DatasetSummary {
            name: "alpaca".into(),
            num_prompts: 1,
            num_in_data: Some(1),
        }],
        groups: vec![
            group(
                Decoding::GREEDY,
                [DrafterName::Of(DrafterId::DRAFT), SELF_DRAFT]
                    .map(|drafter| CostSummary::new(drafter, None, &fit))
                    .into(),
            ),
            group(Decoding::sampled(sampling), vec![]),
        ],
    };
    let text = summary_to_json(&summary).expect("a summary is JSON");
    let back: EvaluationSummary = serde_json::from_str(&text).expect("a summary");
    assert_eq!(back, summary);
    let cost = back.groups[0].cost_of(SELF_DRAFT).expect("a fit");
    assert_eq!((cost.drafter, cost.row_seconds), (SELF_DRAFT, None));
    assert_eq!(back.groups[0].cost_of(DrafterName::None), None);

    let rows = [row(StopRuleName::None, None)];
    let found = back.group(&groups(&rows)[0]).expect("the greedy group");
    assert_eq!(found.decoding, Decoding::GREEDY);
}

#[test]
fn a_decoding_names_a_penalty_if_there_is_one() {
    let text = |decoding: Decoding| serde_json::to_string(&decoding).expect("numbers");
    assert_eq!(text(Decoding::GREEDY), "\"greedy\"");
    let sampling = Sampling { temperature: 0.5, ..Sampling::default() };
    assert_eq!(text(Decoding::sampled(sampling)), r#"{"sampled":{"temperature":0.5,"top_p":1.0}}"#);
    let penalised = r#"{"choice":"greedy","repetition_penalty":1.3}"#;
    assert_eq!(text(Decoding::GREEDY.penalising(1.3)), penalised);
    for decoding in [Decoding::GREEDY, Decoding::sampled(sampling)] {
        for decoding in [decoding, decoding.penalising(1.3)] {
            let again: Decoding = serde_json::from_str(&text(decoding)).expect("reads");
            assert_eq!(again, decoding);
        }
    }
}

#[test]
fn a_promise_is_uncertain_if_the_interval_contains_it_and_no_gain() {
    let estimate = |value, low, high| Estimate { value, low, high };
    let expected = estimate(0.05, 0.03, 0.07);
    let outcome = |measured| PromiseOutcome::of(&expected, &measured);
    assert_eq!(outcome(estimate(0.06, 0.01, 0.09)), PromiseOutcome::Held);
    assert_eq!(outcome(estimate(0.04, 0.02, 0.06)), PromiseOutcome::Held);
    assert_eq!(outcome(estimate(0.01, -0.01, 0.02)), PromiseOutcome::NotHeld);
    assert_eq!(outcome(estimate(0.30, -0.07, 0.72)), PromiseOutcome::TooUncertain);
}

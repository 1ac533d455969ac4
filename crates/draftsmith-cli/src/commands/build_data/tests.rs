//! Tests that labels from a target on servers equal those from its weights: exactly for greedy
//! decoding, and within the stated bound for sampling.

mod adapters;
mod server_access;

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use draftsmith_data::{DataSet, DraftColumns, Incomplete, ResponseRow, read_dir};
use draftsmith_decode::KnownResponse;
use draftsmith_theory::{DrafterId, Draws, SeededDraws};
use serde_json::Value;

use super::*;
use crate::commands::{build_data, record, replay, train_head, tune};
use crate::console::Console;
use crate::loopback::{self, Deed, Loopback};
use draftsmith_recipe::{Recipe, Workspace};
use draftsmith_tune::labels::Labels;

const SEED: u64 = 5;
/// The files of the target other than its weights.
const TEXT_SIDE: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];
/// The tolerance. Stored numbers are rounded, and a server's log-probabilities are f32.
const ROUNDING: f64 = 1e-4;

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name)
}

/// Builds a recipe with every stage that works without the target's weights. Outputs go to `dir`.
fn recipe(dir: &Path, name: &str, target: &Path, data: &str, of_head: &str) -> Recipe {
    let drafters = format!(
        "[drafters.draft]\nkind = 'model'\nmodel = '{}'\nmax_candidate_length = 6\n\
         [drafters.draft.head]\nnum_layers = 1\nform = 'look-ahead'\n{of_head}\n\
         optimizer = {{ num_epochs = 1, learning_rate = 1e-3, validation_fraction = 0.3 }}\n",
        model("draft").display()
    );
    of_drafters(dir, name, target, data, &drafters)
}

/// Builds a recipe with the given drafters, and writes its prompts.
fn of_drafters(dir: &Path, name: &str, target: &Path, data: &str, drafters: &str) -> Recipe {
    let prompts = model("../../data/tiny/prompts/train.jsonl");
    let lines = fs::read_to_string(prompts).expect("the embedded prompts are there");
    let lines: Vec<&str> = lines.lines().take(36).collect();
    let talk = r#"{"turns": ["What is 47 + 85?", "And twice that?"]}"#;
    fs::write(dir.join("train.jsonl"), format!("{}\n{talk}\n", lines.join("\n"))).expect("written");
    fs::write(dir.join("test.jsonl"), format!("{}\n{talk}\n", lines[3..7].join("\n")))
        .expect("written");
    let text = format!(
        "seed = {SEED}\n[models]\ntarget = '{}'\n{drafters}\n\
         [data]\nprompts = ['{train}']\nmax_new_tokens = 24\n{data}\n\
         [tune]\nnum_prompts = 6\nmax_candidate_length = 6\n[tune.costs]\ndraft_ms = 1\ntarget_ms = 4\n\
         [evaluate]\nprompts = ['{test}']\nmax_new_tokens = 24\n",
        target.display(),
        train = dir.join("train.jsonl").display(),
        test = dir.join("test.jsonl").display(),
    );
    let mut recipe: Recipe = toml::from_str(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    recipe.name = dir.join(name).display().to_string();
    recipe
}

fn workspace(recipe: &Recipe) -> Workspace {
    let (target, drafts) = (&recipe.models.target, recipe.drafters.models());
    let served_as = recipe.target_elsewhere().map(|server| &*server.model);
    let (devices, console) = (vec![Device::flex()], Console::silent());
    let workspace = Workspace::open(target, served_as, &drafts, None, devices, &console);
    let mut workspace = workspace.expect("local");
    workspace.models.layers_needed = recipe.layers_needed();
    workspace
}

/// Creates a directory with all files of the target except its weights.
fn without_weights(dir: &Path) -> PathBuf {
    let target = dir.join("target");
    fs::create_dir(&target).expect("created");
    for name in TEXT_SIDE {
        fs::copy(model("target").join(name), target.join(name)).expect("copied");
    }
    target
}

fn server(loopback: &Loopback, keys: &str) -> String {
    let url = &loopback.url;
    format!("responses = 'server'\n[data.server]\nurls = ['{url}']\nmodel = 'tiny'\n{keys}")
}

fn built(recipe: &Recipe) -> DataSet {
    build_data::run(
        StageJob::new(recipe, &workspace(recipe), &Console::silent()),
        DamagedShards::Refused,
    )
    .expect("built");
    read_dir(&recipe.data_dir(), Incomplete::Refused).expect("whole")
}

/// Runs all stages after build-data, and returns the results without paths.
fn found(recipe: &Recipe) -> (Vec<u8>, Value, Value) {
    let (workspace, console) = (workspace(recipe), Console::silent());
    train_head::run(StageJob::new(recipe, &workspace, &console), None).expect("trains");
    let head = fs::read(recipe.export_dir(DrafterId::DRAFT).join("head/model.safetensors"))
        .expect("a head");
    record::run(StageJob::new(recipe, &workspace, &console)).expect("records");
    let mut tuned = serde_json::to_value(
        tune::run(StageJob::new(recipe, &workspace, &console)).expect("tunes"),
    )
    .expect("JSON");
    for tuning in tuned.as_array_mut().expect("a list") {
        (tuning["export"], tuning["ways"]) = (Value::Null, Value::Null);
    }
    let replayed = replay::run(StageJob::new(recipe, &workspace, &console)).expect("replays");
    (head, tuned, serde_json::to_value(replayed).expect("JSON"))
}

#[test]
fn greedy_data_and_results_equal_those_from_the_weights() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|number, _| match number % 5 {
        2 => Deed::AnswerAsLlamaCpp,
        4 => Deed::Say(503, "", "busy"),
        _ => Deed::Answer,
    });
    for labels in ["overlap", "rollouts"] {
        let more = format!("labels = '{labels}'");
        let (greedy, name) = ("temperature = 0", |of: &str| format!("{of}-{labels}"));
        let data = format!("{greedy}\n{}", server(&loopback, ""));
        let mut served = recipe(dir.path(), &name("served"), &target, &data, &more);
        let mut own = recipe(dir.path(), &name("own"), &model("target"), greedy, &more);
        for recipe in [&mut served, &mut own] {
            let evaluate = recipe.evaluate.as_mut().expect("a section");
            evaluate.decodings.retain(|decoding| decoding.text() == "greedy");
        }
        let (found_served, found_own) = (built(&served), built(&own));
        let known = found_own.rows.into_iter().map(|mut row| {
            let draft = row.draft.as_mut().expect("there is a draft");
            draft.draft_target_cross_entropy = None;
            row
        });
        assert_eq!(found_served.rows, known.collect::<Vec<_>>());
        assert_eq!(found_served.provenance.served_model.as_deref(), Some("tiny"));
        assert_ne!(found_served.provenance.target, found_own.provenance.target);
        let (of_served, mut of_own) = (found(&served), found(&own));
        // A perfect head's ceiling needs the target's output after rejected candidates, which
        // servers do not give.
        for row in of_own.2["groups"].as_array_mut().expect("a list") {
            for row in row["rows"].as_array_mut().expect("a list") {
                (row["ceiling"], row["share_of_ceiling"]) = (Value::Null, Value::Null);
            }
        }
        assert!(of_served.0 == of_own.0, "{labels}: another head");
        assert_eq!(of_served.1, of_own.1, "{labels}");
        assert_eq!(of_served.2, of_own.2, "{labels}");
    }
}

/// Labels a row's response with the local weights and the same random draws.
fn labels_of_weights(recipe: &Recipe, row: &ResponseRow) -> (Vec<f32>, DraftColumns) {
    let drafts = [(DrafterId::DRAFT, &*model("draft"))];
    let pair = Workspace::new(&model("target"), &drafts, vec![Device::flex()]);
    let pair = pair.pair().expect("it is committed");
    let decoding = recipe.data.as_ref().expect("a section").decoding();
    let mut draws = SeededDraws::new(SEED, &[&row.id, "draft tokens"]);
    let known = KnownResponse { response: &row.response_ids, probs: None };
    let draw = |_: usize, q: &[f64]| draws.categorical(q);
    let labels = Labels::of(&pair.into(), &decoding, &row.prompt_ids, known, draw);
    let labels = labels.expect("it fits");
    (labels.response_target_log_prob, labels.draft.expect("there is a draft"))
}

#[test]
fn sampled_labels_are_within_the_unknown_mass_of_the_weights_labels() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|number, _| match number % 2 {
        0 => Deed::AnswerAsLlamaCpp,
        _ => Deed::Answer,
    });
    let samplings = [
        ("raw", ""),
        ("nucleus", "temperature = 0.8\ntop_p = 0.9\n"),
        ("hot", "temperature = 1.3\ntop_k = 8\n"),
    ];
    for (name, sampling) in samplings {
        let keys = "logprobs = 8\nmax_outside_mass = 0.2\n";
        let data = format!("{sampling}{}", server(&loopback, keys));
        let recipe = recipe(dir.path(), name, &target, &data, "");
        let built = built(&recipe);
        assert_eq!(built.provenance.served_log_probs, Some(8));
        let (mut num_outside, mut num_tokens) = (0, 0);
        for row in built.rows.iter().take(12) {
            let (log_probs, own) = labels_of_weights(&recipe, row);
            let masses = row.target_outside_mass.as_ref().expect("it is sampled");
            let draft = row.draft.as_ref().expect("there is a draft");
            assert_eq!(draft.draft_ids, own.draft_ids, "the draft runs locally");
            assert_eq!(draft.draft_target_cross_entropy, None);
            for (at, mass) in masses.iter().enumerate() {
                let within = |found: f32, own: f32, what: &str| {
                    let off = (f64::from(found).exp() - f64::from(own).exp()).abs();
                    assert!(
                        off <= f64::from(*mass) + ROUNDING,
                        "{name}, `{}` at {at}: {what} {found}, {own}, {mass}",
                        row.id
                    );
                };
                within(row.response_target_log_prob[at], log_probs[at], "log p(X)");
                within(draft.target_log_prob[at], own.target_log_prob[at], "log p(Y)");
                let off = f64::from((draft.overlap[at] - own.overlap[at]).abs());
                assert!(off <= f64::from(*mass) + ROUNDING, "{name}: overlap off by {off}");
                let is_same = draft.target_top_ids[at] == own.target_top_ids[at];
                assert!(is_same || *mass > 0.0, "{name}: the most probable is known");
                num_outside += usize::from(*mass > 1e-3);
                num_tokens += 1;
            }
        }
        assert!(num_tokens > 100, "{name}: {num_tokens}");
        assert_eq!(num_outside > 0, name != "hot", "{name}: {num_outside}");
    }
}

#[test]
fn rows_with_too_much_unknown_mass_are_left_out() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let num_rows = |name: &str, most: &str| {
        let data = server(&loopback, &format!("logprobs = 2\nmax_outside_mass = {most}\n"));
        let built = built(&recipe(dir.path(), name, &target, &data, ""));
        for row in &built.rows {
            let masses = row.target_outside_mass.as_ref().expect("it is sampled");
            let mean = masses.iter().sum::<f32>() / masses.len() as f32;
            assert!(mean <= most.parse::<f32>().expect("a number") + 1e-4, "{}: {mean}", row.id);
        }
        built.rows.len()
    };
    let (few, all) = (num_rows("few", "0.05"), num_rows("all", "1"));
    assert!(few < all, "{few} of {all}");
    assert_eq!(all, 38, "one row per assistant turn");
}

#[test]
fn data_of_which_every_response_is_left_out_is_an_error() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let data = server(&loopback, "logprobs = 2\nmax_outside_mass = 1e-9\n");
    let recipe = recipe(dir.path(), "none", &target, &data, "");
    let build = || {
        let built = build_data::run(
            StageJob::new(&recipe, &workspace(&recipe), &Console::silent()),
            DamagedShards::Refused,
        );
        built.expect_err("no row").to_string()
    };
    let error = build();
    let (_, percent) = error.split_once("because on average ").expect("the mass");
    let percent: f64 =
        percent.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
    assert!((1.0..99.0).contains(&percent), "{error}");
    let expected = [
        "has no row: 38 of 38 responses are left out, because on average ",
        "of their probability mass is outside the 2 log-probabilities that the servers return, and \
         `data.server.max_outside_mass` is 0.000000001; hint: raise `data.server.logprobs`",
        "delete the Parquet files there",
    ];
    expected.iter().for_each(|expected| assert!(error.contains(expected), "{error}"));
    assert!(build().contains("has no row; hint: delete the Parquet files"), "again");
}

#[test]
fn filtered_responses_and_the_turns_after_them_are_left_out() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    // The filter stops the conversation's first turn and one of the single-turn answers.
    let filter = |answer: &mut Value| {
        answer["choices"][0]["finish_reason"] = "content_filter".into();
    };
    let data_of = |loopback: &Loopback| server(loopback, "max_outside_mass = 1\n");
    let plain = loopback::serve(|_, _| Deed::Answer);
    let all = built(&recipe(dir.path(), "all", &target, &data_of(&plain), "")).rows;
    let talk = all.len() - 2;
    let dropped = [all[3].prompt_ids.clone(), all[talk].prompt_ids.clone()];
    let is_dropped = move |body: &Value| {
        let prompt = body["prompt"].as_array().expect("ids").iter();
        let prompt: Vec<u32> = prompt.map(|id| id.as_u64().expect("an id") as u32).collect();
        dropped.contains(&prompt)
    };
    let loopback = loopback::serve(move |_, request| match is_dropped(&request.body) {
        true => Deed::Change(filter),
        false => Deed::Answer,
    });
    let some = recipe(dir.path(), "some", &target, &data_of(&loopback), "");
    let kept = all.iter().enumerate().filter(|(at, _)| ![3, talk, talk + 1].contains(at));
    assert_eq!(built(&some).rows, kept.map(|(_, row)| row.clone()).collect::<Vec<_>>());
    // The test set also contains both prompts.
    let groups = found(&some).2["groups"].as_array().expect("a list").len();
    assert!(groups > 0, "the rest is recorded, tuned and replayed");
    let nothing = loopback::serve(move |_, _| Deed::Change(filter));
    let none = recipe(dir.path(), "all", &target, &data_of(&nothing), "");
    train_head::run(StageJob::new(&none, &workspace(&none), &Console::silent()), None)
        .expect("trains");
    let recorded = record::run(StageJob::new(&none, &workspace(&none), &Console::silent()));
    let error = recorded.expect_err("nothing to record").to_string();
    assert!(error.contains("all 6 responses are left out, because"), "{error}");
}

#[test]
fn tuned_speedups_barely_depend_on_the_number_of_log_probs() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let tuned = |name: &str, logprobs: usize| {
        let keys = format!("logprobs = {logprobs}\nmax_outside_mass = 1\n");
        let data = server(&loopback, &keys);
        let recipe = recipe(dir.path(), name, &target, &data, "labels = 'rollouts'");
        built(&recipe);
        found(&recipe).1
    };
    // The target has 1,024 tokens, and requests are limited to 1,000 log-probabilities.
    let (some, all) = (tuned("some", 20), tuned("all", 1000));
    let speedup = |tuning: &Value| -> f64 {
        let rules = tuning["rules"].as_array().expect("a list").iter();
        let best = rules.filter_map(|rule| rule["speedup"].as_f64()).reduce(f64::max);
        best.expect("there is a rule")
    };
    for (some, all) in some.as_array().expect("a list").iter().zip(all.as_array().expect("a list"))
    {
        let off = (speedup(some) / speedup(all) - 1.0).abs();
        assert!(off < 0.03, "{}: {} for {}", some["decoding"], speedup(some), speedup(all));
        assert_eq!(some["num_tokens"], all["num_tokens"]);
    }
}

#[test]
fn stages_that_need_weights_say_so() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = without_weights(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let mut recipe = recipe(dir.path(), "a", &target, &server(&loopback, ""), "");
    let error = workspace(&recipe).pair().expect_err("no weights").to_string();
    assert!(error.contains("has no weights, which this command needs; hint: "), "{error}");
    recipe.tune.as_mut().expect("a section").costs = None;
    built(&recipe);
    let console = Console::silent();
    train_head::run(StageJob::new(&recipe, &workspace(&recipe), &console), None).expect("trains");
    record::run(StageJob::new(&recipe, &workspace(&recipe), &console)).expect("records");
    let error =
        tune::run(StageJob::new(&recipe, &workspace(&recipe), &console)).expect_err("no costs");
    assert!(error.to_string().contains("`[tune.costs]` `draft_ms` and `target_ms`"), "{error}");
}

//! The complete pipeline, and interrupted jobs.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::doctor::{edit_config, edit_tensors};
use crate::support::{Place, model, send_signal, wait};

/// The bytes of every Parquet shard, by file name.
fn shards(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let names = place.names("data/small");
    let shards = names.into_iter().filter(|name| name.ends_with(".parquet"));
    shards
        .map(|name| {
            let bytes = std::fs::read(place.path("data/small").join(&name)).unwrap();
            (name, bytes)
        })
        .collect()
}

/// Adds rows of unused ids to a copy of an embedded model, each twice as long as a token's row, so that they
/// would be the most probable ones.
fn copy_with_padding(place: &Place, from: &str, num_rows: usize) -> PathBuf {
    let dir = place.copy_model(from, &format!("padded-{from}"));
    edit_tensors(&dir, |tensors| {
        let embedding = &mut tensors.header["model.embed_tokens.weight"];
        let at = |at: usize| embedding["data_offsets"][at].as_u64().unwrap() as usize;
        let mut rows = tensors.bytes[at(0)..at(1)].to_vec();
        let [num, width] = [0, 1].map(|at| embedding["shape"][at].as_u64().unwrap() as usize);
        for place in 0..num_rows * width {
            // A bf16 number with the next exponent is twice as large.
            let bits = u16::from_le_bytes([rows[2 * place], rows[2 * place + 1]]);
            let doubled = if bits & 0x7fff == 0 { bits } else { bits + 0x80 };
            rows.extend(doubled.to_le_bytes());
        }
        embedding["shape"] = json!([num + num_rows, width]);
        let start = tensors.bytes.len();
        embedding["data_offsets"] = json!([start, start + rows.len()]);
        tensors.bytes.extend(rows);
    });
    edit_config(&dir, |config| config["vocab_size"] = json!(1024 + num_rows));
    dir
}

#[test]
fn a_draft_or_a_target_with_more_padding_counts_as_the_one_without() {
    let place = Place::new();
    let recipe = std::fs::read_to_string(place.write_small_recipe()).unwrap();
    let draft = model("draft").display().to_string();
    let padded = copy_with_padding(&place, "draft", 128).display().to_string();
    place.write("small.toml", recipe.replace(&draft, &padded));
    // The whole road: data, a head, its rules, recordings, decoding.
    place.run(&["run", "small.toml"]).ok();
    let (models, evaluate) = recipe.split_once("[data]").unwrap();
    let (_, evaluate) = evaluate.split_once("[evaluate]").unwrap();
    let evaluate = evaluate.split_once("rules.head").unwrap().0;
    place.write("plain.toml", format!("{models}[evaluate]{evaluate}"));
    place.run(&["evaluate", "plain.toml"]).ok();
    let counts = |recipe: &str| -> Vec<Vec<Value>> {
        let rows = place.results(recipe).into_iter();
        let rows = rows.filter(|row| row["stop_rule"] != "rejection_threshold");
        let keys = ["decoding", "setting", "num_tokens", "num_drafted", "num_accepted"];
        rows.map(|row| keys.map(|key| row[key].clone()).to_vec()).collect()
    };
    assert_eq!(counts("small").len(), 2 * 3);
    assert_eq!(counts("small"), counts("plain"));

    // A target with ids that its draft lacks, some of which it gives.
    let target = copy_with_padding(&place, "target", 64).display().to_string();
    place.write("wider.toml", recipe.replace(&model("target").display().to_string(), &target));
    place.run(&["run", "wider.toml"]).ok();
    assert!(place.results("wider").len() == 2 * 4);
}

#[test]
fn the_pipeline_turns_prompts_into_a_report() {
    let place = Place::new();
    place.write_small_recipe();
    let ran = place.run(&["run", "small.toml"]);
    let stdout = ran.ok();
    assert!(stdout.contains("K = 4") && stdout.contains("head 0.5"), "{stdout}");
    assert!(stdout.contains("report: checkpoints/small/evaluation/report.html"), "{stdout}");

    let evaluation = place.path("checkpoints/small/evaluation");
    // Plain decoding, two fixed lengths and one threshold, greedy and sampled.
    assert_eq!(place.results("small").len(), 2 * 4);
    let html = std::fs::read_to_string(evaluation.join("report.html")).unwrap();
    assert!(html.starts_with("<!doctype html>") || html.starts_with("<!DOCTYPE html>"));
    // The page needs no other file: it has no address and no script.
    for outside in ["://", "src=", "url(", "@import", "<script", "<iframe"] {
        assert!(!html.contains(outside), "`{outside}` is in the report");
    }
    let links = html.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    for link in links {
        assert!(link.starts_with('#') || link.starts_with("data:"), "`{link}` leaves the page");
    }
    assert_eq!(place.names("checkpoints/small/evaluation/answers/test").len(), 8);

    // A second run builds and trains nothing.
    let before = shards(&place);
    let head = std::fs::read(place.path("checkpoints/small/draft/head/model.safetensors")).unwrap();
    let again = place.run(&["run", "small.toml", "--json"]).json();
    assert_eq!(again["build_data"]["num_shards_kept"], again["build_data"]["num_shards"]);
    assert_eq!(again["build_data"]["num_new_tokens"], 0);
    assert_eq!(again["train_head"]["kept"], true);
    assert_eq!(shards(&place), before);
    assert_eq!(
        std::fs::read(place.path("checkpoints/small/draft/head/model.safetensors")).unwrap(),
        head
    );

    // The results can be inspected.
    for (path, kind) in
        [("checkpoints/small/draft/head", "acceptance head"), ("data/small", "responses")]
    {
        let shown = place.run(&["inspect", path, "--json"]).json();
        assert_eq!(shown["kind"], kind);
        assert!(place.run(&["inspect", path]).ok().contains("hash"));
    }
    let table = place.run(&["inspect", "checkpoints/small/evaluation/results.json"]).ok();
    assert!(table.contains("K = 4"), "{table}");

    // Data of other settings is refused.
    place.run(&["build-data", "small.toml", "--set", "data.temperature=0.5"]).fails_naming(&[
        "temperature",
        "data/small",
        "delete",
    ]);
}

#[test]
fn missing_shards_are_built_again_with_the_same_bytes() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let whole = shards(&place);
    assert_eq!(whole.len(), 3, "70 prompts make 3 shards");
    std::fs::remove_file(place.path("data/small/responses-00001.parquet")).unwrap();
    let built = place.run(&["build-data", "small.toml", "--json"]).json();
    assert_eq!(built["num_shards_kept"], 2);
    assert_eq!(shards(&place), whole);

    // Order and threads change nothing either.
    for name in whole.keys() {
        std::fs::remove_file(place.path("data/small").join(name)).unwrap();
    }
    let one_thread = place
        .command(&["build-data", "small.toml"])
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    assert!(one_thread.status.success());
    assert_eq!(shards(&place), whole);
}

/// Waits for `path` to appear, at most a minute.
fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "`{}` did not come", path.display());
        std::thread::yield_now();
    }
}

#[test]
fn a_killed_job_leaves_whole_shards_and_resumes_to_the_same_bytes() {
    let place = Place::new();
    place.write_small_recipe();
    let mut child = place.command(&["build-data", "small.toml", "--quiet"]).spawn().unwrap();
    wait_for(&place.path("data/small/responses-00000.parquet"));
    child.kill().unwrap();
    child.wait().unwrap();
    let left = shards(&place);
    place.run(&["build-data", "small.toml"]).ok();
    let whole = shards(&place);
    for (name, bytes) in &left {
        assert_eq!(&whole[name], bytes, "what was there is kept");
    }
    let untouched = Place::new();
    untouched.write_small_recipe();
    untouched.run(&["build-data", "small.toml"]).ok();
    assert_eq!(shards(&untouched), whole);
}

#[cfg(unix)]
#[test]
fn an_interrupted_evaluation_keeps_complete_prompts_separately() {
    let place = Place::new();
    place.write_small_recipe();
    place.write_prompts("test.jsonl", 1000);
    let settings = [
        "evaluate.rules.fixed=[1, 2, 3, 4, 5, 6, 7]",
        "evaluate.rules.head=[]",
        "evaluate.decodings=['greedy']",
    ];
    let text = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let (before, rest) = text.split_once("[data]").unwrap();
    let evaluate = rest.split_once("[evaluate]").unwrap().1;
    place.write("small.toml", format!("{before}[evaluate]{evaluate}"));
    let mut arguments = vec!["evaluate", "small.toml"];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    let partial = place.path("checkpoints/small/evaluation-partial");
    // The time of the first prompt is unknown. A stop before its end leaves nothing, and is tried again
    // with a longer wait.
    for millis in [1, 50, 200, 800, 3_200] {
        let mut child =
            place.command(&arguments).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(
            lines.any(|line| line.unwrap().starts_with("evaluate: ")),
            "it tells when it begins"
        );
        wait(Duration::from_millis(millis));
        send_signal(&child, "INT");
        assert!(lines.any(|line| line.unwrap().contains("stopping after the current step")));
        // It counts what it did, not all 8,000 runs, and judges no promise by it.
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        assert!(
            rest.iter().any(|line| line.starts_with("evaluate: ") && line.contains(" in ")),
            "{rest:?}"
        );
        assert!(!rest.iter().any(|line| line.contains("evaluate: 8000 runs")), "{rest:?}");
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert!(place.names("checkpoints/small/evaluation").is_empty());
        if partial.exists() {
            break;
        }
    }
    let rows = place.json("checkpoints/small/evaluation-partial/results.json");
    let counts: Vec<u64> = rows
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["category"] == "all")
        .map(|row| row["num_prompts"].as_u64().unwrap())
        .collect();
    assert_eq!(counts.len(), 8, "plain decoding and seven lengths: {rows:?}");
    assert!(counts.iter().all(|n| *n == counts[0] && (1..1000).contains(n)), "{counts:?}");
}

#[cfg(unix)]
#[test]
fn a_killed_evaluation_continues_with_the_next_measurement() {
    let place = Place::new();
    place.write_small_recipe();
    place.write_prompts("test.jsonl", 250);
    let text = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let (before, rest) = text.split_once("[data]").unwrap();
    let evaluate = rest.split_once("[evaluate]").unwrap().1.replace("[0.5]", "[]");
    place.write("small.toml", format!("{before}[evaluate]{evaluate}"));
    let journal = place.path("checkpoints/small/evaluation-runs.jsonl");
    let lines = || std::fs::read_to_string(&journal).unwrap_or_default().lines().count();
    let mut child = place.command(&["evaluate", "small.toml"]).spawn().unwrap();
    while lines() < 20 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it was killed");
        wait(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The last line is cut short, as by a crash.
    let text = std::fs::read_to_string(&journal).unwrap();
    let num_whole = text.lines().count() - 2;
    std::fs::write(&journal, &text[..text.trim_end().len() - 9]).unwrap();
    let ran = place.run(&["evaluate", "small.toml"]);
    let kept = ran.stderr.lines().find(|line| line.contains("of an earlier run are kept")).unwrap();
    let num_kept: usize = kept.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((num_whole - 1..=num_whole).contains(&num_kept), "{kept}: {num_whole}");
    let rows = place.results("small");
    assert!(rows.iter().all(|row| row["num_prompts"] == 250), "{rows:?}");
    assert!(!journal.exists());
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_cleanly_and_keeps_finished_work() {
    let place = Place::new();
    place.write_small_recipe();
    place.write_prompts("train.jsonl", 350);
    let child = place
        .command(&["build-data", "small.toml"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(&place.path("data/small/responses-00000.parquet"));
    send_signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("run the same command again"), "{stderr}");
    for name in place.names("data/small") {
        assert!(!name.contains("tmp"), "`{name}` is half-written");
    }
    place.run(&["inspect", "data/small"]).ok();
}

#[test]
fn batched_prompts_get_the_same_answers_as_single_ones() {
    let place = Place::new();
    place.write_small_recipe();
    place.write_prompts("test.jsonl", 5);
    for stage in ["build-data", "train-head"] {
        place.run(&[stage, "small.toml"]).ok();
    }
    let counted = |batch_size: &str| {
        let batch_size = format!("evaluate.batch_size={batch_size}");
        place.run(&["evaluate", "small.toml", "--set", &batch_size]).ok();
        let counts = |row: Value| {
            let names = ["decoding", "drafter", "stop_rule", "setting", "num_tokens", "lossless"];
            let more = ["num_target_forwards", "num_draft_forwards", "num_drafted", "num_accepted"];
            names.iter().chain(&more).map(|name| row[*name].clone()).collect::<Vec<Value>>()
        };
        place.results("small").into_iter().map(counts).collect::<Vec<_>>()
    };
    let alone = counted("1");
    // Two batches of two, then one prompt.
    assert_eq!(counted("2"), alone);
    assert_eq!(counted("9"), alone);
    let summary = place.json("checkpoints/small/evaluation/summary.json");
    assert_eq!(summary["batch_size"], 9);
    for row in place.results("small") {
        let (speedup, ends) = (&row["speedup"], &row["speedup_interval"]);
        assert_eq!(ends.is_null(), row["drafter"] == "none", "{row}");
        if let Some([low, high]) = ends.as_array().map(|ends| [&ends[0], &ends[1]]) {
            let [low, value, high] = [low, speedup, high].map(|it| it.as_f64().unwrap());
            assert!(low <= value && value <= high, "{row}");
        }
    }
    place
        .run(&["evaluate", "small.toml", "--set", "evaluate.batch_size=0"])
        .fails_naming(&["evaluate.batch_size", "is outside 1 to 1024"]);
}

//! Rollouts are recorded once and again only when their inputs change.

use std::collections::BTreeMap;

use crate::support::{Place, model, send_signal};

/// A directory with the small recipe and a section `[tune]`.
fn place() -> Place {
    let place = Place::new();
    let path = place.write_small_recipe();
    // The rollouts' length.
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("kind = 'model'\n", "kind = 'model'\nmax_candidate_length = 6\n");
    let tune = "[tune]\nmax_candidate_length = 6\nnum_prompts = 5\n";
    std::fs::write(&path, text + tune).unwrap();
    place
}

/// [`place`] with built data and a trained head.
fn trained() -> Place {
    let place = place();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    place
}

fn rollouts(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let names = place.names("data/small").into_iter().filter(|name| name.starts_with("rollouts-"));
    names
        .map(|name| {
            let bytes = std::fs::read(place.path("data/small").join(&name)).unwrap();
            (name, bytes)
        })
        .collect()
}

const NAMES: [&str; 4] = [
    "rollouts-draft-test-greedy.parquet",
    "rollouts-draft-test-sampled.parquet",
    "rollouts-draft-validation-greedy.parquet",
    "rollouts-draft-validation-sampled.parquet",
];

#[test]
fn rollouts_are_recorded_once_and_again_when_they_are_stale() {
    let place = trained();
    let shown = place.run(&["record", "small.toml"]).ok();
    assert!(shown.contains("rollouts-draft-test-greedy.parquet: 3 responses, "), "{shown}");
    let whole = rollouts(&place);
    assert_eq!(whole.keys().map(String::as_str).collect::<Vec<_>>(), NAMES);

    let again = place.run(&["record", "small.toml", "--json"]).json();
    let files = again.as_array().unwrap();
    assert_eq!(files.len(), 4);
    for file in files {
        assert_eq!((&file["kept"], &file["drafter"]), (&true.into(), &"draft".into()));
        let expected = if file["set"] == "test" { 3 } else { 5 };
        assert_eq!(file["num_responses"], expected, "{file}");
        assert!(file["share_accepted"].as_f64().unwrap() > 0.2, "{file}");
    }
    assert_eq!(rollouts(&place), whole);

    // A missing or corrupt file is recorded again with the same bytes, on any number of threads.
    std::fs::remove_file(place.path("data/small").join(NAMES[1])).unwrap();
    place.write(&format!("data/small/{}", NAMES[3]), &whole[NAMES[3]][..100]);
    let mut command = place.command(&["record", "small.toml"]);
    let output = command.env("RAYON_NUM_THREADS", "1").output().unwrap();
    assert!(output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("not a whole Parquet file") && stderr.contains("again"), "{stderr}");
    assert_eq!(rollouts(&place), whole);

    // Changed settings: affected files are recorded again, and a note gives the reason.
    let other = ["record", "small.toml", "--set", "evaluate.temperature=0.7"];
    let ran = place.run(&other);
    assert!(ran.stderr.contains("`temperature` = 1.0, which is 0.7 now"), "{}", ran.stderr);
    ran.ok();
    let changed = rollouts(&place);
    let differ: Vec<bool> = NAMES.iter().map(|name| changed[*name] != whole[*name]).collect();
    assert_eq!(differ, [false, true, false, true]);
    place.run(&["record", "small.toml"]).ok();
    assert_eq!(rollouts(&place), whole);
}

#[test]
fn inspect_explains_rollouts() {
    let place = trained();
    place.run(&["record", "small.toml"]).ok();
    let path = format!("data/small/{}", NAMES[2]);
    let shown = place.run(&["inspect", &path, "--json"]).json();
    for (key, value) in
        [("kind", "rollouts"), ("drafter", "draft"), ("set", "validation"), ("decoding", "greedy")]
    {
        assert_eq!(shown[key], value);
    }
    assert_eq!(shown["num_responses"], 5);
    assert!(shown["mean_rollout_length"].as_f64().unwrap() >= 1.0, "{shown}");
    let provenance = &shown["provenance"];
    assert_eq!((&provenance["max_length"], &provenance["limit"]), (&6.into(), &5.into()));
    assert!(provenance["head"]["hash"].is_string() && provenance["draft"].is_string());
    assert!(place.run(&["inspect", &path]).ok().contains("share_accepted"));

    let shown = place.run(&["inspect", "data/small", "--json"]).json();
    assert_eq!(shown["kind"], "responses");
    assert_eq!(shown["rollouts"].as_object().unwrap().len(), 4);
    assert_eq!(shown["rollouts"][NAMES[0]]["num_responses"], 3);
    assert!(place.run(&["inspect", "data/small"]).ok().contains(NAMES[3]));

    let bands = shown["by_entropy"].as_array().unwrap();
    let num_positions: u64 = bands.iter().map(|band| band["num_positions"].as_u64().unwrap()).sum();
    assert_eq!(shown["num_response_tokens"], num_positions);
    for band in bands {
        let (bound, overlap) = (&band["overlap_bound"], &band["mean_overlap"]);
        // Both are means of f32 values.
        assert!(bound.as_f64().unwrap() <= overlap.as_f64().unwrap() + 1e-4, "{band}");
    }
    let first = shown["expected_tokens"][0]["tokens_per_round"].as_f64().unwrap();
    assert!((first - 1.0 - shown["mean_overlap"].as_f64().unwrap()).abs() < 1e-12, "{first}");

    // The kind of file does not depend on its name.
    let bytes = std::fs::read(place.path(&path)).unwrap();
    place.write("other.parquet", &bytes);
    assert_eq!(place.run(&["inspect", "other.parquet", "--json"]).json()["kind"], "rollouts");
    place.write("rollouts-x.parquet", &bytes[..bytes.len() - 20]);
    place.run(&["inspect", "rollouts-x.parquet"]).fails_naming(&["rollouts-x.parquet", "whole"]);
}

#[test]
fn separate_tuning_prompts_need_no_data_and_no_head() {
    let place = Place::new();
    place.write_prompts("choose.jsonl", 4);
    place.write_prompts("test.jsonl", 2);
    let text = format!(
        "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n[tune]\nprompts = ['choose.jsonl']\nmax_candidate_length = 3\n\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 10\ndecodings = ['greedy']\n",
        model("target").display(),
        model("draft").display()
    );
    place.write("own.toml", text);
    let files = place.run(&["record", "own.toml", "--json"]).json();
    assert_eq!((&files[0]["num_responses"], &files[1]["num_responses"]), (&4.into(), &2.into()));
    assert_eq!(place.names("data/own").len(), 2);
    let shown = place.run(&["inspect", "data/own", "--json"]).json();
    assert_eq!(shown["kind"], "rollouts");
    let file = place.run(&["inspect", "data/own/rollouts-draft-test-greedy.parquet", "--json"]);
    assert!(file.json()["provenance"]["head"].is_null());

    let set = |key: &str| place.run(&["record", "own.toml", "--set", key]);
    set("tune.prompts=['absent.jsonl']").fails_naming(&["absent.jsonl"]);
    set("tune.prompts=[]").fails_naming(&["tune.prompts"]);
    set("tune.max_candidate_length=0").fails_naming(&["tune.max_candidate_length"]);
    set("tune.num_prompts=0").fails_naming(&["tune.num_prompts"]);
    set("tune.lengths=3").fails_naming(&["lengths"]);
    let long = "many words ".repeat(2000);
    place.write("long.jsonl", format!("{{\"prompt\": \"{long}\"}}\n"));
    set("tune.prompts=['long.jsonl']").fails_naming(&["long#0", "context"]);
    assert_eq!(place.names("data/own").len(), 2, "what is there is kept");
}

#[test]
fn missing_inputs_of_record_are_named() {
    let place = place();
    place.run(&["record", "small.toml"]).fails_naming(&["data/small", "build-data"]);
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["record", "small.toml"]).fails_naming(&["small/draft/head", "train-head"]);
    let head = |value: &str| format!("evaluate.head='{value}'");
    let none =
        ["record", "small.toml", "--set", "drafters.draft.head.optimizer.validation_fraction=1e-9"];
    place.run(&["train-head", "small.toml"]).ok();
    place.run(&none).fails_naming(&["held out none", "tune.prompts"]);
    place.run(&["record", "small.toml", "--set", &head("nowhere")]).fails_naming(&["nowhere"]);
    assert!(rollouts(&place).is_empty());

    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let without = recipe.replace("[tune]\nmax_candidate_length = 6\nnum_prompts = 5\n", "");
    place.write("untuned.toml", without);
    place.run(&["record", "untuned.toml"]).fails_naming(&["[tune]"]);
    let evaluate = recipe.find("[evaluate]").unwrap()..recipe.find("[tune]").unwrap();
    let mut without = recipe.clone();
    without.replace_range(evaluate, "");
    place.write("unevaluated.toml", without);
    place.run(&["record", "unevaluated.toml"]).fails_naming(&["[evaluate]"]);
    let drafters = recipe.find("[drafters.draft]").unwrap()..recipe.find("[data]").unwrap();
    let mut without = recipe.clone();
    without.replace_range(drafters, "");
    let head = without.find("[drafters.draft.head]").unwrap()..without.find("[evaluate]").unwrap();
    without.replace_range(head, "");
    place.write("small.toml", without);
    place.run(&["record", "small.toml"]).fails_naming(&["no drafter", "[drafters.NAME]"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_whole_files() {
    let place = trained();
    place.write_prompts("test.jsonl", 300);
    let mut child = place
        .command(&["record", "small.toml"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let first = place.path("data/small").join(NAMES[2]);
    let begun = std::time::Instant::now();
    while !first.exists() {
        assert!(begun.elapsed().as_secs() < 60, "nothing was recorded");
        assert!(child.try_wait().unwrap().is_none() || first.exists(), "it went on");
        std::thread::yield_now();
    }
    send_signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("run the same command again"), "{stderr}");
    for name in place.names("data/small") {
        assert!(!name.contains("tmp"), "`{name}` is half-written");
    }
    let left = rollouts(&place);
    assert!((1..4).contains(&left.len()), "{:?}", left.keys());
    // Only the missing files are recorded.
    place.write_prompts("test.jsonl", 3);
    place.run(&["record", "small.toml"]).ok();
    let whole = rollouts(&place);
    assert_eq!(whole.len(), 4);
    assert_eq!(whole[NAMES[2]], left[NAMES[2]]);
}

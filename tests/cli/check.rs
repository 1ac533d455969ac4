//! `check`: a good export passes, a broken promise is reported, and random weights never change the output.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Place, model};

const HEAD: &str = "checkpoints/small/draft/head";
const ADAPTER: &str = "checkpoints/small/adapter";

/// A directory with a briefly trained head.
fn head_place() -> Place {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    place
}

/// Edits a JSON file.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, serde_json::to_string_pretty(&value).unwrap()).unwrap();
}

/// A tuned rule with a promised acceptance rate.
fn tuned(drafter: &str, temperature: f64, [value, low, high]: [f64; 3]) -> Value {
    json!({
        "drafter": drafter,
        "config": { "stop_rule": "fixed_length", "candidate_length": 3 },
        "temperature": temperature,
        "top_p": 1.0,
        "expected_gain": { "value": 0.25, "low": 0.0, "high": 0.5 },
        "expected_acceptance_rate": { "value": value, "low": low, "high": high },
        "best_fixed_length": 3,
        "costs": { "draft_seconds": 0.1, "target_seconds": 1.0, "row_seconds": 0.0 },
        "num_prompts": 40,
    })
}

/// A promise that every rate fulfils.
const WIDE: [f64; 3] = [0.5, 0.0, 1.0];
/// A promise that every drafter breaks: more than all candidates.
const BROKEN: [f64; 3] = [2.0, 1.95, 2.05];
/// A promise that every drafter exceeds.
const EXCEEDED: [f64; 3] = [0.001, 0.0005, 0.0015];

/// Replaces all weights, f32 or bf16, by noise of the same scale.
fn make_noise(dir: &Path) {
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut state = 1_u32;
    let is_bf16 = String::from_utf8_lossy(&bytes[8..header]).contains("BF16");
    // A bf16 is the upper half of an f32.
    let lower = if is_bf16 { 2 } else { 0 };
    for weight in bytes[header..].chunks_exact_mut(4 - lower) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let noise = f32::from((state >> 16) as u16) / 65_536.0 - 0.5;
        weight.copy_from_slice(&(noise * 0.4).to_le_bytes()[lower..]);
    }
    std::fs::write(path, bytes).unwrap();
    // The old checksum would be an error.
    edit(&dir.join("config.json"), |config| {
        drop(config.as_object_mut().unwrap().remove("weights_hash"))
    });
}

#[test]
fn a_good_head_passes_and_a_broken_promise_is_reported() {
    let place = head_place();
    let stdout = place.run(&["check", "--allow-slower", HEAD]).ok();
    for text in ["acceptance head, passed", "head 0.7, default", "nothing promised", "pass"] {
        assert!(stdout.contains(text), "`{text}` is not in: {stdout}");
    }
    let check_two = || {
        let two = ["check", "--allow-slower", HEAD, "--json", "--num-prompts", "2"];
        let mut checked = place.run(&two).json();
        let speed = checked.as_object_mut().unwrap().remove("speed").unwrap();
        assert!(speed["speedup"]["value"].as_f64() > Some(0.0), "{speed}");
        let serving = checked.as_object_mut().unwrap().remove("serving").unwrap();
        assert_eq!(serving[0]["speedup"], speed["speedup"], "{serving}");
        checked
    };
    let checked = check_two();
    assert_eq!((&checked["passed"], &checked["error"]), (&json!(true), &Value::Null));
    assert_eq!((&checked["num_prompts"], &checked["drafter"]), (&json!(2), &json!("draft")));
    assert_eq!(checked["greedy"]["output"]["differences"], json!([]));
    assert!(checked["sampled"]["output"]["p_value"].as_f64() >= Some(1e-4));
    assert!(checked["greedy"]["acceptance"]["holds"].is_null());
    assert_eq!(check_two(), checked, "the same seed draws the same");

    let config = place.path(HEAD).join("config.json");
    let set = |greedy, sampled| {
        edit(&config, |config| {
            config["tuned"] = json!({ "greedy": tuned("draft", 0.0, greedy), "sampled": tuned("draft", 0.8, sampled) });
        });
    };
    set(WIDE, WIDE);
    let stdout = place.run(&["check", "--allow-slower", HEAD]).ok();
    for text in ["K = 3, tuned", "T = 0.8", "0.500 (0.000..1.000)"] {
        assert!(stdout.contains(text), "`{text}` is not in: {stdout}");
    }
    place.run(&["inspect", HEAD]).ok();

    set(EXCEEDED, EXCEEDED);
    place.run(&["check", "--allow-slower", HEAD]).ok();

    set(WIDE, BROKEN);
    let failed = place.run(&["check", "--allow-slower", HEAD]);
    assert_eq!(failed.code, Some(1));
    assert!(failed.stdout.contains("failed") && failed.stdout.contains("FAIL"), "{failed:?}");
    failed.fails_naming(&[HEAD, "sampled acceptance", "expected_acceptance_rate", "hint"]);
    set(BROKEN, WIDE);
    let failed = place.run(&["check", "--allow-slower", HEAD, "--json"]);
    let document: Value = serde_json::from_str(&failed.stdout).unwrap();
    assert_eq!(document["passed"], false);
    assert_eq!(document["greedy"]["acceptance"]["holds"], false);
    assert_eq!(document["sampled"]["acceptance"]["holds"], true);
    assert!(document["error"].as_str().unwrap().contains("greedy acceptance"));
    failed.fails_naming(&["greedy acceptance"]);
}

/// The drafter is as large as the target, proposes sixteen tokens a round, and is never right: some seventeen times
/// slower than the target alone, so that the verdict is sure on a busy machine too.
#[test]
fn an_export_that_slows_decoding_down_fails_unless_that_is_allowed() {
    let place = head_place();
    make_noise(&place.copy_model("target", "noise"));
    let draft = ["--set", "name=own", "--set", "drafters.draft.model='noise'"];
    place.run(&[&["build-data", "small.toml"], &draft[..]].concat()).ok();
    place.run(&[&["train-head", "small.toml"], &draft[..]].concat()).ok();
    let head = "checkpoints/own/draft/head";
    edit(&place.path(head).join("config.json"), |config| {
        let mut rule = tuned("draft", 0.0, WIDE);
        rule["config"]["candidate_length"] = json!(16);
        config["tuned"] = json!({ "greedy": rule });
    });
    let prompts = ["--prompts", "train.jsonl", "--num-prompts", "6"];
    let checking = |more: &[&str]| place.run(&[&["check", head], &prompts[..], more].concat());
    let ran = checking(&["--json"]);
    let speed = serde_json::from_str::<Value>(&ran.stdout).unwrap()["speed"].clone();
    assert!(speed["speedup"]["high"].as_f64() < Some(1.0), "{speed}");
    // On a busy machine it is not known.
    if speed["foreign_load"].as_f64() > Some(0.1) {
        assert_eq!((ran.code, &speed["holds"]), (Some(0), &Value::Null), "{}", ran.stderr);
    } else {
        ran.fails_naming(&["greedy decoding runs at 0.", "--allow-slower"]);
    }
    let shown = checking(&["--allow-slower"]).ok();
    assert!(shown.contains("greedy speed"), "{shown}");
}

#[test]
fn random_weights_change_rounds_but_never_the_output() {
    let place = head_place();
    make_noise(&place.path(HEAD));
    let checked = place.run(&["check", "--allow-slower", HEAD, "--json"]).json();
    assert_eq!(checked["greedy"]["output"]["holds"], true);

    place
        .run(&[
            "train-adapter",
            "small.toml",
            "--set",
            "drafters.adapter.kind=adapter",
            "--set",
            "drafters.adapter.exit_layer=2",
            "--set",
            "drafters.adapter.optimizer.num_epochs=1",
        ])
        .ok();
    let trained = place.run(&["check", "--allow-slower", ADAPTER, "--json"]).json();
    make_noise(&place.path(ADAPTER));
    let noisy = place.run(&["check", "--allow-slower", ADAPTER, "--json"]).json();
    for checked in [&trained, &noisy] {
        assert_eq!(checked["drafter"], "adapter");
        assert_eq!(checked["passed"], true);
        assert_eq!(checked["greedy"]["num_tokens"], trained["greedy"]["num_tokens"]);
    }
    let stdout = place.run(&["check", "--allow-slower", ADAPTER]).ok();
    assert!(stdout.contains("self-draft adapter, passed") && stdout.contains("K = 5"), "{stdout}");

    // A rule for another drafter.
    edit(&place.path(ADAPTER).join("config.json"), |config| {
        config["tuned"] = json!({ "greedy": tuned("exit3", 0.0, WIDE), "sampled": null });
    });
    place.run(&["check", "--allow-slower", ADAPTER]).fails_naming(&[
        "config.json",
        "exit3",
        "adapter",
    ]);
}

#[test]
fn missing_invalid_and_foreign_files_are_named() {
    let place = head_place();
    place.run(&["check", "absent"]).fails_naming(&["absent", "config.json", "train-head"]);
    place.run(&["check", &model("draft").display().to_string()]).fails_naming(&["num_layers"]);
    place
        .run(&["check", "--allow-slower", HEAD, "--num-prompts", "0"])
        .fails_naming(&["--num-prompts"]);
    place
        .run(&["check", "--allow-slower", HEAD, "--prompts", "absent.jsonl"])
        .fails_naming(&["absent.jsonl"]);

    // The recipe of the export, and one without prompts.
    let beside = place.path(HEAD).join("recipe.toml");
    let recipe = std::fs::read_to_string(&beside).unwrap();
    std::fs::remove_file(&beside).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&["head/recipe.toml", "--recipe"]);
    place.run(&["check", "--allow-slower", HEAD, "--recipe", "small.toml"]).ok();
    let without_prompts = &recipe[..recipe.find("[evaluate]").unwrap()];
    std::fs::write(&beside, without_prompts).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&["[evaluate]", "--prompts"]);
    place.run(&["check", "--allow-slower", HEAD, "--prompts", "test.jsonl"]).ok();

    // A draft of another width, one of the same width, and another target.
    let own = model("draft").display().to_string();
    let other = place.copy_model("draft", "other-draft");
    let text = std::fs::read_to_string(other.join("config.json")).unwrap();
    std::fs::write(other.join("config.json"), format!("{text}\n")).unwrap();
    std::fs::write(&beside, recipe.replace(&own, "other-draft")).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&[HEAD, "another draft"]);
    let target = model("target").display().to_string();
    std::fs::write(&beside, recipe.replace(&own, &target)).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&["hidden_size"]);
    let other = place.copy_model("target", "other-target");
    let text = std::fs::read_to_string(other.join("config.json")).unwrap();
    std::fs::write(other.join("config.json"), format!("{text}\n")).unwrap();
    std::fs::write(&beside, recipe.replace(&target, "other-target")).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&[HEAD, "another target"]);
    let without = &recipe[..recipe.find("[drafters.draft]").unwrap()];
    std::fs::write(&beside, without).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&["0 drafters", "[drafters.NAME]"]);
    std::fs::write(&beside, &recipe).unwrap();

    // Invalid tuned rules.
    let config = place.path(HEAD).join("config.json");
    let good = tuned("draft", 0.0, WIDE);
    for (spoilt, named) in [
        (json!({ "greedy": good, "sample": null }), "`tuned.sample`"),
        (json!({ "greedy": null, "sampled": good }), "sampled.temperature"),
        (json!({ "greedy": tuned("draft", 0.0, [0.5, 0.6, 0.7]) }), "expected_acceptance_rate"),
        (json!({ "greedy": tuned("drafts", 0.0, WIDE) }), "`drafts`"),
        (json!({ "greedy": tuned("adapter", 0.0, WIDE) }), "adapter"),
    ] {
        edit(&config, |config| config["tuned"] = spoilt);
        place.run(&["check", "--allow-slower", HEAD]).fails_naming(&[
            "config.json",
            "tuned",
            named,
        ]);
    }
    let weights = place.path(HEAD).join("model.safetensors");
    edit(&config, |config| config["tuned"] = json!({ "greedy": good }));
    place.run(&["check", "--allow-slower", HEAD]).ok();
    std::fs::remove_file(weights).unwrap();
    place.run(&["check", "--allow-slower", HEAD]).fails_naming(&["model.safetensors"]);
}

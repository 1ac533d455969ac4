//! What a newcomer reads first: the conclusion of an evaluation, what a run will take, its next commands, and
//! plain advice where a drafter is never accepted.

use serde_json::{Value, json};

use crate::support::{Place, model};

/// The summary's conclusion.
fn conclusion(place: &Place, recipe: &str) -> Value {
    place.json(&format!("checkpoints/{recipe}/evaluation/summary.json"))["conclusion"].clone()
}

/// Whether a list of sentences has one with this part.
fn has(sentences: &Value, part: &str) -> bool {
    let sentences = sentences.as_array().unwrap().iter();
    sentences.filter_map(Value::as_str).any(|sentence| sentence.contains(part))
}

#[test]
fn the_conclusion_names_the_tuned_setting_and_seen_prompts() {
    let place = Place::new();
    place.write_small_recipe();
    // All test prompts are among the training prompts.
    let prompts = std::fs::read_to_string(place.path("train.jsonl")).unwrap();
    let seen: Vec<&str> = prompts.lines().take(4).collect();
    place.write("test.jsonl", seen.join("\n") + "\n");
    let tune = ["--set", "tune={}", "--set", "evaluate.lookup_first=['1x2']"];
    let ran = place.run(&[&["run", "small.toml"], &tune[..]].concat());
    let stderr = ran.stderr.clone();
    let stdout = ran.ok();
    assert!(stderr.contains("run: at most "), "{stderr}");
    assert!(stderr.contains("settings and in those that tuning adds"), "{stderr}");
    assert!(stderr.contains("run: 4 of the 4 prompts of `test`"), "{stderr}");

    let found = conclusion(&place, "small");
    let verdicts = found["verdicts"].as_array().unwrap();
    assert_eq!(verdicts.len(), 2, "greedy and sampled");
    assert!(has(&found["doubts"], "4 of the 4 prompts of test"), "{found}");
    let rows = place.json("checkpoints/small/evaluation/results.json");
    let rows: Vec<&Value> =
        rows.as_array().unwrap().iter().filter(|row| row["category"] == "all").collect();
    for (verdict, decoding) in verdicts.iter().zip(["greedy", "sampled"]) {
        let tuned: Vec<&&Value> = rows
            .iter()
            .filter(|row| row["is_tuned"] == true && row["decoding"] == decoding)
            .collect();
        assert_eq!(tuned.len(), 1, "one setting was tuned: {tuned:?}");
        assert_eq!(verdict["tuned"]["speedup"], tuned[0]["speedup"]);
        let [low, high] = [0, 1].map(|end| tuned[0]["speedup_interval"][end].as_f64().unwrap());
        let expected = match (low > 1.0, high < 1.0) {
            (true, _) => "deploy",
            (_, true) => "do_not_speculate",
            _ => "too_uncertain",
        };
        assert_eq!(verdict["advice"], expected, "{verdict}");
    }
    // The conclusion comes before the tables, in the terminal and in the report.
    let html = place.path("checkpoints/small/evaluation/report.html");
    let html = std::fs::read_to_string(html).unwrap();
    for text in [&stdout, &html] {
        let place_of = |part: &str| text.find(part).unwrap_or_else(|| panic!("`{part}`: {text}"));
        assert!(place_of("4 of the 4 prompts of test") < place_of("70B"));
    }
    assert!(
        stdout
            .lines()
            .any(|line| line.trim_end().ends_with("tuned") || line.contains("tuned, fastest")),
        "{stdout}"
    );
    // It says where to serve what it advises, and how to start it there.
    let is_advised = verdicts[0]["advice"] == "deploy";
    for part in ["where to serve it:", "draftsmith generate --recipe "] {
        assert_eq!(stdout.contains(part), is_advised, "{part}: {stdout}");
    }
    assert_eq!(found["serving"].as_array().is_some_and(|ways| ways.len() > 1), is_advised);
    // It ends with sentences about the first verdict: what, how fast, why not another, and what next.
    let end = stdout.trim_end().rsplit("\n\n").next().unwrap().replace('\n', " ");
    let is_other_faster = !verdicts[0]["fastest"].is_null() && is_advised;
    assert_eq!(end.matches(". ").count(), 2 + usize::from(is_other_faster), "{end}");
    assert_eq!(end.contains("is not advised: it is the best of many"), is_other_faster, "{end}");
    assert!(end.contains("; `--rule tuned=checkpoints/small/draft/head`"), "{end}");
    assert!(
        html.contains("test, greedy). ") && html.contains(". Next, "),
        "the page ends likewise"
    );
    let speedup = verdicts[0]["tuned"]["speedup"].as_f64().unwrap();
    assert!(end.contains(&format!("decodes {speedup:.2} times as fast")), "{end}");
    assert!(end.contains("test, greedy). ") && end.contains(". Next, "), "{end}");

    // The look-ups of a drafter are measured alone too, with the target's tokens.
    let alone = rows.iter().filter(|row| row["drafter"] == "look-up+lookup_1x2");
    assert_eq!(alone.count(), 2);
    assert!(stdout.contains("prompt lookup 1x2 by itself"), "{stdout}");

    // Prompts for tuning that are training prompts are noted.
    place.write("tune.jsonl", seen.join("\n") + "\n");
    let own = ["--set", "tune.prompts=['tune.jsonl']"];
    place.run(&[&["record", "small.toml"], &own[..]].concat()).ok();
    let ran = place.run(&[&["tune", "small.toml"], &own[..]].concat());
    assert!(ran.stderr.contains("4 of 4 prompts in `tune.prompts`"), "{}", ran.stderr);
}

/// A draft whose most probable token is always one that the target never says.
fn place_with_a_useless_draft() -> Place {
    let place = Place::new();
    place.write_small_recipe();
    let dir = place.copy_model("draft", "useless");
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    // Weights of zero give equal logits: the most probable token is the first one.
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].fill(0);
    std::fs::write(&path, bytes).unwrap();
    place
}

#[test]
fn a_drafter_that_is_never_accepted_gets_advice_and_a_report() {
    let place = place_with_a_useless_draft();
    // Given costs, so that nothing is measured.
    let costs = "draft_ms = 2.0\ntarget_ms = 5.0\n";
    place.write("costs.toml", costs);
    let tune = format!("tune={{ costs={{ {} }} }}", costs.trim().replace('\n', ", "));
    let keys = ["--set", "drafters.draft.model='useless'", "--set", &tune, "--set"];
    let greedy = ["evaluate.decodings=['greedy']"];
    let ran = place.run(&[&["run", "small.toml"], &keys[..], &greedy[..]].concat());
    let stdout = ran.ok();
    // Prompt lookup before the draft may pay: it does not ask the draft.
    let advice = ["Do not speculate", "Too uncertain", "Deploy lookup"];
    assert!(advice.iter().any(|advice| stdout.contains(advice)), "{stdout}");
    assert!(place.path("checkpoints/small/evaluation/report.html").is_file());
    let tuned = place.run(&[&["tune", "small.toml"], &keys[..], &greedy[..]].concat()).ok();
    assert!(tuned.contains("never accepted: do not speculate"), "{tuned}");
    let [target, draft] =
        [model("target"), place.path("useless")].map(|it| it.display().to_string());
    let prompts = place.path("train.jsonl").display().to_string();
    let survey = ["survey", "--target", &target, "--draft", &draft, "--prompts", &prompts];
    let surveyed =
        place.run(&[&survey[..], &["--num-prompts", "6", "--max-new-tokens", "12"]].concat()).ok();
    assert!(surveyed.contains("do not speculate"), "{surveyed}");
}

#[test]
fn run_refuses_what_a_later_stage_would_refuse() {
    let place = Place::new();
    place.write_small_recipe();
    let refused = |keys: &[&str], named: &[&str]| {
        let keys: Vec<&str> = keys.iter().flat_map(|key| ["--set", key]).collect();
        let ran = place.run(&[&["run", "small.toml"], &keys[..]].concat());
        ran.fails_naming(named);
        assert_eq!(place.names("data/small"), Vec::<String>::new(), "nothing was built");
    };
    let adapter = "drafters.adapter.kind=adapter";
    refused(&[adapter, "drafters.adapter.exit_layer=99"], &["adapter.exit_layer", "99"]);
    let eagle3 = ["drafters.eagle.kind=eagle3", "drafters.eagle.layers=[0,1,99]"];
    refused(&eagle3, &["`[drafters.eagle]`", "layers", "[0, 1, 99]", "number of layers"]);
    let costs = "tune.costs={draft_ms=1.0,target_ms=5.0}";
    refused(
        &[adapter, "drafters.adapter.exit_layer=1", costs],
        &["tune.costs", "draft_ms", "2 drafters"],
    );
    refused(&["evaluate.prompts=['absent.jsonl']"], &["absent.jsonl"]);
    refused(&["tune.prompts=['absent.jsonl']"], &["absent.jsonl"]);
}

#[test]
fn generate_names_its_drafter_its_rule_and_why_it_ended() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    let [target, draft] = [model("target"), model("draft")].map(|it| it.display().to_string());
    let head = "checkpoints/small/draft/head";
    let generate = |more: &[&str]| {
        let models = ["generate", "--target", &target, "--prompt", "What is 2 + 2?", "--json"];
        place.run(&[&models[..], &["--max-new-tokens", "3"], more].concat())
    };
    let plain = generate(&[]).json();
    assert_eq!((&plain["drafter"], &plain["stop_rule"]), (&json!("none"), &Value::Null));
    assert_eq!(plain["finish_reason"], "length");
    let with_head = generate(&["--draft", &draft, "--head", head]).json();
    assert_eq!(with_head["drafter"], "draft");
    assert_eq!(with_head["stop_rule"]["stop_rule"], "rejection_threshold");
    assert_eq!(with_head["rule_chosen_by"], "default");

    let config = place.path(head).join("config.json");
    let mut text: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    let rate = json!({ "value": 0.5, "low": 0.0, "high": 1.0 });
    text["tuned"] = json!({ "greedy": {
        "drafter": "draft", "config": { "stop_rule": "fixed_length", "candidate_length": 1 },
        "temperature": 0.0, "top_p": 1.0, "expected_gain": rate, "expected_acceptance_rate": rate,
        "best_fixed_length": 1, "num_prompts": 40,
        "costs": { "draft_seconds": 0.1, "target_seconds": 1.0, "row_seconds": 0.0 },
    }});
    std::fs::write(&config, text.to_string()).unwrap();
    let ran = generate(&["--draft", &draft, "--head", head]);
    assert!(ran.stderr.contains("K = 1, tuned; this rule does not use the head"), "{}", ran.stderr);
    assert_eq!(ran.json()["rule_chosen_by"], "tuning");
}

//! `survey`: its figures match `record` and `replay`, it writes nothing, and it reports bad input.

use serde_json::{Value, json};

use crate::block::{NUM_CANDIDATES, write_drafter};
#[cfg(unix)]
use crate::support::Running;
use crate::support::{Place, model};

/// Fixed costs, so that results do not depend on the machine.
const COSTS: &str = "draft_ms = 2.0\nrows_ms = [10.0, 10.5, 11.0, 12.0]\n";

fn place() -> Place {
    let place = Place::new();
    place.write_prompts("prompts.jsonl", 24);
    place.write("costs.toml", COSTS);
    place
}

fn arguments(more: &[&str]) -> Vec<String> {
    let target = model("target").display().to_string();
    let given = ["survey", "--target", &target, "--prompts", "prompts.jsonl"];
    let always = ["--max-new-tokens", "40"];
    given.iter().chain(&always).chain(more).map(|word| (*word).to_owned()).collect()
}

fn run(place: &Place, more: &[&str]) -> crate::support::Ran {
    let arguments = arguments(more);
    place.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[track_caller]
fn assert_same(one: &Value, other: &Value) {
    for key in ["value", "low", "high"] {
        let (one, other) = (one[key].as_f64().unwrap(), other[key].as_f64().unwrap());
        // Numbers went through text and f32.
        assert!((one - other).abs() < 1e-9, "{key}: {one} and {other}");
    }
}

#[test]
fn a_pairs_figures_match_record_and_replay() {
    let place = place();
    let draft = model("draft").display().to_string();
    let pair = ["--draft", &draft, "--costs", "costs.toml"];
    let found = run(&place, &[&pair[..], &["--json"]].concat()).json();
    assert_eq!((&found["num_prompts"], &found["num_answers"]), (&24.into(), &24.into()));
    // No file is written.
    assert_eq!(place.names("."), ["costs.toml", "prompts.jsonl"]);

    // The same prompts for choosing and judging.
    let recipe = format!(
        "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{draft}'\n\
         [tune]\nprompts = ['prompts.jsonl']\nmax_candidate_length = 10\n[tune.costs]\n{COSTS}\
         [evaluate]\nprompts = ['prompts.jsonl']\nmax_new_tokens = 40\ndecodings = ['greedy']\n",
        model("target").display()
    );
    place.write("same.toml", recipe);
    let recorded = place.run(&["record", "same.toml", "--json"]).json();
    assert_eq!(found["num_tokens"], recorded[0]["num_tokens"]);
    assert_eq!(found["share_accepted"], recorded[0]["share_accepted"]);
    let replay = place.run(&["replay", "same.toml", "--json"]).json();
    let group = &replay["groups"][0];
    assert_eq!((&group["cost_source"], &found["cost_source"]), (&"given".into(), &"given".into()));
    let ranges = group["by_text_position"].as_array().unwrap();
    assert_eq!((ranges.len(), &ranges[0]["up_to"]), (1, &512.into()), "{ranges:?}");
    assert_eq!(ranges[0]["num_drafted"], found["by_text_position"][0]["num_drafted"]);
    let value = |of: &Value| of["by_text_position"][0]["acceptance_rate"]["value"].clone();
    assert_eq!(value(group), value(&found));
    let rows = group["rows"].as_array().unwrap();
    let fixed = rows.iter().find(|row| row["stop_rule"] == "fixed_length").unwrap();
    let length = fixed["config"]["candidate_length"].as_u64().unwrap() as usize;
    let lengths = found["fixed_lengths"].as_array().unwrap();
    assert_eq!(lengths.len(), 10);
    assert_same(&lengths[length - 1]["speedup"], &fixed["speedup"]);
    assert!(lengths.iter().all(|length| {
        length["speedup"]["value"].as_f64() <= fixed["speedup"]["value"].as_f64()
    }));
    // Settings are chosen on all prompts, as in the survey.
    let rules = found["rules"].as_array().unwrap();
    // This recipe has a head, and the best rule after prompt lookup may read it.
    let alone = |row: &&Value| row["lookup_first"].is_null();
    let mut num_same = 0;
    for rule in
        rules.iter().filter(alone).filter(|rule| rule["config"]["stop_rule"] != "cost_optimal")
    {
        let mut same = rows.iter().filter(alone);
        if let Some(row) = same.find(|row| row["stop_rule"] == rule["stop_rule"]) {
            assert_eq!(rule["config"], row["config"]);
            num_same += 1;
        }
    }
    assert!(num_same > 3);
    for rows in [rules, rows] {
        assert_eq!(rows.iter().filter(|row| row["lookup_first"].is_string()).count(), 1);
    }
    let verdict = &found["verdict"];
    let shown = run(&place, &pair).ok();
    let advice: Vec<&str> = shown.lines().take_while(|line| !line.is_empty()).collect();
    assert_eq!(advice.join(" "), verdict["sentence"].as_str().unwrap());
    assert!(advice.iter().all(|line| line.len() <= 80), "{advice:?}");
    assert!(shown.contains("a perfect head: "), "{shown}");
    let share = found["head"]["probe"]["explained"]["value"].as_f64();
    assert!(share.is_some_and(|share| share < 1.0), "{}", found["head"]);
    assert!(found["agreement"]["value"].as_f64().unwrap() > 0.5);
    // Costs at which a draft never pays, without and with a cost per row.
    place.write("dear.toml", "draft_ms = 50\ntarget_ms = 10\n");
    let dear = run(&place, &["--draft", &draft, "--costs", "dear.toml", "--json"]).json();
    let verdict = &dear["verdict"];
    assert_eq!(verdict["advice"], "just_look_up", "{verdict}");
    assert_eq!(verdict["look_ups"], dear["look_ups"]["look_ups"]);
    let gain = dear["look_ups"]["speedup"]["value"].as_f64().unwrap() - 1.0;
    assert_eq!(verdict["expected_gain"]["value"].as_f64(), Some(gain));
    place.write("dearer.toml", "draft_ms = 50\nrows_ms = [10, 20, 30]\n");
    let dearer = run(&place, &["--draft", &draft, "--costs", "dearer.toml", "--json"]).json();
    assert_eq!(dearer["verdict"]["advice"], "do_not_speculate", "{}", dearer["verdict"]);
    assert!(dearer["verdict"]["look_ups"].is_null());
    place.write("cheap.toml", "draft_ms = 0.01\ntarget_ms = 10\n");
    let cheap = run(&place, &["--draft", &draft, "--costs", "cheap.toml", "--json"]).json();
    assert_eq!(cheap["verdict"]["advice"], "just_set", "{}", cheap["verdict"]);
    assert!(cheap["verdict"]["expected_gain"]["low"].as_f64().unwrap() > 1.0);
}

#[test]
fn a_trained_drafter_is_surveyed_at_its_own_draft_forwards() {
    let place = place();
    write_drafter(&place.path("block"));
    let block = ["--draft", "block", "--costs", "costs.toml"];
    let found = run(&place, &[&block[..], &["--json"]].concat()).json();
    assert_eq!((&found["kind"], &found["agreement"]), (&"block".into(), &Value::Null));
    let lengths = found["fixed_lengths"].as_array().unwrap();
    assert_eq!(lengths.len() as u64, NUM_CANDIDATES, "no more than it was trained for");
    // It has a head of its own, and no other is tried.
    assert_eq!((&found["head"]["probe"], found["oracle"].is_object()), (&Value::Null, true));
    let reads_head = |row: &&Value| row["config"]["stop_rule"] == "confidence_head";
    assert!(found["rules"].as_array().unwrap().iter().any(|row| reads_head(&row)), "{found}");
    let recipe = format!(
        "[models]\ntarget = '{}'\n[drafters.block]\nkind = 'block'\npath = 'block'\n\
         [tune]\nprompts = ['prompts.jsonl']\n[tune.costs]\n{COSTS}\
         [evaluate]\nprompts = ['prompts.jsonl']\nmax_new_tokens = 40\ndecodings = ['greedy']\n",
        model("target").display()
    );
    place.write("same.toml", recipe);
    let recorded = place.run(&["record", "same.toml", "--json"]).json();
    assert_eq!(found["share_accepted"], recorded[0]["share_accepted"]);
    let replay = place.run(&["replay", "same.toml", "--json"]).json();
    let rows = replay["groups"][0]["rows"].as_array().unwrap();
    let fixed = rows.iter().find(|row| row["stop_rule"] == "fixed_length").unwrap();
    let length = fixed["config"]["candidate_length"].as_u64().unwrap() as usize;
    assert_same(&lengths[length - 1]["speedup"], &fixed["speedup"]);
    // The text says nothing of a draft model's logits, nor of heads that were not tried.
    place.write("free.toml", "draft_ms = 0.001\ntarget_ms = 10\n");
    let shown = run(&place, &["--draft", "block", "--costs", "free.toml"]).ok();
    assert!(!shown.contains("agree at") && !shown.contains("too few prompts"), "{shown}");
    for (given, named) in [("head", "an acceptance head"), ("block", "hidden states")] {
        place.write("head/config.json", r#"{ "num_layers": 1, "form": "look-ahead" }"#);
        let server = ["--server", "http://127.0.0.1:1/v1", "--costs", "costs.toml"];
        run(&place, &[&["--draft", given], &server[..]].concat()).fails_naming(&[given, named]);
    }
}

#[test]
fn a_drafter_of_another_target_is_measured_only_by_a_survey() {
    let place = place();
    write_drafter(&place.path("block"));
    let path = place.path("block/config.json");
    let mut config = place.json("block/config.json");
    let survey = || run(&place, &["--draft", "block", "--costs", "costs.toml", "--json"]).json();
    let own = survey();
    assert_eq!(own["trained_for"], Value::Null);
    config["target_hash"] = "cafe".into();
    std::fs::write(&path, config.to_string()).unwrap();
    let target = model("target").display().to_string();
    let words = ["generate", "--target", &target, "--drafter", "block", "--prompt", "x"];
    let measured = "`draftsmith survey --draft block --target MODEL --prompts FILE` measures";
    place.run(&words).fails_naming(&["another target", "cafe", "hint: ", measured]);
    let mut other = survey();
    assert_eq!(other["trained_for"], "cafe");
    other["trained_for"] = Value::Null;
    assert_eq!(other, own, "it is measured as any other");
    let shown = run(&place, &["--draft", "block", "--costs", "costs.toml"]).ok();
    assert!(shown.contains("The drafter was trained for another target."), "{shown}");
}

#[test]
fn files_that_hold_no_whole_model_are_told_with_what_to_give() {
    let place = place();
    place.write("lora/adapter_config.json", "{}");
    place.write("model.gguf", "GGUF");
    let fails = |target, named: &[&str]| {
        place
            .run(&["survey", "--target", target, "--prompts", "prompts.jsonl"])
            .fails_naming(named);
    };
    fails("lora", &["is a LoRA adapter", "hint: merge it", "merge_and_unload()", "tokenizer"]);
    let as_draft = |draft: &str, named: &[&str]| {
        let target = model("target").display().to_string();
        let words = ["survey", "--target", &target, "--draft", draft, "--prompts", "prompts.jsonl"];
        place.run(&words).fails_naming(named);
    };
    as_draft("lora", &["`lora` is a LoRA adapter", "hint: merge it"]);
    as_draft("model.gguf", &["`model.gguf`", "ends within its header", "hint: "]);
    fails("model.gguf", &["`model.gguf`", "ends within its header", "hint: "]);
    place.write(
        "mine.toml",
        "models.target = 'path/to/target'\ndrafters.eagle = { kind = 'eagle3' }\n",
    );
    place
        .run(&["run", "mine.toml"])
        .fails_naming(&["the target `path/to/target` is not a directory", "hint: "]);
}

#[test]
fn without_a_draft_every_layer_of_the_target_is_tried() {
    let place = place();
    place.write("costs.toml", "target_ms = 10\n");
    let found = run(&place, &["--costs", "costs.toml", "--json"]).json();
    let exits = found["exits"].as_array().unwrap();
    assert_eq!(exits.len(), 8, "each layer but the last, and EAGLE-3");
    assert_eq!(exits[7]["exit_layer"], Value::Null);
    let value = |exit: &Value, key: &str| exit[key]["value"].as_f64().unwrap();
    for exit in exits {
        let agreement = value(exit, "agreement");
        assert!((0.05..1.0).contains(&agreement), "{exit}");
        // In greedy decoding, agreeing tokens are accepted.
        assert_eq!(exit["agreement"], exit["accepted"]);
        // Rows cost nothing: a round of one candidate costs a target forward and its share of layers.
        let share = exit["draft_share"].as_f64().unwrap();
        assert!((exit["break_even"].as_f64().unwrap() - share).abs() < 1e-12);
    }
    assert!(value(&exits[6], "agreement") > value(&exits[0], "agreement"));
    let shares: Vec<f64> = exits.iter().map(|exit| exit["draft_share"].as_f64().unwrap()).collect();
    assert!(shares[..7].is_sorted() && shares[6] == 1.0, "{shares:?}");
    // An EAGLE-3 drafter reads a layer and the LM head.
    assert!(shares[7] < shares[1] && shares[7] > 0.0, "{shares:?}");
    // If draft forwards cost almost nothing, every layer pays.
    place.write("free.toml", "draft_ms = { exit2 = 0.01 }\ntarget_ms = 10\n");
    let free = run(&place, &["--costs", "free.toml", "--json"]).json();
    assert_eq!(free["best_exit_layer"], 2);
    assert_eq!(free["verdict"]["advice"], "train_adapter", "{}", free["verdict"]);
    let sampled = ["--costs", "free.toml", "--temperature", "1", "--json"];
    let sampled = run(&place, &sampled).json();
    assert_eq!(sampled["exits"].as_array().unwrap().len(), 8);
    assert!(value(&sampled["exits"][6], "accepted") > 0.05, "{sampled}");
    assert_eq!(place.names("."), ["costs.toml", "free.toml", "prompts.jsonl"]);
}

#[test]
fn advice_ends_with_lines_that_a_recipe_reads() {
    let place = place();
    let draft = model("draft").display().to_string();
    for (costs, draft, expected) in [
        ("draft_ms = 0.01\ntarget_ms = 10\n", Some(&draft), "rules = { "),
        ("draft_ms = 50\ntarget_ms = 10\n", Some(&draft), "kind = \"prompt-lookup\""),
        ("draft_ms = { exit2 = 0.01 }\ntarget_ms = 10\n", None, "exit_layer = 2"),
    ] {
        place.write("costs.toml", costs);
        let draft = draft.map(|draft| ["--draft", draft.as_str()]);
        let draft = draft.as_ref().map_or(&[][..], |draft| draft);
        let shown = run(&place, &[&["--costs", "costs.toml"], draft].concat()).ok();
        if costs.starts_with("draft_ms = 50") {
            // What is free comes with the flags of servers.
            for part in [
                "for your server: prompt lookup, lookup ",
                "llama.cpp: --spec-type ngram-simple",
                "\"method\":\"ngram\"",
            ] {
                assert!(shown.contains(part), "`{part}`: {shown}");
            }
        } else if !draft.is_empty() {
            let first = shown.split("for your server: ").nth(1).expect("a setting");
            assert!(
                first.starts_with("the drafter, K = ") && first.contains("SGLang: "),
                "{shown}"
            );
        }
        let (_, lines) = shown.split_once("for your recipe:\n  ").expect("lines");
        let line = lines.lines().next().expect("a line");
        assert!(line.contains(expected), "{line}");
        place.write("pasted.toml", format!("models.target = 't'\n{line}\n"));
        // The recipe is read, and lacks only what an evaluation needs.
        place.run(&["evaluate", "pasted.toml"]).fails_naming(&["`[evaluate]`"]);
    }
    place.write("costs.toml", "draft_ms = 50\nrows_ms = [10, 20, 30]\n");
    let shown = run(&place, &["--draft", &draft, "--costs", "costs.toml"]).ok();
    assert!(!shown.contains("for your recipe"), "{shown}");
}

/// Costs at which only look-ups pay.
const DEAR: &str = "draft_ms = 50\nrows_ms = [10, 10.1, 10.2, 10.3]\n";

#[test]
fn answers_to_earlier_prompts_are_looked_up_in_their_order() {
    let place = place();
    place.write("costs.toml", DEAR);
    // A repeated workload, in which the halves have one occurrence each of the first prompts, and both of the others.
    let text = std::fs::read_to_string(place.path("prompts.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().take(20).collect();
    let twice = lines[..10].iter().flat_map(|line| [*line, *line]).chain(lines[10..].repeat(2));
    place.write("twice.jsonl", twice.map(|line| format!("{line}\n")).collect::<String>());
    let given = ["--prompts", "twice.jsonl", "--num-prompts", "40"];
    let look_ups = |more: &[&str]| {
        let target = model("target").display().to_string();
        let draft = model("draft").display().to_string();
        let fixed = ["survey", "--target", &target, "--draft", &draft, "--costs", "costs.toml"];
        let few = ["--max-new-tokens", "40", "--json"];
        place.run(&[&fixed[..], &given, &few, more].concat())
    };
    let [alone, earlier] =
        [look_ups(&[]), look_ups(&["--answers", "earlier"])].map(|found| found.json());
    let setting = |found: &Value| found["look_ups"]["look_ups"].as_str().unwrap().to_owned();
    assert!(!setting(&alone).starts_with("answers:"), "{alone}");
    assert!(setting(&earlier).starts_with("answers:"), "{earlier}");
    let speedup = |found: &Value| found["look_ups"]["speedup"]["value"].as_f64().unwrap();
    assert!(speedup(&earlier) > 1.3 * speedup(&alone), "{earlier}");
    assert_eq!(earlier["answers"], "earlier");
    let flags = earlier["in_servers"].to_string();
    assert!(flags.contains("suffix") || !setting(&earlier).contains(":1x"), "{flags}");
    look_ups(&["--answers", "earlier", "--temperature", "1"]).fails_naming(&[
        "--answers earlier",
        "greedy",
        "draftsmith build-datastore",
    ]);
}

#[test]
fn tune_chooses_look_ups_in_stored_answers_and_evaluate_decodes_them() {
    let place = place();
    let target = model("target").display().to_string();
    let draft = model("draft").display().to_string();
    let recipe = format!(
        "answers = 'answers.safetensors'\n[models]\ntarget = '{target}'\n\
         [drafters.draft]\nkind = 'model'\nmodel = '{draft}'\n\
         [drafters.lookup]\nkind = 'prompt-lookup'\nsearched = 'answers'\nrules.fixed = [4]\n\
         [tune]\nprompts = ['prompts.jsonl']\n[tune.costs]\n{DEAR}\
         [evaluate]\nprompts = ['prompts.jsonl']\nmax_new_tokens = 40\ndecodings = ['greedy']\n"
    );
    place.write("stored.toml", recipe);
    // Half of the answers are known.
    let mut known = String::new();
    let prompts = std::fs::read_to_string(place.path("prompts.jsonl")).unwrap();
    for line in prompts.lines().step_by(2) {
        let record: Value = serde_json::from_str(line).unwrap();
        let prompt = record["prompt"].as_str().unwrap();
        let generate = ["generate", "--target", &target, "--prompt", prompt, "--greedy", "--json"];
        let found = place.run(&[&generate[..], &["--max-new-tokens", "40"]].concat()).json();
        let known_ids = json!({ "prompt": prompt, "response": found["text"] });
        known += &format!("{known_ids}\n");
    }
    place.write("known.jsonl", known);
    place.run(&["build-datastore", "stored.toml", "--from", "known.jsonl"]).ok();
    place.run(&["record", "stored.toml"]).ok();
    let tuned = place.run(&["tune", "stored.toml", "--json"]).json();
    let text = tuned.to_string();
    assert!(text.contains("\"answers:"), "{text}");
    let evaluated = place.run(&["evaluate", "stored.toml", "--json"]).json();
    assert!(evaluated.to_string().contains("lookup"), "{evaluated}");
}

#[test]
fn invalid_input_of_a_survey_is_reported() {
    let place = place();
    let fails = |more: &[&str], named: &[&str]| run(&place, more).fails_naming(named);
    fails(&["--num-prompts", "0"], &["--num-prompts"]);
    fails(&["--num-prompts", "2"], &["2 answers", "4 or more"]);
    fails(&["--draft", "nowhere"], &["nowhere"]);
    fails(&["--greedy", "--temperature", "1"], &["--greedy"]);
    fails(&["--temperature", "-1"], &["temperature"]);
    fails(&["--costs", "absent.toml"], &["absent.toml"]);
    place.write("bad.toml", "target = 3\n");
    fails(&["--costs", "bad.toml"], &["bad.toml", "unknown field `target`"]);
    place.write("one.toml", "draft_ms = 1\ntarget_ms = 3\n");
    fails(&["--costs", "one.toml"], &["`draft_ms`", "7 drafters", "exit1"]);
    place.run(&["survey", "--target", "t", "--prompts", "absent.jsonl"]).fails_naming(&["absent"]);
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_a_survey() {
    let place = place();
    let draft = model("draft").display().to_string();
    let arguments = arguments(&["--draft", &draft]);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut running = Running::start(place.command(&words));
    running.await_line("survey: measuring costs");
    running.signal("INT");
    let ran = running.end();
    assert_eq!(ran.code, Some(130), "{}", ran.stderr);
    let message = "stopped; nothing is kept; running it again starts over";
    assert_eq!(ran.stderr.lines().last(), Some(message));
    assert_eq!(place.names("."), ["costs.toml", "prompts.jsonl"]);
}

//! `tune` and `replay`: the best rule is written with a promise, used for decoding and checked.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Place, model, root};

const HEAD: &str = "checkpoints/small/draft/head";

/// A directory in which everything before tuning is done, only for greedy decoding.
fn recorded() -> Place {
    let place = Place::new();
    let path = place.write_small_recipe();
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("kind = 'model'\n", "kind = 'model'\nmax_candidate_length = 6\n");
    let more = "decodings = ['greedy']\n\
                [tune]\nprompts = ['train.jsonl']\nnum_prompts = 12\nmax_candidate_length = 6\n";
    std::fs::write(&path, text + more).unwrap();
    for stage in ["build-data", "train-head", "record"] {
        place.run(&[stage, "small.toml"]).ok();
    }
    place
}

/// Compares numbers up to their last digit, which text may change.
#[track_caller]
fn assert_close(one: &Value, other: f64) {
    let one = one.as_f64().unwrap();
    assert!((one - other).abs() < 1e-9, "{one} and {other}");
}

/// The row of the best fixed length, the baseline of other rules.
fn best_fixed_length(rules: &Value) -> &Value {
    let rules = rules.as_array().unwrap();
    rules.iter().find(|rule| rule["stop_rule"] == "fixed_length").unwrap()
}

fn generate(place: &Place, extra: &[&str]) -> Value {
    let (target, draft) = (model("target"), model("draft"));
    let mut arguments = vec!["generate", "--json", "--max-new-tokens", "30"];
    arguments.extend(["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()]);
    arguments.extend(["--head", HEAD, "--prompt", "What is 47 + 85? Show the steps."]);
    arguments.extend(extra);
    place.run(&arguments).json()
}

#[test]
fn a_finished_run_is_not_repeated_and_changes_are_named() {
    let place = recorded();
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let home = root().display().to_string();
    let first = place.run_with(&["run", "small.toml"], &[("HOME", &home)]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let page = std::fs::read_to_string(place.path("checkpoints/small/evaluation/report.html"));
    let page = page.unwrap();
    let [shown, hidden] = ["~/checkpoints", &home].map(|path| path.replace('/', "&#x2f;"));
    assert!(page.contains(&shown) && !page.contains(&hidden), "{page}");
    let files = ["evaluation/results.json", "tuning/costs.json", "tuning/tuned.json"];
    let read = |place: &Place| {
        files.map(|name| std::fs::read(place.path(&format!("checkpoints/small/{name}"))).unwrap())
    };
    let before = read(&place);
    let tuned = place.json("checkpoints/small/tuning/tuned.json")["tunings"].clone();
    let second = place.run(&["run", "small.toml", "--json"]);
    for part in [
        "tune: kept `checkpoints/small/tuning/tuned.json`",
        "of an earlier run are kept",
        "evaluate: kept all ",
    ] {
        assert!(second.stderr.contains(part), "`{part}`: {}", second.stderr);
    }
    assert!(read(&place) == before, "the same results");
    assert_eq!(second.json()["tune"], tuned);

    // Other rules drop the measurements, and the note says so.
    place.write("small.toml", recipe.replace("[0.5]", "[0.5, 0.6]"));
    let third = place.run(&["run", "small.toml"]);
    assert_eq!(third.code, Some(0), "{}", third.stderr);
    assert!(!third.stderr.contains("tune: kept"), "{}", third.stderr);
    let note = third.stderr.lines().find(|line| line.contains("are dropped, because"));
    assert!(note.is_some_and(|note| note.contains("rules")), "{}", third.stderr);
    // The command itself measures again.
    let again = place.run(&["evaluate", "small.toml"]);
    assert!(!again.stderr.contains("are kept"), "{}", again.stderr);
}

#[test]
fn a_killed_tune_keeps_its_costs_and_its_race() {
    let place = recorded();
    let kept = || {
        let text = std::fs::read(place.path("checkpoints/small/tuning/races.json")).ok()?;
        Some(serde_json::from_slice::<Value>(&text).unwrap()["races"][0].clone())
    };
    let num_laps = |race: &Value| race["race"]["laps"].as_array().unwrap().len();
    // It may end before it is killed.
    let killed = (0..10).find_map(|_| {
        let mut command = place.command(&["tune", "small.toml"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while kept().is_none_or(|race| num_laps(&race) == 0) && child.try_wait().unwrap().is_none()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kept()
    });
    let killed = killed.expect("a kill within the race");
    let again = place.run(&["tune", "small.toml", "--json"]);
    assert!(!again.stderr.contains("measuring costs"), "{}", again.stderr);
    let tunings = again.json();
    let tuning = &tunings[0];
    assert_eq!(tuning["costs"], killed["measured"]["costs"]);
    assert!(tuning["race"]["num_laps"].as_u64() >= Some(num_laps(&killed) as u64), "{tuning}");
    assert_eq!(kept(), None);
}

#[test]
fn the_best_rule_is_written_used_and_checked() {
    let place = recorded();
    let before = place.json(&format!("{HEAD}/config.json"));
    let tunings = place.run(&["tune", "small.toml", "--json"]).json();
    let config = place.json(&format!("{HEAD}/config.json"));
    let tuned = &config["tuned"]["greedy"];
    assert_eq!(config["tuned"]["sampled"], Value::Null);
    for (key, value) in before.as_object().unwrap() {
        assert_eq!(&config[key], value, "{key}");
    }
    // The fastest rule is chosen and promises its gain over the best fixed length.
    let rules = &tunings[0]["rules"];
    let fixed = best_fixed_length(rules);
    let fixed_config = fixed["config"].clone();
    let speedup = |rule: &Value| rule["speedup"].as_f64().unwrap();
    let all = rules.as_array().unwrap().iter();
    let is_chosen = |rule: &&Value| {
        rule["stop_rule"] == tunings[0]["chosen"]
            && rule["lookup_first"] == tunings[0]["lookup_first"]
    };
    let fastest = all.clone().find(is_chosen).unwrap();
    let drafter = match fastest["lookup_first"].as_str() {
        Some(first) => format!("draft+lookup_{first}"),
        None => "draft".to_owned(),
    };
    assert_eq!(tuned["drafter"], drafter.as_str());
    assert_eq!(tuned["config"], fastest["config"]);
    // It won a race with the best fixed length, and promises its gain there. On a busy machine, only intervals count.
    let race = tunings[0]["race"]["settings"].as_array().unwrap();
    let raced = |rule: &Value| {
        let is_it = |it: &&Value| {
            (&it["config"], &it["lookup_first"]) == (&rule["config"], &rule["lookup_first"])
        };
        race.iter().find(is_it).unwrap()
    };
    assert_close(&raced(fixed)["gain"]["value"], 0.0);
    let end = |raced: &Value, end: &str| raced["speedup"][end].as_f64().unwrap();
    let most = end(raced(fastest), "high");
    assert!(race.iter().all(|it| end(it, "low") <= most), "{race:?}");
    assert!(!place.path("checkpoints/small/tuning/races.json").exists());
    assert_eq!(tuned["best_fixed_length"], fixed["config"]["candidate_length"]);
    for rule in all {
        // Both wait for the same prefill, which a gain leaves out.
        let (gain, seen) = (&rule["gain"]["value"], speedup(rule) / speedup(fixed) - 1.0);
        let gain = gain.as_f64().unwrap();
        assert!(seen * gain >= 0.0 && seen.abs() <= gain.abs() + 1e-9, "{seen} {gain}");
    }
    let promised = &tuned["expected_gain"];
    for key in ["low", "value", "high"] {
        assert_close(&promised[key], raced(fastest)["gain"][key].as_f64().unwrap());
    }
    assert!(promised["low"].as_f64() <= promised["value"].as_f64(), "{promised}");
    assert!(promised["value"].as_f64() <= promised["high"].as_f64(), "{promised}");
    assert_eq!(tuned["num_prompts"], 12);

    // The additional key does not cause another training.
    let again = place.run(&["train-head", "small.toml", "--json"]).json();
    assert_eq!(place.json(&format!("{HEAD}/config.json")), config, "{again}");

    // Greedy output is the target's under the tuned rule.
    let fixed = generate(&place, &["--rule", "fixed=2"]);
    assert_eq!(generate(&place, &[])["token_ids"], fixed["token_ids"]);

    let replayed = place.run(&["replay", "small.toml", "--json"]).json();
    let groups = replayed["groups"].as_array().unwrap();
    let sources: Vec<&Value> = groups.iter().map(|group| &group["cost_source"]).collect();
    assert_eq!(sources, ["machine", "paper"]);
    for group in groups {
        let rows = group["rows"].as_array().unwrap();
        let row = |name: &str| rows.iter().find(|row| row["stop_rule"] == name).expect(name);
        let speedup = |row: &Value| row["speedup"]["value"].as_f64().unwrap();
        let fixed = speedup(best_fixed_length(&group["rows"]));
        for row in rows {
            assert_close(&row["gain"]["value"], speedup(row) / fixed - 1.0);
        }
        assert!(row("rejection_threshold")["ceiling"]["value"].is_number(), "{group}");
        assert!(row("entropy_threshold")["ceiling"].is_null());
        // No rule beats the oracle if rows cost nothing; otherwise short rounds may.
        let oracle = group["oracle"]["gain"]["value"].as_f64().unwrap();
        for row in rows.iter().filter(|_| group["cost_source"] == "paper") {
            assert!(row["gain"]["value"].as_f64().unwrap() <= oracle + 1e-9, "{row}");
        }
    }

    // The tuned rule and its baseline are measured, and the promise is reported. A fixed length, which may be the
    // fastest rule on a busy machine, promises nothing over itself.
    let promises = fastest["config"] != fixed_config || drafter != "draft";
    let ran = place.run(&["evaluate", "small.toml"]);
    assert_eq!(ran.stderr.contains("tuning promised"), promises, "{}", ran.stderr);
    ran.ok();
    let summary = place.json("checkpoints/small/evaluation/summary.json");
    let reported = summary["groups"][0]["promises"].as_array().unwrap();
    assert_eq!(reported.len(), usize::from(promises), "{summary}");
    let page = place.path("checkpoints/small/evaluation/report.html");
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.contains("What tuning promised"), promises);
    assert!(page.contains("ceiling"));
    for promise in reported {
        assert_eq!(promise["best_fixed_length"], tuned["best_fixed_length"]);
    }
}

#[test]
fn a_tuned_rule_has_a_name_that_can_be_typed() {
    let place = recorded();
    let tuned = place.run(&["tune", "small.toml"]).ok();
    let said = format!("`generate --rule tuned={HEAD}` takes it");
    assert!(tuned.contains(&said), "{tuned}");
    let named = generate(&place, &["--rule", &format!("tuned={HEAD}")]);
    for key in ["stop_rule", "drafter", "token_ids", "rule_chosen_by"] {
        assert_eq!(named[key], generate(&place, &[])[key], "{key}");
    }
    assert_eq!(named["rule_chosen_by"], "tuning");
    let fails = |rule: &str, named: &[&str]| {
        let (target, draft) = (model("target"), model("draft"));
        let models = ["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()];
        let rule = ["--rule", rule, "--prompt", "x", "--temperature", "1"];
        place
            .run(&[&["generate", "--head", HEAD], &models[..], &rule].concat())
            .fails_naming(named);
    };
    fails(&format!("tuned={HEAD}"), &["no tuned rule for this decoding", "hint: `draftsmith tune"]);
    fails("tuned=nowhere", &["`nowhere/config.json`"]);
    fails(
        "cost-entropy=0.6",
        &["`cost-entropy` is fitted by `tune`", "hint: `generate --rule tuned=DIR`"],
    );
    place.write("fitted.toml", "models.target = 't'\nevaluate = { prompts = ['test.jsonl'], rules.cost-entropy = [0.6] }\n");
    place.run(&["evaluate", "fitted.toml"]).fails_naming(&["cost-entropy", "is fitted by `tune`"]);
}

#[test]
fn replay_judges_the_heads_predictions() {
    let place = recorded();
    // On a busy machine, speculation may not pay at measured costs, and then no settings are printed.
    let costs = ["tune.costs.draft_ms=1.0", "tune.costs.target_ms=30.0"];
    let shown = place.run(&["tune", "small.toml", "--set", costs[0], "--set", costs[1]]).ok();
    for part in
        ["a draft forward", "chosen", "num_assistant_tokens=", "--spec-draft-n-max", "SGLang"]
    {
        assert!(shown.contains(part), "`{part}`: {shown}");
    }
    assert_eq!(shown.matches("chosen").count(), 1, "a rule");
    let replayed = place.run(&["replay", "small.toml", "--json"]).json();
    let [predictions] = &replayed["predictions"].as_array().unwrap()[..] else {
        panic!("one way of decoding: {replayed}");
    };
    let bins = predictions["bins"].as_array().unwrap();
    let sum = |key: &str| bins.iter().map(|bin| bin[key].as_f64().unwrap()).sum::<f64>();
    assert!((sum("share") - 1.0).abs() < 1e-9, "{predictions}");
    assert_eq!(sum("num_labels"), predictions["scores"]["num_labels"].as_f64().unwrap());

    let fixed = generate(&place, &["--rule", "fixed=2"]);
    assert_eq!(generate(&place, &["--rule", "head=0.5"])["token_ids"], fixed["token_ids"]);
}

#[test]
fn tune_and_replay_need_their_inputs() {
    let place = Place::new();
    place.write_small_recipe();
    for command in ["record", "tune", "replay"] {
        place.run(&[command, "small.toml"]).fails_naming(&["[tune]"]);
    }
    let path = place.path("small.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "[tune]\nmax_candidate_length = 6\n").unwrap();
    place.run(&["replay", "small.toml"]).fails_naming(&["acceptance head"]);
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    for command in ["tune", "replay"] {
        place.run(&[command, "small.toml"]).fails_naming(&["rollouts", "draftsmith record"]);
    }
    assert!(place.names("checkpoints/small/tuning").is_empty());
    for (set, key) in [
        ("tune.max_candidate_length=0", "tune.max_candidate_length"),
        ("tune.prompts=[]", "tune.prompts"),
        ("tune.num_prompts=0", "tune.num_prompts"),
        ("tune.lengths=3", "lengths"),
        ("evaluate.rules.entropy=[-1]", "`evaluate.rules.entropy`"),
        ("evaluate.rules.entropy={values=[],scale=0}", "`evaluate.rules.entropy.scale`"),
        (
            "evaluate.rules.entropy={values=[],check_interval=0}",
            "`evaluate.rules.entropy.check_interval`",
        ),
        ("evaluate.rules.candidate-prob=[2]", "`evaluate.rules.candidate-prob`"),
        ("drafters.draft.rules.heuristic=[0]", "`drafters.draft.rules.heuristic`"),
        ("evaluate.rules.heuristics=[1]", "`evaluate.rules.heuristics`"),
    ] {
        place.run(&["tune", "small.toml", "--set", set]).fails_naming(&[key]);
    }
}

#[test]
fn given_costs_replace_measurements() {
    let place = Place::new();
    let path = place.write_small_recipe();
    let text = std::fs::read_to_string(&path)
        .unwrap()
        .replace("[drafters.draft.head]\nnum_layers = 1\n", "");
    let text = text.replace("kind = 'model'\n", "kind = 'model'\nmax_candidate_length = 6\n");
    let head = text.find("[drafters.draft.head.optimizer]").unwrap();
    let evaluate = text.find("[evaluate]").unwrap();
    // The paper's costs, whose results replay shows as well.
    let more = "decodings = ['greedy']\n\
                [tune]\nprompts = ['train.jsonl']\nnum_prompts = 12\nmax_candidate_length = 6\n\
                [tune.costs]\ndraft_ms = 23.4\nrows_ms = [108, 112, 112, 112, 112, 112, 112]\n";
    std::fs::write(&path, text[..head].to_owned() + &text[evaluate..] + more).unwrap();
    place.run(&["record", "small.toml"]).ok();
    let replay = place.run(&["replay", "small.toml", "--json"]).json();
    let groups = replay["groups"].as_array().unwrap();
    let sources: Vec<&Value> = groups.iter().map(|group| &group["cost_source"]).collect();
    assert_eq!(sources, ["given", "paper"]);
    let rows = |group: &Value| group["rows"].as_array().unwrap().clone();
    for (given, paper) in rows(&groups[0]).iter().zip(&rows(&groups[1])) {
        assert_eq!(given["stop_rule"], paper["stop_rule"]);
        for key in ["speedup", "gain"] {
            assert_close(&given[key]["value"], paper[key]["value"].as_f64().unwrap());
            assert_close(&given[key]["low"], paper[key]["low"].as_f64().unwrap());
        }
    }
    let tunings = place.run(&["tune", "small.toml", "--json"]).json();
    assert_eq!(tunings[0]["cost_source"], "given");
    assert_eq!(tunings[0]["num_passes"], 0);
    assert_eq!(place.json("checkpoints/small/tuning/costs.json").as_array().unwrap().len(), 0);
    let row = best_fixed_length(&groups[0]["rows"]);
    assert_eq!(best_fixed_length(&tunings[0]["rules"])["config"], row["config"]);
    let set = |key: &str| place.run(&["replay", "small.toml", "--set", key]);
    set("tune.costs.draft_ms=-1").fails_naming(&["`tune.costs.draft_ms`", "not above 0"]);
    set("tune.costs.rows_ms=[-1]").fails_naming(&["`tune.costs.rows_ms`"]);
    set("tune.costs.draft_ms={ adapter = 2.0 }").fails_naming(&["`adapter`", "those are draft"]);
    let of_one_token =
        |command| place.run(&[command, "small.toml", "--set", "evaluate.max_new_tokens=1"]);
    of_one_token("record").ok();
    of_one_token("tune").fails_naming(&["no candidate", "more new tokens"]);
}

#[test]
fn a_penalty_and_stop_strings_apply_to_every_stage() {
    let place = Place::new();
    let path = place.write_small_recipe();
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text
        .replace("[models]\n", "[models]\nstop_strings = ['.', ' is']\n")
        .replace("[data]\n", "[data]\nrepetition_penalty = 1.2\n")
        .replace("[evaluate]\n", "[evaluate]\nrepetition_penalty = 1.2\n");
    std::fs::write(&path, text + "[tune]\nnum_prompts = 3\n").unwrap();
    place.run(&["run", "small.toml"]).ok();
    let data = place.run(&["inspect", "data/small", "--json"]).json();
    assert_eq!(data["provenance"]["repetition_penalty"], 1.2);
    assert_eq!(data["provenance"]["stop_strings"], serde_json::json!([".", " is"]));
    let tuned = place.json("checkpoints/small/draft/head/config.json")["tuned"].clone();
    for decoding in ["greedy", "sampled"] {
        assert_eq!(tuned[decoding]["repetition_penalty"], 1.2, "{tuned}");
    }
    for row in place.results("small") {
        assert!(row["decoding"] != "greedy" || row["lossless"] == true, "{row}");
    }
    let checked =
        place.run(&["check", "--allow-slower", "checkpoints/small/draft/head", "--json"]).json();
    assert_eq!(checked["greedy"]["repetition_penalty"], 1.2);
    assert_eq!(checked["passed"], true, "{checked}");
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let generate = |extra: &[&str]| {
        let arguments = ["generate", "--target", &target, "--draft", &draft, "--prompt", "x"];
        let head = ["--head", "checkpoints/small/draft/head", "--max-new-tokens", "9"];
        place.run(&[&arguments[..], &head, extra].concat())
    };
    let note = "was tuned for a repetition penalty of 1.2, and is left out for one of 1";
    let other = generate(&[]);
    assert!(other.stderr.contains(note), "{}", other.stderr);
    other.ok();
    let same = generate(&["--repetition-penalty", "1.2", "--stop-string", "!"]);
    assert!(!same.stderr.contains("left out"), "{}", same.stderr);
    same.ok();
}

#[test]
fn a_directory_of_others_stays_theirs_and_its_rule_is_found_through_the_recipe() {
    let place = Place::new();
    let path = place.write_small_recipe();
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("[drafters.draft]").unwrap();
    let evaluate = rest.split_once("[evaluate]").unwrap().1.replace("[0.5]", "[]");
    let drafter = place.path("theirs");
    crate::doctor::write_drafter(&drafter, false);
    let recipe = format!(
        "{before}[drafters.eagle]\nkind = 'eagle3'\npath = 'theirs'\nmax_candidate_length = 3\n[evaluate]{evaluate}\
         decodings = ['greedy']\n[tune]\nprompts = ['train.jsonl']\nnum_prompts = 4\nmax_candidate_length = 3\n\
         costs = {{ draft_ms = 1.0, target_ms = 4.0 }}\n"
    );
    std::fs::write(&path, recipe).unwrap();
    let names = || {
        let mut all: Vec<_> = std::fs::read_dir(&drafter)
            .unwrap()
            .map(|entry| {
                let path = entry.unwrap().path();
                (path.file_name().unwrap().to_owned(), std::fs::read(&path).unwrap())
            })
            .collect();
        all.sort();
        all
    };
    let theirs = names();
    place.run(&["record", "small.toml"]).ok();
    place.run(&["tune", "small.toml"]).ok();
    let written: Vec<_> = names().into_iter().filter(|file| !theirs.contains(file)).collect();
    assert!(written.is_empty(), "nothing is written into `theirs`: {written:?}");
    let tuned = place.json("checkpoints/small/tuning/eagle/config.json");
    let config = tuned["tuned"]["greedy"]["config"].clone();
    assert!(config.is_object(), "{tuned}");
    let generate = ["generate", "--recipe", "small.toml", "--drafter", "eagle", "--json"];
    let more = ["--prompt", "What is 4 + 8?", "--max-new-tokens", "8"];
    let shown = place.run(&[&generate[..], &more].concat());
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    // An evaluation measures the rule and marks it.
    place.run(&["evaluate", "small.toml"]).ok();
    let rows = place.results("small");
    assert!(rows.iter().any(|row| row["is_tuned"] == true && row["drafter"] != "none"), "{rows:?}");
    assert!(names() == theirs);
}

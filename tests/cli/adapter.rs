//! Self-draft adapters: training, inspection, decoding, evaluation, and errors for bad input.

use crate::support::{Place, Ran, model};

/// A directory with a recipe that trains adapters after layers 1 and 3, without a draft.
fn adapter_place() -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    place.write_prompts("test.jsonl", 3);
    place.write(
        "road.toml",
        format!(
            "[models]\ntarget = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             {}{}\
             [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 16\n\
             rules.fixed = [1, 4]\nrules.confidence = [0.5]\n",
            model("target").display(),
            adapter("exit1", 1),
            adapter("exit3", 3)
        ),
    );
    place
}

/// An adapter in a recipe.
fn adapter(name: &str, exit_layer: usize) -> String {
    format!(
        "[drafters.{name}]\nkind = 'adapter'\nexit_layer = {exit_layer}\n\
         optimizer = {{ num_epochs = 1, learning_rate = 1e-3, validation_fraction = 0.3 }}\n"
    )
}

fn generate(place: &Place, extra: &[&str]) -> Ran {
    let target = model("target").display().to_string();
    let mut arguments = vec!["generate", "--target", &target, "--max-new-tokens", "40"];
    arguments.extend(["--prompt", "What is 47 + 85? Show the steps."]);
    arguments.extend(extra);
    place.run(&arguments)
}

#[test]
fn adapters_need_no_draft_and_do_not_change_the_output() {
    let place = adapter_place();
    let stdout = place.run(&["run", "road.toml"]).ok();
    let after = |heading: &str| stdout.split_once(heading).expect(heading).1.to_owned();
    assert!(after("exit1").contains("K = 4"), "{stdout}");
    assert!(after("exit3").contains("K = 1"), "{stdout}");
    let rows = place.results("road");
    // Plain decoding, and two lengths and a threshold for each of two exits, greedy and sampled.
    assert_eq!(rows.len(), 2 * 7);
    assert!(rows.iter().any(|row| row["drafter"] == "exit3"));

    // A second run trains nothing; another setting trains again.
    let again = place.run(&["train-adapter", "road.toml", "--json"]).json();
    assert_eq!((&again[0]["kept"], &again[1]["kept"]), (&true.into(), &true.into()));
    let other = ["train-adapter", "road.toml", "exit1", "--json", "--set"];
    let other = [&other[..], &["drafters.exit1.optimizer.learning_rate=2e-3"]].concat();
    let trained = place.run(&other).json();
    assert_eq!((&trained[0]["drafter"], &trained[0]["kept"]), (&"exit1".into(), &false.into()));
    assert_eq!(trained.as_array().unwrap().len(), 1);
    place.run(&["train-adapter", "road.toml", "exit2"]).fails_naming(&["`exit2`", "exit1, exit3"]);

    // The adapters can be inspected and used for decoding.
    let adapter = "checkpoints/road/exit3";
    let shown = place.run(&["inspect", adapter, "--json"]).json();
    assert_eq!((&shown["kind"], &shown["exit_layer"]), (&"self-draft adapter".into(), &3.into()));
    let plain = generate(&place, &["--json"]).json();
    for extra in [&["--rule", "fixed=3"][..], &["--rule", "confidence=0.6"]] {
        let mut arguments = vec!["--json", "--adapter", adapter];
        arguments.extend(extra);
        let drafted = generate(&place, &arguments).json();
        assert_eq!(drafted["token_ids"], plain["token_ids"], "{extra:?}");
        assert!(drafted["rounds"][0]["num_drafted"].as_u64() > Some(0));
    }
    let marked = generate(&place, &["--adapter", adapter, "--show"]);
    assert!(marked.stderr.contains("verify ms") && marked.stderr.contains("[corrected]"));
    let text = marked.ok();
    assert!(text.contains('[') || text.contains('<'), "{text}");
    let unmarked: String = text.chars().filter(|c| !"[]<>".contains(*c)).collect();
    assert_eq!(unmarked.trim(), plain["text"].as_str().unwrap().trim());
}

#[test]
fn adapters_of_other_models_are_refused() {
    let place = adapter_place();
    place.run(&["build-data", "road.toml"]).ok();
    place.run(&["evaluate", "road.toml"]).fails_naming(&["road/exit1", "train-drafter"]);
    let exits = |layers: &str| format!("drafters.exit1.exit_layer={layers}");
    for layers in ["-1", "8", "[2, 9]", "[]", "[2, 2]"] {
        place.run(&["train-adapter", "road.toml", "--set", &exits(layers)]).fails_naming(&["exit"]);
    }
    place
        .run(&["train-adapter", "road.toml", "--set", "drafters.exit1.optimizer.batch_size=0"])
        .fails_naming(&["adapter.optimizer.batch_size"]);
    place.run(&["train-adapter", "road.toml", "exit1", "--set", &exits("2")]).ok();
    let adapter = "checkpoints/road/exit1";
    generate(&place, &["--adapter", adapter]).ok();

    // Another target of the same shape, one of another shape, and one with a missing tensor.
    let other = place.copy_model("target", "other");
    let config = std::fs::read_to_string(other.join("config.json")).unwrap();
    std::fs::write(other.join("config.json"), format!("{config}\n")).unwrap();
    let with = |target: &str| {
        place.run(&["generate", "--target", target, "--adapter", adapter, "--prompt", "x"])
    };
    with("other").fails_naming(&[adapter, "another target"]);
    let draft = model("draft").display().to_string();
    with(&draft).fails_naming(&[adapter, "hidden_size"]);
    let shallow = config.replace("\"num_hidden_layers\": 8", "\"num_hidden_layers\": 9");
    std::fs::write(other.join("config.json"), shallow).unwrap();
    with("other").fails_naming(&["model.layers.8."]);
    let set = ["--set", "models.target=other"];
    let mut arguments = vec!["train-adapter", "road.toml"];
    arguments.extend(set);
    place.run(&arguments).fails_naming(&["`target` = "]);

    // Errors in the adapter's config.
    let path = place.path(adapter).join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    for (was, is, named) in [
        ("\"exit_layer\": 2", "\"exit_layer\": 8", "exit_layer"),
        ("\"exit_layer\": 2", "\"exit\": 2", "exit_layer"),
        ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", "layers.1."),
    ] {
        std::fs::write(&path, config.replace(was, is)).unwrap();
        generate(&place, &["--adapter", adapter]).fails_naming(&[named]);
    }
}

#[test]
fn two_devices_train_the_weights_of_one() {
    let weights = |devices: &str| {
        let place = adapter_place();
        place.run(&["build-data", "road.toml"]).ok();
        let set = ["--set", "drafters.exit1.optimizer.gradient_accumulation=2"];
        let train = ["train-adapter", "road.toml", "exit1", "--devices", devices];
        place.run(&[&train[..], &set].concat()).ok();
        std::fs::read(place.path("checkpoints/road/exit1/model.safetensors")).unwrap()
    };
    assert!(weights("cpu") == weights("cpu,cpu"));
}

#[test]
fn contradictory_and_invalid_adapter_flags_are_refused() {
    let place = Place::new();
    let draft = model("draft").display().to_string();
    generate(&place, &["--adapter", "a", "--draft", &draft]).fails_naming(&["--adapter"]);
    generate(&place, &["--rule", "confidence=0.5"]).fails_naming(&["--adapter"]);
    generate(&place, &["--adapter", "a", "--rule", "confidence=1.5"])
        .fails_naming(&["--rule", "`confidence`"]);
    generate(&place, &["--adapter", "absent"]).fails_naming(&["absent"]);
}

#[test]
fn an_adapters_head_works_in_every_stage() {
    let place = adapter_place();
    let path = place.path("road.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace(&adapter("exit1", 1), "").replace("drafters.exit3", "drafters.adapter");
    let more = "decodings = ['greedy']\nrules.head = [0.3, 0.6]\n\
                [drafters.adapter.head]\nlabels = 'rollouts'\nnum_layers = 1\n[drafters.adapter.head.optimizer]\nnum_epochs = 1\n\
                learning_rate = 1e-3\nvalidation_fraction = 0.3\nbatch_size = 2\n\
                gradient_accumulation = 1\n\
                [tune]\nprompts = ['train.jsonl']\nnum_prompts = 8\nmax_candidate_length = 6\n";
    std::fs::write(&path, text + more).unwrap();
    let (adapter, head) = ("checkpoints/road/adapter", "checkpoints/road/adapter/head");
    let json = |path: &str| place.json(path);

    place.run(&["build-data", "road.toml"]).ok();
    let trained = place.run(&["train-adapter", "road.toml", "--json"]).json();
    assert_eq!(trained[0]["head"]["head_dir"], head);
    assert_eq!(trained[0]["head"]["kept"], false);
    assert!(trained[0]["head"]["scores"]["num_labels"].as_u64().unwrap() > 20, "{trained}");
    assert!(place.path("data/road/rollouts-adapter-training-sampled.parquet").is_file());
    let again = place.run(&["train-adapter", "road.toml", "--json"]).json();
    assert_eq!((&again[0]["kept"], &again[0]["head"]["kept"]), (&true.into(), &true.into()));
    let hot = [
        "--set",
        "drafters.adapter.head.optimizer.learning_rate=1e38",
        "--set",
        "drafters.adapter.head.optimizer.warmup_ratio=0",
    ];
    place
        .run(&[&["train-adapter", "road.toml"], &hot[..]].concat())
        .fails_naming(&["not finite in epoch 1", "`head.optimizer.learning_rate`"]);

    // Rollouts have its predictions, and replay compares it with a perfect head.
    for stage in ["record", "tune"] {
        place.run(&[stage, "road.toml"]).ok();
    }
    let config = json(&format!("{head}/config.json"));
    assert!(config["tuned"]["greedy"].is_object(), "{config}");
    assert!(json(&format!("{adapter}/config.json"))["tuned"].is_null());
    let replayed = place.run(&["replay", "road.toml", "--json"]).json();
    assert_eq!(replayed["predictions"][0]["drafter"], "adapter");
    let rows = replayed["groups"][0]["rows"].as_array().unwrap();
    let rule = rows.iter().find(|row| row["stop_rule"] == "rejection_threshold").expect("a rule");
    assert!(rule["ceiling"]["value"].is_number(), "{rule}");

    // Greedy output is the target's under every rule of the head.
    let tokens = |extra: &[&str]| {
        let arguments = [&["--json"], extra].concat();
        generate(&place, &arguments).json()["token_ids"].clone()
    };
    let plain = tokens(&[]);
    for rule in [&[][..], &["--rule", "head=0.2"], &["--rule", "head=0.8"]] {
        assert_eq!(tokens(&[&["--adapter", adapter], rule].concat()), plain, "{rule:?}");
    }
    place.run(&["evaluate", "road.toml"]).ok();
    let rows = place.results("road");
    let of_head = rows.iter().filter(|row| row["stop_rule"] == "rejection_threshold");
    // The tuned rule may have prompt lookup before the drafter.
    let alone = of_head.clone().filter(|row| row["drafter"] == "adapter");
    assert_eq!(alone.count(), 2, "{rows:?}");
    assert!(of_head.clone().count() <= 3, "{rows:?}");
    let checked =
        place.run(&["check", "--allow-slower", adapter, "--num-prompts", "3", "--json"]).json();
    assert_eq!((&checked["passed"], &checked["greedy"]["is_tuned"]), (&true.into(), &true.into()));
    let shown = place.run(&["inspect", adapter, "--json"]).json();
    assert_eq!(shown["head"]["kind"], "acceptance head");
    assert_eq!(shown["head"]["labels"], "rollouts");

    // A head of another adapter is refused.
    let spoilt = std::fs::read_to_string(place.path(head).join("config.json")).unwrap();
    let hash = config["draft_hash"].as_str().unwrap();
    std::fs::write(place.path(head).join("config.json"), spoilt.replace(hash, "other")).unwrap();
    generate(&place, &["--adapter", adapter]).fails_naming(&[head, "another adapter"]);
    let other = [
        "train-adapter",
        "road.toml",
        "--set",
        "drafters.adapter.optimizer.learning_rate=2e-3",
        "--json",
    ];
    let trained = place.run(&other).json();
    assert_eq!(trained[0]["head"]["kept"], false);
    assert_ne!(json(&format!("{head}/config.json"))["draft_hash"], hash);
    generate(&place, &["--adapter", adapter]).ok();
}

#[test]
fn a_stop_threshold_without_a_head_is_refused() {
    let place = Place::new();
    let draft = model("draft").display().to_string();
    generate(&place, &["--draft", &draft, "--rule", "head=0.5"])
        .fails_naming(&["--rule", "`head`", "--head"]);
}

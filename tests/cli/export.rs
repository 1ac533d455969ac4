//! `export`: exports give the same results in other runtimes, and name what they leave out.

use serde_json::Value;

use crate::support::{Place, model};

const ADAPTER: &str = "checkpoints/road/adapter";

/// A place with an adapter after layer 2 that is tuned for greedy decoding. `more` is added to the recipe.
fn adapter_place(more: &str) -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    place.write_prompts("test.jsonl", 3);
    place.write(
        "road.toml",
        format!(
            "[models]\ntarget = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             [drafters.adapter]\nkind = 'adapter'\nexit_layer = 2\nmax_candidate_length = 5\n{more}\
             [drafters.adapter.optimizer]\nnum_epochs = 1\nlearning_rate = 1e-3\nvalidation_fraction = 0.3\n\
             [tune]\nprompts = ['train.jsonl']\nnum_prompts = 8\nmax_candidate_length = 5\n\
             [evaluate]\nprompts = ['test.jsonl']\ndecodings = ['greedy']\nmax_new_tokens = 16\n\
             rules.fixed = [2]\n",
            model("target").display()
        ),
    );
    for stage in ["build-data", "train-adapter"] {
        place.run(&[stage, "road.toml"]).ok();
    }
    place
}

/// Decodes with the embedded target and `drafter`.
fn generate(place: &Place, drafter: [&str; 2]) -> Value {
    let target = model("target").display().to_string();
    let mut arguments = vec!["generate", "--json", "--target", &target, "--max-new-tokens", "40"];
    arguments.extend(["--prompt", "What is 47 + 85? Show the steps.", "--rule", "fixed=3"]);
    arguments.extend(drafter);
    place.run(&arguments).json()
}

/// The numbers of drafted and kept tokens of each round.
fn rounds(generated: &Value) -> Vec<[Value; 2]> {
    let rounds = generated["rounds"].as_array().expect("rounds");
    rounds
        .iter()
        .map(|round| ["num_drafted", "num_accepted"].map(|key| round[key].clone()))
        .collect()
}

#[test]
fn an_adapter_and_its_exported_draft_model_draft_the_same() {
    let place = adapter_place("architecture = 'decoder-layer'\ninitial = 'target'\n");
    // Few steps make no drafter that is worth serving.
    place.write(&format!("{ADAPTER}/scores.json"), r#"{ "agreement": 0.5 }"#);
    let exporting = ["export", "--for", "draft-model", ADAPTER, "draft"];
    let message = place.run(&exporting).ok();
    assert!(message.contains("3 layers"), "{message}");
    let [with_adapter, with_draft] =
        [["--adapter", ADAPTER], ["--draft", "draft"]].map(|drafter| generate(&place, drafter));
    assert_eq!(with_draft["token_ids"], with_adapter["token_ids"]);
    assert!(!message.contains("because of its path"), "{message}");
    let renamed = place.run(&["export", "--for", "draft-model", ADAPTER, "my-EAGLE3-draft"]).ok();
    assert!(renamed.contains("# vLLM 0.33 runs it as `eagle3` because of its path"), "{renamed}");
    assert_eq!(rounds(&with_draft), rounds(&with_adapter));
    let shown = place.run(&["inspect", "draft", "--json"]).json();
    assert_eq!(shown["num_layers"], 3, "{shown}");
    assert_eq!(place.run(&exporting).ok(), message, "the same again");
    place.write("draft/config.json", "{}");
    place.run(&exporting).fails_naming(&["`draft` already exists, with other content", "hint"]);
    std::fs::remove_dir_all(place.path("draft")).unwrap();
    place.run(&exporting).ok();

    assert_eq!(place.json("draft/generation_config.json")["eos_token_id"], 1);
    for name in ["tokenizer.json", "chat_template.jinja"] {
        assert_eq!(
            std::fs::read(place.path("draft").join(name)).unwrap(),
            std::fs::read(model("target").join(name)).unwrap()
        );
    }
    let config = place.json("draft/config.json");
    assert_eq!(config["draftsmith"]["draft_model_of"]["exit_layer"], 2);

    // Each runtime has a start, and after `tune` the best setting with the speed to expect.
    let runtimes = ["llama.cpp", "vLLM", "SGLang", "transformers"];
    for runtime in runtimes {
        assert!(message.contains(&format!("{runtime}, not tuned:\n")), "{message}");
    }
    for stage in ["record", "tune"] {
        place.run(&[stage, "road.toml"]).ok();
    }
    let message = place.run(&["export", "--for", "draft-model", ADAPTER, "tuned"]).ok();
    for runtime in runtimes {
        let line = message.lines().find(|line| line.starts_with(&format!("{runtime}: ")));
        assert!(
            line.is_some_and(|it| it.contains("modelled from this machine's times: adapter, K = ")),
            "{message}"
        );
    }
    assert!(!message.contains("ngram-simple"), "{message}");
    // Where speculation does not pay, and for a drafter that hardly agrees, there is no command.
    let mut tuned = place.json("checkpoints/road/tuning/tuned.json");
    for tuning in tuned["tunings"].as_array_mut().unwrap() {
        tuning["ways"].as_array_mut().unwrap().iter_mut().for_each(|way| {
            way["speedup"]["low"] = 0.01.into();
        });
    }
    place.write("checkpoints/road/tuning/tuned.json", tuned.to_string());
    let message = place.run(&["export", "--for", "draft-model", ADAPTER, "slow"]).ok();
    assert_eq!(message.matches("leave speculation off there").count(), 4, "{message}");
    assert!(!message.contains("vllm serve"), "{message}");
    place.write(&format!("{ADAPTER}/scores.json"), r#"{ "agreement": [0.031, 0.2] }"#);
    let message = place.run(&["export", "--for", "draft-model", ADAPTER, "weak"]).ok();
    assert!(
        message.contains("no start command: its agreement with the target is 0.031, too low"),
        "{message}"
    );
    assert!(!message.contains("vllm serve"), "{message}");
}

#[test]
fn unsupported_exports_as_draft_models_are_named() {
    let place = adapter_place("architecture = 'mlp-only'\n");
    let export = |source: &str, more: &[&str]| {
        let mut arguments = vec!["export", "--for", "draft-model", source, "out"];
        arguments.extend(more);
        place.run(&arguments)
    };
    export(ADAPTER, &[]).fails_naming(&["`mlp-only`", "decoder-layer"]);
    assert!(!place.path("out").exists());
    let narrow =
        ["train-adapter", "road.toml", "--set", "drafters.adapter.architecture=\"attention\""];
    place.run(&[&narrow[..], &["--set", "drafters.adapter.draft_vocabulary=200"]].concat()).ok();
    let message = export(ADAPTER, &[]).ok();
    assert!(message.contains("the draft vocabulary: "), "{message}");
    let drafted = generate(&place, ["--draft", "out"]);
    let plain = generate(&place, ["--adapter", ADAPTER]);
    assert_eq!(drafted["token_ids"], plain["token_ids"]);

    export("absent", &[]).fails_naming(&["absent", "train-drafter"]);
    let target = model("target").display().to_string();
    export(&target, &[]).fails_naming(&["acceptance head (`num_layers`)"]);
    std::fs::remove_file(place.path(ADAPTER).join("recipe.toml")).unwrap();
    export(ADAPTER, &[]).fails_naming(&["recipe.toml", "--recipe"]);
    place.run(&["export", "--for", "nothing", ADAPTER, "o"]).fails_naming(&["draft-model"]);
}

#[test]
fn the_authors_formats_round_trip_and_losses_are_named() {
    let place = adapter_place("architecture = 'attention'\n");
    let message = place.run(&["export", "--for", "kangaroo", ADAPTER, "theirs"]).ok();
    assert!(message.contains("an adapter for Kangaroo's class"), "{message}");
    let files = std::fs::read_dir(place.path("theirs")).unwrap();
    let mut files: Vec<String> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    assert_eq!(files, ["config.json", "pytorch_model.bin"]);
    let import = |more: &[&str]| {
        place.run(&[&["import", "--from", "kangaroo", "theirs", "back"], more].concat())
    };
    import(&[]).fails_naming(&["--exit-layer"]);
    assert!(!place.path("back").exists());
    import(&["--exit-layer", "2"]).ok();
    let [ours, back] =
        [["--adapter", ADAPTER], ["--adapter", "back"]].map(|drafter| generate(&place, drafter));
    assert_eq!(back["token_ids"], ours["token_ids"]);
    assert_eq!(rounds(&back), rounds(&ours));
    // Kangaroo's class uses rotary base 10,000 regardless of the file.
    let config = place.path("theirs").join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json["rope_theta"] = 500_000.0.into();
    json["rope_parameters"]["rope_theta"] = 500_000.0.into();
    std::fs::write(&config, json.to_string()).unwrap();
    std::fs::remove_dir_all(place.path("back")).unwrap();
    let ran = import(&["--exit-layer", "2"]);
    assert!(ran.stderr.contains("500000") && ran.stderr.contains("10000"), "{}", ran.stderr);
    assert_eq!(rounds(&generate(&place, ["--adapter", "back"])), rounds(&ours));
    place
        .run(&["export", "--for", "specdec-pp", ADAPTER, "out"])
        .fails_naming(&["the self-draft adapter", "hint"]);
}

#[test]
fn heads_are_exported_for_the_authors_class_and_for_transformers() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml", "--set", "drafters.draft.head.num_layers=2"]).ok();
    const HEAD: &str = "checkpoints/small/draft/head";
    let message = place.run(&["export", "--for", "specdec-pp", HEAD, "theirs"]).ok();
    assert!(message.contains("from_pretrained(\"theirs\")"), "{message}");
    let draft = place.json(&format!("{HEAD}/config.json"))["hidden_size"].clone();
    let expected = serde_json::json!({ "hidden_size": draft, "num_layers": 2 });
    assert_eq!(place.json("theirs/config.json"), expected);
    place.run(&["import", "--from", "specdec-pp", "theirs", "back"]).ok();
    let decode = |head: &str| {
        let (target, draft) = (model("target"), model("draft"));
        let [target, draft] = [&target, &draft].map(|path| path.display().to_string());
        let mut arguments = vec!["generate", "--json", "--target", &target, "--draft", &draft];
        arguments.extend(["--head", head, "--rule", "head=0.4", "--max-new-tokens", "40"]);
        arguments.extend(["--prompt", "What is 47 + 85? Show the steps."]);
        rounds(&place.run(&arguments).json())
    };
    assert_eq!(decode("back"), decode(HEAD));

    // For transformers, in the draft's directory.
    let arguments =
        ["export", "--for", "transformers", HEAD, "inside", "--stop-threshold", "0.4", "--json"];
    let exported = place.run(&arguments).json();
    assert!(exported["commands"].to_string().contains("trust_remote_code"), "{exported}");
    let settings = place.json("inside/acceptance_head.json");
    assert_eq!(
        (&settings["stop_threshold"], &settings["form"]),
        (&0.4.into(), &"candidate".into())
    );
    assert_eq!((&settings["num_layers"], &settings["num_stored_blocks"]), (&2.into(), &1.into()));
    let generation = place.json("inside/generation_config.json");
    assert_eq!(generation["num_assistant_tokens"], settings["max_candidates"]);
    assert_eq!(generation["assistant_confidence_threshold"], 0.0);
    for name in ["generate.py", "acceptance_head.py"] {
        assert!(place.path("inside/custom_generate").join(name).is_file(), "{name}");
    }
    let same = |name: &str| {
        std::fs::read(place.path("inside").join(name)).unwrap()
            == std::fs::read(model("draft").join(name)).unwrap()
    };
    assert!(same("model.safetensors") && same("config.json") && same("tokenizer.json"));
    place.run(&["export", "--for", "draft-model", HEAD, "out"]).fails_naming(&["acceptance head"]);
    let wrong = ["export", "--for", "transformers", HEAD, "out", "--stop-threshold", "1.5"];
    place.run(&wrong).fails_naming(&["1.5"]);
    assert!(!place.path("out").exists());

    // A head that the class cannot compute.
    for (keys, named) in [
        (
            &["drafters.draft.head.form=\"look-ahead\"", "drafters.draft.head.labels=\"overlap\""]
                [..],
            "looks ahead",
        ),
        (&["drafters.draft.head.inputs=[\"entropy\"]"], "`inputs`"),
        (&["drafters.draft.head.num_layers=2", "drafters.draft.head.tied=false"], "untied"),
    ] {
        let mut arguments = vec!["train-head", "small.toml"];
        arguments.extend(keys.iter().flat_map(|key| ["--set", key]));
        place.run(&arguments).ok();
        place.run(&["export", "--for", "specdec-pp", HEAD, "out"]).fails_naming(&[named]);
    }
}

#[cfg(unix)]
#[test]
fn a_named_pipe_or_a_number_that_is_not_finite_is_no_checkpoint() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    let head = place.path("checkpoints/small/draft/head");
    let path = head.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let len = bytes.len();
    bytes[len - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let config = std::fs::read_to_string(head.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("weights_hash");
    std::fs::write(head.join("config.json"), config.to_string()).unwrap();
    let import = ["import", "--from", "specdec-pp", "checkpoints/small/draft/head", "imported"];
    place.run(&import).fails_naming(&["checkpoints/small/draft/head", "tensor `", "NaN"]);
    assert!(!place.path("imported").exists());

    let kangaroo = place.path("kangaroo");
    std::fs::create_dir(&kangaroo).unwrap();
    let pipe = kangaroo.join("pytorch_model.bin");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    place.write("kangaroo/config.json", "{}");
    let import = ["import", "--from", "kangaroo", "--exit-layer", "2", "kangaroo", "imported"];
    place.run(&import).fails_naming(&["pytorch_model.bin", "not a regular file"]);
}

#[test]
fn a_threshold_is_refused_where_nothing_reads_it() {
    let place = Place::new();
    let export = |form| ["export", "--for", form, "--stop-threshold", "0.5", "nowhere", "out"];
    for form in ["draft-model", "kangaroo", "specdec-pp"] {
        place.run(&export(form)).fails_naming(&["--stop-threshold", "--for transformers"]);
    }
}

//! `export`: what other runtimes load says what it says here, and what cannot be taken along is named.

use serde_json::Value;

use crate::support::{Place, model};

const ADAPTER: &str = "checkpoints/road/adapter";

/// A place with a recipe of an adapter behind layer 2, tuned greedily, and what `more` adds to it.
fn adapter_place(more: &str) -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    place.write_prompts("test.jsonl", 3);
    place.write(
        "road.toml",
        format!(
            "[models]\ntarget = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             [adapter]\nexit_layer = 2\n{more}\
             [adapter.optimizer]\nnum_epochs = 1\nlearning_rate = 1e-3\nvalidation_fraction = 0.3\n\
             [tune]\nprompts = ['train.jsonl']\nnum_prompts = 8\nmax_length = 5\n\
             [evaluate]\nprompts = ['test.jsonl']\ndecodings = ['greedy']\nmax_new_tokens = 16\n\
             self_draft_lengths = [2]\nmax_self_draft_length = 5\n",
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
    arguments.extend(["--prompt", "What is 47 + 85? Show the steps.", "--candidate-length", "3"]);
    arguments.extend(drafter);
    place.run(&arguments).json()
}

/// What each round drafted and kept.
fn rounds(generated: &Value) -> Vec<[Value; 2]> {
    let rounds = generated["rounds"].as_array().expect("rounds");
    rounds
        .iter()
        .map(|round| ["num_drafted", "num_accepted"].map(|key| round[key].clone()))
        .collect()
}

#[test]
fn an_adapter_drafts_the_same_as_a_draft_model_of_its_own() {
    let place = adapter_place("architecture = 'decoder-layer'\ninitial = 'target'\n");
    let untuned = ["export", "--for", "draft-model", ADAPTER, "draft"];
    let told = place.run(&untuned).ok();
    assert!(told.contains("3 layers") && told.contains("tune --for draft-model"), "{told}");
    let [with_adapter, with_draft] =
        [["--adapter", ADAPTER], ["--draft", "draft"]].map(|drafter| generate(&place, drafter));
    assert_eq!(with_draft["token_ids"], with_adapter["token_ids"]);
    assert_eq!(rounds(&with_draft), rounds(&with_adapter));
    let shown = place.run(&["inspect", "draft", "--json"]).json();
    assert_eq!(shown["num_layers"], 3, "{shown}");
    place.run(&untuned).fails_naming(&["`draft` is there already", "hint"]);

    // Tuned for this use, it says what transformers is to do.
    place.run(&["record", "road.toml"]).ok();
    let tuned = place.run(&["tune", "--for", "draft-model", "road.toml", "--json"]).json();
    let runtimes = tuned[0]["runtimes"].as_array().unwrap();
    let names: Vec<&str> = runtimes.iter().map(|one| one["runtime"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["transformers", "transformers", "transformers", "llama.cpp", "vLLM", "SGLang"]
    );
    let config = place.json(&format!("{ADAPTER}/config.json"));
    assert_eq!(&config["tuned_draft_model"]["greedy"], &tuned[0]["runtimes"]);
    assert_eq!(config["tuned_draft_model"]["num_prompts"], 8);
    let exported =
        place.run(&["export", "--for", "draft-model", ADAPTER, "tuned", "--json"]).json();
    assert_eq!(exported["ignored"], serde_json::json!([]), "{exported}");
    let commands = exported["commands"].to_string();
    assert!(commands.contains("--spec-type draft-simple"), "{commands}");
    let generation = place.json("tuned/generation_config.json");
    assert_eq!(generation["num_assistant_tokens_schedule"], "constant");
    assert!(generation["num_assistant_tokens"].as_u64().is_some_and(|length| length <= 5));
    assert!(generation["assistant_confidence_threshold"].is_number());
    assert_eq!(generation["eos_token_id"], 1, "the target's keys stay");
    for name in ["tokenizer.json", "chat_template.jinja"] {
        assert_eq!(
            std::fs::read(place.path("tuned").join(name)).unwrap(),
            std::fs::read(model("target").join(name)).unwrap()
        );
    }
    let other = place.json("draft/config.json");
    assert_eq!(place.json("tuned/config.json"), other, "the same model");
    assert_eq!(other["draftsmith"]["draft_model_of"]["exit_layer"], 2);
}

#[test]
fn what_an_ordinary_model_cannot_be_is_named() {
    let place = adapter_place("architecture = 'mlp-only'\n");
    let export = |source: &str, more: &[&str]| {
        let mut arguments = vec!["export", "--for", "draft-model", source, "out"];
        arguments.extend(more);
        place.run(&arguments)
    };
    export(ADAPTER, &[]).fails_naming(&["`mlp-only`", "decoder-layer"]);
    assert!(!place.path("out").exists());
    let narrow = ["train-adapter", "road.toml", "--set", "adapter.architecture=\"attention\""];
    place.run(&[&narrow[..], &["--set", "adapter.draft_vocabulary=200"]].concat()).ok();
    let told = export(ADAPTER, &[]).ok();
    assert!(told.contains("the draft vocabulary: "), "{told}");
    let drafted = generate(&place, ["--draft", "out"]);
    let plain = generate(&place, ["--adapter", ADAPTER]);
    assert_eq!(drafted["token_ids"], plain["token_ids"]);

    export("absent", &[]).fails_naming(&["absent", "train-adapter"]);
    let target = model("target").display().to_string();
    export(&target, &[]).fails_naming(&["neither a head's"]);
    std::fs::remove_file(place.path(ADAPTER).join("recipe.toml")).unwrap();
    export(ADAPTER, &[]).fails_naming(&["recipe.toml", "--recipe"]);
    place.run(&["export", "--for", "nothing", ADAPTER, "o"]).fails_naming(&["draft-model"]);
}

//! EAGLE-1 drafters: trained, tuned, measured in chains and EAGLE-2's trees, and exported for each server.

use serde_json::{Value, json};

use crate::block::recipe;
use crate::doctor::{Tensors, findings};
use crate::support::{Place, model};

#[test]
fn a_trained_eagle_1_drafter_changes_no_token_and_is_exported_for_each_server() {
    let place = Place::new();
    let training = "kind = 'eagle'\nnum_steps = 2\n\
                    optimizer = { num_epochs = 2, learning_rate = 1e-3, validation_fraction = 0.3 }";
    let recipe = recipe(&place, training);
    place.run(&["build-data", &recipe]).ok();
    let export = place.path("checkpoints/mine/it");
    let bytes = || {
        ["model.safetensors", "config.json"].map(|name| std::fs::read(export.join(name)).unwrap())
    };
    let trained = place.run(&["train-drafter", &recipe, "--json"]).json();
    assert_eq!(trained[0]["kind"], "eagle", "{trained}");
    let whole = bytes();
    std::fs::remove_dir_all(&export).unwrap();
    place.run(&["train-drafter", &recipe]).ok();
    assert!(whole == bytes(), "another training of the same data has the same bytes");
    let shown = place.run(&["inspect", "checkpoints/mine/it", "--json"]).json();
    assert_eq!((&shown["kind"], &shown["bias"]), (&"EAGLE-1 drafter".into(), &false.into()));
    for stage in ["record", "tune", "evaluate"] {
        place.run(&[stage, &recipe, "--set", "evaluate.trees.shapes=['10x10x50']"]).ok();
    }
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let greedy = rows.as_array().unwrap().iter().filter(|row| row["decoding"] == "greedy");
    let drafted = greedy.filter(|row| row["drafter"] != "none");
    assert!(drafted.clone().any(|row| row["drafter"] == "it+tree_10x10x50"), "{rows}");
    for row in drafted {
        assert_eq!((&row["lossless"], &row["num_forgiven_ties"]), (&true.into(), &0.into()));
    }

    let to_llama_cpp = ["tune", &recipe, "--for", "llama.cpp", "--server-costs", "costs.json"];
    let cell = |num: u32| json!({ "concurrency": 1, "num_candidates": num, "block_ms": [5.0, 5.0], "tokens_per_round": null });
    let cells: Vec<Value> = [0, 1, 3].map(cell).into();
    let costs = json!({ "model": "mock", "num_words": 150, "cells": cells });
    place.write("costs.json", costs.to_string());
    place.run(&to_llama_cpp).fails_naming(&["does not load `it`", "hint: "]);

    // A later training begins with this drafter.
    let more = "drafters.more={kind='eagle',num_steps=2,initial='checkpoints/mine/it'}";
    place.run(&["train-drafter", &recipe, "more", "--set", more]).ok();

    std::fs::remove_file(export.join("scores.json")).unwrap();
    std::fs::remove_dir_all(place.path("checkpoints/mine/tuning")).unwrap();
    let export = |form: &str, out: &str| -> String {
        let arguments = ["export", "--for", form, "checkpoints/mine/it", out, "--json"];
        place.run(&arguments).json()["commands"].to_string()
    };
    let commands = export("eagle", "vllm");
    assert!(
        commands.contains(r#"\"method\": \"eagle\""#) || commands.contains("eagle"),
        "{commands}"
    );
    for other in ["llama-server", "sglang"] {
        assert!(!commands.contains(other), "it does not load this form: {commands}");
    }
    export("eagle-sglang", "sglang");
    let has_bias = |dir: &str| Tensors::read(&place.path(dir)).header.contains_key("fc.bias");
    assert_eq!(["vllm", "sglang"].map(has_bias), [false, true]);
    for (dir, class) in [("vllm", "LlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")] {
        assert_eq!(place.json(&format!("{dir}/config.json"))["architectures"][0], class);
        assert_eq!(findings(&place, dir).0, ["bias"]);
    }
    let target = model("target").display().to_string();
    let generate = |drafter: &str| {
        let arguments = ["generate", "--target", &target, "--drafter", drafter];
        let prompt = ["--prompt", "What is 47 + 85?", "--rule", "fixed=3", "--json"];
        place.run(&[&arguments[..], &prompt].concat()).json()
    };
    let all: Vec<Value> = ["checkpoints/mine/it", "vllm", "sglang"].map(generate).into();
    for key in ["token_ids", "num_accepted"] {
        assert!(all.iter().all(|it| it[key] == all[0][key]), "{key}");
    }
}

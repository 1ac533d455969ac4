//! Medusa's heads: trained, recorded, tuned, measured and exported like any drafter, and read again in the authors' form.

use serde_json::{Value, json};

use crate::support::{Place, model};

fn recipe(place: &Place, drafter: &str) -> String {
    place.write_prompts("train.jsonl", 12);
    place.write_prompts("test.jsonl", 3);
    let text = format!(
        "[models]\ntarget = '{}'\n[drafters.it]\nkind = 'medusa'\n{drafter}\n\
         [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 16\ntrees = {{ shapes = ['4x16x12'] }}\n\
         [evaluate.rules]\nfixed = [2]\nconfidence = [0.1]\n\
         [tune]\nprompts = ['test.jsonl']\nnum_prompts = 3\nmax_candidate_length = 3\n\
         costs = {{ draft_ms = 1.0, target_ms = 4.0 }}\n",
        model("target").display()
    );
    place.write("mine.toml", text).display().to_string()
}

#[test]
fn heads_go_through_every_stage_and_their_export_is_read_again() {
    let place = Place::new();
    let optimizer =
        "optimizer = { num_epochs = 2, gradient_accumulation = 1, validation_fraction = 0.3 }";
    let recipe = recipe(&place, &format!("num_heads = 3\nteacher = 'response'\n{optimizer}"));
    for stage in ["build-data", "train-drafter", "record", "tune", "evaluate"] {
        place.run(&[stage, &recipe]).ok();
    }
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let rows = rows.as_array().unwrap().iter().filter(|row| row["drafter"] != "none");
    let rows: Vec<&Value> = rows.collect();
    for row in &rows {
        let count = |key: &str| row[key].as_u64().unwrap();
        let lossless = if row["decoding"] == "greedy" { true.into() } else { Value::Null };
        assert_eq!((&row["lossless"], count("num_forgiven_ties")), (&lossless, 0), "{row}");
        let is_alone = row["drafter"] == "it";
        assert!(!is_alone || count("num_draft_forwards") <= count("num_target_forwards"), "{row}");
    }
    for rule in ["fixed_length", "confidence_threshold"] {
        assert!(rows.iter().any(|row| row["stop_rule"] == rule), "{rule}");
    }
    place.run(&["export", "--for", "medusa", "checkpoints/mine/it", "authors"]).ok();
    assert_eq!(place.names("authors"), ["config.json", "medusa_lm_head.pt"]);
    let keys = place.json("authors/config.json");
    assert_eq!((&keys["medusa_num_heads"], &keys["medusa_num_layers"]), (&json!(3), &json!(1)));
    let target = model("target").display().to_string();
    assert_eq!(keys["base_model_name_or_path"], target.as_str());
    let shown = place.run(&["inspect", "authors", "--json"]).json();
    assert_eq!((&shown["kind"], &shown["medusa_num_heads"]), (&json!("Medusa heads"), &json!(3)));
    let generate = |extra: &[&str]| {
        let arguments = ["generate", "--target", &target, "--max-new-tokens", "30", "--json"];
        let prompt = ["--prompt", "What is 47 + 85? Show the steps."];
        place.run(&[&arguments[..], &prompt, extra].concat()).json()
    };
    let plain = generate(&[]);
    for dir in ["checkpoints/mine/it", "authors"] {
        for form in [["--rule", "fixed=9"], ["--tree", "10x64x59"]] {
            let found = generate(&[&["--drafter", dir][..], &form].concat());
            assert_eq!(found["token_ids"], plain["token_ids"], "{dir} {form:?}");
        }
    }
    let rounds = generate(&["--drafter", "authors", "--rule", "fixed=9"])["rounds"].clone();
    let drafted = rounds.as_array().unwrap().iter().map(|round| round["num_drafted"].as_u64());
    assert_eq!(drafted.max().flatten(), Some(3), "one candidate for each head");
}

#[test]
fn errors_name_what_heads_cannot_have() {
    let place = Place::new();
    let train = |drafter: &str| place.run(&["train-drafter", &recipe(&place, drafter)]);
    train("num_heads = 9").fails_naming(&["drafters.it", "num_heads", "1 to 8"]);
    train("draft_vocabulary = 64").fails_naming(&["draft_vocabulary", "all tokens"]);
    train("heads = 2").fails_naming(&["heads", "num_heads"]);
    let record = |drafter: &str| place.run(&["record", &recipe(&place, drafter)]);
    record("path = 'none'").fails_naming(&["no Medusa heads in `none`", "train-drafter"]);
    record("head = { path = 'head' }\npath = 'none'").fails_naming(&["`head`", "it"]);
}

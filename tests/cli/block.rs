//! Block drafters of others: generated with, recorded, tuned and measured like any drafter, at one draft forward a
//! round.

use std::path::Path;

use burn::tensor::Device;
use draftsmith_model::{
    BlockDrafterConfig, CausalLm, ConfidenceHead, DraftVocabulary, ModelConfig,
};
use draftsmith_theory::SeededDraws;
use serde_json::{Value, json};

use crate::doctor::{edit_config, edit_tensors, findings};
use crate::support::{Place, model};

/// The number of candidates of the drafter that tests write.
pub(crate) const NUM_CANDIDATES: u64 = 3;

/// Writes a fill-in, bidirectional drafter of the embedded target with random weights.
pub(crate) fn write_drafter(dir: &Path) {
    let target = ModelConfig::from_model_dir(&model("target")).unwrap();
    let config = BlockDrafterConfig::new(&target, 2, 0).with(|it| {
        it.block_size = NUM_CANDIDATES as usize + 1;
        it.is_anchor_first = false;
        it.is_causal = false;
        it.markov_rank = 4;
        it.confidence = ConfidenceHead::OfRowAndToken;
    });
    write_block(dir, config);
}

/// Writes a drafter of the embedded target with random weights.
fn write_block(dir: &Path, config: BlockDrafterConfig) {
    std::fs::create_dir_all(dir).unwrap();
    let device = Device::flex();
    let target = CausalLm::from_model_dir(&model("target"), &device).unwrap();
    let mut draws = SeededDraws::new(7, &["block"]);
    let drafter = config.init_for(&target, &device, || draws.uniform());
    drafter.write_dir(dir, &config).unwrap();
}

pub(crate) fn recipe(place: &Place, drafter: &str) -> String {
    place.write_prompts("test.jsonl", 4);
    let text = format!(
        "[models]\ntarget = '{}'\n[drafters.it]\n{drafter}\n\
         [data]\nprompts = ['test.jsonl']\nmax_new_tokens = 16\n\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 16\ntrees = {{ shapes = ['2x2x3'] }}\n\
         [evaluate.rules]\nfixed = [2]\nconfidence = [0.01]\n\
         [tune]\nprompts = ['test.jsonl']\nnum_prompts = 4\nmax_candidate_length = 3\n\
         costs = {{ draft_ms = 1.0, target_ms = 4.0 }}\n",
        model("target").display()
    );
    place.write("mine.toml", text).display().to_string()
}

#[test]
fn a_block_drafter_changes_no_token_and_proposes_no_more_than_it_was_trained_for() {
    let place = Place::new();
    write_drafter(&place.path("block"));
    let target = model("target").display().to_string();
    let generate = |extra: &[&str]| {
        let arguments = ["generate", "--target", &target, "--max-new-tokens", "40", "--json"];
        let prompt = ["--prompt", "What is 47 + 85? Show the steps."];
        place.run(&[&arguments[..], &prompt, extra].concat()).json()
    };
    let plain = generate(&[]);
    for rule in ["fixed=2", "fixed=9", "confidence=0.01", "head=0.6"] {
        for lookup in [&[][..], &["--lookup-first", "2x4"]] {
            let found = generate(&[&["--drafter", "block", "--rule", rule], lookup].concat());
            assert_eq!(found["token_ids"], plain["token_ids"], "{rule} {lookup:?}");
        }
    }
    let rounds = generate(&["--drafter", "block", "--rule", "fixed=9"])["rounds"].clone();
    // An end token ends some rounds.
    let drafted = rounds.as_array().unwrap().iter().map(|round| round["num_drafted"].as_u64());
    assert_eq!(drafted.max().flatten(), Some(NUM_CANDIDATES), "no more than it was trained for");
}

#[test]
fn a_block_drafter_goes_through_every_stage_but_training() {
    let place = Place::new();
    write_drafter(&place.path("block"));
    let recipe = recipe(&place, "kind = 'block'\npath = 'block'");
    place.run(&["record", &recipe]).ok();
    place.run(&["tune", &recipe]).ok();
    let tuned = place.json("checkpoints/mine/tuning/it/config.json");
    assert!(tuned["tuned"]["greedy"]["config"].is_object(), "{tuned}");
    place.run(&["evaluate", &recipe]).ok();
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let rows = rows.as_array().unwrap().iter().filter(|row| row["drafter"] != "none");
    let rows: Vec<&Value> = rows.collect();
    for row in &rows {
        let count = |key: &str| row[key].as_u64().unwrap();
        let lossless = if row["decoding"] == "greedy" { true.into() } else { Value::Null };
        assert_eq!((&row["lossless"], count("num_forgiven_ties")), (&lossless, 0), "{row}");
        let (num_tokens, num_forwards) = (count("num_tokens"), count("num_target_forwards"));
        assert_eq!(count("num_drafted") + num_forwards, num_tokens + count("num_discarded"));
        // Looked-up tokens are counted as draft forwards too.
        let is_alone = row["drafter"] == "it";
        assert!(!is_alone || count("num_draft_forwards") <= num_forwards, "{row}");
    }
    for rule in ["fixed_length", "confidence_threshold", "rejection_threshold"] {
        assert!(rows.iter().any(|row| row["stop_rule"] == rule), "{rule}");
    }
    let shown = place.run(&["inspect", "block", "--json"]).json();
    assert_eq!((&shown["kind"], &shown["markov_rank"]), (&"block drafter".into(), &4.into()));
    assert_eq!(shown["num_candidates"], NUM_CANDIDATES);
    let target = model("target").display().to_string();
    let found = place.run(&["server", "doctor", "block", "--target", &target, "--json"]).json();
    assert_eq!(found["form"], "block");
    let names = found["findings"].as_array().unwrap().iter().map(|finding| &finding["name"]);
    assert_eq!(names.collect::<Vec<_>>(), ["head-never-built", "bidirectional"], "{found}");
}

#[test]
fn errors_name_what_a_block_drafter_cannot_have() {
    let place = Place::new();
    write_drafter(&place.path("block"));
    let record = |drafter: &str| place.run(&["record", &recipe(&place, drafter)]);
    record("kind = 'block'").fails_naming(&["no block drafter", "train-drafter"]);
    record("kind = 'block'\nnum_steps = 2").fails_naming(&["drafters", "`block_size`"]);
    record("kind = 'block'\nblock_size = 9").fails_naming(&["drafters.it", "block_size", "1 to 8"]);
    record("kind = 'block'\npath = 'block'\nlayers = [2]")
        .fails_naming(&["drafters", "no other keys"]);
    record("kind = 'block'\npath = 'absent'").fails_naming(&["no block drafter", "absent"]);
    place.write("head/config.json", "{}");
    record("kind = 'block'\npath = 'block'\nhead = { path = 'head' }").fails_naming(&[
        "`it`",
        "`block`",
        "no acceptance head",
    ]);
    let path = place.path("block").join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["markov_head_type"] = "gated".into();
    std::fs::write(&path, config.to_string()).unwrap();
    record("kind = 'block'\npath = 'block'").fails_naming(&["markov_head_type", "`gated`"]);
}

#[test]
fn a_trained_block_drafter_is_tuned_and_changes_no_token() {
    let place = Place::new();
    let training = "kind = 'block'\nblock_size = 3\nnum_layers = 1\nmarkov_rank = 4\ndraft_vocabulary = 300\n\
                    optimizer = { num_epochs = 2, validation_fraction = 0.3 }";
    let recipe = recipe(&place, training);
    place.run(&["build-data", &recipe]).ok();
    let export = place.path("checkpoints/mine/it");
    let bytes = || {
        ["model.safetensors", "config.json"].map(|name| std::fs::read(export.join(name)).unwrap())
    };
    let trained = place.run(&["train-drafter", &recipe, "--json"]).json();
    assert_eq!(trained[0]["kind"], "block", "{trained}");
    let whole = bytes();
    std::fs::remove_dir_all(&export).unwrap();
    place.run(&["train-drafter", &recipe]).ok();
    assert!(whole == bytes(), "another training of the same data has the same bytes");
    let shown = place.run(&["inspect", "checkpoints/mine/it", "--json"]).json();
    assert_eq!((&shown["num_candidates"], &shown["causal"]), (&3.into(), &true.into()), "{shown}");
    // By default, longer rounds are recorded than the drafter can propose.
    for stage in ["record", "tune", "evaluate"] {
        place.run(&[stage, &recipe, "--set", "tune.max_candidate_length=20"]).ok();
    }
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let drafted: Vec<&Value> =
        rows.as_array().unwrap().iter().filter(|row| row["drafter"] == "it").collect();
    for row in &drafted {
        assert_ne!(row["lossless"], false, "{row}");
        assert!(row["num_draft_forwards"].as_u64() <= row["num_target_forwards"].as_u64(), "{row}");
    }
    assert!(drafted.iter().any(|row| row["lossless"] == true), "{rows}");

    // Servers read the same drafter, without the record of its training.
    let exported =
        place.run(&["export", "--for", "dspark", "checkpoints/mine/it", "served", "--json"]).json();
    let commands = exported["commands"].to_string();
    assert!(commands.contains("its agreement with the target is 0.0"), "{commands}");
    // Nothing is known of a drafter without scores and tuning, so it may be worth serving.
    std::fs::remove_file(export.join("scores.json")).unwrap();
    std::fs::remove_dir_all(place.path("checkpoints/mine/tuning")).unwrap();
    let again =
        place.run(&["export", "--for", "dspark", "checkpoints/mine/it", "again", "--json"]).json();
    let commands = again["commands"].to_string();
    for part in ["draft-dspark", "--target-model-dir", "DSPARK", "dspark-block-size"] {
        assert!(commands.contains(part), "`{part}`: {commands}");
    }
    assert!(exported["ignored"].to_string().contains("draft vocabulary, in SGLang"), "{exported}");
    let served = place.json("served/config.json");
    assert_eq!((&served["training"], &served["target_hash"]), (&Value::Null, &Value::Null));
    let target = model("target").display().to_string();
    let generate = |drafter: &str| {
        let prompt = ["--prompt", "What is 47 + 85?", "--rule", "fixed=3", "--json"];
        place
            .run(&[&["generate", "--target", &target, "--drafter", drafter], &prompt[..]].concat())
            .json()
    };
    let [own, other] = ["checkpoints/mine/it", "served"].map(generate);
    assert_eq!(own["token_ids"], other["token_ids"]);
    assert_eq!(own["num_accepted"], other["num_accepted"], "{own}");
}

#[test]
fn a_confidence_head_is_attached_to_a_drafter_of_others() {
    let place = Place::new();
    write_drafter(&place.path("block"));
    let recipe = recipe(&place, "kind = 'block'\npath = 'block'");
    place.write_prompts("test.jsonl", 24);
    let train = |out: &str, more: &[&str]| {
        place.run(&[&["attach-head", &recipe, out, "--json"], more].concat())
    };
    train("head", &[]).fails_naming(&["data/mine", "draftsmith build-data"]);
    place.run(&["build-data", &recipe]).ok();
    let outcome = train("head", &[]).json();
    assert!(outcome["num_places"].as_u64().unwrap() > 100, "{outcome}");
    for loss in outcome["log_losses"].as_array().unwrap() {
        assert!((0.0..2.0).contains(&loss.as_f64().unwrap()), "{outcome}");
    }
    assert_eq!(outcome["advice"].as_array().unwrap().len(), 3);
    let temperatures = place.json("head/temperatures.json");
    let num = temperatures["temperatures"].as_array().unwrap().len();
    assert_eq!(num as u64, NUM_CANDIDATES);
    let config = place.json("head/config.json");
    assert_eq!(config["markov_rank"], 5, "a number for each token before a candidate");
    // The drafter proposes what it did, and our decoder cuts by the head before a draw.
    let target = model("target").display().to_string();
    let rounds = |dir: &str, rule: &str| {
        let found = place.run(&[
            "generate",
            "--target",
            &target,
            "--drafter",
            dir,
            "--rule",
            rule,
            "--max-new-tokens",
            "40",
            "--json",
            "--prompt",
            "What is 47 + 85?",
        ]);
        let found = found.json();
        let of_round =
            |round: &Value| ["num_drafted", "num_accepted"].map(|key| round[key].as_u64().unwrap());
        let rounds = found["rounds"].as_array().unwrap().iter().map(of_round);
        (found["token_ids"].clone(), rounds.collect::<Vec<_>>())
    };
    assert_eq!(rounds("block", "fixed=3"), rounds("head", "fixed=3"));
    let (plain, every) = (rounds("head", "fixed=3").0, rounds("head", "confidence-head=1"));
    assert_eq!(plain, every.0);
    assert!(every.1.iter().all(|[num_drafted, _]| *num_drafted == 0), "nothing is certain");
    let limited =
        ["generate", "--target", &target, "--drafter", "head", "--rule", "confidence-head=0"];
    let limited =
        [&limited[..], &["--max-candidate-length", "2", "--json", "--prompt", "1 + 1?"]].concat();
    let rounds = place.run(&limited).json()["rounds"].clone();
    let drafted = rounds.as_array().unwrap().iter().map(|round| round["num_drafted"].as_u64());
    assert_eq!(drafted.max().flatten(), Some(2));
    // The same again is kept, and other options do not replace it.
    let again = train("head", &[]);
    assert!(again.stderr.contains("`head` is there, kept"), "{}", again.stderr);
    assert_eq!(again.json(), outcome);
    train("head", &["--rejection-weight", "2"]).fails_naming(&["already exists"]);
    train("kept", &["--keep-markov-head", "--drafter", "it"]).ok();
    assert_eq!(place.json("kept/config.json")["markov_rank"], 4);
    train("other", &["--drafter", "lookup"]).fails_naming(&["no block drafter `lookup`", "it has"]);
    train("other", &["--rejection-weight", "0"]).fails_naming(&["--rejection-weight"]);
    assert!(!place.path("other").exists());
}

type Damage = (&'static str, &'static [&'static str], fn(&Path));

fn without_key(dir: &Path, key: &str) {
    edit_config(dir, |config| drop(config.remove(key)));
}

fn with_key(dir: &Path, key: &str, value: Value) {
    edit_config(dir, |config| drop(config.insert(key.into(), value)));
}

/// What servers do with one change to a DSpark, by name, and what else is found then.
const DAMAGES: [Damage; 11] = [
    ("no-mask-token", &[], |dir| without_key(dir, "mask_token_id")),
    ("no-layout", &[], |dir| {
        with_key(dir, "speculators_model_type", json!("dspark"));
        without_key(dir, "sample_from_anchor");
    }),
    ("markov-head-type", &[], |dir| with_key(dir, "markov_head_type", json!("gated"))),
    ("no-confidence-bias", &["head-never-built"], |dir| {
        edit_tensors(dir, |it| drop(it.header.remove("confidence_head.proj.bias")));
    }),
    ("confidence-off", &["no-confidence-head"], |dir| {
        with_key(dir, "enable_confidence_head", json!(false));
    }),
    ("default-differs", &["head-never-built"], |dir| {
        for key in ["rope_theta", "rope_parameters"] {
            without_key(dir, key);
        }
    }),
    ("prefix", &["head-never-built"], |dir| {
        edit_tensors(dir, |it| {
            let header = std::mem::take(&mut it.header).into_iter();
            let named = |name: String| match name.starts_with("__") {
                true => name,
                false => format!("model.{name}"),
            };
            it.header = header.map(|(name, entry)| (named(name), entry)).collect();
        });
    }),
    ("bidirectional", &["head-never-built"], |dir| with_key(dir, "is_causal", json!(false))),
    // This program reads no drafter of a shorter context than its target's.
    ("short-context", &["head-never-built", "unreadable"], |dir| {
        with_key(dir, "max_position_embeddings", json!(64));
    }),
    ("other-lm-head", &["head-never-built"], |dir| {
        edit_tensors(dir, |it| {
            let copy = it.header["markov_head.markov_w1.weight"].clone();
            it.header.insert("lm_head.weight".into(), copy);
        });
    }),
    ("other-target", &["head-never-built"], |dir| {
        with_key(dir, "target_hash", json!("0".repeat(64)));
    }),
];

#[test]
fn what_servers_do_with_a_block_drafter_is_found_by_name() {
    let place = Place::new();
    let write = |dir: &str, form: BlockDrafterConfig| {
        write_block(&place.path(dir), form);
        without_key(&place.path(dir), "weights_hash");
    };
    let target = ModelConfig::from_model_dir(&model("target")).unwrap();
    let ours = || {
        BlockDrafterConfig::new(&target, 2, 0).with(|it| {
            it.block_size = 3;
            it.markov_rank = 4;
            it.confidence = ConfidenceHead::OfRowAndToken;
        })
    };
    let names = |dir: &str| {
        let mut names = findings(&place, dir).0;
        names.sort();
        names
    };
    write("sound", ours());
    assert_eq!(findings(&place, "sound"), (vec!["head-never-built".to_owned()], true));
    for (name, others, damage) in DAMAGES {
        write(name, ours());
        damage(&place.path(name));
        let mut expected: Vec<&str> = others.iter().copied().chain([name]).collect();
        expected.sort_unstable();
        assert_eq!(names(name), expected, "{name}");
    }
    let confidence = ConfidenceHead::OfRow;
    write("of-row", ours().with(|it| it.confidence = confidence));
    assert_eq!(names("of-row"), ["confidence-of-row", "head-never-built"]);
    let confidence = ConfidenceHead::Absent;
    write(
        "dflash",
        ours().with(|it| {
            it.confidence = confidence;
            it.markov_rank = 0;
        }),
    );
    assert_eq!(names("dflash"), ["anchor-first-dflash", "no-confidence-head"]);
    let draft_vocabulary = Some(DraftVocabulary::new((0..400).collect::<Vec<u32>>()));
    write("narrow", BlockDrafterConfig { draft_vocabulary, ..ours() });
    assert_eq!(names("narrow"), ["draft-vocabulary", "head-never-built"]);
}

#[test]
fn llama_cpp_is_told_to_cut_only_a_drafter_with_a_head() {
    let place = Place::new();
    write_drafter(&place.path("head"));
    let target = ModelConfig::from_model_dir(&model("target")).unwrap();
    write_block(
        &place.path("plain"),
        BlockDrafterConfig::new(&target, 1, 0).with(|it| it.markov_rank = 2),
    );
    let cell = |(size, num): (u64, u64)| json!({ "concurrency": size, "num_candidates": num, "block_ms": [5.0, 5.0], "tokens_per_round": null });
    let cells = [1, 2, 4].into_iter().flat_map(|size| [0, 1, 3].map(|num| cell((size, num))));
    let cells: Vec<Value> = cells.collect();
    let costs = json!({ "model": "mock", "num_words": 150, "cells": cells });
    place.write("costs.json", costs.to_string());
    for (dir, cuts) in [("head", true), ("plain", false)] {
        let recipe = recipe(&place, &format!("kind = 'block'\npath = '{dir}'"));
        place.run(&["record", &recipe]).ok();
        let tune =
            ["tune", &recipe, "--for", "llama.cpp", "--server-costs", "costs.json", "--json"];
        let found = place.run(&tune).json().to_string();
        assert!(found.contains("\"least_prob\":0.0"), "{found}");
        assert_eq!(found.contains("\"least_prob\":0.5"), cuts, "{dir}: {found}");
        let tuned = place.run(&["tune", &recipe, "--json"]).json().to_string();
        assert!(
            tuned.contains("--spec-type draft-dspark")
                && tuned.contains("--speculative-algorithm DSPARK"),
            "{tuned}"
        );
        assert!(!tuned.contains("assistant_model"), "transformers loads no block drafter: {tuned}");
    }
}

#[test]
fn a_bidirectional_drafter_is_served_with_its_whole_block() {
    let place = Place::new();
    let target = ModelConfig::from_model_dir(&model("target")).unwrap();
    let write = |name: &str, is_causal: bool| {
        let config = BlockDrafterConfig::new(&target, 1, 0);
        write_block(
            &place.path(name),
            config.with(|it| {
                it.block_size = 5;
                it.is_causal = is_causal;
            }),
        );
    };
    write("whole", false);
    write("causal", true);
    let recipe_of = |name: &str| recipe(&place, &format!("kind = 'block'\npath = '{name}'"));
    for (name, num) in [("whole", 5), ("causal", 3)] {
        let recipe = recipe_of(name);
        let out = format!("served-{name}");
        let export = ["export", "--for", "dspark", name, &out, "--recipe", &recipe, "--json"];
        let commands = place.run(&export).json()["commands"].to_string();
        for part in [
            format!("--spec-draft-n-max {num} "),
            format!("num_speculative_tokens\\\":{num}"),
            format!("--speculative-dspark-block-size {num}"),
        ] {
            assert!(commands.contains(&part), "`{part}`: {commands}");
        }
    }
    // Costs of shorter blocks price no whole ones.
    let cell = |num: u64| json!({ "concurrency": 1, "num_candidates": num, "block_ms": [5.0, 5.0], "tokens_per_round": null });
    let costs = |lengths: &[u64]| {
        let cells: Vec<Value> = lengths.iter().copied().map(cell).collect();
        place.write(
            "costs.json",
            json!({ "model": "m", "num_words": 1, "cells": cells }).to_string(),
        );
    };
    let recipe = recipe_of("whole");
    let longer = ["--set", "tune.max_candidate_length=5"];
    place.run(&[&["record", &recipe], &longer[..]].concat()).ok();
    let tune = ["tune", &recipe, "--for", "llama.cpp", "--server-costs", "costs.json", "--json"];
    let tune = [&tune[..], &longer].concat();
    costs(&[0, 3]);
    place.run(&tune).fails_naming(&["in whole blocks of 5", "--candidates"]);
    costs(&[0, 3, 5]);
    let found = place.run(&tune).json();
    let cells = found[0]["rows"][0]["cells"].as_array().unwrap();
    assert!(cells.iter().all(|cell| cell["num_candidates"] == 5), "{found}");
}

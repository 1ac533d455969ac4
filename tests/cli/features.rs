//! Hidden states that trainings store on disk: they are reported and reused, and do not change results.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::support::{Place, model};

/// A directory with built data and a recipe of an adapter with a head and of a draft's head that learns
/// from rollouts.
fn built_place() -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    let optimizer = "num_epochs = 2\nlearning_rate = 1e-3\nvalidation_fraction = 0.3\n";
    let adapter = |exit_layer: usize| {
        let name = format!("drafters.exit{exit_layer}");
        format!(
            "[{name}]\nkind = 'adapter'\nexit_layer = {exit_layer}\n[{name}.optimizer]\n{optimizer}\
             [{name}.head]\nlabels = 'rollouts'\nnum_layers = 1\n[{name}.head.optimizer]\n{optimizer}"
        )
    };
    place.write(
        "kept.toml",
        format!(
            "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             [drafters.draft.head]\nnum_layers = 1\nlabels = 'rollouts'\nform = 'look-ahead'\n\
             inputs = ['entropy']\n[drafters.draft.head.optimizer]\n{optimizer}\
             {}{}",
            model("target").display(),
            model("draft").display(),
            adapter(1),
            adapter(3)
        ),
    );
    place.run(&["build-data", "kept.toml"]).ok();
    place
}

/// The files of hidden states.
fn kept(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let names = place.names("data/kept").into_iter().filter(|name| name.starts_with("features-"));
    names
        .map(|name| {
            let bytes = std::fs::read(place.path("data/kept").join(&name)).unwrap();
            (name, bytes)
        })
        .collect()
}

const CACHED: [&str; 10] = [
    "--set",
    "drafters.draft.head.features=cache",
    "--set",
    "drafters.exit1.features=cache",
    "--set",
    "drafters.exit3.features=cache",
    "--set",
    "drafters.exit1.head.features=cache",
    "--set",
    "drafters.exit3.head.features=cache",
];

#[test]
fn hidden_states_are_stored_for_trainings_on_the_same_text() {
    let place = built_place();
    let scores = |recipe: &str, name: &str| -> Value {
        place.json(&format!("checkpoints/{recipe}/{name}/scores.json"))
    };
    let weights = |name: &str| {
        std::fs::read(place.path(&format!("checkpoints/kept/{name}/model.safetensors"))).unwrap()
    };
    let trained = ["draft/head", "exit1", "exit3", "exit3/head"];
    let train = |more: &[&str]| {
        let ran = ["train-head", "train-adapter"].map(|command| {
            let ran = place.run(&[&[command, "kept.toml"], more].concat());
            assert_eq!(ran.code, Some(0), "{}", ran.stderr);
            ran.stderr
        });
        ran.join("")
    };
    train(&[]);
    assert!(kept(&place).is_empty());
    let exact = trained.map(|name| scores("kept", name));
    let log = train(&CACHED);
    assert!(log.contains("hidden states are stored in `data/kept/features-draft*.bin`"), "{log}");
    let files = kept(&place);
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        "features-draft.bin",
        "features-exit1.bin",
        "features-exit3.bin",
        "features-target-final.bin",
        "features-target-layer-1.bin",
        "features-target-layer-3.bin",
    ];
    assert_eq!(names, expected);
    // f16 has 11 bits of precision.
    for (name, exact) in trained.iter().zip(&exact) {
        let found = scores("kept", name);
        let loss = if name.starts_with("exit") && !name.ends_with("head") {
            "cross_entropy"
        } else {
            "bce"
        };
        let [found, exact] = [&found, exact].map(|scores| scores[loss].as_f64().unwrap());
        assert!((found - exact).abs() < 5e-3 * exact, "{name}: {found} for {exact}");
    }
    let first = trained.map(weights);

    // Another training reads them, all or half of them, with the same result.
    let again = || {
        std::fs::remove_dir_all(place.path("checkpoints/kept")).unwrap();
        let log = train(&CACHED);
        assert!(trained.map(weights) == first);
        log
    };
    again();
    assert!(kept(&place) == files);
    for (name, bytes) in &files {
        let mut some = bytes.clone();
        some[4096 + (bytes.len() - 4096) / 2..].fill(0);
        place.write(&format!("data/kept/{name}"), some);
    }
    again();
    assert!(kept(&place) == files);

    // The same after an interruption.
    std::fs::remove_dir_all(place.path("checkpoints/kept")).unwrap();
    for name in files.keys() {
        std::fs::remove_file(place.path(&format!("data/kept/{name}"))).unwrap();
    }
    for command in ["train-head", "train-adapter"] {
        let stopped = place.run(&[&[command, "kept.toml", "--steps", "1"], &CACHED[..]].concat());
        assert_eq!(stopped.code, Some(130), "{}", stopped.stderr);
    }
    train(&CACHED);
    assert!(trained.map(weights) == first);
    assert!(kept(&place) == files);

    // Int8 needs about half the space; other settings are another training.
    let int8 = ["exit1", "exit3"].map(|id| format!("drafters.{id}.features_format=int8"));
    let int8 = ["--set", &int8[0], "--set", &int8[1]];
    let log = train(&[&CACHED[..], &int8].concat());
    assert!(log.contains("features-target*.bin"), "{log}");
    let smaller = kept(&place)["features-target-final.bin"].len();
    let larger = files["features-target-final.bin"].len();
    assert!(smaller < larger * 6 / 10, "{smaller} and {larger}");
}

#[test]
fn states_that_change_with_the_epoch_are_not_stored() {
    let place = built_place();
    for labels in ["sampled", "overlap", "greedy"] {
        let labels = format!("drafters.draft.head.labels={labels}");
        let arguments = [
            "train-head",
            "kept.toml",
            "--set",
            &labels,
            "--set",
            "drafters.draft.head.features=cache",
        ];
        place.run(&arguments).fails_naming(&["`head.features` is `cache`", "each epoch mixes"]);
    }
    let wrong = ["train-head", "kept.toml", "--set", "drafters.draft.head.features=keep"];
    place.run(&wrong).fails_naming(&["features", "`recompute`", "`cache`"]);
}

/// Counts the weights in an export. Lists of tokens are no weights.
fn num_weights(place: &Place, dir: &str) -> usize {
    let bytes = std::fs::read(place.path(dir).join("model.safetensors")).unwrap();
    let (len, rest) = bytes.split_at(8);
    let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(&rest[..len]).unwrap();
    let weights =
        tensors.values().filter(|it| matches!(it["dtype"].as_str(), Some("F32" | "BF16")));
    let sizes = weights.map(|it| it["shape"].as_array().unwrap().iter());
    sizes.map(|it| it.map(|size| size.as_u64().unwrap() as usize).product::<usize>()).sum()
}

#[test]
fn a_dry_run_knows_the_weights_and_the_disk_of_a_training() {
    let place = Place::new();
    place.write_prompts("train.jsonl", 12);
    let one = |name: &str, keys: &str| {
        format!(
            "[drafters.{name}]\n{keys}\n[drafters.{name}.optimizer]\nnum_epochs = 1\n\
             validation_fraction = 0.3\n"
        )
    };
    let drafters = [
        one(
            "eagle",
            "kind = 'eagle3'\ndraft_vocabulary = 64\nfeatures = 'cache'\nfeatures_format = 'int8'",
        ),
        one("whole", "kind = 'eagle3'"),
        one("exit", "kind = 'adapter'\nexit_layer = 1\ndraft_vocabulary = 64"),
        one("block", "kind = 'block'\nblock_size = 3"),
    ];
    let target = model("target");
    let head = format!(
        "models.target = '{}'\n[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n",
        target.display()
    );
    place.write("dry.toml", head + &drafters.concat());
    let shown = place.run(&["run", "--dry", "dry.toml", "--json"]).json();
    assert!(!place.path("data").exists() && !place.path("checkpoints").exists());
    place.run(&["build-data", "dry.toml"]).ok();
    place.run(&["train-drafter", "dry.toml"]).ok();
    for name in ["eagle", "whole", "exit", "block"] {
        let expected = num_weights(&place, &format!("checkpoints/dry/{name}"));
        assert_eq!(shown["drafters"][name]["num_parameters"], expected, "{name}");
    }
    // Three states of 192 numbers and a scale for a token, and the last one where an answer is learnt.
    let (all, answers) = (12 * (200 + 16), 12 * 16);
    assert_eq!(shown["data"]["num_tokens"], all);
    assert_eq!(shown["drafters"]["eagle"]["disk"], (3 * all + answers) * (192 + 4));
    assert_eq!(shown["drafters"]["exit"]["disk"], Value::Null);
    let text = place.run(&["run", "--dry", "dry.toml"]).ok();
    assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    assert!(text.contains("`eagle`: ") && text.contains("hidden states "), "{text}");
}

//! Outputs record their inputs. Every stage names and rejects missing, copied or surplus shards, and models,
//! text, prompts or settings that have changed.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Place, model};

/// The commands that read built data.
const READERS: [&str; 3] = ["train-head", "train-adapter", "record"];

/// A place with built data (three shards), models that a test may change, and a recipe with all stages that
/// read the data.
fn place() -> Place {
    let place = Place::new();
    let path = place.write_small_recipe();
    let mut text = std::fs::read_to_string(&path).unwrap();
    for role in ["target", "draft"] {
        place.copy_model(role, role);
        text = text.replace(&model(role).display().to_string(), role);
    }
    text += "[drafters.adapter]\nkind = 'adapter'\nexit_layer = 2\noptimizer.num_epochs = 1\n\
             optimizer.validation_fraction = 0.3\n[tune]\nnum_prompts = 3\n";
    std::fs::write(path, text).unwrap();
    place.run(&["build-data", "small.toml"]).ok();
    place
}

fn shard(index: usize) -> String {
    format!("data/small/responses-{index:05}.parquet")
}

/// Changes a JSON file.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, serde_json::to_string_pretty(&value).unwrap()).unwrap();
}

/// Changes the last byte of a weight file.
fn change_weight(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn is_kept(place: &Place, arguments: &[&str]) -> bool {
    let outcome = place.run(&[&["train-head", "small.toml", "--json"], arguments].concat()).json();
    outcome["kept"].as_bool().unwrap()
}

#[test]
fn missing_shards_fail_unless_incomplete_data_is_allowed() {
    let place = place();
    std::fs::remove_file(place.path(&shard(1))).unwrap();
    let named = ["data/small` is incomplete", "responses-00001.parquet", "build-data", "hint: "];
    for reader in READERS {
        let ran = place.run(&[reader, "small.toml"]);
        ran.fails_naming(&named);
    }
    assert!(!place.path("checkpoints/small").exists(), "trained on a part");
    // `inspect` works.
    let shown = place.run(&["inspect", "data/small", "--json"]).json();
    assert_eq!((&shown["num_shards"], &shown["num_shards_planned"]), (&json!(2), &json!(3)));

    // Training works with a flag, and the head records it.
    let trained_on =
        || place.json("checkpoints/small/draft/head/config.json")["training"]["data"].clone();
    assert!(!is_kept(&place, &["--incomplete-data"]));
    let part = trained_on();
    assert_eq!((&part["num_shards"], &part["num_shards_planned"]), (&json!(2), &json!(3)));
    assert_eq!(part["rows"], shown["hash"]);
    assert!(is_kept(&place, &["--incomplete-data"]));
    place.run(&["train-head", "small.toml"]).fails_naming(&named);

    // The head is stale once the missing shard exists.
    place.run(&["build-data", "small.toml"]).ok();
    assert!(!is_kept(&place, &[]), "it says that it was trained on this data");
    let whole = trained_on();
    assert_eq!(whole["num_shards"], json!(3));
    assert_ne!(whole["rows"], part["rows"]);
    assert!(is_kept(&place, &[]) && is_kept(&place, &["--incomplete-data"]));
}

#[test]
fn a_stopped_training_does_not_resume_with_other_rows() {
    let place = place();
    let long = ["--set", "drafters.draft.head.optimizer.num_epochs=9"];
    let stopped = [&["train-head", "small.toml", "--steps", "2"], &long[..]].concat();
    assert_eq!(place.run(&stopped).code, Some(130));
    // The same ids with different responses.
    let other = place_with_other_rows();
    for name in [&shard(1), "data/small/.responses-00001.json"] {
        std::fs::copy(other.path(name), place.path(name)).unwrap();
    }
    let ran = place.run(&stopped);
    assert!(ran.stderr.contains("of other settings or data"), "{}", ran.stderr);
}

/// A place whose second shard has the same provenance and index, but other rows.
fn place_with_other_rows() -> Place {
    use draftsmith_data::{ShardPlace, read_shard, write_shard};

    let place = place();
    let path = place.path(&shard(1));
    let (mut rows, provenance) = read_shard(&path, None).unwrap();
    rows[3].response_ids[0] += 1;
    let shard = Some(ShardPlace { index: 1, count: 3 });
    write_shard(&path, &rows, &provenance, shard).unwrap();
    place
}

#[test]
fn copied_and_surplus_shards_are_named() {
    let place = place();
    let all = |named: &[&str]| {
        for reader in READERS.into_iter().chain(["build-data"]) {
            place.run(&[reader, "small.toml"]).fails_naming(named);
            place.run(&[reader, "small.toml", "--set", "seed=0"]).fails_naming(named);
        }
        place.run(&["train-head", "small.toml", "--incomplete-data"]).fails_naming(named);
        place.run(&["inspect", "data/small"]).fails_naming(named);
    };
    let copy = |from: usize, to: &str| {
        std::fs::copy(place.path(&shard(from)), place.path(to)).unwrap();
    };
    copy(0, &shard(1));
    all(&["responses-00001.parquet` is a copy of `responses-00000.parquet`", "build-data"]);
    std::fs::remove_file(place.path(&shard(1))).unwrap();
    place.run(&["build-data", "small.toml"]).ok();
    copy(2, &shard(3));
    all(&["responses-00003.parquet` is a copy of `responses-00002.parquet`"]);
    std::fs::remove_file(place.path(&shard(3))).unwrap();
    copy(1, "data/small/responses-1.parquet");
    all(&["responses-1.parquet` is named like shard 1"]);
    std::fs::remove_file(place.path("data/small/responses-1.parquet")).unwrap();
    assert!(!place.path("checkpoints/small").exists());
    place.run(&["train-head", "small.toml"]).ok();
}

#[test]
fn changed_settings_of_data_are_named() {
    let place = place();
    let prompts = std::fs::read_to_string(place.path("train.jsonl")).unwrap();
    place.copy_model("draft-small", "small");
    place.copy_model("target", "other");
    change_weight(&place.path("other/model.safetensors"));
    place.write("more/train.jsonl", format!("{prompts}{{\"prompt\": \"One more.\"}}\n"));
    let cases = [
        ("data.temperature=0.5", "`temperature` = 1.0, which is 0.5 now"),
        ("data.top_p=0.9", "`top_p` = 1.0, which is 0.9 now"),
        ("models.eos_token_ids=[1, 7]", "`eos_token_ids` = [1], which is [1,7] now"),
        ("models.stop_strings=['.']", "`stop_strings` = [], which is [\".\"] now"),
        ("data.min_p=0.1", "`min_p` = null, which is 0.1 now"),
        ("data.repetition_penalty=1.2", "`repetition_penalty` = 1.0, which is 1.2 now"),
        ("data.top_k=9", "`top_k` = null, which is 9 now"),
        ("data.max_new_tokens=13", "`max_new_tokens` = 12, which is 13 now"),
        ("data.num_prompts=69", "`limit` = null, which is 69 now"),
        ("data.responses=existing", "`existing_responses` = false, which is true now"),
        (
            "data.prompts=['more/train.jsonl']",
            "`prompts[0]` = {\"name\":\"train.jsonl\",\"hash\":\"",
        ),
        ("drafters.draft.model=small", "`draft` = \""),
        ("models.target=other", "`target` = \""),
    ];
    for (set, difference) in cases {
        for command in READERS.into_iter().chain(["build-data"]) {
            let ran = place.run(&[command, "small.toml", "--set", set]);
            ran.fails_naming(&["data/small", difference, " now", "hint: "]);
        }
    }
    assert!(!place.path("checkpoints/small").exists());
    // The seed may differ, so that several trainings can share data.
    place.run(&["train-head", "small.toml", "--seed", "5"]).ok();

    // Prompts edited in place.
    std::fs::copy(place.path("more/train.jsonl"), place.path("train.jsonl")).unwrap();
    place.run(&["train-head", "small.toml"]).fails_naming(&["`prompts[0]` = {\"name\":\"train"]);
}

#[test]
fn changes_of_the_text_side_make_outputs_stale() {
    let place = place();
    place.run(&["train-head", "small.toml"]).ok();
    place.run(&["train-adapter", "small.toml"]).ok();
    let greedy = ["--set", "evaluate.decodings=['greedy']"];
    let record = |arguments: &[&str]| {
        place.run(&[&["record", "small.toml"], &greedy[..], arguments].concat())
    };
    record(&[]).ok();
    let generate = |export: &[&str]| {
        let arguments = ["generate", "--target", "target", "--prompt", "x"];
        place.run(&[&arguments[..], export].concat())
    };
    let head = ["--draft", "draft", "--head", "checkpoints/small/draft/head"];
    let adapter = ["--adapter", "checkpoints/small/adapter"];
    generate(&head).ok();
    generate(&adapter).ok();

    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let eos = |path: &Path| edit(path, |config| config["eos_token_id"] = json!([1, 7]));
    let special = |path: &Path| edit(path, |config| config["eos_token"] = json!("<|user|>"));
    let template = |path: &Path| std::fs::write(path, text(path) + "\n").unwrap();
    let tokenizer = |path: &Path| {
        let digits =
            text(path).replace("\"individual_digits\": true", "\"individual_digits\": false");
        assert_ne!(digits, text(path));
        std::fs::write(path, digits).unwrap();
    };
    type Change<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Change<'_>, &str); 4] = [
        ("generation_config.json", &eos, "`eos_token_ids` = [1], which is [1,7] now"),
        ("tokenizer_config.json", &special, "`special_tokens` = {\"bos_token\":\"<s>\",\"eos"),
        ("chat_template.jinja", &template, "`chat_template` = \""),
        ("tokenizer.json", &tokenizer, "`tokenizer` = \""),
    ];
    for (name, change, difference) in cases {
        let path = place.path("target").join(name);
        let before = std::fs::read(&path).unwrap();
        change(&path);
        for command in READERS.into_iter().chain(["build-data"]) {
            place.run(&[command, "small.toml"]).fails_naming(&["data/small", difference, "hint: "]);
        }
        for export in ["draft/head", "adapter"] {
            let dir = format!("checkpoints/small/{export}");
            let named = [dir.as_str(), difference, "train it again"];
            place.run(&["check", &dir]).fails_naming(&named);
            generate(if export == "draft/head" { &head } else { &adapter }).fails_naming(&named);
        }
        place.run(&["evaluate", "small.toml"]).fails_naming(&["small/draft/head", difference]);
        std::fs::write(&path, before).unwrap();
    }
    // Everything is restored.
    assert!(is_kept(&place, &[]));

    // Rollouts of separate prompts do not depend on data, nor on a head if there is none.
    let own = ["--set", "tune.prompts=['test.jsonl']"];
    let recipe = text(&place.path("small.toml"));
    let at = |part: &str| recipe.find(part).unwrap();
    let sections = [
        0..at("[drafters.draft.head]"),
        at("[evaluate]")..at("[drafters.adapter]"),
        at("[tune]")..recipe.len(),
    ];
    let sections: String = sections.map(|section| &recipe[section]).concat();
    place.write("small.toml", sections.replace("rules.head = [0.5]\n", ""));
    record(&own).ok();
    eos(&place.path("target/generation_config.json"));
    let again = record(&own);
    let stale = "was recorded with `eos_token_ids` = [1], which is [1,7] now: it is recorded again";
    assert!(again.stderr.contains(stale), "{}", again.stderr);
    again.ok();
}

#[cfg(unix)]
#[test]
fn weights_behind_links_are_part_of_the_model() {
    let place = place();
    // As in Hugging Face's cache: links to files without extensions, named by an index.
    let single = place.path("target/model.safetensors");
    let bytes = std::fs::read(&single).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let names = header.as_object().unwrap().keys().filter(|name| *name != "__metadata__");
    let weight_map: Value = names.map(|name| (name.clone(), json!("weights"))).collect();
    let blob = place.write("blobs/6a1f", &bytes);
    std::os::unix::fs::symlink(&blob, place.path("target/weights")).unwrap();
    let index = json!({ "metadata": {}, "weight_map": weight_map }).to_string();
    place.write("target/model.safetensors.index.json", index);
    std::fs::remove_file(&single).unwrap();

    let named = ["data/small", "`target` = \""];
    place.run(&["train-head", "small.toml"]).fails_naming(&named);
    for index in 0..3 {
        std::fs::remove_file(place.path(&shard(index))).unwrap();
    }
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    change_weight(&blob);
    place.run(&["train-head", "small.toml"]).fails_naming(&named);
    place.run(&["evaluate", "small.toml"]).fails_naming(&["small/draft/head", "another target"]);
}

#[test]
fn a_head_fails_with_a_changed_draft_or_target() {
    let place = place();
    place.run(&["train-head", "small.toml"]).ok();
    let generate = |target: &str, draft: &str| {
        let head = ["--head", "checkpoints/small/draft/head", "--prompt", "x"];
        place.run(&[&["generate", "--target", target, "--draft", draft], &head[..]].concat())
    };
    let evaluate = |set: &str| place.run(&["evaluate", "small.toml", "--set", set]);
    place.copy_model("target", "other-target");
    place.copy_model("draft", "other-draft");
    generate("other-target", "other-draft").ok();
    for other in ["target", "draft"] {
        change_weight(&place.path(&format!("other-{other}/model.safetensors")));
    }
    let named = |what| ["checkpoints/small/draft/head", what, "hint: "];
    generate("target", "other-draft").fails_naming(&named("another draft"));
    generate("other-target", "draft").fails_naming(&named("another target"));
    evaluate("drafters.draft.model=other-draft").fails_naming(&named("another draft"));
    evaluate("models.target=other-target").fails_naming(&named("another target"));
    // A head that names no models, like the authors', fits any.
    edit(&place.path("checkpoints/small/draft/head/config.json"), |config| {
        let config = config.as_object_mut().unwrap();
        for key in ["draft_hash", "target_hash"] {
            config.remove(key).unwrap();
        }
    });
    generate("other-target", "other-draft").ok();
}

//! Bad input ends with exit code 1 or 2 and one message that names the file, key or tensor. Nothing panics, and
//! no incomplete file has its final name.

use crate::support::{Place, model};

/// A place with a small recipe, edited by `edit`.
fn with_recipe(edit: impl Fn(String) -> String) -> Place {
    let place = Place::new();
    let path = place.write_small_recipe();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, edit(text)).unwrap();
    place
}

/// Asserts that a failed build-data left no data.
fn left_nothing(place: &Place) {
    let names = place.names("data/small");
    assert!(names.iter().all(|name| name == "recipe.toml"), "{names:?}");
}

fn spoil_bytes(path: &std::path::Path, spoil: impl Fn(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    spoil(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_missing_misspelt_or_incomplete_recipe_is_named() {
    let place = Place::new();
    place.run(&["run", "absent.toml"]).fails_naming(&["absent.toml"]);
    let place = with_recipe(|text| text.replace("max_new_tokens", "max_tokens"));
    place.run(&["run", "small.toml"]).fails_naming(&["small.toml", "max_tokens"]);
    let place = with_recipe(|text| text.replace("target = ", "targets = "));
    place.run(&["run", "small.toml"]).fails_naming(&["small.toml", "target"]);
    let place = with_recipe(|text| text.replace("num_layers = 1", "num_layers = 'two'"));
    place.run(&["run", "small.toml"]).fails_naming(&["num_layers"]);
    let place = with_recipe(|text| text.replace("[models]", "[models"));
    place.run(&["run", "small.toml"]).fails_naming(&["small.toml"]);
    let place = with_recipe(|text| text);
    place
        .run(&["run", "small.toml", "--set", "drafters.draft.head.mixing_ratio=2"])
        .fails_naming(&["head.mixing_ratio"]);
    place
        .run(&["run", "small.toml", "--set", "drafters.draft.head.dtype=f8"])
        .fails_naming(&["`f8`", "`bf16`"]);
    place
        .run(&["train-head", "small.toml", "--set", "drafters.draft.head.dtype=bf16"])
        .fails_naming(&["head.dtype", "--device cpu", "--device cuda"]);
    for command in
        ["run", "build-data", "train-head", "train-adapter", "record", "tune", "evaluate"]
    {
        let parts = ["`--dtype bf16`", "the CPU keeps weights", "computes in f32", "--device cuda"];
        place.run(&[command, "small.toml", "--dtype", "bf16"]).fails_naming(&parts);
    }
    place.run(&["run", "small.toml", "--set", "drafters.draft.head.x=2"]).fails_naming(&["`x`"]);
    place.run(&["frobnicate"]).fails_naming(&["frobnicate"]);
    left_nothing(&place);
}

#[test]
fn stages_without_a_section_or_data_say_so() {
    let place = with_recipe(|text| text);
    place.run(&["train-head", "small.toml"]).fails_naming(&["data/small", "build-data"]);
    place
        .run(&["evaluate", "small.toml"])
        .fails_naming(&["checkpoints/small/draft/head", "train-head"]);
    let place = with_recipe(|text| text[..text.find("[data]").unwrap()].to_owned());
    place.run(&["build-data", "small.toml"]).fails_naming(&["[data]"]);
    place.run(&["run", "small.toml"]).fails_naming(&["no stage"]);
    let place = with_recipe(|text| {
        let draft = text.find("[drafters.draft]").unwrap()..text.find("[data]").unwrap();
        let head = text.find("[drafters.draft.head]").unwrap()..text.find("[evaluate]").unwrap();
        text.replace(&text[draft], "").replace(&text[head], "")
    });
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).fails_naming(&["[drafters.draft.head]"]);
}

#[test]
fn different_tokenizers_of_target_and_draft_fail() {
    let place = with_recipe(|text| {
        let own = model("draft").display().to_string();
        text.replace(&format!("model = '{own}'"), "model = 'other'")
    });
    let other = place.copy_model("draft", "other");
    let path = other.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("<|user|>", "<|human|>")).unwrap();
    place.run(&["build-data", "small.toml"]).fails_naming(&["other/tokenizer.json", "<|"]);
    std::fs::remove_file(&path).unwrap();
    place.run(&["build-data", "small.toml"]).fails_naming(&["other/tokenizer.json"]);
    std::fs::write(&path, "{").unwrap();
    place.run(&["build-data", "small.toml"]).fails_naming(&["other/tokenizer.json"]);
    left_nothing(&place);
}

/// Runs `generate` with a spoilt copy of the small draft as its target.
fn generate_on_spoilt(spoil: impl Fn(&std::path::Path), named: &[&str]) {
    let place = Place::new();
    let dir = place.copy_model("draft-small", "spoilt");
    spoil(&dir);
    place
        .run(&["generate", "--target", "spoilt", "--prompt", "Convert 3 km to m."])
        .fails_naming(named);
}

/// Rewrites the header of a safetensors file as text.
fn edit_header(dir: &std::path::Path, edit: impl Fn(String) -> String) {
    spoil_bytes(&dir.join("model.safetensors"), |bytes| {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = edit(String::from_utf8(bytes[8..8 + len].to_vec()).unwrap());
        let mut edited = (header.len() as u64).to_le_bytes().to_vec();
        edited.extend(header.as_bytes());
        edited.extend(&bytes[8 + len..]);
        *bytes = edited;
    });
}

#[test]
fn missing_extra_or_misshapen_tensors_are_named() {
    let q_proj = "model.layers.0.self_attn.q_proj.weight";
    generate_on_spoilt(
        |dir| edit_header(dir, |header| header.replace(q_proj, "model.layers.0.elsewhere")),
        &["model.safetensors", q_proj],
    );
    generate_on_spoilt(
        |dir| {
            let path = dir.join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
            config["intermediate_size"] = serde_json::json!(1000);
            std::fs::write(&path, config.to_string()).unwrap();
        },
        &["model.safetensors", "mlp.gate_proj.weight", "1000"],
    );
    generate_on_spoilt(
        |dir| {
            let path = dir.join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
            config["tie_word_embeddings"] = serde_json::json!(false);
            std::fs::write(&path, config.to_string()).unwrap();
        },
        &["model.safetensors", "lm_head.weight"],
    );
    let place = Place::new();
    let dir = place.copy_model("target", "deep");
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    config["num_hidden_layers"] = serde_json::json!(layers - 1);
    std::fs::write(&path, config.to_string()).unwrap();
    // As in transformers, these are no error.
    let ran = place.run(&["generate", "--target", "deep", "--prompt", "x"]);
    let note =
        format!("such as `model.layers.{}.input_layernorm.weight`; they are skipped", layers - 1);
    assert!(ran.stderr.contains(&note), "{}", ran.stderr);
    ran.ok();
}

#[test]
fn truncated_or_lying_safetensors_fail() {
    generate_on_spoilt(
        |dir| spoil_bytes(&dir.join("model.safetensors"), |b| b.truncate(b.len() - 100)),
        &["model.safetensors", "download or export it again"],
    );
    generate_on_spoilt(
        |dir| spoil_bytes(&dir.join("model.safetensors"), |b| b.truncate(5)),
        &["model.safetensors"],
    );
    generate_on_spoilt(
        |dir| {
            spoil_bytes(&dir.join("model.safetensors"), |b| {
                b[..8].copy_from_slice(&u64::MAX.to_le_bytes());
            });
        },
        &["model.safetensors", "header"],
    );
    generate_on_spoilt(
        |dir| edit_header(dir, |header| header.replace("BF16", "F64")),
        &["model.safetensors"],
    );
    generate_on_spoilt(
        |dir| std::fs::remove_file(dir.join("model.safetensors")).unwrap(),
        &["spoilt", "model.safetensors"],
    );
    generate_on_spoilt(
        |dir| {
            let path = dir.join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, text.replace("\"llama\"", "\"mamba\"")).unwrap();
        },
        &["config.json", "model_type", "mamba"],
    );
}

#[test]
fn truncated_parquet_and_other_files_fail() {
    let place = with_recipe(|text| text);
    place.run(&["build-data", "small.toml"]).ok();
    let shard = place.path("data/small/responses-00001.parquet");
    let whole = std::fs::read(&shard).unwrap();
    for spoil in [&whole[..whole.len() / 2], &whole[..3], b"PAR1", b""] {
        std::fs::write(&shard, spoil).unwrap();
        place.run(&["train-head", "small.toml"]).fails_naming(&["responses-00001.parquet"]);
        place.run(&["build-data", "small.toml"]).fails_naming(&["responses-00001.parquet"]);
        place.run(&["inspect", "data/small"]).fails_naming(&["responses-00001.parquet"]);
    }
    // A footer that lies about its length.
    let mut lying = whole.clone();
    let at = lying.len() - 8;
    lying[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    std::fs::write(&shard, &lying).unwrap();
    place.run(&["train-head", "small.toml"]).fails_naming(&["responses-00001.parquet"]);
    // A byte in the middle of the data.
    let mut flipped = whole;
    for position in (4..flipped.len() - 8).step_by(97) {
        flipped[position] ^= 0xff;
    }
    std::fs::write(&shard, &flipped).unwrap();
    place.run(&["train-head", "small.toml"]).fails_naming(&["responses-00001.parquet"]);
    assert!(place.names("checkpoints/small").is_empty(), "no head from broken data");
}

#[test]
fn data_with_tokens_outside_the_vocabulary_fails() {
    let place = with_recipe(|text| {
        text + "[drafters.adapter]\nkind = 'adapter'\nexit_layer = 2\n[tune]\nnum_prompts = 2\n"
    });
    place.run(&["build-data", "small.toml"]).ok();
    let shard = place.path("data/small/responses-00001.parquet");
    let (rows, provenance) = draftsmith_data::read_shard(&shard, None).unwrap();
    let spoil = |change: &dyn Fn(&mut draftsmith_data::ResponseRow)| {
        let mut rows = rows.clone();
        change(&mut rows[3]);
        let place = draftsmith_data::ShardPlace { index: 1, count: 3 };
        draftsmith_data::write_shard(&shard, &rows, &provenance, Some(place)).unwrap();
    };
    let parts = |column: &'static str| {
        ["responses-00001.parquet", "row `train#35`", column, "token 1024", "1024 tokens"]
    };
    // Data of another model whose tokenizer gives the same text.
    spoil(&|row| row.draft.as_mut().unwrap().draft_ids[1] = 1024);
    place.run(&["train-head", "small.toml"]).fails_naming(&parts("`draft_ids`"));
    spoil(&|row| row.response_ids[1] = 1024);
    for command in ["train-head", "train-adapter", "record"] {
        place.run(&[command, "small.toml"]).fails_naming(&parts("`response_ids`"));
    }
    assert!(place.names("checkpoints/small").is_empty(), "nothing is made of it");
    place.run(&["inspect", "data/small"]).ok();
}

#[test]
fn empty_broken_or_too_long_prompts_are_named() {
    let cases: [(&str, &[&str]); 4] = [
        ("", &["train.jsonl"]),
        ("{\"prompt\": \"fine\"}\n{not json\n", &["train.jsonl", "line 2"]),
        ("{\"nothing\": \"known\"}\n", &["train.jsonl", "prompt"]),
        ("{\"prompt\": \"\"}\n", &["train.jsonl"]),
    ];
    for (text, named) in cases {
        let place = with_recipe(|text| text);
        place.write("train.jsonl", text);
        place.run(&["build-data", "small.toml", "--strict"]).fails_naming(named);
        left_nothing(&place);
    }
    let place = with_recipe(|text| text);
    let long = "many words ".repeat(2000);
    place.write("train.jsonl", format!("{{\"prompt\": \"fine\"}}\n{{\"prompt\": \"{long}\"}}\n"));
    place.run(&["build-data", "small.toml"]).fails_naming(&["train#1", "context"]);
    left_nothing(&place);
    let target = model("target").display().to_string();
    place
        .run(&["generate", "--target", &target, "--prompt", &long])
        .fails_naming(&["--prompt", "context"]);
    place
        .run(&["build-data", "small.toml", "--set", "data.prompts=['absent.jsonl']"])
        .fails_naming(&["absent.jsonl"]);
}

#[test]
fn a_head_for_another_width_or_draft_fails() {
    let place = with_recipe(|text| text);
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-head", "small.toml"]).ok();
    let [target, small] = ["target", "draft-small"].map(|name| model(name).display().to_string());
    place
        .run(&[
            "generate",
            "--target",
            &target,
            "--draft",
            &small,
            "--head",
            "checkpoints/small/draft/head",
            "--prompt",
            "x",
        ])
        .fails_naming(&["checkpoints/small/draft/head/config.json", "hidden_size"]);
    let other = format!("drafters.draft.model={small}");
    place
        .run(&["evaluate", "small.toml", "--set", &other])
        .fails_naming(&["checkpoints/small/draft/head/config.json", "hidden_size"]);
    place.run(&["train-head", "small.toml", "--set", &other]).fails_naming(&["data/small"]);
    assert!(place.names("checkpoints/small/evaluation").is_empty());
}

/// How to train an export and decode with it, its directory, and one of its tensors.
struct Export {
    command: &'static str,
    dir: &'static str,
    flags: &'static [&'static str],
    tensor: &'static str,
}

const EXPORTS: [Export; 2] = [
    Export {
        command: "train-head",
        dir: "checkpoints/small/draft/head",
        flags: &["--draft", "draft", "--head"],
        tensor: "model.0.linear.weight",
    },
    Export {
        command: "train-adapter",
        dir: "checkpoints/small/adapter",
        flags: &["--adapter"],
        tensor: "layers.0.self_attn.q_proj.weight",
    },
];

#[test]
fn spoilt_exports_are_named() {
    let place = with_recipe(|text| {
        text.replace(&model("draft").display().to_string(), "draft")
            + "[drafters.adapter]\nkind = 'adapter'\nexit_layer = 2\noptimizer.num_epochs = 1\n"
    });
    place.copy_model("draft", "draft");
    place.run(&["build-data", "small.toml"]).ok();
    let target = model("target").display().to_string();
    for Export { command, dir, flags, tensor } in EXPORTS {
        place.run(&[command, "small.toml"]).ok();
        let generate = || {
            let arguments = ["generate", "--target", &target, "--prompt", "x"];
            place.run(&[&arguments[..], flags, &[dir]].concat())
        };
        let whole = place.path(dir);
        let [config, weights] = ["config.json", "model.safetensors"].map(|name| whole.join(name));
        let [good_config, good] = [&config, &weights].map(|path| std::fs::read(path).unwrap());
        generate().ok();

        std::fs::write(&config, "{").unwrap();
        generate().fails_naming(&[dir, "config.json"]);
        std::fs::remove_file(&config).unwrap();
        generate().fails_naming(&[dir, "config.json"]);
        std::fs::write(&config, good_config).unwrap();

        std::fs::write(&weights, &good[..good.len() - 9]).unwrap();
        generate().fails_naming(&[
            dir,
            "model.safetensors",
            "claims bytes",
            "download or export it again",
        ]);
        std::fs::write(&weights, &good).unwrap();
        edit_header(&whole, |header| header.replace(tensor, &tensor.replace("weight", "height")));
        generate().fails_naming(&["model.safetensors", tensor]);
        std::fs::remove_file(&weights).unwrap();
        generate().fails_naming(&[dir, "model.safetensors"]);
        std::fs::write(&weights, good).unwrap();
        generate().ok();
    }
}

#[test]
fn an_unavailable_device_is_named() {
    let place = Place::new();
    let target = model("draft-small").display().to_string();
    let generate = |device: &str| {
        place.run(&["generate", "--target", &target, "--prompt", "x", "--device", device])
    };
    generate("abacus").fails_naming(&["abacus", "cuda"]);
    generate("cuda:x").fails_naming(&["cuda"]);
    if !cfg!(feature = "cuda") {
        generate("cuda").fails_naming(&["--device cuda", "hint"]);
    }
    if !cfg!(feature = "wgpu") {
        generate("wgpu").fails_naming(&["--device wgpu", "hint"]);
    }
    let place = with_recipe(|text| text);
    for command in ["run", "train-head", "train-adapter"] {
        let on = |devices: &[&str]| place.run(&[&[command, "small.toml"], devices].concat());
        on(&["--devices", "wgpu,wgpu"]).fails_naming(&["`wgpu` is named twice"]);
        on(&["--devices", "cpu,cuda"]).fails_naming(&["`cuda:0,cuda:1`"]);
        on(&["--devices", "cpu", "--device", "cpu"]).fails_naming(&["--devices", "--device"]);
        if !cfg!(feature = "cuda") {
            on(&["--devices", "cuda:0,cuda:1"]).fails_naming(&["--device cuda", "hint"]);
        }
    }
    place.run(&["train-head", "small.toml", "--devices", "cpu"]).fails_naming(&["build-data"]);
    place.run(&["evaluate", "small.toml", "--devices", "cpu"]).fails_naming(&["--devices"]);
    left_nothing(&place);
}

#[test]
fn invalid_flags_and_missing_paths_are_named() {
    let place = Place::new();
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let generate = |extra: &[&str]| {
        let mut arguments = vec!["generate", "--target", &target, "--prompt", "x"];
        arguments.extend(extra);
        place.run(&arguments)
    };
    generate(&["--temperature", "-1"]).fails_naming(&["temperature"]);
    generate(&["--temperature", "1", "--top-p", "0"]).fails_naming(&["top_p"]);
    generate(&["--draft", &draft, "--rule", "fixed=0"]).fails_naming(&["--rule", "`fixed`"]);
    generate(&["--head", "x"]).fails_naming(&["--draft"]);
    generate(&["--draft", "nowhere"]).fails_naming(&["nowhere"]);
    generate(&["--draft", &draft, "--head", "nowhere"]).fails_naming(&["nowhere"]);
    place.run(&["inspect", "nowhere"]).fails_naming(&["nowhere"]);
    place.write("some.txt", "text");
    place.run(&["inspect", "some.txt"]).fails_naming(&["some.txt"]);
}

#[test]
fn prompt_files_are_read_only_as_far_as_needed() {
    let place = with_recipe(|text| text.replace("[data]\n", "[data]\nnum_prompts = 3\n"));
    let prompts = std::fs::read_to_string(place.path("train.jsonl")).unwrap();
    let mut lines: Vec<&str> = prompts.lines().take(4).collect();
    let long = format!("{{\"prompt\": \"{}\"}}", "a long one ".repeat(3000));
    lines.insert(1, &long);
    lines.push("what is this?");
    place.write("train.jsonl", lines.join("\n"));

    // The long prompt is read but cannot be used.
    place.run(&["build-data", "small.toml"]).fails_naming(&["prompt `train#1`", "context"]);
    let skip = ["--set", "data.skip_long_prompts=true"];
    let ran = place.run(&[&["build-data", "small.toml", "--json"], &skip[..]].concat());
    assert!(ran.stderr.contains("`train.jsonl`: 1 of 4 prompts are left out"), "{}", ran.stderr);
    assert_eq!(ran.json()["num_prompts"], 3);

    // Of six prompts, three are encoded to evaluate two.
    place.write(
        "test.jsonl",
        [lines[1], lines[0], lines[2], lines[3], lines[4], lines[0]].join("\n"),
    );
    let target = model("target").display().to_string();
    place.write(
        "two.toml",
        format!(
            "models.target = '{target}'\n[drafters.lookup]\nkind = 'prompt-lookup'\n[evaluate]\n\
             prompts = ['test.jsonl']\nnum_prompts = 2\nskip_long_prompts = true\nmax_new_tokens = 4\n"
        ),
    );
    let ran = place.run(&["evaluate", "two.toml"]);
    assert!(ran.stderr.contains("`test.jsonl`: 1 of 3 prompts are left out"), "{}", ran.stderr);
    ran.ok();

    // Two more are needed than exist, so the last line is read.
    let more = ["--set", "data.num_prompts=5", "--set", "name=more", "--strict"];
    let all = [&["build-data", "small.toml"], &skip[..], &more[..]].concat();
    place.run(&all).fails_naming(&["`train.jsonl`, line 6"]);
    // Prompts spread over a file require all of it.
    place.write("test.jsonl", lines.join("\n"));
    place.run(&["evaluate", "small.toml", "--strict"]).fails_naming(&["`test.jsonl`, line 6"]);
    place.write("small.toml", place_recipe(&place).replace("'test.jsonl'", "'/dev/zero'"));
    place.run(&["evaluate", "small.toml"]).fails_naming(&["`/dev/zero` is not a regular file"]);
}

fn place_recipe(place: &Place) -> String {
    std::fs::read_to_string(place.path("small.toml")).unwrap()
}

#[test]
fn a_huge_token_limit_means_the_context() {
    let place = Place::new();
    let small = model("draft-small").display().to_string();
    let most = u64::MAX.to_string();
    for length in ["0", "3", &most] {
        let arguments =
            ["generate", "--target", &small, "--prompt", "Convert 3 km to m.", "--max-new-tokens"];
        place.run(&[&arguments[..], &[length]].concat()).ok();
        let rule = ["--rule", "confidence=0", "--max-candidate-length", &most];
        let draft = [&["--draft", &small][..], &rule].concat();
        place.run(&[&arguments[..], &[length], &draft].concat()).ok();
    }
}

#[test]
fn keys_of_the_wrong_type_are_explained() {
    let edits = [
        ("hidden_size", serde_json::json!({}), "key `hidden_size` is an object, expected a whole"),
        ("vocab_size", serde_json::json!("many"), "key `vocab_size` is \"many\", expected a whole"),
        ("rms_norm_eps", serde_json::json!([1]), "key `rms_norm_eps` is a list, expected a number"),
        ("hidden_act", serde_json::json!({}), "key `hidden_act` is an object, expected a string"),
        ("tie_word_embeddings", serde_json::json!(1), "is 1, expected true or false"),
        ("eos_token_id", serde_json::json!("</s>"), "key `eos_token_id` is neither a token id"),
        (
            "rope_parameters",
            serde_json::json!({"factor": "8"}),
            "key `rope_parameters.factor` is \"8\", expected a number",
        ),
        (
            "rope_parameters",
            serde_json::json!({"rope_type": "linear"}),
            "key `rope_parameters.factor` is missing",
        ),
    ];
    for (key, value, parts) in edits {
        generate_on_spoilt(
            |dir| {
                // Its generation config names other end tokens.
                let _ = std::fs::remove_file(dir.join("generation_config.json"));
                let path = dir.join("config.json");
                let text = std::fs::read_to_string(&path).unwrap();
                let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
                config[key] = value.clone();
                std::fs::write(&path, config.to_string()).unwrap();
            },
            &["spoilt/config.json`", parts],
        );
    }
    let place = with_recipe(|text| text);
    let parts = ["is \"two\", expected a whole number, 0 or more"];
    place
        .run(&["run", "small.toml", "--set", "drafters.draft.head.num_layers='two'"])
        .fails_naming(&parts);
    let parts = ["is a table, expected a string"];
    place.run(&["run", "small.toml", "--set", "models.target={}"]).fails_naming(&parts);
}

#[test]
fn exports_in_the_wrong_place_are_named() {
    let place = with_recipe(|text| text + "[drafters.adapter]\nkind = 'adapter'\nexit_layer = 8\n");
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["train-adapter", "small.toml"]).fails_naming(&[
        "`adapter.exit_layer` is 8",
        "the target has 8 layers",
        "1 to 7",
    ]);
    place.write("head/config.json", r#"{"hidden_size": 96, "num_layers": 1}"#);
    place.write("adapter/config.json", r#"{"exit_layer": 2}"#);
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let generate = ["generate", "--target", &target, "--prompt", "x"];
    place.run(&[&generate[..], &["--draft", &draft, "--head", "adapter"]].concat()).fails_naming(
        &["`--head adapter`", "found one of the kind self-draft adapter", "--drafter"],
    );
    place.run(&[&generate[..], &["--adapter", "head"]].concat()).fails_naming(&[
        "`--drafter head`",
        "found one of the kind acceptance head",
        "--head",
    ]);
}

//! Drafters in the forms of other trainers: what `server doctor` says of each, and whether they are read.

use std::path::Path;

use draftsmith_model::{ModelConfig, NamedTensor, WeightDtype, WeightReader, write_safetensors};
use draftsmith_theory::SeededDraws;
use serde_json::{Map, Value, json};

use crate::doctor::{edit_config, findings};
use crate::support::{Place, model};

/// The tensors of a drafter of the embedded target.
struct Tensors {
    target: ModelConfig,
    draws: SeededDraws,
    all: Vec<NamedTensor>,
}

impl Tensors {
    fn new() -> Self {
        let target = ModelConfig::from_model_dir(&model("target")).unwrap();
        Self { target, draws: SeededDraws::new(3, &["foreign"]), all: Vec::new() }
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        let is_norm = shape.len() == 1 && name.ends_with("weight");
        let draws = &mut self.draws;
        let value = |_| if is_norm { 1.0 } else { 0.04 * draws.uniform() as f32 - 0.02 };
        let values = (0..shape.iter().product::<usize>()).map(value).collect();
        self.all.push(NamedTensor { name: name.to_owned(), shape: shape.to_vec(), values });
    }

    /// Adds the matrices of a layer whose attention reads `num_read` vectors.
    fn layer(&mut self, prefix: &str, num_read: usize, has_head_norms: bool) {
        let (shape, mlp) = (self.target.shape.clone(), self.target.spec.mlp.width);
        let (width, head_dim) = (shape.hidden_size, shape.head_dim);
        let [queries, keys] = [shape.num_heads, shape.num_kv_heads].map(|heads| heads * head_dim);
        let read = num_read * width;
        for (name, shape) in [
            ("input_layernorm", vec![width]),
            ("post_attention_layernorm", vec![width]),
            ("self_attn.q_proj", vec![queries, read]),
            ("self_attn.k_proj", vec![keys, read]),
            ("self_attn.v_proj", vec![keys, read]),
            ("self_attn.o_proj", vec![width, queries]),
            ("mlp.gate_proj", vec![mlp, width]),
            ("mlp.up_proj", vec![mlp, width]),
            ("mlp.down_proj", vec![width, mlp]),
        ] {
            self.add(&format!("{prefix}{name}.weight"), &shape);
        }
        for name in ["self_attn.q_norm", "self_attn.k_norm"].iter().filter(|_| has_head_norms) {
            self.add(&format!("{prefix}{name}.weight"), &[head_dim]);
        }
    }

    fn eagle3(prefix: &str, has_head_norms: bool, more: &[(&str, usize)]) -> Self {
        let mut tensors = Self::new();
        let (width, num_tokens) =
            (tensors.target.shape.hidden_size, tensors.target.shape.vocab_size);
        tensors.add("fc.weight", &[width, 3 * width]);
        tensors.add("norm.weight", &[width]);
        tensors.add("lm_head.weight", &[num_tokens, width]);
        tensors.add(&format!("{prefix}hidden_norm.weight"), &[width]);
        tensors.layer(prefix, 2, has_head_norms);
        more.iter().for_each(|(name, num)| tensors.add(name, &[num * width]));
        tensors
    }

    fn block(is_dspark: bool) -> Self {
        let mut tensors = Self::new();
        let (width, num_tokens) =
            (tensors.target.shape.hidden_size, tensors.target.shape.vocab_size);
        tensors.add("fc.weight", &[width, 3 * width]);
        tensors.add("hidden_norm.weight", &[width]);
        tensors.add("norm.weight", &[width]);
        (0..2).for_each(|layer| tensors.layer(&format!("layers.{layer}."), 1, true));
        if is_dspark {
            tensors.add("markov_head.markov_w1.weight", &[num_tokens, 8]);
            tensors.add("markov_head.markov_w2.weight", &[num_tokens, 8]);
            tensors.add("confidence_head.proj.weight", &[1, width + 8]);
            tensors.add("confidence_head.proj.bias", &[1]);
        }
        tensors
    }

    fn write(&self, dir: &Path, config: &Value) {
        std::fs::create_dir_all(dir).unwrap();
        let path = dir.join("model.safetensors");
        write_safetensors(&path, &self.all, WeightDtype::F32, &[]).unwrap();
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    }
}

fn merged(all: impl IntoIterator<Item = Value>) -> Value {
    Value::Object(all.into_iter().flat_map(|it| it.as_object().unwrap().clone()).collect())
}

/// The keys of a layer of the target's sizes.
fn layer(more: Value) -> Value {
    let keys = json!({
        "model_type": "llama", "hidden_size": 192, "vocab_size": 1024, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": false, "rope_theta": 10000.0, "attention_bias": false,
    });
    merged([keys, more])
}

fn eagle3_config(layer: Value, more: Value) -> Value {
    let keys = json!({
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 1024,
        "target_hidden_size": null, "norm_before_residual": true, "norm_before_fc": false, "fc_norm": false,
        "norm_output": false, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{ "proposal_type": "greedy", "speculative_tokens": 3 }],
            "verifier": { "name_or_path": "target", "architectures": ["LlamaForCausalLM"] },
        },
    });
    merged([keys, more])
}

fn dspark_config(layer: Value) -> Value {
    json!({
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 7,
        "mask_token_id": 1023, "sample_from_anchor": true, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": true, "confidence_head_with_markov": true,
        "aux_hidden_state_layer_ids": [2, 4, 5], "draft_vocab_size": 1024, "sliding_window_non_causal": false,
        "transformer_layer_config": layer,
    })
}

/// A form's name and its findings, worst first.
type Form = (&'static str, &'static [&'static str]);

const HEAD: &str = "head-never-built";

const FORMS: [Form; 13] = [
    ("e_plain", &["norm-before-residual"]),
    ("e_swa", &["window", "norm-before-residual"]),
    ("e_31default", &["norm-output", "window", "norm-before-residual"]),
    ("e_fcnorm", &["norm-output", "fc-norm", "norm-before-residual"]),
    ("e_fcnorm_native", &["norm-output", "fc-norm"]),
    ("e_qwen3", &["qwen3-layer", "norm-before-residual"]),
    ("e_last", &["uncaptured-layer", "norm-before-residual", "other-layers"]),
    ("d_plain", &[HEAD, "bidirectional"]),
    ("d_swa", &["window", HEAD]),
    ("d_last", &["uncaptured-layer", HEAD]),
    ("d_emb", &["uncaptured-layer", HEAD]),
    ("d_conflict", &["contradicting-keys", "no-confidence-head", "bidirectional"]),
    ("d_z_swa", &["window", "no-confidence-head", "bidirectional"]),
];

fn write_form(name: &str, dir: &Path) {
    let sliding = || json!({ "layer_types": ["sliding_attention"], "sliding_window": 16, "use_sliding_window": true });
    let norms = [("fc_norm.0.weight", 1), ("fc_norm.1.weight", 1), ("fc_norm.2.weight", 1)];
    let fc_norm = json!({ "fc_norm": true, "norm_output": true });
    let qwen3 = |more: Value| {
        layer(merged([json!({ "model_type": "qwen3", "num_hidden_layers": 2 }), more]))
    };
    let native = |ids: Value| {
        let mut config = merged([qwen3(json!({})), dspark_config(json!({}))]);
        let keys = config.as_object_mut().unwrap();
        for key in
            ["speculators_model_type", "aux_hidden_state_layer_ids", "transformer_layer_config"]
        {
            keys.shift_remove(key);
        }
        let more = json!({
            "architectures": ["Qwen3DSparkModel"], "is_causal": true, "num_target_layers": 8,
            "layer_types": ["full_attention", "full_attention"], "target_layer_ids": ids,
        });
        merged([config, more])
    };
    let z_labs = |more: Value| {
        let nested = json!({ "mask_token_id": 1023, "target_layer_ids": [1, 3, 5] });
        let keys = json!({ "architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": nested });
        qwen3(merged([keys, more]))
    };
    let (tensors, config) = match name {
        "e_plain" => {
            (Tensors::eagle3("layers.0.", false, &[]), eagle3_config(layer(json!({})), json!({})))
        }
        "e_swa" => {
            (Tensors::eagle3("layers.0.", false, &[]), eagle3_config(layer(sliding()), json!({})))
        }
        "e_31default" => (
            Tensors::eagle3("layers.0.", false, &[("input_norm.weight", 3)]),
            eagle3_config(layer(sliding()), json!({ "norm_before_fc": true, "norm_output": true })),
        ),
        "e_fcnorm" => {
            (Tensors::eagle3("layers.0.", false, &norms), eagle3_config(layer(json!({})), fc_norm))
        }
        "e_fcnorm_native" => {
            let keys =
                json!({ "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1024 });
            (Tensors::eagle3("midlayer.", false, &norms), layer(merged([keys, fc_norm])))
        }
        "e_qwen3" => (
            Tensors::eagle3("layers.0.", true, &[]),
            eagle3_config(layer(json!({ "model_type": "qwen3" })), json!({})),
        ),
        "e_last" => {
            let keys = json!({ "eagle_aux_hidden_state_layer_ids": [2, 4, 8] });
            (Tensors::eagle3("layers.0.", false, &[]), eagle3_config(layer(json!({})), keys))
        }
        "d_plain" => (Tensors::block(true), dspark_config(qwen3(json!({})))),
        "d_swa" => {
            let windows = json!({ "layer_types": ["sliding_attention", "sliding_attention"] });
            (Tensors::block(true), dspark_config(qwen3(merged([sliding(), windows]))))
        }
        "d_last" => (Tensors::block(true), native(json!([1, 3, 7]))),
        "d_emb" => (Tensors::block(true), native(json!([-1, 3, 5]))),
        "d_conflict" => {
            let nested =
                json!({ "mask_token_id": 1023, "target_layer_ids": [1, 3, 5], "block_size": 4 });
            (Tensors::block(false), z_labs(json!({ "mask_token_id": 5, "dflash_config": nested })))
        }
        _ => {
            let windows = json!({
                "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048,
                "use_sliding_window": true, "max_window_layers": 2,
            });
            (Tensors::block(false), z_labs(windows))
        }
    };
    tensors.write(dir, &config);
}

/// The findings of a drafter with all their texts.
fn diagnosed(place: &Place, dir: &str) -> Vec<Value> {
    let target = model("target").display().to_string();
    let ran = place.run(&["server", "doctor", dir, "--target", &target, "--json"]);
    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
    found["findings"].as_array().unwrap().clone()
}

#[test]
fn each_form_is_diagnosed_and_decoded() {
    let place = Place::new();
    let target = model("target").display().to_string();
    for (name, expected) in FORMS {
        write_form(name, &place.path(name));
        let (found, _) = findings(&place, name);
        assert_eq!(found, expected, "{name}");
        let generate =
            ["generate", "--target", &target, "--drafter", name, "--max-new-tokens", "4"];
        place.run(&[&generate[..], &["--prompt", "Two and two"]].concat()).ok();
    }
}

#[test]
fn doctor_names_the_keys_to_ignore_and_outputs_say_that_they_are() {
    let place = Place::new();
    place.write_prompts("test.jsonl", 2);
    let target = model("target").display().to_string();
    for name in ["e_plain", "d_plain"] {
        write_form(name, &place.path(name));
        edit_config(&place.path(name), |it| drop(it.insert("of_tomorrow".into(), json!(1))));
        let all = diagnosed(&place, name);
        let hint =
            all.iter().find_map(|it| it["hint"].as_str().filter(|it| it.contains("drafters.NAME")));
        let line = hint.unwrap().split('`').nth(1).unwrap().replace("drafters.NAME", "drafters.it");
        let kind = if name.starts_with('e') { "eagle3" } else { "block" };
        let form = if name.starts_with('e') { "eagle3" } else { "dspark" };
        let recipe = format!(
            "{line}\ndrafters.it.kind = '{kind}'\ndrafters.it.path = '{name}'\n[models]\ntarget = '{target}'\n\
             [data]\nprompts = ['test.jsonl']\nmax_new_tokens = 8\n\
             [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 8\ndecodings = ['greedy']\nrules.fixed = [2]\n"
        );
        let toml = format!("{name}.toml");
        place.write(&toml, &recipe);
        let out = format!("{name}-out");
        let exported = place.run(&["export", "--for", form, name, &out, "--recipe", &toml]).ok();
        let key = line.split('"').nth(1).unwrap();
        assert!(exported.contains("not exported: keys") && exported.contains(key), "{exported}");
        let without = recipe.replacen(&line, "", 1);
        place.write("without.toml", &without);
        let exporting = ["export", "--for", form, name, "other", "--recipe", "without.toml"];
        place.run(&exporting).fails_naming(&["ignored_keys"]);
        let ran = place.run(&["evaluate", &toml]);
        assert!(
            ran.stderr.contains("drafter `it`: read without") && ran.stderr.contains(key),
            "{}",
            ran.stderr
        );
        ran.ok();
        for file in ["summary.json", "report.html"] {
            let file = place.path(&format!("checkpoints/{name}/evaluation/{file}"));
            let text = std::fs::read_to_string(&file).unwrap();
            assert!(text.contains("read without"), "{}", file.display());
        }
    }
    // Embeddings that are not numbers are refused as well.
    let mut tensors = Tensors::eagle3("layers.0.", false, &[]);
    tensors.add("embed_tokens.weight", &[1024, 192]);
    tensors.all.last_mut().unwrap().values[7] = f32::NAN;
    tensors.write(&place.path("nan"), &eagle3_config(layer(json!({})), json!({})));
    let generate = ["generate", "--target", &target, "--drafter", "nan", "--prompt", "Two"];
    place.run(&generate).fails_naming(&["embed_tokens.weight", "NaN"]);
    assert!(findings(&place, "nan").0.contains(&"not-finite".to_owned()));
    // A misspelt key and one of a head are refused.
    write_form("e_plain", &place.path("e_plain"));
    let recipe = format!(
        "[models]\ntarget = '{target}'\n[drafters.it]\nkind = 'eagle3'\npath = 'e_plain'\nignored_keys = ['misspelt']\n"
    );
    place.write("misspelt.toml", &recipe);
    let generate =
        ["generate", "--recipe", "misspelt.toml", "--prompt", "Two", "--max-new-tokens", "4"];
    place.run(&generate).fails_naming(&["ignored_keys", "`misspelt`"]);
    place.write(
        "head.toml",
        recipe
            .replace("ignored_keys = ['misspelt']", "head = { path = 'x', ignored_keys = ['a'] }"),
    );
    place
        .run(&["generate", "--recipe", "head.toml", "--prompt", "Two"])
        .fails_naming(&["drafters.it.head.ignored_keys"]);
}

#[test]
fn findings_say_what_each_server_does_in_which_version() {
    let place = Place::new();
    for (name, finding, said) in [
        (
            "e_swa",
            "window",
            &["vLLM 0.33 computes", "SGLang 0.5.23", "llama.cpp b11434 attends to all"][..],
        ),
        ("d_swa", "window", &["vLLM 0.33", "SGLang 0.5.23", "llama.cpp b11434", "mistral.rs"]),
        ("e_31default", "norm-output", &["llama.cpp b11434 has no such key"]),
        (
            "e_fcnorm",
            "fc-norm",
            &["vLLM 0.33 and SGLang 0.5.23 compute", "llama.cpp b11434 does not"],
        ),
        ("e_qwen3", "qwen3-layer", &["vLLM 0.33 loads"]),
        ("d_last", "uncaptured-layer", &["SGLang 0.5.23"]),
        (
            "d_conflict",
            "contradicting-keys",
            &["SGLang 0.5.23, llama.cpp b11434, mistral.rs and draftsmith"],
        ),
    ] {
        write_form(name, &place.path(name));
        let all = diagnosed(&place, name);
        let found = all.iter().find(|it| it["name"] == finding).unwrap();
        let servers = found["servers"].as_str().unwrap();
        assert!(said.iter().all(|part| servers.contains(part)), "{name}: {servers}");
    }
    let all = diagnosed(&place, "d_conflict");
    let what = all[0]["what"].as_str().unwrap();
    assert!(what.contains("`dflash_config.block_size` is 4, but `block_size` is 8"), "{what}");
}

#[test]
fn keys_that_nobody_knows_are_named_and_innocent_ones_are_not() {
    let place = Place::new();
    let with = |place: &Place, name: &str, key: &str, value: Value| {
        write_form(name, &place.path(name));
        edit_config(&place.path(name), |it: &mut Map<String, Value>| {
            drop(it.insert(key.into(), value))
        });
        diagnosed(place, name)
    };
    for name in ["e_plain", "d_plain"] {
        let sound = with(&place, name, "torch_dtype", "float32".into());
        for (key, value) in [
            ("logit_scale", json!(1.0)),
            ("pad_token_id", json!(3)),
            ("attention_mode", json!("gqa")),
            ("norm_before_fc", json!(false)),
            ("anything", json!(null)),
        ] {
            assert_eq!(with(&place, name, key, value), sound, "{key}");
        }
        for (key, value) in [
            ("logit_scale", json!(0.5)),
            ("num_aux_hidden_states", json!(5)),
            ("final_logit_softcapping", json!(30.0)),
            ("anything", json!(1)),
            ("eagle_config", json!({ "use_aux_hidden_state": false })),
        ] {
            let found = with(&place, name, key, value);
            let unknown = found.iter().find(|it| it["name"] == "unknown-key").unwrap();
            assert!(unknown["what"].as_str().unwrap().contains(key), "{unknown}");
            assert_eq!(found.len(), sound.len() + 1);
        }
    }
}

#[test]
fn drafters_of_other_methods_and_files_without_tensors_are_called_what_they_are() {
    let place = Place::new();
    let target = model("target").display().to_string();
    let form = |dir: &str| {
        let ran = place.run(&["server", "doctor", dir, "--target", &target, "--json"]);
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["form"].clone()
    };
    let mut eagle1 = Tensors::new();
    eagle1.add("embed_tokens.weight", &[1024, 192]);
    eagle1.add("fc.weight", &[192, 384]);
    eagle1.layer("layers.0.", 1, false);
    eagle1.all.retain(|it| !it.name.contains("input_layernorm"));
    for class in ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"] {
        eagle1.write(&place.path(class), &layer(json!({ "architectures": [class] })));
        assert_eq!(form(class), "eagle1");
        assert_eq!(findings(&place, class), (vec!["bias".to_owned()], true));
    }
    Tensors::new().write(&place.path("empty"), &layer(json!({})));
    assert_eq!(form("empty"), "draft_model");
    assert_eq!(findings(&place, "empty").0, ["broken-weights"]);
    // vLLM takes the method from a path.
    place.copy_model("draft", "my-Eagle3-draft");
    assert_eq!(findings(&place, "my-Eagle3-draft").0, ["method-in-path"]);
}

#[test]
fn matrices_of_a_drafter_are_compared_with_the_targets() {
    let place = Place::new();
    let target = model("target");
    let mut reader = WeightReader::open_dir(&target).unwrap();
    let embeddings = reader.take("model.embed_tokens.weight", &[1024, 192]).unwrap();
    let write = |matrix: &str, scale: f32| {
        let mut tensors = Tensors::block(true);
        let (name, shape) = (format!("{matrix}.weight"), vec![1024, 192]);
        let values = embeddings.iter().map(|number| number * scale).collect();
        tensors.all.push(NamedTensor { name, shape, values });
        tensors.write(
            &place.path("block"),
            &dspark_config(layer(json!({ "model_type": "qwen3", "num_hidden_layers": 2 }))),
        );
        findings(&place, "block").0
    };
    let plain = [HEAD, "bidirectional"];
    assert_eq!(write("embed_tokens", 1.0), plain);
    assert_eq!(write("lm_head", 1.001), [HEAD, "bidirectional", "lm-head-dropped"]);
    for (matrix, name) in [("embed_tokens", "other-embeddings"), ("lm_head", "other-lm-head")] {
        assert_eq!(write(matrix, 1.1), [&[name][..], &plain].concat());
        let all = diagnosed(&place, "block");
        assert!(all[0]["what"].as_str().unwrap().contains("by 10 %"), "{}", all[0]);
        // What is called broken is not exported, unless the export mends it.
        export(&place, "block", "dspark").fails_naming(&[matrix, "by 10 %", "hint:"]);
    }
    write("embed_tokens", 1.0);
    export(&place, "block", "dspark").ok();
}

/// Exports a drafter of the embedded target.
fn export(place: &Place, name: &str, form: &str) -> crate::support::Ran {
    let kind = if form == "eagle3" { "eagle3" } else { "block" };
    let target = model("target").display().to_string();
    let recipe =
        format!("[models]\ntarget = '{target}'\n[drafters.it]\nkind = '{kind}'\npath = '{name}'\n");
    place.write("export.toml", &recipe);
    let out = format!("{name}-{form}");
    let _ = std::fs::remove_dir_all(place.path(&out));
    place.run(&["export", "--for", form, name, &out, "--recipe", "export.toml"])
}

#[test]
fn sglang_starts_with_the_window_of_an_eagle_3_drafter() {
    let place = Place::new();
    // It reads the windows of block drafters from their files.
    for (name, form, is_given) in
        [("e_swa", "eagle3", true), ("e_plain", "eagle3", false), ("d_swa", "dspark", false)]
    {
        write_form(name, &place.path(name));
        let printed = export(&place, name, form).ok();
        assert!(printed.contains("sglang.launch_server"), "{printed}");
        let flag = "--speculative-draft-window-size 16\n";
        assert_eq!(printed.contains(flag), is_given, "{printed}");
    }
}

#[test]
fn a_drafter_is_read_as_servers_do_and_exported_without_a_loss() {
    let place = Place::new();
    // Absent keys may be null, and the form of special tokens does not matter.
    write_form("e_plain", &place.path("e_plain"));
    write_form("d_plain", &place.path("d_plain"));
    for name in ["e_plain", "d_plain"] {
        let sound = diagnosed(&place, name);
        edit_config(&place.path(name), |keys: &mut Map<String, Value>| {
            keys.extend([("bos_token_id".into(), json!([0])), ("is_causal".into(), Value::Null)]);
        });
        assert_eq!(diagnosed(&place, name), sound, "{name}");
    }
    // Another depth is named.
    edit_config(&place.path("d_plain"), |keys: &mut Map<String, Value>| {
        drop(keys.insert("num_target_layers".into(), json!(36)));
    });
    let all = diagnosed(&place, "d_plain");
    let depth = all.iter().find(|it| it["name"] == "other-depth").unwrap();
    assert!(depth["what"].as_str().unwrap().contains("`num_target_layers` is 36"), "{depth}");
    // A layer that is named twice is one state for servers.
    edit_config(&place.path("e_plain"), |keys: &mut Map<String, Value>| {
        drop(keys.insert("eagle_aux_hidden_state_layer_ids".into(), json!([2, 4, 4])));
    });
    assert!(findings(&place, "e_plain").0.contains(&"descending-layers".to_owned()));
    export(&place, "e_plain", "eagle3").fails_naming(&["[2, 4, 4]", "named twice"]);
    // A number of draft tokens is not guessed.
    let mut narrow = Tensors::block(true);
    narrow.add("lm_head.weight", &[400, 192]);
    let mut config = dspark_config(layer(json!({ "model_type": "qwen3", "num_hidden_layers": 2 })));
    config["draft_vocab_size"] = Value::Null;
    narrow.add("d2t", &[400]);
    narrow.write(&place.path("narrow"), &config);
    export(&place, "narrow", "dspark").fails_naming(&["draft_vocab_size", "`d2t`", "hint:"]);
    // Weights keep their type.
    let tensors = Tensors::eagle3("midlayer.", false, &[]);
    let mut config = eagle3_config(layer(json!({})), json!({ "dtype": "float16" }));
    config["norm_before_residual"] = false.into();
    tensors.write(&place.path("half"), &config);
    let path = place.path("half").join("model.safetensors");
    write_safetensors(&path, &tensors.all, WeightDtype::F16, &[]).unwrap();
    export(&place, "half", "eagle3").ok();
    let read = |dir: &str| {
        let mut reader = WeightReader::open_dir(&place.path(dir)).unwrap();
        assert_eq!(reader.dtype().as_deref(), Some("F16"), "{dir}");
        reader.take("fc.weight", &[192, 3 * 192]).unwrap()
    };
    assert_eq!(read("half"), read("half-eagle3"));
    assert_eq!(place.json("half-eagle3/config.json")["dtype"], "float16");
}

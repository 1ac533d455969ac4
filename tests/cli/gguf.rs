//! GGUF files as models: the same text as from the checkpoints that they were converted from.

use std::path::Path;

use serde_json::Value;

use crate::doctor::Tensors;
use crate::support::{Place, model};

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns the bytes of rows with those of each head's halves interleaved.
fn interleaved(bytes: &[u8], num_heads: usize, num_rows: usize) -> Vec<u8> {
    let (row, half) = (bytes.len() / num_rows, num_rows / num_heads / 2);
    let places = (0..num_heads)
        .flat_map(|head| (0..half).flat_map(move |n| [0, 1].map(|at| (2 * head + at) * half + n)));
    places.flat_map(|place| bytes[place * row..][..row].to_vec()).collect()
}

/// Returns the GGUF name of a Llama's tensor.
fn gguf_name(name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.");
    for (from, to) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ] {
        name = name.replace(from, to);
    }
    name
}

/// Quantises bf16 numbers to blocks of Q8_0, whose scales are powers of two here.
fn to_q8_0(bytes: &[u8]) -> Vec<u8> {
    let numbers = bytes.chunks_exact(2).map(|it| u32::from(u16::from_le_bytes([it[0], it[1]])));
    let numbers: Vec<f32> = numbers.map(|bits| f32::from_bits(bits << 16)).collect();
    let block = |numbers: &[f32]| {
        let largest = numbers.iter().fold(2f32.powi(-7), |most, it| most.max(it.abs()));
        let exponent = (largest / 127.0).log2().ceil();
        let half = ((exponent as i16 + 15) << 10).to_le_bytes();
        let round = |it: &f32| (it / exponent.exp2()).round() as i8 as u8;
        half.into_iter().chain(numbers.iter().map(round)).collect::<Vec<u8>>()
    };
    numbers.chunks_exact(32).flat_map(block).collect()
}

/// Converts a tiny Llama in bf16 as llama.cpp's converter does. `edit` changes its tokens.
pub(crate) fn converted(dir: &Path, edit: impl FnOnce(&mut Vec<String>)) -> Vec<u8> {
    written(dir, edit, false)
}

/// Converts a tiny Llama as [`converted`] does, and quantises its matrices to Q8_0 if `is_quantised`.
fn written(dir: &Path, edit: impl FnOnce(&mut Vec<String>), is_quantised: bool) -> Vec<u8> {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap()
    };
    let (config, tokenizer) = (read("config.json"), read("tokenizer.json"));
    let size = |key: &str| config[key].as_u64().unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); size("vocab_size") as usize];
    for (token, id) in vocabulary {
        tokens[id.as_u64().unwrap() as usize].clone_from(token);
    }
    let mut kinds = vec![1; tokens.len()];
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap() as usize;
        tokens[id] = added["content"].as_str().unwrap().to_owned();
        kinds[id] = if added["special"] == true { 3 } else { 4 };
    }
    edit(&mut tokens);
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter();
    let merges: Vec<String> = merges
        .map(|merge| {
            let pair = merge.as_array().unwrap().iter().map(|it| it.as_str().unwrap());
            pair.collect::<Vec<_>>().join(" ")
        })
        .collect();
    let template = std::fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
    let words = |words: &[u32]| words.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    let number = |key: &str, value: u32| [text(key), words(&[4, value])].concat();
    let string = |key: &str, value: &str| [text(key), words(&[8]), text(value)].concat();
    let list = |key: &str, kind: u32, num: usize, values: Vec<u8>| {
        [text(key), words(&[9, kind, num as u32, 0]), values].concat()
    };
    let texts = |values: &[String]| values.iter().flat_map(|it| text(it)).collect::<Vec<u8>>();
    let keys = [
        string("general.architecture", "llama"),
        number("llama.embedding_length", size("hidden_size") as u32),
        number("llama.block_count", size("num_hidden_layers") as u32),
        number("llama.feed_forward_length", size("intermediate_size") as u32),
        number("llama.attention.head_count", size("num_attention_heads") as u32),
        number("llama.attention.head_count_kv", size("num_key_value_heads") as u32),
        number("llama.context_length", size("max_position_embeddings") as u32),
        number("llama.attention.key_length", size("head_dim") as u32),
        [text("llama.attention.layer_norm_rms_epsilon"), words(&[6, 1e-5_f32.to_bits()])].concat(),
        string("tokenizer.ggml.model", "gpt2"),
        string("tokenizer.ggml.pre", "smollm"),
        number("tokenizer.ggml.bos_token_id", size("bos_token_id") as u32),
        number("tokenizer.ggml.eos_token_id", size("eos_token_id") as u32),
        list("tokenizer.ggml.tokens", 8, tokens.len(), texts(&tokens)),
        list("tokenizer.ggml.token_type", 5, kinds.len(), words(&kinds)),
        list("tokenizer.ggml.merges", 8, merges.len(), texts(&merges)),
        string("tokenizer.chat_template", &template),
    ];
    let Tensors { header, bytes, .. } = Tensors::read(dir);
    let (mut infos, mut data, mut num_tensors) = (Vec::new(), Vec::new(), 0_u64);
    for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let numbers = |key: &str| -> Vec<usize> {
            let list = tensor[key].as_array().unwrap();
            list.iter().map(|it| it.as_u64().unwrap() as usize).collect()
        };
        let (shape, place) = (numbers("shape"), numbers("data_offsets"));
        let mut bytes = bytes[place[0]..place[1]].to_vec();
        for (part, key) in [("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")] {
            if name.contains(part) {
                bytes = interleaved(&bytes, size(key) as usize, shape[0]);
            }
        }
        num_tensors += 1;
        infos.extend([text(&gguf_name(name)), words(&[shape.len() as u32])].concat());
        infos.extend(shape.iter().rev().flat_map(|size| (*size as u64).to_le_bytes()));
        assert_eq!(tensor["dtype"], "BF16");
        let is_q8_0 = is_quantised && shape.len() == 2;
        if is_q8_0 {
            bytes = to_q8_0(&bytes);
        }
        infos.extend(
            [words(&[if is_q8_0 { 8 } else { 30 }]), (data.len() as u64).to_le_bytes().to_vec()]
                .concat(),
        );
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    let counts = [num_tensors, keys.len() as u64].map(u64::to_le_bytes).concat();
    let mut file = [b"GGUF\x03\0\0\0".to_vec(), counts, keys.concat(), infos].concat();
    file.resize(file.len().next_multiple_of(32), 0);
    [file, data].concat()
}

#[test]
fn gguf_files_of_target_and_draft_generate_what_their_checkpoints_generate() {
    let place = Place::new();
    let [target, draft] = ["target", "draft"].map(|name| {
        place.write(&format!("{name}.gguf"), converted(&model(name), |_| {}));
        model(name).display().to_string()
    });
    let generate = |models: &[&str]| {
        let arguments = ["generate", "--prompt", "Convert 3 km to m.", "--greedy", "--json"];
        place.run(&[&arguments, models].concat()).json()
    };
    let expected = generate(&["--target", &target, "--draft", &draft]);
    let found = ["--target", "target.gguf", "--draft", "draft.gguf", "--tokenizer", &target];
    let found = generate(&found);
    let by_itself = generate(&["--target", "target.gguf", "--draft", "draft.gguf"]);
    for key in ["token_ids", "text", "finish_reason"] {
        assert_eq!(found[key], expected[key], "{key}");
        assert_eq!(by_itself[key], expected[key], "{key}, with the file's tokenizer");
    }
    let num_rounds = |run: &Value| run["rounds"].as_array().unwrap().len();
    assert_eq!(num_rounds(&found), num_rounds(&expected));
    let recipe = format!(
        "models = {{ target = 'target.gguf', tokenizer = '{target}' }}\n\
         drafters.draft = {{ kind = 'model', model = 'draft.gguf' }}\n"
    );
    place.write("gguf.toml", recipe);
    assert_eq!(generate(&["--recipe", "gguf.toml"])["token_ids"], expected["token_ids"]);
}

#[test]
fn the_tokenizer_of_a_gguf_target_is_its_own_and_known() {
    let place = Place::new();
    let target = model("target").display().to_string();
    let mut bytes = converted(&model("target"), |_| {});
    let at = bytes.windows(6).position(|it| it == b"smollm").unwrap();
    bytes[at..at + 6].copy_from_slice(b"smolln");
    place.write("target.gguf", bytes);
    place.write("other.gguf", converted(&model("target"), |tokens| tokens.reverse()));
    let run = |words: &[&str]| place.run(&[&["generate", "--prompt", "x"], words].concat());
    run(&["--target", "target.gguf"]).fails_naming(&[
        "the tokenizer of `target.gguf`",
        "pre-tokenizer `smolln`",
        "hint: ",
        "`models.tokenizer`",
        "`--tokenizer`",
    ]);
    let named = ["`other.gguf`", "tokenizer.json", "is not the tokenizer", "id 0"];
    run(&["--target", "other.gguf", "--tokenizer", &target]).fails_naming(&named);
    run(&["--target", &target, "--draft", "other.gguf"]).fails_naming(&named);
    run(&["--target", "none.gguf", "--tokenizer", &target])
        .fails_naming(&["`none.gguf`", "hint: "]);
}

#[test]
fn drafters_of_a_quantised_target_are_trained_and_change_no_token() {
    let place = Place::new();
    for name in ["target", "draft"] {
        let bytes = written(&model(name), |_| {}, true);
        place.write(&format!("{name}.gguf"), bytes);
    }
    let optimizer = "optimizer = { num_epochs = 1, validation_fraction = 0.3 }";
    let rules = "rules = { fixed = [2] }";
    let recipe = format!(
        "models.target = 'target.gguf'\n\
         [drafters.draft]\nkind = 'model'\nmodel = 'draft.gguf'\n{rules}\nhead = {{ {optimizer} }}\n\
         [drafters.eagle]\nkind = 'eagle3'\nnum_steps = 2\n{optimizer}\n{rules}\n\
         [drafters.block]\nkind = 'block'\nblock_size = 2\nnum_layers = 1\n{optimizer}\n{rules}\n\
         [data]\nprompts = ['prompts.jsonl']\nmax_new_tokens = 16\n\
         [evaluate]\nprompts = ['prompts.jsonl']\nnum_prompts = 2\nmax_new_tokens = 16\nrules.head = [0.5]\n"
    );
    place.write("quantised.toml", recipe);
    place.write_prompts("prompts.jsonl", 24);
    for command in ["build-data", "train-head", "train-drafter", "evaluate"] {
        place.run(&[command, "quantised.toml"]).ok();
    }
    let rows = place.json("checkpoints/quantised/evaluation/results.json");
    let rows = rows.as_array().unwrap().iter();
    let rows = rows.filter(|row| row["decoding"] == "greedy" && row["category"] == "all");
    let of = |drafter: &str| rows.clone().filter(|row| row["drafter"] == drafter).count();
    assert_eq!(["draft", "eagle", "block"].map(of), [2, 1, 1]);
    for row in rows.filter(|row| row["drafter"] != "none") {
        assert_eq!(row["lossless"], true, "{row}");
        assert_eq!(row["num_forgiven_ties"], 0, "{row}");
    }
    let inspected = || place.run(&["inspect", "target.gguf", "--json"]).json();
    let shown = inspected();
    assert_eq!((&shown["kind"], &shown["stored_dtype"]), (&"model".into(), &"Q8_0".into()));
    assert_eq!((&shown["tokenizer_size"], &shown["chat_template"]), (&1024.into(), &true.into()));
    assert_eq!(shown["num_layers"], 8);
    // Another precision of the same weights is another target.
    place.write("target.gguf", converted(&model("target"), |_| {}));
    assert_eq!(inspected()["stored_dtype"], "BF16");
    place.run(&["evaluate", "quantised.toml"]).fails_naming(&["trained", "target"]);
}

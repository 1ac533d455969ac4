//! Valid inputs for each reader, which mutations start from, and earlier failures.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use burn::tensor::Device;
use draftsmith_data::{
    MANIFEST, RolloutCandidates, RolloutHead, RolloutProvenance, RolloutRow, ShardPlace,
    shard_path, write_manifest, write_rollouts, write_shard,
};
use draftsmith_model::{Eagle3Config, ModelConfig, write_id_lists};
use draftsmith_theory::{HeadTiming, StoredAnswers};
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Encoding, Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use serde_json::json;

use crate::mutation::{Form, Seed};
use crate::readers::{MODEL, Reader, TORCH_MODEL, block_config, fixture, state};

/// The material for a reader's inputs.
pub(crate) struct Seeds {
    pub(crate) all: Vec<Seed>,
    /// The number of valid inputs; earlier failures follow them.
    pub(crate) num_valid: usize,
    /// Words of the formats.
    pub(crate) words: Vec<&'static str>,
}

/// The seeds of a reader. They are the same in every run, except a training's state.
pub(crate) fn of(reader: &Reader) -> Result<Seeds> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = |form, path: &Path| -> Result<Seed> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
        Ok(Seed::new(form, bytes))
    };
    let mut seeds = match reader.name {
        "weights" => vec![file(Form::Safetensors, &fixture(MODEL).join(reader.file))?],
        "torch-weights" => vec![file(Form::Text, &fixture(TORCH_MODEL).join(reader.file))?],
        "gguf-model" => vec![file(Form::Text, &fixture(reader.file))?],
        "gguf-tokenizer" => {
            let dir = fixture("gguf-tokenizers");
            let seed = |name: &str| file(Form::Text, &dir.join(name));
            vec![seed(reader.file)?, seed("gemma3.gguf")?]
        }
        "index" => vec![file(Form::Json, &fixture("llama-v5-sharded-f16").join(reader.file))?],
        "config" => configs()?,
        "generation-config" => [r#"{"eos_token_id": [1, 2]}"#, r#"{"eos_token_id": 7}"#]
            .map(|text| Seed::new(Form::Json, text))
            .to_vec(),
        "tokenizer" => tokenizers(),
        "tokenizer-config" => tokenizer_configs(),
        "template" => {
            let mut seeds = CHAT_TEMPLATES.map(|text| Seed::new(Form::Text, text)).to_vec();
            seeds
                .push(file(Form::Text, &root.join("checkpoints/tiny/target/chat_template.jinja"))?);
            seeds
        }
        "messages" => vec![Seed::new(Form::JsonLines, MESSAGES)],
        "responses" => responses()?,
        "rollouts" => rollouts()?,
        "prompts" => prompts()?,
        "manifest" => manifests()?,
        "journal" => vec![Seed::new(Form::JsonLines, JOURNAL)],
        "served-states" => ["F32", "BF16", "F16"].map(served_states).to_vec(),
        "answer" => ANSWERS.map(|answer| Seed::new(Form::Json, answer)).to_vec(),
        "recipe" => {
            let recipes = ["tiny", "tiny-full", "gsm8k"];
            let recipes = recipes.iter().map(|name| root.join(format!("recipes/{name}.toml")));
            let mut seeds = Vec::new();
            for path in recipes {
                let text = std::fs::read_to_string(&path)?;
                seeds.push(Seed::new(Form::Toml, format!("{OVERRIDES}{text}")));
                seeds.push(Seed::new(Form::Toml, text));
            }
            seeds.push(file(Form::Toml, &root.join("recipes/papers/cs-drafting.toml"))?);
            seeds
        }
        "head" => heads(),
        "adapter" => adapters()?,
        "eagle" => vec![file(Form::Json, &fixture("eagle").join("config.json"))?],
        "eagle3" => eagles()?,
        "block" => blocks()?,
        "medusa" => [
            r#"{"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 32, "torch_dtype": "float32",
                "target_hash": "beef", "training": {"num_heads": 2, "epochs": [{"epoch": 1}]}}"#,
            r#"{"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1}, "base_model_name_or_path": "m"}"#,
        ]
        .map(|text| Seed::new(Form::Json, text))
        .to_vec(),
        "medusa-weights" => vec![file(Form::Text, &fixture("medusa/v1.3").join(reader.file))?],
        "gguf" => vec![Seed::new(Form::Text, gguf())],
        "stored-answers" => vec![stored_answers()?],
        "server-costs" => vec![Seed::new(Form::Json, SERVER_COSTS)],
        "state" => vec![Seed::new(Form::State, state::trained()?)],
        name => unreachable!("`{name}` has seeds"),
    };
    let num_valid = seeds.len();
    let found = root.join("tests/corpus").join(reader.name);
    if found.is_dir() {
        let mut paths =
            std::fs::read_dir(found)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        for path in paths {
            seeds.push(file(Form::Text, &path)?);
        }
    }
    Ok(Seeds { all: seeds, num_valid, words: words(reader).lines().collect() })
}

fn stored_answers() -> Result<Seed> {
    let answers: [&[u32]; 3] = [&[1, 2, 3, 4], &[1, 2, 3, 1, 2], &[9]];
    let stored = StoredAnswers::build(answers, |_| anyhow::Ok(()))?;
    let place = tempfile::tempdir()?;
    let path = place.path().join("answers.safetensors");
    let lists = [("answers.token", stored.tokens()), ("answers.order", stored.order())];
    write_id_lists(&path, &lists, &[])?;
    Ok(Seed::new(Form::Safetensors, std::fs::read(path)?))
}

/// The header of an EAGLE-3 drafter in GGUF: a text, a list of texts, a number and a list of them, and a tensor.
fn gguf() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let words = |words: &[u32]| words.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    [
        b"GGUF".to_vec(),
        words(&[3, 1, 0, 4, 0]),
        text("general.architecture"),
        words(&[8]),
        text("eagle3"),
        text("tokenizer.ggml.tokens"),
        words(&[9, 8, 2, 0]),
        text("a"),
        text("b"),
        text("eagle3.block_count"),
        words(&[4, 1]),
        text("eagle3.target_layers"),
        words(&[9, 4, 3, 0, 2, 4, 5]),
        text("fc.weight"),
        words(&[2, 576, 0, 192, 0, 0, 0, 0]),
    ]
    .concat()
}

/// One word per line.
fn words(reader: &Reader) -> &'static str {
    match reader.name {
        "weights" | "stored-answers" => include_str!("words/weights.txt"),
        "torch-weights" | "medusa-weights" => include_str!("words/torch-weights.txt"),
        "gguf-model" | "gguf-tokenizer" => include_str!("words/gguf-model.txt"),
        "index" => include_str!("words/index.txt"),
        "config" => include_str!("words/config.txt"),
        "generation-config" => include_str!("words/generation-config.txt"),
        "tokenizer" => include_str!("words/tokenizer.txt"),
        "tokenizer-config" => include_str!("words/tokenizer-config.txt"),
        "template" => include_str!("words/template.txt"),
        "messages" => include_str!("words/messages.txt"),
        "responses" => include_str!("words/responses.txt"),
        "rollouts" => include_str!("words/rollouts.txt"),
        "prompts" => include_str!("words/prompts.txt"),
        "manifest" => include_str!("words/manifest.txt"),
        "journal" => include_str!("words/journal.txt"),
        "served-states" => include_str!("words/served-states.txt"),
        "answer" => include_str!("words/answer.txt"),
        "recipe" => include_str!("words/recipe.txt"),
        "head" => include_str!("words/head.txt"),
        "adapter" => include_str!("words/adapter.txt"),
        "eagle" | "eagle3" => include_str!("words/eagle3.txt"),
        "block" => include_str!("words/block.txt"),
        "medusa" => include_str!("words/medusa.txt"),
        "gguf" => include_str!("words/gguf.txt"),
        "server-costs" => include_str!("words/server-costs.txt"),
        "state" => include_str!("words/state.txt"),
        name => unreachable!("`{name}` has words"),
    }
}

const OVERRIDES: &str =
    "#set drafters.draft.head.num_layers=2\n#set data.top_k=3\n#set name=other\n";

const MESSAGES: &str = r#"{"role": "system", "content": "Be brief."}
{"role": "user", "content": "<think>2 + 2?</think> Tell me."}
{"role": "assistant", "content": "4"}
{"role": "user", "content": "And 3 + 3, \"é\"?"}"#;

/// Pieces of templates.
const CHAT_TEMPLATES: [&str; 5] = [
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
     {% endgeneration %}{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}\
     {{ loop.index }}: {{ m.content | indent(2) }}\n{% endfor %}{{ '%05d' | format(ns.n) }}",
    "{% macro turn(role, text) %}<|{{ role }}|>{{ text.strip().title() }}{% endmacro %}\
     {% for m in messages[::-1] %}{{ turn(m.role, m.content) }}{% endfor %}",
    "{% for i in range(3) %}{% for m in messages if m.role != 'system' %}{{ m | tojson(indent=2) }}\
     {% if loop.last %}{% break %}{% endif %}{% endfor %}{% endfor %}",
    "{{ bos_token }}{{ messages | map(attribute='content') | join(' ') | replace('a', 'bb') }}\
     {{ {'x': [1, 2.5, none, true]}.items() | list }}{{ raise_exception('no') if tools }}",
];

fn tokenizer_configs() -> Vec<Seed> {
    let configs = [
        json!({ "bos_token": "<s>", "eos_token": { "content": "</s>", "special": true },
            "chat_template": CHAT_TEMPLATES[0], "model_max_length": 1e30 }),
        json!({ "pad_token": null, "chat_template": [
            { "name": "tool_use", "template": "{{ tools }}" },
            { "name": "default", "template": CHAT_TEMPLATES[1] } ] }),
    ];
    configs.map(|config| Seed::new(Form::Json, config.to_string())).to_vec()
}

/// One tokenizer of each kind that published models use, with few words.
fn tokenizers() -> Vec<Seed> {
    let added = json!([
        { "id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
          "normalized": false, "special": true },
        { "id": 1, "content": "é日", "single_word": true, "lstrip": true, "rstrip": true,
          "normalized": true, "special": false }
    ]);
    let bpe = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "NFC" }, { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" } ] },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": "\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)" },
              "behavior": "Isolated", "invert": false },
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
              "use_regex": true } ] },
        "post_processor": { "type": "TemplateProcessing",
            "single": [ { "SpecialToken": { "id": "<s>", "type_id": 0 } },
                        { "Sequence": { "id": "A", "type_id": 0 } } ],
            "pair": [ { "Sequence": { "id": "A", "type_id": 0 } },
                      { "Sequence": { "id": "B", "type_id": 1 } } ],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<s>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": true, "ignore_merges": false,
            "vocab": { "<s>": 0, "a": 2, "b": 3, "aa": 4, "m": 5, "k": 6, "km": 7, "<0x0A>": 8 },
            "merges": [["a", "a"], ["k", "m"]] }
    });
    let word_piece = json!({
        "version": "1.0", "truncation": { "max_length": 4, "strategy": "LongestFirst",
            "stride": 0, "direction": "Right" }, "padding": null, "added_tokens": [],
        "normalizer": { "type": "BertNormalizer", "clean_text": true,
            "handle_chinese_chars": true, "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" }, "post_processor": null,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": { "[UNK]": 0, "a": 1, "##a": 2, "how": 3, "much": 4, "k": 5, "##m": 6 } }
    });
    let unigram = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": { "type": "Strip", "strip_left": true, "strip_right": false },
        "pre_tokenizer": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
            "split": true },
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] },
        "model": { "type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["▁", -2.5], ["a", -3.0], ["aa", -3.5], ["km", -4.0]] }
    });
    [bpe, word_piece, unigram].map(|all| Seed::new(Form::Json, all.to_string())).to_vec()
}

/// A journal of a response, one with log-probabilities, and one that a content filter stopped.
const JOURNAL: &str = r#"{"id":"set#0","request":"a1","response_ids":[3,4,2],"finish_reason":"eos"}
{"id":"set#1","request":"b2","response_ids":[5,9],"finish_reason":"length","known":[[[5,-0.25],[6,-1.75]],[]]}
{"id":"set#2","request":"c3","response_ids":[],"finish_reason":"content_filter"}
"#;

/// The file of three tokens with two states of four numbers.
fn served_states(dtype: &str) -> Seed {
    let num_bytes = 3 * 2 * 4 * if dtype == "F32" { 4 } else { 2 };
    let header = json!({
        "token_ids": { "dtype": "I64", "shape": [3], "data_offsets": [0, 24] },
        "hidden_states": { "dtype": dtype, "shape": [3, 2, 4], "data_offsets": [24, 24 + num_bytes] },
    });
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend([7_i64, 8, 9].into_iter().flat_map(i64::to_le_bytes));
    bytes.extend((0..num_bytes).map(|at| (at * 37 % 60) as u8));
    Seed::new(Form::Safetensors, bytes)
}

/// Answers as vLLM, llama.cpp and TGI write them.
const ANSWERS: [&str; 3] = [
    r#"{"model":"m","choices":[{"index":0,"text":"a b","finish_reason":"stop","stop_reason":2,"token_ids":[4,6],"logprobs":{"tokens":["token_id:4","token_id:6"],"token_logprobs":[-0.5,-4.0],"top_logprobs":[{"token_id:4":-0.5,"token_id:5":-1.5},{"token_id:7":-0.25,"token_id:5":-2.0}]}}],"usage":{"prompt_tokens":3}}"#,
    r#"{"choices":[{"text":"a","finish_reason":"length","logprobs":{"content":[{"id":4,"logprob":-0.5,"top_logprobs":[{"id":4,"logprob":-0.5},{"id":5,"logprob":-1.5}]}]}}],"__verbose":{"tokens":[4,8]}}"#,
    r#"{"choices":[{"text":"a b","finish_reason":"eos_token"}],"usage":{"completion_tokens":2}}"#,
];

/// The manifest of the shard beside it.
fn manifests() -> Result<Vec<Seed>> {
    let dir = tempfile::tempdir()?;
    let rows = state::response_rows(3);
    let place = Some(ShardPlace { index: 0, count: 1 });
    write_shard(&shard_path(dir.path(), 0), &rows, &state::provenance(), place)?;
    write_manifest(dir.path(), 1)?;
    Ok(vec![Seed::new(Form::Json, std::fs::read(dir.path().join(MANIFEST))?)])
}

fn responses() -> Result<Vec<Seed>> {
    let rows = state::response_rows(96);
    let place = Some(ShardPlace { index: 0, count: 2 });
    parquet_seeds(|path| Ok(write_shard(path, &rows, &state::provenance(), place)?))
}

fn rollouts() -> Result<Vec<Seed>> {
    let row = |prompt: usize, start: u32, ids: &[u32], is_response| RolloutRow {
        id: format!("set#{prompt}"),
        prompt_ids: if is_response { vec![1, 2] } else { Vec::new() },
        start,
        limit: 4,
        candidates: RolloutCandidates {
            candidate_ids: ids.to_vec(),
            candidate_prob: vec![0.5; ids.len()],
            confidence: vec![0.75; ids.len()],
            confidence_of_ten: vec![0.75; ids.len()],
            draft_entropy: vec![1.5; ids.len()],
            predicted_acceptance_prob: Some(vec![0.25; ids.len()]),
            draft_log_prob: vec![-0.75; ids.len()],
            target_log_prob: vec![-0.5; ids.len()],
        },
        is_response,
    };
    let rows = [
        row(0, 0, &[3, 4, 5, 6], true),
        row(0, 1, &[7, 8], false),
        row(1, 0, &[9, 2], true),
        row(1, 0, &[8, 8], false),
    ];
    let provenance = RolloutProvenance {
        responses: state::provenance(),
        drafter: "draft".to_owned(),
        set: "test".to_owned(),
        head: Some(RolloutHead::new("ee".to_owned(), HeadTiming::AtDraw)),
        max_length: 2,
        context: 64,
        forwards: Default::default(),
        data: Some("ff".to_owned()),
    };
    parquet_seeds(|path| Ok(write_rollouts(path, &rows, &provenance)?))
}

/// A file as we write it, and as other writers do, with uncompressed pages.
fn parquet_seeds(write: impl FnOnce(&Path) -> Result<()>) -> Result<Vec<Seed>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("seed.parquet");
    write(&path)?;
    let mut seeds = vec![Seed::new(Form::Parquet, std::fs::read(&path)?)];
    let plain = || WriterProperties::builder().set_dictionary_enabled(false);
    for properties in [
        plain(),
        WriterProperties::builder().set_max_row_group_row_count(Some(2)),
        plain().set_writer_version(WriterVersion::PARQUET_2_0).set_data_page_row_count_limit(2),
    ] {
        seeds.push(Seed::new(Form::Parquet, rewritten(&path, properties)?));
    }
    Ok(seeds)
}

/// The rows of a file, written with other properties.
fn rewritten(
    path: &Path,
    properties: parquet::file::properties::WriterPropertiesBuilder,
) -> Result<Vec<u8>> {
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder =
        ParquetRecordBatchReaderBuilder::try_new_with_options(File::open(path)?, options)?;
    let entries = builder.metadata().file_metadata().key_value_metadata().cloned();
    let (schema, mut bytes) = (builder.schema().clone(), Vec::new());
    let mut properties = properties.set_key_value_metadata(entries);
    for column in builder.parquet_schema().columns() {
        let (path, encoding) = (
            column.path().clone(),
            match column.physical_type() {
                Type::BOOLEAN => continue,
                // The reader refuses other encodings of texts.
                Type::BYTE_ARRAY => Encoding::PLAIN,
                Type::FLOAT | Type::DOUBLE => Encoding::BYTE_STREAM_SPLIT,
                _ => Encoding::DELTA_BINARY_PACKED,
            },
        );
        properties = properties.set_column_encoding(path, encoding);
    }
    let mut writer = ArrowWriter::try_new(&mut bytes, schema, Some(properties.build()))?;
    for batch in builder.build()? {
        writer.write(&batch?)?;
    }
    writer.close()?;
    Ok(bytes)
}

/// A record of each form that prompts are published in.
fn prompts() -> Result<Vec<Seed>> {
    let records = [
        json!({ "prompt": "a", "response": "b", "category": "c", "id": 7 }),
        json!({ "question_id": 81, "category": "writing", "turns": ["a", "b"] }),
        json!({ "question": "How many?", "answer": "#### 4" }),
        json!({ "task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "  x" }),
        json!({ "instruction": "Do it.", "input": "this", "output": "done" }),
        json!({ "id": "x", "conversations": [
            { "from": "system", "value": "s" }, { "from": "human", "value": "a" },
            { "from": "gpt", "value": "b" }, { "from": "human", "value": "c" } ] }),
        json!({ "messages": [ { "role": "user", "content": "a" },
            { "role": "assistant", "content": "b" }, { "role": "user", "content": "é" } ] }),
        json!({ "prompt": "a", "continuation": "b", "prefix": "[1, 5]", "tokens": [7, 2],
            "draft": "[8, 2]", "log_p_7b": "[-0.5, -1e999]", "p_acc": [0.25, 1], "id": "x#1" }),
    ];
    let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
    let all = lines.join("\r\n") + "\n\n";
    let mut zipped = GzEncoder::new(Vec::new(), Compression::fast());
    std::io::Write::write_all(&mut zipped, all.as_bytes())?;
    let packed = all.clone();
    let mut seeds = vec![
        Seed::new(Form::JsonLines, all),
        Seed::new(Form::Json, json!(records).to_string()),
        Seed::new(Form::Gzip, zipped.finish()?),
        Seed::new(Form::Text, zstd::encode_all(packed.as_bytes(), 1)?),
    ];
    seeds.extend(lines.into_iter().map(|line| Seed::new(Form::Json, line)));
    let texts = |texts: [Option<&str>; 3]| Arc::new(StringArray::from(texts.to_vec())) as ArrayRef;
    let table = RecordBatch::try_from_iter([
        ("question", texts([Some("a"), Some("b"), Some("c")])),
        ("answer", texts([Some("a"), None, Some("c")])),
    ])?;
    seeds.extend(parquet_seeds(|path| {
        let mut writer = ArrowWriter::try_new(File::create(path)?, table.schema(), None)?;
        writer.write(&table)?;
        writer.close().map(drop)?;
        Ok(())
    })?);
    Ok(seeds)
}

/// The files that tuning adds to an export.
fn tuned(drafter: &str) -> serde_json::Value {
    let config = json!({ "stop_rule": "fixed_length", "candidate_length": 3 });
    json!({ "greedy": rule(drafter, 0.0, config), "sampled": null })
}

fn rule(drafter: &str, temperature: f64, config: serde_json::Value) -> serde_json::Value {
    json!({
        "drafter": drafter, "config": config, "temperature": temperature, "top_p": 1.0,
        "expected_gain": { "value": 0.25, "low": 0.0, "high": 0.5 },
        "expected_acceptance_rate": { "value": 0.5, "low": 0.25, "high": 0.75 },
        "best_fixed_length": 3,
        "costs": { "draft_seconds": 0.1, "target_seconds": 1.0, "row_seconds": 0.0 },
        "num_prompts": 40,
    })
}

fn heads() -> Vec<Seed> {
    let own = json!({
        "hidden_size": 4, "num_layers": 2, "schema": "draftsmith.head.v2", "tied": true,
        "form": "candidate", "inputs": ["entropy"], "draft_hash": "aa", "target_hash": "bb",
        "training": { "labels": "sampled", "seed": 1 },
        "tuned": tuned("draft"),
    });
    let mut sampled = own.clone();
    sampled["tuned"] = json!({ "greedy": null,
        "sampled": rule("draft", 0.8, json!({ "stop_rule": "rejection_threshold", "stop_threshold": 0.5,
            "bounds": { "min": 1, "max": 8 } })) });
    [own, sampled].map(|config| Seed::new(Form::Json, config.to_string())).to_vec()
}

/// A model's configuration, in the layout of transformers 4 and in that of transformers 5.
fn configs() -> Result<Vec<Seed>> {
    let text = std::fs::read_to_string(fixture(MODEL).join("config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&text)?;
    let mut rope = config["rope_scaling"].take();
    rope["rope_theta"] = config["rope_theta"].take();
    config["rope_parameters"] = rope;
    Ok([text, config.to_string()].map(|text| Seed::new(Form::Json, text)).to_vec())
}

/// An EAGLE-3 drafter's configuration, as this program and as the speculators library write it.
fn eagles() -> Result<Vec<Seed>> {
    let dir = tempfile::tempdir()?;
    let config = Eagle3Config::new(&ModelConfig::from_model_dir(&fixture(MODEL))?);
    config.init(&Device::flex()).write_dir(dir.path(), &config)?;
    let text = std::fs::read_to_string(dir.path().join("config.json"))?;
    let mut own: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text)?;
    // The weights beside the input are others.
    own.remove("weights_hash");
    let (text, mut other) = (json!(own).to_string(), json!(own));
    other["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [0, 1, 2] });
    other["norm_before_residual"] = json!(true);
    other["tuned"] = tuned("eagle");
    Ok([text, other.to_string()].map(|text| Seed::new(Form::Json, text)).to_vec())
}

/// A drafter's configuration in our form, in z-lab's and in the speculators library's.
fn blocks() -> Result<Vec<Seed>> {
    let mut ours = block_config()?.to_json();
    let text = ours.to_string();
    let mut z_labs = ours.clone();
    z_labs["dflash_config"] = json!({ "target_layer_ids": [-1, 0], "mask_token_id": 1 });
    let nested = ours.clone();
    ours["speculators_model_type"] = json!("dspark");
    ours["transformer_layer_config"] = nested;
    ours["aux_hidden_state_layer_ids"] = json!([0, 1]);
    let texts = [text, z_labs.to_string(), ours.to_string()];
    Ok(texts.map(|text| Seed::new(Form::Json, text)).to_vec())
}

/// Rounds of a server, measured at two loads.
const SERVER_COSTS: &str = r#"{"model": "m", "num_words": 64, "sentinel_ms": 4.5, "cells": [
    {"batch_size": 1, "num_candidates": 0, "block_ms": [7.0, 7.1], "prompt_token_ms": [0.1], "tokens_per_round": 1.0},
    {"batch_size": 4, "num_candidates": 3, "block_ms": [9.0], "tokens_per_round": null}]}"#;

fn adapters() -> Result<Vec<Seed>> {
    let config = std::fs::read_to_string(fixture(MODEL).join("config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&config)?;
    config["num_hidden_layers"] = json!(1);
    config["exit_layer"] = json!(1);
    let kangaroo = Seed::new(Form::Json, config.to_string());
    config["architecture"] = json!("attention");
    config["training"] = json!({ "loss": "cross-entropy" });
    config["tuned"] = tuned("exit1");
    Ok(vec![kangaroo, Seed::new(Form::Json, config.to_string())])
}

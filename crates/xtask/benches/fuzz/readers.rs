//! A table of all readers of files that others may have written, with the files that each needs beside its
//! input. The bench mutates files for them; `tests/corpus.rs` reads earlier failures.
//!
//! A reader does what the commands do before they compute, and briefly uses a file that loads.

#[path = "state.rs"]
pub(crate) mod state;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Error, Result};
use burn::tensor::Device;
use draftsmith_data::{
    ChatTemplate, Incomplete, MANIFEST, Message, Prompts, ShardPlace, TextFiles, TextTokenizer,
    broken_shards, read_dir, read_rollouts, read_shard, shard_path, write_manifest, write_shard,
};
use draftsmith_decode::{Limits, ModelSession, decode_plain};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, BlockDrafter, BlockDrafterConfig,
    CausalLm, ConfidenceHead, Eagle, Eagle3, Eagle3Config, EagleConfig, Gguf, HeadForm, HeadInput,
    HeadReads, Medusa, MedusaConfig, ModelConfig, WeightDtype, WeightReader, read_id_lists,
    read_metadata,
};
use draftsmith_recipe::workspace::text_files;
use draftsmith_servers::costs::ServerCostsFile;
use draftsmith_servers::doctor::diagnose;
use draftsmith_theory::{
    Decoding, MaxGram, MaxGramConfig, SearchedText, SeededDraws, StoredAnswers,
};
use tempfile::TempDir;

/// Reads files of one kind.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) name: &'static str,
    /// The file's name in its directory.
    pub(crate) file: &'static str,
    /// Writes the files beside it.
    prepare: fn(&Path) -> Result<()>,
    /// Reads the file in its directory.
    read: fn(&Path) -> Result<()>,
}

impl Reader {
    /// A directory for the file, with the files beside it.
    pub(crate) fn place(&self) -> Result<TempDir> {
        let place = tempfile::tempdir()?;
        (self.prepare)(place.path())?;
        Ok(place)
    }

    /// Reads `input` as if it were the file.
    pub(crate) fn read(&self, place: &TempDir, input: &[u8]) -> Result<()> {
        std::fs::write(place.path().join(self.file), input)?;
        (self.read)(place.path())
    }
}

/// All readers.
pub(crate) const READERS: [Reader; 30] = [
    Reader {
        name: "weights",
        file: "model.safetensors",
        prepare: |dir| copy_model(dir, &["config.json"]),
        read: weights,
    },
    Reader {
        name: "torch-weights",
        file: "pytorch_model.bin",
        prepare: |dir| {
            std::fs::copy(fixture(TORCH_MODEL).join("config.json"), dir.join("config.json"))?;
            Ok(())
        },
        read: model,
    },
    Reader {
        name: "gguf-model",
        file: "model.gguf",
        prepare: |_| Ok(()),
        read: |dir| {
            let path = dir.join("model.gguf");
            Gguf::read(&path)?.tokens()?;
            model(&path)
        },
    },
    Reader {
        name: "gguf-tokenizer",
        file: "smollm.gguf",
        prepare: |_| Ok(()),
        read: |dir| {
            let files = text_files(&dir.join("smollm.gguf"))?;
            tokenizer(files.clone())?;
            template(files)
        },
    },
    Reader {
        name: "index",
        file: "model.safetensors.index.json",
        prepare: |dir| copy_files(&fixture("llama-v5-sharded-f16"), dir),
        read: model,
    },
    Reader {
        name: "config",
        file: "config.json",
        prepare: |dir| copy_model(dir, &["model.safetensors"]),
        read: model,
    },
    Reader {
        name: "generation-config",
        file: "generation_config.json",
        prepare: |dir| copy_model(dir, &["config.json", "model.safetensors"]),
        read: model,
    },
    Reader {
        name: "tokenizer",
        file: "tokenizer.json",
        prepare: |_| Ok(()),
        read: |dir| tokenizer(dir),
    },
    Reader {
        name: "tokenizer-config",
        file: "tokenizer_config.json",
        prepare: |_| Ok(()),
        read: |dir| template(dir),
    },
    Reader {
        name: "template",
        file: "chat_template.jinja",
        prepare: |dir| {
            put(dir, "tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#)
        },
        read: |dir| template(dir),
    },
    Reader {
        name: "messages",
        file: "messages.jsonl",
        prepare: |dir| {
            for (name, source) in TEMPLATES {
                std::fs::create_dir(dir.join(name))?;
                put(&dir.join(name), "chat_template.jinja", source)?;
            }
            Ok(())
        },
        read: messages,
    },
    Reader {
        name: "responses",
        file: "responses-00000.parquet",
        prepare: |_| Ok(()),
        read: |dir| {
            let path = dir.join("responses-00000.parquet");
            read_shard(&path, Some(4096))?;
            draftsmith_cli::readers::inspect(&path)
        },
    },
    Reader {
        name: "rollouts",
        file: "rollouts-draft-test-greedy.parquet",
        prepare: |_| Ok(()),
        read: |dir| {
            let path = dir.join("rollouts-draft-test-greedy.parquet");
            read_rollouts(&path, Some(4096))?;
            draftsmith_cli::readers::inspect(&path)
        },
    },
    Reader {
        name: "prompts",
        file: "prompts.jsonl",
        prepare: |_| Ok(()),
        read: |dir| {
            let open = || Prompts::open(&dir.join("prompts.jsonl"));
            let mut keeping = open()?;
            keeping.keeps_tokens = true;
            keeping.try_for_each(|prompt| prompt.map(drop))?;
            Ok(open()?.try_for_each(|prompt| prompt.map(drop))?)
        },
    },
    Reader {
        name: "manifest",
        file: MANIFEST,
        prepare: |dir| {
            let place = Some(ShardPlace { index: 0, count: 1 });
            let rows = state::response_rows(3);
            write_shard(&shard_path(dir, 0), &rows, &state::provenance(), place)?;
            Ok(write_manifest(dir, 1)?)
        },
        read: |dir| {
            broken_shards(dir)?;
            read_dir(dir, Incomplete::Refused)?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader {
        name: "journal",
        file: "served.jsonl",
        prepare: |_| Ok(()),
        read: |dir| {
            draftsmith_served::readers::journal(&dir.join("served.jsonl")).map_err(Error::msg)
        },
    },
    Reader {
        name: "answer",
        file: "answer.json",
        prepare: |_| Ok(()),
        read: |dir| {
            draftsmith_served::readers::answer(&std::fs::read(dir.join("answer.json"))?)
                .map_err(Error::msg)
        },
    },
    Reader {
        name: "served-states",
        file: "cmpl-1.safetensors",
        prepare: |_| Ok(()),
        read: |dir| {
            draftsmith_served::readers::states(&dir.join("cmpl-1.safetensors")).map_err(Error::msg)
        },
    },
    Reader { name: "recipe", file: "recipe.toml", prepare: |_| Ok(()), read: recipe },
    Reader {
        name: "head",
        file: "config.json",
        prepare: head_weights,
        read: |dir| {
            AcceptanceHead::from_dir(dir, HEAD_WIDTH, &Device::flex())?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader {
        name: "adapter",
        file: "config.json",
        prepare: adapter_weights,
        read: |dir| {
            let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
            Adapter::from_dir(dir, &target.shape, WeightDtype::F32, &Device::flex())?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader {
        name: "eagle3",
        file: "config.json",
        prepare: eagle3_weights,
        read: |dir| {
            let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
            // Anyone's drafter is judged before it is read.
            let diagnosis = diagnose(dir, &fixture(MODEL));
            let device = Device::flex();
            Eagle3::from_dir(dir, &target.shape, WeightDtype::F32, &device)?;
            diagnosis?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader {
        name: "eagle",
        file: "config.json",
        prepare: eagle_weights,
        read: |dir| {
            let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
            let diagnosis = diagnose(dir, &fixture(MODEL));
            Eagle::from_dir(dir, &target.shape, WeightDtype::F32, &Device::flex())?;
            diagnosis?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader {
        name: "gguf",
        file: "drafter.gguf",
        prepare: |_| Ok(()),
        read: |dir| diagnose(&dir.join("drafter.gguf"), &fixture(MODEL)).map(drop),
    },
    Reader {
        name: "block",
        file: "config.json",
        prepare: block_weights,
        read: |dir| {
            let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
            let diagnosis = diagnose(dir, &fixture(MODEL));
            let device = Device::flex();
            BlockDrafter::from_dir(dir, &target.shape, WeightDtype::F32, &device)?;
            diagnosis?;
            draftsmith_cli::readers::inspect(dir)
        },
    },
    Reader { name: "medusa", file: "config.json", prepare: medusa_weights, read: medusa },
    Reader {
        name: "medusa-weights",
        file: "medusa_lm_head.pt",
        prepare: |dir| put(dir, "config.json", r#"{ "medusa_num_heads": 2 }"#),
        read: medusa,
    },
    Reader {
        name: "server-costs",
        file: "server-costs.json",
        prepare: |_| Ok(()),
        read: |dir| ServerCostsFile::read(&dir.join("server-costs.json")).map(drop),
    },
    Reader {
        name: "stored-answers",
        file: "answers.safetensors",
        prepare: |_| Ok(()),
        read: |dir| {
            let names = ["answers.token", "answers.order"];
            let [tokens, order] = read_id_lists(&dir.join("answers.safetensors"), names, 1 << 32)?;
            let stored = StoredAnswers::from_parts(tokens, order, 4096).map_err(Error::msg)?;
            let searched = SearchedText::Answers;
            let config = MaxGramConfig { searched, ..MaxGramConfig::default() };
            let mut look_up = MaxGram::new(config, Some(Arc::new(stored)));
            look_up.begin(&[1, 2, 3, 1, 2]);
            look_up.continuations(9);
            Ok(())
        },
    },
    Reader { name: "state", file: "state", prepare: |_| Ok(()), read: state::resume },
];

/// The model with weights from `torch.save`.
pub(crate) const TORCH_MODEL: &str = "llama-yarn-bin-f32";
/// The model whose files come beside the changed ones.
pub(crate) const MODEL: &str = "llama-v4-tied-bf16";

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn put(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> Result<()> {
    Ok(std::fs::write(dir.join(name), text)?)
}

fn copy_model(dir: &Path, names: &[&str]) -> Result<()> {
    let copy = |name: &&str| std::fs::copy(fixture(MODEL).join(name), dir.join(name)).map(drop);
    Ok(names.iter().try_for_each(copy)?)
}

fn copy_files(from: &Path, to: &Path) -> Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        std::fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Opens a weight file and takes every tensor, then loads it as a model.
fn weights(dir: &Path) -> Result<()> {
    let path = dir.join("model.safetensors");
    read_metadata(&path)?;
    let mut weights = WeightReader::open_file(&path)?;
    weights.dtype();
    let names: Vec<String> = weights.names().map(str::to_owned).collect();
    for name in &names {
        let Some(shape) = weights.shape(name).map(<[usize]>::to_vec) else { continue };
        weights.take(name, &shape)?;
    }
    weights.finish()?;
    model(dir)
}

/// Loads a model and decodes two tokens.
fn model(dir: &Path) -> Result<()> {
    let config = ModelConfig::from_model_dir(dir)?;
    config.to_json("float32");
    config.num_parameters();
    let model = CausalLm::from_model_dir(dir, &Device::flex())?;
    let limits = Limits::new(2, config.shape.eos_token_ids);
    let mut draws = SeededDraws::new(1, &["fuzz"]);
    let mut session = ModelSession::new(&model, limits.max_new_tokens + 3, "target");
    decode_plain(&mut session, &Decoding::GREEDY, &[1, 2, 3], &limits, &mut draws, &mut |_| {
        std::ops::ControlFlow::Continue(())
    })?;
    Ok(())
}

const TEXTS: [&str; 4] = [
    "How much is 3 km in m?\n\n  2,000.5",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "é日本\u{301}🎉\0",
    "",
];

fn tokenizer(files: impl Into<TextFiles>) -> Result<()> {
    let tokenizer = TextTokenizer::from_model_dir(files)?;
    let _ = (tokenizer.vocab_size(), tokenizer.hash());
    TextTokenizer::check_shared(&tokenizer, &tokenizer)?;
    for (text, special) in TEXTS.iter().zip([true, false, true, false]) {
        let mut ids = tokenizer.encode(text, special)?;
        ids.extend([0, 1, u32::MAX]);
        tokenizer.decode(&ids, special)?;
        let mut stream = tokenizer.text_stream(special);
        for id in ids {
            stream.push(id)?;
        }
    }
    Ok(())
}

fn chat() -> [Message; 3] {
    [Message::user(TEXTS[0]), Message::assistant(TEXTS[2]), Message::user("2 + 2?")]
}

fn template(files: impl Into<TextFiles>) -> Result<()> {
    let Some(template) = ChatTemplate::from_model_dir(files)? else { return Ok(()) };
    let _ = template.hash();
    template.render(&chat(), false)?;
    template.render(&chat(), true)?;
    Ok(())
}

/// Shortened published templates.
const TEMPLATES: [(&str, &str); 3] = [
    (
        "chatml",
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
         + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
         {{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    (
        "alternating",
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}\
         {% set messages = messages[1:] %}{% endif %}{% for message in messages %}\
         {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('roles must alternate: ' ~ message['role']) }}{% endif %}\
         {{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% endfor %}",
    ),
    (
        "thinking",
        "{%- for message in messages %}{%- set content = message.content.split('</think>')[-1] %}\
         {{- message.role | upper ~ content | tojson ~ (content | replace('<think>', '')) }}{% endfor -%}",
    ),
];

/// Renders the messages of each line with every template.
fn messages(dir: &Path) -> Result<()> {
    let text = std::fs::read(dir.join("messages.jsonl"))?;
    let mut messages = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        let line: serde_json::Value = serde_json::from_slice(line)?;
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        messages.push(Message {
            role: text("role"),
            content: text("content"),
            ..Message::default()
        });
    }
    for (name, _) in TEMPLATES {
        if let Some(template) = ChatTemplate::from_model_dir(&dir.join(name))? {
            template.render(&messages, true)?;
        }
    }
    Ok(())
}

/// The prefix of recipe lines that stand for `--set` on the command line.
const OVERRIDE: &str = "#set ";

fn recipe(dir: &Path) -> Result<()> {
    let path = dir.join("recipe.toml");
    let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
    let overrides: Vec<String> =
        text.lines().filter_map(|line| line.strip_prefix(OVERRIDE)).map(str::to_owned).collect();
    draftsmith_cli::readers::recipe(&path, &overrides)
}

/// The hidden size of the head whose configuration is changed.
const HEAD_WIDTH: usize = 4;

fn head_weights(dir: &Path) -> Result<()> {
    let reads = HeadReads::new(HeadForm::Candidate, &[HeadInput::Entropy]);
    let config = AcceptanceHeadConfig::new(HEAD_WIDTH, 2, true).with_reads(reads);
    Ok(config.init(&Device::flex()).write_dir(dir, &config)?)
}

fn eagle3_weights(dir: &Path) -> Result<()> {
    let config = Eagle3Config::new(&ModelConfig::from_model_dir(&fixture(MODEL))?);
    Ok(config.init(&Device::flex()).write_dir(dir, &config)?)
}

fn eagle_weights(dir: &Path) -> Result<()> {
    let config = EagleConfig::new(&ModelConfig::from_model_dir(&fixture(MODEL))?);
    Ok(config.init(&Device::flex()).write_dir(dir, &config)?)
}

/// A block drafter with every part.
pub(crate) fn block_config() -> Result<BlockDrafterConfig> {
    let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
    let confidence = ConfidenceHead::OfRowAndToken;
    Ok(BlockDrafterConfig::new(&target, 2, 0).with(|it| {
        it.markov_rank = 2;
        it.confidence = confidence;
    }))
}

fn block_weights(dir: &Path) -> Result<()> {
    let config = block_config()?;
    Ok(config.init(&Device::flex()).write_dir(dir, &config)?)
}

/// Heads for the model.
fn medusa_weights(dir: &Path) -> Result<()> {
    let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
    let config = MedusaConfig::new(&target.shape, 2);
    let mut draws = SeededDraws::new(1, &["fuzz"]);
    let heads = config.init_from(&Device::flex(), || draws.uniform());
    Ok(heads.write_dir(dir, &config)?)
}

fn medusa(dir: &Path) -> Result<()> {
    let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
    let diagnosis = diagnose(dir, &fixture(MODEL));
    Medusa::from_dir(dir, &target.shape, WeightDtype::F32, &Device::flex())?;
    diagnosis?;
    draftsmith_cli::readers::inspect(dir)
}

fn adapter_weights(dir: &Path) -> Result<()> {
    let target = ModelConfig::from_model_dir(&fixture(MODEL))?;
    let config = AdapterConfig::new(&target, 1)?;
    Ok(config.init(&Device::flex()).write_dir(dir, &config)?)
}

//! `explain` over HTTP: a server that runs our own decoder on other files than the drafter's is explained by
//! what these files change. `EXPLAIN_TRIALS=N` runs N trials of each kind of drafter instead of one.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use draftsmith_decode::{
    AnsweringTarget, BlockDraftParts, DraftModelParts, DrafterParts, KeptStates, KnownResponse,
    KnownStates, Limits, ModelSession, RecordOptions, RecordRequest, RecordTask, ResponseTarget,
    StateDraftParts, Target, TargetLayers,
};
use draftsmith_model::{
    BlockDrafter, CausalLm, Eagle3, Rows, SessionFaults, WeightDtype, WeightReader,
};
use draftsmith_recipe::{
    DrafterRecipe, DrafterRecipes, Kinds, LoadedDrafters, Recipe, Silent, Workspace,
};
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Decoding, DrafterId, FixedLengthConfig, Recordings, Round,
    Sampling, SeededDraws, StopRuleConfig, argmax,
};
use draftsmith_tune::decoders::Decoders;
use serde_json::{Map, Value, json};

use crate::doctor::{edit_config, edit_tensors};
use crate::support::{Place, Ran, copy_dir, model, read_request};

/// How a mock server counts and answers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Manner {
    /// Counts by position, as vLLM.
    Vllm,
    /// Counts in each answer only, as llama-server without `--metrics`.
    Llama,
    /// Counts rounds only, as SGLang.
    Sglang,
    /// Changes its number of candidates, and counts as llama-server does.
    Changing,
    /// Draws candidates at temperature 1, and counts as vLLM.
    Drawn,
    /// Reads each token beside the target's state one position too early, and counts as vLLM.
    Behind,
    /// Counts nothing.
    Mute,
    /// Drafts nothing.
    Idle,
    /// Answers with other tokens.
    Other,
    /// Answers with another token now and then.
    Faulty,
}

/// What a mock server runs.
struct Engine {
    workspace: Workspace,
    loaded: LoadedDrafters,
    /// The numbers of layers before the target's states that an EAGLE-3 drafter reads.
    layers: Vec<usize>,
    manner: Manner,
    num_candidates: usize,
    counts: Mutex<[f64; 3]>,
    by_position: Mutex<Vec<f64>>,
}

impl Engine {
    fn new(
        target: &Path,
        (kind_name, drafter_dir): (&str, &Path),
        manner: Manner,
        num_candidates: usize,
    ) -> Self {
        let kind = Kinds::default().get(kind_name).unwrap().in_dir(drafter_dir).unwrap();
        let drafters = DrafterRecipes::one(DrafterId::DRAFT, DrafterRecipe::new(kind));
        let recipe = Recipe::of_drafters(target.to_path_buf(), None, drafters);
        let devices = vec![Device::flex()];
        let mut workspace = recipe.open(None, WeightDtype::F32, devices, &Silent).unwrap();
        workspace.takes_others = true;
        let mut loaded = recipe.load_drafters(&workspace, true).unwrap();
        if let Ok(faults) = std::fs::read(drafter_dir.join("faults.json")) {
            loaded.all[0].parts.parts = parts_with(&faults, &workspace, (kind_name, drafter_dir));
        }
        let (counts, by_position) = (Mutex::default(), Mutex::new(vec![0.0; 10]));
        let (shape, dtype) = (workspace.models.target_shape().unwrap(), WeightDtype::F32);
        let layers = match kind_name {
            "eagle3" => {
                Eagle3::from_dir(drafter_dir, shape, dtype, &Device::flex())
                    .unwrap()
                    .0
                    .target_layers
            }
            _ => Vec::new(),
        };
        Self { workspace, loaded, layers, manner, num_candidates, counts, by_position }
    }

    /// Answers a prompt: its first token comes from the prefill, the others from rounds.
    fn answer(&self, body: &Value) -> Value {
        let numbers =
            |key: &str| body[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
        let (mut prompt, num): (Vec<u32>, usize) =
            (numbers("prompt").collect(), body["max_tokens"].as_u64().unwrap() as usize);
        let pair = self.workspace.pair().unwrap();
        let mut decoders = Decoders::new(pair, &self.loaded, num - 1);
        let first = argmax(decoders.score(&prompt, prompt.len() - 1).unwrap().row(0));
        let (mut ids, mut spent) = (vec![first], [0.0; 3]);
        prompt.push(first);
        let is_end = |id: u32| pair.text.eos_token_ids.contains(&id);
        if !is_end(first) {
            let rule: StopRuleConfig = match self.manner {
                Manner::Changing => ConfidenceThresholdConfig {
                    confidence_threshold: 0.4,
                    before_draw: false,
                    bounds: Bounds { min: 1, max: 5 },
                }
                .into(),
                _ => FixedLengthConfig { candidate_length: self.num_candidates }.into(),
            };
            let (mut rule, mut draws) = (rule.init().unwrap(), SeededDraws::new(0, &["mock"]));
            let (rule, greedy) = (Some(&mut *rule as _), &Decoding::GREEDY);
            let found = decoders
                .decode(DrafterId::DRAFT.into(), rule, greedy, &prompt, &mut draws)
                .unwrap();
            let rounds = match self.manner {
                Manner::Drawn | Manner::Behind => self.recorded(&prompt, &found.token_ids),
                _ => found.trace.rounds,
            };
            for round in rounds.iter().filter(|round| round.num_drafted > 0) {
                spent[0] += 1.0;
                spent[1] += round.num_drafted as f64;
                spent[2] += round.num_accepted as f64;
                let by_position = &mut self.by_position.lock().unwrap();
                by_position[..round.num_accepted].iter_mut().for_each(|count| *count += 1.0);
            }
            ids.extend(found.token_ids);
        }
        if self.manner == Manner::Idle {
            spent = [0.0; 3];
        }
        let mut counts = self.counts.lock().unwrap();
        (0..3).for_each(|at| counts[at] += spent[at]);
        let reason = if is_end(*ids.last().unwrap()) { "stop" } else { "length" };
        for (at, id) in ids.iter_mut().enumerate() {
            let changes = match self.manner {
                Manner::Other => true,
                Manner::Faulty => at % 10 == 9,
                _ => false,
            };
            *id = if changes { (*id + 7) % 1024 } else { *id };
        }
        let choice = json!({ "index": 0, "text": "", "finish_reason": reason, "token_ids": ids });
        let mut answer = json!({ "model": "mock", "choices": [choice],
            "usage": { "prompt_tokens": prompt.len() - 1, "completion_tokens": ids.len() } });
        if matches!(self.manner, Manner::Llama | Manner::Changing) {
            answer["timings"] = json!({ "draft_n": spent[1], "draft_n_accepted": spent[2] });
        }
        answer
    }

    /// The target's states along a text, each one position too early.
    fn states_behind<'t>(&self, text: &'t [u32]) -> Vec<KnownStates<'t>> {
        let target = &self.workspace.pair().unwrap().target;
        let mut session = ModelSession::with_slots(target, text.len() + 1, 1, "target");
        session.set_layers(&TargetLayers::kept(&self.layers));
        session.score(text, 0).unwrap();
        session.begin_round(0, text.len() + 1);
        let states = session.kept_states(0, text, 0, &self.layers);
        let behind = |(layer, rows): (&usize, Rows)| {
            let last = rows.num_rows() - 1;
            (*layer, Rows::cat([rows.slice(0..1), rows.slice(0..last)]))
        };
        vec![KnownStates {
            ids: text,
            layers: self.layers.iter().zip(states).map(behind).collect(),
        }]
    }

    /// The rounds of an answer with candidates that are recorded along it: drawn ones of a draft model, or
    /// those of an EAGLE-3 drafter that reads states one position too early.
    fn recorded(&self, prompt: &[u32], response: &[u32]) -> Vec<Round> {
        let pair = self.workspace.pair().unwrap();
        let vocab_size = pair.target.shape().vocab_size;
        let known = [KnownResponse { response, probs: None }];
        let text = [prompt, &response[..response.len().saturating_sub(1)]].concat();
        let is_drawn = self.manner == Manner::Drawn;
        let answers = ResponseTarget::new(known, vocab_size, pair.text.context, 1);
        let answers = match is_drawn {
            true => answers,
            false => answers.with_states(self.states_behind(&text)),
        };
        let options = RecordOptions {
            decoding: match is_drawn {
                true => Decoding::sampled(Sampling::default()),
                false => Decoding::GREEDY,
            },
            limits: Limits::new(response.len() + 9, Vec::new()),
            max_length: self.num_candidates,
            has_head: false,
            labels: false,
            is_target_here: false,
        };
        let draws = &mut SeededDraws::new(77, &[&format!("{prompt:?}")]);
        let requests = vec![RecordRequest { prompt, response, draws }];
        let observe = &mut |_| ControlFlow::Continue(());
        let task = RecordTask { options: &options, requests, observe };
        let layers = (!is_drawn).then_some(&pair.target);
        let target = AnsweringTarget { answers, layers, vocab_size };
        let parts = &self.loaded.all[0].parts.parts;
        let recordings = Recordings {
            drafter: DrafterId::DRAFT,
            max_length: self.num_candidates,
            eos_token_ids: Vec::new(),
            head: None,
            responses: parts.record_elsewhere(target, task).unwrap().unwrap(),
            answers: None,
        };
        let rule = FixedLengthConfig { candidate_length: self.num_candidates }.into();
        recordings.trace(&rule).unwrap().rounds
    }

    fn metrics(&self) -> Option<String> {
        let [rounds, drafted, accepted] = *self.counts.lock().unwrap();
        let positions = self.by_position.lock().unwrap();
        let at = |(at, count): (usize, &f64)| {
            format!(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"{at}\"}} {count}\n"
            )
        };
        match self.manner {
            Manner::Llama | Manner::Changing | Manner::Mute => None,
            Manner::Sglang => Some(format!(
                "sglang:spec_verify_calls_total {rounds}\nsglang:spec_num_steps {}\n",
                self.num_candidates
            )),
            _ => Some(format!(
                "vllm:spec_decode_num_drafts_total {rounds}\nvllm:spec_decode_num_draft_tokens_total {drafted}\n\
                 vllm:spec_decode_num_accepted_tokens_total {accepted}\n{}",
                positions.iter().enumerate().map(at).collect::<String>()
            )),
        }
    }
}

/// Loads a drafter whose sessions have faults.
fn parts_with(
    faults: &[u8],
    workspace: &Workspace,
    (kind, dir): (&str, &Path),
) -> Arc<dyn DrafterParts> {
    let (cache_bits, position_shift, reads_token_behind) = serde_json::from_slice(faults).unwrap();
    let faults = SessionFaults { cache_bits, position_shift, reads_token_behind };
    let (shape, dtype) = (workspace.models.target_shape().unwrap(), WeightDtype::F32);
    let device = &Device::flex();
    match kind {
        "model" => {
            let model = CausalLm::load(dir, dtype, None, device).unwrap().with_faults(faults);
            Arc::new(DraftModelParts { model, head: None })
        }
        "eagle3" => {
            let (config, network) = Eagle3::from_dir(dir, shape, dtype, device).unwrap();
            let (network, layers) = (network.with_faults(faults), config.target_layers);
            Arc::new(StateDraftParts { network, layers, head: None })
        }
        _ => {
            let (config, network) = BlockDrafter::from_dir(dir, shape, dtype, device).unwrap();
            let (network, layers) = (network.with_faults(faults), config.target_layers);
            Arc::new(BlockDraftParts { network, layers })
        }
    }
}

struct Mock {
    url: String,
    is_over: Arc<AtomicBool>,
}

impl Mock {
    fn serve(engine: Engine) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let is_over = Arc::<AtomicBool>::default();
        let (over, engine) = (Arc::clone(&is_over), Arc::new(engine));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let engine = Arc::clone(&engine);
                std::thread::spawn(move || meet(stream.unwrap(), &engine));
            }
        });
        Self { url, is_over }
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://").trim_end_matches("/v1"));
    }
}

fn meet(stream: TcpStream, engine: &Engine) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Some((line, body)) = read_request(&mut reader) {
        let found = if line.starts_with("GET /v1/models") {
            Some(json!({ "data": [{ "id": "mock" }] }).to_string())
        } else if line.starts_with("GET /metrics") {
            engine.metrics()
        } else if line.starts_with("POST /v1/completions") {
            Some(engine.answer(&serde_json::from_slice(&body).unwrap()).to_string())
        } else {
            None
        };
        let status = if found.is_some() { "200 OK" } else { "404 Not Found" };
        let text = found.unwrap_or_default();
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", text.len());
        if writer.write_all((head + &text).as_bytes()).is_err() {
            return;
        }
    }
}

type Edit = fn(&Path);

/// A planted cause: its name, how the drafter's files differ from the trained ones, and what the server's
/// differ in from these.
type Plant = (&'static str, Edit, Edit);

fn no(_: &Path) {}

fn set(dir: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    edit_config(dir, |it| {
        it.remove("weights_hash");
        edit(it);
    });
}

/// Fills a tensor of 16-bit or 64-bit numbers with one value's bytes.
fn fill(dir: &Path, ending: &str, bytes: &[u8]) {
    set(dir, |_| {});
    edit_tensors(dir, |it| {
        let is_it = |name: &&String| *name == ending || name.ends_with(&format!(".{ending}"));
        let names: Vec<String> = it.header.keys().filter(is_it).cloned().collect();
        assert!(!names.is_empty(), "{ending}");
        for name in names {
            let at = |at: usize| it.header[&name]["data_offsets"][at].as_u64().unwrap() as usize;
            let (from, to) = (at(0), at(1));
            it.bytes[from..to]
                .chunks_exact_mut(bytes.len())
                .for_each(|it| it.copy_from_slice(bytes));
        }
    });
}

const ONE: [u8; 2] = [0x80, 0x3f];

fn rope(dir: &Path, theta: f64, scaling: Value) {
    set(dir, |it| {
        it.insert("rope_theta".into(), json!(theta));
        let mut parameters = json!({ "rope_type": "default", "rope_theta": theta });
        if let Value::Object(scaling) = &scaling {
            parameters = json!(scaling);
            parameters["rope_theta"] = json!(theta);
        }
        let own = if scaling.is_null() { Value::Null } else { parameters.clone() };
        it.insert("rope_parameters".into(), parameters);
        it.insert("rope_scaling".into(), own);
    });
}

fn linear() -> Value {
    json!({ "rope_type": "linear", "factor": 2.0 })
}

const OF_MODEL: [Plant; 8] = [
    ("rope-base", |dir| rope(dir, 100.0, Value::Null), no),
    ("rope-scaling", |dir| rope(dir, 10_000.0, linear()), no),
    ("no-input-norm", no, |dir| fill(dir, "input_layernorm.weight", &ONE)),
    ("no-mlp-norm", no, |dir| fill(dir, "post_attention_layernorm.weight", &ONE)),
    ("no-last-norm", no, |dir| fill(dir, "model.norm.weight", &ONE)),
    ("drawn-candidates", no, no),
    ("cache-4-bits", no, |dir| faults(dir, json!([4, 0, false]))),
    ("cache-8-bits", no, |dir| faults(dir, json!([8, 0, false]))),
];

/// Lets the server run sessions with faults, which no file of a drafter says: the bits of its cache, the
/// shift of positions, and whether it reads the token behind.
fn faults(dir: &Path, faults: Value) {
    std::fs::write(dir.join("faults.json"), faults.to_string()).unwrap();
}

/// Replaces the one norm of all target states by a norm for each state.
fn norm_each_state(dir: &Path) {
    set(dir, |it| {
        it.remove("norm_before_fc");
        it.insert("fc_norm".into(), json!(true));
    });
    edit_tensors(dir, |it| {
        let whole = it.header.remove("input_norm.weight").unwrap();
        let at = |at: usize| whole["data_offsets"][at].as_u64().unwrap();
        let size = (at(1) - at(0)) / 3;
        for nth in 0..3 {
            let from = at(0) + nth * size;
            let entry = json!({ "dtype": whole["dtype"], "shape": [size / 2],
                "data_offsets": [from, from + size] });
            it.header.insert(format!("fc_norm.{nth}.weight"), entry);
        }
    });
}

/// Leaves out the norms of the target's states.
fn norm_no_state(dir: &Path) {
    set(dir, |it| drop(it.remove("norm_before_fc")));
    edit_tensors(dir, |it| drop(it.header.remove("input_norm.weight")));
}

/// Gives a drafter embeddings of its own: the target's with an error in each number.
fn embed_by_itself(dir: &Path) {
    set(dir, |_| {});
    let mut reader = WeightReader::open_dir(&model("target")).unwrap();
    let shape = reader.shape("model.embed_tokens.weight").unwrap().to_vec();
    let values = reader.take("model.embed_tokens.weight", &shape).unwrap();
    let mut draws = SeededDraws::new(0, &["embeddings"]);
    let bytes = values.iter().flat_map(|value| {
        let wrong = value * (0.5 + draws.uniform() as f32);
        ((wrong.to_bits() >> 16) as u16).to_le_bytes()
    });
    let bytes: Vec<u8> = bytes.collect();
    edit_tensors(dir, |it| {
        let from = it.bytes.len();
        let entry =
            json!({ "dtype": "BF16", "shape": shape, "data_offsets": [from, from + bytes.len()] });
        it.bytes.extend(bytes);
        it.header.insert("embed_tokens.weight".to_owned(), entry);
    });
}

const OF_EAGLE3: [Plant; 25] = [
    ("window-ignored", no, |dir| {
        set(dir, |it| drop(["layer_types", "sliding_window"].map(|key| it.remove(key))))
    }),
    ("layers-below", no, |dir| layers(dir, [1, 3, 4])),
    ("state-norm", no, |dir| set(dir, |it| drop(it.remove("norm_output")))),
    ("no-norm-before-fc", no, norm_no_state),
    ("residual-norm", no, |dir| {
        set(dir, |it| drop(it.insert("norm_before_residual".into(), json!(true))))
    }),
    ("rope-base", |dir| rope(dir, 100.0, Value::Null), |dir| rope(dir, 10_000.0, Value::Null)),
    ("draft-ids", no, |dir| fill(dir, "d2t", &[0; 8])),
    ("layers-above", no, |dir| layers(dir, [3, 5, 6])),
    ("last-layer", no, |dir| layers(dir, [2, 4, 8])),
    ("window-shorter", no, |dir| window(dir, 7)),
    ("window-longer", no, |dir| window(dir, 9)),
    ("no-hidden-norm", no, |dir| fill(dir, "hidden_norm.weight", &ONE)),
    ("no-query-norm", no, |dir| fill(dir, "q_norm.weight", &ONE)),
    ("no-last-norm", no, |dir| fill(dir, "norm.weight", &ONE)),
    ("rope-scaling", |dir| rope(dir, 10_000.0, linear()), |dir| rope(dir, 10_000.0, Value::Null)),
    ("token-behind", no, |dir| faults(dir, json!([null, 0, true]))),
    ("positions-above", no, |dir| faults(dir, json!([null, 1, false]))),
    ("positions-below", no, |dir| faults(dir, json!([null, -1, false]))),
    ("cache-4-bits", no, |dir| faults(dir, json!([4, 0, false]))),
    ("no-key-norm", no, |dir| fill(dir, "k_norm.weight", &ONE)),
    ("no-mlp-norm", no, |dir| fill(dir, "post_attention_layernorm.weight", &ONE)),
    ("no-input-norm", no, |dir| fill(dir, "input_layernorm.weight", &ONE)),
    ("no-fc-norm", norm_each_state, norm_no_state),
    ("target-embeddings", embed_by_itself, no),
    ("states-behind", no, no),
];

fn layers(dir: &Path, layers: [usize; 3]) {
    set(dir, |it| drop(it.insert("eagle_aux_hidden_state_layer_ids".into(), json!(layers))));
}

/// Moves the layers that a block drafter reads.
fn block_layers(dir: &Path, by: i64) {
    set(dir, |it| {
        let ids = it["target_layer_ids"].as_array_mut().unwrap();
        ids.iter_mut().for_each(|id| *id = json!(id.as_i64().unwrap() + by));
    });
}

fn window(dir: &Path, size: usize) {
    set(dir, |it| drop(it.insert("sliding_window".into(), json!(size))));
}

const OF_BLOCK: [Plant; 15] = [
    (
        "window-ignored",
        |dir| {
            set(dir, |it| {
                it.insert("layer_types".into(), json!(["sliding_attention"]));
                it.insert("sliding_window".into(), json!(6));
                it.insert("use_sliding_window".into(), json!(true));
            })
        },
        no,
    ),
    ("mask-first", no, |dir| set(dir, |it| drop(it.insert("mask_token_id".into(), json!(0))))),
    ("anchor-layout", no, |dir| {
        set(dir, |it| {
            it.insert("sample_from_anchor".into(), json!(false));
        })
    }),
    ("no-markov-head", no, |dir| fill(dir, "markov_w2.weight", &[0; 2])),
    ("causality", no, |dir| set(dir, |it| drop(it.insert("is_causal".into(), json!(false))))),
    ("layers-reversed", no, |dir| {
        set(dir, |it| {
            let ids: Vec<Value> =
                it["target_layer_ids"].as_array().unwrap().iter().rev().cloned().collect();
            it.insert("target_layer_ids".into(), json!(ids));
        })
    }),
    (
        "fewer-rows",
        |dir| set(dir, |it| drop(it.insert("is_causal".into(), json!(false)))),
        |dir| set(dir, |it| drop(it.insert("block_size".into(), json!(3)))),
    ),
    ("positions-above", no, |dir| faults(dir, json!([null, 1, false]))),
    ("positions-below", no, |dir| faults(dir, json!([null, -1, false]))),
    ("mask-end", no, |dir| set(dir, |it| drop(it.insert("mask_token_id".into(), json!(1))))),
    ("layers-above", no, |dir| block_layers(dir, 1)),
    ("layers-below", no, |dir| block_layers(dir, -1)),
    ("no-hidden-norm", no, |dir| fill(dir, "hidden_norm.weight", &ONE)),
    ("no-last-norm", no, |dir| fill(dir, "norm.weight", &ONE)),
    ("cache-4-bits", no, |dir| faults(dir, json!([4, 0, false]))),
];

/// The number of trials of each kind of drafter.
fn num_trials() -> usize {
    std::env::var("EXPLAIN_TRIALS").ok().and_then(|num| num.parse().ok()).unwrap_or(1)
}

/// Trains a small EAGLE-3 and a block drafter of the embedded target, for longer if there are more trials.
fn train(place: &Place) {
    place.write_prompts("train.jsonl", if num_trials() > 1 { 800 } else { 140 });
    let text = format!(
        "seed = 3\n[models]\ntarget = '{}'\n[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 48\n\
         [training.optimizer]\nlearning_rate = 4e-3\nnum_epochs = 4\n\
         [drafters.eagle]\nkind = 'eagle3'\nnum_steps = 3\nwindow = 8\nnorm_before_fc = true\nnorm_output = true\n\
         head_norms = true\ndraft_vocabulary = 500\n\
         [drafters.block]\nkind = 'block'\nblock_size = 5\nnum_layers = 1\nmarkov_rank = 16\n",
        model("target").display()
    );
    let recipe = place.write("mine.toml", text).display().to_string();
    place.run(&["build-data", &recipe]).ok();
    place.run(&["train-drafter", &recipe]).ok();
}

/// Explains a mock server.
fn explain(place: &Place, drafter: &Path, url: &str, more: &[&str]) -> Ran {
    explain_for(place, &model("target"), drafter, url, more)
}

fn explain_for(place: &Place, target: &Path, drafter: &Path, url: &str, more: &[&str]) -> Ran {
    let (target, drafter) = (target.display().to_string(), drafter.display().to_string());
    let own =
        ["server", "explain", "--server", url, "--target", &target, "--prompts", "test.jsonl"];
    let sizes = ["--num-prompts", "12", "--max-new-tokens", "48", &drafter];
    place.run(&[&own[..], &sizes, more].concat())
}

/// Writes test prompts, from another one on in each trial.
fn write_prompts(place: &Place, trial: usize) {
    let path = crate::support::root().join("data/tiny/prompts/test.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let num = lines.len();
    lines.rotate_left(5 * trial % num);
    lines.truncate(60);
    place.write("test.jsonl", lines.join("\n") + "\n");
}

/// Names the planted causes of a kind of drafter. A cause whose counts rounding could give is not counted.
fn planted(kind: &'static str, trained: &Path, place: &Place, plants: &[Plant]) {
    let trials = num_trials();
    let (mut failed, mut num_first, mut num_same) = (Vec::new(), 0, 0);
    for (trial, (name, spoil, misread)) in plants.iter().cycle().take(trials).enumerate() {
        write_prompts(place, trial);
        let turn = trial / plants.len();
        let dir = |which: &str| place.path(&format!("{kind}-{trial}-{which}"));
        // The second target is the embedded draft model.
        let is_small = kind == "model" && turn % 2 == 1;
        let (target, trained) = match is_small {
            true => (model("draft"), model("draft-small")),
            false => (model("target"), trained.to_path_buf()),
        };
        let drafter = copy_dir(&trained, &dir("drafter"));
        spoil(&drafter);
        let served = copy_dir(&trained, &dir("served"));
        if *name == "fewer-rows" {
            spoil(&served);
        }
        misread(&served);
        let manner = match *name {
            "drawn-candidates" => Manner::Drawn,
            "states-behind" => Manner::Behind,
            _ => [Manner::Vllm, Manner::Llama, Manner::Sglang][turn % 3],
        };
        let num_candidates = if *name == "fewer-rows" { 3 } else { [3, 2, 4][trial % 3] };
        let server = Mock::serve(Engine::new(&target, (kind, &served), manner, num_candidates));
        let ran = explain_for(place, &target, &drafter, &server.url, &["--json"]);
        let found: Value = serde_json::from_str(&ran.stdout)
            .unwrap_or_else(|_| panic!("{name}: {}{}", ran.stdout, ran.stderr));
        let mut names = found["causes"].as_array().unwrap().iter().map(|cause| &cause["name"]);
        let first = names.next();
        println!("{kind} {name} {manner:?} {num_candidates} {first:?}: {}", found["sentence"]);
        match first {
            Some(first) if first == name => num_first += 1,
            Some(_) if names.any(|it| it == name) => num_same += 1,
            None if found["explanation"] == "as_trained" => num_same += 1,
            // Drawn candidates differ little from the most probable ones of a drafter that is sure.
            None if *name == "drawn-candidates"
                && found["sentence"].to_string().contains("closest would be that it draws") =>
            {
                num_same += 1;
            }
            _ => failed.push(format!("{name}, {manner:?}: {found}")),
        }
    }
    println!("{kind}: {num_first} first, {num_same} as others, {} wrong", failed.len());
    assert!(num_first > 0 && 20 * failed.len() <= num_first, "{}", failed.join("\n"));
}

#[test]
fn planted_causes_are_named() {
    let place = Place::new();
    train(&place);
    planted("model", &model("draft"), &place, &OF_MODEL);
    planted("eagle3", &place.path("checkpoints/mine/eagle"), &place, &OF_EAGLE3);
    planted("block", &place.path("checkpoints/mine/block"), &place, &OF_BLOCK);
    #[cfg(unix)]
    explained_by_states(&place, &place.path("checkpoints/mine/eagle"));
}

/// Explains a server by hidden states that another one gives. States of further layers are not known then.
#[cfg(unix)]
fn explained_by_states(place: &Place, drafter: &Path) {
    let states = crate::states::Mock::serve(place.path("states"));
    let recipe = format!(
        "[models]\ntarget = '{}'\n[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\ntemperature = 0\n\
         responses = 'server'\n[data.server]\nurls = ['{}']\nmodel = 'tiny'\nretries = 0\n\
         [data.server.states]\ndirs = ['{}']\n[drafters.it]\nkind = 'eagle3'\npath = '{}'\n",
        model("target").display(),
        states.url,
        states.dir.display(),
        drafter.display()
    );
    place.write("served.toml", recipe);
    let served = copy_dir(drafter, &place.path("misread"));
    (OF_EAGLE3[0].2)(&served);
    let server = Mock::serve(Engine::new(&model("target"), ("eagle3", &served), Manner::Vllm, 3));
    let drafter = drafter.display().to_string();
    let own = ["server", "explain", "--server", &server.url, "--states", "served.toml"];
    let more = ["--prompts", "test.jsonl", "--num-prompts", "12", "--json", &drafter];
    let ran = place.run(&[&own[..], &more].concat());
    let found: Value = serde_json::from_str(&ran.stdout)
        .unwrap_or_else(|_| panic!("{}{}", ran.stdout, ran.stderr));
    assert_eq!(found["causes"][0]["name"], "window-ignored", "{found}");
    assert!(found["notes"].to_string().contains("`layers-above`"), "{found}");
}

/// Moves each weight to a neighbour in bf16, as rounding may.
fn round_otherwise(dir: &Path, seed: u64) -> PathBuf {
    set(dir, |_| {});
    edit_tensors(dir, |it| {
        let mut draws = SeededDraws::new(seed, &["rounding"]);
        let entries: Vec<Value> =
            it.header.values().filter(|it| it["dtype"] == "BF16").cloned().collect();
        for entry in entries {
            let at = |at: usize| entry["data_offsets"][at].as_u64().unwrap() as usize;
            for pair in it.bytes[at(0)..at(1)].chunks_exact_mut(2) {
                pair[0] ^= (draws.uniform() * 2.0) as u8;
            }
        }
    });
    dir.to_path_buf()
}

#[test]
fn innocent_servers_are_not_accused() {
    let place = Place::new();
    let (draft, target) = (model("draft"), model("target"));
    let mut drafters = vec![("model", draft.clone())];
    if num_trials() > 1 {
        train(&place);
        drafters.push(("eagle3", place.path("checkpoints/mine/eagle")));
        drafters.push(("block", place.path("checkpoints/mine/block")));
    }
    let manners = [Manner::Vllm, Manner::Llama, Manner::Sglang, Manner::Changing];
    for (trial, (kind, drafter)) in drafters.iter().cycle().take(num_trials()).enumerate() {
        write_prompts(&place, trial);
        let dir = |which: &str| place.path(&format!("{trial}-{which}"));
        let rounded = round_otherwise(&copy_dir(drafter, &dir("rounded")), trial as u64);
        let other = round_otherwise(&copy_dir(&target, &dir("target")), 1000 + trial as u64);
        let exact = manners.map(|manner| (manner, &target, drafter));
        let in_bf16 = [Manner::Vllm, Manner::Llama].map(|manner| (manner, &other, &rounded));
        for (manner, target, served) in exact.into_iter().chain(in_bf16) {
            let num_candidates = [4, 3, 2][trial % 3];
            let server = Mock::serve(Engine::new(target, (kind, served), manner, num_candidates));
            let ran = explain(&place, drafter, &server.url, &["--json"]);
            let found: Value = serde_json::from_str(&ran.stdout)
                .unwrap_or_else(|_| panic!("{manner:?}: {}{}", ran.stdout, ran.stderr));
            println!("innocent {kind} {manner:?}: {} {}", found["sentence"], found["rounding"]);
            assert_eq!(found["explanation"], "as_trained", "{kind} {manner:?}: {found}");
            assert_eq!(ran.code, Some(0));
        }
    }
    let server = Mock::serve(Engine::new(&model("target"), ("model", &draft), Manner::Vllm, 3));
    let text = explain(&place, &draft, &server.url, &["--candidates", "5"]).ok();
    println!("{text}");
    assert!(text.starts_with("As trained: expected "), "{text}");
    for part in ["position", "as trained", "measured", "drafts 3 candidates per round, and not 5"] {
        assert!(text.replace('\n', " ").contains(part), "`{part}`: {text}");
    }
}

#[test]
fn servers_that_cannot_be_explained_are_refused_with_the_reason() {
    let place = Place::new();
    write_prompts(&place, 0);
    let draft = model("draft");
    let ran = |manner: Manner, more: &[&str]| {
        let server = Mock::serve(Engine::new(&model("target"), ("model", &draft), manner, 3));
        explain(&place, &draft, &server.url, more)
    };
    ran(Manner::Mute, &[]).fails_naming(&["no counters of speculation", "--disable-log-stats"]);
    ran(Manner::Idle, &[]).fails_naming(&["drafted nothing"]);
    ran(Manner::Other, &[]).fails_naming(&["another model", "--target"]);
    let faulty = ran(Manner::Faulty, &["--json"]);
    let found: Value = serde_json::from_str(&faulty.stdout).unwrap();
    assert_eq!((faulty.code, &found["explanation"]), (Some(1), &json!("other_answers")));
    assert!(found["sentence"].as_str().unwrap().contains("server certify"), "{found}");
}

//! Drafters trained on the hidden states of a served target: a mock of vLLM that computes with the
//! embedded target, faults that the proof must find, and a training beside one with local layers.

use std::fs::File;
use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, ModelConfig, WeightDtype, WeightReader, vectors};
use draftsmith_theory::{SeededDraws, argmax, log_softmax};
use half::bf16;
use serde_json::{Map, Value, json};

use crate::support::{Place, Ran, copy_dir, model, read_named_request};

/// The layers before the states that the drafter reads, and the number of all layers.
const LAYERS: [usize; 4] = [2, 4, 5, 8];
const WIDTH: usize = 192;
const NUM_PROMPTS: usize = 24;

/// The states of one request, before they are written: by layer, `[tokens, width]`.
type Layers = Vec<Vec<f32>>;
/// A token, its log-probability, and those of the most probable tokens.
type Listed = (u32, f64, Vec<(usize, f64)>);
/// Changes the states of a request, given the target and the tokens.
type ChangeStates = fn(&CausalLm, &[u32], &mut Layers);

/// What the mock does otherwise than vLLM.
#[derive(Clone, Copy, Default)]
struct Fault {
    /// Changes the states of a request.
    states: Option<ChangeStates>,
    /// Changes the answer.
    answer: Option<fn(&mut Value)>,
    /// Divides log-probabilities' logits.
    temperature: Option<f32>,
    in_bf16: bool,
    /// Whether only requests without `prompt_logprobs` are at fault, as those that read a cached prefix.
    without_log_probs: bool,
    /// Whether states after middle layers are those of the request before, as far as they reach.
    is_stale: bool,
    /// Whether the server never answers a request for states, and holds its lock.
    hangs: bool,
    /// The number of requests for states after which the server fails.
    fails_after: Option<usize>,
}

/// A stand-in for a vLLM server of the embedded target.
pub(crate) struct Mock {
    pub(crate) url: String,
    pub(crate) dir: PathBuf,
    fault: Arc<Mutex<Fault>>,
    num_states: Arc<AtomicUsize>,
}

struct Served {
    target: CausalLm,
    dir: PathBuf,
    fault: Arc<Mutex<Fault>>,
    num_states: Arc<AtomicUsize>,
    num_responses: AtomicUsize,
    /// The states of the last request.
    before: Mutex<Layers>,
    /// The connections of requests without an answer, and their locks.
    held: Mutex<Vec<(TcpStream, File)>>,
}

impl Mock {
    pub(crate) fn serve(dir: PathBuf) -> Self {
        Self::serve_model(dir, &model("target"))
    }

    fn serve_model(dir: PathBuf, target: &Path) -> Self {
        std::fs::create_dir_all(&dir).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let (fault, num_states) = (Arc::<Mutex<Fault>>::default(), Arc::<AtomicUsize>::default());
        let target = CausalLm::from_model_dir(target, &Device::flex()).unwrap();
        let served = Arc::new(Served {
            target,
            dir: dir.clone(),
            fault: fault.clone(),
            num_states: num_states.clone(),
            num_responses: AtomicUsize::new(0),
            before: Mutex::default(),
            held: Mutex::default(),
        });
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let served = served.clone();
                let met = move || stream.and_then(|stream| served.meet(stream));
                std::thread::spawn(move || met().inspect_err(|error| eprintln!("mock: {error}")));
            }
        });
        Self { url, dir, fault, num_states }
    }

    fn with(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    fn num_states(&self) -> usize {
        self.num_states.load(Ordering::SeqCst)
    }
}

impl Served {
    fn meet(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let Some((line, name, body)) = read_named_request(&mut BufReader::new(&stream)) else {
            return Ok(());
        };
        if line.starts_with("GET /v1/models") {
            let models = json!({ "data": [{ "id": "tiny" }] }).to_string();
            let num = models.len();
            return write!(
                stream,
                "HTTP/1.1 200 X\r\ncontent-length: {num}\r\nconnection: close\r\n\r\n{models}"
            );
        }
        let body: Value = serde_json::from_slice(&body)?;
        let ids: Vec<u32> = serde_json::from_value(body["prompt"].clone())?;
        if body["max_tokens"] == 1 && self.fault.lock().unwrap().hangs {
            let lock = lock_of(&self.path_of(&name))?;
            self.held.lock().unwrap().push((stream, lock));
            return Ok(());
        }
        let answer = match body["max_tokens"].as_u64() {
            Some(1) => self.states(&name, &ids, body["prompt_logprobs"].is_number())?,
            most => Some(self.respond(&name, &ids, most.unwrap_or(0) as usize, &body)?),
        };
        let (status, answer) = match answer {
            Some(answer) => (200, answer.to_string()),
            None => (500, "{}".to_owned()),
        };
        write!(
            stream,
            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
            answer.len()
        )
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.dir.join(format!("cmpl-{name}-0-0a1b2c3d.safetensors"))
    }

    /// The states after some layers, and the logits of all positions.
    fn run(&self, ids: &[u32]) -> (Layers, Vec<f32>) {
        let layers =
            LAYERS.map(|layer| vectors::values(self.target.exit_states(ids_tensor(ids), layer)));
        (layers.to_vec(), self.logits(ids))
    }

    fn logits(&self, ids: &[u32]) -> Vec<f32> {
        vectors::values(self.target.lm_head(self.target.hidden_states(ids_tensor(ids))))
    }

    /// Answers with a response. As vLLM does for every request, it stores the prompt's states too.
    fn respond(
        &self,
        name: &str,
        prompt: &[u32],
        most: usize,
        body: &Value,
    ) -> std::io::Result<Value> {
        let (num_before, mut ids) = (prompt.len(), prompt.to_vec());
        let mut draws = SeededDraws::new(body["seed"].as_u64().unwrap_or(0), &["mock"]);
        let is_greedy = body["temperature"] == 0.0;
        let num_listed = body["logprobs"].as_u64().unwrap_or(0) as usize;
        let mut lists = Vec::new();
        while ids.len() - num_before < most && ids.last() != Some(&1) {
            let logits = self.logits(&ids);
            let logits = &logits[logits.len() - self.target.shape().vocab_size..];
            let log_probs = log_softmax(logits);
            let mut left = draws.uniform();
            let drawn = log_probs.iter().position(|log_prob| {
                left -= log_prob.exp();
                left < 0.0
            });
            let id = if is_greedy { argmax(logits) } else { drawn.map_or(0, |id| id as u32) };
            lists.push((id, log_probs[id as usize], most_probable(&log_probs, num_listed)));
            ids.push(id);
        }
        let is_ended = ids.last() == Some(&1);
        let finish = if is_ended { "stop" } else { "length" };
        self.num_responses.fetch_add(1, Ordering::SeqCst);
        let path = self.path_of(name);
        let lock = lock_of(&path)?;
        write_later((path.clone(), lock), prompt.to_vec(), self.run(prompt).0, false);
        Ok(json!({
            "kv_transfer_params": { "hidden_states_path": path },
            "choices": [{
                "index": 0, "token_ids": ids[num_before..], "finish_reason": finish,
                "logprobs": body["logprobs"].is_number().then(|| log_prob_lists(&lists)),
            }],
        }))
    }

    fn states(&self, name: &str, ids: &[u32], is_proof: bool) -> std::io::Result<Option<Value>> {
        let fault = *self.fault.lock().unwrap();
        let number = self.num_states.fetch_add(1, Ordering::SeqCst);
        if fault.fails_after.is_some_and(|most| number >= most) {
            return Ok(None);
        }
        let path = self.path_of(name);
        let lock = lock_of(&path)?;
        let (mut layers, mut logits) = self.run(ids);
        let before = std::mem::replace(&mut *self.before.lock().unwrap(), layers.clone());
        if fault.is_stale {
            for (own, before) in layers[..3].iter_mut().zip(&before) {
                let num = own.len().min(before.len());
                own[..num].copy_from_slice(&before[..num]);
            }
        }
        if let Some(change) = fault.states.filter(|_| !(fault.without_log_probs && is_proof)) {
            change(&self.target, ids, &mut layers);
        }
        if let Some(temperature) = fault.temperature {
            logits.iter_mut().for_each(|x| *x /= temperature);
        }
        let rows: Vec<&[f32]> = logits.chunks_exact(self.target.shape().vocab_size).collect();
        let top = |row: &[f32]| most_probable(&log_softmax(row), 20);
        let last = top(rows[rows.len() - 1]);
        let id = last[0].0 as u32;
        let mut choice = json!({
            "index": 0, "finish_reason": "length", "token_ids": [id], "prompt_token_ids": ids,
            "logprobs": log_prob_lists(&[(id, last[0].1, last)]),
        });
        if is_proof {
            let of = |row: &&[f32]| {
                let all = top(row).into_iter();
                let all = all.map(|(id, log)| (id.to_string(), json!({ "logprob": log })));
                Value::Object(all.collect())
            };
            let before = rows[..rows.len() - 1].iter().map(of);
            choice["prompt_logprobs"] = [Value::Null].into_iter().chain(before).collect();
        }
        let mut answer = json!({
            "system_fingerprint": "vllm-0.33.0-0a1b",
            "kv_transfer_params": { "hidden_states_path": path },
            "choices": [choice],
        });
        if let Some(change) = fault.answer {
            change(&mut answer);
        }
        write_later((path, lock), ids.to_vec(), layers, fault.in_bf16);
        Ok(Some(answer))
    }
}

/// The most probable tokens, with their log-probabilities.
fn most_probable(log_probs: &[f64], num: usize) -> Vec<(usize, f64)> {
    let mut ids: Vec<usize> = (0..log_probs.len()).collect();
    ids.sort_by(|a, b| log_probs[*b].total_cmp(&log_probs[*a]));
    ids.into_iter().take(num).map(|id| (id, log_probs[id])).collect()
}

/// The log-probabilities of tokens in an answer: of each token, and of the most probable ones.
fn log_prob_lists(tokens: &[Listed]) -> Value {
    let name = |id: &dyn std::fmt::Display| format!("token_id:{id}");
    let top = |(_, _, all): &Listed| {
        Value::Object(all.iter().map(|(id, log)| (name(id), json!(log))).collect())
    };
    json!({
        "tokens": tokens.iter().map(|(id, ..)| name(id)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|(_, log, _)| log).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
    })
}

/// Locks a file that is still to be written.
fn lock_of(path: &Path) -> std::io::Result<File> {
    let lock = File::create(format!("{}.lock", path.display()))?;
    lock.lock()?;
    Ok(lock)
}

/// Writes a file after the answer, as vLLM does, and then releases its lock.
fn write_later((path, lock): (PathBuf, File), ids: Vec<u32>, layers: Layers, in_bf16: bool) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        write(&path, &ids, &layers, in_bf16).unwrap();
        drop(lock);
    });
}

fn ids_tensor(ids: &[u32]) -> Tensor<2, Int> {
    let values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    Tensor::from_data(TensorData::new(values, [1, ids.len()]), &Device::flex())
}

fn write(path: &Path, ids: &[u32], layers: &Layers, in_bf16: bool) -> std::io::Result<()> {
    let mut data: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let num_ids = data.len();
    for position in 0..ids.len() {
        for value in layers.iter().flat_map(|own| &own[position * WIDTH..(position + 1) * WIDTH]) {
            match in_bf16 {
                true => data.extend(bf16::from_f32(*value).to_le_bytes()),
                false => data.extend(value.to_le_bytes()),
            }
        }
    }
    let header = json!({
        "token_ids": { "dtype": "I64", "shape": [ids.len()], "data_offsets": [0, num_ids] },
        "hidden_states": {
            "dtype": if in_bf16 { "BF16" } else { "F32" },
            "shape": [ids.len(), layers.len(), WIDTH], "data_offsets": [num_ids, data.len()],
        },
    });
    let header = header.to_string();
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.write_all(&data)
}

/// Returns the header of a safetensors file, and the offset in bytes at which the tensors begin.
fn header_of(bytes: &[u8]) -> (Map<String, Value>, usize) {
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..start]).unwrap(), start)
}

/// Changes the matrices of a checkpoint's layers, in groups of 64 weights.
fn change_layers(dir: &Path, change: fn(&mut [f32])) {
    let file = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let (header, start) = header_of(&bytes);
    let layers = header.iter().filter(|(name, _)| name.contains(".layers."));
    for (name, tensor) in
        layers.filter(|(_, tensor)| tensor["shape"].as_array().unwrap().len() == 2)
    {
        assert_eq!(tensor["dtype"], "BF16", "{name}");
        let [from, to]: [usize; 2] =
            serde_json::from_value(tensor["data_offsets"].clone()).unwrap();
        for group in bytes[start + from..start + to].chunks_mut(128) {
            let weights =
                group.chunks_exact(2).map(|it| bf16::from_le_bytes([it[0], it[1]]).to_f32());
            let mut weights: Vec<f32> = weights.collect();
            change(&mut weights);
            for (place, weight) in group.chunks_exact_mut(2).zip(weights) {
                place.copy_from_slice(&bf16::from_f32(weight).to_le_bytes());
            }
        }
    }
    std::fs::write(&file, bytes).unwrap();
}

/// Rounds weights to integers of at most `most`, with one scale.
fn round_to(most: f32, weights: &mut [f32]) {
    let scale = weights.iter().fold(0.0_f32, |largest, x| largest.max(x.abs())) / most;
    weights.iter_mut().for_each(|x| *x = (*x / scale).round() * scale);
}

/// Adds noise to weights: a share of their size.
fn tune_by(share: f32, weights: &mut [f32]) {
    let seed =
        weights.iter().fold(0, |seed: u64, x| seed.wrapping_mul(31) + u64::from(x.to_bits()));
    let mut draws = SeededDraws::new(seed, &["tuned"]);
    let size = weights.iter().map(|x| x * x).sum::<f32>() / weights.len() as f32;
    let spread = share * (12.0 * size).sqrt();
    weights.iter_mut().for_each(|x| *x += spread * (draws.uniform() as f32 - 0.5));
}

/// Makes a random model of another family, with the sizes of the embedded target.
fn random_model(place: &Place, keys: &Value) -> PathBuf {
    let dir = place.copy_model("target", keys["model_type"].as_str().unwrap());
    let config = dir.join("config.json");
    let mut own: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    own.insert("tie_word_embeddings".to_owned(), json!(false));
    own.extend(keys.as_object().unwrap().clone());
    std::fs::write(&config, Value::Object(own).to_string()).unwrap();
    Device::flex().seed(5);
    let random = ModelConfig::from_model_dir(&dir).unwrap().init(&Device::flex());
    random.write_model_dir(&dir, WeightDtype::Bf16).unwrap();
    dir
}

/// Writes the ends of the embedded target as a quantised mixture of experts that no code here can run
/// would have them: under other names, beside a quantised layer, with the keys of the language model in
/// a table of their own.
fn write_ends(place: &Place, to: &str) -> PathBuf {
    write_ends_of(&model("target"), &place.path(to))
}

fn write_ends_of(target: &Path, to: &Path) -> PathBuf {
    let dir = copy_dir(target, to);
    let file = dir.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let (header, start) = header_of(&bytes);
    let (mut ends, mut data) = (Map::new(), Vec::new());
    let mut keep = |name: String, dtype: &Value, shape: &Value, own: &[u8]| {
        let offsets = [data.len(), data.len() + own.len()];
        data.extend_from_slice(own);
        ends.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
    };
    for (name, tensor) in header.iter().filter(|(name, _)| !name.contains(".layers.")) {
        let Some([from, to]) =
            serde_json::from_value(tensor["data_offsets"].clone()).unwrap_or(None::<[usize; 2]>)
        else {
            continue;
        };
        let own = &bytes[start + from..start + to];
        keep(
            name.replace("model.", "model.language_model."),
            &tensor["dtype"],
            &tensor["shape"],
            own,
        );
    }
    let expert = "model.language_model.layers.0.mlp.experts.0.up_proj.weight";
    keep(expert.to_owned(), &json!("U8"), &json!([4]), &[1, 2, 3, 4]);
    keep("model.visual.norm.weight".to_owned(), &json!("F32"), &json!([1]), &[0; 4]);
    let header = Value::Object(ends).to_string();
    let whole = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(&file, whole).unwrap();
    let config = dir.join("config.json");
    let mut text: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    // How the layers compute does not matter here.
    for (key, value) in [
        ("model_type", json!("acme_moe_text")),
        ("hidden_act", json!("xielu")),
        ("rope_parameters", json!({ "rope_type": "acme" })),
        ("use_bidirectional_attention", json!("vision")),
        ("attention_bias", json!([true, false])),
        ("head_dim", Value::Null),
    ] {
        text.insert(key.to_owned(), value);
    }
    let keys = json!({
        "model_type": "acme_moe", "text_config": text, "vision_config": {},
        "quantization_config": { "quant_method": "fp8" },
    });
    std::fs::write(&config, keys.to_string()).unwrap();
    dir
}

#[test]
fn a_target_that_cannot_run_here_is_answered_with_the_recipe_of_its_server() {
    let place = Place::new();
    place.write_prompts("prompts.jsonl", 4);
    let dir = write_ends(&place, "moe").display().to_string();
    let fp8 = place.copy_model("target", "fp8");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(fp8.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = json!({ "quant_method": "fp8" });
    std::fs::write(fp8.join("config.json"), config.to_string()).unwrap();
    for (dir, problem) in
        [(dir, "`acme_moe`"), (fp8.display().to_string(), "quantised weights cannot be read")]
    {
        let survey = place.run(&["survey", "--target", &dir, "--prompts", "prompts.jsonl"]);
        let lines = survey.stderr.split('`').filter(|part| part.contains(" = "));
        place.write("served.toml", lines.collect::<Vec<_>>().join("\n"));
        survey.fails_naming(&[
            problem,
            "hint: ",
            "--tensor-parallel-size N",
            "server states RECIPE",
        ]);
        // The lines in the message are a whole recipe.
        let shown = place.run(&["server", "states", "served.toml"]).ok();
        for part in
            [&format!("vllm serve {dir} "), "extract_hidden_states", "--tensor-parallel-size N"]
        {
            assert!(shown.contains(part), "{part} is not in {shown}");
        }
    }
}

/// Stores the weights of a checkpoint's final norm minus 1, as families do whose norms multiply by 1 + weight.
fn store_minus_one(dir: &Path) {
    let file = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let (header, start) = header_of(&bytes);
    let norm = &header["model.language_model.norm.weight"];
    assert_eq!(norm["dtype"], "BF16");
    let [from, to]: [usize; 2] = serde_json::from_value(norm["data_offsets"].clone()).unwrap();
    for weight in bytes[start + from..start + to].chunks_exact_mut(2) {
        let value = bf16::from_le_bytes([weight[0], weight[1]]).to_f32() - 1.0;
        weight.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
    std::fs::write(&file, bytes).unwrap();
}

/// A place with data from the mock, and a recipe of an EAGLE-3 drafter. The target's directory has
/// only its ends.
fn place() -> (Place, Mock) {
    let place = Place::new();
    for (name, num) in [("train.jsonl", NUM_PROMPTS), ("tune.jsonl", 4), ("test.jsonl", 4)] {
        place.write_prompts(name, num);
    }
    let mock = Mock::serve(place.path("states"));
    place.write(
        "served.toml",
        format!(
            "[models]\ntarget = '{}'\n{JUDGED}[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             temperature = 0\nresponses = 'server'\n[data.server]\nurls = ['{}']\nmodel = 'tiny'\n\
             concurrency = 3\nretries = 0\n[data.server.states]\ndirs = ['{}']\nproof = 6\n{}features = 'server'\n",
            model("target").display(),
            mock.url,
            mock.dir.display(),
            drafter()
        ),
    );
    place.run(&["build-data", "served.toml"]).ok();
    assert_eq!(place.names("states"), [""; 0], "the states beside responses are deleted");
    (place, mock)
}

/// The prompts on which rules are chosen and tested, with the costs that a served target needs.
const JUDGED: &str = "[tune]\nprompts = ['tune.jsonl']\nmax_candidate_length = 4\n\
    [tune.costs]\ntarget_ms = 10.0\ndraft_ms = { e3 = 1.0 }\n\
    [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 12\ndecodings = ['greedy']\n";

fn drafter() -> &'static str {
    "[drafters.e3]\nkind = 'eagle3'\ninitial = 'random'\n\
     optimizer = { num_epochs = 2, learning_rate = 1e-3, validation_fraction = 0.3 }\n"
}

fn examine(place: &Place) -> Ran {
    place.run(&["server", "states", "served.toml", "--json"])
}

#[test]
fn the_proof_finds_every_fault_and_no_innocent() {
    let (place, mock) = place();
    let found = examine(&place).json();
    assert_eq!(found["layers"], json!(LAYERS));
    let command = found["command"].as_str().unwrap();
    assert!(command.contains("\"eagle_aux_hidden_state_layer_ids\":[2,4,5,8]"), "{command}");
    assert!(found["examined"]["mean_error"].as_f64().unwrap() < 1e-4, "{found}");
    assert_eq!(found["examined"]["not_proved"], "a fine-tune within rounding");
    assert_eq!(found["examined"]["num_rows"], NUM_PROMPTS);
    mock.with(Fault { in_bf16: true, ..Fault::default() });
    examine(&place).ok();
    mock.with(Fault { answer: Some(|it| it["extra"] = json!({})), ..Fault::default() });
    examine(&place).ok();
    // Rows of the same text have the same states.
    let prompts = std::fs::read_to_string(place.path("train.jsonl")).unwrap();
    place.write("twice.jsonl", prompts.repeat(2));
    let twice = ["name=twice", "data.prompts=['twice.jsonl']", "data.keep_duplicates=true"];
    let twice = twice.map(|set| ["--set", set]).concat();
    mock.with(Fault::default());
    place.run(&[&["build-data", "served.toml"][..], &twice].concat()).ok();
    let found = place.run(&[&["server", "states", "served.toml", "--json"][..], &twice].concat());
    assert_eq!(found.json()["examined"]["num_rows"], 2 * NUM_PROMPTS);
    let only_ends = format!("models.target={}", write_ends(&place, "ends").display());
    mock.with(Fault::default());
    let ends =
        place.run(&["server", "states", "served.toml", "--set", "name=ends", "--set", &only_ends]);
    assert!(ends.ok().contains("vllm serve"));
    // The family is not known, so the proof finds which function its norm is.
    let minus_one = write_ends(&place, "minus-one");
    store_minus_one(&minus_one);
    let minus_one = format!("models.target={}", minus_one.display());
    let set = ["--set", "name=minus-one", "--set", &minus_one];
    place.run(&[&["build-data", "served.toml"][..], &set].concat()).ok();
    let found = place.run(&[&["server", "states", "served.toml", "--json"][..], &set].concat());
    assert!(found.json()["examined"]["mean_error"].as_f64().unwrap() < 1e-3);
    // A set of shards, of which only the one with the ends is here.
    let shards = write_ends(&place, "shards");
    let whole = shards.join("model.safetensors");
    let reader = WeightReader::open_file(&whole).unwrap();
    let shard_of = |name: &str| match name.contains(".layers.") {
        true => (name.to_owned(), json!("model-00001-of-00002.safetensors")),
        false => (name.to_owned(), json!("model-00002-of-00002.safetensors")),
    };
    let index = json!({ "weight_map": reader.names().map(shard_of).collect::<Map<_, _>>() });
    std::fs::write(shards.join("model.safetensors.index.json"), index.to_string()).unwrap();
    std::fs::rename(whole, shards.join("model-00002-of-00002.safetensors")).unwrap();
    let shards = format!("models.target={}", shards.display());
    let set = ["--set", "name=shards", "--set", &shards];
    place.run(&[&["build-data", "served.toml"][..], &set].concat()).ok();
    let found = place.run(&[&["server", "states", "served.toml", "--json"][..], &set].concat());
    assert_eq!(found.json()["examined"]["num_rows"], NUM_PROMPTS);

    let faults: [(ChangeStates, &str); 11] = [
        (
            |target, ids, all| all[3] = vectors::values(target.hidden_states(ids_tensor(ids))),
            "they are normed already",
        ),
        (
            |target, ids, all| all[3] = vectors::values(target.exit_states(ids_tensor(ids), 7)),
            "another layer",
        ),
        (
            |target, ids, all| all[0] = vectors::values(target.exit_states(ids_tensor(ids), 3)),
            "of the local layers",
        ),
        (
            |target, ids, all| all[0] = vectors::values(target.exit_states(ids_tensor(ids), 1)),
            "of the local layers",
        ),
        (
            |_, _, all| all.iter_mut().for_each(|own| own.rotate_right(WIDTH)),
            "shifted by one token",
        ),
        (|_, _, all| all.iter_mut().for_each(|own| own.rotate_left(WIDTH)), "shifted by one token"),
        (
            |_, _, all| all.iter_mut().for_each(|own| own[..16 * WIDTH].fill(0.0)),
            "are all zero at token 0",
        ),
        (|_, _, all| all[1].fill(0.0), "after layer 4 are all zero"),
        (|_, _, all| all[2][WIDTH + 3] = f32::NAN, "after layer 5 are not finite at token 1"),
        (|_, _, all| all[1] = all[2].clone(), "after layers 4 and 5 are equal"),
        (
            // The first rows come from another prompt.
            |target, ids, all| {
                let mut other = ids.to_vec();
                other[0] = 40;
                for (own, layer) in all.iter_mut().zip(LAYERS) {
                    let theirs = vectors::values(target.exit_states(ids_tensor(&other), layer));
                    own[..16 * WIDTH].copy_from_slice(&theirs[..16 * WIDTH]);
                }
            },
            "mean error",
        ),
    ];
    for (states, expected) in faults {
        mock.with(Fault { states: Some(states), ..Fault::default() });
        examine(&place).fails_naming(&[expected, "row `", "hint: "]);
    }
    // 0.1 nats, as in a state that is slightly wrong.
    let noise: ChangeStates = |_, _, all| {
        for (at, value) in all[3].iter_mut().enumerate() {
            *value *= if at * 7919 % 13 < 6 { 1.04 } else { 0.96 };
        }
    };
    mock.with(Fault { states: Some(noise), ..Fault::default() });
    examine(&place).fails_naming(&["mean error"]);
    mock.with(Fault { temperature: Some(1.5), ..Fault::default() });
    examine(&place).fails_naming(&["mean error"]);
    let same: ChangeStates = |target, ids, all| {
        let ids = vec![ids[0]; ids.len()];
        for (own, layer) in all.iter_mut().zip(LAYERS) {
            *own = vectors::values(target.exit_states(ids_tensor(&ids), layer));
        }
    };
    mock.with(Fault { states: Some(same), ..Fault::default() });
    examine(&place).fails_naming(&["mean error"]);
    let with_bos: fn(&mut Value) =
        |it| it["choices"][0]["prompt_token_ids"].as_array_mut().unwrap().insert(0, json!(0));
    mock.with(Fault { answer: Some(with_bos), ..Fault::default() });
    examine(&place).fails_naming(&["other prompt tokens"]);
}

/// Faults of states after middle layers, and whether a proof without local layers must find them.
const MIDDLE_FAULTS: [(&str, ChangeStates, bool); 15] = [
    ("another layer", |target, ids, all| all[1] = states_after(target, ids, 3), false),
    (
        "two other layers",
        |target, ids, all| {
            (all[1], all[2]) = (states_after(target, ids, 6), states_after(target, ids, 7))
        },
        false,
    ),
    ("exchanged layers", |_, _, all| all.swap(1, 2), false),
    ("normed", |target, _, all| all[1] = normed(target, &all[1]), false),
    ("doubled", |_, _, all| all[1].iter_mut().for_each(|x| *x *= 2.0), false),
    ("shifted", |_, _, all| all[1].rotate_right(WIDTH), true),
    (
        "all but the last shifted",
        |_, _, all| all[..3].iter_mut().for_each(|own| own.rotate_right(WIDTH)),
        true,
    ),
    (
        "shuffled",
        |_, _, all| {
            let states: Vec<Vec<f32>> = all[2].chunks(WIDTH).map(<[f32]>::to_vec).collect();
            let order = (0..states.len()).map(|nth| (nth * 7 + 3) % states.len());
            all[2] = order.flat_map(|nth| states[nth].clone()).collect();
        },
        true,
    ),
    ("another prompt's", |target, _, all| all[1] = other_prompts(target, &all[1], 4), true),
    (
        "noise",
        |_, _, all| {
            let mut draws = SeededDraws::new(all[1].len() as u64, &["noise"]);
            all[1].iter_mut().for_each(|x| *x = draws.uniform() as f32 - 0.5);
        },
        true,
    ),
    (
        "constant",
        |_, _, all| {
            let one = all[1][..WIDTH].to_vec();
            all[1].chunks_mut(WIDTH).enumerate().for_each(|(nth, state)| {
                let scale = 1.0 + 1e-3 * nth as f32;
                state.iter_mut().zip(&one).for_each(|(x, one)| *x = scale * one);
            });
        },
        true,
    ),
    ("tiny", |_, _, all| all[1].iter_mut().for_each(|x| *x *= 1e-38), true),
    ("large", |_, _, all| all[1].iter_mut().for_each(|x| *x *= 1e6), true),
    ("huge", |_, _, all| all[1].iter_mut().for_each(|x| *x *= 1e30), true),
    (
        "tiny at the last token",
        |_, _, all| {
            let from = all[1].len() - WIDTH;
            all[1][from..].iter_mut().for_each(|x| *x *= 1e-30);
        },
        true,
    ),
];

fn states_after(target: &CausalLm, ids: &[u32], layer: usize) -> Vec<f32> {
    vectors::values(target.exit_states(ids_tensor(ids), layer))
}

fn normed(target: &CausalLm, states: &[f32]) -> Vec<f32> {
    let shape = [1, states.len() / WIDTH, WIDTH];
    vectors::values(target.final_norm(vectors::tensor(states.to_vec(), shape, &Device::flex())))
}

/// Replaces the first 16 states by those of another prompt after `layer`.
fn other_prompts(target: &CausalLm, states: &[f32], layer: usize) -> Vec<f32> {
    let num = (states.len() / WIDTH).min(16);
    let other: Vec<u32> = (0..num as u32).map(|nth| 300 + 37 * nth).collect();
    let mut states = states.to_vec();
    states[..num * WIDTH].copy_from_slice(&states_after(target, &other, layer));
    states
}

#[test]
fn states_after_middle_layers_are_proved_or_called_unproved() {
    const UNPROVED: &str = "not proved: which middle layers these are";
    let (place, mock) = place();
    let only_ends = format!("models.target={}", write_ends(&place, "ends").display());
    let set = ["--set", "name=ends", "--set", &only_ends];
    place.run(&[&["build-data", "served.toml"][..], &set].concat()).ok();
    let ends = || place.run(&[&["server", "states", "served.toml"][..], &set].concat());
    let stale = Fault { is_stale: true, ..Fault::default() };
    let faults = MIDDLE_FAULTS.map(|(name, states, is_found)| {
        (name, Fault { states: Some(states), ..Fault::default() }, is_found)
    });
    for (name, fault, is_found) in faults.into_iter().chain([("stale", stale, true)]) {
        for in_bf16 in [false, true] {
            mock.with(Fault { in_bf16, ..fault });
            let found = examine(&place);
            assert!(found.stderr.contains("row `"), "{name}, bf16: {in_bf16}: {}", found.stderr);
            found.fails_naming(&["hint: "]);
            let found = ends();
            match is_found {
                true => assert!(found.stderr.contains("row `"), "{name}: {}", found.stderr),
                false => assert!(found.stderr.contains(UNPROVED), "{name}: {}", found.stderr),
            }
        }
    }
    // Right states are proved as far as they can be.
    mock.with(Fault::default());
    let found = examine(&place);
    assert!(found.stderr.contains("after layers [2, 4, 5, 8]: those of the local"));
    assert!(found.stderr.contains("not proved: a fine-tune within rounding"), "{}", found.stderr);
    let found = ends();
    assert!(found.stderr.contains("tokens are near their next states"), "{}", found.stderr);
    assert!(found.stderr.contains(UNPROVED), "{}", found.stderr);
    // A training stops, too.
    let shifted = faults_named("all but the last shifted");
    mock.with(Fault { states: Some(shifted), ..Fault::default() });
    place
        .run(&[&["train-drafter", "served.toml"][..], &set].concat())
        .fails_naming(&["do not belong to the same tokens"]);
}

fn faults_named(name: &str) -> ChangeStates {
    MIDDLE_FAULTS.into_iter().find(|(own, ..)| *own == name).expect("it is there").1
}

#[test]
fn rounded_and_fine_tuned_targets_of_three_families_are_proved() {
    type Change = fn(&mut [f32]);
    const VARIANTS: [(&str, Change); 6] = [
        ("as it is", |_| {}),
        ("int8", |weights| round_to(127.0, weights)),
        // Three bits of mantissa.
        ("fp8", |weights| {
            for x in weights.iter_mut().filter(|x| **x != 0.0) {
                let unit = (x.abs().log2().floor() - 3.0).exp2();
                *x = (*x / unit).round() * unit;
            }
        }),
        ("4 bits", |weights| round_to(7.0, weights)),
        ("tuned by 1 %", |weights| tune_by(0.01, weights)),
        ("tuned by 5 %", |weights| tune_by(0.05, weights)),
    ];
    let (place, _mock) = place();
    let families = [
        model("target"),
        random_model(&place, &json!({ "model_type": "qwen3" })),
        random_model(&place, &json!({ "model_type": "gemma3_text", "query_pre_attn_scalar": 32 })),
    ];
    let mut num_proved = 0;
    for (family, target) in families.iter().enumerate() {
        let ends = write_ends_of(target, &place.path(&format!("ends-{family}")));
        for (nth, (variant, change)) in VARIANTS.into_iter().enumerate() {
            let name = format!("{family}-{nth}");
            let served = copy_dir(target, &place.path(&format!("served-{name}")));
            change_layers(&served, change);
            let mock = Mock::serve_model(place.path(&format!("states-{name}")), &served);
            for (local, in_bf16) in [(target, false), (target, true), (&ends, true)] {
                mock.with(Fault { in_bf16, ..Fault::default() });
                let set = [
                    format!("name={family}-{}", local == &ends),
                    format!("models.target={}", local.display()),
                    format!("data.server.urls=['{}']", mock.url),
                    format!("data.server.states.dirs=['{}']", mock.dir.display()),
                ];
                let set: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
                // The same answers serve all variants.
                if nth == 0 {
                    place.run(&[&["build-data", "served.toml"][..], &set].concat()).ok();
                }
                let found = place.run(&[&["server", "states", "served.toml"][..], &set].concat());
                assert!(
                    found.stderr.contains("proved at"),
                    "{variant} of {target:?}: {}",
                    found.stderr
                );
                num_proved += 1;
            }
        }
    }
    assert_eq!(num_proved, 54);
}

#[test]
fn the_proof_looks_at_each_position_and_at_requests_of_both_forms() {
    let (place, mock) = place();
    // One wrong state of the last layer in every row.
    let middle: ChangeStates = |_, _, all| {
        let at = all[3].len() / WIDTH / 2 * WIDTH;
        let other = all[3][..WIDTH].to_vec();
        all[3][at..at + WIDTH].copy_from_slice(&other);
    };
    let last: ChangeStates = |_, _, all| {
        let at = all[3].len() - WIDTH;
        let other = all[3][..WIDTH].to_vec();
        all[3][at..].copy_from_slice(&other);
    };
    for in_bf16 in [false, true] {
        for wrong in [middle, last] {
            mock.with(Fault { states: Some(wrong), in_bf16, ..Fault::default() });
            examine(&place).fails_naming(&["hint: "]);
        }
    }
    // Only requests without `prompt_logprobs` read a cached prefix.
    let cached: ChangeStates = |target, _, all| {
        for (own, layer) in all[..3].iter_mut().zip(LAYERS) {
            *own = other_prompts(target, own, layer);
        }
    };
    mock.with(Fault { states: Some(cached), without_log_probs: true, ..Fault::default() });
    examine(&place).fails_naming(&["from those of the same request", "prefix caching"]);
    // A server that lists no log-probabilities at some or all positions.
    let some: fn(&mut Value) = |it| {
        let lists = it["choices"][0]["prompt_logprobs"].as_array_mut();
        lists.into_iter().flatten().skip(1).step_by(2).for_each(|list| *list = json!({}));
    };
    mock.with(Fault { answer: Some(some), ..Fault::default() });
    let found = examine(&place);
    assert!(found.stderr.contains("lists no `prompt_logprobs` at"), "{}", found.stderr);
    found.ok();
    let none: fn(&mut Value) = |it| {
        let lists = it["choices"][0]["prompt_logprobs"].as_array_mut();
        lists.into_iter().flatten().skip(1).for_each(|list| *list = json!({}));
    };
    mock.with(Fault { answer: Some(none), ..Fault::default() });
    examine(&place).fails_naming(&["lists `prompt_logprobs` at no position"]);
    // States that the training could not store.
    let large: ChangeStates =
        |_, _, all| all[..3].iter_mut().flatten().for_each(|x| *x = x.clamp(-1.0, 1.0) * 7e4);
    mock.with(Fault { states: Some(large), ..Fault::default() });
    examine(&place).fails_naming(&["too large", "features_format = \"bf16\""]);
}

#[test]
fn files_of_requests_without_an_answer_are_removed() {
    let (place, mock) = place();
    // The file is there when the answer is not what it should be.
    let other: fn(&mut Value) = |it| it["choices"][0]["token_ids"] = json!([]);
    mock.with(Fault { answer: Some(other), ..Fault::default() });
    examine(&place).fails_naming(&["0 token ids, expected one"]);
    // The mock writes the last files after its answer, so that some may still be locked.
    let told = |names: &[String]| names.iter().all(|name| name.starts_with("cmpl-draftsmith-"));
    assert!(told(&place.names("states")));
    // A lock that the server holds stays, which the error says.
    mock.with(Fault { hangs: true, ..Fault::default() });
    let hung = ["--set", "data.server.timeout_s=0.5"];
    let hung = place.run(&[&["server", "states", "served.toml"][..], &hung].concat());
    hung.fails_naming(&[
        "did not answer in time",
        "files of hidden states are left",
        "when the server is idle",
    ]);
}

#[test]
fn a_class_without_states_is_named_before_the_server_is_started() {
    let (place, _mock) = place();
    let ends = write_ends(&place, "ends");
    let config = std::fs::read_to_string(ends.join("config.json")).unwrap();
    let only_ends = format!("models.target={}", ends.display());
    let set = ["--set", "name=classes", "--set", &only_ends];
    for (class, is_named) in [("Qwen2MoeForCausalLM", true), ("Qwen3MoeForCausalLM", false)] {
        let with_class = config.replacen('{', &format!("{{\"architectures\":[\"{class}\"],"), 1);
        std::fs::write(ends.join("config.json"), with_class).unwrap();
        let found = place.run(&[&["server", "states", "served.toml", "--json"][..], &set].concat());
        let problem = found.json()["problem"].clone();
        assert_eq!(problem.as_str().is_some_and(|it| it.contains(class)), is_named, "{problem}");
    }
}

#[test]
fn the_printed_command_is_safe_to_paste() {
    let (place, _mock) = place();
    let target = place.copy_model("target", "my 'target'");
    let dir = place.path("x'; touch pasted; '");
    let dirs = format!("data.server.states.dirs=[{}]", json!(dir));
    let target_key = format!("models.target={}", json!(target));
    let set = ["--set", "name=pasted", "--set", &dirs, "--set", &target_key];
    let found = place.run(&[&["server", "states", "served.toml", "--json"][..], &set].concat());
    let command = found.json()["command"].as_str().unwrap().to_owned();
    // A stand-in for `vllm` prints its arguments, each on a line.
    place.write("vllm", "#!/bin/sh\nprintf '%s\\n' \"$@\"\n");
    let shell = format!("vllm() {{ sh ./vllm \"$@\"; }}\n{command}");
    let ran = std::process::Command::new("sh")
        .args(["-c", &shell])
        .current_dir(place.path(""))
        .output()
        .unwrap();
    let words = String::from_utf8(ran.stdout).unwrap();
    let words: Vec<&str> = words.lines().collect();
    assert_eq!(words[..3], ["serve", target.to_str().unwrap(), "--no-enable-prefix-caching"]);
    let transfer: Value = serde_json::from_str(words[6]).unwrap();
    let shared = &transfer["kv_connector_extra_config"]["shared_storage_path"];
    assert_eq!(shared, dir.to_str().unwrap());
    assert!(!place.path("pasted").exists());
}

#[test]
fn a_drafter_from_served_states_equals_one_from_local_layers() {
    let (place, mock) = place();
    let only_ends = format!("models.target={}", write_ends(&place, "ends").display());
    let set = ["--set", "name=ends", "--set", &only_ends];
    place.run(&[&["build-data", "served.toml"][..], &set].concat()).ok();
    // The server fails four times on the way. What came before is not asked for again.
    let asked_before = mock.num_states();
    for most in [7, 13, 19, 25] {
        mock.with(Fault { fails_after: Some(asked_before + most), ..Fault::default() });
        let failed = place.run(&["train-drafter", "served.toml"]);
        failed.fails_naming(&["answered 500", "states that came before are kept"]);
    }
    mock.with(Fault::default());
    let trained = place.run(&["train-drafter", "served.toml"]);
    assert!(trained.stderr.contains("mean error 0.0000 nats"), "{}", trained.stderr);
    trained.ok();
    let num_failed = mock.num_states() - asked_before - NUM_PROMPTS;
    // Up to three requests run at the same time, and each of four trainings fails with them. Each of the
    // five trainings requests up to six rows of the proof twice.
    assert!(num_failed <= 4 * 3 + 4 + 5 * 6, "{num_failed} requests were repeated");
    assert_eq!(place.names("states"), [""; 0], "files are deleted once they are read");

    let local = format!(
        "[models]\ntarget = '{}'\n{JUDGED}[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\ntemperature = 0\n\
         {}features = 'cache'\n",
        model("target").display(),
        drafter()
    );
    // Of this target, there are only the ends.
    let trained = place.run(&[&["train-drafter", "served.toml"][..], &set].concat());
    assert!(trained.stderr.contains("not proved: which middle layers"), "{}", trained.stderr);
    assert!(trained.stderr.contains("of 18 more rows, only the last position is proved"));
    trained.ok();
    // Nothing is written where the states are kept in memory or nowhere.
    for (keep, note) in [("memory", "kept in memory"), ("nowhere", "kept nowhere")] {
        let set = format!("data.server.states.keep={keep}");
        let set = ["--set", &format!("name={keep}"), "--set", &set];
        let run = |command: &str| place.run(&[&[command, "served.toml"][..], &set].concat());
        run("build-data").ok();
        if keep == "nowhere" {
            // One epoch, and a part of the next.
            let most = mock.num_states() + NUM_PROMPTS + 3;
            mock.with(Fault { fails_after: Some(most), ..Fault::default() });
            run("train-drafter").fails_naming(&["answered 500", "row `"]);
            mock.with(Fault::default());
        }
        let trained = run("train-drafter");
        assert!(trained.stderr.contains(note), "{}", trained.stderr);
        trained.ok();
        let names = place.names(&format!("data/{keep}"));
        assert!(names.iter().all(|name| !name.starts_with("features")), "{names:?}");
    }
    place.write("local.toml", local);
    place.run(&["build-data", "local.toml"]).ok();
    place.run(&["train-drafter", "local.toml"]).ok();
    let [served, ends, memory, nowhere, local] = ["served", "ends", "memory", "nowhere", "local"]
        .map(|name| {
            let scores =
                std::fs::read(place.path(&format!("checkpoints/{name}/e3/scores.json"))).unwrap();
            let scores: Value = serde_json::from_slice(&scores).unwrap();
            let agreement: Vec<f64> = serde_json::from_value(scores["agreement"].clone()).unwrap();
            (agreement, weights_in(&place.path(&format!("checkpoints/{name}/e3"))))
        });
    assert_eq!(served, ends, "from the same states and the same ends");
    assert_eq!(served, memory, "from states in memory");
    // Streamed states are not rounded to 16 bits.
    for (found, most) in [(&nowhere, 1e-2), (&served, 1e-3)] {
        assert_eq!(found.0.len(), local.0.len());
        assert!(found.0.iter().zip(&local.0).all(|(one, other)| (one - other).abs() < 0.005));
        assert_eq!(found.1.len(), local.1.len());
        let largest = found.1.iter().zip(&local.1).map(|(one, other)| (one - other).abs());
        let largest = largest.fold(0.0, f32::max);
        assert!(largest < most, "weights differ by up to {largest}");
    }

    // What the drafter proposes along the served responses is what it proposes with all layers here.
    let drafter = format!(
        "drafters.e3={{kind='eagle3',path='{}'}}",
        place.path("checkpoints/local/e3").display()
    );
    let record = |recipe: &str| {
        let ran = place.run(&["record", recipe, "--json", "--set", &drafter]);
        let files = ran.json();
        let acceptance = |file: &Value| {
            (
                file["set"].clone(),
                [&file["share_accepted"], &file["num_rollouts"], &file["mean_rollout_length"]]
                    .map(Clone::clone),
            )
        };
        files.as_array().unwrap().iter().map(acceptance).collect::<Vec<_>>()
    };
    let [from_server, from_layers] = ["served.toml", "local.toml"].map(record);
    assert_eq!((from_server.len(), &from_server), (2, &from_layers));
    // What needs no layer of the target works, and the rest says what to do instead.
    let run = |arguments: &[&str]| place.run(&[arguments, &set[..]].concat());
    let all = run(&["run", "served.toml", "--json"]);
    assert!(all.stderr.contains("evaluate: skipped"), "{}", all.stderr);
    let all = all.json();
    assert_eq!((&all["evaluate"], all["replay"].is_object()), (&Value::Null, true), "{all}");
    place.run(&["export", "--for", "eagle3", "checkpoints/ends/e3", "exported"]).ok();
    run(&["evaluate", "served.toml"]).fails_naming(&["`server certify`"]);
    place.run(&["check", "checkpoints/ends/e3"]).fails_naming(&["server certify"]);
}

/// Reads the weights of a safetensors directory, in the order of their names.
fn weights_in(dir: &Path) -> Vec<f32> {
    let mut reader = WeightReader::open_dir(dir).unwrap();
    let mut names: Vec<String> = reader.names().map(str::to_owned).collect();
    names.retain(|name| !name.ends_with("d2t") && !name.ends_with("t2d"));
    names.sort();
    let weights = names.iter().flat_map(|name| {
        let shape = reader.shape(name).unwrap().to_vec();
        reader.take(name, &shape).unwrap()
    });
    weights.collect()
}

#[test]
fn a_head_from_served_states_equals_one_from_local_layers() {
    const HEAD: &str = "[drafters.e3.head]\nform = 'look-ahead'\nlabels = 'rollouts'\nrollout_length = 3\nnum_layers = 1\n\
        features = 'cache'\noptimizer = { num_epochs = 2, validation_fraction = 0.3 }\n";
    let (place, mock) = place();
    let served = std::fs::read_to_string(place.path("served.toml")).unwrap();
    place.write("served.toml", served + HEAD);
    place.write(
        "local.toml",
        format!(
            "[models]\ntarget = '{}'\n{JUDGED}[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 16\n\
             temperature = 0\n{}{HEAD}",
            model("target").display(),
            drafter()
        ),
    );
    for command in ["build-data", "train-drafter"] {
        place.run(&[command, "local.toml"]).ok();
    }
    // Of this target, there are only the ends.
    let only_ends = format!("models.target={}", write_ends(&place, "ends").display());
    let set = ["--set", "name=ends", "--set", &only_ends];
    let run = |command: &str| place.run(&[&[command, "served.toml"][..], &set].concat());
    run("build-data").ok();
    run("train-drafter").ok();
    // The head of the drafter that was trained on local layers.
    let file = "e3/model.safetensors";
    std::fs::copy(
        place.path(&format!("checkpoints/local/{file}")),
        place.path(&format!("checkpoints/ends/{file}")),
    )
    .unwrap();
    let config = |name: &str| place.path(&format!("checkpoints/{name}/e3/config.json"));
    let [mut own, local] = ["ends", "local"].map(|name| -> Value {
        serde_json::from_slice(&std::fs::read(config(name)).unwrap()).unwrap()
    });
    own["weights_hash"] = local["weights_hash"].clone();
    std::fs::write(config("ends"), own.to_string()).unwrap();
    std::fs::remove_dir_all(place.path("checkpoints/ends/e3/head")).unwrap();
    let asked_before = mock.num_states();
    let trained = run("train-drafter");
    assert!(trained.stderr.contains("checkpoints/ends/e3` is there"), "{}", trained.stderr);
    trained.ok();
    assert!(mock.num_states() > asked_before + NUM_PROMPTS / 2, "the head's states come from it");
    assert_eq!(place.names("states"), [""; 0]);
    let [found, local] = ["ends", "local"]
        .map(|name| weights_in(&place.path(&format!("checkpoints/{name}/e3/head"))));
    assert_eq!(found.len(), local.len());
    let largest = found.iter().zip(&local).map(|(one, other)| (one - other).abs());
    let largest = largest.fold(0.0, f32::max);
    assert!(largest < 1e-3, "weights differ by up to {largest}");
    let all = run("run");
    assert!(all.stderr.contains("evaluate: skipped"), "{}", all.stderr);
    all.ok();
    // A drafter and a head that are there need no server.
    let asked_before = mock.num_states();
    run("train-drafter").ok();
    assert_eq!(mock.num_states(), asked_before);
}

#[test]
fn a_recipe_of_sampled_answers_runs_to_its_end() {
    let (place, mock) = place();
    let sampled = [
        "name=sampled",
        "data.temperature=1.0",
        "data.server.max_outside_mass=1.0",
        "evaluate.decodings=['greedy', 'sampled']",
    ];
    let sampled = sampled.map(|set| ["--set", set]).concat();
    let run = |arguments: &[&str]| place.run(&[arguments, &sampled].concat());
    let all = run(&["run", "served.toml", "--json"]).json();
    assert_eq!(all["record"].as_array().unwrap().len(), 4, "two sets, two decodings: {all}");
    assert_eq!(place.names("states"), [""; 0]);
    // Everything is there already.
    let asked_before = mock.num_states();
    run(&["run", "served.toml"]).ok();
    assert_eq!(mock.num_states(), asked_before);
}

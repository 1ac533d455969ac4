//! A test server on loopback. It answers in a real server's format and decodes with the embedded target; the
//! test decides how it treats each request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use burn::tensor::Device;
use draftsmith_decode::{Finish, RoundTokens};
use draftsmith_theory::{Decoding, Sampling, SeededDraws, log_softmax};
use serde_json::{Value, json};

use crate::console::Console;
use crate::pair::Pair;
use crate::recipe::decoding;
use crate::responses::Responder;
use crate::workspace::Workspace;

/// How to treat a request.
#[derive(Clone, Copy)]
pub(crate) enum Deed {
    /// Answer in vLLM's format.
    Answer,
    /// Answer in llama.cpp's format.
    AnswerAsLlamaCpp,
    /// Answer with text only and reject token ids, as TGI does.
    AnswerByText,
    /// Answer in vLLM's format with changes.
    Change(fn(&mut Value)),
    /// Answer with this status, header and body.
    Say(u16, &'static str, &'static str),
    /// Send these bytes, the last of them without end.
    Pour(Pour),
    /// Send half of an answer.
    BreakOff,
    /// Send nothing until the server ends.
    Stall,
}

/// An answer in bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pour {
    pub(crate) begin: &'static [u8],
    /// What follows again and again, until the client is gone.
    pub(crate) again: &'static [u8],
    /// The wait after each.
    pub(crate) pause: Duration,
}

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// The `authorization` header.
    pub(crate) authorization: Option<String>,
    pub(crate) body: Value,
}

/// A server on loopback that runs until it is dropped.
pub(crate) struct Loopback {
    pub(crate) url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    most_at_once: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
    /// Stalled requests wait until this is dropped.
    _ends: mpsc::Sender<()>,
}

/// The log-probabilities of a token, and of the most probable tokens at its position.
type LogProbs = (f32, Vec<(u32, f32)>);

/// The state that all connections share.
struct Shared<F> {
    pair: Pair,
    deed: F,
    requests: Arc<Mutex<Vec<Request>>>,
    num_running: AtomicUsize,
    most_at_once: Arc<AtomicUsize>,
    ends: Mutex<mpsc::Receiver<()>>,
}

impl Loopback {
    /// Serves the embedded target. `deed` decides how to treat each request, given its number.
    pub(crate) fn serve(deed: impl Fn(usize, &Request) -> Deed + Send + Sync + 'static) -> Self {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny");
        let workspace = Workspace::new(&dir.join("target"), None, vec![Device::flex()]);
        let text = workspace.text_side().expect("it is committed").clone();
        let target = workspace.target_alone().expect("it is committed").target.clone();
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a port");
        let address = listener.local_addr().expect("it is bound");
        let (ends, at_end) = mpsc::channel();
        let (requests, most_at_once) = (Arc::default(), Arc::default());
        let shared = Arc::new(Shared {
            pair: Pair { target, draft: None, text },
            deed,
            requests: Arc::clone(&requests),
            num_running: AtomicUsize::new(0),
            most_at_once: Arc::clone(&most_at_once),
            ends: Mutex::new(at_end),
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let shared = Arc::clone(&shared);
                // A client may disconnect.
                std::thread::spawn(move || stream.and_then(|stream| shared.meet(stream)));
            }
        });
        let url = format!("http://{address}/v1");
        Self { url, requests, most_at_once, is_over, accepting: Some(accepting), _ends: ends }
    }

    /// The requests so far, in order.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("nobody panics").clone()
    }

    /// The greatest number of concurrent requests so far.
    pub(crate) fn most_at_once(&self) -> usize {
        self.most_at_once.load(Ordering::SeqCst)
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let address = self.url.trim_start_matches("http://").trim_end_matches("/v1");
        let _ = TcpStream::connect(address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl<F: Fn(usize, &Request) -> Deed> Shared<F> {
    fn meet(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let request = read_request(&stream)?;
        let number = {
            let mut requests = self.requests.lock().expect("nobody panics");
            requests.push(request.clone());
            requests.len() - 1
        };
        let running = self.num_running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(running, Ordering::SeqCst);
        let deed = (self.deed)(number, &request);
        let (status, header, body) = match deed {
            Deed::Say(status, header, body) => (status, header, body.to_owned()),
            Deed::Stall => {
                // Returns an error when the server is dropped.
                let _ = self.ends.lock().expect("nobody panics").recv();
                return Ok(());
            }
            Deed::AnswerByText if request.body["prompt"].is_array() => {
                (422, "", r#"{"error":"prompt: expected a string"}"#.to_owned())
            }
            Deed::Pour(pour) => return self.pour(pour, stream),
            _ => (200, "", self.completion(&request.body, deed).to_string()),
        };
        self.num_running.fetch_sub(1, Ordering::SeqCst);
        let header = if header.is_empty() { String::new() } else { format!("{header}\r\n") };
        let sent = if matches!(deed, Deed::BreakOff) { body.len() / 2 } else { body.len() };
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{header}connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&body.as_bytes()[..sent])
    }

    fn pour(&self, pour: Pour, mut stream: TcpStream) -> std::io::Result<()> {
        self.num_running.fetch_sub(1, Ordering::SeqCst);
        stream.write_all(pour.begin)?;
        while !pour.again.is_empty() {
            stream.write_all(pour.again)?;
            let end = self.ends.lock().expect("nobody panics").recv_timeout(pour.pause);
            if end == Err(RecvTimeoutError::Disconnected) {
                break;
            }
        }
        Ok(())
    }

    /// The target's completion.
    fn completion(&self, body: &Value, deed: Deed) -> Value {
        let text = &self.pair.text;
        let prompt_ids: Vec<u32> = match &body["prompt"] {
            Value::String(prompt) => text.tokenizer.encode(prompt, false).expect("a text"),
            ids => serde_json::from_value(ids.clone()).expect("token ids"),
        };
        let limits = text.limits(body["max_tokens"].as_u64().expect("a number") as usize);
        let console = Console::silent();
        let responder = Responder {
            target: &self.pair.target,
            context: text.context,
            decoding: decoding_of(body),
            limits,
            console: &console,
        };
        let seed = body["seed"].as_u64().expect("a number");
        let mut prompts = [(&prompt_ids[..], SeededDraws::new(seed, &["served"]))];
        let vocab_size = self.pair.target.shape().vocab_size;
        let num = body["logprobs"].as_u64().unwrap_or(0) as usize;
        let mut known: Vec<LogProbs> = Vec::new();
        let note = |_: usize, tokens: RoundTokens<'_>| {
            for (id, logits) in tokens.kept.iter().zip(tokens.logits.chunks_exact(vocab_size)) {
                let own = log_softmax(logits)[*id as usize] as f32;
                known.push((own, most_probable(logits, num)));
            }
        };
        let generation = responder.respond(&mut prompts, note).expect("it fits").remove(0);
        let ids = generation.token_ids;
        let finish_reason = if generation.finish == Finish::Eos { "stop" } else { "length" };
        let usage = json!({ "prompt_tokens": prompt_ids.len(), "completion_tokens": ids.len() });
        let words = text.tokenizer.decode(&ids, true).expect("known tokens");
        let mut choice = json!({ "index": 0, "text": words, "finish_reason": finish_reason });
        let mut answer = json!({ "object": "text_completion", "usage": usage });
        match deed {
            Deed::AnswerAsLlamaCpp => {
                answer["__verbose"] = json!({ "tokens": ids });
                let place = |(id, (own, top)): (&u32, &LogProbs)| {
                    let top = top.iter().map(|(id, log)| json!({ "id": id, "logprob": log }));
                    let top: Vec<Value> = top.collect();
                    json!({ "id": id, "logprob": own, "top_logprobs": top })
                };
                let content: Vec<Value> = ids.iter().zip(&known).map(place).collect();
                choice["logprobs"] = json!({ "content": content });
            }
            Deed::AnswerByText => {}
            _ => {
                choice["token_ids"] = json!(ids);
                let name = |id: &u32| format!("token_id:{id}");
                let tops = known.iter().map(|(_, top)| {
                    let top = top.iter().map(|(id, log)| (name(id), json!(log)));
                    Value::Object(top.collect())
                });
                choice["logprobs"] = json!({
                    "tokens": ids.iter().map(name).collect::<Vec<_>>(),
                    "token_logprobs": known.iter().map(|(own, _)| own).collect::<Vec<_>>(),
                    "top_logprobs": tops.collect::<Vec<_>>(),
                });
            }
        }
        answer["choices"] = json!([choice]);
        if let Deed::Change(change) = deed {
            change(&mut answer);
        }
        answer
    }
}

/// The most probable tokens at temperature 1.
fn most_probable(logits: &[f32], num: usize) -> Vec<(u32, f32)> {
    let log_probs = log_softmax(logits);
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|one, other| log_probs[*other as usize].total_cmp(&log_probs[*one as usize]));
    ids.truncate(num);
    ids.into_iter().map(|id| (id, log_probs[id as usize] as f32)).collect()
}

/// The decoding that a request asks for.
fn decoding_of(body: &Value) -> Decoding {
    let number = |key: &str| body[key].as_f64().expect("a number");
    let sampling = Sampling {
        temperature: number("temperature"),
        top_p: number("top_p"),
        top_k: usize::try_from(body["top_k"].as_i64().expect("a number")).ok(),
        min_p: Some(number("min_p")).filter(|min_p| *min_p > 0.0),
    };
    decoding(sampling).penalising(number("repetition_penalty"))
}

fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let (mut num_bytes, mut authorization) = (0, None);
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => num_bytes = value.parse().unwrap_or(0),
            "authorization" => authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; num_bytes];
    reader.read_exact(&mut body)?;
    let body = serde_json::from_slice(&body)?;
    Ok(Request { path, authorization, body })
}

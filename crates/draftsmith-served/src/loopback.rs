//! A test server on the loopback interface, which answers in a real server's format. The test
//! provides the target that decodes, and decides how the server treats each request. The tests of
//! `draftsmith` include this file too.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use draftsmith_data::TextTokenizer;
use serde_json::{Value, json};

/// The way in which the server treats a request.
#[derive(Clone, Copy)]
pub enum Deed {
    /// Answer in vLLM's format.
    Answer,
    /// Answer in llama.cpp's format.
    AnswerAsLlamaCpp,
    /// Answer with text only and reject token ids, as TGI does.
    AnswerByText,
    /// Answer in vLLM's format with changes.
    Change(fn(&mut Value)),
    /// Answer with this HTTP status, header line and body.
    Say(u16, &'static str, &'static str),
    /// Send a prefix, and then the same bytes again and again.
    Pour(Pour),
    /// Send half of an answer.
    BreakOff,
    /// Send nothing until the server ends.
    Stall,
}

/// The bytes of an endless answer.
#[derive(Clone, Copy, Default)]
pub struct Pour {
    /// The bytes that come first.
    pub begin: &'static [u8],
    /// The bytes that are repeated until the client disconnects; empty for none.
    pub again: &'static [u8],
    /// The pause after each repetition.
    pub pause: Duration,
}

/// A received request.
#[derive(Debug, Clone)]
pub struct Request {
    /// The path of the request's URL.
    pub path: String,
    /// The `authorization` header.
    pub authorization: Option<String>,
    /// The JSON body; null if there is none.
    pub body: Value,
}

/// A server on loopback that runs until it is dropped.
pub struct Loopback {
    /// The server's base URL, up to `/v1`.
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    most_at_once: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
    /// Stalled requests wait until this is dropped.
    _ends: mpsc::Sender<()>,
}

/// The log-probabilities of a token, and of the most probable tokens at its position.
pub type LogProbs = (f32, Vec<(u32, f32)>);

/// A target's response.
pub struct Decoded {
    /// The response's token ids.
    pub ids: Vec<u32>,
    /// Whether the last token is an end-of-sequence token.
    pub is_ended: bool,
    /// The log-probabilities, one entry per token.
    pub log_probs: Vec<LogProbs>,
}

/// A target: its tokenizer, and a function that decodes a response.
pub struct LoopbackTarget<T> {
    /// The tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// Decodes the response to a prompt, given the prompt's token ids and the request's body.
    pub decode: T,
}

/// The state that all connections share.
struct Shared<F, T> {
    target: LoopbackTarget<T>,
    deed: F,
    requests: Arc<Mutex<Vec<Request>>>,
    num_running: AtomicUsize,
    most_at_once: Arc<AtomicUsize>,
    ends: Mutex<mpsc::Receiver<()>>,
}

impl Loopback {
    /// Starts a server for a target. `deed` decides how to treat each request, given its index.
    pub fn serve(
        target: LoopbackTarget<impl Fn(&[u32], &Value) -> Decoded + Send + Sync + 'static>,
        deed: impl Fn(usize, &Request) -> Deed + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a port");
        let address = listener.local_addr().expect("it is bound");
        let (ends, at_end) = mpsc::channel();
        let (requests, most_at_once) = (Arc::default(), Arc::default());
        let shared = Arc::new(Shared {
            target,
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

    /// Returns the requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("nobody panics").clone()
    }

    /// Returns the maximum number of concurrent requests so far.
    pub fn most_at_once(&self) -> usize {
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

impl<F: Fn(usize, &Request) -> Deed, T: Fn(&[u32], &Value) -> Decoded> Shared<F, T> {
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

    /// Builds the target's completion in the format that `deed` selects.
    fn completion(&self, body: &Value, deed: Deed) -> Value {
        let tokenizer = &self.target.tokenizer;
        let prompt_ids: Vec<u32> = match &body["prompt"] {
            Value::String(prompt) => tokenizer.encode(prompt, false).expect("a text"),
            ids => serde_json::from_value(ids.clone()).expect("token ids"),
        };
        let Decoded { ids, is_ended, log_probs: known } = (self.target.decode)(&prompt_ids, body);
        let finish_reason = if is_ended { "stop" } else { "length" };
        let usage = json!({ "prompt_tokens": prompt_ids.len(), "completion_tokens": ids.len() });
        let words = tokenizer.decode(&ids, true).expect("known tokens");
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

/// Reads a request.
///
/// # Errors
/// If the connection breaks, or the body is no JSON.
pub fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
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
    // A GET request has no body.
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? };
    Ok(Request { path, authorization, body })
}

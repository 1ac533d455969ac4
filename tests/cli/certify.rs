//! `certify` over HTTP: verdicts, exit codes and what servers do wrong.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use draftsmith_theory::{Draws, SeededDraws};
use serde_json::{Value, json};

use crate::support::{Place, model, read_request};

/// What a mock server does.
#[derive(Clone, Copy, PartialEq)]
enum Deed {
    /// Answers as the target, and counts rounds of speculation.
    Right,
    /// Answers as the target and counts nothing.
    Plain,
    /// Draws too sharply.
    Sharp,
    /// Takes the second best token, greedily.
    Second,
    /// Draws the most probable token after the first eight of an answer.
    Late,
    /// Takes the second best token after prompts of more than 120 tokens.
    Wraps,
    /// Ends answers with the target's end token, which is one of its tokens.
    Ends,
    /// The same, and counts nothing.
    PlainEnds,
    /// Goes on after the end token.
    PassesEnds,
    /// Counts rounds without candidates.
    Idle,
    /// Counts more accepted candidates than drafted ones.
    Miscounts,
    /// Returns no ids.
    TextOnly,
    /// Refuses requests with this status.
    Refuses(&'static str),
    /// Never answers requests.
    Stalls,
}

pub(crate) struct Mock {
    pub(crate) url: String,
    is_over: Arc<AtomicBool>,
}

impl Mock {
    fn serve(deed: Deed) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let is_over = Arc::<AtomicBool>::default();
        let (over, rounds) = (Arc::clone(&is_over), Arc::<AtomicUsize>::default());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let rounds = Arc::clone(&rounds);
                std::thread::spawn(move || meet(stream.unwrap(), deed, &rounds));
            }
        });
        Self { url, is_over }
    }
}

/// A server and its reference, whose output is the same.
pub(crate) fn equal_servers() -> [Mock; 2] {
    [Deed::Right, Deed::Plain].map(Mock::serve)
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://").trim_end_matches("/v1"));
    }
}

/// The target's end token.
const END: u64 = 1;

/// Eight tokens may follow any token.
fn probs(last: u64, sharpness: f64) -> Vec<f64> {
    let mut draws = SeededDraws::new(3, &["certify", &last.to_string()]);
    let weights: Vec<f64> = (0..8).map(|_| (2.0 * sharpness * draws.uniform()).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

fn meet(stream: TcpStream, deed: Deed, rounds: &AtomicUsize) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Some((line, body)) = read_request(&mut reader) {
        let (status, text) = if line.starts_with("GET /v1/models") {
            ("200 OK", json!({ "data": [{ "id": "mock" }] }).to_string())
        } else if line.starts_with("GET /metrics") && !matches!(deed, Deed::Plain | Deed::PlainEnds)
        {
            let drafted = if deed == Deed::Idle { 0 } else { 3 * rounds.load(Ordering::SeqCst) };
            let accepted = if deed == Deed::Miscounts { 2 * drafted } else { drafted / 2 };
            let names = ["drafts", "draft_tokens", "accepted_tokens"];
            let counts = [rounds.load(Ordering::SeqCst), drafted, accepted];
            let page = names
                .iter()
                .zip(counts)
                .map(|(name, count)| format!("vllm:spec_decode_num_{name}_total {count}\n"));
            ("200 OK", page.collect())
        } else if let Deed::Refuses(status) = deed
            && line.starts_with("POST")
        {
            (status, "no".to_owned())
        } else if line.starts_with("POST") && deed == Deed::Stalls {
            std::thread::park();
            return;
        } else if line.starts_with("POST /v1/completions") {
            rounds.fetch_add(1, Ordering::SeqCst);
            ("200 OK", answer(&serde_json::from_slice(&body).unwrap(), deed).to_string())
        } else {
            ("404 Not Found", String::new())
        };
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", text.len());
        if writer.write_all((head + &text).as_bytes()).is_err() {
            return;
        }
    }
}

fn answer(body: &Value, deed: Deed) -> Value {
    let prompt: Vec<u64> =
        body["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let is_greedy = body["temperature"] == 0.0;
    let has_ends = matches!(deed, Deed::Ends | Deed::PlainEnds | Deed::PassesEnds);
    let id_of = |at: usize| if has_ends && at == 7 { END } else { 20 + at as u64 };
    let wraps = deed == Deed::Wraps && prompt.len() > 120;
    let mut draws = SeededDraws::new(body["seed"].as_u64().unwrap(), &[&format!("{prompt:?}")]);
    let (mut last, mut ids, mut lists) = (*prompt.last().unwrap(), Vec::new(), Vec::new());
    for _ in 0..body["max_tokens"].as_u64().unwrap() {
        let own = probs(
            last,
            match deed {
                Deed::Sharp if !is_greedy && !ids.is_empty() => 1.6,
                Deed::Late if !is_greedy && ids.len() >= 8 => 9.0,
                _ => 1.0,
            },
        );
        let mut sorted: Vec<usize> = (0..8).collect();
        sorted.sort_by(|one, other| own[*other].total_cmp(&own[*one]));
        let chosen = match is_greedy {
            true => sorted[usize::from(deed == Deed::Second && ids.len() == 4 || wraps)],
            false => draws.categorical(&own),
        };
        let list: serde_json::Map<String, Value> = (0..8)
            .map(|at| (format!("token_id:{}", id_of(at)), json!(probs(last, 1.0)[at].ln())))
            .collect();
        lists.push(Value::Object(list));
        last = id_of(chosen);
        ids.push(last);
        if last == END && deed != Deed::PassesEnds {
            break;
        }
    }
    let reason = if ids.last() == Some(&END) { "stop" } else { "length" };
    let mut choice = json!({ "index": 0, "text": "x".repeat(ids.len()), "finish_reason": reason });
    if deed != Deed::TextOnly {
        choice["token_ids"] = json!(ids);
    }
    if !body["logprobs"].is_null() {
        let tokens: Vec<String> = ids.iter().map(|id| format!("token_id:{id}")).collect();
        let own: Vec<Value> =
            lists.iter().zip(&tokens).map(|(list, token)| list[token].clone()).collect();
        choice["logprobs"] =
            json!({ "tokens": tokens, "token_logprobs": own, "top_logprobs": lists });
    }
    json!({ "model": "mock", "choices": [choice], "usage": { "prompt_tokens": prompt.len(), "completion_tokens": ids.len() } })
}

#[test]
fn verdicts_have_their_exit_codes_and_name_what_differs() {
    let place = Place::new();
    place.write_prompts("test.jsonl", 4);
    let target = model("target").display().to_string();
    let reference = Mock::serve(Deed::Plain);
    let certify = |deed: Deed, more: &[&str]| {
        let server = Mock::serve(deed);
        let arguments = [
            "server",
            "certify",
            "--server",
            &server.url,
            "--reference",
            &reference.url,
            "--target",
            &target,
            "--prompts",
            "test.jsonl",
            "--num-prompts",
            "3",
            "--max-new-tokens",
            "12",
            "--candidates",
            "2",
            "--server-dtype",
            "f32",
        ];
        place.run(&[&arguments[..], more].concat())
    };
    let right = certify(Deed::Right, &["--draws", "1500"]);
    assert_eq!(right.code, Some(0), "{}{}", right.stdout, right.stderr);
    let unwrapped = right.stdout.replace('\n', " ");
    for part in [
        "NOT REFUTED",
        "0 differences",
        "By position of a round, these total variations would be found with probability 0.9: 0.",
        " at position 1 (",
        "Sampled to full length, ",
        " from token 10 on (180 tokens)",
        "drafted",
        // What no draw could show.
        "Smaller differences are not testable at this size, nor is a fault of one request in N",
        "Not tested: whether the server applies the temperature, since it is 1 (`--temperature`), top-k (`--top-k`), \
         top-p, min-p, penalties, stop strings, tokens after the first 12 of an answer",
        "No answer reached an end token, so it was not tested that answers stop there",
    ] {
        assert!(unwrapped.contains(part), "`{part}`: {}", right.stdout);
    }
    assert!(right.stdout.lines().all(|line| line.chars().count() <= 80), "{}", right.stdout);
    let sharp = certify(Deed::Sharp, &["--draws", "1500", "--json"]);
    assert_eq!(sharp.code, Some(1), "{}{}", sharp.stdout, sharp.stderr);
    let found: Value = serde_json::from_str(&sharp.stdout).unwrap();
    assert_eq!(
        (&found["verdict"], &found["sampled"]["is_refuted"]),
        (&json!("refuted"), &json!(true))
    );
    assert_eq!(found["greedy"]["differences"], json!([]));
    // Early tokens are right, so no prefix that answers share shows this.
    let late = certify(Deed::Late, &["--draws", "1500"]);
    assert_eq!(late.code, Some(1), "{}{}", late.stdout, late.stderr);
    assert!(late.stdout.replace('\n', " ").contains("From token 10 on, "), "{}", late.stdout);
    let second = certify(Deed::Second, &["--draws", "0"]);
    assert_eq!(second.code, Some(1), "{}{}", second.stdout, second.stderr);
    assert!(
        second.stdout.contains("Prompt 1, token 5, alone: gap ")
            && second.stdout.contains("under load"),
        "{}",
        second.stdout
    );
    let few = certify(Deed::Right, &["--draws", "50"]);
    assert_eq!(few.code, Some(3), "{}{}", few.stdout, few.stderr);
    let unwrapped = few.stdout.replace('\n', " ");
    assert!(unwrapped.contains("no prefix in 200") && !unwrapped.contains("NaN"), "{unwrapped}");
    let idle = certify(Deed::Idle, &["--draws", "0"]);
    assert_eq!(idle.code, Some(3), "{}{}", idle.stdout, idle.stderr);
    assert!(idle.stdout.contains("drafted nothing"), "{}", idle.stdout);
    let miscounted = certify(Deed::Miscounts, &["--draws", "0"]);
    let unwrapped = miscounted.stdout.replace('\n', " ");
    assert!(unwrapped.contains("counters are of another kind"), "{unwrapped}");
    assert!(!unwrapped.contains("No candidate was rejected"), "{unwrapped}");
    let unknown = certify(Deed::Plain, &["--draws", "0"]);
    assert!(unknown.stdout.contains("no counters"), "{}", unknown.stdout);
    certify(Deed::TextOnly, &["--draws", "0"]).fails_naming(&["no token ids", "hint:"]);
    let gone = [
        "server",
        "certify",
        "--server",
        "http://127.0.0.1:9/v1",
        "--reference",
        &reference.url,
        "--target",
        &target,
    ];
    place
        .run(&[&gone[..], &["--prompts", "test.jsonl"]].concat())
        .fails_naming(&["refuses connections"]);
}

/// Asserts that a message's hints name only flags that a command has, and no key of a recipe's stages.
#[track_caller]
fn check_hints(place: &Place, command: &[&str], said: &str) {
    let help = place.run(&[command, &["--help"]].concat()).ok();
    for hint in said.split("hint: ").skip(1) {
        let flags = hint.split(|c: char| c != '-' && !c.is_ascii_alphanumeric());
        for flag in flags.filter(|word| word.starts_with("--")) {
            let is_llama_cpps = flag == "--parallel";
            assert!(is_llama_cpps || help.contains(&format!("{flag} <")), "`{flag}`: {said}");
        }
        for key in ["`data.", "`[data", "`evaluate.", "`tune.", "`models.target"] {
            assert!(!said.contains(key), "`{key}`: {said}");
        }
    }
}

#[test]
fn hints_name_flags_of_their_command() {
    let place = Place::new();
    place.write_prompts("test.jsonl", 4);
    place.write("costs.toml", "draft_ms = 1.0\ntarget_ms = 5.0\n");
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let base = place.copy_model("target", "base");
    std::fs::remove_file(base.join("chat_template.jinja")).unwrap();
    let reference = Mock::serve(Deed::Plain);
    let certify = |url: &str, target: &str, more: &[&str]| {
        let servers = ["--server", url, "--reference", &reference.url, "--target", target];
        let few = ["--prompts", "test.jsonl", "--num-prompts", "1", "--timeout", "1"];
        place.run(&[&["server", "certify"], &servers[..], &few, more].concat())
    };
    let deeds = ["400 Bad Request", "403 Forbidden", "404 Not Found", "500 Broken"];
    let deeds = deeds.map(Deed::Refuses).into_iter().chain([Deed::Stalls, Deed::TextOnly]);
    let mut said: Vec<String> = deeds
        .map(|deed| {
            let server = Mock::serve(deed);
            let ran = certify(&server.url, &target, &["--draws", "0"]);
            assert!(ran.stderr.contains("hint: "), "{}", ran.stderr);
            ran.stderr
        })
        .collect();
    for found in [&said[1], &said[4]] {
        assert!(found.contains("`--key-env`") || found.contains("`--timeout`"), "{found}");
    }
    said.push(certify("ftp://a", &target, &[]).stderr);
    said.push(certify("http://me:secret@a/v1", &target, &[]).stderr);
    said.push(certify(&reference.url, &target, &[]).stderr);
    let untold = certify(&reference.url, "base", &[]);
    assert!(untold.stderr.contains("no chat template"), "{}", untold.stderr);
    let told = certify("http://127.0.0.1:9/v1", "base", &["--chat-template", "vicuna"]);
    assert!(told.stderr.contains("refuses connections"), "{}", told.stderr);
    said.extend([untold.stderr.replace("a recipe's `models.", ""), told.stderr]);
    said.iter().for_each(|said| check_hints(&place, &["server", "certify"], said));
    for deed in [Deed::Refuses("403 Forbidden"), Deed::Refuses("404 Not Found"), Deed::TextOnly] {
        let server = Mock::serve(deed);
        let pair = ["survey", "--target", &target, "--draft", &draft, "--costs", "costs.toml"];
        let asked = ["--prompts", "test.jsonl", "--max-new-tokens", "4", "--server", &server.url];
        check_hints(&place, &["survey"], &place.run(&[&pair[..], &asked].concat()).stderr);
    }
}

#[test]
fn tokens_after_an_end_token_refute_a_server() {
    let place = Place::new();
    place.write_prompts("test.jsonl", 4);
    let target = model("target").display().to_string();
    let certify = |server: Deed, reference: Deed| {
        let [server, reference] = [server, reference].map(Mock::serve);
        let servers = ["--server", &server.url, "--reference", &reference.url, "--target", &target];
        let few = ["--prompts", "test.jsonl", "--max-new-tokens", "12", "--draws", "1000"];
        place.run(&[&["server", "certify"], &servers[..], &few].concat())
    };
    let right = certify(Deed::Ends, Deed::PlainEnds);
    assert_eq!(right.code, Some(0), "{}{}", right.stdout, right.stderr);
    assert!(right.stdout.contains("stopped at the end token 1; if "), "{}", right.stdout);
    let passing = certify(Deed::PassesEnds, Deed::PlainEnds);
    assert_eq!(passing.code, Some(1), "{}{}", passing.stdout, passing.stderr);
    let said = passing.stdout.replace('\n', " ");
    assert!(said.contains("go on after the end token 1, where the reference stops"), "{said}");
    // A reference that knows no such end token does the same.
    let both = certify(Deed::PassesEnds, Deed::PassesEnds);
    assert_eq!(both.code, Some(0), "{}{}", both.stdout, both.stderr);
    assert!(both.stdout.replace('\n', " ").contains("so this is no fault"), "{}", both.stdout);
}

#[test]
fn identifiers_show_a_cache_that_wraps_which_short_prompts_do_not() {
    let place = Place::new();
    place.write_prompts("test.jsonl", 4);
    let target = model("target").display().to_string();
    let reference = Mock::serve(Deed::Plain);
    let certify = |deed: Deed, num_tokens: &str, more: &[&str]| {
        let server = Mock::serve(deed);
        let servers = ["--server", &server.url, "--reference", &reference.url, "--target", &target];
        let few = ["--max-new-tokens", num_tokens, "--draws", "0", "--json"];
        place.run(&[&["server", "certify"], &servers[..], &few, more].concat())
    };
    let identifiers = ["--workload", "identifiers"];
    let right = certify(Deed::Right, "8", &identifiers);
    assert_eq!(right.code, Some(0), "{}{}", right.stdout, right.stderr);
    let right = right.json();
    assert_eq!(right["greedy"]["num_prompts"], 12);
    let doubts = right["doubts"].to_string();
    assert!(
        doubts.contains("more than 12 requests") && doubts.contains("sampled answers"),
        "{doubts}"
    );
    // Every token after a long prompt is wrong; some of them are second by a little.
    assert_ne!(certify(Deed::Wraps, "8", &identifiers).code, Some(0));
    assert_eq!(certify(Deed::Wraps, "8", &["--prompts", "test.jsonl"]).code, Some(0));
    certify(Deed::Right, "8", &[]).fails_naming(&["--prompts"]);
    certify(Deed::Right, "250", &identifiers)
        .fails_naming(&["exceed the target's context", "--max-new-tokens"]);
}

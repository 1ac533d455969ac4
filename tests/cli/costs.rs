//! `costs --server` and `tune --for SERVER`, against a server whose rounds have a known length.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Place, model, read_request};

/// What a mock server does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Accepts,
    AnotherLength,
    NoCounters,
    /// Shows this page of metrics.
    Shows(&'static str),
    /// Breaks off after this many requests.
    BreaksOff(usize),
    NotJson,
    EndsEarly,
    /// Reports this many milliseconds per token.
    OwnClock(f64),
    Refuses,
    Restarts,
    OneAtATime,
}

pub(crate) struct Mock {
    pub(crate) url: String,
    requests: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    running: AtomicUsize,
    rounds: AtomicUsize,
    drafted: AtomicUsize,
    accepted: AtomicUsize,
    pages: AtomicUsize,
}

impl Mock {
    /// A server whose rounds take 6 ms, 1.5 ms for each request and 3 ms for each of `length` candidates.
    fn serve(length: usize, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let (requests, is_over): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        let (seen, over, state) =
            (Arc::clone(&requests), Arc::clone(&is_over), Arc::new(State::default()));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let (state, seen) = (Arc::clone(&state), Arc::clone(&seen));
                std::thread::spawn(move || answer(stream.unwrap(), length, fault, &state, &seen));
            }
        });
        Self { url, requests, is_over }
    }
}

/// A server without speculation.
pub(crate) fn plain_server() -> Mock {
    server(0)
}

/// A server that drafts this many candidates, of which it accepts none.
pub(crate) fn server(num_candidates: usize) -> Mock {
    Mock::serve(num_candidates, Fault::None)
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let address = self.url.trim_start_matches("http://").trim_end_matches("/v1");
        let _ = TcpStream::connect(address);
    }
}

fn answer(mut stream: TcpStream, length: usize, fault: Fault, state: &State, seen: &AtomicUsize) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let Some((line, body)) = read_request(&mut reader) else { return };
    let page = |stream: &mut TcpStream, status: &str, text: &str| {
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            text.len()
        );
        let _ = stream.write_all((head + text).as_bytes());
    };
    let count = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    if line.starts_with("GET /v1/models") {
        return page(&mut stream, "200 OK", r#"{"data": [{"id": "mock"}]}"#);
    }
    if line.starts_with("GET /metrics") {
        if let Fault::Shows(text) = fault {
            return page(&mut stream, "200 OK", text);
        }
        if fault == Fault::NoCounters || length == 0 {
            return page(&mut stream, "404 Not Found", "");
        }
        let again = fault == Fault::Restarts && state.pages.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        let shown = |counter: &AtomicUsize| if again { 0 } else { 7 + count(counter) };
        let text = format!(
            "vllm:spec_decode_num_drafts_total{{engine=\"0\"}} {}\nvllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} {}\n\
             vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {}\n",
            shown(&state.rounds),
            shown(&state.drafted),
            count(&state.accepted)
        );
        return page(&mut stream, "200 OK", &text);
    }
    if !line.starts_with("POST /v1/completions") {
        return page(&mut stream, "404 Not Found", "");
    }
    seen.fetch_add(1, Ordering::SeqCst);
    if fault == Fault::Refuses {
        return page(&mut stream, "401 Unauthorized", "no key KEY-1234567 here");
    }
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&body["stream"], &body["temperature"]), (&json!(false), &json!(0)));
    let num_tokens = body["max_tokens"].as_u64().unwrap() as usize;
    if fault == Fault::OneAtATime {
        while state.running.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            std::thread::sleep(Duration::from_micros(200));
        }
    } else {
        state.running.fetch_add(1, Ordering::SeqCst);
    }
    for _ in 0..num_tokens {
        let micros = 6000 + 1500 * count(&state.running) + 3000 * length;
        std::thread::sleep(Duration::from_micros(micros as u64));
        if length > 0 {
            state.rounds.fetch_add(1, Ordering::SeqCst);
            let drafted = if fault == Fault::AnotherLength { length + 2 } else { length };
            state.drafted.fetch_add(drafted, Ordering::SeqCst);
            state.accepted.fetch_add(usize::from(fault == Fault::Accepts), Ordering::SeqCst);
        }
    }
    state.running.fetch_sub(1, Ordering::SeqCst);
    if matches!(fault, Fault::BreaksOff(most) if count(seen) > most) {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{");
        return;
    }
    let given = if fault == Fault::EndsEarly { num_tokens - 5 } else { num_tokens };
    let mut answer = json!({ "choices": [{ "text": "x" }], "usage": { "completion_tokens": given, "prompt_tokens": 200 } });
    let own_clock = match fault {
        Fault::OwnClock(ms) => Some(ms),
        // So that the machine's load decides nothing.
        Fault::Shows(_) | Fault::NoCounters => Some(5.0),
        _ => None,
    };
    if let Some(ms) = own_clock {
        answer["timings"] =
            json!({ "predicted_n": num_tokens, "predicted_ms": ms * (num_tokens - 1) as f64 });
    }
    let text = if fault == Fault::NotJson { "nonsense".to_owned() } else { answer.to_string() };
    page(&mut stream, "200 OK", &text);
}

fn costs<'a>(url: &'a str, candidates: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let quick = ["--rounds", "24", "--blocks", "2", "--concurrency", "1,2"];
    [&["server", "costs", "--server", url, "--candidates", candidates], &quick[..], more].concat()
}

#[test]
fn rounds_are_measured_by_load_and_added_to_one_file() {
    let place = Place::new();
    let plain = Mock::serve(0, Fault::None);
    let shown = place.run(&costs(&plain.url, "0", &[])).ok();
    assert!(
        shown.contains("no speculation") && shown.contains("another number of candidates"),
        "{shown}"
    );
    assert!(shown.contains("for `[tune.costs]`: rows_ms = ["), "{shown}");
    let num_asked = plain.requests.load(Ordering::SeqCst);
    // Nothing is left to measure.
    place.run(&costs(&plain.url, "0", &[])).ok();
    assert_eq!(plain.requests.load(Ordering::SeqCst), num_asked);
    let drafting = Mock::serve(3, Fault::None);
    let found = place.run(&[&costs(&drafting.url, "3", &[])[..], &["--json"]].concat()).json();
    let cells = found["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4, "{found}");
    for cell in cells {
        let number = |key: &str| cell[key].as_f64().unwrap();
        let blocks = cell["block_ms"].as_array().unwrap();
        assert_eq!(blocks.len(), 2);
        let expected = 6.0 + 1.5 * number("concurrency") + 3.0 * number("num_candidates");
        // A busy machine wakes a server late, and a round is the difference of two times: it may come out shorter too.
        let ms = blocks.iter().map(|ms| ms.as_f64().unwrap()).fold(f64::MAX, f64::min);
        assert!(ms > 0.6 * expected && ms < 4.0 * expected, "{cell}");
        // Reading a prompt takes no time here, but the first token does.
        let reading = cell["prompt_token_ms"].as_array().unwrap();
        assert!(reading.iter().all(|ms| (0.0..1.0).contains(&ms.as_f64().unwrap())), "{cell}");
        assert_eq!(reading.len(), 2);
        let tokens = if number("num_candidates") > 0.0 { json!(1.0) } else { Value::Null };
        assert_eq!(cell["tokens_per_round"], tokens);
    }
    assert_eq!(place.json("server-costs.json"), found);
    // For one request a server's own clock counts; side by side it would include the reading of other prompts.
    let own = Mock::serve(0, Fault::OwnClock(7.0));
    let timed = place
        .run(&[&costs(&own.url, "0", &["--out", "own.json"])[..], &["--json"]].concat())
        .json();
    for cell in timed["cells"].as_array().unwrap() {
        let ms = cell["block_ms"][0].as_f64().unwrap();
        assert_eq!((ms - 7.0).abs() < 1e-9, cell["concurrency"] == 1, "{cell}");
    }
    // Another model does not belong into the file.
    let text = std::fs::read_to_string(place.path("server-costs.json")).unwrap();
    place.write("other.json", text.replace("mock", "another"));
    place.run(&costs(&drafting.url, "3", &["--out", "other.json"])).fails_naming(&[
        "`other.json`",
        "`another`",
        "`mock`",
        "--out",
    ]);
    place.write("broken.json", "{");
    place.run(&costs(&drafting.url, "3", &["--out", "broken.json"])).fails_naming(&["broken.json"]);
}

#[test]
fn times_are_divided_by_the_drift_of_a_server_beside() {
    // All servers tell the time by their own clocks, so that figures do not depend on the machine's load.
    let place = Place::new();
    let [plain, drafting] =
        [(0, 7.0), (3, 9.0)].map(|(length, ms)| Mock::serve(length, Fault::OwnClock(ms)));
    let one = ["--concurrency", "1", "--rounds", "24", "--blocks", "2", "--out", "beside.json"];
    let measured = |url: &str, candidates: &str, reference: &str| {
        let asked = ["server", "costs", "--server", url, "--candidates", candidates, "--json"];
        place.run(&[&asked[..], &one, &["--reference", reference]].concat()).json()
    };
    let near = |found: &Value, expected: f64| {
        assert!((found.as_f64().unwrap() - expected).abs() < 1e-9, "{found} is not {expected}");
    };
    let first = measured(&plain.url, "0", &plain.url);
    near(&first["sentinel_ms"], 7.0);
    let without_drafts = std::fs::read_to_string(place.path("beside.json")).unwrap();
    let second = measured(&drafting.url, "3", &plain.url);
    assert_eq!(second["sentinel_ms"], first["sentinel_ms"]);
    // A server beside that is twice as slow as when it was first measured halves the times.
    place.write("beside.json", without_drafts);
    let slow = Mock::serve(3, Fault::OwnClock(14.0));
    let third = measured(&drafting.url, "3", &slow.url);
    assert_eq!(third["sentinel_ms"], first["sentinel_ms"]);
    for (found, ms) in [(&first, [7.0].as_slice()), (&second, &[7.0, 9.0]), (&third, &[7.0, 4.5])] {
        let cells = found["cells"].as_array().unwrap();
        assert_eq!(cells.len(), ms.len(), "{found}");
        for (cell, ms) in cells.iter().zip(ms) {
            cell["block_ms"].as_array().unwrap().iter().for_each(|block| near(block, *ms));
        }
    }
    // A file that was measured beside a server needs one again.
    place
        .run(&costs(&drafting.url, "3", &["--out", "beside.json"]))
        .fails_naming(&["`beside.json`", "--reference"]);
}

#[test]
fn servers_that_cannot_be_timed_are_refused() {
    let place = Place::new();
    for (fault, length, candidates, named) in [
        (Fault::Accepts, 3, "3", &["accepted candidates", "--spec-synth-rates"][..]),
        (Fault::AnotherLength, 3, "3", &["5.0 candidates per round", "`--candidates` is 3"]),
        (Fault::None, 3, "0", &["3.0 candidates per round", "`--candidates` is 0"]),
        (Fault::BreaksOff(0), 0, "0", &["hint:", "run the same command again"]),
        (Fault::NotJson, 0, "0", &["other than JSON", "nonsense", "`/v1`"]),
        (Fault::EndsEarly, 0, "0", &["after 20 of 25 tokens", "ignore_eos"]),
        (Fault::Refuses, 0, "0", &["answered 401", "--key-env"]),
        (Fault::Restarts, 3, "3", &["counters fell", "started again"]),
        (Fault::OneAtATime, 0, "0", &["concurrent requests", "--parallel"]),
    ] {
        let mock = Mock::serve(length, fault);
        let out = format!("{candidates}-{}.json", named[0].len());
        let ran = place.run(&costs(&mock.url, candidates, &["--out", &out]));
        assert!(!ran.stderr.contains("are kept"), "there are no cells: {}", ran.stderr);
        ran.fails_naming(named);
        if place.path(&out).exists() {
            let kept = place.json(&out);
            assert!(kept["cells"].as_array().is_some(), "{kept}");
        }
    }
    // A key is sent and never shown.
    let mock = Mock::serve(0, Fault::Refuses);
    let mut command = place.command(&costs(&mock.url, "0", &["--key-env", "COSTS_KEY"]));
    let output = command.env("COSTS_KEY", "KEY-1234567").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("***") && !said.contains("KEY-1234567"),
        "{said}"
    );
    place
        .run(&costs(&mock.url, "0", &["--key-env", "NO_SUCH_KEY"]))
        .fails_naming(&["`NO_SUCH_KEY`", "`--key-env`"]);
    // Neither is one that the server uses as its model's name, or one in the address.
    let named = Mock::serve(0, Fault::None);
    let mut command = place.command(&costs(&named.url, "0", &["--key-env", "COSTS_KEY"]));
    let output = command.env("COSTS_KEY", "mock").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("token as its model's name"), "{said}");
    for end in ["?key=KEY-1234567", "#KEY-1234567"] {
        let url = named.url.clone() + end;
        let ran = place.run(&costs(&url, "0", &[]));
        assert!(!ran.stderr.contains("KEY-1234567"), "{}", ran.stderr);
        ran.fails_naming(&["`--server`", "URL"]);
    }
    let url = named.url.replace("http://", "http://user:KEY-1234567@");
    let ran = place.run(&costs(&url, "0", &[]));
    assert!(!ran.stderr.contains("KEY-1234567"), "{}", ran.stderr);
    ran.fails_naming(&["user name or password", "`--key-env`"]);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", closed.local_addr().unwrap());
    drop(closed);
    place.run(&costs(&url, "0", &[])).fails_naming(&["refuses connections", "hint:"]);
    place.run(&costs(&url, "0", &["--concurrency", "0"])).fails_naming(&["--concurrency"]);
    let other = Mock::serve(0, Fault::None);
    place
        .run(&costs(&other.url, "0", &["--model", "gone"]))
        .fails_naming(&["lists no model `gone`"]);
    let lying = Mock::serve(0, Fault::OwnClock(1e300));
    let ran = place.run(&costs(&lying.url, "0", &["--out", "lying.json"]));
    ran.fails_naming(&["reports a `predicted_ms` of 2.4e301 in "]);
    assert!(!place.path("lying.json").exists());
}

#[test]
fn a_server_that_shows_no_drafting_is_not_measured_with_candidates() {
    let place = Place::new();
    let measure = |fault: Fault, candidates: &str| {
        let server = Mock::serve(candidates.parse().unwrap(), fault);
        let out = format!("{}.json", server.url.rsplit(':').next().unwrap().replace('/', "-"));
        let one = ["--rounds", "16", "--blocks", "1", "--concurrency", "1", "--out", &out];
        let asked = ["server", "costs", "--server", &server.url, "--candidates", candidates];
        (place.run(&[&asked[..], &one].concat()), place.path(&out).exists())
    };
    for fault in [Fault::NoCounters, Fault::Shows("vllm:num_requests_running 1\n")] {
        let (ran, is_written) = measure(fault, "3");
        assert!(!is_written, "{}", ran.stderr);
        ran.fails_naming(&[
            "shows no counters",
            "`--candidates` is 3",
            "llama-server with `--metrics`",
        ]);
    }
    // What cannot be checked is said, at any number of candidates.
    let unread = [
        "vllm:spec_decode_num_draft_tokens 1050\nvllm:spec_decode_num_accepted_tokens 3\n",
        "vllm:spec_decode_num_draft_tokens_total NaN\nvllm:spec_decode_num_accepted_tokens_total 3\n",
    ];
    for page in unread {
        for (candidates, what) in [("0", "drafts 0 candidates"), ("3", "drafts 3 candidates")] {
            let (ran, is_written) = measure(Fault::Shows(page), candidates);
            let said = ran.stderr.clone();
            assert!(said.contains("counter `vllm:spec_decode_num_draft_tokens"), "{said}");
            assert!(
                said.contains(what) && said.contains("it is not checked") && is_written,
                "{said}"
            );
            ran.ok();
        }
    }
    let (ran, _) = measure(Fault::Shows("sglang:gen_throughput 5\n"), "3");
    assert!(ran.stderr.contains("SGLang counts no candidates"), "{}", ran.stderr);
    ran.ok();
    let (ran, _) = measure(Fault::NoCounters, "0");
    assert!(ran.stderr.contains("llama-server needs `--metrics`"), "{}", ran.stderr);
    ran.ok();
    let (ran, _) = measure(Fault::Shows("# TYPE vllm:spec_decode_num_drafts counter\n"), "0");
    assert!(!ran.stderr.contains("it is not checked"), "{}", ran.stderr);
    ran.ok();
}

#[test]
fn costs_are_those_of_one_drafter() {
    let place = Place::new();
    let server = Mock::serve(1, Fault::OwnClock(5.0));
    let measure = |drafter: &str, blocks: &str| {
        let one = ["--rounds", "16", "--blocks", blocks, "--concurrency", "1"];
        let asked = ["server", "costs", "--server", &server.url, "--candidates", "1"];
        place.run(&[&asked[..], &one, &["--drafter", drafter]].concat())
    };
    measure("eagle", "1").ok();
    assert_eq!(place.json("server-costs.json")["drafter"], "eagle");
    measure("block", "2").fails_naming(&[
        "costs of the model `mock` with `eagle`",
        "`mock` with `block`",
        "--out",
    ]);
    measure("eagle", "2").ok();
    // Rounds with nobody's candidates are not filed under a name.
    let unnamed = ["server", "costs", "--server", &server.url, "--candidates", "1"];
    place.run(&unnamed).fails_naming(&["with `eagle`", "but the server has `mock` and"]);
}

#[test]
fn cells_are_kept_when_a_server_fails_between_blocks() {
    let place = Place::new();
    let costs = |url: &str, blocks: &str| {
        let asked = ["server", "costs", "--server", url, "--candidates", "0", "--rounds", "24"];
        let one = ["--concurrency", "1", "--blocks", blocks, "--out", "kept.json"];
        place.run(&[&asked[..], &one].concat())
    };
    costs(&plain_server().url, "1").ok();
    let kept = place.json("kept.json");
    // The first block, a long and a short answer, only checks the candidates.
    let mock = Mock::serve(0, Fault::BreaksOff(2));
    let named = ["cells in `kept.json` are kept", "the same command measures the others"];
    costs(&mock.url, "3").fails_naming(&named);
    assert_eq!(place.json("kept.json"), kept);
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_any_request() {
    let place = Place::new();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", closed.local_addr().unwrap());
    drop(closed);
    place.write("file", "x");
    for out in ["file/costs.json", "."] {
        let ran = place.run(&costs(&url, "0", &["--out", out]));
        assert!(!ran.stderr.contains("refuses connections"), "{}", ran.stderr);
        ran.fails_naming(&["cannot", &format!("`{}`", out.trim_end_matches("/costs.json"))]);
    }
    // The lock of another process, which adds its cells to the same file.
    for (out, lock) in [("a.json", ".a.json.lock"), ("new/b.json", "new/.b.json.lock")] {
        let held = std::fs::File::create(place.write(lock, "")).unwrap();
        held.try_lock().unwrap();
        place.run(&costs(&url, "0", &["--out", out])).fails_naming(&[
            &format!("`{out}` is in use by another process"),
            "hint: wait for it to end",
        ]);
        drop(held);
        place.run(&costs(&url, "0", &["--out", out])).fails_naming(&["refuses connections"]);
    }
}

/// A survey writes the same settings without a recipe.
fn survey_ends_in_settings(place: &Place) {
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let pair = ["survey", "--target", &target, "--draft", &draft, "--prompts", "train.jsonl"];
    let few = ["--max-new-tokens", "40", "--num-prompts", "16", "--for", "llama.cpp"];
    let survey = |more: &[&str]| place.run(&[&pair[..], &few, more].concat());
    let found = survey(&["--server-costs", "costs.json", "--json"]).json();
    let settings = &found["server"];
    let best = settings["single"]["num_candidates"].as_u64().unwrap();
    let low = &settings["single_speedup"]["low"];
    assert!(best > 0 && low.as_f64().unwrap() >= 1.02, "{settings}");
    let flags = settings["files"][0]["text"].as_str().unwrap();
    assert!(flags.contains(&format!("--spec-draft-n-max {best} ")), "{flags}");
    let shown = survey(&["--server-costs", "costs.json", "--concurrency", "1"]).ok();
    assert!(place.path("survey-llama.cpp/flags.txt").is_file());
    for part in [
        flags.trim_end(),
        "at your load: ",
        "draftsmith server doctor",
        "draftsmith server certify",
    ] {
        assert!(shown.contains(part), "`{part}`: {shown}");
    }
    survey(&[]).fails_naming(&["--server-costs"]);
    // Without a draft there are llama.cpp's look-ups, which need rounds of more rows than these costs have.
    let alone =
        ["survey", "--target", &target, "--prompts", "train.jsonl", "--server-costs", "costs.json"];
    let alone = |more: &[&str]| place.run(&[&alone[..], &few[..4], more].concat());
    alone(&["--for", "vllm"]).fails_naming(&["--draft", "look-ups"]);
    let text = std::fs::read_to_string(place.path("costs.json")).unwrap();
    let mut costs: Value = serde_json::from_str(&text).unwrap();
    let plain = |size: usize| {
        let ms = 10.0 + 0.01 * size as f64;
        json!({ "batch_size": size, "num_candidates": 0, "block_ms": [ms], "tokens_per_round": null })
    };
    costs["cells"] = json!([1, 2, 4, 8].map(plain));
    place.write("rows.json", costs.to_string());
    let rows = ["--server-costs", "rows.json", "--for", "llama.cpp"];
    let found = place
        .run(
            &[
                &["survey", "--target", &target, "--prompts", "train.jsonl"],
                &few[..4],
                &rows,
                &["--json"],
            ]
            .concat(),
        )
        .json();
    assert!(found["server"]["rows"].as_array().unwrap().len() == 4, "{found}");
}

#[test]
fn settings_of_each_server_follow_from_costs_and_recordings() {
    let place = Place::new();
    place.write_small_recipe();
    let text = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let head = text.find("[drafters.draft.head]").unwrap()..text.find("[evaluate]").unwrap();
    place.write(
        "small.toml",
        text.replace(&text[head], "[tune]\nprompts = ['train.jsonl']\nmax_candidate_length = 5\n"),
    );
    place.run(&["record", "small.toml"]).ok();
    let cell = |batch_size: usize, num_candidates: usize| {
        let ms = 10.0
            + 2.0 * (batch_size * (1 + num_candidates)) as f64 / 4.0
            + 0.2 * num_candidates as f64;
        json!({ "concurrency": batch_size, "num_candidates": num_candidates, "block_ms": [ms, ms], "tokens_per_round": null })
    };
    let cells: Vec<Value> =
        [1, 2, 4].into_iter().flat_map(|size| [0, 1, 3, 5].map(|k| cell(size, k))).collect();
    place.write(
        "costs.json",
        json!({ "model": "mock", "num_words": 150, "cells": cells }).to_string(),
    );
    fn tune<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["tune", "small.toml", "--server-costs", "costs.json", "--for"], more].concat()
    }
    for (server, more, file, part) in [
        ("llama.cpp", &[][..], "flags.txt", "--spec-type draft-simple"),
        (
            "vllm",
            &["--load", "1=0.7,4=0.3"],
            "speculative.json",
            "num_speculative_tokens_per_batch_size",
        ),
        ("sglang", &["--concurrency", "2"], "flags.txt", "--speculative-algorithm STANDALONE"),
        (
            "trtllm",
            &["--schedule-keys", "upper", "--rate", "2,100"],
            "speculative.yaml",
            "draft_len_schedule:",
        ),
    ] {
        let shown = place.run(&tune(&[&[server], more].concat())).ok();
        assert!(
            shown.contains("tokens per round: ") && shown.contains("at your load: "),
            "{shown}"
        );
        assert!(
            shown.lines().filter(|line| !line.contains([':', '/'])).all(|line| line.len() <= 80),
            "{shown}"
        );
        let path = format!("checkpoints/small/tuning/{server}-draft-greedy/{file}");
        let text = std::fs::read_to_string(place.path(&path)).unwrap();
        assert!(text.contains(part) && shown.contains(&path), "{text}{shown}");
        // It names its costs and one drafter, and leaves the server's own limits alone.
        assert!(
            shown.starts_with("costs: costs.json, with 0, 1, 3, 5 candidates at 1, 2, 4"),
            "{shown}"
        );
        assert!(shown.contains("\nServe with draft, ") && !shown.contains("--max-"), "{shown}");
        let benchmark = path.replace("flags", "benchmark").replace("speculative", "benchmark");
        let has_rates = ["llama.cpp", "vllm"].contains(&server);
        assert_eq!(place.path(&benchmark).exists(), has_rates, "{benchmark}");
        assert!(!text.contains("synth"), "{text}");
        if server == "vllm" {
            let benchmark = std::fs::read_to_string(place.path(&benchmark)).unwrap();
            assert!(benchmark.contains("synthetic_acceptance_rates"), "{benchmark}");
            assert!(text.contains("[5,1000000,0]"), "{text}");
            let start = format!("{}/{path}", place.path("").canonicalize().unwrap().display());
            assert!(shown.contains(&format!("$(cat {start})")), "{shown}");
        }
    }
    survey_ends_in_settings(&place);
    // Settings that no longer pay are removed.
    let dear = |cell: &Value| {
        let ms = if cell["num_candidates"] == 0 { 10.0 } else { 100.0 };
        json!({ "concurrency": cell["concurrency"], "num_candidates": cell["num_candidates"],
            "block_ms": [ms, ms], "tokens_per_round": null })
    };
    let dear: Vec<Value> = cells.iter().map(dear).collect();
    place.write("dear.json", json!({ "model": "m", "num_words": 1, "cells": dear }).to_string());
    let shown =
        place.run(&["tune", "small.toml", "--for", "vllm", "--server-costs", "dear.json"]).ok();
    assert!(
        shown.contains("removed, because it no longer pays: checkpoints/small/tuning/vllm-draft"),
        "{shown}"
    );
    assert!(shown.contains("No drafter pays in every way of decoding"), "{shown}");
    assert!(shown.contains("Speculation does not pay here"), "{shown}");
    // Over noisy blocks, the same costs on average decide nothing.
    let noisy = |cell: &Value| {
        let mut cell = cell.clone();
        let ms = cell["block_ms"][0].as_f64().unwrap();
        cell["block_ms"] = json!([0.3 * ms, ms, 1.1 * ms, 4.0 * ms]);
        cell
    };
    let noisy: Vec<Value> = cells.iter().map(noisy).collect();
    let noisy = json!({ "model": "m", "drafter": "other", "num_words": 1, "cells": noisy });
    place.write("noisy.json", noisy.to_string());
    let shown =
        place.run(&["tune", "small.toml", "--for", "vllm", "--server-costs", "noisy.json"]).ok();
    let shown = shown.replace('\n', " ");
    assert!(shown.contains("It is not certain that speculation pays here"), "{shown}");
    assert!(shown.contains("No drafter certainly pays in every way of decoding"), "{shown}");
    // The costs are another drafter's, or nobody's.
    assert!(shown.contains("costs: noisy.json of `other`, with 0, 1"), "{shown}");
    assert!(
        shown.contains("the costs of rounds with the drafter other: with draft a round may take"),
        "{shown}"
    );
    assert!(!place.path("checkpoints/small/tuning/vllm-draft-greedy").exists());
    place.run(&tune(&["trtllm"])).fails_naming(&["`draft_len_schedule`", "--schedule-keys"]);
    place
        .run(&["tune", "small.toml", "--for", "vllm"])
        .fails_naming(&["`--server-costs FILE`", "draftsmith server costs"]);
    place.run(&tune(&["vllm", "--concurrency", "9"])).fails_naming(&["outside of the batch sizes"]);
    place.run(&tune(&["vllm", "--load", "4"])).fails_naming(&["--load", "4=0.3"]);
    let drafting: Vec<Value> =
        cells.iter().filter(|cell| cell["num_candidates"] != 0).cloned().collect();
    place.write(
        "costs.json",
        json!({ "model": "m", "num_words": 1, "cells": drafting }).to_string(),
    );
    place.run(&tune(&["vllm"])).fails_naming(&["`costs.json`", "--candidates 0"]);
    place.write(
        "costs.json",
        json!({ "model": "m", "num_words": 1, "cells": [cell(1, 0), cell(1, 9)] }).to_string(),
    );
    place.run(&tune(&["vllm"])).fails_naming(&["up to 5", "--candidates"]);
}

//! Hostile servers: bounded requests and time, one clear error, and the token in nothing that is said or
//! written.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::super::loopback::Pour;
use super::*;

const TOKEN: &str = "sk-hostile/0123+456789";
/// What no message may have.
const SECRETS: [&str; 4] = ["hostile", "0123", "3456789", "c2staG9zdGls"];

/// The result of asking a hostile server for one response, with one retry.
struct Trial {
    error: String,
    num_requests: usize,
}

/// Asks a server that treats every request alike, and checks what any answer must leave true.
fn trial(deed: Deed, timeout_s: f64) -> Trial {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = serve(move |_, _| deed);
    let recipe = ServerRecipe { retries: 1, timeout_s, ..servers(&[&loopback.url]) };
    let secret = Secret::new(TOKEN).expect("a token");
    let mut served = served_with(secret, &recipe, target(), dir.path());
    let begun = Instant::now();
    let error = answer(&mut served, &prompts(1)).expect_err("no response").to_string();
    let elapsed = begun.elapsed().as_secs_f64();
    assert!(elapsed < 2.0 * timeout_s + 10.0, "{elapsed} s: {error}");
    assert!(error.len() < 1500 && !error.contains(char::is_control), "{error}");
    assert_eq!(error.matches("; hint: ").count(), 1, "{error}");
    assert!(error.contains(&format!("the server `{}` ", loopback.url)), "{error}");
    let found = SECRETS.iter().find(|secret| error.contains(**secret));
    assert_eq!(found, None, "{error}");
    let files = fs::read_dir(dir.path()).expect("there").map(|entry| entry.expect("there").path());
    for path in files {
        assert_eq!(fs::read_to_string(path).expect("a journal"), "", "no response is written");
    }
    let requests = loopback.requests();
    let expected = format!("Bearer {TOKEN}");
    assert!(requests.iter().all(|request| request.authorization.as_ref() == Some(&expected)));
    Trial { error, num_requests: requests.len() }
}

/// Checks that a server is asked twice, and that the error has `expected`.
#[track_caller]
fn check(deed: Deed, expected: &str) {
    let Trial { error, num_requests } = trial(deed, 30.0);
    assert!(error.contains(expected), "`{expected}` is not in: {error}");
    assert!(error.contains("the last of 2 times"), "{error}");
    assert_eq!(num_requests, 2, "{error}");
}

fn pour(begin: impl Into<Vec<u8>>, again: impl Into<Vec<u8>>) -> Deed {
    let [begin, again]: [Vec<u8>; 2] = [begin.into(), again.into()];
    Deed::Pour(Pour { begin: begin.leak(), again: again.leak(), pause: Duration::ZERO })
}

/// A successful answer's head, without a length.
const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

/// Chunks of a body without end.
fn chunks(begin: &str, again: &str) -> Deed {
    let again = again.repeat(1 << 14);
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    pour(format!("{CHUNKED}{}", chunk(begin)), chunk(&again))
}

/// An answer with this body.
fn body(text: String) -> Deed {
    Deed::Say(200, "", text.leak())
}

#[test]
fn bodies_without_end_are_left_at_their_bound() {
    let expected = "kB, the most that we read for 12 tokens";
    check(chunks(r#"{"choices":[{"text":""#, "a"), expected);
    check(chunks(r#"{"choices":[{"text":""#, &format!("{TOKEN:?}")), "other than JSON");
    check(chunks(r#"{"choices":[{"token_ids":["#, "1,"), expected);
    check(chunks(r#"{"other":"#, "["), expected);
    check(chunks(r#"{"other":"#, r#"{"a":"#), expected);
    check(chunks(" ", " "), expected);
    check(pour(format!("{HEAD}{{\"model\":\""), TOKEN.repeat(1000)), expected);
    check(pour(HEAD, "<html>".repeat(1000)), "other than JSON: `<html><html>");
    check(chunks("[", "["), "JSON of another form");
}

#[test]
fn packed_bodies_take_no_more_than_their_bound() {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(br#"{"choices":[{"text":""#).expect("in memory");
    let block = [b'a'; 1 << 16];
    (0..3200).for_each(|_| packed.write_all(&block).expect("in memory"));
    let packed = packed.finish().expect("in memory");
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
        packed.len()
    );
    let Trial { error, num_requests } = trial(pour([head.into_bytes(), packed].concat(), ""), 30.0);
    // It is not even unpacked if no other crate turns on ureq's `gzip`.
    assert!(
        error.contains("the most that we read") || error.contains("other than JSON"),
        "{error}"
    );
    assert_eq!(num_requests, 2);
}

#[test]
fn slow_answers_end_with_the_timeout() {
    let slowly = |begin: &str, again: &str| {
        let (begin, again) =
            (begin.to_owned().leak().as_bytes(), again.to_owned().leak().as_bytes());
        Deed::Pour(Pour { begin, again, pause: Duration::from_millis(20) })
    };
    for deed in [
        slowly(HEAD, " "),
        slowly(&format!("{HEAD}{{\"choices\":[{{\"text\":\"{TOKEN}"), "a"),
        slowly(CHUNKED, "1\r\n \r\n"),
        slowly("HTTP/1.1 200 OK\r\nx: ", "a"),
        slowly("HTTP/1.1 200 OK\r\n", "x: 1\r\n"),
        slowly("", "H"),
        slowly("", "HTTP/1.1 100 Continue\r\n\r\n"),
    ] {
        let Trial { error, num_requests } = trial(deed, 0.4);
        assert_eq!(num_requests, 2, "{error}");
    }
    // The status says enough.
    let Trial { error, num_requests } = trial(slowly("HTTP/1.1 401 X\r\n\r\nno", " way"), 0.4);
    assert!(error.contains("answered 401: `no way"), "{error}");
    assert_eq!(num_requests, 1);
}

#[test]
fn heads_without_sense_are_errors() {
    let check = |begin: String, again: &str| {
        let Trial { error, num_requests } = trial(pour(begin, again), 2.0);
        assert_eq!(num_requests, 2, "{error}");
    };
    let ok = "HTTP/1.1 200 OK\r\n";
    check(format!("{ok}x: "), &TOKEN.repeat(100));
    check(ok.to_owned(), &format!("x-key: {TOKEN}\r\n").repeat(100));
    check(String::new(), "HTTP/1.1 100 Continue\r\n\r\n");
    check(String::new(), "HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n");
    check(String::new(), TOKEN);
    check(format!("SSH-2.0-{TOKEN}\r\n"), "");
    check(format!("HTTP/9.9 200 {TOKEN}\r\n\r\n"), "");
    check(format!("{ok}content-length: {TOKEN}\r\n\r\n"), "");
    check(format!("{ok}content-length: -1\r\n\r\n{TOKEN}"), "");
    check(format!("{ok}content-length: 99999999999999999999999\r\n\r\n{TOKEN}"), "");
    check(format!("{ok}content-length: 18446744073709551615\r\n\r\n{TOKEN}"), "");
    check(format!("{ok}content-length: 0\r\n\r\n"), "");
    check(format!("{ok}transfer-encoding: chunked\r\n\r\n{TOKEN}\r\n"), "");
    check(format!("{ok}transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{TOKEN}"), "");
    check(format!("{ok}transfer-encoding: chunked\r\n\r\n-1\r\n{TOKEN}"), "");
    check(format!("{ok}x: \u{1b}[31m\u{0}{TOKEN}\r\n\r\n{TOKEN}"), "");
    check("HTTP/1.1 204 X\r\n\r\n".to_owned(), "");
    check("HTTP/1.1 600 X\r\ncontent-length: 0\r\n\r\n".to_owned(), "");
}

#[test]
fn keys_of_wrong_types_are_errors() {
    let token = serde_json::to_string(TOKEN).expect("JSON");
    let values = [
        "null",
        "true",
        "-1",
        "1.5",
        "1e999",
        "-1e308",
        "99999999999999999999",
        "NaN",
        "-Infinity",
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "[-1]",
        "[1e308]",
        "[\"1\"]",
        "{\"a\":1}",
        &*token,
    ];
    let one = |key: &str, value: &str| match key {
        "choices" => format!(r#"{{"choices":{value}}}"#),
        "usage" | "__verbose" | "model" => format!(r#"{{"{key}":{value},"choices":[{{}}]}}"#),
        "finish_reason" => format!(r#"{{"choices":[{{"text":"a","finish_reason":{value}}}]}}"#),
        _ => format!(r#"{{"choices":[{{"finish_reason":{token},"{key}":{value}}}]}}"#),
    };
    let keys = [
        "choices",
        "usage",
        "__verbose",
        "model",
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "matched_stop",
        "logprobs",
    ];
    let answers: Vec<String> =
        keys.iter().flat_map(|key| values.iter().map(|value| one(key, value))).collect();
    // Each request gets another answer, and none of them is a response.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let num_answers = answers.len();
    let all: Vec<&'static str> = answers.into_iter().map(|text| &*text.leak()).collect();
    let loopback = serve(move |number, _| Deed::Say(200, "", all[number % all.len()]));
    let recipe = ServerRecipe { retries: num_answers, ..servers(&[&loopback.url]) };
    let secret = Secret::new(TOKEN).expect("a token");
    let mut served = served_with(secret, &recipe, target(), dir.path());
    let error = answer(&mut served, &prompts(1)).expect_err("no response").to_string();
    assert_eq!(loopback.requests().len(), num_answers + 1, "{error}");
}

#[test]
fn a_token_that_a_server_repeats_is_masked() {
    let json = serde_json::to_string(TOKEN).expect("JSON");
    let said = |text: &str| text.to_owned().leak();
    for status in [400, 401, 403, 404, 418, 429, 500] {
        let Trial { error, .. } =
            trial(Deed::Say(status, "", said(&format!("bad {TOKEN}!"))), 30.0);
        assert!(error.contains(&format!("answered {status}: `bad ***")), "{error}");
    }
    check(body(format!("<{TOKEN}>")), "other than JSON: `<***");
    check(body(format!("{}{TOKEN}", "a".repeat(290))), "other than JSON");
    let location = format!("location: http://{TOKEN}/?key={TOKEN}");
    let Trial { error, num_requests } = trial(Deed::Say(307, said(&location), ""), 30.0);
    assert!(error.contains("a redirect to `http://***"), "{error}");
    assert_eq!(num_requests, 1, "redirects are not followed");
    let answers = [
        format!(r#"{{"choices":[{{"token_ids":[3],"finish_reason":{json}}}]}}"#),
        format!(r#"{{"choices":{json}}}"#),
        format!(r#"{{"choices":[{{"token_ids":[{json}]}}]}}"#),
        format!(r#"{{{json}:1,"choices":[{{"index":{json}}}]}}"#),
    ];
    for answer in answers {
        check(body(answer), "***");
    }
}

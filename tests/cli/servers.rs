//! `build-data` from a server on loopback: its notes and errors, which never show the token.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Place, Ran, model, read_request};

const TOKEN: &str = "sk-never-said/0123456789";
/// A valid answer.
const ANSWER: &str = r#"{"choices":[{"index":0,"token_ids":[5,6],"finish_reason":"stop"}]}"#;
const FILTERED: &str = r#"{"choices":[{"index":0,"text":"","finish_reason":"content_filter"}]}"#;

/// A server that answers each request, by its number, with the same head and body for all prompts.
struct CannedServer {
    url: String,
    num_requests: Arc<AtomicUsize>,
}

impl CannedServer {
    fn serve(answer: impl Fn(usize) -> (String, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let num_requests = Arc::<AtomicUsize>::default();
        let counter = num_requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (head, body) = answer(counter.fetch_add(1, Ordering::SeqCst));
                // The client may be gone.
                let _ = stream.and_then(|stream| meet(stream, &head, &body));
            }
        });
        Self { url, num_requests }
    }

    /// A server that gives the same answer to everybody.
    fn always(head: &str, body: &str) -> Self {
        let answer = (head.to_owned(), body.to_owned());
        Self::serve(move |_| answer.clone())
    }

    fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::SeqCst)
    }
}

fn meet(mut stream: TcpStream, head: &str, body: &str) -> std::io::Result<()> {
    read_request(&mut BufReader::new(&stream));
    write!(
        stream,
        "HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Builds greedy data of two prompts from a server.
fn build(place: &Place, server: &CannedServer, keys: &str) -> Ran {
    place.write_prompts("train.jsonl", 2);
    place.write(
        "served.toml",
        format!(
            "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 12\ntemperature = 0\n\
             responses = 'server'\n\
             [data.server]\nurls = ['{}']\nmodel = 'tiny'\napi_key_env = 'SERVER_TOKEN'\n\
             concurrency = 1\nretries = 1\n{keys}",
            model("target").display(),
            model("draft").display(),
            server.url
        ),
    );
    place.run_with(&["build-data", "served.toml", "--json"], &[("SERVER_TOKEN", TOKEN)])
}

/// Checks that neither the output nor a file has the token.
#[track_caller]
fn check_unsaid(place: &Place, ran: &Ran) {
    let is_said = |text: &str| text.contains("never") || text.contains("0123456789");
    assert!(!is_said(&ran.stdout) && !is_said(&ran.stderr), "{ran:?}");
    let mut waiting = vec![place.path("")];
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            waiting.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            assert!(!is_said(&String::from_utf8_lossy(&bytes)), "`{}`", path.display());
        }
    }
}

#[test]
fn a_repeated_token_is_neither_printed_nor_written() {
    let in_answer = |change: &str| ANSWER.replace("\"index\":0", change);
    let answers = [
        ("401 X".to_owned(), format!("invalid key {TOKEN}")),
        ("500 X".to_owned(), format!("{{\"error\":\"bad key {TOKEN}\"}}")),
        (format!("500 X\r\nretry-after: {TOKEN}\r\nx-key: {TOKEN}"), String::new()),
        (format!("302 X\r\nlocation: http://other/?key={TOKEN}"), String::new()),
        ("200 X".to_owned(), format!("<p>{TOKEN}</p>")),
        ("200 X".to_owned(), in_answer(&format!("\"index\":\"{TOKEN}\""))),
        ("200 X".to_owned(), ANSWER.replace("stop", TOKEN)),
        (format!("{TOKEN} X"), String::new()),
    ];
    for (head, body) in answers {
        let (place, server) = (Place::new(), CannedServer::always(&head, &body));
        let ran = build(&place, &server, "");
        check_unsaid(&place, &ran);
        ran.fails_naming(&["the server `http://127.0.0.1:", "hint: "]);
        assert!((1..=2).contains(&server.num_requests()), "{head}");
    }
    let other = ANSWER.replace("{\"choices\"", &format!("{{\"model\":\"{TOKEN}\",\"choices\""));
    let (place, server) = (Place::new(), CannedServer::always("200 X", &other));
    let ran = build(&place, &server, "");
    check_unsaid(&place, &ran);
    assert!(ran.stderr.contains("calls its model `***`"), "{}", ran.stderr);
}

#[test]
fn another_model_is_noted_once() {
    let other = ANSWER.replace("{\"choices\"", r#"{"model":"llama-7b","choices""#);
    let (place, server) = (Place::new(), CannedServer::always("200 X", &other));
    let ran = build(&place, &server, "");
    let note = "a server calls its model `llama-7b`, and `tiny` was requested";
    assert_eq!(ran.stderr.matches(note).count(), 1, "{}", ran.stderr);
    ran.ok();
    let same = ANSWER.replace("{\"choices\"", r#"{"model":"/models/Tiny.gguf","choices""#);
    let (place, server) = (Place::new(), CannedServer::always("200 X", &same));
    let ran = build(&place, &server, "");
    assert!(!ran.stderr.contains("calls its model"), "{}", ran.stderr);
    ran.ok();
}

#[test]
fn a_requested_wait_that_is_too_long_is_said() {
    let server = CannedServer::serve(|number| match number {
        0 => ("429 X\r\nretry-after: 1000000000000000000".to_owned(), "later".to_owned()),
        _ => ("200 X".to_owned(), ANSWER.to_owned()),
    });
    let ran = build(&Place::new(), &server, "timeout_s = 2");
    let expected = "answered 429: `later` and requested a wait of 31709791984 years, more than the \
                    timeout; the next request follows in 2 seconds";
    assert!(ran.stderr.contains(expected), "{}", ran.stderr);
    ran.ok();
    assert_eq!(server.num_requests(), 3);
}

#[test]
fn filtered_responses_are_left_out_and_counted() {
    let place = Place::new();
    let server = CannedServer::serve(|number| {
        ("200 X".to_owned(), if number == 0 { FILTERED } else { ANSWER }.to_owned())
    });
    for _ in 0..2 {
        let ran = build(&place, &server, "");
        let note = "1 responses that the servers' content filter stopped are left out";
        assert!(ran.stderr.contains(note), "{}", ran.stderr);
        assert_eq!(ran.json()["num_filtered"], 1);
        assert_eq!(server.num_requests(), 2, "none is requested again");
        std::fs::remove_file(place.path("data/served/responses-00000.parquet")).unwrap();
    }
    let (place, server) = (Place::new(), CannedServer::always("200 X", FILTERED));
    for expected in ["content filter stopped 2 responses, or", "has no row; hint: delete"] {
        let ran = build(&place, &server, "");
        ran.fails_naming(&["the data in `data/served` has no row", expected]);
        assert_eq!(server.num_requests(), 2);
    }
}

#[test]
fn a_token_that_is_no_header_is_refused_without_being_said() {
    let (place, server) = (Place::new(), CannedServer::always("200 X", ANSWER));
    build(&place, &server, "").ok();
    std::fs::remove_dir_all(place.path("data")).unwrap();
    for token in ["never\nsaid", "never\r\nx-said: 1", "never\u{e9}"] {
        let ran = place.run_with(&["build-data", "served.toml"], &[("SERVER_TOKEN", token)]);
        assert!(!ran.stderr.contains("never") && !ran.stderr.contains("said"), "{}", ran.stderr);
        ran.fails_naming(&["`SERVER_TOKEN`", "no HTTP header can have"]);
    }
    assert_eq!(server.num_requests(), 2, "nothing else was sent");
}

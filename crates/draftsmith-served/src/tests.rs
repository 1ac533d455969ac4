//! Served responses equal those that the target gives, and each is requested once even if requests fail.

mod faithful;
mod hostile;
mod states;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use draftsmith_data::{ChatFormat, Prompt, Prompts, TextTokenizer};
use draftsmith_theory::Decoding;
use serde_json::{Value, json};

use super::loopback::{Decoded, Deed, Loopback, LoopbackTarget, Request};
use super::*;

const MAX_NEW_TOKENS: usize = 12;
/// The target's end token.
const EOS: u32 = 1;
/// What the target answers; some are longer than the most tokens.
const ANSWERS: [&str; 3] = [
    "Answer: 820",
    "The item with the weight 97 is the clock.",
    "The wide basket is under the white hammer, and the vase is behind the wide bowl.",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn target_dir() -> PathBuf {
    root().join("checkpoints/tiny/target")
}

fn target() -> TargetSettings {
    let tokenizer = TextTokenizer::from_model_dir(&target_dir()).expect("it is committed");
    TargetSettings {
        vocab_size: tokenizer.vocab_size(),
        tokenizer: Arc::new(tokenizer),
        eos_token_ids: vec![EOS],
        stop_strings: Vec::new(),
        text_end: None,
        context: 256,
        decoding: Decoding::GREEDY,
        max_new_tokens: MAX_NEW_TOKENS,
        seed: 3,
    }
}

/// The target's response: one of the answers.
fn respond(tokenizer: &TextTokenizer, prompt_ids: &[u32]) -> Vec<u32> {
    let answer = ANSWERS[prompt_ids.iter().sum::<u32>() as usize % ANSWERS.len()];
    let mut ids = tokenizer.encode(answer, false).expect("a text");
    ids.push(EOS);
    ids.truncate(MAX_NEW_TOKENS);
    ids
}

/// Serves the target. `deed` decides how to treat each request, given its number.
fn serve(deed: impl Fn(usize, &Request) -> Deed + Send + Sync + 'static) -> Loopback {
    let tokenizer = target().tokenizer;
    let shared = tokenizer.clone();
    let decode = move |prompt_ids: &[u32], body: &Value| {
        assert_eq!(body["max_tokens"], MAX_NEW_TOKENS, "all prompts leave room");
        let ids = respond(&shared, prompt_ids);
        let log_probs = vec![(-0.5, Vec::new()); ids.len()];
        Decoded { is_ended: ids.last() == Some(&EOS), ids, log_probs }
    };
    Loopback::serve(LoopbackTarget { tokenizer, decode }, deed)
}

/// A listener that shows nothing.
struct Silent {
    is_interrupted: bool,
}

impl Listener for Silent {
    fn is_interrupted(&self) -> bool {
        self.is_interrupted
    }

    fn advance(&self) {}

    fn note(&self, _: &str) {}

    fn wait(&self, _: Option<Wait>) {}
}

fn prompts(num: usize) -> Vec<Prompt> {
    let path = root().join("data/tiny/prompts/test.jsonl");
    Prompts::open(&path).expect("there").take(num).map(|prompt| prompt.expect("reads")).collect()
}

fn servers(urls: &[&str]) -> ServerRecipe {
    ServerRecipe {
        urls: urls.iter().map(|url| (*url).to_owned()).collect(),
        model: "tiny".to_owned(),
        api_key_env: None,
        concurrency: 4,
        retries: 8,
        timeout_s: 60.0,
        labels: ServerLabels::Server,
        logprobs: 20,
        max_outside_mass: 0.1,
        states: None,
    }
}

/// A served target that decodes greedily, with its journal in `dir`.
fn served(server: &ServerRecipe, dir: &Path) -> Served {
    served_with(Secret::default(), server, target(), dir)
}

fn served_with(
    secret: Secret,
    server: &ServerRecipe,
    target: TargetSettings,
    dir: &Path,
) -> Served {
    let (journal, hints) = (dir.join("served.jsonl"), ServerHints::OF_RECIPE);
    Served::open(server, secret, target, &journal, hints).expect("opens")
}

/// The next turn of a conversation.
fn next(prompt: &Prompt, texts: &[String]) -> Result<Option<ServedTurn>> {
    let number = texts.len();
    if number == prompt.turns.len() {
        return Ok(None);
    }
    let format = ChatFormat::choose(&target_dir(), None)?;
    let prompt_ids = target().tokenizer.encode_chat(&format, &prompt.messages(number, texts))?;
    Ok(Some(ServedTurn { id: prompt.row_id(number), prompt_ids }))
}

fn answer(served: &mut Served, prompts: &[Prompt]) -> Result<()> {
    let all = prompts.iter().map(Ok);
    served.answer(all, |prompt, texts| next(prompt, texts), &Silent { is_interrupted: false })
}

/// Checks that the responses to first turns equal the target's.
fn check_responses(served: &Served, prompts: &[Prompt]) {
    for prompt in prompts {
        let turn = next(prompt, &[]).expect("a text").expect("a turn");
        let expected = respond(&target().tokenizer, &turn.prompt_ids);
        let response = served.response(&turn.id, &turn.prompt_ids).expect("in the journal");
        assert_eq!(response.ids, expected, "{}", prompt.id);
    }
}

/// Makes an answer say that it reached its limit after two tokens.
fn cut_short(answer: &mut Value) {
    let choice = &mut answer["choices"][0];
    choice["finish_reason"] = json!("length");
    choice["token_ids"].as_array_mut().expect("a list").truncate(2);
}

#[test]
fn failed_requests_are_retried() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let other = r#"{"choices":[{"token_ids":[9999999],"finish_reason":"stop"}]}"#;
    let deeds = [
        Deed::Say(429, "retry-after: 0", "busy"),
        Deed::Say(503, "", "starting"),
        Deed::BreakOff,
        Deed::Say(200, "", "<html>"),
        Deed::Say(200, "", r#"{"choices":[]}"#),
        Deed::Say(200, "", other),
        Deed::Change(|answer| answer["choices"][0]["index"] = json!(1)),
        Deed::Change(|answer| answer["choices"][0]["finish_reason"] = json!("abort")),
        Deed::Change(cut_short),
    ];
    let num_deeds = deeds.len();
    let loopback = serve(move |number, _| deeds.get(number).copied().unwrap_or(Deed::Answer));
    let recipe = ServerRecipe { concurrency: 1, retries: num_deeds, ..servers(&[&loopback.url]) };
    let (prompts, mut served) = (prompts(3), served(&recipe, dir.path()));
    answer(&mut served, &prompts).expect("answers in the end");
    check_responses(&served, &prompts);
    let requests = loopback.requests();
    assert_eq!(requests.len(), num_deeds + prompts.len());
    assert!(requests.iter().all(|request| request.path == "/v1/completions"));
    assert_eq!(requests[0].body, requests[num_deeds].body, "the same request");
}

#[test]
fn a_lasting_failure_is_one_error_with_a_hint() {
    let check = |deed: Deed, change: fn(&mut ServerRecipe), expected: &[&str], num: usize| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let loopback = serve(move |_, _| deed);
        let mut recipe = ServerRecipe { retries: 2, ..servers(&[&loopback.url]) };
        change(&mut recipe);
        let mut served = served(&recipe, dir.path());
        let prompts = prompts(1);
        let error = answer(&mut served, &prompts).expect_err("no answer").to_string();
        let begins = format!("prompt `{}`: the server `{}` ", prompts[0].id, loopback.url);
        assert!(error.starts_with(&begins), "{error}");
        assert!(error.contains("; hint: ") && !error.contains('\n'), "{error}");
        expected.iter().for_each(|expected| assert!(error.contains(expected), "{error}"));
        assert_eq!(loopback.requests().len(), num, "{error}");
    };
    let as_it_is = |_: &mut ServerRecipe| ();
    check(Deed::Say(503, "", "no\nroom"), as_it_is, &["503: `no room`, the last of 3 times"], 3);
    check(Deed::BreakOff, as_it_is, &["3 times; hint: check that it is running"], 3);
    check(
        Deed::Say(200, "", "hello"),
        as_it_is,
        &["answered something other than JSON: `hello`", "the address"],
        3,
    );
    let strange = r#"{"choices":[{"token_ids":[777777],"finish_reason":"stop"}]}"#;
    check(Deed::Say(200, "", strange), as_it_is, &["the token id 777777", "another model"], 3);
    let short: &[&str] =
        &["answered 2 of 12 tokens", "`length`", "server's context, which", "3 times"];
    check(Deed::Change(cut_short), as_it_is, short, 3);
    let counted = r#"{"choices":[{"text":"a b c d e f g h i j k l m n","finish_reason":"length"}],
        "usage":{"completion_tokens":2}}"#;
    check(Deed::Say(200, "", counted), as_it_is, short, 3);
    let text = r#"{"choices":[{"text":"a","finish_reason":"length"}]}"#;
    check(Deed::Say(200, "", text), as_it_is, &["answered 1 of 12 tokens"], 3);
    let moved = Deed::Say(308, "location: https://gpu-2:8000/v1/completions", "moved");
    let expected =
        ["308: a redirect to `https://gpu-2:8000/v1/completions`; hint: redirects are not"];
    check(moved, as_it_is, &expected, 1);
    check(Deed::Say(304, "", ""), as_it_is, &["answered 304: ``"], 1);
    check(Deed::Say(401, "", "who?"), as_it_is, &["answered 401: `who?`", "api_key_env"], 1);
    check(Deed::Say(404, "", "what?"), as_it_is, &["answered 404", "the model's name"], 1);
    // Once with token ids, once as text.
    check(Deed::Say(400, "", "too long"), as_it_is, &["answered 400: `too long`"], 2);
    let impatient = |recipe: &mut ServerRecipe| (recipe.timeout_s, recipe.retries) = (0.2, 0);
    check(Deed::Stall, impatient, &["did not answer in time", "`data.server.timeout_s`"], 1);
}

#[test]
fn a_refused_connection_is_reported_with_the_address() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a port");
    let url = format!("http://{}/v1", listener.local_addr().expect("it is bound"));
    drop(listener);
    let recipe = ServerRecipe { retries: 1, ..servers(&[&url]) };
    let error = answer(&mut served(&recipe, dir.path()), &prompts(1));
    let error = error.expect_err("nobody answers").to_string();
    assert!(error.contains(&format!("the server `{url}` refuses connections")), "{error}");
}

#[test]
fn a_failing_server_is_avoided() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let bad = serve(|_, _| Deed::Say(500, "", "broken"));
    let good = serve(|_, _| Deed::Answer);
    let recipe = ServerRecipe { concurrency: 3, ..servers(&[&bad.url, &good.url]) };
    let (prompts, mut served) = (prompts(20), served(&recipe, dir.path()));
    answer(&mut served, &prompts).expect("one of them answers");
    check_responses(&served, &prompts);
    assert_eq!(good.requests().len(), prompts.len());
    assert!(!bad.requests().is_empty());
    assert!(good.most_at_once() <= 3);
}

#[test]
fn received_responses_are_not_requested_again() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let prompts = prompts(6);
    let fails = |number: usize, _: &Request| match number {
        0..4 => Deed::Answer,
        _ => Deed::Say(401, "", "no more"),
    };
    let first = serve(fails);
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&first.url]) };
    let mut begun = served(&recipe, dir.path());
    answer(&mut begun, &prompts).expect_err("it stops half way");
    drop(begun);
    // As if the process had been killed during a write.
    let path = dir.path().join("served.jsonl");
    let lines = fs::read(&path).expect("there is a journal");
    fs::write(&path, &lines[..lines.len() - 5]).expect("written");
    let second = serve(|_, _| Deed::AnswerAsLlamaCpp);
    for expected in [3, 3] {
        let mut resumed = served(&servers(&[&second.url]), dir.path());
        answer(&mut resumed, &prompts).expect("answers");
        check_responses(&resumed, &prompts);
        assert_eq!(second.requests().len(), expected, "each once");
    }
    // An edited entry that the target cannot have produced is requested again.
    let lines = fs::read_to_string(&path).expect("there is a journal");
    let (first, rest) = lines.split_once("\"response_ids\":[").expect("a response");
    fs::write(&path, format!("{first}\"response_ids\":[4294967295,{rest}")).expect("written");
    let mut resumed = served(&servers(&[&second.url]), dir.path());
    answer(&mut resumed, &prompts).expect("answers");
    check_responses(&resumed, &prompts);
    assert_eq!(second.requests().len(), 4);
}

#[test]
fn the_bearer_token_is_sent_and_never_written() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let token = "sk-0123456789";
    let loopback = serve(move |number, request| {
        let expected = format!("Bearer {token}");
        match request.authorization.as_ref() == Some(&expected) && number > 0 {
            true => Deed::Answer,
            false => Deed::Say(500, "", "again"),
        }
    });
    let (recipe, secret) = (servers(&[&loopback.url]), Secret::new(token).expect("a token"));
    let mut served = served_with(secret, &recipe, target(), dir.path());
    answer(&mut served, &prompts(2)).expect("answers");
    let journal = fs::read_to_string(dir.path().join("served.jsonl")).expect("there");
    assert!(journal.lines().count() == 2 && !journal.contains(token));
}

#[test]
fn no_tokens_are_a_failed_request_unless_an_end_token_can_stand_for_them() {
    let no_tokens = |answer: &mut Value| {
        let choice = &mut answer["choices"][0];
        (choice["token_ids"], choice["finish_reason"]) = (json!([]), json!("stop"));
    };
    for (ends, num_requests) in [(vec![], 3), (vec![2], 1)] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let loopback = serve(move |_, _| Deed::Change(no_tokens));
        let target = TargetSettings { eos_token_ids: ends.clone(), ..target() };
        let recipe = ServerRecipe { retries: 2, ..servers(&[&loopback.url]) };
        let mut served = served_with(Secret::default(), &recipe, target, dir.path());
        let answered = answer(&mut served, &prompts(1));
        assert_eq!(loopback.requests().len(), num_requests);
        let journal = fs::read_to_string(dir.path().join("served.jsonl")).expect("there");
        assert_eq!(journal.lines().count(), ends.len());
        if ends.is_empty() {
            let error = answered.expect_err("no response").to_string();
            assert!(
                error.contains("no tokens") && error.contains("the last of 3 times"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_filtered_response_ends_its_conversation_and_is_not_requested_again() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut prompts = prompts(3);
    for prompt in &mut prompts {
        prompt.turns = vec![prompt.turns[0].clone(); 3];
    }
    // The first conversation's second turn, then the second one's first turn.
    let filter = |answer: &mut Value| {
        let choice = &mut answer["choices"][0];
        (choice["text"], choice["finish_reason"]) = (json!(""), json!("content_filter"));
    };
    let loopback = serve(move |number, _| match number {
        1 | 2 => Deed::Change(filter),
        _ => Deed::Answer,
    });
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&loopback.url]) };
    for _ in 0..2 {
        let mut served = served(&recipe, dir.path());
        answer(&mut served, &prompts).expect("answers");
        assert_eq!(loopback.requests().len(), 2 + 1 + 3);
        assert_eq!(served.num_left_out(), 2);
        let is_filtered = |number: usize, turn| served.is_left_out(&prompts[number].row_id(turn));
        let filtered =
            [(0, 0), (0, 1), (1, 0), (2, 0)].map(|(number, turn)| is_filtered(number, turn));
        assert_eq!(filtered, [false, true, true, false]);
        check_responses(&served, &[prompts[0].clone(), prompts[2].clone()]);
    }
}

#[test]
fn a_wait_that_a_server_requests_is_no_longer_than_the_timeout() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let ages = "retry-after: 1000000000000000000";
    let loopback = serve(|_, _| Deed::Say(429, ages, "later"));
    let recipe = ServerRecipe { retries: 2, timeout_s: 0.5, ..servers(&[&loopback.url]) };
    let begun = Instant::now();
    let error = answer(&mut served(&recipe, dir.path()), &prompts(1));
    assert!(error.expect_err("no answer").to_string().contains("the last of 3 times"));
    let waited = begun.elapsed().as_secs_f64();
    assert!((1.0..20.0).contains(&waited), "twice half a second: {waited}");
}

#[test]
fn a_server_of_text_gets_prompts_as_text() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = serve(|_, _| Deed::AnswerByText);
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&loopback.url]) };
    let (prompts, mut served) = (prompts(3), served(&recipe, dir.path()));
    answer(&mut served, &prompts).expect("answers");
    // Tokenising this target's text gives back its tokens, so they can be compared.
    check_responses(&served, &prompts);
    let is_text: Vec<bool> =
        loopback.requests().iter().map(|request| request.body["prompt"].is_string()).collect();
    assert_eq!(is_text, [false, true, true, true], "ids are tried once");
}

#[test]
fn nothing_is_sent_after_an_interrupt() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = serve(|_, _| Deed::Answer);
    let mut served = served(&servers(&[&loopback.url]), dir.path());
    let prompts = prompts(1);
    let listener = Silent { is_interrupted: true };
    let answered =
        served.answer(prompts.iter().map(Ok), |prompt, texts| next(prompt, texts), &listener);
    assert!(matches!(answered, Err(ServedError::Interrupted)));
    assert!(loopback.requests().is_empty());
}

//! Served responses equal those of the target run locally, and each is requested once even if requests
//! fail.

mod hostile;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::Device;
use draftsmith_data::{DataSet, Incomplete, Prompt, Prompts, read_dir};
use draftsmith_theory::SeededDraws;
use serde_json::{Value, json};

use super::loopback::{Deed, Loopback, Request};
use super::*;
use crate::commands::build_data::{self, Building};
use crate::recipe::{Recipe, ServerLabels};
use crate::responses::Responder;
use crate::workspace::Workspace;

const MAX_NEW_TOKENS: usize = 12;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn workspace() -> Workspace {
    let model = |name: &str| root().join("checkpoints/tiny").join(name);
    Workspace::new(&model("target"), Some(&model("draft")), vec![Device::flex()])
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
    }
}

/// A served target that decodes greedily, with its journal in `dir`.
fn served(server: &ServerRecipe, workspace: &Workspace, dir: &Path) -> Served {
    served_with(Secret::default(), server, workspace, dir)
}

fn served_with(secret: Secret, server: &ServerRecipe, workspace: &Workspace, dir: &Path) -> Served {
    let journal = dir.join("served.jsonl");
    let access = ServerAccess { server, seed: 3, journal };
    let (decoding, console) = (Decoding::GREEDY, Console::silent());
    access.open_with(secret, workspace, decoding, MAX_NEW_TOKENS, &console).expect("opens")
}

fn answer(served: &mut Served, prompts: &[Prompt]) -> Result<()> {
    let console = Console::silent();
    let progress = Progress::new(&console, "servers", "prompts", prompts.len() as u64);
    served.answer(prompts.iter().map(conversation), &console, &progress)
}

fn conversation(prompt: &Prompt) -> Result<Cow<'_, SetPrompt>> {
    Ok(Cow::Owned(SetPrompt::Conversation(prompt.clone())))
}

/// Checks that the responses to first turns equal the target's.
fn check_responses(served: &Served, workspace: &Workspace, prompts: &[Prompt]) {
    let (pair, console) = (workspace.target_alone().expect("there"), Console::silent());
    let responder = Responder {
        target: &pair.target,
        context: workspace.context().expect("there"),
        decoding: Decoding::GREEDY,
        limits: pair.text.limits(MAX_NEW_TOKENS),
        console: &console,
    };
    for prompt in prompts {
        let ids = pair.text.encode(&prompt.messages(0, &[])).expect("a text");
        let mut one = [(&ids[..], SeededDraws::new(0, &[]))];
        let local = responder.respond(&mut one, |_, _| ()).expect("it fits").remove(0);
        let response = served.response(&prompt.row_id(0), &ids).expect("in the journal");
        assert_eq!(response.ids, local.token_ids, "{}", prompt.id);
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
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
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
    let loopback =
        Loopback::serve(move |number, _| deeds.get(number).copied().unwrap_or(Deed::Answer));
    let recipe = ServerRecipe { concurrency: 1, retries: num_deeds, ..servers(&[&loopback.url]) };
    let (prompts, mut served) = (prompts(3), served(&recipe, &workspace, dir.path()));
    answer(&mut served, &prompts).expect("answers in the end");
    check_responses(&served, &workspace, &prompts);
    let requests = loopback.requests();
    assert_eq!(requests.len(), num_deeds + prompts.len());
    assert!(requests.iter().all(|request| request.path == "/v1/completions"));
    assert_eq!(requests[0].body, requests[num_deeds].body, "the same request");
}

#[test]
fn a_lasting_failure_is_one_error_with_a_hint() {
    let workspace = workspace();
    let check = |deed: Deed, change: fn(&mut ServerRecipe), expected: &[&str], num: usize| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let loopback = Loopback::serve(move |_, _| deed);
        let mut recipe = ServerRecipe { retries: 2, ..servers(&[&loopback.url]) };
        change(&mut recipe);
        let mut served = served(&recipe, &workspace, dir.path());
        let prompts = prompts(1);
        let error = format!("{:#}", answer(&mut served, &prompts).expect_err("no answer"));
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
        &["answered something other than JSON: `hello`", "urls"],
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
    check(Deed::Say(404, "", "what?"), as_it_is, &["answered 404", "`data.server.model`"], 1);
    // Once with token ids, once as text.
    check(Deed::Say(400, "", "too long"), as_it_is, &["answered 400: `too long`"], 2);
    let impatient = |recipe: &mut ServerRecipe| (recipe.timeout_s, recipe.retries) = (0.2, 0);
    check(Deed::Stall, impatient, &["did not answer in time", "`data.server.timeout_s`"], 1);
}

#[test]
fn a_refused_connection_is_reported_with_the_address() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a port");
    let url = format!("http://{}/v1", listener.local_addr().expect("it is bound"));
    drop(listener);
    let recipe = ServerRecipe { retries: 1, ..servers(&[&url]) };
    let error = answer(&mut served(&recipe, &workspace, dir.path()), &prompts(1));
    let error = format!("{:#}", error.expect_err("nobody answers"));
    assert!(error.contains(&format!("the server `{url}` refuses connections")), "{error}");
}

#[test]
fn a_failing_server_is_avoided() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let bad = Loopback::serve(|_, _| Deed::Say(500, "", "broken"));
    let good = Loopback::serve(|_, _| Deed::Answer);
    let recipe = ServerRecipe { concurrency: 3, ..servers(&[&bad.url, &good.url]) };
    let (prompts, mut served) = (prompts(20), served(&recipe, &workspace, dir.path()));
    answer(&mut served, &prompts).expect("one of them answers");
    check_responses(&served, &workspace, &prompts);
    assert_eq!(good.requests().len(), prompts.len());
    assert!(!bad.requests().is_empty());
    assert!(good.most_at_once() <= 3);
}

#[test]
fn received_responses_are_not_requested_again() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let prompts = prompts(6);
    let fails = |number: usize, _: &Request| match number {
        0..4 => Deed::Answer,
        _ => Deed::Say(401, "", "no more"),
    };
    let first = Loopback::serve(fails);
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&first.url]) };
    let mut begun = served(&recipe, &workspace, dir.path());
    answer(&mut begun, &prompts).expect_err("it stops half way");
    drop(begun);
    // As if the process had been killed during a write.
    let path = dir.path().join("served.jsonl");
    let lines = fs::read(&path).expect("there is a journal");
    fs::write(&path, &lines[..lines.len() - 5]).expect("written");
    let second = Loopback::serve(|_, _| Deed::AnswerAsLlamaCpp);
    for expected in [3, 3] {
        let mut resumed = served(&servers(&[&second.url]), &workspace, dir.path());
        answer(&mut resumed, &prompts).expect("answers");
        check_responses(&resumed, &workspace, &prompts);
        assert_eq!(second.requests().len(), expected, "each once");
    }
    // An edited entry that the target cannot have produced is requested again.
    let lines = fs::read_to_string(&path).expect("there is a journal");
    let (first, rest) = lines.split_once("\"response_ids\":[").expect("a response");
    fs::write(&path, format!("{first}\"response_ids\":[4294967295,{rest}")).expect("written");
    let mut resumed = served(&servers(&[&second.url]), &workspace, dir.path());
    answer(&mut resumed, &prompts).expect("answers");
    check_responses(&resumed, &workspace, &prompts);
    assert_eq!(second.requests().len(), 4);
}

#[test]
fn the_bearer_token_is_sent_and_never_written() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    // Every process has this variable.
    let (name, value) = ("PATH", std::env::var("PATH").expect("it is set"));
    let expected = format!("Bearer {}", value.trim());
    let loopback = Loopback::serve(move |number, request| {
        match request.authorization.as_deref() == Some(&*expected) && number > 0 {
            true => Deed::Answer,
            false => Deed::Say(500, "", "again"),
        }
    });
    let api_key_env = Some(name.to_owned());
    let recipe = ServerRecipe { api_key_env, ..servers(&[&loopback.url]) };
    let secret = Secret::read(name).expect("it is set");
    let mut served = served_with(secret, &recipe, &workspace, dir.path());
    answer(&mut served, &prompts(2)).expect("answers");
    let journal = fs::read_to_string(dir.path().join("served.jsonl")).expect("there");
    assert!(journal.lines().count() == 2 && !journal.contains(value.trim()));
    let missing = ServerRecipe { api_key_env: Some("NO_SUCH_VARIABLE".to_owned()), ..recipe };
    let access =
        ServerAccess { server: &missing, seed: 3, journal: dir.path().join("served.jsonl") };
    let opened = access.open(&workspace, Decoding::GREEDY, MAX_NEW_TOKENS, &Console::silent());
    let error = opened.err().expect("it is not set").to_string();
    assert!(error.contains("`NO_SUCH_VARIABLE`, which `data.server.api_key_env`"), "{error}");
}

#[test]
fn no_tokens_are_a_failed_request_unless_an_end_token_can_stand_for_them() {
    let no_tokens = |answer: &mut Value| {
        let choice = &mut answer["choices"][0];
        (choice["token_ids"], choice["finish_reason"]) = (json!([]), json!("stop"));
    };
    for (ends, num_requests) in [(vec![], 3), (vec![2], 1)] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let loopback = Loopback::serve(move |_, _| Deed::Change(no_tokens));
        let mut workspace = workspace();
        workspace.ends.eos_token_ids = Some(ends.clone());
        let recipe = ServerRecipe { retries: 2, ..servers(&[&loopback.url]) };
        let mut served = served(&recipe, &workspace, dir.path());
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
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let mut prompts = prompts(3);
    for prompt in &mut prompts {
        prompt.turns = vec![prompt.turns[0].clone(); 3];
    }
    // The first conversation's second turn, then the second one's first turn.
    let filter = |answer: &mut Value| {
        let choice = &mut answer["choices"][0];
        (choice["text"], choice["finish_reason"]) = (json!(""), json!("content_filter"));
    };
    let loopback = Loopback::serve(move |number, _| match number {
        1 | 2 => Deed::Change(filter),
        _ => Deed::Answer,
    });
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&loopback.url]) };
    for _ in 0..2 {
        let mut served = served(&recipe, &workspace, dir.path());
        answer(&mut served, &prompts).expect("answers");
        assert_eq!(loopback.requests().len(), 2 + 1 + 3);
        assert_eq!(served.num_filtered(), 2);
        let num_turns = |prompt| served.unfiltered(prompt).map(|prompt| prompt.turns.len());
        assert_eq!(prompts.iter().map(num_turns).collect::<Vec<_>>(), [Some(1), None, Some(3)]);
        check_responses(&served, &workspace, &[prompts[0].clone(), prompts[2].clone()]);
    }
}

#[test]
fn a_wait_that_a_server_requests_is_no_longer_than_the_timeout() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let ages = "retry-after: 1000000000000000000";
    let loopback = Loopback::serve(|_, _| Deed::Say(429, ages, "later"));
    let recipe = ServerRecipe { retries: 2, timeout_s: 0.5, ..servers(&[&loopback.url]) };
    let begun = Instant::now();
    let error = answer(&mut served(&recipe, &workspace, dir.path()), &prompts(1));
    assert!(error.expect_err("no answer").to_string().contains("the last of 3 times"));
    let waited = begun.elapsed().as_secs_f64();
    assert!((1.0..20.0).contains(&waited), "twice half a second: {waited}");
}

#[test]
fn a_server_of_text_gets_prompts_as_text() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let loopback = Loopback::serve(|_, _| Deed::AnswerByText);
    let recipe = ServerRecipe { concurrency: 1, ..servers(&[&loopback.url]) };
    let (prompts, mut served) = (prompts(3), served(&recipe, &workspace, dir.path()));
    answer(&mut served, &prompts).expect("answers");
    // Tokenising this target's text gives back its tokens, so they can be compared.
    check_responses(&served, &workspace, &prompts);
    let is_text: Vec<bool> =
        loopback.requests().iter().map(|request| request.body["prompt"].is_string()).collect();
    assert_eq!(is_text, [false, true, true, true], "ids are tried once");
}

#[test]
fn nothing_is_sent_after_an_interrupt() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let loopback = Loopback::serve(|_, _| Deed::Answer);
    let mut served = served(&servers(&[&loopback.url]), &workspace, dir.path());
    let mut console = Console::silent();
    console.deadline = Some(Instant::now());
    let progress = Progress::new(&console, "servers", "prompts", 1);
    let prompts = prompts(1);
    let error = served.answer([conversation(&prompts[0])], &console, &progress);
    assert!(error.expect_err("stopped").is::<Interrupted>());
    assert!(loopback.requests().is_empty());
}

/// Builds a recipe's data; `more` sets where responses come from.
fn built(dir: &Path, name: &str, more: &str) -> DataSet {
    let model = |name: &str| root().join("checkpoints/tiny").join(name).display().to_string();
    let lines = fs::read_to_string(root().join("data/tiny/prompts/test.jsonl")).expect("there");
    let lines: Vec<&str> = lines.lines().take(40).collect();
    let talk = r#"{"turns": ["What is 47 + 85?", "And twice that?"]}"#;
    fs::write(dir.join("set.jsonl"), format!("{}\n{talk}\n", lines.join("\n"))).expect("written");
    let text = format!(
        "seed = 5\n[models]\ntarget = '{}'\ndraft = '{}'\n[data]\nprompts = ['{}']\n\
         max_new_tokens = 24\n{more}",
        model("target"),
        model("draft"),
        dir.join("set.jsonl").display(),
    );
    let mut recipe: Recipe = toml::from_str(&text).expect("a recipe");
    recipe.name = dir.join(name).display().to_string();
    build_data::run(&recipe, Building::ALL, &workspace(), &Console::silent()).expect("built");
    read_dir(&dir.join(name), Incomplete::Refused).expect("whole")
}

#[test]
fn greedy_data_is_the_same_from_a_server_and_from_weights() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = Loopback::serve(|number, _| match number % 7 {
        3 => Deed::BreakOff,
        5 => Deed::AnswerAsLlamaCpp,
        _ => Deed::Answer,
    });
    let server = format!(
        "temperature = 0\nresponses = 'server'\n[data.server]\nurls = ['{}']\nmodel = 'tiny'\n\
         labels = 'weights'\n",
        loopback.url
    );
    let served = built(dir.path(), "served", &server);
    let local = built(dir.path(), "local", "temperature = 0\n");
    assert_eq!(served.rows, local.rows);
    assert_eq!(served.rows.len(), 42, "one row per assistant turn");
    assert_eq!(served.provenance.served_model.as_deref(), Some("tiny"));
    // A deleted shard is built again from the journal.
    let num_requests = loopback.requests().len();
    let shard = fs::read(dir.path().join("served/responses-00000.parquet")).expect("there");
    fs::remove_file(dir.path().join("served/responses-00000.parquet")).expect("removed");
    built(dir.path(), "served", &server);
    assert_eq!(loopback.requests().len(), num_requests);
    assert!(fs::read(dir.path().join("served/responses-00000.parquet")).expect("there") == shard);
}

//! Tests of jobs that send requests to servers: the token, the prompts, interrupts, and the
//! resulting data.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::Device;
use draftsmith_data::{DataSet, Incomplete, Prompt, Prompts, read_dir};
use draftsmith_served::{Served, ServerHints, ServerLabels, ServerRecipe};
use serde_json::{Value, json};

use anyhow::Result;
use draftsmith_recipe::{Interrupted, Recipe, Silent, Watch, Workspace};
use draftsmith_theory::Decoding;
use draftsmith_tune::answers::unfiltered;
use draftsmith_tune::build_data::DamagedShards;
use draftsmith_tune::conversation::SetPrompt;
use draftsmith_tune::server_access::{ServerAccess, ask_servers};
use std::borrow::Cow;

use crate::commands::StageJob;
use crate::commands::build_data;
use crate::console::Console;
use crate::loopback::{self, Deed};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn workspace() -> Workspace {
    let model = |name: &str| root().join("checkpoints/tiny").join(name);
    let drafts = [(draftsmith_theory::DrafterId::DRAFT, &*model("draft"))];
    Workspace::new(&model("target"), &drafts, vec![Device::flex()])
}

fn prompts(num: usize) -> Vec<Prompt> {
    let path = root().join("data/tiny/prompts/test.jsonl");
    Prompts::open(&path).expect("there").take(num).map(|prompt| prompt.expect("reads")).collect()
}

fn servers(url: &str) -> ServerRecipe {
    ServerRecipe {
        urls: vec![url.to_owned()],
        model: "tiny".to_owned(),
        concurrency: 1,
        labels: ServerLabels::Server,
        ..ServerRecipe::default()
    }
}

/// Opens a target on servers that decodes greedily, with its journal in `dir`.
fn open(server: &ServerRecipe, workspace: &Workspace, dir: &Path) -> Result<Served> {
    let (journal, hints) = (dir.join("served.jsonl"), ServerHints::OF_RECIPE);
    let access = ServerAccess { server, seed: 3, journal, hints };
    access.open(workspace, Decoding::GREEDY, 12, &Silent)
}

fn answer(
    served: &mut Served,
    workspace: &Workspace,
    prompts: &[Prompt],
    watch: &dyn Watch,
) -> Result<()> {
    let progress = watch.bar("servers", "prompts", prompts.len() as u64);
    let all = prompts.iter().map(|prompt| Ok(Cow::Owned(SetPrompt::Conversation(prompt.clone()))));
    ask_servers(served, all, workspace.text_side().expect("there"), watch, &*progress)
}

#[test]
fn the_bearer_token_of_the_environment_is_sent_and_never_written() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    // Every process has the variable `PATH`.
    let (name, value) = ("PATH", std::env::var("PATH").expect("it is set"));
    let expected = format!("Bearer {}", value.trim());
    let loopback = loopback::serve(move |number, request| {
        match request.authorization.as_deref() == Some(&*expected) && number > 0 {
            true => Deed::Answer,
            false => Deed::Say(500, "", "again"),
        }
    });
    let server = ServerRecipe { api_key_env: Some(name.to_owned()), ..servers(&loopback.url) };
    let mut served = open(&server, &workspace, dir.path()).expect("it is set");
    answer(&mut served, &workspace, &prompts(2), &Silent).expect("answers");
    let journal = fs::read_to_string(dir.path().join("served.jsonl")).expect("there");
    assert!(journal.lines().count() == 2 && !journal.contains(value.trim()));
    let missing = ServerRecipe { api_key_env: Some("NO_SUCH_VARIABLE".to_owned()), ..server };
    let error = open(&missing, &workspace, dir.path()).err().expect("it is not set").to_string();
    assert!(error.contains("`NO_SUCH_VARIABLE`, which `data.server.api_key_env`"), "{error}");
}

#[test]
fn a_prompt_keeps_the_turns_before_a_filtered_response() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let mut prompts = prompts(3);
    for prompt in &mut prompts {
        prompt.turns = vec![prompt.turns[0].clone(); 3];
    }
    // The filter stops the first conversation's second turn, then the second conversation's first
    // turn.
    let filter = |answer: &mut Value| {
        let choice = &mut answer["choices"][0];
        (choice["text"], choice["finish_reason"]) = (json!(""), json!("content_filter"));
    };
    let loopback = loopback::serve(move |number, _| match number {
        1 | 2 => Deed::Change(filter),
        _ => Deed::Answer,
    });
    let mut served = open(&servers(&loopback.url), &workspace, dir.path()).expect("opens");
    answer(&mut served, &workspace, &prompts, &Silent).expect("answers");
    let num_turns = |prompt: &Prompt| unfiltered(&served, prompt).map(|prompt| prompt.turns.len());
    assert_eq!(prompts.iter().map(num_turns).collect::<Vec<_>>(), [Some(1), None, Some(3)]);
}

#[test]
fn an_interrupted_request_for_responses_is_an_interrupted_job() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let mut served = open(&servers(&loopback.url), &workspace, dir.path()).expect("opens");
    let mut watch = Console::silent();
    watch.deadline = Some(Instant::now());
    let error = answer(&mut served, &workspace, &prompts(1), &watch).expect_err("stopped");
    assert!(error.is::<Interrupted>());
    assert!(loopback.requests().is_empty());
}

/// Builds a recipe's data; `more` sets the source of responses.
fn built(dir: &Path, name: &str, more: &str) -> DataSet {
    let model = |name: &str| root().join("checkpoints/tiny").join(name).display().to_string();
    let lines = fs::read_to_string(root().join("data/tiny/prompts/test.jsonl")).expect("there");
    let lines: Vec<&str> = lines.lines().take(40).collect();
    let talk = r#"{"turns": ["What is 47 + 85?", "And twice that?"]}"#;
    fs::write(dir.join("set.jsonl"), format!("{}\n{talk}\n", lines.join("\n"))).expect("written");
    let text = format!(
        "seed = 5\n[models]\ntarget = '{}'\n\
         [drafters.draft]\nkind = 'model'\nmodel = '{}'\n[data]\nprompts = ['{}']\n\
         max_new_tokens = 24\n{more}",
        model("target"),
        model("draft"),
        dir.join("set.jsonl").display(),
    );
    let mut recipe: Recipe = toml::from_str(&text).expect("a recipe");
    recipe.name = dir.join(name).display().to_string();
    build_data::run(
        StageJob::new(&recipe, &workspace(), &Console::silent()),
        DamagedShards::Refused,
    )
    .expect("built");
    read_dir(&dir.join(name), Incomplete::Refused).expect("whole")
}

#[test]
fn greedy_data_is_the_same_from_a_server_and_from_weights() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = loopback::serve(|number, _| match number % 7 {
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
    // A deleted shard is rebuilt from the journal, without requests.
    let num_requests = loopback.requests().len();
    let shard = fs::read(dir.path().join("served/responses-00000.parquet")).expect("there");
    fs::remove_file(dir.path().join("served/responses-00000.parquet")).expect("removed");
    built(dir.path(), "served", &server);
    assert_eq!(loopback.requests().len(), num_requests);
    assert!(fs::read(dir.path().join("served/responses-00000.parquet")).expect("there") == shard);
}

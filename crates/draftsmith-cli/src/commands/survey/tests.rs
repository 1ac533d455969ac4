//! Tests that a survey of a target on servers equals a survey of its weights, in everything that
//! servers return.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use clap::Parser;
use draftsmith_model::WeightDtype;
use serde_json::Value;

use draftsmith_servers::survey::{Survey, SurveyResult, survey};

use super::SurveyArguments;
use crate::console::Console;
use crate::loopback::{self, Deed};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    arguments: SurveyArguments,
}

fn embedded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name)
}

/// Surveys a target's directory with the embedded draft model, and returns the JSON document.
fn surveyed(target: &Path, dir: &Path, more: &[&str]) -> Result<Value, String> {
    let prompts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tiny/prompts/train.jsonl");
    let (draft, costs) = (embedded("draft"), dir.join("costs.toml"));
    let paths = [target, &draft, &prompts, &costs].map(|path| path.display().to_string());
    let [target, draft, prompts, costs] = &paths;
    let line = ["survey", "--target", target, "--draft", draft, "--prompts", prompts];
    let given = ["--costs", costs, "--num-prompts", "16", "--max-new-tokens", "32"];
    let line = Line::parse_from([&line[..], &given, more].concat());
    let settings = line.arguments.settings(3, WeightDtype::F32).expect("settings");
    let found = survey(&settings, &Device::flex(), &Console::silent());
    let found = found.map_err(|error| format!("{error:#}"))?;
    let text = super::show::survey(&found, None, false).expect("it can be shown");
    assert_eq!(text.contains("a perfect head: "), has_ceiling(&found), "{text}");
    Ok(serde_json::to_value(&found).expect("it is JSON"))
}

fn has_ceiling(survey: &Survey) -> bool {
    let SurveyResult::Pair(pair) = &survey.found else { panic!("a pair") };
    pair.head.ceiling.is_some_and(|ceiling| ceiling.value > 0.0)
}

/// Creates a directory with the target's tokenizer and configuration, costs, and the server's
/// settings.
fn without_weights(url: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = dir.path().join("target");
    std::fs::create_dir(&target).expect("made");
    for entry in std::fs::read_dir(embedded("target")).expect("it is committed") {
        let path = entry.expect("it is there").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            std::fs::copy(&path, target.join(path.file_name().expect("a name"))).expect("copied");
        }
    }
    let costs = "draft_ms = 1.0\nrows_ms = [10.0, 10.5, 11.0, 11.5, 12.0]\n";
    std::fs::write(dir.path().join("costs.toml"), costs).expect("written");
    let server = format!("urls = ['{url}']\nmodel = 'tiny'\n");
    std::fs::write(dir.path().join("server.toml"), server).expect("written");
    (dir, target)
}

#[test]
fn a_served_target_is_surveyed_as_its_weights_are() {
    let loopback = loopback::serve(|_, request| match request.path.ends_with("/models") {
        true => Deed::Say(200, "", r#"{ "data": [{ "id": "tiny" }] }"#),
        false => Deed::Answer,
    });
    let (dir, target) = without_weights(&loopback.url);
    let served = surveyed(&target, dir.path(), &["--server", &loopback.url]).expect("a survey");
    let own = surveyed(&embedded("target"), dir.path(), &[]).expect("a survey");
    let requests = loopback.requests();
    assert_eq!(requests.len(), 1 + 16, "the list of models, and an answer for each prompt");
    assert!(requests[1..].iter().all(|request| request.body["model"] == "tiny"));
    // These are unknown for greedy answers from servers.
    assert_eq!((&served["overlap"], &served["head"]["ceiling"]), (&Value::Null, &Value::Null));
    assert!(own["overlap"].is_object() && own["head"]["ceiling"].is_object());
    let same = [
        "num_answers",
        "num_tokens",
        "agreement",
        "share_accepted",
        "acceptance_by_position",
        "by_text_position",
        "costs",
        "fixed_lengths",
        "oracle",
        "untrained",
        "untrained_gain",
        "look_ups",
    ];
    for key in same {
        assert_eq!(served[key], own[key], "{key}");
    }
    let probe = |of: &Value| (of["head"]["probe"]["explained"].clone(), of["rules"].clone());
    let ((explained, rules), (own_explained, own_rules)) = (probe(&served), probe(&own));
    assert_eq!(explained, own_explained);
    // The gains with a perfect head are left out.
    let names = |rules: &Value| -> Vec<(Value, Value, Value)> {
        let rules = rules.as_array().expect("a list").iter();
        rules
            .map(|row| (row["stop_rule"].clone(), row["setting"].clone(), row["gain"].clone()))
            .collect()
    };
    assert!(names(&rules).len() > 5);
    assert_eq!(names(&rules), names(&own_rules));
}

#[test]
fn a_sampled_served_target_is_surveyed_by_its_log_probabilities() {
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let (dir, target) = without_weights(&loopback.url);
    let server = dir.path().join("server.toml").display().to_string();
    let more = ["--server", &server, "--temperature", "1.0", "--top-k", "5"];
    let served = surveyed(&target, dir.path(), &more).expect("a survey");
    let own = surveyed(&embedded("target"), dir.path(), &["--temperature", "1.0", "--top-k", "5"]);
    let own = own.expect("a survey");
    let near = |key: &str| {
        let [served, own] = [&served, &own].map(|of| of[key]["value"].as_f64().expect("a number"));
        // The samples differ for the same prompts, some 400 tokens in total.
        assert!((served - own).abs() < 0.12, "{key}: {served} and {own}");
    };
    near("agreement");
    near("overlap");
    assert!(served["head"]["ceiling"].is_null());
    assert!(served["verdict"]["sentence"].as_str().expect("a text").len() > 20);
}

#[test]
fn unsupported_served_surveys_are_refused() {
    let (dir, target) = without_weights("http://127.0.0.1:1/v1");
    let server = dir.path().join("server.toml");
    let path = server.display().to_string();
    let refused = |more: &[&str], expected: &str| {
        let message = surveyed(&target, dir.path(), &[&["--server", &path], more].concat());
        let message = message.expect_err("refused");
        assert!(message.contains(expected), "{message}");
    };
    refused(&["--temperature", "1.0", "--repetition-penalty", "1.2"], "a repetition penalty");
    std::fs::write(&server, "urls = ['http://a/v1']\nmodel = 'm'\nlabels = 'weights'").expect("ok");
    refused(&[], "`labels` of the server is `weights`");
    std::fs::write(&server, "urls = ['http://a/v1']\nmodell = 'm'").expect("written");
    refused(&[], "modell");
    std::fs::write(&server, "urls = []\nmodel = 'm'").expect("written");
    refused(&[], "`data.server.urls` is empty");
    let line = ["survey", "--target", "t", "--prompts", "p", "--server", "s"];
    assert!(Line::try_parse_from(line).is_err_and(|error| error.to_string().contains("--draft")));
}

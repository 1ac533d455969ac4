//! Reads the table `[data.server]` from a file, and checks recipes whose target runs on servers.

use std::path::Path;

use anyhow::Result;
use draftsmith_served::ServerRecipe;
use draftsmith_train::{HeadLabels, HeadTraining, Teaching};

use super::Recipe;
use super::keys::{read_keys, require};
use crate::workspace::LayersNeeded;

/// Reads the keys of `[data.server]` from a separate file.
///
/// # Errors
/// If the file cannot be read, or a key is unknown or has an invalid value.
pub fn read_server(path: &Path) -> Result<ServerRecipe> {
    read_keys("server", path, |server: &ServerRecipe| Ok(server.check()?))
}

/// Checks that drafters read hidden states from servers exactly if these give them.
///
/// # Errors
/// If the table `[data.server.states]` is missing, or a drafter would run layers that are not here.
pub(super) fn check_states(recipe: &Recipe) -> Result<()> {
    let are_given = recipe.states_server().is_some();
    for (id, drafter) in recipe.drafters.iter() {
        let Some(training) = drafter.kind.training() else { continue };
        let key = format!("drafters.{id}.features");
        require(
            are_given || !training.is_served(),
            &key,
            "is `server`, and no server gives the target's hidden states; hint: set `data.responses = \"server\"` and \
             name the directories of the servers' states in `data.server.states.dirs`",
        )?;
        require(
            !are_given || training.is_served() || drafter.kind.layers_needed() != LayersNeeded::All,
            &key,
            "is not `server`, but the target's layers run on servers; hint: set it to `server`, or remove the table \
             `[data.server.states]`",
        )?;
    }
    Ok(())
}

/// Checks that nothing in a recipe with a target on servers needs the target's weights.
///
/// # Errors
/// If a key requires the weights. The message names the key.
pub(super) fn check_without_weights(recipe: &Recipe) -> Result<()> {
    const WEIGHTS: &str =
        "the target's weights, which are not read where `data.server.labels` is `server`";
    for (id, training) in recipe.trained_self_drafts() {
        require(
            training.lessons().teacher != Teaching::Target || training.is_served(),
            &format!("drafters.{id}.teacher"),
            &format!(
                "is `target`, which needs {WEIGHTS}; hint: `response` needs only the layers before the exit, and \
                 servers give the target's states to drafters of the kinds `eagle3` and `block` (`features = \"server\"`)"
            ),
        )?;
    }
    let is_greedy = recipe.data.as_ref().is_some_and(|data| data.decoding().is_greedy());
    for (id, drafter) in recipe.drafters.iter() {
        let Some(head) = drafter.head_training() else { continue };
        let HeadTraining { labels, rollout_length: length, .. } = head;
        require(
            is_greedy || *labels != HeadLabels::Rollouts || *length == 1,
            &format!("drafters.{id}.head.rollout_length"),
            &format!("is {length}, and labels after a rejected candidate need {WEIGHTS}"),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(more: &str) -> Result<(), String> {
        let text = format!("name = 'a'\n[models]\ntarget = 't'\n[data]\nprompts = ['p']\n{more}");
        let recipe: Recipe = toml::from_str(&text).map_err(|error| error.to_string())?;
        recipe.data.expect("a section").check().map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn a_teacher_that_needs_the_targets_weights_is_refused_for_every_kind() {
        for kind in ["kind = 'adapter'\nexit_layer = 1", "kind = 'eagle3'"] {
            let of = |teacher: &str| {
                let text = format!("[models]\ntarget = 't'\n[drafters.it]\n{kind}\n{teacher}");
                check_without_weights(&toml::from_str(&text).expect("a recipe"))
            };
            let message = of("").expect_err("refused").to_string();
            assert!(message.contains("`drafters.it.teacher` is `target`"), "{message}");
            of("teacher = 'response'").expect("it learns from tokens");
        }
    }

    fn check_server(keys: &str) -> Result<(), String> {
        let model = if keys.contains("model") { "" } else { "model = 'm'" };
        check(&format!("responses = 'server'\n[data.server]\n{model}\n{keys}"))
    }

    #[test]
    fn messages_name_the_invalid_key() {
        let url = "urls = ['http://gpu:8000/v1', 'https://other/v1/']";
        check_server(url).expect("a server");
        let refused = |checked: Result<(), String>, expected: &str| {
            let message = checked.expect_err("refused");
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains("secret"), "{message}");
        };
        refused(check("responses = 'server'"), "there is no table `[data.server]`");
        let table = format!("[data.server]\nmodel = 'm'\n{url}");
        refused(check(&table), "but `data.responses` is not `server`");
        refused(check_server("urls = []"), "`data.server.urls` is empty");
        let strange = [
            "gpu:8000",
            "gpu",
            "/v1",
            "",
            "http://",
            "http:///v1",
            "http://:8000/v1",
            "ftp://a/v1",
            "http://a/v1?key=secret",
            "http://a/v1#secret",
            "http://a b/v1",
            "http://gpu:99999/v1",
            "http://gpu:65536/v1",
            "http://gpu:0/v1",
            "http://gpu:/v1",
            "http://gpu:x/v1",
            "http://gpu:-1/v1",
            "http://[::1",
            "http://[::1/v1",
            "http://[::1]:99999/v1",
            "http://[::1]secret/v1",
        ];
        for url in strange {
            refused(check_server(&format!("urls = ['{url}']")), "`data.server.urls` has an entry");
        }
        refused(check_server("urls = [\"http://gpu:8000/v1\\nhost: secret\"]"), "has an entry");
        for url in
            ["http://[::1]:8000/v1", "http://[::1]", "https://gpu:65535/v1/", "http://10.0.0.1:1"]
        {
            check_server(&format!("urls = ['{url}']")).expect("a server");
        }
        refused(check_server("urls = ['http://me:secret@a/v1']"), "`data.server.api_key_env`");
        let with = |key: &str| check_server(&format!("{url}\n{key}"));
        refused(with("model = ''"), "`data.server.model` is empty");
        refused(with("concurrency = 0"), "`data.server.concurrency` is 0");
        refused(with("timeout_s = 0"), "`data.server.timeout_s` is 0");
        refused(with("timeout_s = nan"), "`data.server.timeout_s` is NaN");
        refused(with("logprobs = 0"), "`data.server.logprobs` is 0");
        refused(with("max_outside_mass = 0"), "`data.server.max_outside_mass` is 0");
        refused(with("api_key = 'x'"), "api_key");
    }

    #[test]
    fn keys_that_need_weights_are_refused() {
        let refused = |more: &str, expected: &str| {
            let text = format!(
                "name = 'a'\n[models]\ntarget = 't'\n[data]\nprompts = ['p']\n\
                 responses = 'server'\n[data.server]\nurls = ['http://a/v1']\nmodel = 'm'\n{more}"
            );
            let recipe: Recipe = toml::from_str(&text).expect("a recipe");
            let message = recipe.check().expect_err("refused").to_string();
            let names = message.contains(expected) && message.contains("`data.server.labels`");
            assert!(names, "{message}");
        };
        let adapter = "[drafters.a]\nkind = 'adapter'\nexit_layer = 1\n";
        refused(adapter, "`drafters.a.teacher` is `target`");
        let head =
            "teacher = 'response'\n[drafters.a.head]\nlabels = 'rollouts'\nrollout_length = 2\n";
        refused(&format!("{adapter}{head}"), "`drafters.a.head.rollout_length` is 2");
        let rollouts = "[drafters.d]\nkind = 'model'\nmodel = 'd'\n[drafters.d.head]\n\
                        labels = 'rollouts'\nrollout_length = 3\n";
        refused(rollouts, "`drafters.d.head.rollout_length` is 3");
    }
}

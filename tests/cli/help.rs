//! The help fits on a screen, its examples run, and shells complete commands.

use std::process::Command;

use crate::support::{Place, copy_dir, root};
use crate::{certify, costs};

/// What a command prints on a terminal of 80 columns.
fn help(arguments: &[&str]) -> String {
    let output = Place::new().command(arguments).env("COLUMNS", "80").output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that `draftsmith --help` lists.
pub(crate) fn commands() -> Vec<String> {
    let all = help(&["--help"]);
    let (before, _) = all.split_once("\nOptions:").unwrap();
    let (_, listed) = before.split_once("COMMAND>\n").unwrap();
    let names = listed.lines().map(|line| line[10..].split(' ').next().unwrap().to_owned());
    let of_servers = ["costs", "certify", "doctor"].map(|name| format!("server {name}"));
    names.chain(of_servers).collect()
}

fn check_size(text: &str, num_lines: usize) {
    assert!(text.lines().count() <= num_lines, "{} lines: {text}", text.lines().count());
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn the_help_of_all_commands_fits_24_lines_of_80_columns() {
    let all = help(&["--help"]);
    check_size(&all, 24);
    assert_eq!(help(&["-h"]), all);
    for heading in ["Prepare:", "Train:", "Decide:", "Measure:", "Serve:"] {
        assert!(all.contains(&format!("\n{heading} ")), "{heading}");
    }
    for flag in ["--device", "--dtype", "--seed", "--json", "--quiet", "--verbose"] {
        assert!(all.contains(flag), "{flag}");
    }
}

#[test]
fn the_help_of_each_command_fits_45_lines_of_80_columns_and_has_an_example() {
    let commands = commands();
    assert_eq!(commands.len(), 20 + 3);
    for command in commands {
        let text = help_of(&command);
        check_size(&text, 45);
        assert!(example(&text).contains(&format!("draftsmith {command} ")), "{text}");
    }
}

/// The help of a command, which may be in a group.
fn help_of(command: &str) -> String {
    help(&command.split(' ').chain(["--help"]).collect::<Vec<_>>())
}

/// The example of a command's help.
fn example(text: &str) -> &str {
    let (_, example) = text.split_once("\nExample").unwrap_or_else(|| panic!("no example: {text}"));
    example.split_once(":\n").unwrap().1
}

#[cfg(unix)]
#[test]
fn every_example_runs_in_a_clone() {
    let place = Place::new();
    for name in ["target", "draft"] {
        place.copy_model(name, &format!("checkpoints/tiny/{name}"));
    }
    copy_dir(&root().join("data/tiny/prompts"), &place.path("data/tiny/prompts"));
    // Fewer prompts and epochs, but otherwise the recipe.
    let recipe = std::fs::read_to_string(root().join("recipes/tiny.toml")).unwrap();
    let mut short: toml::Table = recipe.parse().unwrap();
    let mut set = |path: &[&str], value: i64| {
        let (key, tables) = path.split_last().unwrap();
        let table =
            tables.iter().fold(&mut short, |table, name| table[*name].as_table_mut().unwrap());
        assert!(table.insert((*key).to_owned(), value.into()).is_some(), "{path:?}");
    };
    set(&["data", "num_prompts"], 70);
    set(&["data", "max_new_tokens"], 12);
    set(&["drafters", "draft", "head", "optimizer", "num_epochs"], 1);
    set(&["drafters", "adapter", "optimizer", "num_epochs"], 1);
    set(&["tune", "num_prompts"], 8);
    set(&["evaluate", "num_prompts"], 3);
    set(&["evaluate", "max_new_tokens"], 12);
    // Given, so that nothing is measured.
    let costs = "draft_ms = { draft = 1.0, adapter = 2.0 }\ntarget_ms = 5.0\n";
    short["tune"]
        .as_table_mut()
        .unwrap()
        .insert("costs".to_owned(), costs.parse::<toml::Table>().unwrap().into());
    place.write("recipes/tiny.toml", short.to_string());
    place.write("costs.toml", "draft_ms = 1.0\ntarget_ms = 5.0\n");
    std::fs::create_dir_all(place.path(".config/fish/completions")).unwrap();

    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_draftsmith"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    // What other examples come after runs first.
    let mut commands = commands();
    commands.sort_by_key(|command| match &**command {
        "build-data" => 0,
        command if command.starts_with("train-") => 1,
        "run" => 2,
        _ => 3,
    });
    let timed = costs::plain_server();
    let [certified, reference] = certify::equal_servers();
    for command in commands {
        let text = help_of(&command);
        let few = "survey --costs costs.toml --num-prompts 6 --max-new-tokens 12 ";
        let quick = "costs --rounds 24 --blocks 1 --concurrency 1 ";
        let example = example(&text)
            .replace("survey ", few)
            .replace("costs --server", &format!("{quick}--server"));
        let address = if example.contains("server costs") { &timed.url } else { &certified.url };
        let example = example.replace("http://127.0.0.1:8080/v1", address);
        let example = example.replace("http://127.0.0.1:8081/v1", &reference.url);
        let mut shell = Command::new("sh");
        shell.args(["-ec", &example]).current_dir(place.path("."));
        shell.env("PATH", &path).env("HOME", place.path(".")).env("HF_HUB_OFFLINE", "1");
        let output = shell.output().unwrap();
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        // So little training may not pass the check.
        let is_judged = command == "check" && out.contains("acceptance");
        assert!(output.status.success() || is_judged, "{command}: {out}{err}");
    }
    let completions = place.path(".config/fish/completions/draftsmith.fish");
    assert!(std::fs::read_to_string(completions).unwrap().contains("train-adapter"));
    assert!(place.path("imported/config.json").is_file());
}

#[cfg(unix)]
#[test]
fn bash_completes_commands_flags_and_values() {
    let place = Place::new();
    place.write("completions", help(&["completions", "bash"]));
    let completed = |words: &str| {
        let script = format!(
            "source completions; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1));
             _draftsmith draftsmith \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\";
             printf '%s ' \"${{COMPREPLY[@]}}\""
        );
        let mut bash = Command::new("bash");
        let output = bash.args(["-c", &script]).current_dir(place.path(".")).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(
        completed("draftsmith train-"),
        "train-head train-drafter train-adapter train-bigram "
    );
    assert_eq!(completed("draftsmith generate --max-n"), "--max-new-tokens ");
    assert_eq!(completed("draftsmith export --for k"), "kangaroo ");
}

#[test]
fn every_shell_has_completions_with_all_commands() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = help(&["completions", shell]);
        for command in commands() {
            let name = command.rsplit(' ').next().unwrap();
            assert!(script.contains(name), "{shell}: {command}");
        }
    }
    let document = Place::new().run(&["completions", "zsh", "--json"]).json();
    assert!(document["script"].as_str().unwrap().starts_with("#compdef draftsmith"), "{document}");
}

//! The help: commands by heading, an example of each, and which flags a command ignores.
//!
//! The texts of commands and flags are their doc comments. `draftsmith --help` fits into 24 lines of 80 columns,
//! the help of a command into 45. What needs more words is in `recipes/README.md`.

use std::iter;

use clap::builder::Styles;
use clap::{Arg, ArgAction, Command, CommandFactory};

use super::Arguments;

/// What a command's help adds to the texts of its flags.
struct CommandHelp {
    name: &'static str,
    /// The command that makes the files that the example reads.
    after: Option<&'static str>,
    /// Runs in a clone of the repository, on the embedded models.
    example: &'static str,
}

const RUN: &str = "draftsmith run recipes/tiny.toml";
const BUILD_DATA: &str = "draftsmith build-data recipes/tiny.toml";

const COSTS: &str = "draftsmith server costs --server http://127.0.0.1:8080/v1 --candidates 0";

/// The commands for a server that runs.
const OF_SERVERS: [CommandHelp; 5] = [
    CommandHelp::new("server costs", COSTS),
    CommandHelp::new(
        "server certify",
        "draftsmith server certify --server http://127.0.0.1:8080/v1 \\
    --reference http://127.0.0.1:8081/v1 --target checkpoints/tiny/target \\
    --prompts data/tiny/prompts/test.jsonl",
    ),
    CommandHelp::new(
        "server doctor",
        "draftsmith server doctor checkpoints/tiny/draft \\
    --target checkpoints/tiny/target",
    ),
    CommandHelp::new(
        "server explain",
        "draftsmith server explain --server http://127.0.0.1:8080/v1 \\
    --target checkpoints/tiny/target --prompts data/tiny/prompts/test.jsonl \\
    checkpoints/tiny/draft",
    ),
    CommandHelp::new(
        "server states",
        "export E3='drafters.e3={kind=\"eagle3\",features=\"server\"}'
  export STATES='data.server={urls=[\"http://localhost:8000/v1\"],
    model=\"tiny\",states.dirs=[\"/dev/shm/states\"]}'
  draftsmith server states recipes/tiny.toml --set \"$E3\" --set \"$STATES\" \\
    --set data.responses='\"server\"'",
    ),
];

/// All commands, by heading.
const HEADINGS: [(&str, &[CommandHelp]); 6] = [
    ("Start", &[CommandHelp::new("run", RUN)]),
    (
        "Prepare",
        &[
            CommandHelp::new("build-data", BUILD_DATA),
            CommandHelp::new(
                "import",
                "draftsmith export --for kangaroo checkpoints/tiny/adapter kangaroo
  draftsmith import --from kangaroo --exit-layer 2 kangaroo imported",
            )
            .after(RUN),
            CommandHelp::new("inspect", "draftsmith inspect checkpoints/tiny/target"),
        ],
    ),
    (
        "Train",
        &[
            CommandHelp::new("train-head", "draftsmith train-head recipes/tiny.toml")
                .after(BUILD_DATA),
            CommandHelp::new("train-drafter", "draftsmith train-drafter recipes/tiny.toml")
                .after(BUILD_DATA),
            CommandHelp::new(
                "attach-head",
                "export BLOCK='drafters.block.kind=\"block\"'
  draftsmith train-drafter recipes/tiny.toml block --set $BLOCK
  draftsmith attach-head recipes/tiny.toml with-head --set $BLOCK",
            )
            .after(BUILD_DATA),
            CommandHelp::new("train-bigram", "draftsmith train-bigram recipes/tiny.toml")
                .after(BUILD_DATA),
            CommandHelp::new("build-datastore", "draftsmith build-datastore recipes/tiny.toml")
                .after(BUILD_DATA),
        ],
    ),
    (
        "Decide",
        &[
            CommandHelp::new(
                "survey",
                "draftsmith survey --target checkpoints/tiny/target \\
    --draft checkpoints/tiny/draft --prompts data/tiny/prompts/test.jsonl",
            ),
            CommandHelp::new("record", "draftsmith record recipes/tiny.toml").after(RUN),
            CommandHelp::new("tune", "draftsmith tune recipes/tiny.toml").after(RUN),
            CommandHelp::new("replay", "draftsmith replay recipes/tiny.toml").after(RUN),
        ],
    ),
    (
        "Measure",
        &[
            CommandHelp::new("evaluate", "draftsmith evaluate recipes/tiny.toml").after(RUN),
            CommandHelp::new(
                "report",
                "cp -r checkpoints/tiny/evaluation before
  draftsmith evaluate recipes/tiny.toml
  draftsmith report before checkpoints/tiny/evaluation",
            )
            .after(RUN),
            CommandHelp::new("check", "draftsmith check checkpoints/tiny/draft/head").after(RUN),
        ],
    ),
    (
        "Serve",
        &[
            CommandHelp::new(
                "generate",
                "draftsmith generate --target checkpoints/tiny/target \\
    --draft checkpoints/tiny/draft --prompt 'What is 541 + 279?' --show",
            ),
            CommandHelp::new("server", COSTS),
            CommandHelp::new(
                "export",
                "draftsmith export --for draft-model checkpoints/tiny/adapter exported",
            )
            .after(RUN),
            CommandHelp::new(
                "completions",
                "draftsmith completions fish > ~/.config/fish/completions/draftsmith.fish",
            ),
        ],
    ),
];

/// Common flags that do nothing in a command, and are not in its help.
const UNUSED: [(&str, &[&str]); 9] = [
    ("server certify", &["device", "dtype", "verbose"]),
    ("server doctor", &["seed", "verbose"]),
    ("server explain", &["seed", "verbose"]),
    ("server costs", &["device", "dtype", "verbose"]),
    ("report", &["device", "dtype", "seed", "verbose"]),
    ("inspect", &["device", "dtype", "seed", "verbose"]),
    ("export", &["dtype", "seed"]),
    ("replay", &["device"]),
    ("completions", &["device", "dtype", "seed", "quiet", "verbose"]),
];

/// The common flags, for the help of all commands. Each command's help explains them.
const COMMON: &str = "\
--device cpu|cuda|cuda:N|wgpu, --dtype f32|bf16, --seed N, --json,
         --quiet, --verbose, --version. COMMAND --help explains them.
";

impl CommandHelp {
    const fn new(name: &'static str, example: &'static str) -> Self {
        Self { name, after: None, example }
    }

    const fn after(self, command: &'static str) -> Self {
        Self { after: Some(command), ..self }
    }

    fn text(&self) -> String {
        let after = self.after.map(|command| format!(", after `{command}`")).unwrap_or_default();
        format!("{}\n  {}", heading(&format!("Example{after}:")), self.example)
    }
}

/// Builds the parser of the command line, with the help of all commands.
pub fn command() -> Command {
    let mut command = Arguments::command();
    for (name, flags) in UNUSED {
        for flag in flags {
            let common = command.get_arguments().find(|argument| argument.get_id() == *flag);
            let hidden = common.expect("a common flag").clone().hide(true);
            // In place of the copy that clap would make.
            command = changed(command, name, |subcommand| subcommand.arg(hidden));
        }
    }
    for help in HEADINGS.iter().flat_map(|(_, commands)| *commands).chain(&OF_SERVERS) {
        let version = Arg::new("version").short('V').long("version").action(ArgAction::Version);
        command = changed(command, help.name, |subcommand| {
            let subcommand = subcommand.disable_version_flag(true).arg(version.hide(true));
            with_aliases_in_usage(subcommand).after_help(help.text())
        });
    }
    let list = list(&command);
    command.help_template(list)
}

/// Changes a command, which may be in a group, as in `server costs`.
fn changed(command: Command, name: &str, change: impl FnOnce(Command) -> Command) -> Command {
    match name.split_once(' ') {
        Some((group, name)) => {
            command.mut_subcommand(group, |group| group.mut_subcommand(name, change))
        }
        None => command.mut_subcommand(name, change),
    }
}

/// Names a command's aliases in its usage, as in `draftsmith train-drafter|train-adapter`.
fn with_aliases_in_usage(command: Command) -> Command {
    let names: Vec<&str> =
        iter::once(command.get_name()).chain(command.get_visible_aliases()).collect();
    if names.len() == 1 {
        return command;
    }
    let names = format!("draftsmith {}", names.join("|"));
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replacen(command.get_name(), &names, 1);
    command.override_usage(usage)
}

/// Lists the commands by heading, one line each, as a template of clap's help.
fn list(command: &Command) -> String {
    let mut text = "{about}\n{usage-heading} {usage}\n".to_owned();
    for (name, commands) in HEADINGS {
        let mut shown = heading(&format!("{name}:")) + &" ".repeat(9 - name.len());
        for CommandHelp { name, .. } in commands {
            let command = command.find_subcommand(name).expect("a listed command");
            let mut about = command.get_about().map(ToString::to_string).unwrap_or_default();
            command.get_visible_aliases().for_each(|alias| about += &format!(" [{alias}]"));
            text += &format!("{shown}{name:<14} {about}\n");
            shown = " ".repeat(10);
        }
    }
    text + &heading("Options:") + " " + COMMON
}

/// Formats a heading in clap's style.
fn heading(text: &str) -> String {
    let style = *Styles::styled().get_header();
    format!("{style}{text}{style:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parser_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_command_has_a_heading() {
        let mut listed: Vec<&str> = HEADINGS
            .iter()
            .flat_map(|(_, commands)| commands.iter().map(|command| command.name))
            .collect();
        let command = command();
        let mut commands: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        listed.sort_unstable();
        commands.sort_unstable();
        assert_eq!(listed, commands);
    }
}

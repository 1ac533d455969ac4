//! The environment of a process: closed or full streams, terminals, signals, other processes and full disks.
//! None of them may lose finished work or cause a panic.

use std::fs::File;
use std::io::{Read, Write, pipe};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::pty::{Winsize, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::support::{Place, Running, hangups_heard, model, preceded_by, send_signal};

/// Longest wait in a test.
const DEADLINE: Duration = Duration::from_secs(120);

const FULL: &str = "No space left on device";

/// A stream whose reader has exited.
fn closed() -> Stdio {
    let (_reader, writer) = pipe().unwrap();
    writer.into()
}

/// A stream to a full disk.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Makes writing a file fail as on a full disk.
fn fill(place: &Place, name: &str) {
    let path = place.path(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/full", path).unwrap();
}

/// A command's exit code and stderr.
fn run(mut command: Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A place with built data, and the arguments of a training that is long enough to be interrupted.
fn place_to_train() -> (Place, [&'static str; 4]) {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    (place, ["train-head", "small.toml", "--set", "drafters.draft.head.optimizer.num_epochs=40"])
}

#[test]
fn a_closed_or_full_stderr_loses_no_work() {
    let place = Place::new();
    place.write_small_recipe();
    let head = place.path("checkpoints/small/draft/head/model.safetensors");
    let mut heads = Vec::new();
    for stream in [Stdio::null, closed, full] {
        let mut command = place.command(&["run", "small.toml"]);
        let status = command.stdout(Stdio::null()).stderr(stream()).status().unwrap();
        assert_eq!(status.code(), Some(0));
        heads.push(std::fs::read(&head).unwrap());
        assert!(place.path("checkpoints/small/evaluation/report.html").exists());
        std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
        std::fs::remove_dir_all(place.path("data")).unwrap();
    }
    assert!(heads.iter().all(|other| *other == heads[0]), "other bytes");
    for stream in [closed, full] {
        let status = place.command(&["run", "absent.toml"]).stderr(stream()).status().unwrap();
        assert_eq!(status.code(), Some(1));
        let status = place.command(&["frobnicate"]).stderr(stream()).status().unwrap();
        assert_eq!(status.code(), Some(2));
    }
}

#[test]
fn stages_finish_if_nothing_reads_their_output() {
    let place = Place::new();
    place.write_small_recipe();
    let mut command = place.command(&["run", "small.toml"]);
    let status = command.stdout(closed()).stderr(closed()).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(place.path("checkpoints/small/evaluation/report.html").exists());
}

#[test]
fn a_closed_stdout_is_fine_and_a_full_one_is_an_error() {
    let place = Place::new();
    let target = model("draft-small").display().to_string();
    let generate = ["generate", "--target", &target, "--prompt", "Convert 3 km to m."];
    let commands: [&[&str]; 6] = [
        &["--help"],
        &["--version"],
        &["inspect", &target],
        &["inspect", &target, "--json"],
        &generate,
        &[&generate[..], &["--json"]].concat(),
    ];
    for arguments in commands {
        let mut command = place.command(arguments);
        command.stdout(closed());
        let (code, stderr) = run(command);
        assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{stderr}");
        let mut command = place.command(arguments);
        command.stdout(full());
        let (code, stderr) = run(command);
        assert_eq!(code, Some(1), "{arguments:?}: {stderr}");
        let expected = format!("cannot write to stdout: {FULL}");
        assert!(
            stderr.contains("error: ") && stderr.contains(&expected),
            "{arguments:?}: {stderr}"
        );
    }
}

#[test]
fn an_invalid_command_line_is_reported_as_json_too() {
    let place = Place::new();
    let cases: [(&[&str], &str); 4] = [
        (&["--json", "frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (&["generate", "--json"], "--prompt <TEXT> --target <MODEL>"),
        (&["run", "a.toml", "--steps", "none", "--json"], "'none' for '--steps <N>'"),
        (&["--json"], "no command was given"),
    ];
    for (arguments, problem) in cases {
        let ran = place.run(arguments);
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        let document: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        let error = document["error"].as_str().unwrap();
        assert!(error.contains(problem), "{error}");
        assert!(!error.contains('\n') && !error.contains("Usage"), "{error}");
        let plain: Vec<&str> = arguments.iter().copied().filter(|one| *one != "--json").collect();
        assert_eq!(place.run(&plain).stdout, "", "{plain:?}");
    }
}

#[test]
fn a_hangup_under_nohup_is_ignored() {
    let (place, arguments) = place_to_train();
    let nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"];
    let mut training = Running::start(preceded_by(&nohup, place.command(&arguments)));
    training.await_line("epoch 1/40");
    training.signal("HUP");
    let ran = training.end();
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("epoch 40/40"), "{}", ran.stderr);
}

/// How a training at a terminal is stopped.
#[derive(Debug)]
enum Stop {
    /// By keys, and by keys that answer a question.
    Keys(&'static [u8], Option<(&'static str, &'static [u8])>),
    Signal(&'static str),
    /// The terminal is closed.
    HangUp,
}

/// A terminal and its output so far.
struct Terminal {
    master: File,
    output: String,
}

impl Terminal {
    /// Reads until `text` appears.
    fn await_text(&mut self, text: &str) {
        let mut bytes = [0; 4096];
        while !self.output.contains(text) {
            // Fails once the other end is closed.
            let length = self.master.read(&mut bytes).unwrap_or(0);
            assert!(length > 0, "no `{text}` in: {}", self.output);
            self.output += &String::from_utf8_lossy(&bytes[..length]);
        }
    }
}

/// Runs a training at a terminal, stops it once its dashboard shows numbers, and returns the exit code.
fn stopped_at_a_terminal(place: &Place, arguments: &[&str], stop: &Stop) -> Option<i32> {
    let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // The child must not inherit these, or it would keep its terminal open.
    let (master, slave) = {
        let pty = openpty(&size, None).unwrap();
        (pty.master.try_clone().unwrap(), pty.slave.try_clone().unwrap())
    };
    let mut child = {
        let stream = || Stdio::from(slave.try_clone().unwrap());
        let command = hangups_heard(place.command(arguments));
        let mut command = preceded_by(&["setsid", "--ctty"], command);
        command.env("TERM", "xterm").stdin(stream()).stdout(stream()).stderr(stream());
        command.spawn().unwrap()
    };
    drop(slave);
    let (done, is_done) = mpsc::channel::<()>();
    let id = child.id().to_string();
    let watchdog = std::thread::spawn(move || {
        if is_done.recv_timeout(DEADLINE) == Err(RecvTimeoutError::Timeout) {
            Command::new("kill").args(["-KILL", &id]).status().unwrap();
        }
    });
    let mut terminal = Terminal { master: File::from(master), output: String::new() };
    // The alternate screen with a number.
    terminal.await_text("\u{1b}[?1049h");
    terminal.await_text("Loss");
    match stop {
        Stop::Keys(keys, answer) => {
            terminal.master.write_all(keys).unwrap();
            if let Some((question, keys)) = answer {
                terminal.await_text(question);
                terminal.master.write_all(keys).unwrap();
            }
        }
        Stop::Signal(name) => send_signal(&child, name),
        Stop::HangUp => {}
    }
    let terminal = match stop {
        Stop::HangUp => {
            drop(terminal);
            None
        }
        _ => {
            terminal.await_text("\u{1b}[?1049l");
            terminal.await_text("run the same command again");
            Some(terminal)
        }
    };
    let status = child.wait().unwrap();
    drop(done);
    watchdog.join().unwrap();
    if let Some(terminal) = terminal {
        let mode = tcgetattr(&terminal.master).unwrap().local_flags;
        assert!(mode.contains(LocalFlags::ICANON | LocalFlags::ECHO), "the terminal stays raw");
    }
    status.code()
}

#[test]
fn stopping_a_training_restores_the_terminal() {
    let (place, arguments) = place_to_train();
    for (stop, code) in [
        (Stop::Signal("TERM"), 143),
        (Stop::HangUp, 129),
        // Ctrl-C.
        (Stop::Keys(&[3], None), 130),
        // `q`, then the answer to its question.
        (Stop::Keys(b"q", Some(("[s]", b"s"))), 130),
    ] {
        assert_eq!(stopped_at_a_terminal(&place, &arguments, &stop), Some(code), "{stop:?}");
        let left = place.names("checkpoints/small/draft-head-training/checkpoint");
        assert_eq!(left.len(), 1, "{stop:?}: {left:?}");
        std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
    }
}

#[test]
fn a_full_disk_names_the_file() {
    let place = Place::new();
    place.write_small_recipe();
    // Files are first written under a temporary name.
    let cases = [
        ("build-data", "data/small/.responses-00000.parquet.tmp", "responses-00000.parquet"),
        (
            "train-head",
            "checkpoints/small/draft/head/.model.safetensors.tmp",
            "head/model.safetensors",
        ),
        ("train-head", "checkpoints/small/draft/head/.scores.json.tmp", "head/scores.json"),
        ("evaluate", "checkpoints/small/evaluation/.results.json.tmp", "results.json"),
        ("evaluate", "checkpoints/small/evaluation/.report.html.tmp", "report.html"),
    ];
    for (command, filled, named) in cases {
        fill(&place, filled);
        place.run(&[command, "small.toml"]).fails_naming(&[named, FULL]);
        assert!(!place.path(filled).is_symlink(), "a failed write leaves its temporary file");
        place.run(&[command, "small.toml"]).ok();
        if named == "head/model.safetensors" {
            std::fs::remove_dir_all(place.path("checkpoints/small/draft/head")).unwrap();
        }
    }
    // Limit the size of all files, including logs and states.
    std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
    let limit = ["sh", "-c", "ulimit -f 8; exec \"$@\"", "sh"];
    let (code, stderr) = run(preceded_by(&limit, place.command(&["train-head", "small.toml"])));
    assert_eq!(code, Some(1), "{stderr}");
    let expected = "error: cannot write `checkpoints/small/";
    assert!(stderr.contains(expected) && stderr.contains("File too large"), "{stderr}");
    assert!(stderr.contains("hint: raise the limit of file sizes (`ulimit -f`)"), "{stderr}");
}

#[test]
fn a_second_command_on_a_recipe_fails_and_names_the_first() {
    let (place, arguments) = place_to_train();
    let mut first = Running::start(place.command(&arguments));
    first.await_line("epoch 1/40");
    let id = first.id().to_string();
    for second in ["train-head", "build-data", "train-adapter", "evaluate", "replay", "run"] {
        let expected = ["is in use by process ", &id, "train-head small.toml --set", "hint: wait"];
        place.run(&[second, "small.toml"]).fails_naming(&expected);
    }
    // Readers need no lock, and another recipe has another lock.
    place.run(&["inspect", "data/small"]).ok();
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    place.write("other.toml", recipe);
    place.run(&["build-data", "other.toml"]).ok();
    // A killed process leaves its lock file.
    first.signal("KILL");
    assert_eq!(first.end().code, None);
    let resumed = place.run(&arguments);
    assert!(resumed.stderr.contains("resuming after step"), "{}", resumed.stderr);
    resumed.ok();
    assert!(!place.names("checkpoints/small").iter().any(|name| name.contains("lock")));
}

/// Changes a byte in the middle of a file.
fn change(place: &Place, name: &str) {
    let path = place.path(name);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_training_state_is_an_error_until_it_is_deleted() {
    let (place, arguments) = place_to_train();
    let steps = [&arguments[..], &["--steps", "2"]].concat();
    assert_eq!(place.run(&steps).code, Some(130));
    let states = "checkpoints/small/draft-head-training/checkpoint";
    let state = place.names(states).pop().unwrap();
    change(&place, &format!("{states}/{state}/optimizer.bpk"));
    let expected = [state.as_str(), "optimizer.bpk`", "checksum", "hint: delete"];
    place.run(&arguments).fails_naming(&expected);
    std::fs::remove_dir_all(place.path(states)).unwrap();
    place.run(&arguments).ok();
}

#[test]
fn readers_name_changed_weights_of_an_export() {
    let place = Place::new();
    place.write_small_recipe();
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let adapter = "[drafters.adapter]\nkind = 'adapter'\nexit_layer = 2\n[drafters.adapter.optimizer]\nnum_epochs = 1\n";
    place.write("small.toml", recipe + "[tune]\nprompts = ['test.jsonl']\n" + adapter);
    for command in ["build-data", "train-head", "train-adapter"] {
        place.run(&[command, "small.toml"]).ok();
    }
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let head = "checkpoints/small/draft/head";
    let generate = ["generate", "--target", &target, "--prompt", "x", "--max-new-tokens", "2"];
    let with_head = [&generate[..], &["--draft", &draft, "--head", head]].concat();
    let adapter = "checkpoints/small/adapter";
    let with_adapter = [&generate[..], &["--adapter", adapter]].concat();
    let readers: [(&str, &[&str]); 6] = [
        (head, &with_head),
        (head, &["check", "--allow-slower", head]),
        (head, &["record", "small.toml"]),
        (head, &["evaluate", "small.toml"]),
        (adapter, &with_adapter),
        (adapter, &["check", "--allow-slower", adapter]),
    ];
    for (dir, arguments) in readers {
        let weights = format!("{dir}/model.safetensors");
        let whole = std::fs::read(place.path(&weights)).unwrap();
        change(&place, &weights);
        let expected = [weights.as_str(), "was changed since it was exported", "hint: "];
        place.run(arguments).fails_naming(&expected);
        std::fs::write(place.path(&weights), whole).unwrap();
    }
    // Exports of other programs have no checksum.
    for (dir, arguments) in [(head, &with_head), (adapter, &with_adapter)] {
        place.run(arguments).ok();
        let config = place.path(dir).join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        assert!(text.contains("\"weights_hash\""), "{text}");
        std::fs::write(&config, text.replace("weights_hash", "_name_or_path")).unwrap();
        change(&place, &format!("{dir}/model.safetensors"));
        place.run(arguments).ok();
    }
}

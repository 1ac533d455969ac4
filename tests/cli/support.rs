//! A separate working directory for each test, and runs of the binary in it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Reads an HTTP request: its first line, and its body. `None` if the client has gone.
pub(crate) fn read_request(reader: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    read_named_request(reader).map(|(first, _, body)| (first, body))
}

/// Reads a request: its first line, the header `x-request-id` and the body.
pub(crate) fn read_named_request(reader: &mut impl BufRead) -> Option<(String, String, Vec<u8>)> {
    let (mut first, mut name, mut num_bytes) = (String::new(), String::new(), 0);
    if reader.read_line(&mut first).ok()? == 0 {
        return None;
    }
    let mut line = String::new();
    while reader.read_line(&mut line).ok()? > 2 {
        if let Some(length) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            num_bytes = length.trim().parse().unwrap();
        }
        if let Some(own) = line.to_ascii_lowercase().strip_prefix("x-request-id:") {
            name = own.trim().to_owned();
        }
        line.clear();
    }
    let mut body = vec![0; num_bytes];
    reader.read_exact(&mut body).ok()?;
    Some((first, name, body))
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// An embedded model's directory.
pub(crate) fn model(name: &str) -> PathBuf {
    root().join("checkpoints/tiny").join(name)
}

/// The output of a run of the binary.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    fn new(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Asserts success and returns stdout.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "stderr: {}", self.stderr);
        self.stdout
    }

    /// Asserts success and parses stdout as one JSON document.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// Asserts a clean failure: exit code 1 or 2, no panic, and one message with all of `named`.
    #[track_caller]
    pub(crate) fn fails_naming(self, named: &[&str]) {
        assert!(matches!(self.code, Some(1 | 2)), "exit {:?}; stderr: {}", self.code, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        let messages = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(messages, 1, "one message: {}", self.stderr);
        for text in named {
            assert!(self.stderr.contains(text), "`{text}` is not in: {}", self.stderr);
        }
    }
}

/// A working directory of the binary.
pub(crate) struct Place {
    dir: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file.
    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A copy of an embedded model that a test may change.
    pub(crate) fn copy_model(&self, from: &str, to: &str) -> PathBuf {
        copy_dir(&model(from), &self.path(to))
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_draftsmith"));
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("NO_COLOR", "1").env("HF_HUB_OFFLINE", "1");
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, &[])
    }

    /// A run with additional environment variables.
    pub(crate) fn run_with(&self, arguments: &[&str], env: &[(&str, &str)]) -> Ran {
        Ran::new(self.command(arguments).envs(env.iter().copied()).output().unwrap())
    }

    /// Prompts of `data/tiny/prompts/train.jsonl`, the first `count`.
    pub(crate) fn write_prompts(&self, name: &str, count: usize) -> PathBuf {
        let text = std::fs::read_to_string(root().join("data/tiny/prompts/train.jsonl")).unwrap();
        let lines: Vec<&str> = text.lines().take(count).collect();
        assert_eq!(lines.len(), count);
        self.write(name, lines.join("\n") + "\n")
    }

    /// Writes a small recipe, `small.toml`, and its prompts, `train.jsonl` and `test.jsonl`.
    pub(crate) fn write_small_recipe(&self) -> PathBuf {
        self.write_prompts("train.jsonl", 70);
        self.write_prompts("test.jsonl", 3);
        self.write(
            "small.toml",
            format!(
                "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
                 [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 12\n\
                 [drafters.draft.head]\nnum_layers = 1\n\
                 [drafters.draft.head.optimizer]\nnum_epochs = 1\nlearning_rate = 1e-3\nvalidation_fraction = 0.3\n\
                 [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 12\n\
                 rules.fixed = [1, 4]\nrules.head = [0.5]\n",
                model("target").display(),
                model("draft").display()
            ),
        )
    }

    /// Reads a JSON file.
    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// The rows of a recipe's `results.json` over all categories, after a check of their counts.
    #[track_caller]
    pub(crate) fn results(&self, recipe: &str) -> Vec<Value> {
        let rows = self.json(&format!("checkpoints/{recipe}/evaluation/results.json"));
        let rows = rows.as_array().unwrap();
        for row in rows {
            let count = |key: &str| row[key].as_u64().unwrap();
            // Only greedy output can be compared with plain decoding.
            let lossless = if row["decoding"] == "greedy" { true.into() } else { Value::Null };
            assert_eq!(row["lossless"], lossless, "{row}");
            assert_eq!(
                count("num_drafted") + count("num_target_forwards"),
                count("num_tokens") + count("num_discarded"),
                "{row}"
            );
            // A rule that reads the head at a candidate has run its forward, and may not draw from it.
            let may_waste = row["stop_rule"] == "rejection_threshold_without_lag";
            let num_wasted = count("num_draft_forwards") - count("num_drafted");
            assert!(num_wasted == 0 || may_waste, "{row}");
            assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
        }
        rows.iter().filter(|row| row["category"] == "all").cloned().collect()
    }

    /// The names in a directory, sorted; none if it is absent.
    pub(crate) fn names(&self, dir: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(dir)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// A command that runs in the background.
#[cfg(unix)]
pub(crate) struct Running {
    child: Child,
    stderr: BufReader<ChildStderr>,
    log: String,
}

#[cfg(unix)]
impl Running {
    /// Starts the command and discards its stdout.
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr, log: String::new() }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line on stderr with `text`.
    #[track_caller]
    pub(crate) fn await_line(&mut self, text: &str) {
        loop {
            let begun = self.log.len();
            let length = self.stderr.read_line(&mut self.log).unwrap();
            assert!(length > 0, "`{text}` is not in: {}", self.log);
            if self.log[begun..].contains(text) {
                return;
            }
        }
    }

    /// Sends a signal by name, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        send_signal(&self.child, name);
    }

    /// Waits for the end of the command.
    pub(crate) fn end(mut self) -> Ran {
        self.stderr.read_to_string(&mut self.log).unwrap();
        let code = self.child.wait().unwrap().code();
        Ran { code, stdout: String::new(), stderr: self.log }
    }
}

/// The command with the default action for SIGHUP, which children of `nohup` would ignore.
#[cfg(unix)]
pub(crate) fn hangups_heard(command: Command) -> Command {
    preceded_by(&["env", "--default-signal=HUP"], command)
}

/// The command with `words` before it.
pub(crate) fn preceded_by(words: &[&str], command: Command) -> Command {
    let mut whole = Command::new(words[0]);
    whole.args(&words[1..]).arg(command.get_program()).args(command.get_args());
    whole.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    whole.current_dir(command.get_current_dir().unwrap()).stdin(Stdio::null());
    whole
}

/// Sends a process a signal by name, such as `TERM`.
pub(crate) fn send_signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success(), "it ended before the signal");
}

/// Waits for a process whose progress cannot be observed.
pub(crate) fn wait(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::thread::yield_now();
    }
}

/// Copies the files of a directory. A model's directories are not its own: a run leaves heads there.
pub(crate) fn copy_dir(from: &Path, to: &Path) -> PathBuf {
    std::fs::create_dir_all(to).unwrap();
    let entries = std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap());
    for entry in entries.filter(|entry| !entry.path().is_dir()) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to.to_path_buf()
}

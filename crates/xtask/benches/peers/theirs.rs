//! The peers' side: one Python process for each work, which measures once for each line on its stdin.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::Measurement;

/// What a script reports after its warm-up.
#[derive(Debug, Deserialize)]
pub(crate) struct Hello {
    /// The fastest number of threads.
    pub(crate) num_threads: usize,
    /// The versions of its packages.
    pub(crate) versions: String,
}

/// A running script that waits for requests.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) hello: Hello,
    script: String,
    child: Child,
    /// `None` only during drop: closing the input ends the script.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a script and waits until it has loaded its models and warmed up.
    pub(crate) fn start(python: &Path, script: &str, flags: &[String]) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(script);
        let mut child = Command::new(python)
            .arg(path)
            .arg("--json")
            .args(flags)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{}`", python.display()))?;
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().context("its output is piped")?);
        let hello = read_line(&mut output, script)?;
        Ok(Self { hello, script: script.to_owned(), child, input, output })
    }

    /// Lets the script do its work once.
    pub(crate) fn measure(&mut self) -> Result<Measurement> {
        self.input.as_mut().context("its input is piped")?.write_all(b"\n")?;
        read_line(&mut self.output, &self.script)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.input = None;
        // Its exit status does not matter.
        drop(self.child.wait());
    }
}

fn read_line<T: DeserializeOwned>(output: &mut BufReader<ChildStdout>, script: &str) -> Result<T> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| {
        format!("`{script}` did not answer; hint: pip install torch transformers numpy pyarrow")
    })
}

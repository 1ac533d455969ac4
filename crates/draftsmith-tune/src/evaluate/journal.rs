//! The journal of an unfinished evaluation's measurements, in `evaluation-runs.jsonl` beside its
//! results. After a stop or crash, the same evaluation continues with the next measurement.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_data::hash_bytes;
use draftsmith_files::{read_text, write_whole};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::measure::PromptRun;
use super::settings::Setting;
use super::{MeasuredModels, Plan};

/// The key of a measurement: the indices of its dataset, way of decoding, batch of prompts and
/// setting.
pub(super) type Measured = [usize; 4];

/// A measurement. Its line in the file ends with the measurement's hash, so that a damaged line is
/// measured again.
#[derive(Serialize, Deserialize)]
struct RunEntry {
    measured: Measured,
    runs: Vec<PromptRun>,
}

/// The hashes of everything that measurements depend on, by name: the first line of the file.
type Fingerprint = BTreeMap<String, String>;

/// An open journal, with the measurements of earlier runs that have not been taken.
pub(super) struct RunJournal {
    path: PathBuf,
    file: File,
    known: HashMap<Measured, Vec<PromptRun>>,
}

impl RunJournal {
    /// Opens the journal and reads the measurements of the same evaluation. Measurements of another
    /// evaluation are deleted, with a note that says what differs. With `keeps_finished`, the
    /// measurements of an evaluation that was finished count too.
    ///
    /// # Errors
    /// If the file cannot be written, or a model's files cannot be read.
    pub(super) fn open(
        models: &MeasuredModels<'_>,
        plans: &[Plan],
        keeps_finished: bool,
    ) -> Result<Self> {
        let path = models.recipe.evaluation_dir().with_file_name("evaluation-runs.jsonl");
        let fingerprint = fingerprint(models, plans)?;
        let mut entries = Vec::new();
        for kept in [(keeps_finished, finished_path(&path)), (true, path.clone())] {
            let (true, path) = kept else { continue };
            let (known, differing) = read(&path, &fingerprint);
            if !differing.is_empty() && !known.is_empty() {
                models.watch.note(format!(
                    "evaluate: {} measurements in `{}` are dropped, because they were made with other {}",
                    known.len(),
                    path.display(),
                    differing.join(", ")
                ));
            } else if !known.is_empty() {
                entries = known;
            }
        }
        let mut kept = serde_json::to_string(&fingerprint)? + "\n";
        for entry in &entries {
            kept += &line(&serde_json::to_string(entry)?);
        }
        write_whole(&path, kept)?;
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.with_context(|| format!("cannot write `{}`", path.display()))?;
        let known = entries.into_iter().map(|entry| (entry.measured, entry.runs)).collect();
        Ok(Self { path, file, known })
    }

    pub(super) fn num_known(&self) -> usize {
        self.known.len()
    }

    /// Removes and returns the runs of an earlier measurement; `None` if it was not made.
    pub(super) fn take(&mut self, measured: Measured) -> Option<Vec<PromptRun>> {
        self.known.remove(&measured)
    }

    /// Appends a measurement to the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&mut self, measured: Measured, runs: &[PromptRun]) -> Result<()> {
        let line = line(&json!({ "measured": measured, "runs": runs }).to_string());
        let written = self.file.write_all(line.as_bytes());
        written.with_context(|| format!("cannot write `{}`", self.path.display()))
    }

    /// Sets the file aside once the results are complete.
    pub(super) fn finish(self) {
        let _ = std::fs::rename(&self.path, finished_path(&self.path));
    }
}

fn finished_path(path: &Path) -> PathBuf {
    path.with_file_name("evaluation-runs.finished.jsonl")
}

/// Appends the hash of a measurement to its line.
fn line(entry: &str) -> String {
    format!("{entry} {}\n", hash_bytes(entry.as_bytes()))
}

/// Reads a journal's measurements, and the names of what differs from `fingerprint`. Reading stops
/// at a damaged line, such as one that a crash cut short.
fn read(path: &Path, fingerprint: &Fingerprint) -> (Vec<RunEntry>, Vec<String>) {
    let text = read_text(path).unwrap_or_default();
    let mut lines = text.lines();
    let first = lines.next().and_then(|line| serde_json::from_str::<Fingerprint>(line).ok());
    let Some(first) = first else { return (Vec::new(), Vec::new()) };
    let entry = |line: &str| {
        let (entry, hash) = line.rsplit_once(' ')?;
        let is_whole = hash_bytes(entry.as_bytes()) == hash;
        is_whole.then(|| serde_json::from_str(entry).ok()).flatten()
    };
    let differing = fingerprint.iter().filter(|(name, hash)| first.get(*name) != Some(*hash));
    let differing = differing.map(|(name, _)| name.clone()).collect();
    (lines.map_while(entry).collect(), differing)
}

/// Hashes everything that the measurements depend on.
fn fingerprint(models: &MeasuredModels<'_>, plans: &[Plan]) -> Result<Fingerprint> {
    let MeasuredModels { recipe, evaluate, workspace, .. } = *models;
    let settings = |plan: &Plan| -> Vec<Value> {
        let setting = |it: &Setting| json!([it.name(), it.rule]);
        plan.settings.iter().map(setting).collect()
    };
    let all = [
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("models", json!(models.summaries()?)),
        ("prompts", json!(workspace.artifacts.prompt_files(&evaluate.prompts)?)),
        ("keys of `[evaluate]`", json!(evaluate)),
        ("keys of drafters", json!(recipe.drafters)),
        ("`answers`", json!(workspace.answers_hash()?)),
        ("rules", json!(plans.iter().map(settings).collect::<Vec<_>>())),
        ("seed", json!(recipe.seed)),
        ("dtype", json!(workspace.models.dtype)),
        ("device", json!(format!("{:?}", workspace.models.device()))),
    ];
    let hashed =
        |(name, value): (&str, Value)| (name.to_owned(), hash_bytes(value.to_string().as_bytes()));
    Ok(all.into_iter().map(hashed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_lines_are_measured_again_and_differences_are_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("evaluation-runs.jsonl");
        let fingerprint = |rules: &str| {
            let all = [("models", "a"), ("rules", rules)];
            Fingerprint::from(all.map(|(name, hash)| (name.to_owned(), hash.to_owned())))
        };
        let own = fingerprint("b");
        let entry = |number: usize| line(&format!(r#"{{"measured":[0,0,{number},1],"runs":[]}}"#));
        let write = |lines: &str| {
            let text = serde_json::to_string(&own).expect("JSON") + "\n" + lines;
            std::fs::write(&path, text).expect("written");
            let (entries, differing) = read(&path, &own);
            assert!(differing.is_empty(), "{differing:?}");
            entries.into_iter().map(|entry| entry.measured[2]).collect::<Vec<usize>>()
        };
        let three = [entry(1), entry(2), entry(3)];
        assert_eq!(write(&three.concat()), [1, 2, 3]);
        let changed = three[1].replace("[0,0,2,1]", "[0,0,7,1]");
        assert_eq!(write(&[&three[0], &*changed, &three[2]].concat()), [1]);
        assert_eq!(write(&[&three[0], r#"{"measured":[0,0,2,1],"runs":[]}"#, "\n"].concat()), [1]);
        assert_eq!(write(&three.concat()[..three.concat().len() - 9]), [1, 2]);
        assert_eq!(write(""), [0; 0]);
        write(&three.concat());
        let (entries, differing) = read(&path, &fingerprint("other"));
        assert_eq!((entries.len(), differing), (3, vec!["rules".to_owned()]));
        // Versions before wrote a hash here, which says nothing about what differs.
        std::fs::write(&path, "\"abc\"\n{}\n").expect("written");
        assert!(read(&path, &own).0.is_empty());
        assert!(read(&dir.path().join("absent"), &own).0.is_empty());
    }
}

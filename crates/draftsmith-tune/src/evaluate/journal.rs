//! The measurements of an evaluation that has not ended, in `evaluation-runs.jsonl` beside its results: after a stop
//! or a crash, the same evaluation continues with the next one.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_data::hash_bytes;
use draftsmith_files::write_whole;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::measure::PromptRun;
use super::settings::Setting;
use super::{MeasuredModels, Plan};

/// A measurement: the index of its dataset, way of decoding, batch of prompts and setting.
pub(super) type Measured = [usize; 4];

/// A line of the file, after the first, which is the fingerprint.
#[derive(Serialize, Deserialize)]
struct RunEntry {
    measured: Measured,
    runs: Vec<PromptRun>,
}

/// The measurements so far.
pub(super) struct RunJournal {
    path: PathBuf,
    file: File,
    known: HashMap<Measured, Vec<PromptRun>>,
}

impl RunJournal {
    /// Opens the journal with the measurements of the same evaluation, if there are any. Those of another
    /// evaluation are removed.
    ///
    /// # Errors
    /// If the file cannot be written, or a model's files cannot be read.
    pub(super) fn open(models: &MeasuredModels<'_>, plans: &[Plan]) -> Result<Self> {
        let path = models.recipe.evaluation_dir().with_file_name("evaluation-runs.jsonl");
        let fingerprint = json!(fingerprint(models, plans)?).to_string();
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.lines();
        let is_same = lines.next() == Some(fingerprint.as_str());
        // A line that a crash cut short is measured again.
        let entries = lines.map_while(|line| serde_json::from_str(line).ok()).filter(|_| is_same);
        let entries: Vec<RunEntry> = entries.collect();
        let mut kept = fingerprint + "\n";
        for entry in &entries {
            kept += &(serde_json::to_string(entry)? + "\n");
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

    /// Removes and returns the runs of a measurement, if it was made.
    pub(super) fn take(&mut self, measured: Measured) -> Option<Vec<PromptRun>> {
        self.known.remove(&measured)
    }

    /// Appends a measurement to the file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn add(&mut self, measured: Measured, runs: &[PromptRun]) -> Result<()> {
        let line = json!({ "measured": measured, "runs": runs }).to_string() + "\n";
        let written = self.file.write_all(line.as_bytes());
        written.with_context(|| format!("cannot write `{}`", self.path.display()))
    }

    /// Removes the file, since the results are complete.
    pub(super) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Identifies everything that measurements depend on.
fn fingerprint(models: &MeasuredModels<'_>, plans: &[Plan]) -> Result<String> {
    let MeasuredModels { recipe, evaluate, workspace, .. } = *models;
    let settings = |plan: &Plan| -> Vec<Value> {
        let setting = |it: &Setting| json!([it.name(), it.rule]);
        plan.settings.iter().map(setting).collect()
    };
    let all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "models": models.summaries()?,
        "prompts": workspace.artifacts.prompt_files(&evaluate.prompts)?,
        "evaluate": evaluate,
        "settings": plans.iter().map(settings).collect::<Vec<_>>(),
        "seed": recipe.seed,
        "dtype": workspace.models.dtype,
        "device": format!("{:?}", workspace.models.device()),
    });
    Ok(hash_bytes(all.to_string().as_bytes()))
}

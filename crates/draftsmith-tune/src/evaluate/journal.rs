//! The journal of an unfinished evaluation's measurements, in `evaluation-runs.jsonl` beside its
//! results. After a stop or crash, the same evaluation continues with the next measurement.

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

/// The key of a measurement: the indices of its dataset, way of decoding, batch of prompts and
/// setting.
pub(super) type Measured = [usize; 4];

/// A line of the file. Only the first line differs: it holds the fingerprint.
#[derive(Serialize, Deserialize)]
struct RunEntry {
    measured: Measured,
    runs: Vec<PromptRun>,
}

/// An open journal, with the measurements of earlier runs that have not been taken.
pub(super) struct RunJournal {
    path: PathBuf,
    file: File,
    known: HashMap<Measured, Vec<PromptRun>>,
}

impl RunJournal {
    /// Opens the journal and reads the measurements of the same evaluation. Measurements of another
    /// evaluation are deleted.
    ///
    /// # Errors
    /// If the file cannot be written, or a model's files cannot be read.
    pub(super) fn open(models: &MeasuredModels<'_>, plans: &[Plan]) -> Result<Self> {
        let path = models.recipe.evaluation_dir().with_file_name("evaluation-runs.jsonl");
        let fingerprint = json!(fingerprint(models, plans)?).to_string();
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.lines();
        let is_same = lines.next() == Some(fingerprint.as_str());
        // Reading stops at a line that a crash cut short. Its measurement is repeated.
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

    /// Removes and returns the runs of an earlier measurement; `None` if it was not made.
    pub(super) fn take(&mut self, measured: Measured) -> Option<Vec<PromptRun>> {
        self.known.remove(&measured)
    }

    /// Appends a measurement to the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&mut self, measured: Measured, runs: &[PromptRun]) -> Result<()> {
        let line = json!({ "measured": measured, "runs": runs }).to_string() + "\n";
        let written = self.file.write_all(line.as_bytes());
        written.with_context(|| format!("cannot write `{}`", self.path.display()))
    }

    /// Deletes the file once the results are complete.
    pub(super) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Hashes everything that the measurements depend on.
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

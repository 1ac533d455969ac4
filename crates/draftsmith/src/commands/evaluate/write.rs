//! The files of an evaluation: answers, the report, the summary and, last, `results.json`. Each is written
//! completely or not at all.

use std::path::Path;

use anyhow::Result;
use draftsmith_files::write_whole;
use draftsmith_model::{AcceptanceHeadConfig, ModelConfig};
use draftsmith_report::{
    Conclusion, DatasetSummary, DecodingName, EvaluationSummary, GroupSummary, ModelSummary,
    PromiseSummary, Replay, Version, render_html, results_to_json, sort_rows, summary_to_json,
};
use draftsmith_theory::Estimate;

use super::group::EvaluationResults;
use super::{Evaluation, MeasuredModels};
use crate::agreement::rounding;
use crate::device::DeviceChoice;
use crate::exports::AdapterExport;
use crate::exports::cascades::{numbered, numbered_merged};
use crate::prompts::Dataset;
use crate::prompts::for_data::{num_known, prompts_in_data};
use crate::tuning::TuningFile;
use crate::workspace::hash_dir;

impl MeasuredModels<'_> {
    /// Writes the files, and prints the table of results.
    pub(super) fn write(
        &self,
        datasets: &[Dataset],
        mut evaluated: EvaluationResults,
        foreign_load: Option<f64>,
    ) -> Result<Evaluation> {
        let Self { recipe, evaluate, workspace, console, .. } = *self;
        sort_rows(&mut evaluated.rows);
        // The results of an interrupted evaluation go into a directory of their own.
        let dir = match console.is_interrupted() {
            true => recipe.evaluation_dir().with_file_name("evaluation-partial"),
            false => recipe.evaluation_dir(),
        };
        let summary = EvaluationSummary {
            recipe: recipe.name.clone(),
            conclusion: Conclusion::default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: DeviceChoice::name(workspace.device()),
            dtype: rounding(workspace.dtype),
            machine: machine(),
            foreign_load,
            versions: vec![Version { name: "burn".to_owned(), version: "0.22.1".to_owned() }],
            models: self.summaries()?,
            max_new_tokens: evaluate.max_new_tokens,
            batch_size: evaluate.batch_size,
            seeds: vec![recipe.seed],
            datasets: self.dataset_summaries(datasets),
            groups: evaluated.groups,
        };
        let summary = summary.concluded(&evaluated.rows);
        for (name, text) in &evaluated.answers {
            write_whole(&dir.join(name), text)?;
        }
        let report = dir.join("report.html");
        let mut replay: Replay = TuningFile::REPLAY.read(recipe)?;
        if replay.dtype != rounding(workspace.dtype) {
            replay = Replay::default();
        }
        write_whole(&report, render_html(&evaluated.rows, &summary, &replay)?)?;
        write_whole(&dir.join("summary.json"), summary_to_json(&summary)?)?;
        write_whole(&dir.join("results.json"), results_to_json(&evaluated.rows)?)?;
        recipe.write_beside(&dir)?;
        self.note(&summary);
        let evaluation =
            Evaluation { rows: evaluated.rows, report, conclusion: summary.conclusion };
        console.text(evaluation.text(console))?;
        console.document(&evaluation.rows)?;
        Ok(evaluation)
    }

    /// The datasets, each with the number of prompts that the training data was built from.
    fn dataset_summaries(&self, datasets: &[Dataset]) -> Vec<DatasetSummary> {
        let known = prompts_in_data(self.recipe, &self.pair.text);
        let summary = |dataset: &Dataset| DatasetSummary {
            name: dataset.name.clone(),
            num_prompts: dataset.prompts.len(),
            num_in_data: known.as_ref().map(|known| num_known(&dataset.prompts, known)),
        };
        datasets.iter().map(summary).collect()
    }

    /// Notes on forgiven mismatches and on promises.
    fn note(&self, summary: &EvaluationSummary) {
        let num_forgiven: usize = summary.groups.iter().map(|g| g.num_forgiven_ties).sum();
        if num_forgiven > 0 {
            self.console.note(format!(
                "evaluate: {num_forgiven} greedy mismatches forgiven: both tokens' logits are within \
                 {} of the greatest there",
                summary.dtype.tie_text()
            ));
        }
        for group in &summary.groups {
            group.promises.iter().for_each(|it| self.console.note(promise_text(group, it)));
        }
    }

    /// The models, heads, adapters and cascades.
    fn summaries(&self) -> Result<Vec<ModelSummary>> {
        let Self { recipe, evaluate, workspace, pair, exports, console } = *self;
        let paths = &recipe.models;
        let hash = workspace.target_hash()?;
        let mut all = vec![summary_of("target", &paths.target, pair.target.config(), hash)];
        if let (Some(draft), Some(path), Some(hash)) =
            (&pair.draft, &paths.draft, workspace.draft_hash()?)
        {
            all.push(summary_of("draft", path, draft.config(), hash));
        }
        let of_dir = |role: &str, dir: &Path, description: String| -> Result<ModelSummary> {
            let (role, name) = (role.to_owned(), dir.display().to_string());
            Ok(ModelSummary { role, name, description, hash: hash_dir(dir, console)? })
        };
        if let Some(head) = &exports.head {
            all.push(of_dir("head", &head.dir, describe_head(&head.config))?);
        }
        for export in &exports.adapters {
            all.push(of_dir("adapter", &export.dir, describe_adapter(export))?);
        }
        if let (Some(small), Some(path)) = (&exports.small_draft, &paths.small_draft) {
            let hash = hash_dir(path, console)?;
            all.push(summary_of("small draft", path, small.config(), &hash));
        }
        let cascades = numbered(&evaluate.cascades).map(|(id, it)| (id, it.to_string()));
        let merged = numbered_merged(&evaluate.merged).map(|(id, it)| (id, it.to_string()));
        all.extend(cascades.chain(merged).map(|(id, description)| ModelSummary {
            role: id.text(),
            name: id.to_string(),
            description,
            hash: String::new(),
        }));
        Ok(all)
    }
}

/// Processor, cores and operating system.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let processor = line.and_then(|line| Some(line.split_once(':')?.1.trim()));
    format!(
        "{}, {cores} cores, {}",
        processor.unwrap_or(std::env::consts::ARCH),
        std::env::consts::OS
    )
}

fn describe_head(config: &AcceptanceHeadConfig) -> String {
    let kind = if config.tied { "tied" } else { "untied" };
    let form = if config.reads.looks_ahead() { " that looks ahead" } else { "" };
    let inputs = config.reads.inputs().iter();
    let more: String = inputs.map(|input| format!(", + {}", input.name())).collect();
    format!(
        "acceptance head{form}, {} {kind} blocks of width {}{more}",
        config.num_layers, config.hidden_size
    )
}

fn describe_adapter(AdapterExport { adapter, config, .. }: &AdapterExport) -> String {
    let mut text = format!(
        "self-draft adapter behind layer {}, {} x {}, {:.2} M parameters",
        config.exit_layer,
        config.model.shape.num_layers,
        config.architecture,
        adapter.num_parameters() as f64 / 1e6,
    );
    if let Some(vocabulary) = &config.draft_vocabulary {
        text += &format!(", draws {} tokens", vocabulary.ids().len());
        if let Some(coverage) = config.vocabulary_coverage() {
            text += &format!(" ({:.1} % of those in held-out responses)", coverage * 100.0);
        }
    }
    text
}

/// A promise and the measured gain, in a line.
fn promise_text(group: &GroupSummary, promise: &PromiseSummary) -> String {
    let Estimate { value, low, high } = promise.measured_gain;
    let percent = |share: f64| format!("{:+.1} %", share * 100.0);
    format!(
        "evaluate: {}, {}: {}{} against K = {}: tuning promised {}, measured {} (95 %: {} to {}): {}",
        group.dataset,
        DecodingName::of(&group.decoding).text(),
        promise.drafter.prefix().map(|prefix| prefix + ", ").unwrap_or_default(),
        promise.stop_rule.symbol().unwrap_or_default(),
        promise.best_fixed_length,
        percent(promise.expected_gain.value),
        percent(value),
        percent(low),
        percent(high),
        promise.outcome.text(),
    )
}

fn summary_of(role: &str, dir: &Path, config: &ModelConfig, hash: &str) -> ModelSummary {
    let shape = &config.shape;
    ModelSummary {
        role: role.to_owned(),
        name: dir.display().to_string(),
        description: format!(
            "{} architecture, {} layers, hidden {}, {} heads ({} key/value), vocabulary {}, \
             {:.1} M parameters",
            config.architecture.name(),
            shape.num_layers,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.vocab_size,
            config.num_parameters() as f64 / 1e6
        ),
        hash: hash.to_owned(),
    }
}

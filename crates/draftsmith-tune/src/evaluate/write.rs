//! Writing of an evaluation's files: answers, the report with its speed chart, the summary and,
//! last, `results.json`. Each is written completely or not at all.

use anyhow::Result;
use draftsmith_files::write_whole;
use draftsmith_report::{
    Conclusion, DatasetSummary, DecodingName, EvaluationSummary, GroupSummary, HeadRace, Measured,
    ModelSummary, PaperTable, PromiseSummary, Replay, Version, render_html, render_speed_svg,
    results_to_json, signed_percent, sort_rows, summary_to_json,
};
use draftsmith_theory::Estimate;

use super::group::EvaluationResults;
use super::{Evaluation, MeasuredModels};
use crate::agreement::rounding;
use crate::machine::machine_text;
use crate::serving::concluded;
use crate::tuning::TuningFile;
use draftsmith_recipe::exports::summary_of;
use draftsmith_recipe::{Dataset, DeviceChoice, num_known, prompts_in_data};

impl MeasuredModels<'_> {
    /// Writes all files of an evaluation, and returns its result.
    pub(super) fn write(
        &self,
        datasets: &[Dataset],
        mut evaluated: EvaluationResults,
        papers: &[PaperTable],
    ) -> Result<Evaluation> {
        let Self { recipe, evaluate, workspace, watch, .. } = *self;
        sort_rows(&mut evaluated.rows);
        // The results of an interrupted evaluation go into a separate directory.
        let is_partial = watch.is_interrupted();
        if is_partial {
            // Promises are judged by all prompts.
            evaluated.groups.iter_mut().for_each(|group| group.promises.clear());
        }
        let dir = match is_partial {
            true => recipe.evaluation_dir().with_file_name("evaluation-partial"),
            false => recipe.evaluation_dir(),
        };
        let summary = EvaluationSummary {
            recipe: recipe.name.clone(),
            conclusion: Conclusion::default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: DeviceChoice::name(workspace.models.device()),
            dtype: rounding(workspace.models.dtype),
            machine: machine_text(),
            foreign_load: evaluated.foreign_load,
            versions: vec![Version { name: "burn".to_owned(), version: "0.22.1".to_owned() }],
            models: self.summaries()?,
            max_new_tokens: evaluate.max_new_tokens,
            batch_size: evaluate.batch_size,
            seeds: (0..evaluate.repeats as u64).map(|nth| recipe.seed + nth).collect(),
            datasets: self.dataset_summaries(datasets),
            groups: evaluated.groups,
            papers: Vec::new(),
        };
        let mut summary = summary.concluded(&evaluated.rows);
        summary.conclusion.is_partial = is_partial;
        summary.conclusion = concluded(summary.conclusion, &evaluated.rows, recipe)?;
        for (name, text) in &evaluated.answers {
            write_whole(&dir.join(name), text)?;
        }
        let report = dir.join("report.html");
        let mut replay: Replay = TuningFile::REPLAY.read(recipe)?;
        if replay.dtype != rounding(workspace.models.dtype) {
            replay = Replay::default();
        }
        let heads: Option<HeadRace> = TuningFile::HEADS.read(recipe)?;
        let measured = Measured {
            rows: &evaluated.rows,
            groups: &summary.groups,
            heads: heads.as_ref(),
            replays: &replay.groups,
        };
        summary.papers = papers.iter().map(|it| it.fill(measured)).collect();
        if let Some(picture) = render_speed_svg(&evaluated.rows, &summary)? {
            write_whole(&dir.join("speed.svg"), picture)?;
        }
        let mut page = render_html(&evaluated.rows, &summary, &replay)?;
        if let Some(home) = std::env::home_dir().filter(|home| home.parent().is_some()) {
            // The page may be shared. Its template escapes slashes.
            page = page.replace(&home.to_string_lossy().replace('/', "&#x2f;"), "~");
        }
        write_whole(&report, page)?;
        write_whole(&dir.join("summary.json"), summary_to_json(&summary)?)?;
        write_whole(&dir.join("results.json"), results_to_json(&evaluated.rows)?)?;
        recipe.write_beside(&dir)?;
        self.note(&summary);
        let EvaluationSummary { conclusion, papers, .. } = summary;
        Ok(Evaluation { rows: evaluated.rows, report, conclusion, papers, is_partial })
    }

    /// Summarises each dataset, including the number of its prompts that also occur in the training
    /// data.
    fn dataset_summaries(&self, datasets: &[Dataset]) -> Vec<DatasetSummary> {
        let known = prompts_in_data(self.recipe, &self.pair.text);
        let summary = |dataset: &Dataset| DatasetSummary {
            name: dataset.name.clone(),
            num_prompts: dataset.prompts.len(),
            num_in_data: known.as_ref().map(|known| num_known(&dataset.prompts, known)),
        };
        datasets.iter().map(summary).collect()
    }

    /// Reports to the user the forgiven greedy mismatches and whether the gains promised by `tune`
    /// were reached.
    fn note(&self, summary: &EvaluationSummary) {
        let num_forgiven: usize = summary.groups.iter().map(|g| g.num_forgiven_ties).sum();
        if num_forgiven > 0 {
            self.watch.note(format!(
                "evaluate: {num_forgiven} greedy mismatches forgiven: both tokens' logits are within \
                 {} of the greatest there",
                summary.dtype.tie_text()
            ));
        }
        for group in &summary.groups {
            group.promises.iter().for_each(|it| self.watch.note(promise_text(group, it)));
        }
    }

    /// Summarises the target and the evaluated drafters, with their heads.
    pub(super) fn summaries(&self) -> Result<Vec<ModelSummary>> {
        let Self { recipe, workspace, .. } = *self;
        let (hash, path) = (workspace.models.target_hash()?, &recipe.models.target);
        let mut all = vec![summary_of("target", path, self.pair.target.config(), hash)];
        for (id, drafter) in recipe.evaluated() {
            let loading = recipe.loading(id, workspace);
            all.extend(drafter.kind.summaries(&loading, self.drafters.get(id)?)?);
        }
        Ok(all)
    }
}

/// Formats one line that compares a gain promised by `tune` with the measured gain.
fn promise_text(group: &GroupSummary, promise: &PromiseSummary) -> String {
    let Estimate { value, low, high } = promise.measured_gain;
    format!(
        "evaluate: {}, {}: {}{} against K = {}: tuning promised {}, measured {} (95 %: {} to {}): {}",
        group.dataset,
        DecodingName::of(&group.decoding).text(),
        promise.drafter.prefix().map(|prefix| prefix + ", ").unwrap_or_default(),
        promise.stop_rule.symbol().unwrap_or_default(),
        promise.best_fixed_length,
        signed_percent(promise.expected_gain.value),
        signed_percent(value),
        signed_percent(low),
        signed_percent(high),
        promise.outcome.text(),
    )
}

//! `evaluate`: what each way of stopping does to decoding speed, measured on prompts.

mod machine;
mod measure;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::Prompt;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, LlamaConfig};
use draftsmith_theory::{CostModel, Decoding, Fit, Observation, Trace};
use serde::Serialize;

use self::measure::{Agreement, Bench, Measured};
use self::settings::Setting;
use crate::answers::{Answer, Choice, QuestionId, answers_to_jsonl};
use crate::commands::build_data::{Source, read_sources};
use crate::console::{Console, Interrupted};
use crate::pair::{Pair, hash_dir};
use crate::progress::Progress;
use crate::recipe::{EvaluateRecipe, Recipe, write_text};
use crate::report::render_html;
use crate::results::{
    ALL_CATEGORIES, CostSummary, DatasetSummary, EvaluationSummary, GroupSummary, ModelSummary,
    ResultRow, RowContext, results_to_json, sort_rows, summary_to_json, tokens_per_second,
};
use crate::table::render_table;

/// What an evaluation left behind.
#[derive(Debug, Serialize)]
pub(crate) struct Evaluation {
    /// The rows of results.json.
    pub(crate) rows: Vec<ResultRow>,
    /// The HTML page.
    pub(crate) report: PathBuf,
}

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, device: &Device, console: &Console) -> Result<Evaluation> {
    let evaluate = recipe
        .evaluate
        .as_ref()
        .context("the recipe has no section `[evaluate]`: it says which prompts to measure with")?;
    let draft_dir = recipe.need_draft("evaluate")?;
    let sources = read_sources(&evaluate.prompts)?;
    let pair = Pair::load(&recipe.models.target, Some(draft_dir), device)?;
    let datasets = choose_prompts(evaluate, sources, &pair, console)?;
    for dataset in &datasets {
        for prompt in &dataset.prompts {
            pair.check_fits(&prompt.id, &pair.encode(&prompt.messages(0, &[]))?)?;
        }
    }
    let head = read_head(recipe, evaluate, &pair, device)?;
    let settings = Setting::all(evaluate, head.is_some());
    let decodings: Vec<Decoding> =
        evaluate.decodings.iter().map(|name| evaluate.decoding(*name)).collect();

    let mut bench =
        Bench::new(&pair, head.as_ref().map(|h| &h.head), evaluate.max_new_tokens, recipe.seed);
    let num_prompts: usize = datasets.iter().map(|d| d.prompts.len()).sum();
    let num_runs = num_prompts * settings.len() * decodings.len();
    bench.warm_up(&datasets[0].prompts[0], &decodings, &settings)?;
    console.note(format!(
        "evaluate: {} settings, {} decodings, {num_prompts} prompts",
        settings.len(),
        decodings.len()
    ));
    let progress = Progress::new(console, "evaluate", "runs", num_runs as u64);
    let mut evaluated = Evaluated::default();
    'all: for dataset in &datasets {
        for decoding in &decodings {
            let mut group = Group::new(dataset, *decoding, &settings);
            for (number, prompt) in dataset.prompts.iter().enumerate() {
                progress.message(dataset.name.clone());
                for (index, setting) in settings.iter().enumerate() {
                    if console.is_interrupted() {
                        group.keep_whole_prompts();
                        evaluated.add(group, recipe)?;
                        break 'all;
                    }
                    let measured = bench.run(number, prompt, decoding, *setting)?;
                    group.add(index, measured, &mut bench)?;
                    progress.advance(1);
                }
            }
            evaluated.add(group, recipe)?;
        }
    }
    progress.finish();
    if console.is_interrupted() && evaluated.rows.is_empty() {
        return Err(Interrupted.into());
    }
    let evaluation =
        write(recipe, evaluate, device, &pair, head.as_ref(), &datasets, evaluated, console)?;
    if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(evaluation) }
}

/// A prompt file's prompts.
struct Dataset {
    name: String,
    prompts: Vec<Prompt>,
}

/// Of each file at most `num_prompts` prompts, spread evenly, so that a file sorted by category
/// gives all of them.
fn choose_prompts(
    evaluate: &EvaluateRecipe,
    sources: Vec<Source>,
    pair: &Pair,
    console: &Console,
) -> Result<Vec<Dataset>> {
    sources
        .into_iter()
        .map(|mut source| {
            if evaluate.skip_long_prompts {
                source.drop_long(pair, console)?;
            }
            let all = source.prompts;
            let count = evaluate.num_prompts.unwrap_or(all.len()).min(all.len());
            let name = all.first().map(|p| p.source.clone()).unwrap_or_default();
            let total = all.len();
            let chosen: Vec<usize> = (0..count).map(|i| i * total / count).collect();
            let prompts = all
                .into_iter()
                .enumerate()
                .filter(|(i, _)| chosen.binary_search(i).is_ok())
                .map(|(_, prompt)| prompt)
                .collect();
            Ok(Dataset { name, prompts })
        })
        .collect()
}

/// A head and where it came from.
struct Head {
    head: AcceptanceHead,
    config: AcceptanceHeadConfig,
    dir: PathBuf,
}

/// Reads the head that the recipe names, or trains.
fn read_head(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    pair: &Pair,
    device: &Device,
) -> Result<Option<Head>> {
    let dir = match (&evaluate.head, &recipe.head) {
        (Some(dir), _) => dir.clone(),
        (None, Some(_)) => recipe.head_dir(),
        (None, None) => return Ok(None),
    };
    if !dir.join("config.json").is_file() {
        bail!(
            "there is no acceptance head in `{}`; \
             hint: run `draftsmith train-head` with this recipe first, or set `evaluate.head`",
            dir.display()
        );
    }
    let draft = pair.draft.as_ref().context("a pair for evaluation has a draft")?;
    let (config, head) = AcceptanceHead::from_dir(&dir, draft.config().hidden_size, device)?;
    let draft_hash = hash_dir(recipe.need_draft("evaluate")?)?;
    if config.draft_hash.as_ref().is_some_and(|hash| *hash != draft_hash) {
        bail!(
            "the head in `{}` was trained on another draft (hash {}, this one's is {draft_hash}): \
             train it again, or point `models.draft` at the draft it belongs to",
            dir.display(),
            config.draft_hash.unwrap_or_default()
        );
    }
    Ok(Some(Head { head, config, dir }))
}

/// All runs of one dataset under one decoding.
struct Group<'a> {
    dataset: &'a Dataset,
    decoding: Decoding,
    settings: &'a [Setting],
    /// A list a setting, an entry a prompt.
    runs: Vec<Vec<Measured>>,
    lossless: Vec<bool>,
    num_forgiven_ties: usize,
}

impl<'a> Group<'a> {
    fn new(dataset: &'a Dataset, decoding: Decoding, settings: &'a [Setting]) -> Self {
        Self {
            dataset,
            decoding,
            settings,
            runs: vec![Vec::new(); settings.len()],
            lossless: vec![true; settings.len()],
            num_forgiven_ties: 0,
        }
    }

    /// Takes a run in; a greedy one is compared with the plain run of its prompt, which came first.
    fn add(&mut self, index: usize, measured: Measured, bench: &mut Bench<'_>) -> Result<()> {
        if self.decoding == Decoding::Greedy
            && let Some(plain) = self.runs[0].get(measured.prompt)
        {
            match bench.compare(plain, &measured)? {
                Agreement::Same => {}
                Agreement::Tie => self.num_forgiven_ties += 1,
                Agreement::Different => self.lossless[index] = false,
            }
        }
        self.runs[index].push(measured);
        Ok(())
    }

    /// Drops the runs of a prompt that not all settings were run on.
    fn keep_whole_prompts(&mut self) {
        let num_whole = self.runs.iter().map(Vec::len).min().unwrap_or(0);
        for runs in &mut self.runs {
            runs.truncate(num_whole);
        }
    }

    /// The cost model over all settings and prompts pooled; none where nothing can be fitted.
    fn fit(&self) -> Option<Fit> {
        let observations: Vec<Observation> = self
            .runs
            .iter()
            .flatten()
            .filter(|run| run.trace.num_tokens > 0)
            .map(|run| Observation::from(&run.trace))
            .collect();
        CostModel::fit(&observations).ok()
    }

    /// Rows over all prompts, and over each category where there are several.
    fn rows(&self, fit: Option<&Fit>) -> Vec<ResultRow> {
        let mut rows = self.category_rows(ALL_CATEGORIES, fit, |_| true);
        let mut categories: BTreeMap<&str, ()> = BTreeMap::new();
        for prompt in &self.dataset.prompts {
            categories.insert(prompt.category.as_deref().unwrap_or_default(), ());
        }
        categories.remove("");
        if categories.len() > 1 {
            for category in categories.keys() {
                rows.extend(self.category_rows(category, fit, |run| {
                    self.dataset.prompts[run.prompt].category.as_deref() == Some(*category)
                }));
            }
        }
        rows
    }

    fn category_rows(
        &self,
        category: &str,
        fit: Option<&Fit>,
        belongs: impl Fn(&Measured) -> bool,
    ) -> Vec<ResultRow> {
        let traces: Vec<(usize, Trace)> = self
            .runs
            .iter()
            .map(|runs| {
                let of_category: Vec<&Measured> = runs.iter().filter(|r| belongs(r)).collect();
                (of_category.len(), Trace::merge(of_category.into_iter().map(|r| &r.trace)))
            })
            .collect();
        let plain = &traces[0].1;
        let row = |(index, (num_prompts, trace)): (usize, &(usize, Trace))| {
            let setting = self.settings[index];
            let context = RowContext {
                dataset: self.dataset.name.clone(),
                category: category.to_owned(),
                drafter: setting.drafter(),
                stop_rule: setting.stop_rule(),
                setting: setting.parameter(),
                decoding: self.decoding,
                num_prompts: *num_prompts,
                plain_tokens_per_second: Some(tokens_per_second(plain)),
                modelled_speedup: fit.map(|fit| {
                    modelled_tokens_per_second(trace, fit) / modelled_tokens_per_second(plain, fit)
                }),
                // A sampled output is another draw of the same law: nothing to compare it with.
                lossless: (self.decoding == Decoding::Greedy).then_some(self.lossless[index]),
            };
            ResultRow::new(context, trace)
        };
        traces.iter().enumerate().map(row).collect()
    }

    fn answers(&self, index: usize, recipe: &Recipe) -> Vec<Answer> {
        let name = self.settings[index].name();
        self.runs[index]
            .iter()
            .map(|run| {
                let prompt = &self.dataset.prompts[run.prompt];
                let mut choice = Choice::default();
                for turn in &run.turns {
                    choice.push_turn(turn.text.clone(), &turn.trace);
                }
                let category = prompt.category.clone().unwrap_or_else(|| prompt.source.clone());
                let model_id = format!("{}-{name}", recipe.name);
                Answer::new(question_id(prompt), category, model_id, vec![choice])
            })
            .collect()
    }

    fn decoding_name(&self) -> &'static str {
        if self.decoding == Decoding::Greedy { "greedy" } else { "sampled" }
    }
}

/// Tokens a second with rounds as the cost model times them, and prefill as it was measured.
fn modelled_tokens_per_second(trace: &Trace, fit: &Fit) -> f64 {
    let decode = fit.model.seconds(&Observation::from(trace));
    trace.num_tokens as f64 / (trace.prefill_time.as_secs_f64() + decode)
}

/// The prompt's own id as its file has it, else ours.
fn question_id(prompt: &Prompt) -> QuestionId {
    match &prompt.own_id {
        Some(serde_json::Value::Number(number)) => QuestionId::Number(number.clone()),
        Some(serde_json::Value::String(text)) => QuestionId::Text(text.clone()),
        _ => prompt.id.as_str().into(),
    }
}

/// What all groups left.
#[derive(Default)]
struct Evaluated {
    rows: Vec<ResultRow>,
    groups: Vec<GroupSummary>,
    /// File name and text of each answers file.
    answers: Vec<(String, String)>,
}

impl Evaluated {
    fn add(&mut self, group: Group<'_>, recipe: &Recipe) -> Result<()> {
        if group.runs.iter().any(Vec::is_empty) {
            return Ok(());
        }
        let fit = group.fit();
        self.rows.extend(group.rows(fit.as_ref()));
        self.groups.push(GroupSummary {
            dataset: group.dataset.name.clone(),
            decoding: group.decoding,
            num_forgiven_ties: group.num_forgiven_ties,
            cost: fit.as_ref().map(CostSummary::from),
        });
        for (index, setting) in group.settings.iter().enumerate() {
            let name = format!(
                "answers/{}/{}-{}.jsonl",
                group.dataset.name,
                group.decoding_name(),
                setting.name()
            );
            self.answers.push((name, answers_to_jsonl(&group.answers(index, recipe))?));
        }
        Ok(())
    }
}

#[expect(clippy::too_many_arguments, reason = "everything that provenance has to name")]
fn write(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    device: &Device,
    pair: &Pair,
    head: Option<&Head>,
    datasets: &[Dataset],
    mut evaluated: Evaluated,
    console: &Console,
) -> Result<Evaluation> {
    sort_rows(&mut evaluated.rows);
    // What an interrupted evaluation has measured is kept apart from whole ones.
    let dir = if console.is_interrupted() {
        recipe.evaluation_dir().with_file_name("evaluation-partial")
    } else {
        recipe.evaluation_dir()
    };
    let mut models = vec![describe("target", &recipe.models.target, pair.target.config())?];
    if let (Some(draft), Some(path)) = (&pair.draft, &recipe.models.draft) {
        models.push(describe("draft", path, draft.config())?);
    }
    if let Some(head) = head {
        let kind = if head.config.is_tied() { "tied" } else { "untied" };
        models.push(ModelSummary {
            role: "head".to_owned(),
            name: head.dir.display().to_string(),
            description: format!(
                "acceptance head, {} {kind} blocks of width {}",
                head.config.num_layers, head.config.hidden_size
            ),
            hash: hash_dir(&head.dir)?,
        });
    }
    let summary = EvaluationSummary {
        recipe: recipe.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        device: format!("{device:?}"),
        machine: machine::describe(),
        versions: machine::versions(),
        models,
        max_new_tokens: evaluate.max_new_tokens,
        seeds: vec![recipe.seed],
        datasets: datasets
            .iter()
            .map(|d| DatasetSummary { name: d.name.clone(), num_prompts: d.prompts.len() })
            .collect(),
        groups: evaluated.groups,
    };
    for (name, text) in &evaluated.answers {
        write_text(&dir.join(name), text)?;
    }
    let report = dir.join("report.html");
    write_text(&report, &render_html(&evaluated.rows, &summary)?)?;
    write_text(&dir.join("summary.json"), &summary_to_json(&summary)?)?;
    write_text(&dir.join("results.json"), &results_to_json(&evaluated.rows)?)?;
    recipe.write_beside(&dir)?;
    let num_forgiven: usize = summary.groups.iter().map(|g| g.num_forgiven_ties).sum();
    if num_forgiven > 0 {
        console.note(format!(
            "evaluate: {num_forgiven} greedy mismatches forgiven: plain decoding's two best \
             logits are within 1e-5 of each other there"
        ));
    }
    let evaluation = Evaluation { rows: evaluated.rows, report };
    console.text(render_table(&evaluation.rows, console.width(), console.colour()))?;
    console.text(format!("report: {}\n", evaluation.report.display()))?;
    console.document(&evaluation.rows)?;
    Ok(evaluation)
}

fn describe(role: &str, dir: &std::path::Path, config: &LlamaConfig) -> Result<ModelSummary> {
    Ok(ModelSummary {
        role: role.to_owned(),
        name: dir.display().to_string(),
        description: format!(
            "Llama architecture, {} layers, hidden {}, {} heads ({} key/value), vocabulary {}, \
             {:.1} M parameters",
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.vocab_size,
            config.num_parameters() as f64 / 1e6
        ),
        hash: hash_dir(dir)?,
    })
}

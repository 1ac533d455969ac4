//! `survey`: estimates whether speculation pays, with a draft model, a trained drafter or neither.
//!
//! The target answers some prompts. The drafter is recorded along the answers as in `record`, and
//! every stop rule is replayed at given or measured costs. With so few prompts we
//! cross-validate: each half of the answers is scored with the settings and heads chosen on the
//! other half. A survey writes only to a temporary directory; the command writes a server's settings,
//! if it chose some, to `survey-SERVER/`. If servers run the target, it uses
//! only what they return.

mod costs;
pub mod halves;
pub mod pair;
mod probe;
pub mod read_out;
pub mod target_alone;
pub mod verdict;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use draftsmith_data::Prompt;
use draftsmith_model::WeightDtype;
use draftsmith_report::duration_text;
use draftsmith_served::{Secret, ServerHints, ServerRecipe};
use draftsmith_theory::{
    Decoding, DrafterId, Drafting, Estimate, LookupFirst, NgramSimple, StoredAnswers, setting_text,
};
use serde::Serialize;
use serde_json::json;

use self::pair::PairSurvey;
use self::target_alone::TargetSurvey;
use self::verdict::Advice;
use crate::costs::TimedServer;
use crate::settings::{ServerSettings, ServerTuning};
use draftsmith_recipe::exports::config_keys::read_key;
use draftsmith_recipe::kinds::model;
use draftsmith_recipe::{
    Bar, DrafterRecipe, DrafterRecipes, Ends, GivenCosts, Kinds, LoadedDrafters, PromptChoice,
    Reading, Recipe, Runtime, ServedDrafter, Watch, Workspace, read_server, read_sources,
};
use draftsmith_tune::answers::TargetAnswer;
use draftsmith_tune::conversation::SetPrompt;
use draftsmith_tune::decoders::target_speed;
use draftsmith_tune::recorder::{AnswerRecorder, RecordedModels};
use draftsmith_tune::server_access::ServerAccess;

/// The maximum number of candidates in a round.
const MAX_LENGTH: usize = 10;

/// The minimum number of answers for cross-validation.
const MIN_ANSWERS: usize = 4;

/// The value of [`SurveySettings::answers`] that selects the answers to earlier prompts, which servers store. The
/// prompts keep the order of their files.
pub const EARLIER: &str = "earlier";

/// The approximate share of a survey's time that the target's answers take.
const SHARE_OF_ANSWERS: f64 = 0.15;

/// The hints of a survey, whose `--server` can also name a file with keys.
const SURVEY_FLAGS: ServerHints = ServerHints {
    url: "`--server`",
    token: "give a file with `--server` whose `api_key_env` names the environment variable that holds a valid token",
    too_slow: "give a file with `--server` that has a longer `timeout_s`, or a lower `concurrency`",
};

/// The settings of a survey.
#[derive(Debug)]
pub struct SurveySettings {
    /// The target's checkpoint directory, its name on the Hugging Face Hub, or a GGUF file.
    pub target: PathBuf,
    /// The directory of the target's tokenizer; the target's if absent.
    pub tokenizer: Option<PathBuf>,
    /// The draft model's directory or Hub name, or the directory of a trained drafter. If absent, we
    /// survey the target's own first layers.
    pub draft: Option<PathBuf>,
    /// The prompt files.
    pub prompts: Vec<PathBuf>,
    /// The number of prompts, spread evenly over all files.
    pub num_prompts: usize,
    /// The maximum number of new tokens per answer.
    pub max_new_tokens: usize,
    /// The decoding settings of answers.
    pub decoding: Decoding,
    /// The end tokens and stop strings of answers.
    pub ends: Ends,
    /// A server that runs the target: its URL up to `/v1`, or a file with keys of `[data.server]`.
    pub server: Option<String>,
    /// A file of stored answers, which look-ups search, or [`EARLIER`].
    pub answers: Option<PathBuf>,
    /// A file with costs; if absent, they are measured.
    pub costs: Option<PathBuf>,
    /// A server for which to choose settings of the draft model or of llama.cpp's lookup.
    pub tuning: Option<ServerTuning>,
    /// The chat template that replaces the target's.
    pub chat_template: Option<String>,
    /// The seed of all random draws.
    pub seed: u64,
    /// The dtype that models compute in.
    pub dtype: WeightDtype,
}

/// The result of a survey.
#[derive(Debug, Serialize)]
pub struct Survey {
    /// The target's directory or name.
    pub target: PathBuf,
    /// The directory of the target's tokenizer; omitted if it is the target's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// The drafter's directory or name; null without a drafter.
    pub draft: Option<PathBuf>,
    /// The drafter's kind, as in recipes; null without a drafter.
    pub kind: Option<&'static str>,
    /// The directory or name of the drafter as servers load it; null if none can.
    pub served_as: Option<String>,
    /// The file of the stored answers that look-ups search, or [`EARLIER`]; null without.
    pub answers: Option<PathBuf>,
    /// The hash of the target that the drafter was trained for, if it is another one; null otherwise.
    pub trained_for: Option<String>,
    /// How the answers were decoded.
    pub decoding: Decoding,
    /// The seed of random draws.
    pub seed: u64,
    /// The number of prompts.
    pub num_prompts: usize,
    /// The number of answers, one per turn.
    pub num_answers: usize,
    /// The number of tokens in all answers.
    pub num_tokens: usize,
    /// The settings that servers have and that gain, the best first.
    pub in_servers: Vec<ServerAdvice>,
    /// The findings.
    #[serde(flatten)]
    pub found: SurveyResult,
}

/// A setting that servers have.
#[derive(Debug, Serialize)]
pub struct ServerAdvice {
    /// The setting in words, such as `K = 3`.
    pub setting: String,
    /// The expected speedup over plain decoding, minus 1.
    pub expected_gain: Estimate,
    /// The command that exports a trained drafter, then the flags of each server after its name.
    pub flags: Vec<String>,
}

impl ServerAdvice {
    /// Lists the settings of a survey that gain, the best first: prompt lookup, and the drafter's best candidate
    /// length.
    fn all(found: &SurveyResult, recipe: &Recipe, is_sampled: bool) -> Vec<Self> {
        let (alone, served) =
            (ServedDrafter::of_target(&recipe.models.target), recipe.served(DrafterId::DRAFT));
        let (look_ups, fixed) = match found {
            SurveyResult::Pair(found) => (found.look_ups, Some(&found.fixed)),
            SurveyResult::Target(found) => (found.look_ups, None),
        };
        let LookupFirst { answers, min_match: num_matched, most } = look_ups.look_ups;
        // llama.cpp proposes no fewer candidates than it matches tokens.
        let ngram = NgramSimple { num_matched, most: most.max(num_matched) };
        // vLLM, which searches earlier answers, has no minimum match.
        let is_known = !answers || num_matched == 1;
        let drafting = if answers { Drafting::suffix(most) } else { Drafting::look_up(ngram) };
        let mut all = Vec::from_iter(is_known.then_some((
            "prompt lookup",
            drafting,
            look_ups.speedup,
            &alone,
        )));
        if let Some((served, fixed)) = served.as_ref().zip(fixed) {
            let length = served.whole_block.unwrap_or(fixed.config.parameter() as usize);
            all.push(("the drafter", Drafting::fixed(length), fixed.speedup, served));
        }
        all.retain(|(.., speedup, _)| speedup.low > 1.0);
        all.sort_by(|one, other| other.2.value.total_cmp(&one.2.value));
        let advice = all.into_iter().map(|(what, drafting, speedup, served)| {
            let all = [Runtime::LlamaCpp, Runtime::Vllm, Runtime::Sglang];
            let known = match drafting.num_matched {
                Some(_) if drafting.is_suffix => &all[1..2],
                Some(_) => &all[..2],
                None => &all,
            };
            let known = known.iter().copied().filter(|it| served.flags.is_loaded_by(*it));
            let flags =
                |it: Runtime| format!("{}: {}", it.name(), served.flags(it, drafting, is_sampled));
            Self {
                setting: format!("{what}, {}", drafting.text()),
                expected_gain: speedup.map(|speedup| speedup - 1.0),
                flags: served.export.iter().cloned().chain(known.map(flags)).collect(),
            }
        });
        advice.collect()
    }
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
/// The findings for a target with or without a drafter.
pub enum SurveyResult {
    /// The findings for a target and a drafter.
    Pair(Box<PairSurvey>),
    /// The findings for a target without a drafter.
    Target(Box<TargetSurvey>),
}

impl Survey {
    /// Returns the settings of a server, if the survey chose some.
    pub fn server_mut(&mut self) -> Option<&mut ServerSettings> {
        match &mut self.found {
            SurveyResult::Pair(found) => found.server.as_mut(),
            SurveyResult::Target(found) => found.server.as_mut(),
        }
    }

    /// Returns the lines of a recipe that do what the survey advises; `None` if it advises against
    /// speculation, or to look up [`EARLIER`] answers, which only servers store.
    pub fn recipe_lines(&self) -> Option<String> {
        let (verdict, exit_layer, draft_vocabulary) = match &self.found {
            SurveyResult::Pair(found) => (&found.verdict, None, None),
            SurveyResult::Target(found) => {
                (&found.verdict, found.best_exit_layer, found.draft_vocabulary)
            }
        };
        let kind = self.kind.and_then(|kind| Kinds::default().get(kind));
        let model = kind.zip(self.draft.as_ref()).and_then(|(kind, draft)| {
            let (key, dir) = (kind.export.as_ref()?.key, json!(draft.display().to_string()));
            Some(format!("drafters.draft = {{ kind = \"{}\", {key} = {dir}", kind.name))
        });
        Some(match verdict.advice {
            Advice::DoNotSpeculate => return None,
            Advice::TrainHead => format!(
                "{}, head = {{ form = \"look-ahead\", labels = \"rollouts\", rejection_weight = 1.0 }} }}",
                model?
            ),
            Advice::TrainAdapter => match exit_layer {
                Some(layer) => {
                    format!("drafters.adapter = {{ kind = \"adapter\", exit_layer = {layer} }}")
                }
                None => {
                    let vocabulary = draft_vocabulary
                        .map_or_else(String::new, |size| format!(", draft_vocabulary = {size}"));
                    format!("drafters.eagle = {{ kind = \"eagle3\"{vocabulary} }}")
                }
            },
            Advice::JustSet => {
                let rule = verdict.config.as_ref()?;
                let (name, setting) = (rule.name().file_name(), rule.parameter());
                format!("{}, rules = {{ {name} = [{setting}] }} }}", model?)
            }
            Advice::JustLookUp => {
                let LookupFirst { answers, min_match, most } = verdict.look_ups?;
                let searched = if answers { ", searched = \"answers\"" } else { "" };
                let path = self.answers.as_ref().filter(|_| answers);
                if path.is_some_and(|path| path.as_os_str() == EARLIER) {
                    return None;
                }
                let path =
                    path.map(|path| format!("answers = {}\n", json!(path.display().to_string())));
                path.unwrap_or_default()
                    + &format!(
                        "drafters.lookup = {{ kind = \"prompt-lookup\"{searched}, min_match = {min_match}, rules.fixed = [{most}] }}"
                    )
            }
        })
    }
}

/// The input of a survey.
struct Surveyor<'a> {
    workspace: &'a Workspace,
    models: RecordedModels<'a>,
    answers: Vec<TargetAnswer>,
    decoding: Decoding,
    max_new_tokens: usize,
    /// The costs that the user gave, if any.
    given: Option<&'a GivenCosts>,
    /// The server for which to choose settings, if any.
    tuning: Option<&'a ServerTuning>,
    /// The stored answers that look-ups search; `None` without any.
    stored: Option<Arc<StoredAnswers>>,
    /// The target and the drafter, if any, as given by the user.
    recipe: &'a Recipe,
    seed: u64,
    watch: &'a dyn Watch,
}

/// Surveys a target.
///
/// # Errors
/// If a file is broken, a model fails, or there are too few answers.
pub fn survey(settings: &SurveySettings, device: &Device, watch: &dyn Watch) -> Result<Survey> {
    let SurveySettings { decoding, seed, dtype, .. } = *settings;
    let answers = settings.answers.clone().filter(|path| path.as_os_str() != EARLIER);
    let stores_earlier = answers != settings.answers;
    ensure!(
        !stores_earlier || decoding.is_greedy(),
        "`--answers earlier` is for greedy answers; hint: leave out the temperature, or name a file of \
         `draftsmith build-datastore`"
    );
    let mut recipe = Recipe { answers, ..recipe_of(settings)? };
    recipe.models.tokenizer.clone_from(&settings.tokenizer);
    let given = settings.costs.as_deref().map(GivenCosts::read).transpose()?;
    let sources = read_sources(&settings.prompts, &Reading::default())?;
    let server = settings.server.as_deref().map(server_of).transpose()?;
    server.iter().try_for_each(|server| check_server(server, &decoding))?;
    let (devices, served_as) = (vec![device.clone()], server.as_ref().map(|it| &*it.model));
    let mut workspace = recipe.open(served_as, dtype, devices, watch)?;
    workspace.text.ends = settings.ends.clone();
    let trained_for = trained_for_other(settings.draft.as_deref(), &workspace)?;
    workspace.takes_others = trained_for.is_some();
    let dir = tempfile::tempdir().context("cannot make a temporary directory")?;
    let models = match &server {
        None => RecordedModels::Pair(workspace.pair()?),
        Some(server) => {
            let journal = dir.path().join("served.jsonl");
            let access = ServerAccess { server, seed, journal, hints: SURVEY_FLAGS };
            RecordedModels::served(&workspace, access)?
        }
    };
    let num_prompts = Some(settings.num_prompts);
    let choice = PromptChoice { num_prompts, skip_long: true };
    let prompts = choice.of_all(&sources, models.text(), watch)?;
    let mut surveyor = Surveyor {
        workspace: &workspace,
        models,
        answers: Vec::new(),
        stored: workspace.answers()?,
        decoding,
        max_new_tokens: settings.max_new_tokens,
        given: given.as_ref(),
        tuning: settings.tuning.as_ref(),
        recipe: &recipe,
        seed,
        watch,
    };
    surveyor.note_duration(&prompts)?;
    let prompts: Vec<SetPrompt> = prompts.into_iter().map(SetPrompt::Conversation).collect();
    surveyor.answers = surveyor.answer(&prompts)?;
    if stores_earlier {
        let answers = surveyor.answers.iter().map(|answer| &answer.response_ids[..]);
        surveyor.stored = Some(Arc::new(StoredAnswers::of_run(&answers.collect::<Vec<_>>())));
    }
    let found = match settings.draft {
        Some(_) => SurveyResult::Pair(Box::new(pair::survey(&surveyor)?)),
        None => SurveyResult::Target(Box::new(target_alone::survey(&surveyor)?)),
    };
    let answers = &surveyor.answers;
    Ok(Survey {
        target: settings.target.clone(),
        tokenizer: settings.tokenizer.clone(),
        draft: settings.draft.clone(),
        served_as: recipe.served(DrafterId::DRAFT).map(|served| served.model),
        kind: recipe.drafters.get(DrafterId::DRAFT).map(|it| it.kind.entry().name),
        answers: settings.answers.clone(),
        trained_for,
        in_servers: ServerAdvice::all(&found, &recipe, !decoding.is_greedy()),
        decoding,
        seed,
        num_prompts: prompts.len(),
        num_answers: answers.len(),
        num_tokens: answers.iter().map(|answer| answer.response_ids.len()).sum(),
        found,
    })
}

/// Creates a recipe of the target and the drafter, if any. If the drafter is no directory here, it is
/// the name of a draft model on the Hub.
fn recipe_of(settings: &SurveySettings) -> Result<Recipe> {
    let mut drafters = DrafterRecipes::default();
    if let Some(dir) = &settings.draft {
        let found = dir.is_dir().then(|| Kinds::default().found_in(dir)).transpose()?;
        let kind = found.map_or(Some(&model::ENTRY), |found| found.kind);
        let kind = kind.and_then(|kind| kind.in_dir(dir));
        let kind = kind.with_context(|| {
            let dir = dir.display();
            format!("`--draft {dir}` is an acceptance head; hint: give the drafter that it is for")
        })?;
        ensure!(
            settings.server.is_none() || kind.model().is_some(),
            "`--server` needs a draft model, and `{}` reads hidden states of the target's layers; hint: \
             write a recipe with `[data.server.states]`, for `record` and `tune`",
            dir.display()
        );
        drafters.push(DrafterId::DRAFT, DrafterRecipe::new(kind));
    }
    Ok(Recipe::of_drafters(settings.target.clone(), settings.chat_template.clone(), drafters))
}

/// Returns the hash of the target that a drafter was trained for, if it is another one. Such a drafter, as
/// that of a model before its fine-tuning, is measured and not refused.
fn trained_for_other(draft: Option<&Path>, workspace: &Workspace) -> Result<Option<String>> {
    let Some(dir) = draft.filter(|dir| dir.join("config.json").is_file()) else { return Ok(None) };
    let Some(then) = read_key::<Option<String>>(dir, "target_hash")?.flatten() else {
        return Ok(None);
    };
    let is_other = workspace.models.target_hash()? != then;
    Ok(is_other.then_some(then))
}

/// Reads server settings from a file, or creates them for a server with this URL.
fn server_of(given: &str) -> Result<ServerRecipe> {
    if !given.starts_with("http://") && !given.starts_with("https://") {
        return read_server(given.as_ref());
    }
    let usual = ServerRecipe { urls: vec![given.to_owned()], ..ServerRecipe::default() };
    let timeout = Duration::from_secs_f64(usual.timeout_s);
    let opened = TimedServer::open(given, None, Secret::default(), timeout, SURVEY_FLAGS)?;
    Ok(ServerRecipe { model: opened.model, ..usual })
}

/// Returns an error for settings under which server responses contain too little.
fn check_server(server: &ServerRecipe, decoding: &Decoding) -> Result<()> {
    ensure!(
        !server.takes_weights(),
        "key `labels` of the server is `weights`, and a survey with `--server` reads none; hint: leave \
         it out, or survey without `--server`"
    );
    ensure!(
        decoding.is_greedy() || !decoding.is_penalised(),
        "servers return log-probabilities without a repetition penalty; hint: leave the penalty \
         out, or survey greedy answers"
    );
    Ok(())
}

impl Surveyor<'_> {
    /// Returns whether the drafter is a separate model.
    fn has_draft_model(&self) -> bool {
        self.workspace.models.draft_dir().is_some()
    }

    /// Returns the settings with which servers draft with the drafter.
    ///
    /// # Errors
    /// If no server can load the drafter.
    fn served(&self) -> Result<ServedDrafter> {
        let served = self.recipe.served(DrafterId::DRAFT);
        let served = served.filter(|it| self.tuning.is_none_or(|to| to.kind.loads(it.flags)));
        served.context("no server can load such a drafter; hint: leave out `--for`")
    }

    /// Loads the drafter.
    fn drafter(&self) -> Result<LoadedDrafters> {
        let loading = self.recipe.loading(DrafterId::DRAFT, self.workspace);
        Ok(LoadedDrafters { all: vec![loading.load()?], answers: self.workspace.answers()? })
    }

    /// Returns the maximum number of candidates in a round.
    fn max_length(&self) -> usize {
        let drafter = self.recipe.drafters.get(DrafterId::DRAFT);
        let most = drafter.and_then(|it| it.kind.most_candidates());
        most.map_or(MAX_LENGTH, |most| most.min(MAX_LENGTH))
    }

    /// Shows a note with the number of tokens to decode and the approximate duration.
    fn note_duration(&self, prompts: &[Prompt]) -> Result<()> {
        let num_turns: usize = prompts.iter().map(|prompt| prompt.turns.len()).sum();
        let num_tokens = num_turns * self.max_new_tokens;
        let RecordedModels::Pair(pair) = &self.models else { return Ok(()) };
        let first = prompts.first().context("there is a prompt")?;
        let speed = target_speed(pair, &pair.text.encode_turn(first, 0, &[])?)?;
        let seconds = SHARE_OF_ANSWERS.recip() * num_tokens as f64 / speed;
        self.watch.note(format!(
            "survey: {num_turns} answers of at most {num_tokens} tokens in all; about {} at the target's \
             {} tokens/s",
            duration_text(seconds),
            setting_text(Some(speed))
        ));
        Ok(())
    }

    fn recorder<'r>(&'r self, progress: &'r dyn Bar) -> AnswerRecorder<'r> {
        AnswerRecorder {
            models: self.models.clone(),
            max_new_tokens: self.max_new_tokens,
            seed: self.seed,
            max_length: self.max_length(),
            labels: true,
            watch: self.watch,
            progress,
        }
    }

    /// Decodes the target's answers to the prompts.
    fn answer(&self, prompts: &[SetPrompt]) -> Result<Vec<TargetAnswer>> {
        let num_turns: usize = prompts.iter().map(SetPrompt::num_turns).sum();
        let progress = self.watch.bar("survey", "answers", num_turns as u64);
        progress.message("target");
        let answers = self.recorder(&*progress).answer(prompts, self.decoding)?;
        drop(progress);
        ensure!(
            answers.len() >= MIN_ANSWERS,
            "there are {} answers, and a survey needs {MIN_ANSWERS} or more; hint: some 50 prompts \
             are enough",
            answers.len()
        );
        Ok(answers)
    }

    /// Splits the answers' indices into two halves, between which conversations alternate.
    fn halves(&self) -> [Vec<usize>; 2] {
        let mut halves = [Vec::new(), Vec::new()];
        let mut first: Option<&str> = None;
        let mut half = 1;
        for (nth, answer) in self.answers.iter().enumerate() {
            // The id of a later turn is the id of the first turn followed by `#turn`.
            let goes_on = first.is_some_and(|first| {
                answer.id.strip_prefix(first).is_some_and(|rest| rest.starts_with('#'))
            });
            if !goes_on {
                first = Some(&answer.id);
                half = 1 - half;
            }
            halves[half].push(nth);
        }
        halves
    }
}

//! Tests across stages on real models. Replaying a rule on the recorded test set gives the same
//! counts as its evaluation, files that do not match the recipe are rejected, and a run reads each
//! model once.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_model::{HeadForm, HeadInput, WeightDtype};
use draftsmith_report::{ALL_CATEGORIES, DecodingName, DrafterName, ResultRow};
use draftsmith_theory::{
    AcceptanceModel, Bounds, CandidateProbThresholdConfig, ConfidenceHeadConfig,
    ConfidenceThresholdConfig, Counts, DrafterId, EntropyThresholdConfig, FixedLengthConfig,
    HeadTiming, HeuristicConfig, JointConfidenceConfig, OnlineAcceptanceConfig, Recordings,
    RejectionThresholdConfig, StopRuleConfig, StopRuleName,
};
use draftsmith_train::{Eagle3Training, HeadLabels, HeadTraining, predictions_along};

use super::StageJob;
use super::{build_data, evaluate, record, run, train_drafter, train_head, tune};
use crate::console::Console;
use crate::test_support::{ChangeDrafters, Reads};
use draftsmith_recipe::kinds::eagle3::Eagle3Kind;
use draftsmith_recipe::{DrafterRecipe, HeadExport, Origin, Recipe, Workspace, head_within};
use draftsmith_tune::build_data::DamagedShards;
use draftsmith_tune::record::RecordedFile;
use draftsmith_tune::rollouts::{PromptSet, RecordedSet, RolloutFiles, RolloutKey};

impl<'a> StageJob<'a> {
    pub(crate) fn new(recipe: &'a Recipe, workspace: &'a Workspace, console: &'a Console) -> Self {
        Self { recipe, workspace, console }
    }
}

/// The maximum number of candidates under every rule, which is also the recorded length.
const MOST: usize = 8;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds a recipe with all output in `dir`, and writes its prompts. Its name is an absolute path,
/// which replaces any path that it is joined to.
fn recipe(dir: &Path) -> Recipe {
    let model = |name: &str| root().join("checkpoints/tiny").join(name);
    let prompts = std::fs::read_to_string(root().join("data/tiny/prompts/train.jsonl"))
        .expect("the embedded prompts are there");
    let lines: Vec<&str> = prompts.lines().take(40).collect();
    std::fs::write(dir.join("train.jsonl"), lines.join("\n")).expect("written");
    let conversation = r#"{"turns": ["What is 47 + 85?", "And twice that?"]}"#;
    let test = format!("{}\n{}\n{conversation}\n", lines[0], lines[7]);
    std::fs::write(dir.join("test.jsonl"), test).expect("written");
    let adapter = |exit_layer: usize| {
        format!(
            "[drafters.exit{exit_layer}]\nkind = 'adapter'\nexit_layer = {exit_layer}\n\
             max_candidate_length = {MOST}\n\
             rules = {{ fixed = [2, 8], confidence = [0.3, 0.6] }}\n\
             optimizer = {{ num_epochs = 1, learning_rate = 3e-3, validation_fraction = 0.2 }}\n"
        )
    };
    let adapters = adapter(2) + &adapter(5);
    let text = format!(
        "[models]\ntarget = '{}'\n\
         [drafters.draft]\nkind = 'model'\nmodel = '{}'\nmax_candidate_length = {MOST}\n\
         [drafters.draft.head]\nnum_layers = 1\n\
         [drafters.draft.head.optimizer]\n\
         num_epochs = 1\nlearning_rate = 1e-3\nvalidation_fraction = 0.3\n\
         {adapters}\
         [data]\nprompts = ['{train}']\nmax_new_tokens = 24\n\
         [tune]\nnum_prompts = 2\nmax_candidate_length = {MOST}\n\
         [evaluate]\nprompts = ['{test}']\nmax_new_tokens = 40\n\
         [evaluate.rules]\nfixed = [1, 3, 8]\nheuristic = [2, 5]\n\
         head = [0.3, 0.6]\nhead-without-lag = [0.3, 0.6]\n\
         confidence = [0.5, 0.8]\ncandidate-prob = [0.4]\n\
         joint-confidence = [0.3]\nonline-acceptance = [0.4]\nentropy = [0.3]\n",
        model("target").display(),
        model("draft").display(),
        train = dir.join("train.jsonl").display(),
        test = dir.join("test.jsonl").display(),
    );
    let mut recipe: Recipe = toml::from_str(&text).expect("a recipe");
    recipe.name = dir.join("out").display().to_string();
    recipe
}

fn workspace(recipe: &Recipe) -> Workspace {
    Workspace::new(&recipe.models.target, &recipe.drafters.models(), vec![Device::flex()])
}

/// Opens a workspace that logs to `reads` what it reads.
fn watched(recipe: &Recipe, reads: &Reads) -> Workspace {
    let Recipe { models, drafters, .. } = recipe;
    let devices = vec![Device::flex()];
    Workspace::open(&models.target, None, &drafters.models(), None, devices, reads).expect("opens")
}

/// Returns the directory of the draft model's acceptance head.
fn head_dir(recipe: &Recipe) -> PathBuf {
    recipe.head_dir(DrafterId::DRAFT).expect("it has one")
}

/// Rebuilds the stop rule of a results row.
fn rule(row: &ResultRow) -> StopRuleConfig {
    let bounds = Bounds { min: 1, max: MOST };
    let number = row.setting.expect("a rule has a number");
    let rejection = |without_lag| {
        StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: number,
            without_lag,
            bounds,
        })
    };
    let confidence_threshold = number;
    match row.stop_rule {
        StopRuleName::FixedLength => {
            StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: number as usize })
        }
        StopRuleName::Heuristic => {
            StopRuleConfig::Heuristic(HeuristicConfig { initial_length: number as usize, bounds })
        }
        StopRuleName::RejectionThreshold => rejection(false),
        StopRuleName::RejectionThresholdWithoutLag => rejection(true),
        StopRuleName::ConfidenceThreshold => {
            StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
                confidence_threshold,
                before_draw: false,
                bounds,
            })
        }
        StopRuleName::ConfidenceHead => StopRuleConfig::ConfidenceHead(ConfidenceHeadConfig {
            acceptance_threshold: number,
            bounds: Bounds { min: 0, ..bounds },
        }),
        StopRuleName::CandidateProbThreshold => {
            StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
                confidence_threshold,
                bounds,
            })
        }
        StopRuleName::JointConfidence => {
            StopRuleConfig::JointConfidence(JointConfidenceConfig { confidence_threshold, bounds })
        }
        StopRuleName::OnlineAcceptance => {
            StopRuleConfig::OnlineAcceptance(OnlineAcceptanceConfig {
                survival_threshold: number,
                start: AcceptanceModel::default(),
                bounds,
            })
        }
        StopRuleName::EntropyThreshold => {
            StopRuleConfig::EntropyThreshold(EntropyThresholdConfig {
                entropy_threshold: number,
                entropy_scale: 0.15,
                check_interval: 1,
                bounds,
            })
        }
        other => panic!("{other:?} is not evaluated"),
    }
}

fn read_recordings(
    recipe: &Recipe,
    drafter: DrafterName,
    set: PromptSet,
    decoding: DecodingName,
) -> Result<RecordedSet> {
    RolloutFiles::of(recipe, &workspace(recipe))?.read(RolloutKey { drafter, set, decoding })
}

#[test]
fn replay_counts_what_evaluation_counts() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let recipe = recipe(dir.path());
    let reads = Reads::default();
    let (workspace, console) = (watched(&recipe, &reads), Console::silent());
    build_data::run(StageJob::new(&recipe, &workspace, &console), DamagedShards::Refused)
        .expect("data");
    train_head::run(StageJob::new(&recipe, &workspace, &console), None).expect("a head");
    train_drafter::run(StageJob::new(&recipe, &workspace, &console), None).expect("adapters");
    let files = record::run(StageJob::new(&recipe, &workspace, &console)).expect("rollouts");
    assert_eq!(files.len(), 3 * 2 * 2, "drafters, sets, decodings");
    assert!(files.iter().all(|file| !file.kept && file.path.is_file()));

    let rows = evaluate::run(StageJob::new(&recipe, &workspace, &console)).expect("results").rows;
    everything_was_read_once(&reads);
    let mut num_compared = 0;
    for row in rows.iter().filter(|row| row.category == ALL_CATEGORIES) {
        if row.decoding != DecodingName::Greedy || row.drafter == DrafterName::None {
            continue;
        }
        let test = read_recordings(&recipe, row.drafter, PromptSet::Test, DecodingName::Greedy)
            .expect("recorded");
        assert_eq!(test.ids.len(), 4, "two prompts and two turns");
        assert_eq!(
            test.recordings.head.is_some(),
            row.drafter == DrafterName::Of(DrafterId::DRAFT)
        );
        let replayed = test.recordings.replay_counts(&rule(row)).expect("replays");
        assert_eq!(
            replayed.into_iter().sum::<Counts>(),
            row.counts,
            "{:?} {:?}",
            row.drafter,
            rule(row)
        );
        num_compared += 1;
    }
    assert_eq!(num_compared, (3 + 2 + 4 + 3 + 3) + 2 * (2 + 2 + 3 + 3));

    for file in &files {
        let set = read_recordings(&recipe, file.key.drafter, file.key.set, file.key.decoding)
            .expect("reads");
        let summary = set.summary();
        // An adapter trained for one epoch may never agree with the target.
        let least = if file.key.drafter == DrafterName::Of(DrafterId::DRAFT) { 0.5 } else { 0.0 };
        assert!(summary.num_rollouts > 0 && summary.share_accepted >= Some(least), "{summary:?}");
        if file.key.set == PromptSet::Validation {
            assert_eq!(set.ids.len(), 2);
            // The training of the head and of the adapters held out these rows.
            let is_held_out = |id: &String| draftsmith_theory::in_validation(id, 0.2);
            assert!(set.ids.iter().all(is_held_out), "{:?}", set.ids);
        }
    }
    stale_rollouts_are_refused(recipe, &files);
}

#[test]
fn a_head_that_looks_ahead_learns_from_rollouts_and_replays_as_it_decodes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut recipe = recipe(dir.path());
    recipe.drafters.keep(&["draft"]);
    let head = recipe.drafters.head_of("draft");
    head.form = HeadForm::LookAhead;
    head.inputs = vec![HeadInput::Entropy, HeadInput::TopProb];
    head.labels = HeadLabels::Rollouts;
    let evaluate = recipe.evaluate.as_mut().expect("a section");
    evaluate.rules = toml::from_str(
        "fixed = [1, 3, 8]\nheuristic = [2, 5]\nhead = [0.3, 0.6]\nhead-without-lag = [0.3, 0.6]",
    )
    .expect("rules");
    let (workspace, console) = (workspace(&recipe), Console::silent());
    build_data::run(StageJob::new(&recipe, &workspace, &console), DamagedShards::Refused)
        .expect("data");
    let trained =
        train_head::run(StageJob::new(&recipe, &workspace, &console), None).expect("a head");
    let path = recipe.data_dir().join("rollouts-draft-training-sampled.parquet");
    let (rows, provenance) = draftsmith_data::read_rollouts(&path, None).expect("rollouts");
    assert_eq!((provenance.head, provenance.max_length), (None, 1));
    let responses = rows.iter().filter(|row| row.is_response).count();
    assert_eq!(responses, 40);
    assert!(trained.scores.num_labels > 0);
    // The four held-out responses are scored by actual acceptance. The labels are only
    // probabilities.
    let losses = trained.over_online.expect("held-out responses");
    assert!(losses.head.is_finite() && losses.online < 1.0, "{losses:?}");
    assert!(losses.gain.low <= losses.gain.value && losses.gain.value <= losses.gain.high);

    // Another rejection weight reuses the rollouts. Another rollout length records them again.
    let changed = |path: &Path| path.metadata().expect("a file").modified().expect("a time");
    let written = changed(&path);
    let mut other = recipe.clone();
    other.drafters.head_of("draft").rejection_weight = 2.0;
    train_head::run(StageJob::new(&other, &workspace, &console), None).expect("another head");
    assert_eq!(changed(&path), written);
    other.drafters.head_of("draft").rollout_length = 2;
    train_head::run(StageJob::new(&other, &workspace, &console), None).expect("another head");
    let (longer, _) = draftsmith_data::read_rollouts(&path, None).expect("rollouts");
    let longest = longer.iter().filter(|row| !row.is_response);
    assert_eq!(longest.map(|row| row.candidates.candidate_ids.len()).max(), Some(2));

    record::run(StageJob::new(&other, &workspace, &console)).expect("recorded");
    let rows = evaluate::run(StageJob::new(&other, &workspace, &console)).expect("results").rows;
    let drafter = DrafterName::Of(DrafterId::DRAFT);
    let num_compared = assert_greedy_is_replayed(&other, drafter, Some(HeadTiming::AtDraw), &rows);
    assert_eq!(num_compared, 3 + 2 + 2 + 2);
    assert_predicted_as_decoded(&other, &workspace);
}

/// Checks that the head's predictions along recordings equal those made while recording.
fn assert_predicted_as_decoded(recipe: &Recipe, workspace: &Workspace) {
    let id = DrafterId::DRAFT;
    let recorded = read_recordings(recipe, id.into(), PromptSet::Test, DecodingName::Sampled);
    let recorded = recorded.expect("recorded").recordings;
    let kind = &recipe.drafters.get(id).expect("a draft").kind;
    let loading = recipe.loading(id, workspace);
    let draft = kind.frozen(&loading, workspace.models.dtype).expect("a draft");
    let dir = head_within(&recipe.export_dir(id));
    let head = HeadExport::read(&dir, draft.hidden_size(), workspace).expect("a head").head;
    let predicted = predictions_along(&draft, &[&head], &recorded, None);
    let predicted = predicted.expect("no source fails").remove(0);
    let again = recorded.with_head(HeadTiming::AtDraw, &predicted);
    let all = |recordings: &Recordings| -> Vec<f64> {
        let places = recordings.responses.iter().flat_map(|response| response.places.iter());
        let drafted =
            places.flat_map(|it| [&it.candidate].into_iter().chain(it.rollout.iter().flatten()));
        drafted.filter_map(|candidate| candidate.predicted_acceptance_prob).collect()
    };
    let (one, other) = (all(&recorded), all(&again));
    assert!(one.len() > 100 && one.len() == other.len(), "{} {}", one.len(), other.len());
    let furthest =
        one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
    assert!(furthest < 1e-4, "{furthest}");
}

/// Checks that greedy decoding with a drafter has the same counts as replay under each rule.
/// Returns the number of rules.
fn assert_greedy_is_replayed(
    recipe: &Recipe,
    drafter: DrafterName,
    head: Option<HeadTiming>,
    rows: &[ResultRow],
) -> usize {
    let test = read_recordings(recipe, drafter, PromptSet::Test, DecodingName::Greedy);
    let recordings = test.expect("recorded").recordings;
    assert_eq!(recordings.head, head);
    let is_compared = |row: &&ResultRow| {
        row.category == ALL_CATEGORIES
            && row.decoding == DecodingName::Greedy
            && row.drafter == drafter
    };
    let compare = |row: &ResultRow| {
        let replayed = recordings.replay_counts(&rule(row)).expect("replays");
        assert_eq!(replayed.into_iter().sum::<Counts>(), row.counts, "{:?}", rule(row));
    };
    rows.iter().filter(is_compared).map(compare).count()
}

#[test]
fn heads_of_both_drafters_replay_as_they_decode() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut recipe = recipe(dir.path());
    recipe.drafters.keep(&["draft", "exit2"]);
    let head = recipe.drafters.head_of("draft");
    head.inputs = vec![HeadInput::Entropy, HeadInput::TopProb];
    let of_adapter = HeadTraining {
        form: HeadForm::LookAhead,
        inputs: vec![HeadInput::TopProb],
        labels: HeadLabels::Rollouts,
        ..head.clone()
    };
    recipe.drafters.of("exit2").head = Some(Origin::Training(Box::new(of_adapter)));
    let (workspace, console) = (workspace(&recipe), Console::silent());
    build_data::run(StageJob::new(&recipe, &workspace, &console), DamagedShards::Refused)
        .expect("data");
    train_head::run(StageJob::new(&recipe, &workspace, &console), None).expect("a head");
    train_drafter::run(StageJob::new(&recipe, &workspace, &console), None).expect("an adapter");
    record::run(StageJob::new(&recipe, &workspace, &console)).expect("recorded");
    let rows = evaluate::run(StageJob::new(&recipe, &workspace, &console)).expect("results").rows;
    assert!(rows.iter().all(|row| row.lossless != Some(false)));
    let drafters = [
        (DrafterId::DRAFT, HeadTiming::AfterRead),
        (DrafterId::named("exit2"), HeadTiming::AtDraw),
    ];
    for (drafter, timing) in drafters {
        let num = assert_greedy_is_replayed(&recipe, DrafterName::Of(drafter), Some(timing), &rows);
        assert!(num > 5, "{num}");
    }
}

#[test]
fn an_eagle3_drafter_is_trained_measured_and_read_back() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut recipe = recipe(dir.path());
    let of_draft = recipe.drafters.head_of("draft").clone();
    recipe.drafters.keep(&["exit2"]);
    let training = Eagle3Training::default().with(|it| {
        it.num_steps = 3;
        it.common.draft_vocabulary = Some(300);
        it.common.optimizer = recipe.drafters.adapter_of("exit2").common.optimizer;
    });
    recipe.drafters.keep(&[]);
    let id = DrafterId::named("eagle");
    let kind = Arc::new(Eagle3Kind(Origin::Training(Box::new(training))));
    let head = HeadTraining {
        form: HeadForm::LookAhead,
        labels: HeadLabels::Rollouts,
        rollout_length: 3,
        ..of_draft
    };
    let drafter = DrafterRecipe::new(kind);
    let head = Some(Origin::Training(Box::new(head)));
    recipe.drafters.push(id, DrafterRecipe { head, ..drafter });
    let (workspace, console) = (workspace(&recipe), Console::silent());
    build_data::run(StageJob::new(&recipe, &workspace, &console), DamagedShards::Refused)
        .expect("data");
    let trained = || {
        let outcomes = train_drafter::run(StageJob::new(&recipe, &workspace, &console), None)
            .expect("trained");
        serde_json::to_value(outcomes).expect("it is JSON")[0].take()
    };
    let first = trained();
    assert_eq!((&first["drafter"], &first["kept"]), (&"eagle".into(), &false.into()));
    assert_eq!(first["layers"], serde_json::json!([2, 4, 5]));
    assert_eq!(first["scores"]["agreement"].as_array().expect("a list").len(), 3);
    assert!(first["vocabulary_coverage"].as_f64().expect("a share") > 0.5);
    assert!(first["head"]["scores"]["num_labels"].as_u64() > Some(100), "{first}");
    let again = trained();
    // JSON may round the last digit of a score.
    let counts = |outcome: &serde_json::Value| outcome["scores"]["agreement"].clone();
    assert_eq!((&again["kept"], counts(&again)), (&true.into(), counts(&first)));
    let rows = evaluate::run(StageJob::new(&recipe, &workspace, &console)).expect("results").rows;
    let own: Vec<&ResultRow> =
        rows.iter().filter(|row| row.drafter == DrafterName::Of(id)).collect();
    assert!(own.len() > 4 && own.iter().all(|row| row.lossless != Some(false)));
    assert!(own.iter().any(|row| row.counts.num_accepted > 0), "nothing was accepted");
    let files = record::run(StageJob::new(&recipe, &workspace, &console)).expect("recorded");
    assert_eq!(files.len(), 2 * 2, "sets, decodings");
    let head = Some(HeadTiming::AtDraw);
    let num = assert_greedy_is_replayed(&recipe, DrafterName::Of(id), head, &rows);
    assert!(num > 4, "{num}");
    assert!(own.iter().any(|row| rule(row).needs().acceptance_prob), "no rule reads the head");
    let tuned = tune::run(StageJob::new(&recipe, &workspace, &console)).expect("tuned");
    assert!(!tuned.is_empty());
    let tuned = evaluate::run(StageJob::new(&recipe, &workspace, &console)).expect("results").rows;
    assert!(tuned.iter().all(|row| row.lossless != Some(false)));
}

#[test]
fn a_run_reads_and_hashes_each_model_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut recipe = recipe(dir.path());
    recipe.drafters.keep(&["draft", "exit2"]);
    // We leave out tuning, because measuring costs takes longer on a busy machine.
    recipe.tune = None;
    recipe.evaluate.as_mut().expect("a section").decodings = vec![DecodingName::Greedy];
    let reads = Reads::default();
    let (workspace, console) = (watched(&recipe, &reads), Console::silent());
    run::run(StageJob::new(&recipe, &workspace, &console)).expect("runs");
    everything_was_read_once(&reads);
}

/// Checks that both models were read and hashed, and that nothing was read twice.
fn everything_was_read_once(reads: &Reads) {
    let mut reads = reads.all();
    for model in ["target", "draft"] {
        for what in [format!("hash of the {model}"), format!("weights of the {model}, F32")] {
            assert!(reads.contains(&what), "{what}: {reads:?}");
        }
    }
    reads.sort();
    let num_reads = reads.len();
    reads.dedup();
    assert_eq!(reads.len(), num_reads, "{reads:?}");
}

/// Checks that reading rollouts fails after something that they depend on has changed.
fn stale_rollouts_are_refused(recipe: Recipe, files: &[RecordedFile]) {
    let read = |recipe: &Recipe, drafter| {
        read_recordings(recipe, drafter, PromptSet::Validation, DecodingName::Sampled)
    };
    let refused = |recipe: &Recipe, drafter, expected: &[&str]| {
        let error = read(recipe, drafter).expect_err("refused").to_string();
        for part in expected {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    };
    let (draft, early) =
        (DrafterName::Of(DrafterId::DRAFT), DrafterName::Of(DrafterId::named("exit2")));
    let again = "run `draftsmith record` with this recipe again";
    let changed = |change: fn(&mut Recipe)| {
        let mut recipe = recipe.clone();
        change(&mut recipe);
        recipe
    };
    refused(
        &changed(|r| r.seed = 7),
        draft,
        &["-validation-sampled", "`seed` = 0", "7 now", again],
    );
    let longer = changed(|r| r.tune.as_mut().expect("a section").max_candidate_length = 9);
    refused(&longer, draft, &["`max_length` = 8", again]);
    let fewer = changed(|r| r.tune.as_mut().expect("a section").num_prompts = Some(1));
    refused(&fewer, draft, &["`limit` = 2", again]);
    let share =
        changed(|r| r.drafters.adapter_of("exit2").common.optimizer.validation_fraction = 0.1);
    refused(&share, draft, &["`prompts[0]` = ", again]);
    let cooler = changed(|r| r.evaluate.as_mut().expect("a section").temperature = 0.5);
    refused(&cooler, draft, &["`temperature` = 1.0", again]);
    let greedy = |recipe: &Recipe| {
        read_recordings(recipe, draft, PromptSet::Validation, DecodingName::Greedy)
    };
    greedy(&cooler).expect("greedy decoding has no temperature");
    let fewer = changed(|r| r.evaluate.as_mut().expect("a section").top_k = Some(3));
    refused(&fewer, draft, &["`top_k` = null", "3 now", again]);
    greedy(&fewer).expect("greedy decoding has no top-k");
    refused(&recipe, DrafterName::Of(DrafterId::named("exit3")), &["no drafter `exit3`"]);
    refused(&changed(|r| r.tune = None), draft, &["`[tune]`"]);

    // Changed keys in `config.json` keep the rollouts valid; changed weights do not.
    let head = head_dir(&recipe);
    let config = std::fs::read_to_string(head.join("config.json")).expect("a config");
    let tuned = config.replacen('{', "{\"tuned\": {\"greedy\": null},", 1);
    std::fs::write(head.join("config.json"), tuned).expect("written");
    read(&recipe, draft).expect("reads");
    let weights = head.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(&weights, &bytes).expect("written");
    refused(&recipe, draft, &["`head` = ", again]);
    read(&recipe, early).expect("an adapter has no head");

    // Now a file is truncated, then missing.
    let file = files.iter().find(|file| {
        (file.key.drafter, file.key.set, file.key.decoding)
            == (early, PromptSet::Validation, DecodingName::Sampled)
    });
    let path = &file.expect("recorded").path;
    let whole = std::fs::read(path).expect("rollouts");
    std::fs::write(path, &whole[..whole.len() / 2]).expect("written");
    refused(&recipe, early, &["not a whole Parquet file", again]);
    std::fs::remove_file(path).expect("removed");
    refused(&recipe, early, &["no rollouts", "run `draftsmith record` with this recipe first"]);
}

/// We call the stages directly, because the command line rejects the slow bf16 on the CPU, although
/// the stages support it.
#[test]
fn artifacts_made_in_bf16_are_marked_and_refused_in_f32() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut recipe = recipe(dir.path());
    let data = recipe.data.as_mut().expect("a section");
    (data.num_prompts, data.max_new_tokens) = (Some(12), 6);
    recipe.drafters.keep(&["draft", "exit2"]);
    let evaluate = recipe.evaluate.as_mut().expect("a section");
    (evaluate.max_new_tokens, evaluate.decodings) = (12, vec![DecodingName::Greedy]);
    evaluate.rules = toml::from_str("fixed = [1, 3, 8]\nhead = [0.3, 0.6]").expect("rules");
    recipe.drafters.of("exit2").rules =
        toml::from_str("fixed = [2, 8]\nconfidence = []").expect("rules");
    let console = Console::silent();
    let workspace = |dtype| {
        let mut workspace = workspace(&recipe);
        workspace.models.dtype = dtype;
        workspace
    };
    let [reduced, full] = [WeightDtype::Bf16, WeightDtype::F32].map(workspace);
    let refused = |result: Result<()>| {
        let error = result.expect_err("refused").to_string();
        assert!(error.contains("`dtype` = \"bf16\", which is \"f32\" now"), "{error}");
    };
    build_data::run(StageJob::new(&recipe, &reduced, &console), DamagedShards::Refused)
        .expect("data");
    let data = reduced.artifacts.data(&recipe.data_dir()).expect("it was built");
    assert_eq!(data.provenance.dtype, "bf16");
    refused(
        build_data::run(StageJob::new(&recipe, &full, &console), DamagedShards::Refused).map(drop),
    );
    refused(train_head::run(StageJob::new(&recipe, &full, &console), None).map(drop));
    // Trainings take their dtype from the recipe.
    let head = train_head::run(StageJob::new(&recipe, &reduced, &console), None).expect("a head");
    train_drafter::run(StageJob::new(&recipe, &reduced, &console), None).expect("an adapter");
    let config = std::fs::read_to_string(head.head_dir.join("config.json")).expect("a config");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!(config["training"]["dtype"], "f32");
    assert_eq!(config["training"]["data"]["dtype"], "bf16");

    record::run(StageJob::new(&recipe, &reduced, &console)).expect("rollouts");
    let (drafter, decoding) = (DrafterName::Of(DrafterId::DRAFT), DecodingName::Greedy);
    let key = RolloutKey { drafter, set: PromptSet::Test, decoding };
    let read = |workspace| RolloutFiles::of(&recipe, workspace).and_then(|files| files.read(key));
    read(&reduced).expect("recorded");
    // The validation prompts come from the held-out data, which has the other dtype.
    refused(read(&full).map(drop));

    let evaluation = evaluate::run(StageJob::new(&recipe, &reduced, &console)).expect("results");
    let rows = &evaluation.rows;
    assert!(rows.len() > 5 && rows.iter().all(|row| row.lossless == Some(true)), "{rows:?}");
    assert!(rows.iter().any(|row| row.counts.num_accepted > 0));
    let summary = evaluation.report.with_file_name("summary.json");
    let summary = std::fs::read_to_string(summary).expect("a summary");
    assert!(summary.contains("\"dtype\": \"bf16\""), "{summary}");
}

//! A kind of drafter from outside goes through every stage: a recipe reads it, it is trained and resumed, recorded,
//! replayed, tuned and evaluated beside the kinds of the crates, and opened again. Then every kind of the table, with
//! this one, is enumerated: its output is the target's distribution.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod offsets;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use burn::tensor::Device;
use draftsmith_decode::{
    Drafters, Limits, Request, RoundTokens, Sizes, TreeDraft, decode_plain, decode_speculative,
};
use draftsmith_model::{
    AdapterConfig, BlockDrafterConfig, CausalLm, ConfidenceHead, Eagle3Config, EagleConfig,
    MedusaConfig, ModelConfig, ModelShape, WeightDtype,
};
use draftsmith_recipe::kinds::Kinds;
use draftsmith_recipe::kinds::loaded::LoadedDrafters;
use draftsmith_recipe::watch::{Interrupted, Silent, Watch};
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{Overrides, Recipe};
use draftsmith_report::{ALL_CATEGORIES, DecodingName, DrafterName, ResultRow};
use draftsmith_theory::{
    Counts, Decoding, DrafterId, Draws, FixedLengthConfig, Sampling, SeededDraws, StopRuleConfig,
    distribution_of, enumerate,
};
use draftsmith_train::ExportConfig;
use draftsmith_tune::build_data::{DamagedShards, build_data};
use draftsmith_tune::evaluate::evaluate;
use draftsmith_tune::record::record;
use draftsmith_tune::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use draftsmith_tune::training::{TrainingWatch, train_drafters};
use draftsmith_tune::tuner::tune_within;

use self::offsets::{OFFSETS, Offsets, OffsetsConfig};

const ID: &str = "own";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads a recipe whose output goes to `dir`. Its name is an absolute path, which replaces the one that it is joined
/// to.
fn recipe(dir: &Path) -> Recipe {
    let model = |name: &str| root().join("checkpoints/tiny").join(name);
    let prompts = std::fs::read_to_string(root().join("data/tiny/prompts/train.jsonl")).unwrap();
    let lines: Vec<&str> = prompts.lines().take(40).collect();
    let (train, test) = (dir.join("train.jsonl"), dir.join("test.jsonl"));
    std::fs::write(&train, lines.join("\n")).unwrap();
    std::fs::write(&test, format!("{}\n{}\n", lines[0], lines[7])).unwrap();
    let text = format!(
        "[models]\ntarget = '{}'\n\
         [drafters.{ID}]\nkind = 'offsets'\nnum_steps = 4\nrules = {{ fixed = [2, 4] }}\n\
         optimizer = {{ num_epochs = 12, learning_rate = 1e-2, validation_fraction = 0.2 }}\n\
         [drafters.draft]\nkind = 'model'\nmodel = '{}'\nrules = {{ fixed = [2] }}\n\
         [data]\nprompts = ['{}']\nmax_new_tokens = 24\n\
         [tune]\nnum_prompts = 2\nmax_candidate_length = 4\n\
         [evaluate]\nprompts = ['{}']\nmax_new_tokens = 32\n\
         trees = {{ shapes = ['3-2x2x6'] }}\n\
         [evaluate.rules]\nfixed = [3]\nconfidence = [0.3]\n",
        model("target").display(),
        model("draft").display(),
        train.display(),
        test.display()
    );
    let path = dir.join("own.toml");
    std::fs::write(&path, text).unwrap();
    let kinds = Kinds::default().with(&OFFSETS);
    let mut recipe = Recipe::read(&path, &Overrides { kinds, ..Overrides::default() }).unwrap();
    recipe.name = dir.join("out").display().to_string();
    recipe
}

fn workspace(recipe: &Recipe) -> Workspace {
    Workspace::new(&recipe.models.target, &recipe.drafters.models(), vec![Device::flex()])
}

/// Stops trainings after some steps.
#[derive(Debug)]
struct Limited(Mutex<Option<usize>>);

impl Watch for Limited {
    fn share(&self) -> Box<dyn Watch> {
        Box::new(Silent)
    }
}

impl TrainingWatch for Limited {
    fn steps_left(&self) -> Option<usize> {
        *self.0.lock().unwrap()
    }

    fn limit_steps(&self, num_steps: Option<usize>) {
        *self.0.lock().unwrap() = num_steps;
    }
}

#[test]
fn a_kind_from_outside_goes_through_every_stage() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let id = DrafterId::named(ID);
    let names: Vec<String> = recipe.drafters.iter().map(|(id, _)| id.to_string()).collect();
    assert_eq!(names, [ID, "draft"], "in the recipe's order");
    let workspace = workspace(&recipe);
    build_data(&recipe, DamagedShards::Refused, &workspace, &Silent).unwrap();

    // A resumed training ends with the bytes of one that was not interrupted.
    let export = recipe.export_dir(id);
    let read = |name: &str| std::fs::read(export.join(name)).unwrap();
    train_drafters(&recipe, None, &workspace, &Silent).unwrap();
    let whole = ["model.safetensors", "config.json", "scores.json"].map(read);
    let kept = train_drafters(&recipe, None, &workspace, &Silent).unwrap();
    assert!(kept[0].kept && kept[0].kind == "offsets");
    assert!(kept[0].scores["accepted_length"].as_f64() > Some(0.2), "{}", kept[0].scores);
    std::fs::remove_dir_all(&export).unwrap();
    let limited = Limited(Mutex::new(Some(3)));
    let stopped = train_drafters(&recipe, None, &workspace, &limited).unwrap_err();
    assert!(stopped.is::<Interrupted>(), "{stopped:#}");
    train_drafters(&recipe, None, &workspace, &Silent).unwrap();
    assert!(whole == ["model.safetensors", "config.json", "scores.json"].map(read));

    // It is known by its directory, and its own recipe reads it again.
    let kinds = Kinds::default().with(&OFFSETS);
    let found = kinds.found_in(&export).unwrap();
    assert_eq!(found.kind.unwrap().name, "offsets");
    assert_eq!((found.export.inspect)(&export).unwrap()["num_offsets"], 4);
    assert!(Kinds::default().trained_in(&export).is_err());
    let keys = &["name=own".to_owned()];
    let overrides = Overrides { keys, kinds: kinds.clone(), ..Overrides::default() };
    let beside = Recipe::read(&export.join("recipe.toml"), &overrides).unwrap();
    let (only, opened) = beside.only_of(found, &export).unwrap();
    assert_eq!(only, id);
    let loaded = opened.load_drafters(&workspace, true).unwrap();
    assert_eq!(loaded.get(id).unwrap().dir.as_deref(), Some(&*export));

    // Replay has the counts of decoding, forwards included: one for each round that drafts.
    record(&recipe, &workspace, &Silent).unwrap();
    let rows = evaluate(&recipe, &workspace, &Silent).unwrap().rows;
    let (drafter, set, decoding) = (id.into(), PromptSet::Test, DecodingName::Greedy);
    let files = RolloutFiles::of(&recipe, &workspace).unwrap();
    let recordings = files.read(RolloutKey { drafter, set, decoding }).unwrap().recordings;
    let own: Vec<&ResultRow> = rows
        .iter()
        .filter(|row| row.category == ALL_CATEGORIES && row.drafter.id() == Some(id))
        .collect();
    assert!(own.iter().any(|row| matches!(row.drafter, DrafterName::Tree(..))), "no trees");
    assert!(own.iter().all(|row| row.lossless != Some(false)));
    assert!(rows.iter().any(|row| row.drafter.id() == Some(DrafterId::DRAFT)));
    let mut num_compared = 0;
    for row in own.iter().filter(|row| row.drafter == DrafterName::Of(id)) {
        assert!(row.counts.num_accepted > 0 || row.decoding == DecodingName::Sampled, "{row:?}");
        assert!(row.counts.num_draft_forwards <= row.counts.num_target_forwards);
        let (Some(length), DecodingName::Greedy, true) =
            (row.setting, row.decoding, row.rule_label().starts_with("K ="))
        else {
            continue;
        };
        let rule = FixedLengthConfig { candidate_length: length as usize }.into();
        let replayed: Counts = recordings.replay_counts(&rule).unwrap().into_iter().sum();
        assert_eq!(replayed, row.counts, "K = {length}");
        num_compared += 1;
    }
    assert_eq!(num_compared, 2);
    let tuned = tune_within(&recipe, &workspace, Some(Duration::from_secs(2)), &Silent).unwrap();
    assert!(tuned.iter().any(|tuning| tuning.basis.drafter.id() == Some(id)));
}

#[test]
fn an_unknown_kind_is_refused_and_an_added_one_names_its_key() {
    let read = |text: &str, kinds: Kinds| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("own.toml");
        std::fs::write(&path, format!("[models]\ntarget = 't'\n[drafters.it]\n{text}\n")).unwrap();
        let overrides = Overrides { kinds, ..Overrides::default() };
        format!("{:#}", Recipe::read(&path, &overrides).unwrap_err())
    };
    let unknown = read("kind = 'offsets'", Kinds::default());
    assert!(unknown.contains("unknown `kind`") && unknown.contains("eagle3"), "{unknown}");
    let own = Kinds::default().with(&OFFSETS);
    let misspelt = read("kind = 'offsets'\nnum_stepz = 2", own.clone());
    assert!(misspelt.contains("drafters.it") && misspelt.contains("num_stepz"), "{misspelt}");
    let wrong = read("kind = 'offsets'\nnum_steps = 0", own);
    assert!(wrong.contains("drafters.it") && wrong.contains("num_steps"), "{wrong}");
}

/// A tokenizer of three words.
const TOKENIZER: &str = r#"{ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" },
  "model": { "type": "WordLevel", "vocab": { "a": 0, "b": 1, "c": 2 }, "unk_token": "a" } }"#;

/// Writes a random target of three tokens and a drafter of each kind for it, and reads them through a recipe. A kind
/// that the table has and the recipe lacks fails the test.
fn networks(dir: &Path) -> (CausalLm, LoadedDrafters) {
    let device = Device::flex();
    device.seed(83);
    let config = |num_layers| {
        let shape = ModelShape {
            vocab_size: 3,
            hidden_size: 8,
            num_layers,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
            context: 48,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        ModelConfig::llama(shape, 16)
    };
    let at = |name: &str| {
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    };
    let of_target = config(4);
    of_target.init(&device).write_model_dir(&at("target"), WeightDtype::F32).unwrap();
    config(2).init(&device).write_model_dir(&at("model"), WeightDtype::F32).unwrap();
    // A draft model must have the target's tokenizer; nothing here reads text.
    for name in ["target", "model"] {
        std::fs::write(at(name).join("tokenizer.json"), TOKENIZER).unwrap();
    }
    let adapter = AdapterConfig::new(&of_target, 1).unwrap();
    adapter.init(&device).write_dir(&at("adapter"), &adapter).unwrap();
    let eagle3 = Eagle3Config { target_layers: vec![1, 2, 3], ..Eagle3Config::new(&of_target) };
    eagle3.init(&device).write_dir(&at("eagle3"), &eagle3).unwrap();
    let block = BlockDrafterConfig::new(&of_target, 2, 0).with(|it| {
        it.target_layers = vec![2, 3];
        it.markov_rank = 2;
        it.confidence = ConfidenceHead::OfRowAndToken;
        it.block_size = 3;
    });
    block.init(&device).write_dir(&at("block"), &block).unwrap();
    let eagle = EagleConfig::new(&of_target);
    eagle.init(&device).write_dir(&at("eagle"), &eagle).unwrap();
    let heads = MedusaConfig::new(&of_target.shape, 3);
    let mut draws = SeededDraws::new(5, &["heads"]);
    let drawn = heads.init_from(&device, || draws.uniform());
    drawn.write_dir(&at("medusa"), &heads).unwrap();
    let own = OffsetsConfig {
        num_offsets: 3,
        hidden_size: 8,
        vocab_size: 3,
        layer: 3,
        target_hash: None,
        training: Default::default(),
    };
    own.write(&Offsets::new(&own, &mut SeededDraws::new(5, &["offsets"]), &device), &at(ID))
        .unwrap();
    let [target, model, adapter, eagle3, eagle, block, medusa, own] =
        ["target", "model", "adapter", "eagle3", "eagle", "block", "medusa", ID]
            .map(|name| dir.join(name).display().to_string());
    let text = format!(
        "[models]\ntarget = '{target}'\n\
         [drafters.model]\nkind = 'model'\nmodel = '{model}'\n\
         [drafters.adapter]\nkind = 'adapter'\npath = '{adapter}'\n\
         [drafters.eagle3]\nkind = 'eagle3'\npath = '{eagle3}'\n\
         [drafters.eagle]\nkind = 'eagle'\npath = '{eagle}'\n\
         [drafters.block]\nkind = 'block'\npath = '{block}'\n\
         [drafters.medusa]\nkind = 'medusa'\npath = '{medusa}'\n\
         [drafters.{ID}]\nkind = 'offsets'\npath = '{own}'\n\
         [drafters.lookup]\nkind = 'prompt-lookup'\nmin_match = 1\n\
         [drafters.cascade]\nkind = 'cascade'\ndrafters = ['adapter', 'model', 'lookup']\n\
         lengths = [[1, 1, 1], [0, 1, 1], [0, 0, 1]]\n\
         [drafters.merged]\nkind = 'merged'\ndrafters = ['adapter', 'model']\n"
    );
    let path = dir.join("all.toml");
    std::fs::write(&path, text).unwrap();
    let kinds = Kinds::default().with(&OFFSETS);
    let overrides = Overrides { kinds: kinds.clone(), ..Overrides::default() };
    let recipe = Recipe::read(&path, &overrides).unwrap();
    for kind in kinds.iter() {
        let mut entries = recipe.drafters.iter().map(|(_, drafter)| drafter.kind.entry());
        assert!(entries.any(|entry| entry.name == kind.name), "no drafter of kind {}", kind.name);
    }
    let loaded = recipe.load_drafters(&workspace(&recipe), true).unwrap();
    (CausalLm::from_model_dir(&dir.join("target"), &device).unwrap(), loaded)
}

#[test]
fn the_output_of_every_kind_is_the_targets_in_chains_and_trees_over_every_draw() {
    let dir = tempfile::tempdir().unwrap();
    let (target, loaded) = networks(dir.path());
    let sampling = Sampling { temperature: 0.05, ..Sampling::default() };
    let (decoding, limits) = (Decoding::sampled(sampling), Limits::new(3, vec![1]));
    let sizes = Sizes { target: &target, capacity: 48, num_slots: 1 };
    let mut go_on = |_: RoundTokens<'_>| ControlFlow::Continue(());
    for drafter in loaded.iter() {
        let id = drafter.id();
        let mut drafters = Drafters::new([&drafter.parts], sizes);
        let plain = distribution_of(enumerate(|draws| {
            let draws: &mut dyn Draws = draws;
            let session = drafters.target();
            let plain = decode_plain(session, &decoding, &[2, 0, 2], &limits, draws, &mut go_on);
            plain.unwrap().token_ids
        }));
        assert!(plain.len() > 5);
        let steps = drafters.drafting(id).unwrap().1.by_steps().is_some();
        let trees = [None, steps.then_some("2-1x2x3")];
        // Attention over a tree adds up its values in another grouping than over a chain.
        let rounding = if id.as_str() == "merged" { 1e-6 } else { 1e-12 };
        for (tree, tolerance) in trees.into_iter().zip([rounding, 1e-6]) {
            for candidate_length in 1..=4 {
                let found = distribution_of(enumerate(|draws| {
                    let config: StopRuleConfig = FixedLengthConfig { candidate_length }.into();
                    let mut rule = config.init().unwrap();
                    let request = Request {
                        prompt: &[2, 0, 2],
                        decoding,
                        limits: &limits,
                        rule: Some(&mut *rule),
                        draws,
                    };
                    let (session, drafter) = drafters.drafting(id).unwrap();
                    let generation = match tree {
                        None => {
                            decode_speculative(session, &mut &mut *drafter, request, &mut go_on)
                        }
                        Some(shape) => {
                            let steps = drafter.by_steps().unwrap();
                            let mut tree = TreeDraft::new(steps, shape.parse().unwrap());
                            decode_speculative(session, &mut tree, request, &mut go_on)
                        }
                    };
                    generation.unwrap().token_ids
                }));
                assert!(found.keys().eq(plain.keys()), "{id} {tree:?}");
                for (tokens, prob) in &plain {
                    let difference = (found[tokens] - prob).abs();
                    let most = tolerance * prob.max(tolerance);
                    assert!(difference <= most, "{id} {tree:?} {tokens:?}: {difference}");
                }
            }
        }
    }
}

#[test]
fn the_greedy_output_of_every_kind_is_the_targets() {
    let dir = tempfile::tempdir().unwrap();
    let (target, loaded) = networks(dir.path());
    let sizes = Sizes { target: &target, capacity: 48, num_slots: 1 };
    let mut go_on = |_: RoundTokens<'_>| ControlFlow::Continue(());
    let limits = Limits::new(30, Vec::new());
    let mut draws = SeededDraws::new(0, &["own"]);
    for drafter in loaded.iter() {
        let id = drafter.id();
        let mut drafters = Drafters::new([&drafter.parts], sizes);
        for prompt in [&[0][..], &[2, 1], &[1, 0, 2, 2]] {
            let greedy = &Decoding::GREEDY;
            let session = drafters.target();
            let plain = decode_plain(session, greedy, prompt, &limits, &mut draws, &mut go_on);
            let config: StopRuleConfig = FixedLengthConfig { candidate_length: 3 }.into();
            let mut rule = config.init().unwrap();
            let request = Request {
                prompt,
                decoding: Decoding::GREEDY,
                limits: &limits,
                rule: Some(&mut *rule),
                draws: &mut draws,
            };
            let (session, drafter) = drafters.drafting(id).unwrap();
            let found = decode_speculative(session, &mut &mut *drafter, request, &mut go_on);
            let found = found.unwrap();
            assert_eq!(found.token_ids, plain.unwrap().token_ids, "{id}");
            let forwards = found.trace.rounds.iter().map(|round| round.num_draft_forwards());
            let is_at_once = [ID, "block", "medusa"].contains(&id.as_str());
            assert!(!is_at_once || forwards.max() <= Some(1), "one forward proposes a round");
        }
    }
}

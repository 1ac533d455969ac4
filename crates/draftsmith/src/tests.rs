//! Tests on the embedded models: drafters do not change the text, seeds reproduce it, stop rules
//! apply, and errors name files.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use draftsmith_model::{AcceptanceHeadConfig, Adapter, AdapterConfig};
use draftsmith_theory::{DrafterId, StopRuleName};
use tempfile::TempDir;

use super::*;

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name)
}

fn load(name: &str) -> Model {
    Model::load(tiny(name), &Device::flex()).expect("the embedded model loads")
}

fn temporary() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// Returns two questions; the answer to the second repeats it.
fn questions() -> [[Message; 1]; 2] {
    let sentence = "Replace hard with wide: The hard basket is under the white hammer.";
    ["What is 541 + 279?", sentence].map(|text| [Message::user(text)])
}

/// Writes an untrained acceptance head for the draft model.
fn head(draft: &Model, change: impl FnOnce(&mut AcceptanceHeadConfig)) -> TempDir {
    let dir = temporary();
    let mut config = AcceptanceHeadConfig::new(draft.network().shape().hidden_size, 1, true);
    change(&mut config);
    config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
    dir
}

/// Writes an adapter that exits after the target's second layer and starts with the weights of its
/// third.
fn adapter(target: &Model, change: impl FnOnce(&mut AdapterConfig)) -> TempDir {
    let training = train::AdapterTraining::default().with(|it| {
        it.common.initial = train::InitialWeights::Target;
        it.architecture = draftsmith_model::AdapterArchitecture::DecoderLayer;
    });
    let first = train::first_self_draft(target.network(), &training, 0);
    let (mut config, adapter): (AdapterConfig, Adapter) = first.expect("an adapter");
    change(&mut config);
    let dir = temporary();
    adapter.write_dir(dir.path(), &config).expect("written");
    dir
}

#[test]
fn every_drafter_gives_the_targets_greedy_text() {
    let (target, draft) = (load("target"), load("draft"));
    let (head, adapter) = (head(&draft, |_| ()), adapter(&target, |_| ()));
    let lookup = || Drafter::prompt_lookup(MaxGramConfig::default());
    let own_head = adapter.path().join("head");
    let config = AcceptanceHeadConfig::new(target.network().shape().hidden_size, 1, true);
    config.init(&Device::flex()).write_dir(&own_head, &config).expect("written");
    for (drafter, rule) in [
        (Drafter::model(&draft), None),
        (Drafter::model(&draft), Some("entropy=0.3")),
        (Drafter::model(&draft), Some("heuristic=3")),
        (Drafter::model(&draft).with_head(head.path()), None),
        (Drafter::model(&draft).after_lookup("2x4".parse().expect("a look-up")), Some("fixed=2")),
        (Drafter::open(adapter.path()).expect("an adapter"), None),
        (Drafter::open(adapter.path()).expect("an adapter"), Some("confidence=0.4")),
        (lookup(), None),
        (lookup(), Some("fixed=3")),
    ] {
        let name = format!("{rule:?}, {drafter:?}");
        let mut generator = Generator::new(&target).with_drafter(drafter).expect("loads");
        if let Some(rule) = rule {
            generator = generator.with_rule(rule.parse::<Rule>().expect("a rule"));
        }
        let mut num_accepted = 0;
        for question in &questions() {
            let plain = Generator::new(&target).generate(question).expect("decodes");
            assert_eq!(plain.counts().num_drafted, 0);
            assert_eq!(plain.finish, Finish::Eos);
            let mut streamed = (String::new(), Vec::new(), 0);
            let generated = generator.stream(question, |piece| {
                streamed.0 += piece.text;
                streamed.1.extend(piece.token_ids);
                streamed.2 += piece.num_accepted;
                ControlFlow::Continue(())
            });
            let generated = generated.expect("decodes");
            assert_eq!(generated.token_ids, plain.token_ids, "{name}");
            assert_eq!(generated.text, plain.text, "{name}");
            let counts = generated.counts();
            assert_eq!(streamed, (plain.text, plain.token_ids, counts.num_accepted), "{name}");
            num_accepted += counts.num_accepted;
        }
        assert!(num_accepted > 0, "{name}");
    }
}

#[test]
fn a_session_reads_only_what_a_turn_adds_and_gives_the_same_text() {
    let (target, draft) = (load("target"), load("draft"));
    let adapter = adapter(&target, |_| ());
    let [first, second] = questions();
    for drafter in [
        None,
        Some(Drafter::model(&draft).after_lookup("2x4".parse().expect("a look-up"))),
        Some(Drafter::open(adapter.path()).expect("an adapter")),
    ] {
        let name = format!("{drafter:?}");
        let mut generator = Generator::new(&target);
        if let Some(drafter) = drafter {
            generator = generator.with_drafter(drafter).expect("loads");
        }
        let mut session = generator.session(512);
        let mut so_far: Vec<u32> = Vec::new();
        for message in [&first, &second, &first] {
            let added = target.encode_chat(message).expect("encodes");
            let prompt = [&so_far[..], &added].concat();
            let generated = session.generate(PromptInput::Ids(&prompt)).expect("decodes");
            let plain = Generator::new(&target).generate(PromptInput::Ids(&prompt));
            assert_eq!(generated.token_ids, plain.expect("decodes").token_ids, "{name}");
            assert_eq!(generated.num_reused, so_far.len(), "{name}");
            so_far = [&generated.prompt_ids[..], &generated.token_ids].concat();
        }
        // Another conversation is processed from its first token.
        let other = session.generate(&second).expect("decodes");
        let plain = Generator::new(&target).generate(&second).expect("decodes");
        assert_eq!((other.token_ids, other.num_reused), (plain.token_ids, 0), "{name}");
        let long = vec![5; 600];
        let message = session.generate(PromptInput::Ids(&long)).expect_err("too long").to_string();
        assert!(message.contains("600"), "{message}");
        assert!(session.generate(&first).is_ok(), "the session still works");
    }
}

#[test]
fn a_seed_repeats_a_sampled_text_and_another_gives_another() {
    let (target, draft) = (load("target"), load("draft"));
    let sampling = Sampling { temperature: 1.5, top_k: Some(50), ..Sampling::default() };
    let [question, _] = questions();
    let text = |seed| {
        let generator = Generator::new(&target).with_decoding(sampling).with_seed(seed);
        let mut generator = generator.with_drafter(Drafter::model(&draft)).expect("loads");
        let [first, second] =
            [(); 2].map(|()| generator.generate(&question).expect("decodes").token_ids);
        assert_eq!(first, second);
        first
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

/// A stop rule that ends a round after the second candidate.
struct AfterTwo;

impl StopRule for AfterTwo {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: 9 }
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= 2
    }
}

#[test]
fn a_custom_rule_drafts_and_replays_as_the_rule_that_it_equals() {
    let (target, draft) = (load("target"), load("draft"));
    let generator = Generator::new(&target).with_max_new_tokens(40);
    let generator = generator.with_drafter(Drafter::model(&draft)).expect("loads");
    let mut custom = generator.with_rule(Rule::custom(AfterTwo));
    let rows = custom.respond("questions", &questions()).expect("decodes");
    let recordings = custom.record(&rows, 9).expect("records");
    let replayed = recordings.replay_rule(&mut AfterTwo).expect("replays");
    let fixed = draftsmith_theory::FixedLengthConfig { candidate_length: 2 };
    assert_eq!(replayed, recordings.replay_counts(&fixed.into()).expect("replays"));
    for (question, replayed) in questions().iter().zip(replayed) {
        assert_eq!(custom.generate(question).expect("decodes").counts(), replayed);
    }
    assert!(recordings.replay_rule(&mut AfterTwo).is_ok());
    let short = custom.record(&rows, 8).expect("records").replay_rule(&mut AfterTwo);
    assert!(short.expect_err("refused").to_string().contains("longer rollouts"));
}

#[test]
fn recorded_rows_are_valid_and_can_be_stored() {
    let (target, draft) = (load("target"), load("draft"));
    for decoding in [Decoding::GREEDY, Sampling::default().into()] {
        let generator = Generator::new(&target).with_decoding(decoding).with_max_new_tokens(30);
        let mut generator = generator.with_drafter(Drafter::model(&draft)).expect("loads");
        let rows = generator.respond("questions", &questions()).expect("decodes");
        assert_eq!(rows[1].id, "questions#1");
        rows.iter().for_each(|row| row.validate().expect("a valid row"));
        let is_certain =
            rows.iter().flat_map(|row| &row.response_target_log_prob).all(|p| *p == 0.0);
        assert_eq!(is_certain, decoding.is_greedy());
        let recordings = generator.record(&rows, 4).expect("records");
        assert_eq!(recordings.drafter, DrafterId::DRAFT);
        let rollouts = rollout_rows(&rows, &recordings);
        assert!(rollouts.len() > rows.len());
        data::validate_rollouts(&rollouts).expect("valid rows");
    }
}

#[test]
fn a_tuned_rule_is_used_unless_another_is_given() {
    let (target, draft) = (load("target"), load("draft"));
    let head = head(&draft, |_| ());
    let path = head.path().join("config.json");
    let estimate = r#"{"value": 0.5, "low": 0.4, "high": 0.6}"#;
    let tuned = format!(
        r#""tuned": {{"greedy": {{"drafter": "draft", "config": {{"stop_rule": "fixed_length", "candidate_length": 1}},
        "temperature": 0.0, "top_p": 1.0, "expected_gain": {estimate}, "expected_acceptance_rate": {estimate},
        "best_fixed_length": 4, "num_prompts": 8,
        "costs": {{"draft_seconds": 0.1, "target_seconds": 1.0, "row_seconds": 0.0}}}}, "sampled": null}},"#
    );
    let config = std::fs::read_to_string(&path).expect("reads");
    std::fs::write(&path, config.replacen('{', &format!("{{{tuned}"), 1)).expect("written");
    let drafter = Drafter::model(&draft).with_head(head.path());
    let mut generator = Generator::new(&target).with_drafter(drafter).expect("loads");
    let [question, _] = &questions();
    let most = |generated: Generated| {
        generated.trace.rounds.iter().map(|round| round.num_drafted).max().expect("a round")
    };
    assert_eq!(most(generator.generate(question).expect("decodes")), 1);
    let mut generator = generator.with_rule("fixed=3".parse::<Rule>().expect("a rule"));
    assert_eq!(most(generator.generate(question).expect("decodes")), 3);
}

#[test]
fn prompts_side_by_side_get_the_answers_of_one_after_another() {
    let (target, draft) = (load("target"), load("draft"));
    let questions = ["What is 541 + 279?", "What is 25 + 38?", "What is 2 + 2?"];
    let chats = questions.map(|question| [Message::user(question)]);
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    for decoding in [Decoding::GREEDY, Decoding::sampled(sampling)] {
        let generator = Generator::new(&target).with_drafter(Drafter::model(&draft));
        let mut generator = generator.expect("loads").with_decoding(decoding).with_seed(5);
        let together = generator.generate_many(&chats).expect("decodes");
        for (chat, together) in chats.iter().zip(together) {
            let alone = generator.generate(chat).expect("decodes");
            assert_eq!((&together.token_ids, &together.text), (&alone.token_ids, &alone.text));
            assert_eq!(together.counts(), alone.counts());
        }
        let mut own = generator.with_rule(Rule::custom(Two));
        assert_eq!(own.generate_many(&chats).expect("decodes").len(), 3);
    }
}

/// A stop rule for rounds of two candidates.
struct Two;

impl StopRule for Two {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: 2 }
    }

    fn stops(&mut self, _candidates: &[u32], _signals: &DraftSignals) -> bool {
        false
    }
}

#[test]
fn limits_and_stop_strings_end_a_text() {
    let target = load("target");
    let [question, _] = &questions();
    let mut short = Generator::new(&target).with_max_new_tokens(5);
    let generated = short.generate(question).expect("decodes");
    assert_eq!((generated.token_ids.len(), generated.finish), (5, Finish::Length));
    let ends = ["carry 1.".to_owned()];
    let mut stopped = Generator::new(&target).with_stop_strings(&ends).expect("a string");
    let generated = stopped.generate(question).expect("decodes");
    assert_eq!(generated.finish, Finish::StopString);
    assert!(generated.text.contains(&ends[0]), "{}", generated.text);
    let broken = Generator::new(&target).stream(question, |_| ControlFlow::Break(()));
    assert_eq!(broken.expect("decodes").finish, Finish::Stopped);
}

#[test]
fn errors_name_the_file_or_the_setting() {
    let (target, draft) = (load("target"), load("draft"));
    let dir = temporary();
    let message = |error: Option<Error>| error.expect("refused").to_string();
    let load = |dir: &Path| message(Model::load(dir, &Device::flex()).err());
    assert!(load(Path::new("absent")).contains("absent/tokenizer.json"));
    assert!(load(dir.path()).contains("tokenizer.json"));
    std::fs::copy(tiny("draft/tokenizer.json"), dir.path().join("tokenizer.json")).expect("copied");
    assert!(load(dir.path()).contains("config.json"));

    let drafting = |drafter| message(Generator::new(&target).with_drafter(drafter).err());
    let absent = dir.path().join("absent");
    assert!(drafting(Drafter::model(&draft).with_head(&absent)).contains("absent"));
    assert!(message(Drafter::open(&absent).err()).contains("absent"));
    let of_head = head(&draft, |_| ());
    assert!(message(Drafter::open(of_head.path()).err()).contains("holds an acceptance head"));
    let other = head(&draft, |config| config.draft_hash = Some("beef".to_owned()));
    let text = drafting(Drafter::model(&draft).with_head(other.path()));
    assert!(
        text.contains("another draft (hash beef")
            && text.contains(&*other.path().to_string_lossy())
    );
    let other = adapter(&target, |config| config.target_hash = Some("beef".to_owned()));
    assert!(
        drafting(Drafter::open(other.path()).expect("an adapter"))
            .contains("another target (hash beef")
    );
    let own = head(&draft, |config| {
        config.draft_hash = Some(draft.hash().expect("a hash").to_owned());
        config.target_hash = Some(target.hash().expect("a hash").to_owned());
    });
    let loaded = Generator::new(&target).with_drafter(Drafter::model(&draft).with_head(own.path()));
    loaded.expect("the head belongs to both");
    let lookup = || Drafter::prompt_lookup(MaxGramConfig::default());
    assert!(drafting(lookup().with_head(own.path())).contains("prompt lookup has none"));

    let [question, _] = &questions();
    let decoding = |drafter, rule: &str| {
        let generator = Generator::new(&target).with_drafter(drafter).expect("loads");
        let mut generator = generator.with_rule(rule.parse::<Rule>().expect("a rule"));
        message(generator.generate(question).err())
    };
    assert!(decoding(Drafter::model(&draft), "head=0.5").contains("`Drafter::with_head`"));
    assert!(decoding(lookup(), "entropy=0.5").contains("the drafter `prompt-lookup`"));
    let mut hot =
        Generator::new(&target).with_decoding(Sampling { temperature: 0.0, ..Sampling::default() });
    assert!(message(hot.generate(question).err()).contains("temperature"));
    let long = "word ".repeat(400);
    assert!(
        message(Generator::new(&target).generate(&*long).err()).contains("the target's context")
    );
    assert!(message(Generator::new(&target).record(&[], 4).err()).contains("drafter with a model"));
}

#[test]
fn the_table_of_rules_lists_every_rule_that_has_a_setting() {
    let source = include_str!("rule.rs");
    for entry in theory::stop_rules().filter(|entry| entry.grid().is_some()) {
        let name = format!("`{}`", entry.file_name);
        assert!(
            source.lines().any(|line| line.starts_with("/// |") && line.contains(&name)),
            "{name}"
        );
        assert_ne!(entry.name, StopRuleName::None);
    }
}

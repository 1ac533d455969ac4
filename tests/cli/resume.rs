//! Trainings that are stopped by `--steps`, `--hours`, signals or kills, and resumed, end with the bytes of an
//! uninterrupted one.

use std::process::Child;
use std::time::{Duration, Instant};

use crate::support::{Place, Ran, model, wait};
#[cfg(unix)]
use crate::support::{Running, hangups_heard};

const HEAD: &str = "checkpoints/steps/draft/head";
const ADAPTER: &str = "checkpoints/steps/adapter";

/// A place with built data and a recipe of three epochs, for a head and an adapter.
fn place() -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    place.write(
        "steps.toml",
        format!(
            "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 12\n\
             [drafters.draft.head]\nnum_layers = 1\n[drafters.draft.head.optimizer]\nnum_epochs = 3\nlearning_rate = 1e-3\n\
             batch_size = 2\ngradient_accumulation = 2\nvalidation_fraction = 0.3\n\
             [drafters.adapter]\nkind = 'adapter'\nexit_layer = 1\n[drafters.adapter.optimizer]\nnum_epochs = 3\nlearning_rate = 1e-3\n\
             batch_size = 2\ngradient_accumulation = 3\nvalidation_fraction = 0.3\n",
            model("target").display(),
            model("draft").display()
        ),
    );
    place.run(&["build-data", "steps.toml"]).ok();
    place
}

/// The files of an export.
fn export(place: &Place, dir: &str) -> Vec<(&'static str, Vec<u8>)> {
    let names = ["model.safetensors", "scores.json", "config.json"];
    names.map(|name| (name, std::fs::read(place.path(dir).join(name)).unwrap())).to_vec()
}

/// The epoch lines of a head's training on stderr.
fn epoch_lines(ran: &Ran) -> Vec<String> {
    let lines = ran.stderr.lines().filter(|line| line.starts_with("train-head: epoch "));
    lines.map(ToOwned::to_owned).collect()
}

/// Runs both trainings without interruption, and removes their outputs.
fn uninterrupted(place: &Place) -> [Vec<(&'static str, Vec<u8>)>; 2] {
    place.run(&["train-head", "steps.toml"]).ok();
    place.run(&["train-adapter", "steps.toml"]).ok();
    let exports = [export(place, HEAD), export(place, ADAPTER)];
    for training in ["draft-head-training", "adapter-training"] {
        let left = place.names(&format!("checkpoints/steps/{training}"));
        assert!(!left.contains(&"checkpoint".to_owned()), "{left:?}");
    }
    std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
    exports
}

#[track_caller]
fn was_stopped(ran: &Ran) {
    assert_eq!(ran.code, Some(130), "{}", ran.stderr);
    assert!(ran.stderr.contains("run the same command again to resume"), "{}", ran.stderr);
}

#[test]
fn training_a_few_steps_at_a_time_gives_the_same_bytes() {
    let place = place();
    let whole = epoch_lines(&place.run(&["train-head", "steps.toml"]));
    assert_eq!(whole.len(), 3, "{whole:?}");
    std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
    let [head, adapter] = uninterrupted(&place);
    let first = place.run(&["train-head", "steps.toml", "--steps", "4"]);
    was_stopped(&first);
    assert!(first.stderr.contains("train-head: stopped after step 4 of "), "{}", first.stderr);
    assert!(!place.path(HEAD).exists(), "no epoch was whole");
    // A training with other settings starts over and replaces this one.
    let other = [
        "train-head",
        "steps.toml",
        "--steps",
        "2",
        "--set",
        "drafters.draft.head.optimizer.learning_rate=2e-3",
    ];
    let other = place.run(&other);
    was_stopped(&other);
    assert!(other.stderr.contains("starting over"), "{}", other.stderr);
    let back = place.run(&["train-head", "steps.toml", "--steps", "9"]);
    was_stopped(&back);
    assert!(back.stderr.contains("starting over"), "{}", back.stderr);
    let last = place.run(&["train-head", "steps.toml"]);
    let lines = [epoch_lines(&back), epoch_lines(&last)].concat();
    assert_eq!(lines, whole, "the losses are those of an uninterrupted training");
    assert!(last.stderr.contains("train-head: resuming after step 9"), "{}", last.stderr);
    last.ok();
    assert!(export(&place, HEAD) == head, "other bytes");

    // `--steps` on `run`, whose head is finished.
    let mut num_runs = 0;
    loop {
        num_runs += 1;
        let ran = place.run(&["run", "steps.toml", "--steps", "5"]);
        if ran.code == Some(0) {
            break;
        }
        was_stopped(&ran);
    }
    assert!(num_runs > 2, "{num_runs}");
    assert!(export(&place, ADAPTER) == adapter, "other bytes");
    assert!(export(&place, HEAD) == head, "trained again");
}

#[test]
fn a_training_stopped_by_hours_resumes_to_the_same_bytes() {
    let place = place();
    let [head, _] = uninterrupted(&place);
    // Over before the first step.
    let none = place.run(&["train-head", "steps.toml", "--hours", "0.00000001"]);
    was_stopped(&none);
    assert!(none.stderr.contains("stopped after step 0 of "), "{}", none.stderr);
    place.run(&["train-head", "steps.toml", "--hours", "1.5"]).ok();
    assert!(export(&place, HEAD) == head, "other bytes");
    for bad in ["0", "-1", "nan", "inf", "one"] {
        place.run(&["run", "steps.toml", &format!("--hours={bad}")]).fails_naming(&["--hours"]);
    }
    place.run(&["run", "steps.toml", "--steps", "0"]).fails_naming(&["--steps"]);
}

/// Kills the process `delay` after it begins to save a state; false if it ended earlier.
fn kill_after(mut child: Child, place: &Place, delay: Duration) -> bool {
    let begun = Instant::now();
    let states = "checkpoints/steps/draft-head-training/checkpoint";
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never ends");
        if !place.names(states).is_empty() {
            wait(delay);
            // It may have ended meanwhile.
            let _ = child.kill();
            return !child.wait().unwrap().success();
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn a_training_killed_at_any_moment_resumes_to_the_same_bytes() {
    let place = place();
    let [head, _] = uninterrupted(&place);
    let num_killed = [0, 500, 3_000, 10_000, 40_000].into_iter().filter(|micros| {
        let child = place.command(&["train-head", "steps.toml", "--quiet"]).spawn().unwrap();
        kill_after(child, &place, Duration::from_micros(*micros))
    });
    assert!(num_killed.count() > 0, "each ended before it was killed");
    place.run(&["train-head", "steps.toml"]).ok();
    assert!(export(&place, HEAD) == head, "other bytes");
}

#[cfg(unix)]
#[test]
fn a_signal_leaves_a_state_to_resume_from() {
    let place = place();
    // Enough epochs that it cannot end between its first line and the signal.
    let arguments =
        ["train-head", "steps.toml", "--set", "drafters.draft.head.optimizer.num_epochs=40"];
    place.run(&arguments).ok();
    let head = export(&place, HEAD);
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
        let mut training = Running::start(hangups_heard(place.command(&arguments)));
        training.await_line("epoch 1/40");
        training.signal(name);
        if name == "TERM" {
            // `timeout` sends it to the process and to its group.
            training.signal(name);
        }
        let ran = training.end();
        assert_eq!(ran.code, Some(code), "{name}: {}", ran.stderr);
        assert!(ran.stderr.contains("run the same command again"), "{name}: {}", ran.stderr);
        let left = place.names("checkpoints/steps/draft-head-training/checkpoint");
        assert_eq!(left.len(), 1, "{name}: {left:?}");
        let resumed = place.run(&arguments);
        assert!(!resumed.stderr.contains("epoch 1/40"), "it started over: {}", resumed.stderr);
        resumed.ok();
        assert!(export(&place, HEAD) == head, "{name}: other bytes");
    }
}

#[test]
fn a_loss_that_is_not_finite_ends_training_and_saves_the_batch() {
    let place = place();
    let hot = [
        "--set",
        "drafters.draft.head.optimizer.learning_rate=1e38",
        "--set",
        "drafters.draft.head.optimizer.warmup_ratio=0",
    ];
    let mut arguments = vec!["train-head", "steps.toml"];
    arguments.extend(hot);
    let ran = place.run(&arguments);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let batch = "checkpoints/steps/draft-head-training/not-finite.parquet";
    ran.fails_naming(&["not finite in epoch 1", "`train#", "head.optimizer.learning_rate", batch]);
    let shown = place.run(&["inspect", batch, "--json"]).json();
    assert_eq!(shown["kind"], "responses");
    assert!(!place.path(HEAD).exists());
    place.run(&["train-head", "steps.toml"]).ok();
    assert!(!place.path(batch).exists());
}

#[test]
fn trainings_show_their_curves_and_are_compared() {
    let place = place();
    place.run(&["train-head", "steps.toml"]).ok();
    place.run(&["train-adapter", "steps.toml"]).ok();
    let training = "checkpoints/steps/adapter-training";
    let json = place.run(&["inspect", training, "--json"]).json();
    let steps = json["steps"].as_array().unwrap();
    assert_eq!(json["scores"], place.json("checkpoints/steps/adapter/scores.json"));
    let shown = place.run(&["inspect", training, "--html", "curves.html"]).ok();
    let rows = shown.lines().skip(1).take_while(|line| !line.is_empty());
    assert!((3..=16).contains(&rows.count()), "{shown}");
    for part in ["learning_rate", &format!("steps: {}.0000", steps.len()), "agreement: "] {
        assert!(shown.contains(part), "`{part}`: {shown}");
    }
    let page = std::fs::read_to_string(place.path("curves.html")).unwrap();
    assert!(page.contains("<h2>Curves</h2>") && page.matches("<figure>").count() == 2, "{page}");
    assert!(!page.contains("By source"), "{page}");
    // A head's training belongs to the head within its drafter.
    let head = place.run(&["inspect", "checkpoints/steps/draft-head-training"]).ok();
    assert!(head.contains("bce: "), "{head}");
    // An export stands for its training.
    let set = ["--set", "name=other", "--set", "drafters.adapter.optimizer.learning_rate=1e-4"];
    place.run(&[&["build-data", "steps.toml"], &set[..]].concat()).ok();
    place.run(&[&["train-adapter", "steps.toml"], &set[..]].concat()).ok();
    let both = place.run(&["report", training, "checkpoints/other/adapter", "--json"]).json();
    let (one, other) = (&both[0], &both[1]);
    assert_eq!(
        (&one["agreement"], one["steps"].as_f64()),
        (&json["scores"]["agreement"], Some(steps.len() as f64))
    );
    assert_ne!(one["last training loss"], other["last training loss"]);
    let shown = place.run(&["report", training, "checkpoints/other/adapter"]).ok();
    assert!(shown.contains("B - A") && shown.contains("cross_entropy"), "{shown}");
}

//! Sweeps of acceptance heads: each head is the same as in a single training, the best is exported, and
//! existing heads are not trained again.

use std::path::PathBuf;

use serde_json::Value;

use crate::support::{Place, copy_dir, model};

const BASE: &str = "[drafters.draft.head.optimizer]\nnum_epochs = 2\nlearning_rate = 3e-3\nbatch_size = 2\n\
                    gradient_accumulation = 2\nvalidation_fraction = 0.3\n";

/// A directory with built data, a recipe of a sweep, and a recipe of one of its heads.
fn place(sweep: &str) -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", 40);
    let models = format!(
        "name = 'swept'\n[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n",
        model("target").display(),
        model("draft").display()
    );
    let data = "[data]\nprompts = ['train.jsonl']\nmax_new_tokens = 12\n";
    place.write("sweep.toml", format!("{models}{data}{BASE}[drafters.draft.head.sweep]\n{sweep}"));
    place.write("one.toml", format!("{models}{data}{BASE}"));
    place.run(&["build-data", "sweep.toml"]).ok();
    place
}

fn bytes(place: &Place, dir: &str) -> [Vec<u8>; 3] {
    let read = |name: &str| -> Vec<u8> {
        let path: PathBuf = place.path("checkpoints/swept/draft").join(dir).join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    ["model.safetensors", "config.json", "scores.json"].map(read)
}

#[test]
fn every_head_equals_a_single_training_and_the_best_is_exported() {
    let place =
        place("num_layers = [0, 2]\nrejection_weight = [1, 6]\nmixing_ratio = [0.15, 0.4]\n");
    let shown = place.run(&["train-head", "sweep.toml"]);
    assert!(shown.stderr.contains("training 4 heads"), "{}", shown.stderr);
    let shown = shown.ok();
    assert!(shown.lines().take(10).all(|line| line.chars().count() <= 80), "{shown}");
    let heads = shown.lines().filter(|line| line.starts_with('d'));
    assert_eq!(heads.clone().count(), 8, "{shown}");
    assert_eq!(heads.filter(|line| line.ends_with("best")).count(), 1, "{shown}");

    let outcome = place.run(&["train-head", "sweep.toml", "--json"]).json();
    assert_eq!(outcome["kept"], true);
    let rows = std::fs::read(place.path("checkpoints/swept/draft/sweep/sweep.json")).unwrap();
    let rows: serde_json::Value = serde_json::from_slice(&rows).unwrap();
    assert_eq!(rows, outcome["sweep"]);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 8);
    assert!(rows.iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0), "kept, with its time");
    let comparable = |row: &serde_json::Value| row["scores"]["unshifted_kl"].as_f64().unwrap();
    let lowest = rows.iter().map(comparable).fold(f64::INFINITY, f64::min);
    let best: Vec<_> = rows.iter().filter(|row| row["best"] == true).collect();
    assert_eq!(best.len(), 1);
    assert_eq!(comparable(best[0]), lowest);
    let best = format!("sweep/{}", best[0]["name"].as_str().unwrap());
    let exported = bytes(&place, "head");
    assert!(exported == bytes(&place, &best), "`head` is not the best");

    for (name, settings) in [
        (
            "d0-w6-r0.15",
            [
                "drafters.draft.head.num_layers=0",
                "drafters.draft.head.rejection_weight=6",
                "drafters.draft.head.mixing_ratio=0.15",
            ],
        ),
        (
            "d2-w1-r0.4",
            [
                "drafters.draft.head.num_layers=2",
                "drafters.draft.head.rejection_weight=1",
                "drafters.draft.head.mixing_ratio=0.4",
            ],
        ),
    ] {
        let swept = bytes(&place, &format!("sweep/{name}"));
        let mut arguments = vec!["train-head", "one.toml"];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        std::fs::remove_dir_all(place.path("checkpoints/swept/draft/head")).unwrap();
        place.run(&arguments).ok();
        assert!(bytes(&place, "head") == swept, "{name} is another than alone");
    }
    // The best is exported again, and a larger sweep trains only the added heads.
    let larger = "drafters.draft.head.sweep.num_layers=[0, 1, 2]";
    let ran = place.run(&["train-head", "sweep.toml", "--json", "--set", larger]);
    assert!(ran.stderr.contains("keeping 4 heads of the sweep"), "{}", ran.stderr);
    assert!(ran.stderr.contains("training 2 heads"), "{}", ran.stderr);
    let outcome = ran.json();
    assert_eq!(outcome["sweep"].as_array().unwrap().len(), 12);
    assert!(place.path("checkpoints/swept/draft/sweep/d1-w6-r0.4/model.safetensors").exists());
}

#[test]
fn tuning_puts_the_fastest_head_of_a_sweep_into_use() {
    let place = place("num_layers = [0, 2]\nrejection_weight = [1, 6]\n");
    place.write_prompts("one.jsonl", 6);
    place.write_prompts("two.jsonl", 9);
    let text = std::fs::read_to_string(place.path("sweep.toml")).unwrap();
    let more = "[tune]\nmax_candidate_length = 6\ncosts = { draft_ms = 1.0, target_ms = 4.0 }\n[evaluate]\n\
                prompts = ['one.jsonl', 'two.jsonl']\nmax_new_tokens = 12\nrules.fixed = [2]\n";
    place.write("sweep.toml", text + more);
    for stage in ["train-head", "record"] {
        place.run(&[stage, "sweep.toml"]).ok();
    }
    let shown = place.run(&["tune", "sweep.toml"]).ok();
    assert!(shown.contains("of 4 heads") && shown.contains("least share"), "{shown}");
    let race = place.json("checkpoints/swept/tuning/heads.json");
    let heads = race["heads"].as_array().unwrap();
    let speed = |head: &Value| head["speedup"].as_f64().unwrap();
    let fastest = heads.iter().map(speed).fold(0.0, f64::max);
    let [chosen] = &heads.iter().filter(|head| head["is_chosen"] == true).collect::<Vec<_>>()[..]
    else {
        panic!("one is chosen: {race}")
    };
    assert_eq!(speed(chosen), fastest);
    assert_eq!(heads.iter().filter(|head| head["has_lowest_kl"] == true).count(), 1);
    assert_eq!(race["lost_by_kl"].is_null(), chosen["has_lowest_kl"] == true);
    for head in heads {
        let sets = head["sets"].as_array().unwrap();
        let names: Vec<_> = sets.iter().map(|set| &set["dataset"]).collect();
        assert_eq!(names, ["one", "two", "one", "two"]);
        assert!(head["least_share"].as_f64().unwrap() <= 1.0, "{head}");
        // The paper's share: the one threshold for all sets that loses least, over the curves.
        let share = |set: usize, at: usize| {
            let speed = |head: &Value, at: usize| {
                head["sets"][set]["curve"][at]["speedup"].as_f64().unwrap()
            };
            let all = heads.iter().flat_map(|head| (0..49).map(move |at| speed(head, at)));
            speed(head, at) / all.fold(0.0, f64::max)
        };
        let least = |at| (0..4).map(|set| share(set, at)).fold(f64::INFINITY, f64::min);
        let largest = (0..49).map(least).fold(0.0, f64::max);
        // Numbers read from JSON may differ in the last bit.
        let found = head["shared_threshold"]["least_share"].as_f64().unwrap();
        assert!((found - largest).abs() < 1e-12, "{found} {largest}");
        assert!(sets.iter().all(|set| set["curve"].as_array().unwrap().len() == 49), "{head}");
    }
    let name = chosen["name"].as_str().unwrap();
    let [weights, ..] = bytes(&place, &format!("sweep/{name}"));
    assert!(bytes(&place, "head")[0] == weights, "`head` is not {name}");

    // Put another head there: the recordings then belong to another, and tuning replaces both.
    let other = heads.iter().find(|head| head["is_chosen"] == false).unwrap();
    let other = format!("checkpoints/swept/draft/sweep/{}", other["name"].as_str().unwrap());
    std::fs::remove_dir_all(place.path("checkpoints/swept/draft/head")).unwrap();
    copy_dir(&place.path(&other), &place.path("checkpoints/swept/draft/head"));
    place.run(&["replay", "sweep.toml"]).fails_naming(&["head", "draftsmith record"]);
    place.run(&["record", "sweep.toml"]).ok();
    place.run(&["tune", "sweep.toml"]).ok();
    assert!(bytes(&place, "head")[0] == weights, "`head` is not {name}");
    assert_eq!(place.json("checkpoints/swept/tuning/heads.json"), race);

    // Replay judges it on all test prompts and on those of each source.
    let replay = place.run(&["replay", "sweep.toml", "--json"]).json();
    assert_eq!(replay["heads"], race);
    let groups = replay["groups"].as_array().unwrap().iter();
    let datasets: Vec<_> = groups.map(|group| &group["dataset"]).collect();
    assert_eq!(datasets.len(), 2 * 2 * 3);
    assert_eq!(datasets[..3], [&Value::Null, &"one".into(), &"two".into()]);
    // Recording with the head predicts what tuning wrote into the recordings.
    for name in place.names("data/swept").iter().filter(|name| name.starts_with("rollouts-")) {
        std::fs::remove_file(place.path("data/swept").join(name)).unwrap();
    }
    place.run(&["record", "sweep.toml"]).ok();
    let again = place.run(&["replay", "sweep.toml", "--json"]).json();
    let counts = |replay: &Value| -> Vec<[Value; 3]> {
        let rows = replay["groups"].as_array().unwrap().iter();
        let rows = rows.flat_map(|group| group["rows"].as_array().unwrap());
        let keys = ["stop_rule", "discard_rate", "verification_rate"];
        rows.map(|row| keys.map(|key| row[key].clone())).collect()
    };
    assert!(counts(&again) == counts(&replay), "other predictions");
    // A sweep of a drafter that is not tuned is left as it is.
    let text = std::fs::read_to_string(place.path("sweep.toml")).unwrap();
    let other =
        format!("[drafters.other]\nkind = 'model'\nmodel = '{}'\n", model("draft").display());
    let with_other = text.replace("[evaluate]\n", "[evaluate]\ndrafters = ['other']\n") + &other;
    place.write("other.toml", with_other);
    for stage in ["record", "tune"] {
        place.run(&[stage, "other.toml"]).ok();
    }
    assert_eq!(place.json("checkpoints/swept/tuning/heads.json"), race);
    // It stays, although another may have the lowest KL.
    place.run(&["train-head", "sweep.toml"]).ok();
    assert!(bytes(&place, "head")[0] == weights, "`head` is not {name}");
    place.run(&["evaluate", "sweep.toml"]).ok();
    let page = place.path("checkpoints/swept/evaluation/report.html");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.contains("Which head of the sweep") && page.contains("no head needs less of both")
    );
}

#[test]
fn an_interrupted_sweep_resumes_to_the_same_bytes() {
    let place = place("num_layers = [0, 1]\nmixing_ratio = [0.15, 0.4]\n");
    place.run(&["train-head", "sweep.toml"]).ok();
    let names = ["d0-w6-r0.15", "d1-w6-r0.15", "d0-w6-r0.4", "d1-w6-r0.4"];
    let all = |place: &Place| names.map(|name| bytes(place, &format!("sweep/{name}")));
    let (whole, best) = (all(&place), bytes(&place, "head"));
    std::fs::remove_dir_all(place.path("checkpoints")).unwrap();
    let mut num_runs = 1;
    loop {
        let ran = place.run(&["train-head", "sweep.toml", "--steps", "9"]);
        if ran.code == Some(0) {
            break;
        }
        assert_eq!(ran.code, Some(130), "{}", ran.stderr);
        assert!(!place.path("checkpoints/swept/draft/head").exists(), "not all are trained");
        num_runs += 1;
        assert!(num_runs < 30, "it never ends");
    }
    assert!(num_runs > 2, "{num_runs}");
    assert!(all(&place) == whole, "other bytes");
    assert!(bytes(&place, "head") == best, "other bytes");
}

#[test]
fn an_invalid_sweep_is_refused() {
    let place = Place::new();
    place.write_small_recipe();
    for (setting, named) in [
        ("drafters.draft.head.sweep.num_layers=[]", "head.sweep.num_layers"),
        ("drafters.draft.head.sweep.rejection_weight=[1, 1]", "head.sweep.rejection_weight"),
        ("drafters.draft.head.sweep.depth=[1]", "`depth`"),
    ] {
        place.run(&["train-head", "small.toml", "--set", setting]).fails_naming(&[named]);
    }
}

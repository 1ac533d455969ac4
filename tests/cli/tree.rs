//! Static trees that `tune` finds by replay, whose counts decoding reproduces.

use serde_json::Value;

use crate::support::{Place, model};

/// Writes a recipe with a tuned tree and without training, followed by `more`.
fn write_recipe(place: &Place, decodings: &str, more: &str) -> String {
    place.write_prompts("test.jsonl", 4);
    let [target, draft] = ["target", "draft-small"].map(|name| model(name).display().to_string());
    let recipe = format!(
        "[models]\ntarget = '{target}'\n[drafters.draft]\nkind = 'model'\nmodel = '{draft}'\n\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 24\nrules.fixed = [3]\n\
         decodings = {decodings}\n[evaluate.trees]\nshapes = ['2-1', 'tuned']\n\
         [tune]\nprompts = ['test.jsonl']\nmax_length = 6\nlookup_first = false\n{more}"
    );
    place.write("mine.toml", recipe).display().to_string()
}

/// Costs with cheap rows, so that trees pay.
const COSTS: &str = "[tune.costs]\ndraft_ms = 1.0\nrows_ms = [9.0, 9.02, 9.04]\n";

fn row(place: &Place, drafter: &str, decoding: &str) -> Option<Value> {
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let mut rows = rows.as_array().unwrap().iter();
    rows.find(|row| row["drafter"] == drafter && row["decoding"] == decoding).cloned()
}

#[track_caller]
fn assert_counts(found: &Value, promised: &Value) {
    for key in ["verification_rate", "discard_rate"] {
        let (found, promised) = (found[key].as_f64().unwrap(), promised[key].as_f64().unwrap());
        assert!((found - promised).abs() < 1e-9, "{key}: {found} for {promised}");
    }
}

#[test]
fn tune_finds_a_static_tree_and_decoding_counts_what_replay_counted() {
    let place = Place::new();
    let recipe = write_recipe(&place, "['greedy', 'sampled']", COSTS);
    place.run(&["evaluate", &recipe]).fails_naming(&[
        "`evaluate.trees.shapes`",
        "`draft`",
        "draftsmith tune",
    ]);
    place.run(&["record", &recipe]).ok();
    let tuned = place.run(&["tune", &recipe, "--json"]).json();
    let of = |decoding: &str| {
        let mut all = tuned.as_array().unwrap().iter();
        all.find(|it| it["decoding"] == decoding).unwrap().clone()
    };
    let (greedy, sampled) = (of("greedy"), of("sampled"));
    assert!(sampled.get("tree").is_none() && sampled.get("trees_tried").is_none());
    // The tree with the greatest predicted gain among those along recorded paths.
    let (tree, tried) = (&greedy["tree"], greedy["trees_tried"].as_array().unwrap());
    assert_eq!(tree["num_tried"].as_u64().unwrap() as usize, tried.len());
    assert!(tried.len() > 50, "{}", tried.len());
    let gain = |tried: &Value| tried["gain"].as_f64().unwrap();
    let best = tried.iter().max_by(|one, other| gain(one).total_cmp(&gain(other))).unwrap();
    assert_eq!(tree["expected_gain"]["value"], best["gain"]);
    // Shapes may be equally fast.
    let is_best = |it: &Value| it["shape"] == tree["shape"] && gain(it) == gain(best);
    assert!(tried.iter().any(is_best), "{tree}");
    assert!(gain(best) > 0.0, "{best}");
    assert_eq!(place.json("checkpoints/mine/tuning/trees.json"), Value::Array(vec![tree.clone()]));
    let shown = place.run(&["tune", &recipe]).ok();
    let shape = tree["shape"].as_str().unwrap();
    assert!(shown.contains(&format!("{shape}, K = ")) && shown.contains("static tree"), "{shown}");

    // Decoding the same prompts gives the same rounds as replay.
    place.run(&["evaluate", &recipe]).ok();
    let drafter = format!("draft+tree_{shape}");
    let decoded = row(&place, &drafter, "greedy").expect("it is measured");
    assert_eq!(decoded["lossless"], true);
    assert_counts(&decoded, tree);
    assert!(row(&place, &drafter, "sampled").is_none() || shape == "2-1");
    assert!(row(&place, "draft+tree_2-1", "sampled").is_some());
    // Given costs make no promise for this machine.
    let summary = place.json("checkpoints/mine/evaluation/summary.json");
    assert_eq!(summary["groups"][0]["promises"], Value::Array(Vec::new()));

    // `replay` on the same prompts has the same result.
    place.run(&["replay", &recipe]).ok();
    let replayed = place.json("checkpoints/mine/tuning/replay.json");
    let given = replayed["groups"].as_array().unwrap().iter();
    let mut given = given.filter(|it| it["cost_source"] == "given");
    let group = given.find(|it| it["decoding"] == "greedy").unwrap();
    assert_eq!(group["tree"]["shape"], tree["shape"]);
    assert_counts(&group["tree"], tree);
    assert!(given.next().unwrap().get("tree").is_none(), "sampled");
    let report = place.run(&["replay", &recipe]).ok();
    assert!(report.contains(&format!("static tree {shape}, K = ")), "{report}");
}

#[test]
fn a_tree_with_measured_costs_makes_a_promise_that_is_judged() {
    let place = Place::new();
    let recipe = write_recipe(&place, "['greedy']", "");
    place.run(&["record", &recipe]).ok();
    let tuned = place.run(&["tune", &recipe, "--json"]).json()[0].take();
    // The rows of the largest shape, and of the drafter.
    let rows = &tuned["costs"]["rounds"]["verify_seconds"];
    assert_eq!(rows.as_array().unwrap().len(), 65, "{rows}");
    assert!(tuned["costs"]["draft_rows"].is_object());
    place.run(&["evaluate", &recipe]).ok();
    let drafter = format!("draft+tree_{}", tuned["tree"]["shape"].as_str().unwrap());
    assert_counts(&row(&place, &drafter, "greedy").unwrap(), &tuned["tree"]);
    let summary = place.json("checkpoints/mine/evaluation/summary.json");
    let mut promises = summary["groups"][0]["promises"].as_array().unwrap().iter();
    let promise = promises.find(|it| it["drafter"] == drafter.as_str()).expect("a promise");
    let [promised, tuned] =
        [promise, &tuned["tree"]].map(|it| it["expected_gain"]["value"].as_f64());
    assert!((promised.unwrap() - tuned.unwrap()).abs() < 1e-9, "{promise}");
}

#[test]
fn rollouts_without_ranks_are_recorded_again_for_a_tree() {
    let place = Place::new();
    let recipe = write_recipe(&place, "['greedy']", COSTS);
    place.run(&["record", &recipe]).ok();
    let path =
        draftsmith_data::rollouts_path(&place.path("data/mine"), "draft", "validation", "greedy");
    let (mut rows, provenance) = draftsmith_data::read_rollouts(&path, None).unwrap();
    let ranks = |rows: &[draftsmith_data::RolloutRow]| -> Vec<u32> {
        rows.iter().flat_map(|row| row.candidates.draft_rank.clone()).flatten().collect()
    };
    let recorded = ranks(&rows);
    assert!(recorded.contains(&0) && recorded.iter().any(|rank| *rank > 0), "{recorded:?}");
    rows.iter_mut().for_each(|row| row.candidates.draft_rank = None);
    draftsmith_data::write_rollouts(&path, &rows, &provenance).unwrap();
    let parts = ["rollouts-draft-validation-greedy.parquet", "ranks", "draftsmith record"];
    place.run(&["tune", &recipe]).fails_naming(&parts);
    // Recipes without trees can still read the rollouts.
    place.run(&["tune", &recipe, "--set", "evaluate.trees.shapes=['2-1']"]).ok();
    place.run(&["record", &recipe]).ok();
    let (again, _) = draftsmith_data::read_rollouts(&path, None).unwrap();
    assert_eq!(ranks(&again), recorded);
    place.run(&["tune", &recipe]).ok();
}

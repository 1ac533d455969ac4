//! Cascades and prompt lookup in `evaluate`: the output stays the target's, and results name what
//! drafted.

use serde_json::Value;

use crate::support::{Place, model};

/// A recipe that needs no training, with `more` in `[evaluate]`.
fn write_recipe(place: &Place, models: &str, more: &str) -> String {
    place.write_prompts("test.jsonl", 4);
    let recipe = format!(
        "[models]\ntarget = '{}'\n{models}\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 24\ncandidate_lengths = [3]\n{more}",
        model("target").display()
    );
    place.write("mine.toml", recipe).display().to_string()
}

fn drafts() -> String {
    let [draft, small] = ["draft", "draft-small"].map(|name| model(name).display().to_string());
    format!("draft = '{draft}'\nsmall_draft = '{small}'\n")
}

#[test]
fn cascades_are_measured_beside_their_drafters_and_change_no_token() {
    let place = Place::new();
    let cascades = "[evaluate.max_gram]\nlengths = [4]\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = [[3, 2], [0, 4]]\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'small_draft', 'max_gram']\n\
        lengths = [[2, 1, 0], [0, 2, 0], [0, 0, 3]]\nlenience = 3.0\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = [[1, 3], [0, 1]]\n\
        leading = 8\n";
    let recipe = write_recipe(&place, &drafts(), cascades);
    place.run(&["evaluate", &recipe]).ok();
    let all = place.json("checkpoints/mine/evaluation/results.json");
    let rows: Vec<&Value> = all.as_array().unwrap().iter().collect();
    for (drafter, setting) in [
        ("none", None),
        ("draft", Some(3.0)),
        ("max_gram", Some(4.0)),
        ("cascade_1", Some(7.0)),
        ("cascade_2", Some(7.0)),
        ("cascade_3", Some(4.0)),
    ] {
        for decoding in ["greedy", "sampled"] {
            let row =
                rows.iter().find(|row| row["drafter"] == drafter && row["decoding"] == decoding);
            let row = row.unwrap_or_else(|| panic!("no row of {drafter}, {decoding}"));
            assert_eq!(row["setting"].as_f64(), setting, "{row}");
            if decoding == "greedy" {
                assert_eq!(row["lossless"], true, "{row}");
            }
            if drafter == "cascade_3" {
                // Seven children beside the chain's first take no forward of the draft.
                let per_round = |key: &str| {
                    row[key].as_f64().unwrap() / row["num_target_forwards"].as_f64().unwrap()
                };
                assert!(per_round("num_drafted") > 7.0, "{row}");
                assert!(row["compression_rate"].as_f64().unwrap() > 1.5, "{row}");
            } else if drafter.starts_with("cascade") {
                // A reviewer's forward reads what smaller drafters have proposed, so there are draft
                // forwards of several drafters.
                assert!(row["num_draft_forwards"].as_u64() > row["num_drafted"].as_u64(), "{row}");
                assert!(row["compression_rate"].as_f64().unwrap() > 1.5, "{row}");
            }
        }
    }
    let summary = place.json("checkpoints/mine/evaluation/summary.json");
    let described = |role: &str| {
        let models = summary["models"].as_array().unwrap();
        models.iter().find(|it| it["role"] == role).unwrap()["description"].to_string()
    };
    assert!(described("small draft").contains("layers"));
    assert!(described("cascade 2").contains("draft, small_draft, max_gram; lengths [[2, 1, 0]"));
    assert!(described("cascade 3").contains("lenience 1, 8 first tokens"));

    // Side by side they share forwards, and each has the rounds that it has alone.
    let recipe = write_recipe(&place, &drafts(), &format!("batch_size = 3\n{cascades}"));
    place.run(&["evaluate", &recipe]).ok();
    let batched = place.json("checkpoints/mine/evaluation/results.json");
    let counts = |rows: &Value| -> Vec<String> {
        let greedy = rows.as_array().unwrap().iter().filter(|row| row["decoding"] == "greedy");
        let keys = ["drafter", "lossless", "num_tokens", "num_target_forwards", "num_drafted"];
        greedy.map(|row| keys.map(|key| row[key].to_string()).join(" ")).collect()
    };
    assert_eq!(counts(&batched), counts(&all));
    // The recipe that is written beside them says the same.
    let again = place.path("checkpoints/mine/evaluation/recipe.toml").display().to_string();
    place.run(&["evaluate", &again]).ok();
}

#[test]
fn a_cascade_of_drafters_that_are_not_there_is_refused_by_its_key() {
    let place = Place::new();
    let evaluate = |models: &str, drafters: &str, lengths: &str| {
        let cascade =
            format!("[[evaluate.cascades]]\ndrafters = {drafters}\nlengths = {lengths}\n");
        place.run(&["evaluate", &write_recipe(&place, models, &cascade)])
    };
    let two = "[[2, 0], [0, 2]]";
    evaluate("", "['draft', 'max_gram']", two)
        .fails_naming(&["`evaluate.cascades`", "`models.draft`"]);
    evaluate("", "['small_draft', 'max_gram']", two)
        .fails_naming(&["`small_draft`", "`models.small_draft`"]);
    evaluate("", "['self_draft_2', 'max_gram']", two)
        .fails_naming(&["`self_draft_2`", "`evaluate.adapters`"]);
    evaluate("", "['max_gram', 'draft']", two)
        .fails_naming(&["`evaluate.cascades`", "put it last"]);
    evaluate("", "['medusa']", "[[2]]").fails_naming(&["drafters", "medusa"]);
    let leading = |number: &str| format!("[[1, 3], [0, 1]]\nleading = {number}");
    let drafters = "['draft', 'max_gram']";
    evaluate(&drafts(), drafters, &leading("1")).fails_naming(&[
        "`evaluate.cascades`",
        "`leading`",
        "leave it out",
    ]);
    evaluate(&drafts(), drafters, &leading("60000")).fails_naming(&["`leading = 60000`", "tokens"]);
    evaluate(&drafts(), drafters, "'tuned'\nleading = 8").fails_naming(&[
        "`evaluate.cascades`",
        "`leading`",
        "leave them out",
    ]);
}

#[test]
fn tune_finds_the_lengths_of_a_cascade_and_decoding_counts_what_replay_counted() {
    let place = Place::new();
    // Costs that make reviewing worth it: a draft forward takes a third of the target's.
    let more = "decodings = ['greedy']\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = 'tuned'\n\
        [tune]\nprompts = ['test.jsonl']\nmax_length = 9\n\
        [tune.costs]\ndraft_ms = 3.0\nrows_ms = [9.0, 9.05, 9.1]\n";
    let recipe = write_recipe(&place, &drafts(), more);
    place.run(&["evaluate", &recipe]).fails_naming(&[
        "`evaluate.cascades`",
        "draft, max_gram",
        "draftsmith tune",
    ]);
    place.run(&["record", &recipe]).ok();
    let tuned = place.run(&["tune", &recipe, "--json"]).json()[0].take();
    let (cascade, tried) = (&tuned["cascades"][0], tuned["cascades_tried"].as_array().unwrap());
    // The one of the greatest predicted gain, of all that fit what was recorded.
    assert_eq!(cascade["num_tried"].as_u64().unwrap() as usize, tried.len());
    assert!(tried.len() > 100, "{}", tried.len());
    let gain = |tried: &Value| tried["gain"].as_f64().unwrap();
    let best = tried.iter().max_by(|one, other| gain(one).total_cmp(&gain(other))).unwrap();
    assert_eq!(cascade["expected_gain"]["value"], best["gain"]);
    assert_eq!(cascade["lengths"], best["lengths"]);
    let other = &cascade["closed_form"];
    assert!(cascade["acceptance"]["found"].as_f64() > Some(0.0), "{cascade}");
    assert!(tried.iter().any(|it| it["lengths"] == other["lengths"]), "{other}");
    assert!(other["replayed"].as_f64() <= cascade["speedup"].as_f64(), "{cascade}");
    let shown = place.run(&["tune", &recipe]).ok();
    assert!(shown.contains("cascade of draft over max_gram") && shown.contains("EWIF"), "{shown}");

    // The same prompts, decoded: round for round what replay took them to be.
    place.run(&["evaluate", &recipe]).ok();
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let mut rows = rows.as_array().unwrap().iter();
    let row = rows.find(|row| row["drafter"] == "cascade_1").unwrap();
    assert_eq!(row["lossless"], true);
    for key in ["verification_rate", "discard_rate"] {
        let (found, expected) = (row[key].as_f64().unwrap(), cascade[key].as_f64().unwrap());
        assert!((found - expected).abs() < 1e-9, "{key}: {found} for {expected}");
    }
    let summary = place.json("checkpoints/mine/evaluation/summary.json");
    let lengths = cascade["lengths"].to_string().replace(',', ", ");
    assert!(summary["models"].to_string().contains(&lengths), "{lengths}");
    // Costs of another machine promise nothing here.
    assert_eq!(summary["groups"][0]["promises"], Value::Array(Vec::new()));

    // With another draft they are nobody's lengths.
    let small = format!("draft = '{}'\n", model("draft-small").display());
    let recipe = write_recipe(&place, &small, more);
    place.run(&["evaluate", &recipe]).fails_naming(&[
        "`evaluate.cascades`",
        "other models",
        "draftsmith tune",
    ]);
}

#[test]
fn tune_finds_the_lengths_of_several_models_by_how_often_they_agree() {
    let place = Place::new();
    let three = "[[evaluate.cascades]]\nlengths = 'tuned'\n\
        drafters = ['draft', 'small_draft', 'max_gram']\n";
    let all = format!(
        "[[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = 'tuned'\n\
         {three}{three}lenience = 4.0\n\
         [tune]\nprompts = ['test.jsonl']\nmax_length = 6\n"
    );
    let with_costs = |draft_ms: &str| {
        format!("{all}[tune.costs]\ndraft_ms = {draft_ms}\nrows_ms = [9.0, 9.05, 9.1]\n")
    };
    let tune = |draft_ms: &str| {
        let recipe = write_recipe(&place, &drafts(), &with_costs(draft_ms));
        place.run(&["record", &recipe]).ok();
        (place.run(&["tune", &recipe, "--json"]), recipe)
    };
    let unnamed = ["`tune.costs.draft_ms`", "`small_draft`", "{ draft = 1.5, small_draft = 0.5 }"];
    tune("3.0").0.fails_naming(&unnamed);
    tune("{ draft = 3.0 }").0.fails_naming(&["`tune.costs.draft_ms`", "`small_draft`"]);
    let (tuned, recipe) = tune("{ draft = 3.0, small_draft = 0.4 }");
    let tuned = tuned.json();
    for (tuning, decoding) in tuned.as_array().unwrap().iter().zip(["greedy", "sampled"]) {
        let [replayed, strict, lenient] = [0, 1, 2].map(|nth| &tuning["cascades"][nth]);
        let prob = |cascade: &Value, reviewer: Option<&str>, drafter: &str| {
            let of = cascade["acceptance"]["accepted"].as_array().unwrap();
            let is_it = |it: &&Value| {
                (it["reviewer"].as_str(), it["drafter"].as_str()) == (reviewer, Some(drafter))
                    && it["instead_of"].is_null()
            };
            of.iter().find(is_it).unwrap()["prob"].as_f64().unwrap()
        };
        assert_eq!(replayed["promised_by"], "replay", "{decoding}");
        for cascade in [strict, lenient] {
            assert_eq!(cascade["promised_by"], "closed_form");
            assert!(cascade["closed_form"].is_null());
            assert!(cascade["num_tried"].as_u64() > Some(500), "{cascade}");
            // A chain of the draft alone is among those that were tried.
            assert!(cascade["expected_gain"]["value"].as_f64() >= Some(0.0), "{cascade}");
            for (reviewer, drafter) in
                [(None, "draft"), (None, "max_gram"), (Some("draft"), "max_gram")]
            {
                // What models say at every place, and what was recorded there: drawn, where sampled.
                let close = if decoding == "greedy" { 1e-12 } else { 0.15 };
                if (reviewer, lenient == cascade) != (Some("draft"), true) {
                    let both = [replayed, cascade].map(|it| prob(it, reviewer, drafter));
                    assert!((both[0] - both[1]).abs() < close, "{decoding} {drafter}: {both:?}");
                }
            }
        }
        let by_draft = [strict, lenient].map(|it| prob(it, Some("draft"), "small_draft"));
        assert!(by_draft[0] < by_draft[1], "what is forgiven stands more often: {by_draft:?}");
        assert_eq!(lenient["lenience"], 4.0);
    }
    let shown = place.run(&["tune", &recipe]).ok();
    assert!(shown.contains("cascade of draft over small_draft over max_gram, lenience 4:"));

    // What is decoded has those lengths, and each its own.
    place.run(&["evaluate", &recipe]).ok();
    let rows = place.json("checkpoints/mine/evaluation/results.json");
    let rows = rows.as_array().unwrap();
    let mut greedy = rows.iter().filter(|row| row["decoding"] == "greedy");
    assert!(greedy.clone().all(|row| row["lossless"] == true));
    assert!(greedy.any(|row| row["drafter"] == "cascade_3"));
    let summary = place.json("checkpoints/mine/evaluation/summary.json")["models"].to_string();
    for (nth, decoding) in ["greedy", "sampled"].iter().enumerate() {
        for cascade in [1, 2] {
            let lengths = tuned[nth]["cascades"][cascade]["lengths"].to_string().replace(',', ", ");
            assert!(summary.contains(&format!("{lengths} {decoding}")), "{lengths}: {summary}");
        }
    }
}

#[test]
fn lengths_are_found_where_nothing_is_looked_up_and_not_where_nothing_is_drafted() {
    let place = Place::new();
    // No prompt repeats so many tokens.
    let more = "decodings = ['greedy']\n[evaluate.max_gram]\nlengths = [4]\nmin_match = 60\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = 'tuned'\n\
        [[evaluate.cascades]]\ndrafters = ['draft', 'max_gram']\nlengths = 'tuned'\nlenience = 2.0\n\
        [tune]\nprompts = ['test.jsonl']\nmax_length = 4\n\
        [tune.costs]\ndraft_ms = 3.0\nrows_ms = [9.0, 9.05, 9.1]\n";
    let recipe = write_recipe(&place, &drafts(), more);
    place.run(&["record", &recipe]).ok();
    let tuned = place.run(&["tune", &recipe, "--json"]).json()[0].take();
    for cascade in tuned["cascades"].as_array().unwrap() {
        assert_eq!(cascade["acceptance"]["found"], 0.0, "{cascade}");
        assert_eq!(cascade["acceptance"]["accepted"].as_array().unwrap().len(), 1, "{cascade}");
    }
    place.run(&["evaluate", &recipe]).ok();

    let text = std::fs::read_to_string(&recipe).unwrap();
    let short = text.replace("max_new_tokens = 24", "max_new_tokens = 1");
    let recipe = place.write("mine.toml", short).display().to_string();
    place.run(&["record", &recipe]).ok();
    place.run(&["tune", &recipe]).fails_naming(&["no candidate", "more new tokens"]);

    // Whose drafters are not there is told before anything is looked for.
    let text = text.replace("'draft', 'max_gram'", "'self_draft_3', 'max_gram'");
    let recipe = place.write("mine.toml", text).display().to_string();
    for command in ["tune", "evaluate"] {
        let missing = ["`evaluate.cascades`", "self_draft_3", "evaluate.adapters"];
        place.run(&[command, &recipe]).fails_naming(&missing);
    }
}

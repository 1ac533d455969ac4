//! Cascades and prompt lookup in `evaluate`: the output stays the target's, and results name the
//! drafters.

use serde_json::Value;

use crate::doctor::write_drafter;
use crate::support::{Place, model};

/// A recipe that needs no training, with `more` in `[evaluate]`, and drafters.
fn write_recipe(place: &Place, drafters: &str, more: &str) -> String {
    place.write_prompts("test.jsonl", 4);
    let recipe = format!(
        "[models]\ntarget = '{}'\n\
         [evaluate]\nprompts = ['test.jsonl']\nmax_new_tokens = 24\n{more}\
         rules.fixed = [3]\n{drafters}",
        model("target").display()
    );
    place.write("mine.toml", recipe).display().to_string()
}

fn drafts() -> String {
    let drafts = [("draft", "draft"), ("small", "draft-small")].map(|(name, dir)| {
        format!("[drafters.{name}]\nkind = 'model'\nmodel = '{}'\n", model(dir).display())
    });
    let lookup = "[drafters.lookup]\nkind = 'prompt-lookup'\nrules.fixed = [4]\n";
    drafts.concat() + lookup
}

#[test]
fn cascades_are_measured_and_change_no_token() {
    let place = Place::new();
    let cascades = "[drafters.two]\nkind = 'cascade'\ndrafters = ['draft', 'lookup']\n\
        lengths = [[3, 2], [0, 4]]\n\
        [drafters.three]\nkind = 'cascade'\ndrafters = ['draft', 'small', 'lookup']\n\
        lengths = [[2, 1, 0], [0, 2, 0], [0, 0, 3]]\nlenience = 3.0\nlenient_lookup = true\n\
        [drafters.tree]\nkind = 'cascade'\ndrafters = ['draft', 'lookup']\n\
        lengths = [[1, 3], [0, 1]]\nnum_first_tokens = 8\n";
    let recipe = write_recipe(&place, &(drafts() + cascades), "");
    place.run(&["evaluate", &recipe]).ok();
    let all = place.json("checkpoints/mine/evaluation/results.json");
    let rows: Vec<&Value> = all.as_array().unwrap().iter().collect();
    for (drafter, setting) in [
        ("none", None),
        ("draft", Some(3.0)),
        ("lookup", Some(4.0)),
        ("two", Some(7.0)),
        ("three", Some(7.0)),
        ("tree", Some(4.0)),
    ] {
        for decoding in ["greedy", "sampled"] {
            let row =
                rows.iter().find(|row| row["drafter"] == drafter && row["decoding"] == decoding);
            let row = row.unwrap_or_else(|| panic!("no row of {drafter}, {decoding}"));
            assert_eq!(row["setting"].as_f64(), setting, "{row}");
            if decoding == "greedy" {
                assert_eq!(row["lossless"], true, "{row}");
            }
            if ["two", "three"].contains(&drafter) {
                // A reviewer's forward reads the candidates of smaller drafters, so there are draft
                // forwards of several drafters.
                assert!(row["num_draft_forwards"].as_u64() > row["num_drafted"].as_u64(), "{row}");
                assert!(row["compression_rate"].as_f64().unwrap() > 1.5, "{row}");
            }
            if drafter == "tree" {
                // Every proposal has at least the chain's first token and its seven siblings.
                let [drafted, rounds] =
                    ["num_drafted", "num_target_forwards"].map(|key| row[key].as_f64().unwrap());
                assert!(drafted > 7.0 * rounds, "{row}");
                assert!(row["compression_rate"].as_f64().unwrap() > 1.5, "{row}");
            }
        }
    }
    let summary = place.json("checkpoints/mine/evaluation/summary.json");
    let described = |role: &str| {
        let models = summary["models"].as_array().unwrap();
        models.iter().find(|it| it["role"] == role).unwrap()["description"].to_string()
    };
    assert!(described("small").contains("layers"));
    assert!(described("three").contains("draft, small, lookup; lengths [[2, 1, 0]"));
    assert!(described("three").contains("lenience 3 for look-ups too"));
    assert!(described("tree").contains("lenience 1, 8 first tokens"));

    // Prompts in a batch share forwards and have the same rounds as alone.
    let recipe = write_recipe(&place, &(drafts() + cascades), "batch_size = 3\n");
    place.run(&["evaluate", &recipe]).ok();
    let batched = place.json("checkpoints/mine/evaluation/results.json");
    let counts = |rows: &Value| -> Vec<String> {
        let greedy = rows.as_array().unwrap().iter().filter(|row| row["decoding"] == "greedy");
        let keys = ["drafter", "lossless", "num_tokens", "num_target_forwards", "num_drafted"];
        greedy.map(|row| keys.map(|key| row[key].to_string()).join(" ")).collect()
    };
    assert_eq!(counts(&batched), counts(&all));
    // The written recipe has the same cascades.
    let again = place.path("checkpoints/mine/evaluation/recipe.toml").display().to_string();
    place.run(&["evaluate", &again]).ok();
}

#[test]
fn a_drafter_of_the_targets_states_changes_no_token_inside_another_drafter() {
    let place = Place::new();
    write_drafter(&place.path("eagle"), false);
    let drafters = "[drafters.e]\nkind = 'eagle3'\npath = 'eagle'\n\
        [drafters.look]\nkind = 'prompt-lookup'\nrules.fixed = [4]\n\
        [drafters.alone]\nkind = 'cascade'\ndrafters = ['e', 'look']\nlengths = [[3, 0], [0, 0]]\n\
        [drafters.reviewing]\nkind = 'cascade'\ndrafters = ['e', 'look']\nlengths = [[2, 1], [0, 4]]\n\
        [drafters.tree]\nkind = 'cascade'\ndrafters = ['e', 'look']\nlengths = [[1, 3], [0, 1]]\n\
        num_first_tokens = 8\n\
        [drafters.both]\nkind = 'merged'\ndrafters = ['e']\nlookup = '2x4'\n";
    let recipe = write_recipe(&place, drafters, "");
    let generate = |extra: &[&str]| {
        let arguments = ["generate", "--prompt", "What is 47 + 85? Show the steps.", "--json"];
        place.run(&[&arguments[..], &["--max-new-tokens", "40"], extra].concat()).json()
    };
    let plain = generate(&["--target", &model("target").display().to_string()]);
    for drafter in ["e", "alone", "reviewing", "tree", "both"] {
        let found = generate(&["--recipe", &recipe, "--drafter", drafter]);
        assert_eq!(found["token_ids"], plain["token_ids"], "{drafter}");
    }
    place.run(&["evaluate", &recipe]).ok();
    let all = place.json("checkpoints/mine/evaluation/results.json");
    for drafter in ["e", "alone", "reviewing", "tree", "both"] {
        let is_it = |row: &&Value| row["drafter"] == drafter && row["decoding"] == "greedy";
        let row = all.as_array().unwrap().iter().find(is_it).expect("it was measured");
        assert_eq!((&row["lossless"], &row["num_forgiven_ties"]), (&true.into(), &0.into()));
    }
}

#[test]
fn a_cascade_with_missing_drafters_is_refused() {
    let place = Place::new();
    let evaluate = |drafters: &str, lengths: &str| {
        let cascade = format!(
            "[drafters.mix]\nkind = 'cascade'\ndrafters = {drafters}\nlengths = {lengths}\n"
        );
        place.run(&["evaluate", &write_recipe(&place, &(drafts() + &cascade), "")])
    };
    let two = "[[2, 0], [0, 2]]";
    evaluate("['nobody', 'lookup']", two)
        .fails_naming(&["`drafters.mix.drafters`", "`[drafters.nobody]`"]);
    evaluate("['lookup', 'draft']", two)
        .fails_naming(&["`drafters.mix.drafters`", "before the last place"]);
    evaluate("['not a name']", "[[2]]").fails_naming(&["drafters", "`not a name`"]);
    let drafters = "['draft', 'lookup']";
    evaluate(drafters, "'tuned'").fails_naming(&["lengths", "expected a matrix"]);
    evaluate(drafters, &format!("{two}\nlenient_lookup = true")).fails_naming(&[
        "`drafters.mix`",
        "`lenient_lookup`",
        "`lenience` above 1",
    ]);
    evaluate(drafters, &format!("{two}\nnum_first_tokens = 1")).fails_naming(&[
        "`drafters.mix`",
        "`num_first_tokens`",
        "such as 8",
    ]);
    evaluate(drafters, &format!("{two}\nnum_first_tokens = 99999"))
        .fails_naming(&["`num_first_tokens = 99999`", "such as 8"]);
}

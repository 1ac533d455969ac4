//! Tables of papers, repeats, and Spec-Bench's way to average.

use serde_json::Value;

use crate::support::{Place, model};

#[test]
fn a_recipes_paper_is_printed_with_repeats_and_spec_benchs_averages() {
    let place = Place::new();
    let prompt = |(id, category): (usize, &str)| {
        format!(
            r#"{{"question_id": {id}, "category": "{category}", "turns": ["What is {id} plus 4?"]}}"#
        )
    };
    let categories = ["writing", "humanities", "stem", "qa", "qa"];
    let prompts: Vec<String> = categories.into_iter().enumerate().map(prompt).collect();
    place.write("bench.jsonl", prompts.join("\n") + "\n");
    let recipe = format!(
        "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
         [evaluate]\nprompts = ['bench.jsonl']\nmax_new_tokens = 12\nrepeats = 3\nrules.fixed = [1, 4]\n\
         [[papers]]\ntitle = 'A paper, Table 9'\nbest = 'compression_rate'\n\
         rows = [{{ name = 'best K', where = {{ stop_rule = 'fixed_length' }} }}]\n\
         columns = [{{ name = 'tok/fwd', value = 'compression_rate' }}, \
         {{ each = 'category', value = 'compression_rate' }}]\n\
         [[papers.published]]\nname = '7B'\ncolumns = ['tok/fwd']\nfigures = [[2.5]]\n",
        model("target").display(),
        model("draft").display()
    );
    for (text, wrong, named) in [
        ("best = 'compression_rate'", "bestt = 'x'", "`bestt`"),
        ("figures = [[2.5]]", "figures = [[2.5, 1]]", "`7B`"),
    ] {
        place.write("wrong.toml", recipe.replace(text, wrong));
        place.run(&["evaluate", "wrong.toml"]).fails_naming(&["wrong.toml", named]);
    }
    place.write("bench.toml", &recipe);
    let printed = place.run(&["evaluate", "bench.toml"]).ok();
    for part in ["A paper, Table 9", "here: bench, greedy", "paper: 7B", "mt_bench"] {
        assert!(printed.contains(part), "`{part}`: {printed}");
    }
    let summary = place.json("checkpoints/bench/evaluation/summary.json");
    assert_eq!(summary["seeds"], serde_json::json!([0, 1, 2]));
    let block = &summary["papers"][0]["blocks"][0];
    assert_eq!(block["columns"], serde_json::json!(["tok/fwd", "mt_bench", "qa"]));

    // The draft and the target by themselves are timed too.
    let costs = summary["groups"][0]["costs"].as_array().unwrap();
    let alone = |drafter: &str| {
        let is_it = |cost: &&Value| cost["reads"] == "alone" && cost["drafter"] == drafter;
        costs.iter().find(is_it).unwrap()
    };
    assert!(alone("draft")["draft_seconds"].as_f64().unwrap() > 0.0);
    assert!(alone("none")["target_seconds"].as_f64().unwrap() > 0.0);

    let rows = place.results("bench");
    let find = |setting: f64, decoding: &str| {
        let is_it = |row: &&Value| row["setting"] == setting && row["decoding"] == decoding;
        rows.iter().find(is_it).unwrap()
    };
    let best =
        [1.0, 4.0].map(|setting| find(setting, "greedy")["compression_rate"].as_f64().unwrap());
    assert_eq!(block["rows"][0]["figures"][0]["value"], best[0].max(best[1]));
    // Greedy rounds all end at the token limit here, sampled ones differ between prompts.
    let sampled = &summary["papers"][0]["blocks"][1]["rows"][0]["figures"][0];
    assert!(sampled["low"].as_f64() < sampled["high"].as_f64(), "an interval: {sampled}");
    for row in &rows {
        assert_eq!(row["num_prompts"], 5, "prompts, not measurements: {row}");
        assert!(row["speedup_over_prompts"].as_f64().unwrap() > 0.0);
        assert!(row["speedup_sd"].as_f64().unwrap() >= 0.0);
        let number = |key: &str| row[key].as_f64().unwrap();
        for key in ["tokens_per_second", "speedup_at_paper_costs"] {
            let [low, high] = [0, 1].map(|at| row["rate_intervals"][key][at].as_f64().unwrap());
            // Those of the target are 1 up to rounding.
            let (low, high) = (low - 1e-12, high + 1e-12);
            assert!(low <= number(key) && number(key) <= high, "{key}: {row}");
        }
        assert_eq!(row["num_parameters"].is_null(), row["drafter"] == "none");
        let draft_length = number("num_drafted") / number("num_target_forwards");
        assert!((number("draft_length") - draft_length).abs() < 1e-12, "{row}");
        assert!((number("tokens_per_round") - 1.0 - number("accepted_length")).abs() < 1e-12);
    }
    // Greedy repeats give the same tokens, sampled ones other draws of the same prompts.
    let answers = |name: &str| -> Vec<Value> {
        let dir = place.path("checkpoints/bench/evaluation/answers/bench");
        let text = std::fs::read_to_string(dir.join(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let texts = |name: &str| -> Vec<Vec<Value>> {
        let turns = |answer: Value| {
            let choices = answer["choices"].as_array().unwrap().clone();
            assert!(choices.iter().enumerate().all(|(nth, choice)| choice["index"] == nth));
            choices.into_iter().map(|choice| choice["turns"].clone()).collect()
        };
        answers(name).into_iter().map(turns).collect()
    };
    let greedy = texts("greedy-fixed-4.jsonl");
    assert!(greedy.iter().all(|it| it.len() == 3 && it.iter().all(|turns| *turns == it[0])));
    let sampled = texts("sampled-fixed-4.jsonl");
    assert!(sampled.iter().any(|it| it.iter().any(|turns| *turns != it[0])), "{sampled:?}");

    // Two evaluations of other prompts and lengths are compared with a warning.
    place.write("bench2.jsonl", format!("{}\n", prompts[..4].join("\n")));
    place.write("other.toml", recipe.replace("bench.jsonl", "bench2.jsonl").replace("= 12", "= 9"));
    place.run(&["evaluate", "other.toml"]).ok();
    let compared = |one: &str, other: &str| {
        let ran = place.run(&["report", one, other]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        ran.stderr
    };
    let said = compared("checkpoints/bench", "checkpoints/other");
    for part in [
        "differ in more than what is compared",
        "prompts: 5 of `bench` and 4 of `bench2`",
        "tokens an answer, at most: 12 and 9",
    ] {
        assert!(said.contains(part), "`{part}`: {said}");
    }
    assert!(!said.contains("target:") && !said.contains("machine:"), "{said}");
    assert!(!compared("checkpoints/bench", "checkpoints/bench").contains("differ"));

    let wrong = recipe.replace("'compression_rate' }]", "'compresion_rate' }]");
    place.write("wrong.toml", wrong);
    let ran = place.run(&["evaluate", "wrong.toml"]);
    ran.fails_naming(&[
        "wrong.toml",
        "A paper, Table 9",
        "`compresion_rate` is no key of `results.json`",
    ]);
}

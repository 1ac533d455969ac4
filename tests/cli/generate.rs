//! `generate`: text and JSON output, and drafts that change only the speed.

use serde_json::json;

use crate::support::{Place, model};

fn paths() -> [String; 3] {
    ["target", "draft", "draft-small"].map(|name| model(name).display().to_string())
}

const PROMPTS: [&str; 3] = [
    "What is 47 + 85? Show the steps.",
    "Copy the second sentence: The red lamp is near the door. The old clock is on the shelf.",
    "Convert 3 km to m.",
];

#[test]
fn greedy_speculative_output_is_plain_greedy_output() {
    let place = Place::new();
    let [target, draft, small] = paths();
    for prompt in PROMPTS {
        let generate = |extra: &[&str]| {
            let mut arguments =
                vec!["generate", "--target", &target, "--prompt", prompt, "--greedy", "--json"];
            arguments.extend(["--max-new-tokens", "60"]);
            arguments.extend(extra);
            place.run(&arguments).json()
        };
        let plain = generate(&[]);
        assert!(!plain["token_ids"].as_array().unwrap().is_empty());
        assert!(!plain["text"].as_str().unwrap().is_empty());
        for draft in [&draft, &small] {
            for length in ["1", "3", "8"] {
                let rule = format!("fixed={length}");
                let speculative = generate(&["--draft", draft, "--rule", &rule]);
                assert_eq!(speculative["token_ids"], plain["token_ids"], "{prompt}");
                assert_eq!(speculative["prompt_ids"], plain["prompt_ids"]);
                let rounds = speculative["rounds"].as_array().unwrap();
                let accepted: u64 =
                    rounds.iter().map(|r| r["num_accepted"].as_u64().unwrap() + 1).sum();
                assert!(accepted >= plain["token_ids"].as_array().unwrap().len() as u64);
            }
        }
    }
}

#[test]
fn a_head_changes_the_rounds_but_not_the_text() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let trained = place.run(&["train-head", "small.toml", "--json"]).json();
    assert_eq!(trained["kept"], false);
    let [target, draft, _] = paths();
    let generate = |extra: &[&str]| {
        let mut arguments = vec!["generate", "--target", &target, "--prompt", PROMPTS[0], "--json"];
        arguments.extend(extra);
        place.run(&arguments).json()
    };
    let plain = generate(&[]);
    let head = ["--draft", &draft, "--head", "checkpoints/small/draft/head", "--rule"];
    for rule in ["head=0.2", "head=0.9", "head-without-lag=0.5"] {
        let mut extra = head.to_vec();
        extra.push(rule);
        assert_eq!(generate(&extra)["token_ids"], plain["token_ids"]);
    }
}

#[test]
fn a_repetition_penalty_has_the_same_effect_with_every_drafter() {
    let place = Place::new();
    let [target, draft, _] = paths();
    for penalty in ["1.3", "0.5"] {
        let generate = |prompt: &str, penalty: &str, extra: &[&str]| {
            let arguments = ["generate", "--target", &target, "--prompt", prompt, "--json"];
            let how = ["--repetition-penalty", penalty, "--max-new-tokens", "60"];
            place.run(&[&arguments[..], &how, extra].concat()).json()
        };
        let mut num_changed = 0;
        for prompt in PROMPTS {
            let plain = generate(prompt, penalty, &["--greedy"]);
            num_changed += usize::from(
                plain["token_ids"] != generate(prompt, "1", &["--greedy"])["token_ids"],
            );
            let drafters: [&[&str]; 4] = [
                &["--draft", &draft],
                &["--prompt-lookup"],
                &["--draft", &draft, "--tree", "3-2x4x12"],
                &["--draft", &draft, "--rule", "fixed=9"],
            ];
            for drafter in drafters {
                let found = generate(prompt, penalty, drafter);
                assert_eq!(found["token_ids"], plain["token_ids"], "{drafter:?}, {prompt}");
            }
        }
        assert!(num_changed > 0, "{penalty}");
    }
    let refused = ["generate", "--target", &target, "--prompt", "x", "--repetition-penalty", "0"];
    place.run(&refused).fails_naming(&["repetition_penalty must lie between 0.01 and 100", "`0`"]);
}

#[test]
fn stop_strings_and_end_tokens_work_with_every_drafter() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let generate = |prompt: &str, extra: &[&str]| {
        let arguments = ["generate", "--target", &target, "--prompt", prompt, "--max-new-tokens"];
        place.run(&[&arguments[..], &["60", "--json"], extra].concat()).json()
    };
    let ids = |found: &serde_json::Value| found["token_ids"].as_array().unwrap().clone();
    for prompt in PROMPTS {
        let whole = generate(prompt, &[]);
        let text = whole["text"].as_str().unwrap();
        // Five characters, which need not align with tokens.
        let string: String = text.chars().skip(text.chars().count() / 2).take(5).collect();
        let token = ids(&whole)[ids(&whole).len() / 2].to_string();
        for end in [["--stop-string", &string], ["--eos-token-id", &token]] {
            let plain = generate(prompt, &end);
            let (found, all) = (ids(&plain), ids(&whole));
            assert!(found.len() < all.len() && all.starts_with(&found), "{end:?}, {prompt}");
            if end[0] == "--stop-string" {
                let stopped = plain["text"].as_str().unwrap();
                let before = stopped.find(&string).expect("the whole stop string is kept");
                // Only the rest of the completing token follows.
                assert_eq!(text.find(&string), Some(before));
                assert!(stopped.len() - before - string.len() < 12, "{stopped:?} for {string:?}");
            } else {
                assert_eq!(found.last().unwrap().to_string(), token);
            }
            let drafters: [&[&str]; 5] = [
                &["--draft", &draft],
                &["--draft", &draft, "--rule", "fixed=12"],
                &["--prompt-lookup"],
                &["--draft", &draft, "--lookup-first"],
                &["--draft", &draft, "--tree", "3-2x4x12"],
            ];
            for drafter in drafters {
                let speculative = generate(prompt, &[&end[..], drafter].concat());
                assert_eq!(ids(&speculative), found, "{drafter:?}, {end:?}, {prompt}");
            }
        }
    }
    let refused = |end: [&str; 2]| {
        let arguments = ["generate", "--target", &target, "--prompt", "x"];
        place.run(&[&arguments[..], &end].concat())
    };
    refused(["--stop-string", ""]).fails_naming(&["stop string is empty"]);
    refused(["--eos-token-id", "99999"]).fails_naming(&["end token 99999", "--eos-token-id"]);
}

#[test]
fn sampling_is_a_function_of_the_seed() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let generate = |seed: &str| {
        place
            .run(&[
                "generate",
                "--target",
                &target,
                "--draft",
                &draft,
                "--prompt",
                PROMPTS[1],
                "--temperature",
                "1.5",
                "--seed",
                seed,
                "--json",
            ])
            .json()["token_ids"]
            .clone()
    };
    assert_eq!(generate("1"), generate("1"));
    assert_ne!(generate("1"), generate("2"));
}

#[test]
fn text_goes_to_stdout_and_notes_to_stderr() {
    let place = Place::new();
    let [target, ..] = paths();
    let arguments = ["generate", "--target", &target, "--prompt", PROMPTS[2]];
    let ran = place.run(&arguments);
    assert!(ran.stderr.contains("tokens/s"), "{}", ran.stderr);
    let text = ran.ok();
    assert!(!text.contains("</s>") && text.ends_with('\n'), "{text}");
    let mut quiet = arguments.to_vec();
    quiet.push("--quiet");
    let ran = place.run(&quiet);
    assert_eq!(ran.stderr, "");
    assert_eq!(ran.ok(), text);
}

#[test]
fn a_model_without_a_chat_template_needs_one() {
    let place = Place::new();
    let own = model("target").display().to_string();
    place.copy_model("target", "bare");
    std::fs::remove_file(place.path("bare/chat_template.jinja")).unwrap();
    let generate = |target: &str, more: &[&str]| {
        let mut arguments = vec!["generate", "--target", target, "--prompt", PROMPTS[0], "--json"];
        arguments.extend(["--max-new-tokens", "2"]);
        arguments.extend(more);
        place.run(&arguments)
    };
    generate("bare", &[]).fails_naming(&[
        "`bare` has no chat template",
        "hint: ",
        "`vicuna`",
        "`--raw`",
    ]);
    let chosen = |name| generate("bare", &["--chat-template", name]).json()["prompt_ids"].clone();
    assert_eq!(chosen("none"), generate("bare", &["--raw"]).json()["prompt_ids"]);
    assert_ne!(chosen("alpaca"), chosen("none"));
    let file = model("target").join("chat_template.jinja").display().to_string();
    assert_eq!(chosen(&file), generate(&own, &[]).json()["prompt_ids"]);
    generate("bare", &["--chat-template", "no.jinja"]).fails_naming(&["`no.jinja`", "`none`"]);

    // The choice is part of the data's provenance.
    let recipe = std::fs::read_to_string(place.write_small_recipe()).unwrap();
    place.write("small.toml", recipe.replace(&format!("target = '{own}'"), "target = 'bare'"));
    place.run(&["build-data", "small.toml"]).fails_naming(&["`bare` has no chat template"]);
    let build = |name: &str| {
        let set = format!("models.chat_template={name}");
        let fewer = ["--set", "data.num_prompts=2", "--set", "data.skip_long_prompts=true"];
        place.run(&[&["build-data", "small.toml", "--set", &set][..], &fewer].concat())
    };
    build("alpaca").ok();
    build("alpaca").ok();
    build("vicuna").fails_naming(&["chat_template"]);
}

#[test]
fn prompt_lookup_copies_repeated_text_and_changes_no_token() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let prompt = "Copy: red lamp red lamp red lamp red lamp red lamp";
    let generate = |extra: &[&str]| {
        let mut arguments = vec![
            "generate", "--target", &target, "--prompt", prompt, "--greedy", "--json", "--raw",
        ];
        arguments.extend(extra);
        place.run(&arguments)
    };
    let plain = generate(&[]).json();
    for length in ["1", "4", "16"] {
        let rule = format!("fixed={length}");
        let found = generate(&["--prompt-lookup", "--rule", &rule]).json();
        assert_eq!(found["token_ids"], plain["token_ids"]);
        let rounds = found["rounds"].as_array().unwrap();
        let most = |key: &str| rounds.iter().filter_map(|round| round[key].as_u64()).max().unwrap();
        // The text keeps repeating, so complete rounds are accepted.
        assert_eq!(most("num_accepted").to_string(), length);
        assert_eq!(most("num_drafted").to_string(), length);
    }
    generate(&["--prompt-lookup", "--draft", &draft]).fails_naming(&["--prompt-lookup", "--draft"]);
    for rule in ["head=0.5", "confidence=0.5", "entropy=0.5"] {
        generate(&["--prompt-lookup", "--rule", rule]).fails_naming(&["`lookup`", "--rule"]);
    }
}

#[test]
fn the_draft_runs_if_lookup_finds_nothing_and_changes_no_token() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let prompt = "What is 47 + 85? Copy it: What is 47 + 85? Copy it: What is";
    let generate = |extra: &[&str]| {
        let mut arguments = vec!["generate", "--target", &target, "--prompt", prompt, "--raw"];
        arguments.extend(["--json", "--max-new-tokens", "60"]);
        arguments.extend(extra);
        place.run(&arguments)
    };
    let plain = generate(&["--greedy"]).json();
    let drafted = ["--draft", &draft, "--rule", "fixed=1"];
    let longest = |found: &serde_json::Value| {
        let rounds = found["rounds"].as_array().unwrap();
        rounds.iter().map(|round| round["num_drafted"].as_u64().unwrap()).max().unwrap()
    };
    for (first, length) in [(&["--lookup-first"][..], 4), (&["--lookup-first", "1x7"], 7)] {
        let greedy = generate(&[&drafted[..], first, &["--greedy"]].concat()).json();
        assert_eq!(greedy["token_ids"], plain["token_ids"]);
        assert_eq!(longest(&greedy), length);
        let sampled = generate(&[&drafted[..], first, &["--temperature", "1"]].concat()).json();
        assert_eq!(longest(&sampled), length);
    }
    let never = [&drafted[..], &["--lookup-first", "99x7", "--greedy"]].concat();
    assert_eq!(longest(&generate(&never).json()), 1);
    generate(&["--lookup-first"]).fails_naming(&["--lookup-first", "--draft", "--prompt-lookup"]);
    generate(&["--lookup-first", "2x4", "--prompt-lookup"])
        .fails_naming(&["--lookup-first", "--prompt-lookup"]);
    for wrong in ["4", "0x4", "2x0", "2x4x8"] {
        generate(&[&drafted[..], &["--lookup-first", wrong]].concat())
            .fails_naming(&["2x4", wrong]);
    }
}

#[test]
fn trees_accept_more_than_their_chain_and_change_no_token() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let generate_from = |prompt: &str, extra: &[&str]| {
        let mut arguments = vec!["generate", "--target", &target, "--prompt", prompt, "--json"];
        arguments.extend(extra);
        place.run(&arguments)
    };
    let generate = |extra: &[&str]| generate_from(PROMPTS[0], extra);
    let drafted = ["--draft", &draft, "--rule", "fixed=3"];
    let num_rounds = |tree: &[&str]| -> usize {
        let of_prompt = |prompt: &&str| {
            let plain = generate_from(prompt, &["--greedy"]).json();
            let found = generate_from(prompt, &[&["--greedy"], &drafted[..], tree].concat()).json();
            assert_eq!(found["token_ids"], plain["token_ids"], "{tree:?}");
            found["rounds"].as_array().unwrap().len()
        };
        PROMPTS.iter().map(of_prompt).sum()
    };
    let chain = num_rounds(&[]);
    assert_eq!(num_rounds(&["--tree", "1x1x0"]), chain);
    let trees = ["4x1x9", "4x9x99", "4x9x99-drawn"].map(|shape| num_rounds(&["--tree", shape]));
    assert!(chain > trees[0] && trees[0] >= trees[1] && trees[1] == trees[2], "{chain} {trees:?}");
    for shape in ["3x2x8", "3x2x8-drawn"] {
        let sampled = [&drafted[..], &["--tree", shape, "--temperature", "1"]].concat();
        assert!(!generate(&sampled).json()["token_ids"].as_array().unwrap().is_empty());
    }
    generate(&["--tree", "3x2x8"]).fails_naming(&["--tree", "--draft", "--adapter"]);
    generate(&["--prompt-lookup", "--tree", "3x2x8"]).fails_naming(&["--tree", "--prompt-lookup"]);
    for shape in ["", "0", "2-1", "0x1x1", "3x2", "3x0x1"] {
        let wrong = [&drafted[..], &["--tree", shape]].concat();
        generate(&wrong).fails_naming(&["--tree", "3-2-1x4x12"]);
    }
}

#[test]
fn bigrams_continue_lookups_and_belong_to_their_tokenizer() {
    let place = Place::new();
    let [target, _, _] = paths();
    let recipe = place.write("mine.toml", format!("[models]\ntarget = '{target}'\n"));
    let recipe = recipe.display().to_string();
    place.run(&["train-bigram", &recipe]).fails_naming(&["data/mine", "draftsmith build-data"]);
    // A place that cannot be written is told before anything is counted.
    let taken = place.path("checkpoints/mine/bigrams.safetensors");
    std::fs::create_dir_all(&taken).unwrap();
    place
        .run(&["train-bigram", &recipe, "--text", "missing.txt"])
        .fails_naming(&["cannot write `", "bigrams.safetensors`"]);
    std::fs::remove_dir(&taken).unwrap();
    let text = "What is 47 + 85?\nThe answer is 132.\n".repeat(20);
    let text = place.write("text.txt", text).display().to_string();
    let counted = place.run(&["train-bigram", &recipe, "--text", &text, "--json"]).json();
    assert!(counted["num_pairs"].as_u64().unwrap() > 20 * counted["num_tokens"].as_u64().unwrap());
    let table = place.path("checkpoints/mine/bigrams.safetensors").display().to_string();

    let generate = |from: [&str; 2], extra: &[&str]| {
        let arguments = ["generate", "--prompt", PROMPTS[0], "--json", "--greedy"];
        place.run(&[&arguments[..], &["--max-new-tokens", "60"], &from, extra].concat())
    };
    let with_table = |target: &str, table: &str| {
        let lookup = format!("[drafters.lookup]\nkind = 'prompt-lookup'\nbigrams = '{table}'\n");
        place.write("filled.toml", format!("[models]\ntarget = '{target}'\n{lookup}"));
        generate(["--recipe", "filled.toml"], &[])
    };
    let plain = generate(["--target", &target], &[]).json();
    let lookup = generate(["--target", &target], &["--prompt-lookup"]).json();
    let filled = with_table(&target, &table).json();
    for found in [&lookup, &filled] {
        assert_eq!(found["token_ids"], plain["token_ids"]);
    }
    let num_drafted = |found: &serde_json::Value| -> u64 {
        let rounds = found["rounds"].as_array().unwrap();
        rounds.iter().map(|round| round["num_drafted"].as_u64().unwrap()).sum()
    };
    assert!(num_drafted(&filled) > num_drafted(&lookup));

    // CS-Drafting's authors publish lists of the next token by token id, with 0 for none.
    let ids = plain["token_ids"].as_array().unwrap();
    let mut next = vec![0; 1 + ids.iter().map(|id| id.as_u64().unwrap() as usize).max().unwrap()];
    for pair in ids.windows(2) {
        next[pair[0].as_u64().unwrap() as usize] = pair[1].as_u64().unwrap();
    }
    place.write("next.json", format!("{next:?}"));
    let listed = with_table(&target, "next.json").json();
    assert_eq!(listed["token_ids"], plain["token_ids"]);
    assert!(num_drafted(&listed) > num_drafted(&lookup));
    place.write("next.json", format!("{:?}", vec![0; next.len()]));
    let nothing = with_table(&target, "next.json").json();
    assert_eq!(num_drafted(&nothing), num_drafted(&lookup));
    for (text, named) in [
        ("[99999999]", "token 99999999, which the target does not have"),
        ("[-1]", "next.json"),
        (&*format!("{:?}", vec![0; 99999]), "99999 tokens, and the target"),
    ] {
        place.write("next.json", text);
        with_table(&target, "next.json").fails_naming(&["next.json", named]);
    }

    let other = place.copy_model("target", "other");
    let tokenizer = std::fs::read_to_string(other.join("tokenizer.json")).unwrap();
    std::fs::write(other.join("tokenizer.json"), tokenizer + "\n").unwrap();
    with_table(&other.display().to_string(), &table).fails_naming(&[
        "bigrams.safetensors",
        "tokenizer",
        "draftsmith train-bigram",
    ]);
    with_table(&target, "no.safetensors")
        .fails_naming(&["no.safetensors", "draftsmith train-bigram"]);
}

#[test]
fn stored_answers_are_looked_up_and_belong_to_their_tokenizer() {
    let place = Place::new();
    let [target, draft, _] = paths();
    let recipe = place.write("mine.toml", format!("[models]\ntarget = '{target}'\n"));
    let recipe = recipe.display().to_string();
    let build = |extra: &[&str]| place.run(&[&["build-datastore", &recipe][..], extra].concat());
    build(&[]).fails_naming(&["data/mine", "draftsmith build-data"]);
    let generate = |target: &str, extra: &[&str]| {
        let arguments = ["generate", "--prompt", PROMPTS[0], "--json", "--greedy", "--target"];
        let most = [target, "--max-new-tokens", "60"];
        place.run(&[&arguments[..], &most, extra].concat())
    };
    let plain = generate(&target, &[]).json();
    // The answer that the target will give, as text and as tokens.
    let (text, ids) = (plain["text"].as_str().unwrap(), &plain["token_ids"]);
    let record = json!({ "prompt": "Another one", "response": text });
    place.write("earlier.jsonl", format!("{record}\n{{\"prompt\": \"unanswered\"}}\n"));
    let built = build(&["--from", "earlier.jsonl", "--json"]).json();
    assert_eq!(built["num_answers"], 1);
    let stored = place.path("data/mine/answers.safetensors").display().to_string();
    assert!(built["num_tokens"].as_u64().unwrap() + 1 >= ids.as_array().unwrap().len() as u64);

    let num_rounds = |found: &serde_json::Value| found["rounds"].as_array().unwrap().len();
    let lookup = generate(&target, &["--prompt-lookup"]).json();
    let of_answers = generate(&target, &["--prompt-lookup", "--answers", &stored]).json();
    let before = ["--draft", &draft, "--lookup-first", "answers:1x8", "--answers", &stored];
    let before = generate(&target, &before).json();
    for found in [&lookup, &of_answers, &before] {
        assert_eq!(found["token_ids"], plain["token_ids"]);
    }
    assert!(2 * num_rounds(&of_answers) < num_rounds(&lookup), "{of_answers}");
    assert!(num_rounds(&before) <= num_rounds(&of_answers) + 2);
    let keys = "[drafters.lookup]\nkind = 'prompt-lookup'\nsearched = 'answers'\n\
                suffix = { tree = true, factor = 2.0 }\n";
    let recipe_with = |keys: &str| {
        let models = format!("answers = '{stored}'\n[models]\ntarget = '{target}'\n{keys}");
        place.write("stored.toml", models);
        let arguments = ["generate", "--recipe", "stored.toml", "--prompt", PROMPTS[0], "--json"];
        place.run(&[&arguments[..], &["--greedy", "--max-new-tokens", "60"]].concat())
    };
    assert_eq!(recipe_with(keys).json()["token_ids"], plain["token_ids"]);
    for (from, to, named) in [
        ("tree = true", "depth = 65", "drafters.lookup.suffix.depth"),
        ("tree = true", "min_prob = 0.0", "drafters.lookup.suffix.min_prob"),
        ("factor = 2.0", "factor = -1.0", "drafters.lookup.suffix.factor"),
        ("tree = true", "deep = 3", "deep"),
        ("searched = 'answers'", "", "drafters.lookup.suffix"),
        ("kind =", "bigrams = 'no.json'\nkind =", "drafters.lookup.bigrams"),
    ] {
        recipe_with(&keys.replace(from, to)).fails_naming(&[named]);
    }

    let other = place.copy_model("target", "other");
    let tokenizer = std::fs::read_to_string(other.join("tokenizer.json")).unwrap();
    std::fs::write(other.join("tokenizer.json"), tokenizer + "\n").unwrap();
    let unused = ["--draft", &draft, "--lookup-first", "2x4", "--answers", &stored];
    generate(&target, &unused).fails_naming(&["--answers", "answers:2x4"]);
    place.write("none.toml", format!("[models]\ntarget = '{target}'\n{keys}"));
    let none = ["generate", "--recipe", "none.toml", "--prompt", "a"];
    place.run(&none).fails_naming(&["earlier answers", "draftsmith build-datastore"]);
    place.write("foreign.jsonl", "{\"prompt\": \"a\", \"prefix\": [1], \"tokens\": [99999999]}\n");
    build(&["--from", "foreign.jsonl"]).fails_naming(&["foreign.jsonl"]);
    let with = |target: &str, path: &str| generate(target, &["--prompt-lookup", "--answers", path]);
    let hint = "draftsmith build-datastore";
    let other = other.display().to_string();
    with(&other, &stored).fails_naming(&["answers.safetensors", "tokenizer", hint]);
    with(&target, "no.safetensors").fails_naming(&["no.safetensors", hint]);
    // A cut file, and one with its tokens changed.
    let bytes = std::fs::read(&stored).unwrap();
    place.write("cut.safetensors", &bytes[..bytes.len() - 8]);
    with(&target, "cut.safetensors").fails_naming(&["cut.safetensors"]);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut changed = bytes.clone();
    changed[header] ^= 1;
    place.write("changed.safetensors", changed);
    with(&target, "changed.safetensors").fails_naming(&["changed.safetensors", "index", hint]);
}

#[test]
fn any_drafter_of_a_recipe_changes_the_rounds_but_not_the_text() {
    let place = Place::new();
    let [target, draft, small] = paths();
    place.write(
        "mine.toml",
        format!(
            "[models]\ntarget = '{target}'\n[drafters.draft]\nkind = 'model'\nmodel = '{draft}'\n\
             [drafters.small]\nkind = 'model'\nmodel = '{small}'\n\
             [drafters.lookup]\nkind = 'prompt-lookup'\n\
             [drafters.vertical]\nkind = 'cascade'\ndrafters = ['draft', 'lookup']\n\
             lengths = [[3, 2], [0, 4]]\n\
             [drafters.nested]\nkind = 'cascade'\ndrafters = ['draft', 'small', 'lookup']\n\
             lengths = [[2, 0, 2], [0, 3, 0], [0, 0, 2]]\nlenience = 2.0\n\
             [drafters.both]\nkind = 'merged'\ndrafters = ['draft', 'small']\n"
        ),
    );
    let generate = |prompt: &str, extra: &[&str]| {
        let arguments = ["generate", "--recipe", "mine.toml", "--prompt", prompt, "--json"];
        place.run(&[&arguments[..], &["--max-new-tokens", "60"], extra].concat())
    };
    for prompt in PROMPTS {
        let plain = ["generate", "--target", &target, "--prompt", prompt, "--json"];
        let plain = place.run(&[&plain[..], &["--max-new-tokens", "60"]].concat()).json();
        for drafter in ["draft", "small", "lookup", "vertical", "nested", "both"] {
            let found = generate(prompt, &["--drafter", drafter]).json();
            assert_eq!(found["drafter"], drafter);
            assert_eq!(found["token_ids"], plain["token_ids"], "{drafter}");
            let rounds = found["rounds"].as_array().unwrap();
            let drafted = |round: &serde_json::Value| round["num_drafted"].as_u64().unwrap();
            assert!(rounds.iter().all(|round| drafted(round) <= 10), "{rounds:?}");
            assert!(rounds.len() < plain["token_ids"].as_array().unwrap().len());
        }
        assert_eq!(generate(prompt, &[]).json()["drafter"], "draft");
    }
    let sampled = ["--drafter", "vertical", "--temperature", "1"];
    assert!(!generate(PROMPTS[0], &sampled).json()["text"].as_str().unwrap().is_empty());
    let refused = |extra: &[&str], named: &[&str]| generate("x", extra).fails_naming(named);
    refused(&["--drafter", "nobody"], &["`nobody`", "draft, small, lookup"]);
    refused(&["--drafter", "vertical", "--rule", "fixed=3"], &["`--rule`", "`vertical`"]);
    refused(&["--drafter", "lookup", "--rule", "confidence=0.5"], &["`--rule`", "`lookup`"]);
    refused(&["--drafter", "draft", "--target", &target], &["--target"]);
}

#[test]
fn logits_that_overflow_are_an_error_of_the_model() {
    let place = Place::new();
    for name in ["target", "draft"] {
        place.copy_model(name, name);
        crate::doctor::edit_tensors(&place.path(name), |it| {
            let mut head = it.header["model.embed_tokens.weight"].clone();
            let [from, to] = [0, 1].map(|at| head["data_offsets"][at].as_u64().unwrap());
            head["data_offsets"] = json!([it.bytes.len(), it.bytes.len() as u64 + to - from]);
            // The largest finite number of bf16, so that sums overflow.
            it.bytes.extend([0x7f, 0x7f].repeat(((to - from) / 2) as usize));
            it.header.insert("lm_head.weight".into(), head);
        });
        crate::doctor::edit_config(&place.path(name), |it| {
            drop(it.insert("tie_word_embeddings".into(), json!(false)))
        });
    }
    let target = model("target").display().to_string();
    let ask = ["--prompt", "What is 4 + 8?", "--max-new-tokens", "8"];
    for temperature in ["0", "1"] {
        let run = |models: &[&str]| {
            let all = [&["generate", "--temperature", temperature], models, &ask].concat();
            place.run(&all)
        };
        run(&["--target", "target"]).fails_naming(&["target's logits are not finite"]);
        run(&["--target", &target, "--draft", "draft"])
            .fails_naming(&["draft's logits are not finite"]);
    }
}

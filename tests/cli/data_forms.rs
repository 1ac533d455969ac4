//! Data in the formats of the methods' authors.

use serde_json::json;

use crate::support::{Place, model};

/// Reads a list as Python prints it.
fn read<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &serde_json::Value) -> Vec<T> {
    let inner = text.as_str().unwrap().strip_prefix('[').unwrap().strip_suffix(']').unwrap();
    inner.split(", ").map(|value| value.parse().unwrap()).collect()
}

#[test]
fn exported_labels_follow_the_specdec_pp_authors_format() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let export = ["export", "--for", "specdec-pp", "data/small", "labels.json"];
    let message = place.run(&export).ok();
    assert!(message.contains("70 responses with labels"), "{message}");
    assert!(!message.contains("sampling settings"), "the authors sample at T = 1: {message}");
    let items = place.json("labels.json");
    let items = items.as_array().unwrap();
    let rows =
        draftsmith_data::read_dir(&place.path("data/small"), draftsmith_data::Incomplete::Refused);
    let rows = rows.unwrap().rows;
    assert_eq!(items.len(), rows.len());
    let (mut num_kept, mut num_labels) = (0, 0);
    for (item, row) in items.iter().zip(&rows) {
        let draft = row.draft.as_ref().unwrap();
        assert_eq!(item["id"], row.id.as_str());
        assert_eq!(read::<u32>(&item["prefix"]), row.prompt_ids);
        assert_eq!(read::<u32>(&item["tokens"]), row.response_ids);
        assert_eq!(read::<u32>(&item["draft"]), draft.draft_ids);
        assert_eq!(read::<f32>(&item["log_p_7b"]), draft.draft_log_prob);
        assert_eq!(read::<f32>(&item["log_p_70b"]), draft.target_log_prob);
        let pairs = draft.target_log_prob.iter().zip(&draft.draft_log_prob);
        let (mixture, labels) = (read::<u32>(&item["mixture"]), read::<f32>(&item["labels"]));
        let kept = labels.iter().zip(&mixture).zip(&row.response_ids);
        assert_eq!(labels.len(), row.response_ids.len());
        assert!(kept.into_iter().all(|((label, z), x)| *label >= 0.0 || z == x), "{item}");
        num_kept += labels.iter().filter(|label| **label == -100.0).count();
        num_labels += labels.len();
        for (found, (p, q)) in read::<f32>(&item["p_acc"]).iter().zip(pairs) {
            assert!((found - (p - q).min(0.0).exp()).abs() < 1e-5);
        }
        assert!(!item["continuation"].as_str().unwrap().contains("</s>"));
    }
    let share = num_kept as f64 / num_labels as f64;
    assert!((share - 0.15).abs() < 0.05, "the authors' mixing ratio: {share}");
    // An existing file is never overwritten.
    place.run(&export).fails_naming(&["`labels.json`", "already exists"]);

    // One shard with sampling settings that differ from the authors'.
    let set = ["--set", "data.temperature=0.0", "--set", "name=\"greedy\""];
    place.run(&[&["build-data", "small.toml"], &set[..]].concat()).ok();
    let shard = "data/greedy/responses-00001.parquet";
    let message = place.run(&["export", "--for", "specdec-pp", shard, "one.json"]).ok();
    assert!(message.contains("sampling settings"), "{message}");
    assert_eq!(place.json("one.json").as_array().unwrap().len(), 32);

    // Without a draft there are no labels.
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let draft = recipe.find("[drafters.draft]").unwrap()..recipe.find("[data]").unwrap();
    let alone = recipe.replace(&recipe[draft], "");
    let alone = alone.split("[drafters.draft.head]").next().unwrap();
    let alone = alone.replace("[models]", "name = 'alone'\n[models]");
    place.write("alone.toml", alone);
    place.run(&["build-data", "alone.toml"]).ok();
    place.run(&["export", "--for", "specdec-pp", "data/alone", "none.json"]).fails_naming(&[
        "`train#0`",
        "no labels",
        "a draft model",
    ]);
    assert!(!place.path("none.json").exists());
}

/// The rows of a data directory, without the name of their file.
fn rows_of(place: &Place, dir: &str) -> Vec<draftsmith_data::ResponseRow> {
    let data = draftsmith_data::read_dir(&place.path(dir), draftsmith_data::Incomplete::Refused);
    let mut rows = data.unwrap().rows;
    rows.iter_mut().for_each(|row| row.source = String::new());
    rows
}

#[test]
fn specdec_pp_data_round_trips_and_trains_the_same_head() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    place.run(&["export", "--for", "specdec-pp", "data/small", "labels.json"]).ok();
    let import = |from: &str, out: &str| {
        place.run(&["import", "--from", "specdec-pp", "--recipe", "small.toml", from, out])
    };
    let ran = import("labels.json", "data/back");
    let message = "70 responses were given as tokens; acceptance probabilities differ from the \
                   file's by 0.0000";
    assert!(ran.stderr.contains(message), "{}", ran.stderr);
    assert!(!ran.stderr.contains("other models"), "{}", ran.stderr);
    ran.ok();
    let expected = rows_of(&place, "data/small");
    assert!(rows_of(&place, "data/back") == expected);

    // Lists instead of strings, all on one line; draft tokens are drawn here if the file has none.
    let mut items = place.json("labels.json");
    for item in items.as_array_mut().unwrap() {
        for key in ["prefix", "tokens", "p_acc"] {
            item[key] = serde_json::from_str(item[key].as_str().unwrap()).unwrap();
        }
        item.as_object_mut().unwrap().remove("draft");
    }
    place.write("lists.json", items.to_string());
    import("lists.json", "./data/lists/").ok();
    assert!(rows_of(&place, "data/lists") == expected);

    // train-head accepts the imported data and gives the same head.
    for recipe in ["small.toml", "data/back/recipe.toml"] {
        place.run(&["train-head", recipe]).ok();
    }
    let weights = |recipe: &str| {
        std::fs::read(place.path(&format!("checkpoints/{recipe}/draft/head/model.safetensors")))
            .unwrap()
    };
    assert!(weights("small") == weights("back"));

    // Labels at another temperature are noted as different.
    place.write("warm.toml", {
        let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
        recipe.replace(
            "max_new_tokens = 12\n[drafters.draft.head]",
            "max_new_tokens = 5\ntemperature = 3.0\n[drafters.draft.head]",
        )
    });
    let warm = ["import", "--from", "specdec-pp", "--recipe", "warm.toml", "labels.json", "data/w"];
    let ran = place.run(&warm);
    assert!(ran.stderr.contains("cut at an end token"), "{}", ran.stderr);
    assert!(ran.stderr.contains("other models or sampling settings"), "{}", ran.stderr);
    ran.ok();
    assert!(rows_of(&place, "data/w").iter().all(|row| row.response_ids.len() <= 5));
}

#[test]
fn records_without_an_answer_are_left_out_of_existing_responses() {
    let place = Place::new();
    let line = |n: usize| match n {
        3 => format!("{{\"prompt\": \"add {n} and 2\"}}\n"),
        n => format!("{{\"prompt\": \"add {n} and 2\", \"response\": \"{}\"}}\n", n + 2),
    };
    place.write_small_recipe();
    place.write("train.jsonl", (0..6).map(line).collect::<String>());
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    place.write("small.toml", recipe.replace("[data]", "[data]\nresponses = 'existing'"));
    let ran = place.run(&["build-data", "small.toml", "--json"]);
    let note = "`train.jsonl`: 1 of 6 prompts are left out: 1 without an answer";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
    assert_eq!(ran.json()["num_prompts"], 5);
    let strict = place.run(&["build-data", "small.toml", "--strict"]);
    strict.fails_naming(&["`train#3` has no response", "keys `prompt`"]);
}

#[test]
fn errors_in_specdec_pp_data_name_file_and_item() {
    let place = Place::new();
    place.write_small_recipe();
    let import = ["import", "--from", "specdec-pp", "theirs.json", "data/theirs"];
    place.write("theirs.json", "[]");
    place.run(&import).fails_naming(&["`theirs.json`", "`--recipe FILE`"]);
    let recipe = ["--recipe", "small.toml"];
    let elsewhere = ["import", "--from", "specdec-pp", "theirs.json", "out"];
    place.run(&[&elsewhere[..], &recipe].concat()).fails_naming(&["`data/NAME`", "`out`"]);
    let item = |more: &str| {
        format!(
            "{{\"prompt\": \"a\", \"continuation\": \"b\", \"prefix\": \"[1, 5]\", \
             \"tokens\": [7, 2], \"draft\": [8, 2]{more}}}"
        )
    };
    let refused = |items: &[String], named: &[&str]| {
        place.write("theirs.json", format!("[{}]", items.join(", ")));
        place.run(&[&import[..], &recipe].concat()).fails_naming(named);
        assert!(place.names("data/theirs").iter().all(|name| !name.ends_with(".parquet")));
    };
    let first = item(", \"id\": \"x#1\"");
    let named = ["`theirs.json`, line 1 (item 2)", "`p_acc` has 3 values"];
    refused(&[first.clone(), item(", \"p_acc\": \"[1, 1, 1]\"")], &named);
    refused(
        &[item(", \"tokens\": \"[7, 9999]\"")],
        &["`theirs#0`", "`tokens`", "9999", "`theirs`"],
    );
    refused(
        &[first.clone(), item(", \"id\": \"x#1\", \"prompt\": \"c\"")],
        &["`x#1`", "two prompts"],
    );
    let named = ["`theirs#0` has no response", "`response`, `answer`, `output`", "keys `prompt`"];
    refused(&["{\"prompt\": \"a\"}".to_owned()], &named);
    let half = r#"{"id": 3, "messages": [{"role": "user", "content": "c"}]}"#.to_owned();
    let named = ["`theirs#1` has no response", "user text of `messages`", "keys `id`, `messages`"];
    refused(&[first.clone(), half], &named);
    refused(&["{\"text\": \"a\"}".to_owned()], &["`theirs.json`, line 1 (item 1)"]);
}

/// A template that writes a call as its arguments alone.
const WITH_CALLS: &str = "{{- bos_token }}{%- for message in messages %}\
    {%- if message.role == 'assistant' %}{{- '<|assistant|>\\n' + (message.content or '') }}\
    {%- for call in message.tool_calls or [] %}{{- call.function.arguments }}{%- endfor %}{{- eos_token + '\\n' }}\
    {%- elif message.role == 'tool' %}{{- '<|user|>\\n' + message.name + ': ' + message.content + '\\n' }}\
    {%- else %}{{- '<|user|>\\n' + message.content + '\\n' }}{%- endif %}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif -%}";

#[test]
fn a_tools_result_follows_the_regenerated_call_if_it_is_the_recorded_one() {
    let place = Place::new();
    let recipe = std::fs::read_to_string(place.write_small_recipe()).unwrap();
    place.write("chat.jinja", WITH_CALLS);
    let recipe = recipe
        .replace("[drafters.draft]\n", "chat_template = 'chat.jinja'\n[drafters.draft]\n")
        .replace("['train.jsonl']", "['tools.jsonl']");
    place.write("small.toml", &recipe);
    place.write("tools.jsonl", "{\"prompt\": \"Convert 3 km to m.\"}\n");
    let rows = |name: &str| {
        let dir = place.path("data").join(name);
        draftsmith_data::read_dir(&dir, draftsmith_data::Incomplete::Refused).unwrap().rows
    };
    place.run(&["build-data", "small.toml", "--set", "name=\"first\""]).ok();
    let tokenizer = draftsmith_data::TextTokenizer::from_model_dir(&model("target")).unwrap();
    let said = tokenizer.decode(&rows("first")[0].response_ids, true).unwrap();
    // Two records whose calls are and are not what the target says, and one with an image.
    let record = |user: &str, call: &str| {
        json!({ "messages": [
            { "role": "user", "content": user },
            { "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": call } }] },
            { "role": "tool", "name": "f", "content": "3000" },
            { "role": "assistant", "content": "It is 3000 m." },
        ] })
    };
    let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] });
    let records =
        [record("Convert 3 km to m.", &said), record("Convert 4 km to m.", "elsewhere"), image];
    let records = records.map(|it| it.to_string());
    place.write("tools.jsonl", records.join("\n"));
    let ran = place.run(&["build-data", "small.toml", "--json"]);
    let notes = ran.stderr.replace('\n', " ");
    assert_eq!(ran.json()["num_ended_by_call"], 1);
    for part in [
        "1 conversations end early, because the target's answer does not make the calls of tools",
        "`tools.jsonl`: 1 records have images or other media and are skipped; they would need",
    ] {
        assert!(notes.contains(part), "{notes}");
    }
    let found = rows("small");
    let ids: Vec<&str> = found.iter().map(|row| row.id.as_str()).collect();
    assert_eq!(ids, ["tools#0", "tools#0#1", "tools#1"]);
    let prompt = format!(
        "<s><|user|>\nConvert 3 km to m.\n<|assistant|>\n{said}</s>\n<|user|>\nf: 3000\n<|assistant|>\n"
    );
    assert_eq!(found[1].prompt_ids, tokenizer.encode(&prompt, false).unwrap(), "{prompt}");

    // Existing answers consist of the calls as the template writes them.
    let existing = ["--set", "name=\"existing\"", "--set", "data.responses=\"existing\""];
    place.run(&[&["build-data", "small.toml"], &existing[..]].concat()).ok();
    let found = rows("existing");
    let answers: Vec<String> =
        found.iter().map(|row| tokenizer.decode(&row.response_ids, false).unwrap()).collect();
    let ending = |text: &str| format!("{text}</s>");
    assert_eq!(answers[2..], [ending("elsewhere"), ending("It is 3000 m.")]);
    assert_eq!(found[1].prompt_ids, tokenizer.encode(&prompt, false).unwrap());
}

//! Prompt sources from files to built rows: compressed files, tables, patterns, weights, lengths, duplicates,
//! splits and malformed records.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use draftsmith_data::{
    DataSet, Incomplete, TextTokenizer, read_dir, read_rollouts, rollouts_paths,
};
use parquet::arrow::ArrowWriter;
use serde_json::json;

use crate::support::{Place, Ran, model, root};

/// A place with a recipe `small.toml` that has no draft and generates few tokens. `keys` go into `[data]`.
fn place(keys: &str) -> Place {
    let place = Place::new();
    place.write(
        "small.toml",
        format!(
            "[models]\ntarget = '{}'\n[data]\nmax_new_tokens = 2\n{keys}\n",
            model("target").display()
        ),
    );
    place
}

/// Distinct prompt texts.
fn texts(count: usize) -> Vec<String> {
    let lines = std::fs::read_to_string(root().join("data/tiny/prompts/train.jsonl")).unwrap();
    let text = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        record["prompt"].as_str().unwrap().to_owned()
    };
    let texts: Vec<String> = lines.lines().take(count).map(text).collect();
    assert_eq!(texts.iter().collect::<BTreeSet<_>>().len(), count);
    texts
}

fn json_lines(texts: &[String]) -> String {
    texts.iter().fold(String::new(), |mut lines, text| {
        writeln!(lines, "{}", serde_json::json!({ "prompt": text })).unwrap();
        lines
    })
}

fn write_table(path: &Path, texts: &[String]) {
    let column = Arc::new(StringArray::from_iter_values(texts)) as ArrayRef;
    let batch = RecordBatch::try_from_iter([("prompt", column)]).unwrap();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut writer =
        ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Builds data named `name`, with overrides.
fn build(place: &Place, name: &str, keys: &[&str]) -> (DataSet, Ran) {
    let name = format!("name={name}");
    let mut arguments = vec!["build-data", "small.toml", "--set", &name];
    keys.iter().for_each(|key| arguments.extend(["--set", *key]));
    let ran = place.run(&arguments);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let dir = place.path("data").join(name.strip_prefix("name=").unwrap());
    (read_dir(&dir, Incomplete::Refused).unwrap(), ran)
}

fn ids(data: &DataSet) -> Vec<&str> {
    data.rows.iter().map(|row| row.id.as_str()).collect()
}

#[test]
fn compressed_files_and_tables_give_the_same_rows_as_plain_files() {
    let place = place("prompts = ['train.jsonl']");
    let texts = texts(10);
    let lines = json_lines(&texts);
    place.write("train.jsonl", &lines);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(lines.as_bytes()).unwrap();
    place.write("train.jsonl.gz", gzip.finish().unwrap());
    place.write("train.jsonl.zst", zstd::encode_all(lines.as_bytes(), 3).unwrap());
    write_table(&place.path("train.parquet"), &texts);
    let (plain, _) = build(&place, "plain", &[]);
    assert_eq!(plain.rows.len(), 10);
    for (n, file) in ["train.jsonl.gz", "train.jsonl.zst", "train.parquet"].into_iter().enumerate()
    {
        let key = format!("data.prompts=['{file}']");
        let (other, _) = build(&place, &format!("other-{n}"), &[&key]);
        assert_eq!(other.hash, plain.hash, "{file}");
    }
}

#[test]
fn weights_divide_prompts_among_sources() {
    let place = place(
        "prompts = ['a.jsonl', { path = 'parts/*.parquet', weight = 2.0 }]\nnum_prompts = 12",
    );
    let texts = texts(60);
    place.write("a.jsonl", json_lines(&texts[..30]));
    write_table(&place.path("parts/c.parquet"), &texts[30..50]);
    write_table(&place.path("parts/b.parquet"), &texts[50..]);
    let (data, _) = build(&place, "one", &[]);
    let of_sources = |data: &DataSet| {
        data.rows.iter().fold(BTreeMap::new(), |mut counts: BTreeMap<String, usize>, row| {
            *counts.entry(row.source.clone()).or_default() += 1;
            counts
        })
    };
    let counts = of_sources(&data);
    assert_eq!((counts["a"], counts["b"] + counts["c"]), (4, 8), "{counts:?}");
    assert!(counts["b"] > 0 && counts["c"] > 0, "drawn from all files of the source: {counts:?}");
    // In file order, but not the first prompts.
    let mut sorted = ids(&data);
    sorted.sort_by_key(|id| {
        let (source, number) = id.split_once('#').unwrap();
        (source, number.parse::<usize>().unwrap())
    });
    assert_eq!(ids(&data), sorted);
    assert_ne!(ids(&data)[..4], ["a#0", "a#1", "a#2", "a#3"]);
    // Repeatable, dependent on the seed, and a smaller choice is part of a larger one.
    assert_eq!(ids(&build(&place, "again", &[]).0), ids(&data));
    assert_ne!(ids(&build(&place, "seeded", &["seed=1"]).0), ids(&data));
    let (more, _) = build(&place, "more", &["data.num_prompts=24"]);
    assert!(ids(&data).iter().all(|id| ids(&more).contains(id)));
    // More than exist.
    let (all, ran) = build(&place, "all", &["data.num_prompts=99"]);
    assert_eq!(all.rows.len(), 60);
    let message = "`parts/*.parquet` has 30 prompts, fewer than the 66 that its weight asks for";
    assert!(ran.stderr.contains(message), "{}", ran.stderr);

    let changed = place.run(&[
        "build-data",
        "small.toml",
        "--set",
        "name=one",
        "--set",
        "data.prompts=[{path='a.jsonl',weight=3.0},{path='parts/*.parquet',weight=2.0}]",
    ]);
    changed
        .fails_naming(&["`weights[0]` = {\"num_files\":1,\"weight\":1.0}", "\"weight\":3.0} now"]);
    let bad =
        |key: &str| place.run(&["build-data", "small.toml", "--set", "name=bad", "--set", key]);
    bad("data.prompts=[{path='a.jsonl',weight=0}]").fails_naming(&["data.prompts", "weight 0"]);
    bad("data.prompts=[{path='a.jsonl',wight=1}]").fails_naming(&["unknown field `wight`"]);
    bad("data.prompts=['parts/*.json']").fails_naming(&["no file matches `parts/*.json`"]);
    let text = std::fs::read_to_string(place.path("small.toml")).unwrap();
    place.write("small.toml", text.replace("num_prompts = 12", ""));
    place.run(&["build-data", "small.toml"]).fails_naming(&["`data.num_prompts` is missing"]);
}

#[test]
fn duplicates_across_files_are_dropped_except_the_first() {
    let place = place("prompts = ['a.jsonl', 'b.jsonl']");
    let texts = texts(6);
    let pick = |at: &[usize]| at.iter().map(|at| texts[*at].clone()).collect::<Vec<_>>();
    place.write("a.jsonl", json_lines(&pick(&[0, 1, 0, 2, 1])));
    place.write("b.jsonl", json_lines(&pick(&[3, 2, 3, 4])));
    let (data, ran) = build(&place, "once", &[]);
    assert_eq!(ids(&data), ["a#0", "a#1", "a#3", "b#0", "b#3"]);
    for message in
        ["`a.jsonl`: 2 of 5 prompts are left out: 2 duplicates", "`b.jsonl`: 2 of 4 prompts"]
    {
        assert!(ran.stderr.contains(message), "{}", ran.stderr);
    }
    // `num_prompts` counts prompts that are kept.
    let (data, _) = build(&place, "three", &["data.num_prompts=3"]);
    assert_eq!(ids(&data), ["a#0", "a#1", "a#3", "b#0", "b#3"]);
    let (data, _) = build(&place, "all", &["data.keep_duplicates=true"]);
    assert_eq!(data.rows.len(), 9);
    // Prompts that differ only in their answers are duplicates unless the answers are used.
    let answered =
        ["x", "y", "x"].map(|answer| format!("{{\"prompt\": \"a\", \"answer\": \"{answer}\"}}\n"));
    place.write("answered.jsonl", answered.concat());
    let file = "data.prompts=['answered.jsonl']";
    assert_eq!(ids(&build(&place, "written", &[file]).0), ["answered#0"]);
    let (data, _) = build(&place, "existing", &[file, "data.responses=existing"]);
    assert_eq!(ids(&data), ["answered#0", "answered#1"]);
}

#[test]
fn lengths_outside_the_bounds_are_left_out() {
    let place = place("prompts = ['train.jsonl']");
    place.write("train.jsonl", json_lines(&texts(12)));
    let (all, _) = build(&place, "all", &[]);
    let mut lengths: Vec<usize> = all.rows.iter().map(|row| row.prompt_ids.len()).collect();
    lengths.sort_unstable();
    let (min, max) = (lengths[3], lengths[8]);
    let within = |len: usize| (min..=max).contains(&len);
    let expected: Vec<&str> = all
        .rows
        .iter()
        .filter(|row| within(row.prompt_ids.len()))
        .map(|row| row.id.as_str())
        .collect();
    assert!(expected.len() < 12);
    let bounds = [format!("data.min_prompt_tokens={min}"), format!("data.max_prompt_tokens={max}")];
    let (some, ran) = build(&place, "some", &[&bounds[0], &bounds[1]]);
    assert_eq!(ids(&some), expected);
    let message = format!("{} outside the length bounds", 12 - expected.len());
    assert!(ran.stderr.contains(&message), "{}", ran.stderr);

    // Answers from the file, for every turn.
    place.write(
        "chat.jsonl",
        r#"{"prompt": "a", "answer": "one"}
{"prompt": "b", "answer": "one two three four five six seven eight nine ten"}
{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "d"}, {"role": "assistant", "content": "one two three four five six seven eight nine ten"}]}
"#,
    );
    let chat = ["data.prompts=['chat.jsonl']", "data.responses=existing", "data.max_new_tokens=64"];
    let (short, _) = build(&place, "short", &[&chat[..], &["data.max_response_tokens=8"]].concat());
    assert_eq!(ids(&short), ["chat#0"]);
    let (long, _) = build(&place, "long", &[&chat[..], &["data.min_response_tokens=9"]].concat());
    assert_eq!(ids(&long), ["chat#1"]);

    let bad =
        |key: &str| place.run(&["build-data", "small.toml", "--set", "name=bad", "--set", key]);
    bad("data.max_prompt_tokens=1").fails_naming(&["no prompt of `train.jsonl` is left"]);
    bad("data.max_prompt_tokens=0").fails_naming(&["data.max_prompt_tokens"]);
    bad("data.max_response_tokens=9").fails_naming(&["data.responses = \"existing\""]);
}

#[test]
fn splits_of_one_file_never_overlap() {
    let place = Place::new();
    // Each text occurs twice, and both copies are in the same split.
    let texts = texts(40);
    place.write("all.jsonl", json_lines(&[&texts[..], &texts[..]].concat()));
    place.write(
        "small.toml",
        format!(
            "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
             [splits]\ntrain = 0.5\ntune = 0.25\ntest = 0.25\n\
             [data]\nprompts = ['all.jsonl']\nsplit = 'train'\nkeep_duplicates = true\nmax_new_tokens = 2\n\
             [tune]\nprompts = ['all.jsonl']\nsplit = 'tune'\nmax_length = 2\n\
             [evaluate]\nprompts = ['all.jsonl']\nsplit = 'test'\nmax_new_tokens = 2\ndecodings = ['greedy']\n",
            model("target").display(),
            model("draft").display()
        ),
    );
    let (data, ran) = build(&place, "small", &[]);
    assert!(ran.stderr.contains("of other splits"), "{}", ran.stderr);
    place.run(&["record", "small.toml"]).ok();
    let numbers = |ids: BTreeSet<String>| -> BTreeSet<usize> {
        ids.iter().map(|id| id.strip_prefix("all#").unwrap().parse().unwrap()).collect()
    };
    let mut splits = vec![numbers(data.rows.iter().map(|row| row.id.clone()).collect())];
    let recorded = rollouts_paths(&place.path("data/small")).unwrap();
    assert_eq!(recorded.len(), 2, "{recorded:?}");
    for path in recorded {
        let (rows, provenance) = read_rollouts(&path, None).unwrap();
        let name = if provenance.set == "test" { "test" } else { "tune" };
        assert_eq!(provenance.responses.split.unwrap().name, name);
        splits.push(numbers(rows.into_iter().map(|row| row.id).collect()));
    }
    let mut all = BTreeSet::new();
    for split in &splits {
        assert!(split.len() > 8, "{splits:?}");
        for number in split {
            assert!(all.insert(*number), "{number} is in two splits");
            assert!(split.contains(&((number + 40) % 80)), "{number} is twice in the file");
        }
    }
    assert_eq!(all.len(), 80);

    // Changing the split makes the data stale.
    let other = ["build-data", "small.toml", "--set", "data.split=test"];
    place.run(&other).fails_naming(&["`split` = {\"name\":\"train\"", "\"name\":\"test\""]);
    let bad = |key: &str| place.run(&["build-data", "small.toml", "--set", key]);
    bad("splits.train=0.9").fails_naming(&["`[splits]` sum to 1.4"]);
    bad("data.split=validation").fails_naming(&["`validation`", "`train`, `tune`, `test`"]);
    place.write("all.jsonl", json_lines(&texts[..1]));
    let none = ["tune", "test"].map(|split| {
        let key = format!("data.split={split}");
        place.run(&["build-data", "small.toml", "--set", "name=none", "--set", &key]).code
    });
    assert!(none.contains(&Some(1)), "one prompt cannot be in both");
}

#[test]
fn malformed_records_are_noted_and_skipped_unless_strict() {
    let place = place("prompts = ['train.jsonl']");
    let texts = texts(3);
    let lines = [
        &json_lines(&texts[..1]),
        "{not json\n\n",
        &json_lines(&texts[1..2]),
        "{\"text\": 1}\n",
        &json_lines(&texts[2..]),
    ];
    place.write("train.jsonl", lines.concat());
    let (data, ran) = build(&place, "some", &[]);
    assert_eq!(ids(&data), ["train#0", "train#2", "train#4"]);
    for message in [
        "`train.jsonl`, line 2, column 2: not JSON",
        "`train.jsonl`, line 5: the record has keys `text`",
        "`train.jsonl`: 2 malformed records skipped; hint: with a recipe, `--strict`",
    ] {
        assert!(ran.stderr.contains(message), "{message}: {}", ran.stderr);
    }
    for strict in [&["--strict"][..], &["--set", "data.strict=true"]] {
        let arguments = [&["build-data", "small.toml", "--set", "name=none"], strict].concat();
        place.run(&arguments).fails_naming(&["`train.jsonl`, line 2"]);
    }
    assert!(place.names("data/none").is_empty());
}

#[test]
fn a_record_that_the_chat_template_refuses_is_named_and_skipped_unless_strict() {
    let place = place("prompts = ['chat.jsonl']");
    place.copy_model("target", "target");
    let template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
                    {% for tool in tools or [] %}{{ tool.name }};{% endfor %}\
                    {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    place.write("target/chat_template.jinja", template);
    let chat = |texts: &[(&str, &str)]| {
        let messages =
            texts.iter().map(|(role, content)| json!({ "role": role, "content": content }));
        let messages = messages.collect::<Vec<_>>();
        let (tools, functions) = ([json!({ "name": "add" })], [json!({ "name": "sub" })]);
        json!({ "messages": messages, "tools": tools, "functions": functions }).to_string()
    };
    let lines: Vec<String> = (1..=13)
        .map(|n| match n {
            7 => chat(&[("system", "be brief"), ("user", "What is 7 + 7?")]),
            _ => chat(&[("user", &format!("What is {n} + {n}?"))]),
        })
        .collect();
    place.write("chat.jsonl", lines.join("\n"));
    let keys = ["models.target=target"];
    let (data, ran) = build(&place, "some", &keys);
    assert_eq!(data.rows.len(), 12);
    let tokenizer = TextTokenizer::from_model_dir(&place.path("target")).unwrap();
    let first = tokenizer.decode(&data.rows[0].prompt_ids, false).unwrap();
    assert!(first.contains("add;") && !first.contains("sub;"), "{first}");
    for message in [
        "`chat.jsonl`: 13 records have `functions`, which prompts leave out",
        "prompt `chat#6`, record 7 of its file",
        "no system role",
        "1 of 13 prompts are left out: 1 refused by the chat template",
    ] {
        assert!(ran.stderr.contains(message), "{message}: {}", ran.stderr);
    }
    let strict = ["build-data", "small.toml", "--set", "name=none", "--set", keys[0], "--strict"];
    place.run(&strict).fails_naming(&["record 7 of its file", "no system role"]);
    // Prompts of an evaluation are judged likewise.
    let evaluate = format!(
        "{}[drafters.draft]\nkind = 'model'\nmodel = '{}'\n[evaluate]\nprompts = ['chat.jsonl']\n\
         max_new_tokens = 2\nrules.fixed = [1]\n",
        "[models]\ntarget = 'target'\n",
        model("draft").display()
    );
    place.write("eval.toml", evaluate);
    let ran = place.run(&["evaluate", "eval.toml"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("1 of 13 prompts are left out"), "{}", ran.stderr);
    let rows = place.results("eval");
    assert!(rows.iter().all(|row| row["num_prompts"] == 12));
}

#[test]
fn each_turn_of_a_conversation_is_a_row_after_the_earlier_turns() {
    let place = place("prompts = ['chat.jsonl']\nresponses = 'existing'\n");
    place.write(
        "chat.jsonl",
        r#"{"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4."}, {"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "6."}, {"role": "user", "content": "And 4 + 4?"}, {"role": "assistant", "content": "8."}]}
"#,
    );
    let (data, _) = build(&place, "chat", &["data.max_new_tokens=64"]);
    assert_eq!(ids(&data), ["chat#0", "chat#0#1", "chat#0#2"]);
    for (row, next) in data.rows.iter().zip(&data.rows[1..]) {
        // The next row's prompt begins with this row's prompt and response.
        let said = [&row.prompt_ids[..], &row.response_ids].concat();
        assert!(next.prompt_ids.len() > said.len());
        assert_eq!(next.prompt_ids[..said.len()], said, "`{}`", row.id);
    }
}

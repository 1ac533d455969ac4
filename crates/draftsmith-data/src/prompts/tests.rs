//! Every published form and every mistake, in small files.

use std::io::{Read, Write};

use super::*;
use crate::peak::peak_bytes;

/// Writes `bytes` to a file and reads it as prompts. Errors become text without the directory.
fn read(name: &str, bytes: &[u8]) -> Result<Vec<Prompt>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let prefix = format!("{}/", dir.path().display());
    let prompts = Prompts::open(&path).and_then(Iterator::collect);
    prompts.map_err(|e| e.to_string().replace(&prefix, ""))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn turn(user: &str, response: Option<&str>) -> Turn {
    Turn { user: user.into(), response: response.map(Into::into), ..Turn::default() }
}

fn check_one(line: &str, system: Option<&str>, category: Option<&str>, turns: &[Turn]) {
    for (name, text) in [
        ("set.jsonl", line.to_owned()),
        ("set.json", format!("[{line}]")),
        ("set.json", format!(" [\n{line}\n]\n")),
    ] {
        let prompts = read(name, text.as_bytes()).unwrap();
        let expected = Prompt {
            id: "set#0".into(),
            own_id: prompts[0].own_id.clone(),
            source: "set".into(),
            category: category.map(Into::into),
            turns: turns.to_vec(),
            system: system.map(Into::into),
            arguments: Box::default(),
        };
        assert_eq!(prompts, [expected], "{text}");
    }
}

#[test]
fn text_beside_the_prompt_is_kept() {
    check_one(
        r#"{"id": "niv.1", "system_prompt": "You are terse.", "question": "add 2 and 3", "response": "5"}"#,
        Some("You are terse."),
        None,
        &[turn("add 2 and 3", Some("5"))],
    );
    check_one(
        r#"{"system_prompt": "", "system": "Be brief.", "prompt": "a", "output": "b"}"#,
        Some("Be brief."),
        None,
        &[turn("a", Some("b"))],
    );
    check_one(
        r#"{"instruction": "Which town is named?", "context": "The train left Ulm at noon.", "response": "Ulm"}"#,
        None,
        None,
        &[turn("Which town is named?\nInput: The train left Ulm at noon.", Some("Ulm"))],
    );
    check_one(
        r#"{"context": "The train left Ulm.", "question": "Which town?", "answer": "Ulm"}"#,
        None,
        None,
        &[turn("The train left Ulm.\nWhich town?", Some("Ulm"))],
    );
    for (answer, expected) in [("5", "5"), ("2.50", "2.5"), ("true", "true")] {
        let line = format!(r#"{{"question": "2+3?", "answer": {answer}}}"#);
        check_one(&line, None, None, &[turn("2+3?", Some(expected))]);
    }
    check_one(r#"{"question": "a", "response": "b"}"#, None, None, &[turn("a", Some("b"))]);
    check_one(r#"{"instruction": "a", "completion": "b"}"#, None, None, &[turn("a", Some("b"))]);
}

#[test]
fn either_list_may_have_the_messages_of_the_other_form() {
    for line in [
        r#"{"conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "add 2 and 3"},
            {"role": "assistant", "content": "5"}]}"#,
        r#"{"messages": [{"from": "system", "value": "s"}, {"from": "human", "value": "add 2 and 3"},
            {"from": "gpt", "value": "5"}]}"#,
    ] {
        let line = line.replace('\n', " ");
        check_one(&line, Some("s"), None, &[turn("add 2 and 3", Some("5"))]);
    }
}

#[test]
fn every_published_form_is_read() {
    check_one(
        r#"{"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["r"]}"#,
        None,
        Some("writing"),
        &[turn("a", None), turn("b", None)],
    );
    check_one(
        r#"{"question": "how many?", "answer": "1\n#### 1"}"#,
        None,
        None,
        &[turn("how many?", Some("1\n#### 1"))],
    );
    check_one(
        r#"{"question": "2 + 2?", "subject": "algebra", "choices": ["3", "4"], "answer": 1}"#,
        None,
        None,
        &[turn("2 + 2?\nA. 3\nB. 4\nAnswer:", Some("B"))],
    );
    check_one(
        r#"{"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    pass"}"#,
        None,
        None,
        &[turn("def f():\n", None)],
    );
    check_one(
        r#"{"id": 3, "prompt": "p", "category": "c", "response": "r"}"#,
        None,
        Some("c"),
        &[turn("p", Some("r"))],
    );
    check_one(r#"{"prompt": "p", "answer": "", "category": 5}"#, None, None, &[turn("p", None)]);
    check_one(
        r#"{"instruction": "add", "input": "1, 2", "output": "3"}"#,
        None,
        None,
        &[turn("add\nInput: 1, 2", Some("3"))],
    );
    check_one(
        r#"{"instruction": "sing", "input": "", "output": ""}"#,
        None,
        None,
        &[turn("sing", None)],
    );
    check_one(
        r#"{"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]}"#,
        Some("s"),
        None,
        &[turn("a", Some("b")), turn("c", None)],
    );
    check_one(
        r#"{"conversations": [{"from": "gpt", "value": "cut"}, {"from": "human", "value": "a"}]}"#,
        None,
        None,
        &[turn("a", None)],
    );
    check_one(
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}], "prompt": "a"}"#,
        None,
        None,
        &[turn("a", Some("b"))],
    );
}

#[test]
fn the_system_text_beside_a_conversation_is_read_and_an_empty_one_counts() {
    for line in [
        r#"{"system": "s", "conversations": [{"from": "human", "value": "a"}]}"#,
        r#"{"system": "s", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}"#,
        r#"{"system_prompt": "s", "messages": [{"role": "user", "content": "a"}]}"#,
        r#"{"system": "s", "turns": ["a"]}"#,
    ] {
        check_one(line, Some("s"), None, &[turn("a", None)]);
    }
    for line in [
        r#"{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]}"#,
        r#"{"system": null, "conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "a"}]}"#,
    ] {
        check_one(line, Some(""), None, &[turn("a", None)]);
    }
    let two = r#"{"system": "s", "messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "a"}]}"#;
    let error = read("set.json", two.as_bytes()).unwrap_err();
    assert!(error.contains("key `messages[0]` differs from the system text"), "{error}");
}

#[test]
fn what_prompts_leave_out_is_counted_by_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.jsonl");
    let lines = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "thinking": "c"}], "tools": [{}]}
{"prompt": "a", "response": "b", "reasoning": "c"}
{"prompt": "a", "thinking": false, "reasoning": "", "tools": [], "reasoning_content": null}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "function_call": {"name": "f"}}], "tools": [{}]}
"#;
    std::fs::write(&path, lines).unwrap();
    let mut prompts = Prompts::open(&path).unwrap();
    assert_eq!(prompts.by_ref().map(Result::unwrap).count(), 5);
    let counts: Vec<_> = std::mem::take(&mut prompts.malformed.unrendered).into_iter().collect();
    let expected =
        [("function_call", 1), ("reasoning", 1), ("reasoning_content", 1), ("thinking", 1)];
    assert_eq!(counts, expected);
}

#[test]
fn calls_of_tools_and_their_results_are_turns() {
    use serde_json::json;
    let calls = r#"[{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]"#;
    let line = format!(
        r#"{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": null, "tool_calls": {calls}}}, {{"role": "tool", "tool_call_id": "1", "content": "2"}}, {{"role": "tool", "content": [{{"type": "text", "text": "3"}}]}}, {{"role": "assistant", "content": "b"}}, {{"role": "user", "content": "c"}}]}}"#
    );
    let read = |line: &str| read("set.jsonl", line.as_bytes());
    let prompt = read(&line).unwrap().remove(0);
    let of_tools = |keys: serde_json::Value| Message {
        role: "tool".to_owned(),
        keys: keys.as_object().unwrap().clone(),
        ..Message::default()
    };
    let results = vec![
        of_tools(json!({ "tool_call_id": "1", "content": "2" })),
        of_tools(json!({ "content": [{ "type": "text", "text": "3" }] })),
    ];
    let parsed: serde_json::Value = serde_json::from_str(calls).unwrap();
    let keys = json!({ "tool_calls": parsed, "content": null }).as_object().unwrap().clone();
    let expected = [
        Turn { calls: keys.clone(), ..turn("a", None) },
        Turn { results: results.clone(), ..turn("", Some("b")) },
        turn("c", None),
    ];
    assert_eq!(prompt.turns, expected);
    assert!(prompt.turns[0].has_response() && prompt.calls_tools(0) && !prompt.calls_tools(1));
    // The messages of the file, and a text before the call in place of the missing one.
    let said = |text: &str| vec![text.to_owned(), "b".to_owned()];
    let call = |content: &str, keys| Message { keys, ..Message::assistant(content) };
    let after = |first: Message| {
        [
            vec![Message::user("a"), first],
            results.clone(),
            vec![Message::assistant("b"), Message::user("c")],
        ]
        .concat()
    };
    assert_eq!(prompt.messages(2, &said("")), after(call("", keys.clone())));
    let mut with_text = keys;
    with_text.shift_remove("content");
    assert_eq!(prompt.messages(2, &said("so")), after(call("so", with_text)));
    // Other results and calls are other prompts.
    let hash = |line: &str| read(line).unwrap()[0].content_hash(true);
    assert_ne!(hash(&line), hash(&line.replace("\"2\"", "\"4\"")));
    assert_ne!(hash(&line), hash(&line.replace("\"x\"", "\"y\"")));
    for line in [
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "2"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "2"}]}"#,
        r#"{"messages": [{"role": "tool", "content": "2"}]}"#,
    ] {
        let error = read(line).unwrap_err();
        assert!(
            error.contains(".role` is a tool's result, but follows no `tool_calls`"),
            "{error}"
        );
    }
}

#[test]
fn a_records_tools_and_arguments_are_variables_of_the_template() {
    let one =
        |line: &str| read("set.jsonl", line.as_bytes()).map(|all| (*all[0].arguments).clone());
    let expected = |json: serde_json::Value| Ok(json.as_object().unwrap().clone());
    use serde_json::json;
    let line = r#"{"prompt": "a", "tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": false}}"#;
    assert_eq!(
        one(line),
        expected(json!({ "enable_thinking": false, "tools": [{ "name": "f" }] }))
    );
    let text = r#"{"prompt": "a", "tools": "[{\"name\": \"f\"}]"}"#;
    assert_eq!(one(text), expected(json!({ "tools": [{ "name": "f" }] })));
    assert_eq!(one(r#"{"prompt": "a", "tools": []}"#), expected(json!({})));
    let error = one(r#"{"prompt": "a", "tools": "f("}"#).unwrap_err();
    assert!(error.contains("line 1: key `tools`"), "{error}");
    let error = one(r#"{"prompt": "a", "chat_template_kwargs": 3}"#).unwrap_err();
    assert!(error.contains("`chat_template_kwargs` is a number"), "{error}");
}

#[test]
fn records_with_images_beside_the_text_are_refused_by_key() {
    let check = |line: &str, key: &str| {
        let error = read("set.jsonl", line.as_bytes()).unwrap_err();
        assert!(error.contains(&format!("line 1: key `{key}` is beside the text")), "{error}");
    };
    check(r#"{"prompt": "<image> What is it?", "image": "a.png"}"#, "image");
    check(r#"{"prompt": "What is it?", "images": [{"bytes": "", "path": "a.png"}]}"#, "images");
    check(
        r#"{"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>"}]}"#,
        "video",
    );
    check(r#"{"messages": [{"role": "user", "content": "a", "images": ["a"]}]}"#, "images");
    for (part, key) in [
        (r#"{"type": "image_url", "image_url": {"url": "a"}}"#, "image"),
        (r#"{"type": "input_audio"}"#, "audio"),
        (r#"{"type": "video"}"#, "video"),
    ] {
        check(
            &format!(
                r#"{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "a"}}, {part}]}}]}}"#
            ),
            key,
        );
    }
    let none = r#"{"prompt": "a", "image": null, "images": [], "audio": ""}"#;
    check_one(none, None, None, &[turn("a", None)]);
}

#[test]
fn numbers_that_python_writes_and_json_lacks_are_null() {
    for value in ["NaN", "Infinity", "-Infinity", "[NaN, 1]", "{\"a\": NaN}"] {
        let line =
            format!("{{\"prompt\": \"NaN \\\" NaN\", \"score\": {value}, \"response\": NaN}}");
        check_one(&line, None, None, &[turn("NaN \" NaN", None)]);
    }
    for line in [r#"{"prompt": "a", "b": nan}"#, r#"{"prompt": "a", "b": NaNs}"#] {
        let error = read("set.jsonl", line.as_bytes()).unwrap_err();
        assert!(error.contains("line 1, column 2") && error.contains("not JSON"), "{error}");
    }
    let error = read("set.jsonl", br#"{"prompt": NaN}"#).unwrap_err();
    assert!(error.contains("key `prompt` is null"), "{error}");
}

#[test]
fn ids_count_records_rather_than_lines() {
    let text =
        "\u{feff}\r\n{\"prompt\": \"a\"}\r\n\n  \n{\"prompt\": \"b\"}\r{\"question\": \"c\"}";
    let prompts = read("a.b.jsonl", text.as_bytes()).unwrap();
    let ids: Vec<_> = prompts.iter().map(|p| p.id.as_str()).collect();
    assert_eq!(ids, ["a.b#0", "a.b#1", "a.b#2"]);
    assert_eq!(prompts[2].row_id(0), "a.b#2");
    assert_eq!(prompts[2].row_id(1), "a.b#2#1");
}

#[test]
fn conversations_without_a_user_are_dropped_and_keep_their_number() {
    let text = "{\"conversations\": []}\n\
                {\"conversations\": [{\"from\": \"gpt\", \"value\": \"x\"}]}\n\
                {\"conversations\": [{\"from\": \"human\", \"value\": \"x\"}]}";
    let prompts = read("s.json", text.as_bytes()).unwrap();
    assert_eq!(prompts.len(), 1);
    assert_eq!(prompts[0].id, "s#2");
}

#[test]
fn gzip_is_recognised_by_its_bytes() {
    let text = b"{\"prompt\": \"a\"}";
    for name in ["set.jsonl.gz", "set.jsonl", "set"] {
        assert_eq!(read(name, &gzip(text)).unwrap()[0].source, "set");
    }
    assert_eq!(read("set.jsonl.gz", text).unwrap()[0].id, "set#0");
    let cut = &gzip(text)[..14];
    assert!(read("set.gz", cut).unwrap_err().starts_with("cannot decompress `set.gz`"));
}

#[test]
fn zstd_is_recognised_by_its_bytes_and_read_to_the_last_frame() {
    let frame = |text: &str| zstd::encode_all(text.as_bytes(), 3).unwrap();
    let text = frame("{\"prompt\": \"a\"}");
    for name in ["set.jsonl.zst", "set.jsonl", "set"] {
        assert_eq!(read(name, &text).unwrap()[0].source, "set");
    }
    let frames = [text.clone(), frame("\n{\"prompt\": \"b\"}")].concat();
    assert_eq!(read("set.zst", &frames).unwrap()[1].turns, [turn("b", None)]);
    let array = frame("[{\"prompt\": \"a\"}, {\"prompt\": \"b\"}]");
    assert_eq!(read("set.json.zst", &array).unwrap().len(), 2);
    let cut = &text[..text.len() - 3];
    assert!(read("set.zst", cut).unwrap_err().starts_with("cannot decompress `set.zst`"));
}

#[test]
fn malformed_records_are_skipped_counted_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.jsonl");
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let mut prompts = Prompts::open(&path).unwrap();
        prompts.skips_malformed = true;
        let read: Result<Vec<Prompt>, _> = prompts.by_ref().collect();
        let ids = read.map(|read| read.into_iter().map(|prompt| prompt.id).collect::<Vec<_>>());
        let malformed = &prompts.malformed;
        let errors: Vec<String> = malformed.first.iter().map(ToString::to_string).collect();
        (ids.map_err(|e| e.to_string()), malformed.num_records, errors)
    };
    let long = "a".repeat(9 << 20);
    let wide = "1,".repeat(200_000);
    let lines = format!(
        "{{\"prompt\": \"a\"}}\nwhat is this?\r\n{{\"prompt\": \"{long}\"}}\r\n{{\"prompt\": \"b\"}}\n\
         {{\"prompt\": [{wide}1]}}\n{{\"text\": 1}}\n{{\"prompt\": \"\"}}\n{{\"prompt\": \"c\"}}"
    );
    let (ids, num_malformed, errors) = read(lines.as_bytes());
    // Malformed records count in ids, so that fixing one changes no other id.
    assert_eq!(ids.unwrap(), ["set#0", "set#3", "set#7"]);
    assert_eq!(num_malformed, 5);
    let expected =
        ["line 2, column 1: not JSON", "line 3: the record has more than 8 MB", "line 5"];
    assert_eq!(errors.len(), 3);
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.contains(expected), "{error}");
    }

    let (ids, num_malformed, _) = read(b"[{\"prompt\": \"a\"}, 5, {\"prompt\": \"b\"}]");
    assert_eq!((ids.unwrap().len(), num_malformed), (2, 1));
    // Files with only malformed records, and errors of the file rather than a record.
    let (ids, _, _) = read(b"{\"text\": 1}\n{}\n");
    assert!(ids.unwrap_err().contains("line 1: the record has keys `text`, but"));
    let (ids, _, _) = read(b"[{\"prompt\": \"a\"}, {\"prompt\": tru}, {\"prompt\": \"b\"}]");
    assert!(ids.unwrap_err().contains("not JSON"));
    let (ids, _, _) = read(&gzip(b"{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n")[..20]);
    assert!(ids.unwrap_err().starts_with("cannot decompress"));
}

#[test]
fn messages_end_with_the_turns_user_text() {
    let prompt = &read(
        "s.jsonl",
        br#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}"#,
    )
    .unwrap()[0];
    assert_eq!(prompt.messages(0, &[]), [Message::system("s"), Message::user("a")]);
    let own = ["mine".to_owned()];
    assert_eq!(
        prompt.messages(1, &own),
        [Message::system("s"), Message::user("a"), Message::assistant("mine"), Message::user("c")]
    );
}

#[test]
fn mistakes_are_reported_with_file_and_line() {
    let check = |text: &str, expected: &str| {
        let error = read("set.json", text.as_bytes()).unwrap_err();
        assert!(error.contains(expected), "{text}\n{error}");
        assert!(error.contains("`set.json`"), "{error}");
    };
    check("", "`set.json` holds no prompts: give one JSON object per line with `turns`");
    check("\u{feff} \r\n", "holds no prompts");
    check("[]", "holds no prompts");
    for text in ["What is a draft?\n", "prompt,answer\nWhat,that\n", "- one\n"] {
        check(text, "`set.json` looks like plain text or CSV; hint: ");
    }
    check("{\"prompt\": \"a\"}\nhello\n", "`set.json`, line 2, column 1: not JSON: expected");
    check("{\"prompt\": \"a\"}\r\n\r\n{\"prompt\": \"b\"", "line 3, column 14: not JSON: EOF");
    check("{\"prompt\": \"a\"} {\"prompt\": \"b\"}", "line 1, column 17: not JSON: trailing");
    check("[{\"prompt\": \"a\"},\n {\"prompt\": tru}]", "line 2, column 16: not JSON: expected");
    check(
        "[{\"prompt\": \"a\"}\n {\"prompt\": \"b\"}]",
        "line 2, column 2: not JSON: expected `,`",
    );
    check("[{\"prompt\": \"a\"},\n\n", "line 3, column 1: not JSON: the array is not closed");
    check("[{\"prompt\": \"a\"}]\n x", "line 2, column 2: not JSON: text after the array");
    check(
        "{\"text\": \"a\", \"n\": 1}",
        "line 1: the record has keys `text`, `n`, but a prompt needs",
    );
    check("{}", "line 1: the record has no keys, but");
    check(
        "\n[\n{\"prompt\": \"a\"},\n\"b\"]",
        "line 4 (item 2): the record has no keys (it is a string), but",
    );
    check("{\"prompt\": \" \\n\"}", "line 1: key `prompt` is empty: a user text is needed");
    check("{\"prompt\": 5}", "line 1: key `prompt` is a number, it must be a string");
    check("{\"turns\": []}", "key `turns` is empty");
    check("{\"turns\": \"a\"}", "key `turns` is a string, it must be an array");
    check("{\"turns\": [\"a\", null]}", "key `turns[1]` is null, it must be a string");
    check(
        "{\"question\": \"a\", \"answer\": [1]}",
        "key `answer` is an array, it must be a string",
    );
    check(
        "{\"question\": \"a\", \"choices\": {\"text\": []}}",
        "key `choices` is an object, it must be an array",
    );
    check(
        "{\"question\": \"a\", \"choices\": [\"b\"], \"answer\": 1}",
        "key `answer` is 1, but there are 1 choices",
    );
    check("{\"messages\": []}", "key `messages` has no user message");
    check("{\"messages\": [{\"content\": \"a\"}]}", "key `messages[0].role` is missing");
    check("{\"messages\": [{\"role\": \"user\"}]}", "key `messages[0].content` is missing");
    check(
        "{\"messages\": [{\"role\": \"critic\", \"content\": \"a\"}]}",
        "key `messages[0].role` is `critic`, it must be `user`, `assistant`, `system` or `tool`",
    );
    check(
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}",
        "key `messages[0].role` is an answer before any user text",
    );
    check(
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"human\", \"value\": \"b\"}]}",
        "key `conversations[1].from` is a second user text in a row",
    );
    check(
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"\"}]}",
        "key `conversations[0].value` is empty",
    );
    check(
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"system\", \"value\": \"b\"}]}",
        "key `conversations[1].from` is a system text after the conversation began",
    );
}

#[test]
fn invalid_utf8_is_reported_with_its_line() {
    let error = read("s.jsonl", b"{\"prompt\": \"a\"}\n{\"prompt\": \"\xff\"}").unwrap_err();
    assert!(error.contains("line 2"), "{error}");
}

#[test]
fn the_id_in_a_record_is_kept() {
    let text = r#"{"question_id": 81, "turns": ["a"]}
{"task_id": "HumanEval/0", "prompt": "b"}
{"id": null, "prompt": "c"}
"#;
    let ids: Vec<_> =
        read("set.jsonl", text.as_bytes()).unwrap().into_iter().map(|p| p.own_id).collect();
    assert_eq!(ids, [Some(81.into()), Some("HumanEval/0".into()), None]);
}

#[test]
fn long_records_and_decompression_bombs_are_refused() {
    let check = |bytes: &[u8], expected: &str| {
        let error = read("set.jsonl", bytes).unwrap_err();
        assert!(error.starts_with(&format!("`set.jsonl`, {expected}")), "{error}");
    };
    let long = format!("{{\"prompt\": \"{}\"}}", "a".repeat(9 << 20));
    check(
        format!("{{\"prompt\": \"a\"}}\n{long}").as_bytes(),
        "line 2: the record has more than 8 MB",
    );
    check(format!("[{{\"prompt\": \"a\"}},\n{long}").as_bytes(), "line 2: the record has more");
    let blank = "\n".repeat(9 << 20);
    check(
        format!("{{\"prompt\": \"a\"}}{blank}").as_bytes(),
        &format!("line {}, column 1: not JSON: more than 8 MB of blanks", (8 << 20) + 2),
    );
    check(format!("[\"{}", "\\\"".repeat(9 << 20)).as_bytes(), "line 1: the record has more");
    // For a million values of two bytes each, the parser needs 90 MB.
    for wide in ["1,", "[],", "{},"] {
        let wide = format!("{{\"prompt\": [{}1]}}", wide.repeat(1_000_000));
        check(wide.as_bytes(), "line 1: the record holds more than 100000 values");
    }
    // Commas in strings do not count.
    let commas = format!("{{\"prompt\": \"{}\"}}", ",[{\\\"".repeat(200_000));
    assert_eq!(read("set.jsonl", commas.as_bytes()).unwrap().len(), 1);

    let before = peak_bytes();
    check(&gzip_of(0, 400), "line 1: the record has more than 8 MB");
    let blank = read("set.jsonl", &gzip_of(b'\n', 60)).unwrap_err();
    assert!(blank.contains("more than 8 MB of blanks"), "{blank}");
    if let (Some(before), Some(after)) = (before, peak_bytes()) {
        assert!(after - before < 200 << 20, "{} MB", (after - before) >> 20);
    }
}

/// A repeated byte, compressed with gzip.
fn gzip_of(byte: u8, megabytes: u64) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::copy(&mut std::io::repeat(byte).take(megabytes << 20), &mut encoder).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn files_are_read_lazily() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("set.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\nnot JSON"),
        ("set.json", "[{\"prompt\": \"a\"}, {\"prompt\": \"b\"}, not JSON"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut prompts = Prompts::open(&path).unwrap();
        assert_eq!(prompts.next().unwrap().unwrap().id, "set#0");
        assert_eq!(prompts.next().unwrap().unwrap().id, "set#1");
        assert!(prompts.next().unwrap().is_err());
        assert!(prompts.next().is_none());
    }
}

#[cfg(unix)]
#[test]
fn pipes_devices_and_directories_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.as_path(), Path::new("/dev/zero"), dir.path()] {
        let error = Prompts::open(path).unwrap_err().to_string();
        assert!(error.contains("is not a regular file"), "{error}");
    }
}

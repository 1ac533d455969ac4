//! Answers in each server's format are read, others are refused by name, and none takes more than its bound.

use std::io::Cursor;

use draftsmith_theory::{Decoding, Sampling};

use super::*;

/// Largest growth of memory for an answer of 16 tokens with 1,000 log-probabilities each.
const MOST_MEMORY: usize = 64 << 20;

fn terms(log_probs: Option<usize>) -> Terms {
    let sampled = Decoding::sampled(Sampling::default());
    Terms {
        model: "m".to_owned(),
        decoding: if log_probs.is_some() { sampled } else { Decoding::GREEDY },
        eos_token_ids: vec![2, 7],
        stop_strings: Vec::new(),
        vocab_size: 10,
        log_probs,
    }
}

fn ask(max_tokens: usize) -> Ask {
    Ask { id: "a".to_owned(), prompt_ids: vec![1, 2, 3, 4], max_tokens, seed: 5 }
}

/// Reads an answer to a greedy request for two tokens.
fn read_two(text: &[u8]) -> Result<Completion, String> {
    let (ask, terms) = (ask(2), terms(None));
    let mut body = BoundedBody::new(Cursor::new(text), most_bytes(&ask, &terms));
    read(&mut body, &ask, &terms).map_err(said)
}

fn said(problem: Unusable) -> String {
    match problem {
        Unusable::Broken(error) => error.to_string(),
        Unusable::Foreign(what) => what.to_owned(),
        Unusable::Invalid(what) => what,
        Unusable::CutShort(num) => format!("cut short after {num}"),
    }
}

fn choice(fields: &str) -> String {
    format!(r#"{{"choices":[{{{fields}}}],"usage":{{"prompt_tokens":4}}}}"#)
}

#[test]
fn each_servers_format_of_ids_is_read() {
    let read = |text: &str| read_two(text.as_bytes()).expect("reads");
    let vllm = r#""index":0,"text":"ab","token_ids":[3,4,7],"finish_reason":"stop","stop_reason":7,
        "logprobs":{"top_logprobs":"of another form"}"#;
    let expected = Completion {
        tokens: Tokens::Ids(vec![3, 4, 7]),
        known: None,
        ending: ReplyEnding::Stop,
        ended_by: Some(7),
        stopped_by: None,
        num_prompt_tokens: Some(4),
        num_tokens: Some(3),
        lacks_ids: false,
        model: None,
        states_path: None,
        speculated: None,
    };
    assert_eq!(read(&choice(vllm)), expected);
    let llama_cpp = r#"{"choices":[{"text":"ab","finish_reason":"length"}],"model":"m.gguf",
        "__verbose":{"tokens":[3,4],"generation_settings":{"stop":[[]],"x":1e300}}}"#;
    let llama_cpp = read(llama_cpp);
    assert_eq!(llama_cpp.tokens, Tokens::Ids(vec![3, 4]));
    assert_eq!(llama_cpp.model.as_deref(), Some("m.gguf"));
    let tgi = r#"{"choices":[{"index":0,"text":"ab","token_ids":null,"finish_reason":"length",
        "logprobs":null,"stop_reason":null}],"usage":{"prompt_tokens":4,"completion_tokens":2}}"#;
    let tgi = read(tgi);
    assert_eq!((tgi.tokens, tgi.ended_by), (Tokens::Text("ab".to_owned()), None));
    assert_eq!(tgi.num_tokens, Some(2));
    let sglang = r#""text":"a","finish_reason":"stop","matched_stop":2"#;
    assert_eq!(read(&choice(sglang)).ended_by, Some(2));
    let by_string = r#""text":"a","finish_reason":"stop","stop_reason":"\n\n""#;
    let by_string = read(&choice(by_string));
    assert_eq!((by_string.ended_by, by_string.stopped_by.as_deref()), (None, Some("\n\n")));
}

#[test]
fn the_choice_with_index_0_is_read() {
    let one =
        |index: &str, id: u32| format!(r#"{{{index}"token_ids":[{id}],"finish_reason":"stop"}}"#);
    let ids = |choices: &[String]| {
        let answer = read_two(format!(r#"{{"choices":[{}]}}"#, choices.join(",")).as_bytes());
        answer.map(|completion| completion.tokens)
    };
    let (first, second) = (one(r#""index":0,"#, 3), one(r#""index":1,"#, 4));
    for choices in [[first.clone(), second.clone()], [second.clone(), first.clone()]] {
        assert_eq!(ids(&choices).expect("reads"), Tokens::Ids(vec![3]));
    }
    assert_eq!(ids(&[one("", 5), one("", 6)]).expect("reads"), Tokens::Ids(vec![5]));
    for choices in [&[][..], &[second]] {
        assert_eq!(ids(choices).expect_err("refused"), "`choices` without an index 0");
    }
}

#[test]
fn invalid_answers_are_named() {
    let check = |text: &str, expected: &str| {
        let error = read_two(text.as_bytes()).expect_err("refused");
        assert!(error.contains(expected), "{text}: {error}");
    };
    check("<html>\n busy</html>", "other than JSON");
    check("", "other than JSON");
    check(r#"{"choices":[{"#, "other than JSON");
    check(r#"{"choices":[]} {"#, "other than JSON");
    check(&choice(r#""token_ids":[NaN],"finish_reason":"stop""#), "other than JSON");
    check(r#"{"object":"error"}"#, "without `choices`");
    check(r#"{"choices":null}"#, "without `choices`");
    check(&choice(r#""text":"a""#), "no `finish_reason`");
    check(&choice(r#""text":"a","finish_reason":"abort""#), "`abort`");
    check(&choice(r#""finish_reason":"stop""#), "neither `token_ids` nor `text`");
    check(&choice(r#""token_ids":[10],"finish_reason":"stop""#), "the token id 10, but");
    check(&choice(r#""token_ids":[-1],"finish_reason":"stop""#), "integer `-1`");
    check(&choice(r#""token_ids":[4294967296],"finish_reason":"stop""#), "`4294967296`");
    check(&choice(r#""token_ids":[1.5],"finish_reason":"stop""#), "`1.5`");
    check(&choice(r#""token_ids":7,"finish_reason":"stop""#), "expected a sequence");
    let text = "a".repeat(3000);
    let long = format!(r#""text":"{text}","finish_reason":"stop""#);
    check(&choice(&long), "a text of 3.0 kB for 2 tokens");
    let fields = ["model", "usage", "__verbose"].map(|key| format!(r#"{{"{key}":7}}"#));
    let keys = ["index", "text", "finish_reason", "token_ids", "prompt_token_ids"];
    let wrong = keys.map(|key| choice(&format!(r#""{key}":true"#)));
    fields.iter().chain(&wrong).for_each(|text| check(text, "JSON of another form"));
    let invalid = b"{\"choices\":[{\"text\":\"\xff\",\"finish_reason\":\"stop\"}]}";
    assert_eq!(read_two(invalid).expect_err("refused"), "something other than JSON");
}

#[test]
fn a_response_that_is_shorter_than_its_limit_is_cut_short() {
    let check = |fields: &str, num: usize, of: usize| {
        let text = format!(
            r#"{{"choices":[{{"finish_reason":"length",{fields}}}],"usage":{{"completion_tokens":{num}}}}}"#
        );
        let (ask, terms) = (ask(of), terms(None));
        read(&mut BoundedBody::new(text.as_bytes(), 1000), &ask, &terms).map(|_| ()).map_err(said)
    };
    for (num, expected) in [(0, false), (2, false), (15, false), (16, true), (17, true)] {
        let expected = if expected { Ok(()) } else { Err(format!("cut short after {num}")) };
        let ids = format!(r#""token_ids":{:?}"#, vec![3; num]);
        assert_eq!(check(&ids, num.max(16), 16), expected, "its ids count");
        assert_eq!(check(r#""text":"abc""#, num, 16), expected);
    }
}

#[test]
fn what_a_content_filter_stopped_has_no_tokens() {
    for fields in [r#""text":"so""#, r#""token_ids":[3]"#, r#""text":null"#] {
        let fields = format!(r#"{fields},"finish_reason":"content_filter""#);
        let completion = read_two(choice(&fields).as_bytes()).expect("reads");
        assert_eq!(completion.ending, ReplyEnding::ContentFilter);
        assert_eq!(completion.tokens, Tokens::Ids(Vec::new()));
    }
}

/// An answer that begins with a text and repeats another without end.
struct EndlessBody {
    begin: &'static [u8],
    again: &'static [u8],
    num_read: u64,
}

impl Read for EndlessBody {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        for byte in &mut *buffer {
            let at = self.num_read as usize;
            *byte = match self.begin.get(at) {
                Some(byte) => *byte,
                None => self.again[(at - self.begin.len()) % self.again.len()],
            };
            self.num_read += 1;
        }
        Ok(buffer.len())
    }
}

/// The largest resident memory since the last call, in bytes; `None` if the system does not tell.
fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    std::fs::write("/proc/self/clear_refs", "5").ok()?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kilobytes| kilobytes << 10)
}

#[test]
fn an_endless_answer_is_read_up_to_its_bound() {
    const LISTS: &str = r#"{"choices":[{"logprobs":{"#;
    let bodies: [(String, &str); 20] = [
        (r#"{"choices":[{"token_ids":["#.to_owned(), "1,"),
        (r#"{"choices":[{"text":""#.to_owned(), "a"),
        (r#"{"choices":[{"text":""#.to_owned(), r"\u0001"),
        (r#"{"choices":[{"finish_reason":""#.to_owned(), "é"),
        (r#"{"choices":["#.to_owned(), "{},"),
        (r#"{"choices":""#.to_owned(), "a"),
        (r#"{"__verbose":{"tokens":["#.to_owned(), "1,"),
        (r#"{"model":""#.to_owned(), r"\\"),
        (r#"{"usage":{"prompt_tokens":"#.to_owned(), "1"),
        (r#"{"other":["#.to_owned(), "1.5,"),
        (r#"{"other":"#.to_owned(), "["),
        (r#"{"other":"#.to_owned(), r#"{"a":"#),
        (r#"{""#.to_owned(), "a"),
        (String::new(), " "),
        (format!(r#"{LISTS}"token_logprobs":["#), "1,"),
        (format!(r#"{LISTS}"token_logprobs":["#), "null,"),
        (format!(r#"{LISTS}"top_logprobs":["#), "{},"),
        (format!(r#"{LISTS}"top_logprobs":[{{"#), r#""token_id:1":0,"#),
        (format!(r#"{LISTS}"content":["#), r#"{"id":1},"#),
        (format!(r#"{LISTS}"content":[{{"id":1,"top_logprobs":["#), r#"{"id":1},"#),
    ];
    for log_probs in [None, Some(1000)] {
        let (ask, terms) = (ask(16), terms(log_probs));
        let most = most_bytes(&ask, &terms);
        for (begin, again) in &bodies {
            let begin: &'static [u8] = begin.clone().leak().as_bytes();
            let inner = EndlessBody { begin, again: again.as_bytes(), num_read: 0 };
            peak_bytes();
            let before = peak_bytes();
            let mut body = BoundedBody::new(inner, most);
            let problem = read(&mut body, &ask, &terms).map_err(said).expect_err("it has no end");
            assert!(problem.contains(&format!("more than {}", in_bytes(most))), "{problem}");
            assert!(problem.contains("16 tokens"), "{problem}");
            assert!(body.inner.num_read <= most + 1);
            if let (Some(before), Some(after)) = (before, peak_bytes()) {
                let grown = after.saturating_sub(before);
                assert!(grown < MOST_MEMORY, "{begin:?}, {again}: {} MiB", grown >> 20);
            }
        }
        assert!(most < if log_probs.is_some() { 7 << 20 } else { 100 << 10 }, "{most}");
    }
    let (ask, terms) = (ask(16), terms(None));
    for again in ["[", r#"{"choices":"#, "x", r#"{"choices":[{"a":"#] {
        let inner = EndlessBody { begin: b"", again: again.as_bytes(), num_read: 0 };
        let mut body = BoundedBody::new(inner, most_bytes(&ask, &terms));
        read(&mut body, &ask, &terms).expect_err("refused");
        assert!(body.inner.num_read <= most_bytes(&ask, &terms) + 1);
    }
}

#[test]
fn a_body_may_have_as_many_bytes_as_its_bound() {
    let text = choice(r#""token_ids":[3],"finish_reason":"stop""#);
    let (ask, terms) = (ask(2), terms(None));
    for spare in [0, 1] {
        let mut body = BoundedBody::new(text.as_bytes(), (text.len() + spare) as u64);
        read(&mut body, &ask, &terms).expect("reads");
        assert_eq!(body.start(), (text.as_bytes(), false));
    }
    let mut body = BoundedBody::new(text.as_bytes(), text.len() as u64 - 1);
    let problem = said(read(&mut body, &ask, &terms).expect_err("it is longer"));
    assert!(problem.contains("more than"), "{problem}");
    assert!(body.start().1, "it was cut");
}

#[test]
fn floats_and_other_forms_of_counts_decide_nothing_that_is_not_needed() {
    let read = |usage: &str, finish: &str| {
        let text = format!(
            r#"{{"choices":[{{"index":0,"text":"ab","finish_reason":"{finish}"}}],"usage":{usage}}}"#
        );
        read_two(text.as_bytes()).map(|found| (found.num_prompt_tokens, found.num_tokens))
    };
    let both = r#"{"prompt_tokens":30.0,"completion_tokens":2.0}"#;
    assert_eq!(read(both, "stop"), Ok((Some(30), Some(2))));
    assert_eq!(read(both, "eos"), Ok((Some(30), Some(2))), "the text's end");
    for usage in [r#"{"prompt_tokens":"many","completion_tokens":null,"x":[1]}"#, "{}", "null"] {
        assert_eq!(read(usage, "stop"), Ok((None, None)), "{usage}");
    }
    assert_eq!(read(r#"{"completion_tokens":1.5}"#, "stop"), Ok((None, None)));
    assert!(read(both, "because").unwrap_err().contains("`because`"));
}

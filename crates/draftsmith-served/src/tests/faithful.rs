//! Responses that the target did not write are left out or refused, and told.

use std::cell::RefCell;

use draftsmith_data::FinishReason;

use super::*;

/// A listener that keeps the notes.
#[derive(Default)]
struct NoteKeeper(RefCell<Vec<String>>);

impl Listener for NoteKeeper {
    fn is_interrupted(&self) -> bool {
        false
    }

    fn advance(&self) {}

    fn note(&self, line: &str) {
        self.0.borrow_mut().push(line.to_owned());
    }

    fn wait(&self, _: Option<Wait>) {}
}

/// The outcome of one request: the response, and the notes or the error.
struct Outcome {
    response: Option<ServedResponse>,
    num_left_out: usize,
    notes: String,
}

fn outcome(change: fn(&mut Value)) -> Outcome {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let loopback = serve(move |_, _| Deed::Change(change));
    let recipe = ServerRecipe { retries: 0, ..servers(&[&loopback.url]) };
    let (prompts, listener) = (prompts(1), NoteKeeper::default());
    let mut notes = String::new();
    let mut num_left_out = 0;
    // The second run reads the journal.
    for _ in 0..2 {
        let mut served = served(&recipe, dir.path());
        let all = prompts.iter().map(Ok);
        let answered = served.answer(all, |prompt, texts| next(prompt, texts), &listener);
        if let Err(error) = answered {
            let notes = error.to_string();
            return Outcome { response: None, num_left_out: 0, notes };
        }
        notes = listener.0.borrow().join("\n");
        num_left_out = served.num_left_out();
    }
    assert_eq!(loopback.requests().len(), 1, "the journal has it");
    let served = served(&recipe, dir.path());
    let turn = next(&prompts[0], &[]).expect("encodes").expect("a turn");
    let response = served.response(&turn.id, &turn.prompt_ids).ok();
    Outcome { response, num_left_out, notes }
}

/// Makes the answer these token ids, with a stop.
fn set_ids(answer: &mut Value, ids: &[u32], counted: Value) {
    answer["choices"] = json!([{ "index": 0, "token_ids": ids, "finish_reason": "stop" }]);
    answer["usage"]["completion_tokens"] = counted;
}

/// Makes the answer the tokens 5 and 6, stopped by what `keys` names.
fn set_stopped(answer: &mut Value, keys: &Value) {
    set_ids(answer, &[5, 6], json!(3));
    for (key, value) in keys.as_object().expect("keys") {
        match key.as_str() {
            "__verbose" => answer[key] = value.clone(),
            key => answer["choices"][0][key] = value.clone(),
        }
    }
}

/// Makes the answer a text.
fn set_text(answer: &mut Value, text: &str, num_counted: usize) {
    answer["choices"] = json!([{ "index": 0, "text": text, "finish_reason": "stop" }]);
    answer["usage"]["completion_tokens"] = json!(num_counted);
}

#[test]
fn an_answer_that_the_servers_own_stop_ended_has_no_end_token() {
    let stopped: [fn(&mut Value); 5] = [
        |answer| set_stopped(answer, &json!({ "stop_reason": "###" })),
        |answer| set_stopped(answer, &json!({ "matched_stop": "###" })),
        // An end token of the server's that is not the target's.
        |answer| set_stopped(answer, &json!({ "stop_reason": 7 })),
        |answer| set_stopped(answer, &json!({ "__verbose": { "stopping_word": "###" } })),
        |answer| set_stopped(answer, &json!({ "finish_reason": "stop_sequence" })),
    ];
    for change in stopped {
        let Outcome { response, notes, .. } = outcome(change);
        let response = response.expect("it is kept");
        assert_eq!((response.ids, response.finish), (vec![5, 6], FinishReason::StopString));
        assert!(notes.contains("1 of 1 responses were ended by stop strings or"), "{notes}");
    }
    let ended: [fn(&mut Value); 3] = [
        |answer| set_stopped(answer, &json!({ "stop_reason": null })),
        |answer| set_stopped(answer, &json!({ "__verbose": { "stopping_word": "" } })),
        |answer| {
            let end = target().tokenizer.decode(&[EOS], false).expect("it has a text");
            set_stopped(answer, &json!({ "matched_stop": end }));
        },
    ];
    for change in ended {
        let Outcome { response, notes, .. } = outcome(change);
        let response = response.expect("it is kept");
        assert_eq!((response.ids, response.finish), (vec![5, 6, EOS], FinishReason::Eos));
        assert_eq!(notes, "");
    }
}

#[test]
fn a_response_that_stopped_before_its_first_token_is_left_out() {
    let Outcome { response, num_left_out, .. } = outcome(|answer| {
        set_text(answer, "", 1);
        answer["choices"][0]["stop_reason"] = json!("###");
    });
    assert_eq!((response, num_left_out), (None, 1));
}

#[test]
fn an_answer_to_another_prompt_is_refused() {
    for change in [
        (|answer| {
            let num = answer["usage"]["prompt_tokens"].as_u64().expect("a count") as usize;
            answer["choices"][0]["prompt_token_ids"] = json!(vec![3; num]);
        }) as fn(&mut Value),
        |answer| answer["prompt_token_ids"] = json!([3]),
    ] {
        let Outcome { notes, .. } = outcome(change);
        assert!(notes.contains("other prompt tokens than were sent"), "{notes}");
    }
}

#[test]
fn ids_that_contradict_the_count_are_refused_or_told() {
    let more = outcome(|answer| set_ids(answer, &[5, 6, 7, 8, EOS], json!(3)));
    assert!(more.notes.contains("5 token ids, but its `usage` counts 3"), "{}", more.notes);
    let echoed = outcome(|answer| {
        let turn = next(&prompts(1)[0], &[]).expect("encodes").expect("a turn");
        set_ids(answer, &[&turn.prompt_ids[..], &[5, 6, EOS]].concat(), Value::Null);
    });
    assert!(echoed.notes.contains("token ids that begin with the prompt's"), "{}", echoed.notes);
    let fewer = outcome(|answer| set_ids(answer, &[5, 6, EOS], json!(5)));
    assert_eq!(fewer.response.expect("it is kept").ids, [5, 6, EOS]);
    assert!(fewer.notes.contains("1 of 1 responses have fewer token ids"), "{}", fewer.notes);
}

#[test]
fn texts_that_the_target_did_not_write_are_left_out_and_counted() {
    let inexact: [fn(&mut Value); 3] = [
        |answer| set_text(answer, "Answer: caf\u{fffd}", 4),
        |answer| {
            let turn = next(&prompts(1)[0], &[]).expect("encodes").expect("a turn");
            let prompt = target().tokenizer.decode(&turn.prompt_ids, true).expect("a text");
            set_text(answer, &format!("{prompt} Answer: 820"), 80);
        },
        |answer| set_text(answer, "The item with the weight 97 is the clock.", 2),
    ];
    for change in inexact {
        let Outcome { response, num_left_out, notes } = outcome(change);
        assert_eq!((response, num_left_out), (None, 1));
        assert!(notes.contains("1 responses whose texts are not what the target wrote"), "{notes}");
    }
    let exact = outcome(|answer| set_text(answer, "Answer: 820", 4));
    assert!(exact.response.is_some() && exact.num_left_out == 0, "{}", exact.notes);
}

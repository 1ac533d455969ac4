//! The templates of published models and the built-in ones, compared with transformers
//! (`tests/fixtures/make_chat_templates.py`).

use serde_json::Value as Json;

use super::*;
use crate::chat_format::ChatFormat;
use crate::prompts::{Prompt, Prompts};
use crate::tokenizer::TextTokenizer;
use crate::tokenizer_config::SPECIAL_TOKENS_FILE;

#[test]
fn texts_and_ids_equal_those_of_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let fixtures = root.join("tests/fixtures/chat-templates");
    let model = root.join("checkpoints/tiny/target");
    let tokenizer = TextTokenizer::from_model_dir(&model).unwrap();
    let expected = std::fs::read_to_string(fixtures.join("expected.json")).unwrap();
    let expected: Json = serde_json::from_str(&expected).unwrap();
    let chats: Vec<Vec<Message>> = expected["chats"].as_array().unwrap().iter().map(chat).collect();

    let templates = expected["templates"].as_object().unwrap();
    assert_eq!(templates.len(), 15);
    for (name, outcomes) in templates {
        let file = fixtures.join(format!("{name}.jinja"));
        let chosen = if file.exists() { file.to_str().unwrap() } else { name };
        let format = ChatFormat::choose(&model, Some(chosen)).unwrap();
        let ChatFormat::Template(template) = &format else { panic!("{name} is a template") };
        let outcomes = outcomes.as_array().unwrap();
        assert_eq!(outcomes.len(), chats.len());
        for (chat, outcome) in chats.iter().zip(outcomes) {
            match outcome["error"].as_str() {
                Some(raised) => {
                    let error = template.render(chat, true).unwrap_err().to_string();
                    assert!(error.contains(raised), "{name}: {error}");
                }
                None => {
                    assert_eq!(template.render(chat, true).unwrap(), outcome["text"], "{name}");
                    let ids = tokenizer.encode_chat(&format, chat).unwrap();
                    assert_eq!(Json::from(ids), outcome["ids"], "{name}");
                }
            }
        }
    }
}

#[test]
fn tools_calls_and_results_are_rendered_as_by_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let fixtures = root.join("tests/fixtures/chat-templates");
    let model = root.join("checkpoints/tiny/target");
    let expected = std::fs::read_to_string(fixtures.join("expected.json")).unwrap();
    let expected: Json = serde_json::from_str(&expected).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("records.jsonl");
    let records = expected["records"].as_array().unwrap();
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let prompts: Vec<Prompt> = Prompts::open(&file).unwrap().map(Result::unwrap).collect();
    assert_eq!(prompts.len(), records.len());
    let templates = expected["with_tools"].as_object().unwrap();
    assert_eq!(templates.len(), 2);
    for (name, outcomes) in templates {
        let chosen = fixtures.join(format!("{name}.jinja"));
        let format = ChatFormat::choose(&model, chosen.to_str()).unwrap();
        let ChatFormat::Template(template) = format else { panic!("{name} is a template") };
        for (prompt, outcome) in prompts.iter().zip(outcomes.as_array().unwrap()) {
            let template = template.clone().with_arguments((*prompt.arguments).clone()).unwrap();
            let answer = |turn: &crate::prompts::Turn| turn.response.clone().unwrap_or_default();
            let answers: Vec<String> = prompt.turns.iter().map(answer).collect();
            let rendered =
                template.render(&prompt.messages(prompt.turns.len() - 1, &answers), true);
            match outcome["error"].as_str() {
                Some(raised) => {
                    assert!(rendered.unwrap_err().to_string().contains(raised), "{name}")
                }
                None => assert_eq!(rendered.unwrap(), outcome["text"], "{name}"),
            }
        }
    }
}

fn chat(messages: &Json) -> Vec<Message> {
    let text = |value: &Json| value.as_str().unwrap().to_owned();
    let messages = messages.as_array().unwrap().iter();
    messages
        .map(|m| Message {
            role: text(&m["role"]),
            content: text(&m["content"]),
            ..Message::default()
        })
        .collect()
}

#[test]
fn special_tokens_in_a_user_text_become_their_ids() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny/target");
    let tokenizer = TextTokenizer::from_model_dir(&model).unwrap();
    let end = tokenizer.encode("</s>", false).unwrap();
    assert_eq!(end.len(), 1);
    let format = ChatFormat::choose(&model, None).unwrap();
    let ids = tokenizer.encode_chat(&format, &[Message::user("say </s> twice")]).unwrap();
    assert!(ids.contains(&end[0]));
}

#[test]
fn built_in_templates_use_the_models_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let render = || match ChatFormat::choose(dir.path(), Some("llama-2")).unwrap() {
        ChatFormat::Template(template) => template.render(&[Message::user("a")], true).unwrap(),
        other => panic!("{other:?}"),
    };
    let write = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
    write(CONFIG_FILE, r#"{"bos_token": "<config>"}"#);
    assert_eq!(render(), "<config>[INST] a [/INST]");
    // Without `added_tokens_decoder`, the map has precedence, as in transformers.
    write(SPECIAL_TOKENS_FILE, r#"{"bos_token": {"content": "<map>", "lstrip": false}}"#);
    assert_eq!(render(), "<map>[INST] a [/INST]");
    write(CONFIG_FILE, r#"{"bos_token": "<config>", "added_tokens_decoder": {}}"#);
    assert_eq!(render(), "<config>[INST] a [/INST]");
}

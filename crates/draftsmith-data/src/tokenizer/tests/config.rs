//! Tests of what `tokenizer_config.json` and older files change. The expected ids are those of
//! `AutoTokenizer` in transformers 5.24.

use super::*;
use crate::text_files::CONFIG_FILE;
use crate::tokenizer_config::SPECIAL_TOKENS_FILE;

/// Loads a tokenizer with other files beside it.
fn load_with(tokenizer: &Value, files: &[(&str, Value)]) -> Result<TextTokenizer> {
    load_in(&tempfile::tempdir().unwrap(), tokenizer, files)
}

fn load_in(dir: &TempDir, tokenizer: &Value, files: &[(&str, Value)]) -> Result<TextTokenizer> {
    std::fs::write(dir.path().join(TOKENIZER_FILE), tokenizer.to_string()).unwrap();
    for (name, json) in files {
        std::fs::write(dir.path().join(name), json.to_string()).unwrap();
    }
    TextTokenizer::from_model_dir(dir.path())
}

fn encode(tokenizer: &TextTokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap()
}

#[test]
fn tokens_of_the_config_are_added() {
    // In order of their ids as numbers; `<|eos|>` is already there.
    let decoder = json!({"263": {"content": "<think>", "special": false},
        "1000": {"content": "</think>", "special": false}, "262": {"content": "<|eos|>", "special": true}});
    let config = json!({"added_tokens_decoder": decoder, "pad_token": "<pad>",
        "additional_special_tokens": ["<|im|>", {"content": "<|eos|>"}]});
    let tokenizer = load_with(&byte_level(), &[(CONFIG_FILE, config)]).unwrap();
    assert_eq!(encode(&tokenizer, "<think></think><pad><|im|><|eos|>"), [263, 264, 265, 266, 262]);
    assert_eq!(tokenizer.vocab_size(), 267);
    assert_eq!(tokenizer.decode(&[263, 265], true).unwrap(), "<think>");

    let dir = tempfile::tempdir().unwrap();
    let hash = |config: Value| {
        load_in(&dir, &byte_level(), &[(CONFIG_FILE, config)]).unwrap().hash().unwrap()
    };
    let plain = hash(json!({}));
    assert_eq!(hash(json!({"added_tokens_decoder": {}, "eos_token": "<|eos|>"})), plain);
    assert_ne!(hash(json!({"pad_token": "<pad>"})), plain);
    assert_ne!(hash(json!({"split_special_tokens": true})), plain);
}

#[test]
fn older_files_add_tokens_unless_the_config_says_everything() {
    let map = json!({"pad_token": "<map>"});
    let added = json!({"<added>": 263});
    let files = |config: Value| {
        let files = [
            (CONFIG_FILE, config),
            (SPECIAL_TOKENS_FILE, map.clone()),
            ("added_tokens.json", added.clone()),
        ];
        load_with(&byte_level(), &files).unwrap()
    };
    let older = files(json!({"pad_token": "<config>"}));
    assert_eq!(encode(&older, "<added><map>"), [263, 264]);
    assert_eq!(older.vocab_size(), 265);
    let whole = files(json!({"pad_token": "<config>", "added_tokens_decoder": {}}));
    assert_eq!(encode(&whole, "<config>"), [263]);
    assert_eq!(whole.vocab_size(), 264);
}

#[test]
fn special_tokens_stay_text_if_the_config_splits_them() {
    let config = json!({"split_special_tokens": true});
    let tokenizer = load_with(&byte_level(), &[(CONFIG_FILE, config)]).unwrap();
    let ids = encode(&tokenizer, "<|eos|>");
    assert_eq!(ids.len(), "<|eos|>".len());
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "<|eos|>");
    // The tokenizer still adds its own.
    assert_eq!(tokenizer.encode("a", true).unwrap()[0], 261);
}

#[test]
fn llama_prepends_a_space_to_the_first_text_only() {
    let mut json = sentence_piece();
    json["added_tokens"] = json!([{"id": 0, "content": "<unk>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}]);
    let ids = |class: &str, legacy: Value, text: &str| {
        let config = json!({"tokenizer_class": class, "legacy": legacy});
        encode(&load_with(&json, &[(CONFIG_FILE, config)]).unwrap(), text)
    };
    let (with_space, without) = (2, 3);
    let check = |class, legacy: Value, second, with_two_spaces| {
        assert_eq!(ids(class, legacy.clone(), "hello<unk>hello"), [with_space, 0, second]);
        assert_eq!(ids(class, legacy, " hello")[0] != with_space, with_two_spaces);
    };
    check("LlamaTokenizer", json!(false), without, false);
    check("LlamaTokenizerFast", Value::Null, without, false);
    check("LlamaTokenizer", json!(true), with_space, false);
    check("PreTrainedTokenizerFast", json!(false), with_space, true);
}

#[test]
fn tokens_of_the_wrong_form_are_named() {
    for (file, json, problem) in [
        (
            CONFIG_FILE,
            json!({"added_tokens_decoder": {"x": {"content": "a"}}}),
            "key `added_tokens_decoder` must map",
        ),
        (
            CONFIG_FILE,
            json!({"added_tokens_decoder": {"1": {}}}),
            "key `added_tokens_decoder` must map",
        ),
        (CONFIG_FILE, json!({"extra_special_tokens": [1]}), "key `extra_special_tokens` must be"),
        (SPECIAL_TOKENS_FILE, json!({"eos_token": 1}), "key `eos_token` must be"),
        ("added_tokens.json", json!({"<a>": "b"}), "key `<a>` must be a token id"),
    ] {
        let error = load_with(&byte_level(), &[(file, json)]).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(problem), "{error}");
    }
}

//! Tests with two small hand-made tokenizers: byte-level BPE (as in GPT-2 and Llama 3) and
//! SentencePiece with byte fallback (as in Llama 2).

mod config;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::*;

const TEXT: &str = "hello hello wörld — 日本語 🙂🏽 e\u{301}\n\tfn main() { }  ";

/// Byte-level BPE: 256 bytes, some merges, a beginning-of-sequence token before each text, and
/// `<|eos|>`.
fn byte_level() -> Value {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut tokens: Vec<String> = alphabet.into_iter().map(String::from).collect();
    let merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "hello"]];
    tokens.extend(merges.map(|[left, right]| format!("{left}{right}")));
    let vocab: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    let num_tokens = tokens.len();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": [special(num_tokens, "<|bos|>"), special(num_tokens + 1, "<|eos|>")],
        "normalizer": null,
        "pre_tokenizer": byte_level.clone(),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [num_tokens], "tokens": ["<|bos|>"]}}
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocab, "merges": merges}
    })
}

/// SentencePiece: words with `▁` for a space and a token for every byte. The decoder drops the
/// leading space.
fn sentence_piece() -> Value {
    let mut tokens =
        vec!["<unk>".to_owned(), "▁".to_owned(), "▁hello".to_owned(), "hello".to_owned()];
    tokens.extend("abcdefghijklmnopqrstuvwxyz".chars().map(String::from));
    tokens.extend((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")));
    let vocab: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                  "ignore_merges": true, "vocab": vocab, "merges": []}
    })
}

fn load(tokenizer: &Value) -> (TempDir, TextTokenizer) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(TOKENIZER_FILE), tokenizer.to_string()).unwrap();
    let loaded = TextTokenizer::from_model_dir(dir.path()).unwrap();
    (dir, loaded)
}

/// The increments of a stream, including that of `finish`.
fn stream(tokenizer: &TextTokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut stream = tokenizer.text_stream(skip_special);
    let mut texts: Vec<_> = ids.iter().filter_map(|&id| stream.push(id).unwrap()).collect();
    texts.extend(stream.finish().unwrap());
    texts
}

#[test]
fn text_round_trips_without_truncation_or_padding() {
    for json in [byte_level(), sentence_piece()] {
        let (_dir, tokenizer) = load(&json);
        for text in [TEXT, "", "hello"] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }
    }
}

#[test]
fn models_of_all_types_are_read_as_the_library_reads_them() {
    let with_model = |change: &dyn Fn(&mut Value)| {
        let mut json = byte_level();
        json["truncation"] = Value::Null;
        json["padding"] = Value::Null;
        change(&mut json["model"]);
        json
    };
    let merges = json!(["h e", "l l", "he ll", "hell o", "Ġ hello"]);
    let words = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"});
    let pieces = json!({"type": "WordPiece", "vocab": {"a": 0, "##b": 1}, "unk_token": "a",
                        "continuing_subword_prefix": "##", "max_input_chars_per_word": 9});
    let unigram = json!({"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]], "unk_id": 0});
    for json in [
        with_model(&|_| ()),
        with_model(&|model| model["merges"] = merges.clone()),
        with_model(&|model| drop(model.as_object_mut().unwrap().remove("type"))),
        with_model(&|model| *model = words.clone()),
        with_model(&|model| *model = pieces.clone()),
        with_model(&|model| *model = unigram.clone()),
    ] {
        let expected: Tokenizer = json.to_string().parse().unwrap();
        let (_dir, found) = load(&json);
        assert_eq!(found.tokenizer.to_string(true).unwrap(), expected.to_string(true).unwrap());
    }
}

#[test]
fn special_tokens_are_added_kept_and_skipped() {
    let (_dir, tokenizer) = load(&byte_level());
    let bos = 261;
    let plain = tokenizer.encode("hello", false).unwrap();
    let with_bos = tokenizer.encode("hello", true).unwrap();
    assert_eq!(with_bos, [&[bos], plain.as_slice()].concat());
    assert_eq!(tokenizer.decode(&with_bos, false).unwrap(), "<|bos|>hello");
    assert_eq!(tokenizer.decode(&with_bos, true).unwrap(), "hello");
    assert_eq!(tokenizer.encode("<|eos|>", false).unwrap(), [bos + 1]);
    assert_eq!(tokenizer.vocab_size(), 263);
}

#[test]
fn streams_hold_back_incomplete_characters() {
    let (_dir, tokenizer) = load(&byte_level());
    let ids = tokenizer.encode("a日🙂 hello", false).unwrap();
    assert_eq!(stream(&tokenizer, &ids, true), ["a", "日", "🙂", " hello"]);
    // Two of the three bytes of 日 are given out only at the end.
    assert_eq!(stream(&tokenizer, &ids[..3], true), ["a", "\u{fffd}"]);
    // The next id reveals that the character is invalid.
    let broken = [ids[0], ids[1], ids[0]];
    assert_eq!(stream(&tokenizer, &broken, true), ["a", "\u{fffd}a"]);
}

#[test]
fn streams_hold_back_a_limited_number_of_ids() {
    for json in [byte_level(), sentence_piece()] {
        let (_dir, tokenizer) = load(&json);
        let broken = tokenizer.encode("é", false).unwrap()[..1].repeat(300);
        let texts = stream(&tokenizer, &broken, true);
        assert!(texts.len() > 3, "{texts:?}");
        assert_eq!(texts.concat(), tokenizer.decode(&broken, true).unwrap());
    }
}

#[test]
fn streams_keep_spaces_between_words_and_drop_the_first() {
    let (_dir, tokenizer) = load(&sentence_piece());
    let hello = tokenizer.encode("hello", false).unwrap();
    assert_eq!(tokenizer.decode(&hello, true).unwrap(), "hello");
    let twice = [hello.clone(), hello].concat();
    assert_eq!(stream(&tokenizer, &twice, true).concat(), "hello hello");
    assert_eq!(stream(&tokenizer, &[1, 1, 2, 1, 1, 3], true).concat(), "  hello  hello");
}

#[test]
fn streams_equal_decoding_at_once() {
    let check = |tokenizer: &TextTokenizer, ids: &[u32]| {
        for skip_special in [false, true] {
            let whole = tokenizer.decode(ids, skip_special).unwrap();
            assert_eq!(stream(tokenizer, ids, skip_special).concat(), whole, "{ids:?}");
        }
    };
    for (end, _) in TEXT.char_indices() {
        for json in [byte_level(), sentence_piece()] {
            let (_dir, tokenizer) = load(&json);
            check(&tokenizer, &tokenizer.encode(&TEXT[..end], true).unwrap());
        }
    }
    // Random ids, with invalid characters and special tokens.
    let (_dir, tokenizer) = load(&byte_level());
    let mut state = 1_u32;
    for length in 0..300 {
        let ids: Vec<u32> = (0..length % 40)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 16) % 263
            })
            .collect();
        check(&tokenizer, &ids);
    }
}

#[test]
fn chats_are_encoded_with_and_without_a_template() {
    let (dir, tokenizer) = load(&byte_level());
    let template = "{{ bos }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|eos|>{% endif %}";
    let encode = |chosen: Option<&str>, messages: &[Message]| {
        tokenizer.encode_chat(&ChatFormat::choose(dir.path(), chosen)?, messages)
    };
    let messages = [Message::user("hello"), Message::assistant(" hello"), Message::user("he")];
    // Without a template, the format is not guessed.
    let unknown = encode(None, &messages).unwrap_err().to_string();
    assert!(unknown.contains("has no chat template") && unknown.contains("`none`"), "{unknown}");
    assert_eq!(encode(Some("none"), &messages).unwrap(), tokenizer.encode("he", true).unwrap());
    let nobody = encode(Some("none"), &[Message::system("x")]).unwrap_err();
    assert!(nobody.to_string().starts_with("the chat has no user message"));

    let file = dir.path().join("chat_template.jinja");
    std::fs::write(&file, template).unwrap();
    let expected = tokenizer.encode("hello hellohe<|eos|>", false).unwrap();
    assert_eq!(encode(None, &messages).unwrap(), expected);
    assert_eq!(encode(Some("none"), &messages).unwrap(), tokenizer.encode("he", true).unwrap());
    let elsewhere = dir.path().join("other.jinja");
    std::fs::rename(&file, &elsewhere).unwrap();
    assert_eq!(encode(elsewhere.to_str(), &messages).unwrap(), expected);
    let absent = encode(Some("vicunya"), &messages).unwrap_err().to_string();
    assert!(absent.contains("`vicunya`") && absent.contains("`vicuna`"), "{absent}");
}

#[test]
fn older_tokenizers_are_refused_with_a_conversion_command() {
    for old in OLD_FILES {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(old), "").unwrap();
        let error = TextTokenizer::from_model_dir(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains(&format!("has `{old}`, but draftsmith needs a `tokenizer.json`")),
            "{error}"
        );
        assert!(error.contains("save_pretrained("), "{error}");
    }
}

#[test]
fn tokenizers_with_another_vocabulary_are_refused() {
    let (_target_dir, target) = load(&byte_level());
    let (_same_dir, same) = load(&byte_level());
    TextTokenizer::check_shared(&target, &same).unwrap();
    assert_eq!(target.hash().unwrap(), same.hash().unwrap());

    let check = |change: fn(&mut Value), difference: &str| {
        let mut json = byte_level();
        change(&mut json);
        let (dir, other) = load(&json);
        assert_ne!(target.hash().unwrap(), other.hash().unwrap());
        let error = TextTokenizer::check_shared(&target, &other).unwrap_err().to_string();
        assert!(error.contains(difference), "{error}");
        assert!(
            error.contains(&format!("{}", dir.path().join(TOKENIZER_FILE).display())),
            "{error}"
        );
    };
    check(
        |json| json["added_tokens"][1]["content"] = "<|end|>".into(),
        "id 262 is `<|eos|>` in the target's and `<|end|>` in the draft's",
    );
    check(
        |json| {
            json["added_tokens"].as_array_mut().unwrap().pop();
        },
        "id 262 is `<|eos|>` in the target's and no token in the draft's",
    );
    check(
        |json| {
            json["model"]["vocab"]["!"] = 1.into();
            json["model"]["vocab"]["\""] = 0.into();
        },
        "id 0 is `!` in the target's and `\"` in the draft's",
    );
}

#[test]
fn missing_and_broken_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let load = || TextTokenizer::from_model_dir(dir.path()).unwrap_err().to_string();
    assert!(load().starts_with("cannot read `"));
    // The library panics on the last one, which is truncated in the decoder.
    for broken in ["", "{}", "{\"model\": 5}", "\u{0}", "{\"decoder\": {\"type\""] {
        std::fs::write(dir.path().join(TOKENIZER_FILE), broken).unwrap();
        assert!(load().contains("tokenizer.json`: cannot load the tokenizer: "), "{broken}");
    }
    let long = "a".repeat(4097);
    std::fs::write(dir.path().join(TOKENIZER_FILE), format!("{{\"vocab\": [\"\\\"{long}")).unwrap();
    assert!(load().contains("it has a text of 4099 bytes, longer than any token"), "{}", load());
}

#[test]
fn the_table_does_not_count_as_a_text() {
    assert_eq!(longest_text(b"{}"), None);
    assert_eq!(longest_text(br#"{"a": "", "b\"cd": 1}"#), Some(5));
    let table = br#"{"precompiled_charsmap": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "a": "bc"}"#;
    assert_eq!(longest_text(table), Some("precompiled_charsmap".len()));
    assert_eq!(longest_text(b"\"\\"), Some(1));
}

#[test]
fn the_dropout_of_a_model_is_not_used_and_told() {
    let mut with_dropout = byte_level();
    with_dropout["model"]["dropout"] = json!(0.5);
    let (_dir, tokenizer) = load(&with_dropout);
    let (_other, without) = load(&byte_level());
    let expected = without.encode(TEXT, true).unwrap();
    assert!((0..20).all(|_| tokenizer.encode(TEXT, true).unwrap() == expected));
    let [note] = tokenizer.notes() else { panic!("one note is expected") };
    assert!(note.contains("has a `dropout` of 0.5") && without.notes().is_empty(), "{note}");
    assert_ne!(tokenizer.hash().unwrap(), without.hash().unwrap());
}

#[test]
fn a_class_whose_pipeline_transformers_builds_itself_is_told() {
    for (class, is_told) in [
        ("LlamaTokenizerFast", true),
        ("GemmaTokenizer", true),
        ("Qwen2Tokenizer", true),
        ("GPT2Tokenizer", false),
        ("PreTrainedTokenizerFast", false),
    ] {
        let (dir, _) = load(&byte_level());
        let config = json!({ "tokenizer_class": class }).to_string();
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let tokenizer = TextTokenizer::from_model_dir(dir.path()).unwrap();
        let notes = tokenizer.notes().concat();
        assert_eq!(notes.contains(&format!("the class `{class}`")), is_told, "{class}: {notes}");
    }
}

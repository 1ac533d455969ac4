use draftsmith_data::Message;
use serde::Deserialize;

use super::*;

/// A text and what Hugging Face's tokenizer makes of it.
#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
    /// The text of the ids with and without special tokens.
    decoded: [String; 2],
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf-tokenizers")
}

/// With `GGUF_TOKENIZERS`, reads what `make_gguf_tokenizers.py` made of published tokenizers.
#[test]
fn tokenizers_made_from_gguf_files_have_the_ids_of_those_that_they_were_converted_from() {
    let dir = std::env::var_os("GGUF_TOKENIZERS").map_or_else(fixtures, PathBuf::from);
    let mut num = 0;
    for entry in dir.read_dir().expect("the fixtures") {
        let path = entry.expect("an entry").path();
        if !is_gguf(&path) {
            continue;
        }
        num += 1;
        let cases = std::fs::read(path.with_extension("json")).expect("the cases");
        let cases: Vec<Case> = serde_json::from_slice(&cases).expect("cases");
        let tokenizer = text_files(&path).expect("the files are made");
        let tokenizer = TextTokenizer::from_model_dir(tokenizer).expect("a tokenizer");
        assert!(cases.len() > 8);
        for Case { text, ids, decoded } in cases {
            let name = path.display();
            assert_eq!(tokenizer.encode(&text, true).expect("encodes"), ids, "{name}: {text}");
            let decode = |skip| tokenizer.decode(&ids, skip).expect("decodes");
            assert_eq!([decode(false), decode(true)], decoded, "{name}: {text}");
        }
    }
    assert!(num >= 6, "{num} tokenizers");
}

#[test]
fn the_chat_template_of_a_gguf_file_gets_its_special_tokens() {
    let files = text_files(&fixtures().join("smollm.gguf")).expect("the files are made");
    let Ok(ChatFormat::Template(template)) = ChatFormat::choose(files, None) else {
        panic!("no template");
    };
    let hello = Message::user("Hello");
    assert_eq!(template.render(&[hello], true).expect("renders"), "<s>Hello<s>");
}

#[test]
fn a_tokenizer_that_cannot_be_made_exactly_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (name, from, to, expected) in [
        ("smollm", "smollm", "smolln", "with pre-tokenizer `smolln`, expected"),
        ("smollm", "gpt2", "bert", "model `bert`"),
        ("smollm", "token_type", "token_tipe", "token_type` is missing"),
        ("tekken", "add_bos_token", "add_eos_token", "adds a token after the text"),
        ("gemma3", "gemma3", "gemma4", "model `llama` with pre-tokenizer `default`, expected"),
        ("gemma3", "add_space_prefix", "add_space_suffix", "model `llama`"),
        ("gemma3", "ggml.scores", "ggml.sc0res", "scores` is missing"),
    ] {
        let mut bytes = std::fs::read(fixtures().join(name).with_extension("gguf")).expect("reads");
        let at = bytes.windows(from.len()).position(|it| it == from.as_bytes()).expect("is there");
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).expect("written");
        let error = text_files(&path).expect_err("it is refused").to_string();
        assert!(error.contains("m.gguf") && error.contains("--tokenizer"), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

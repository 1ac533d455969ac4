//! The tokenizer of the embedded models and the chat format around it.
//!
//! Owns the training of a byte-level BPE, its files for other libraries, and the rendering of an example as
//! text. The texts come from `corpus`; `main` turns ids into tensors.
//!
//! Digits are single tokens, so models copy and add numbers of any length digit by digit.

use std::fs;
use std::path::Path;

use anyhow::Context;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

use super::corpus::Example;

const BOS: &str = "<s>";
const EOS: &str = "</s>";
const PAD: &str = "<pad>";
const USER: &str = "<|user|>";
const ASSISTANT: &str = "<|assistant|>";

/// The padding token of packed rows.
pub(crate) const PAD_ID: u32 = 2;

/// The special tokens; their positions are their ids.
const SPECIAL_TOKENS: [&str; 5] = [BOS, EOS, PAD, USER, ASSISTANT];

/// The longest sequence that the embedded models read, in tokens.
const MODEL_MAX_LENGTH: usize = 256;

/// The chat format. Every tag trims the white space around it, so it renders the same with and
/// without `trim_blocks`.
const CHAT_TEMPLATE: &str = "\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<|user|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}
    {%- else %}
        {{- raise_exception('only the roles user and assistant are known') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif -%}
";

/// Trains a byte-level BPE of `vocab_size` tokens on `examples`: prompts and answers without the chat format,
/// whose special tokens would otherwise be learned as plain text.
///
/// The same texts give the same tokenizer.
///
/// # Errors
/// If the tokenizer cannot be built or trained.
pub(crate) fn train(
    examples: impl Iterator<Item = String> + Send,
    vocab_size: usize,
) -> anyhow::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let (add_prefix_space, trim_offsets, use_regex) = (false, true, true);
    tokenizer
        .with_pre_tokenizer(Some(Sequence::new(vec![
            Digits::new(true).into(),
            ByteLevel::new(add_prefix_space, trim_offsets, use_regex).into(),
        ])))
        .with_decoder(Some(ByteLevelDecoder::default()));

    let special_tokens = SPECIAL_TOKENS.map(|token| AddedToken::from(token, true));
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .show_progress(false)
        .special_tokens(special_tokens.to_vec())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
        .into();
    tokenizer
        .train(&mut trainer, examples)
        .map_err(anyhow::Error::from_boxed)
        .context("training the tokenizer")?;
    for (id, token) in (0..).zip(SPECIAL_TOKENS) {
        assert_eq!(tokenizer.token_to_id(token), Some(id), "special tokens take the first ids");
    }
    Ok(tokenizer)
}

/// Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` to `dir`, as the
/// transformers library lays them out.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn write_model_dir_files(dir: &Path, tokenizer: &Tokenizer) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating `{}`", dir.display()))?;
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": false,
    });
    let tokenizer = tokenizer
        .to_string(true)
        .map_err(anyhow::Error::from_boxed)
        .context("serialising the tokenizer")?;
    for (name, text) in [
        ("tokenizer.json", format!("{tokenizer}\n")),
        ("tokenizer_config.json", format!("{config:#}\n")),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
    ] {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("writing `{}`", path.display()))?;
    }
    Ok(())
}

/// The example as training reads it: the rendered prompt, including the generation prompt, and the answer
/// with its end token. Their encodings do not change when they are joined.
pub(crate) fn render(example: &Example) -> (String, String) {
    let Example { prompt, answer, .. } = example;
    (format!("{BOS}{USER}\n{prompt}\n{ASSISTANT}\n"), format!("{answer}{EOS}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::corpus::example;

    fn tiny_tokenizer() -> Tokenizer {
        let texts = (0..400)
            .map(|index| example(1, index))
            .flat_map(|example| [example.prompt, example.answer]);
        train(texts, 600).unwrap()
    }

    fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    #[test]
    fn training_twice_gives_the_same_tokenizer() {
        let [first, second] = [(); 2].map(|()| tiny_tokenizer().to_string(false).unwrap());
        assert_eq!(first, second);
    }

    #[test]
    fn an_example_encodes_whole_as_it_does_in_parts_and_decodes_to_itself() {
        let tokenizer = tiny_tokenizer();
        assert_eq!(tokenizer.get_vocab_size(true), 600);
        for index in 400..500 {
            let (prompt, answer) = render(&example(1, index));
            let whole = encode(&tokenizer, &format!("{prompt}{answer}"));
            let parts = [encode(&tokenizer, &prompt), encode(&tokenizer, &answer)].concat();
            assert_eq!(whole, parts);
            assert_eq!((whole[0], whole.last()), (0, Some(&1)));
            assert_eq!(tokenizer.decode(&whole, false).unwrap(), prompt + &answer);
        }
    }

    #[test]
    fn any_text_survives_a_round_trip() {
        let tokenizer = tiny_tokenizer();
        let text = "naïve 2048 — \u{1f980}\t\u{0}\n";
        assert_eq!(tokenizer.decode(&encode(&tokenizer, text), false).unwrap(), text);
    }
}

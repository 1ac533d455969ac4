//! Detection of stop strings in token ids, as `stop_strings` does in transformers.
//!
//! Each token has the bytes that it adds to a text. The bytes of a special token are its name. A
//! stop string is complete at the token that holds its last byte, even if it ends inside the token.

use draftsmith_theory::TextEnd;

use super::TextTokenizer;
use crate::error::{DataError, Result};

/// The text that is put before a token to find the bytes that the token adds, because decoders
/// treat the first token of a text differently.
const BASE: &str = "abcdef";

/// The strings that end a text, and the bytes of each token.
#[derive(Debug, Clone)]
pub struct StopStrings {
    strings: Vec<Vec<u8>>,
    /// The length of the longest string in bytes.
    longest: usize,
    /// The bytes of each token, by id.
    tokens: Vec<Box<[u8]>>,
}

/// A tokenizer's representation of bytes that are not whole characters.
#[derive(Clone, Copy, PartialEq)]
enum ByteEncoding {
    /// A representation of every byte as a printable character (GPT-2).
    AsCharacters,
    /// A representation of some bytes as tokens `<0xNN>` (SentencePiece).
    AsTokens,
    /// No representation of such bytes.
    Unsupported,
}

impl StopStrings {
    /// Prepares non-empty strings for the tokens of `tokenizer`.
    ///
    /// # Errors
    /// If a string is empty, or the tokenizer's decoder fails.
    pub fn new(strings: &[String], tokenizer: &TextTokenizer) -> Result<Self> {
        if strings.iter().any(String::is_empty) {
            return Err(DataError::invalid(
                "a stop string is empty and would end every answer before it begins: remove it",
            ));
        }
        let strings: Vec<Vec<u8>> = strings.iter().map(|text| text.clone().into_bytes()).collect();
        let longest = strings.iter().map(Vec::len).max().unwrap_or(0);
        let texts = TokenTexts::new(tokenizer)?;
        let tokens = (0..tokenizer.vocab_size() as u32).map(|id| texts.of(id));
        Ok(Self { strings, longest, tokens: tokens.collect::<Result<_, _>>()? })
    }

    /// Returns whether the last token of a text completes a stop string, which may begin in earlier
    /// tokens. The iterator yields the text's tokens in reverse order. Only as many are read as a
    /// stop string can span.
    pub fn is_completed_by_last(&self, last_first: impl IntoIterator<Item = u32>) -> bool {
        let mut last_first = last_first.into_iter();
        let Some(last) = last_first.next() else { return false };
        let last = self.bytes(last);
        // The earlier tokens, as far back as a string that ends in the last token can begin.
        let mut tail: Vec<&[u8]> = Vec::new();
        let mut len = 0;
        while len + 1 < self.longest
            && let Some(id) = last_first.next()
        {
            let bytes = self.bytes(id);
            len += bytes.len();
            tail.push(bytes);
        }
        tail.reverse();
        let (tail, last_len) = ([tail.concat(), last.to_vec()].concat(), last.len());
        self.strings.iter().any(|string| {
            let first = tail.len().saturating_sub(last_len + string.len() - 1);
            tail[first..].windows(string.len()).any(|window| window == string)
        })
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], |bytes| bytes)
    }
}

impl TextEnd for StopStrings {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.is_completed_by_last(last_first)
    }
}

/// A helper that finds the bytes that tokens add to a text.
struct TokenTexts<'t> {
    tokenizer: &'t TextTokenizer,
    encoding: ByteEncoding,
    base: Vec<u32>,
    base_text: String,
}

impl<'t> TokenTexts<'t> {
    fn new(tokenizer: &'t TextTokenizer) -> Result<Self> {
        let base = tokenizer.encode(BASE, false)?;
        let base_text = tokenizer.decode(&base, false)?;
        Ok(Self { tokenizer, encoding: tokenizer.byte_encoding(), base, base_text })
    }

    fn of(&self, id: u32) -> Result<Box<[u8]>> {
        let Some(token) = self.tokenizer.tokenizer.id_to_token(id) else {
            return Ok(Box::default());
        };
        let bytes = match self.encoding {
            ByteEncoding::AsCharacters => Some(bytes_of_characters(&token)),
            ByteEncoding::AsTokens => byte_of_token(&token).map(|byte| vec![byte]),
            ByteEncoding::Unsupported => None,
        };
        if let Some(bytes) = bytes {
            return Ok(bytes.into_boxed_slice());
        }
        let text = self.tokenizer.decode(&[&self.base[..], &[id]].concat(), false)?;
        let added = text.strip_prefix(&self.base_text).unwrap_or(&token);
        Ok(added.as_bytes().into())
    }
}

impl TextTokenizer {
    /// Reads the representation of bytes from the decoder's settings.
    fn byte_encoding(&self) -> ByteEncoding {
        let decoder = self.tokenizer.get_decoder().and_then(|it| serde_json::to_string(it).ok());
        let decoder = decoder.unwrap_or_default();
        let has = |name: &str| decoder.contains(&format!("\"type\":\"{name}\""));
        // If a decoder has both representations, transformers uses the byte fallback.
        if has("ByteFallback") {
            ByteEncoding::AsTokens
        } else if has("ByteLevel") {
            ByteEncoding::AsCharacters
        } else {
            ByteEncoding::Unsupported
        }
    }
}

/// Returns the bytes of a token written in GPT-2's characters. If it has other characters, returns
/// the token's UTF-8.
fn bytes_of_characters(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(byte_of_character).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Returns the byte that one of GPT-2's characters represents. Printable Latin-1 characters
/// represent themselves, and the characters from U+0100 on represent the other bytes. `None` for
/// any other character.
fn byte_of_character(character: char) -> Option<u8> {
    let is_itself = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_itself(&byte).then_some(byte),
        Err(_) => {
            let mut others = (0..=u8::MAX).filter(|byte| !is_itself(byte));
            others.nth(code.checked_sub(0x100)? as usize)
        }
    }
}

/// Parses the byte of a token `<0xNN>`; `None` for other tokens.
fn byte_of_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> TextTokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny/target");
        TextTokenizer::from_model_dir(&dir).expect("it is committed")
    }

    fn stop(strings: &[&str]) -> StopStrings {
        let strings: Vec<String> = strings.iter().map(|text| (*text).to_owned()).collect();
        StopStrings::new(&strings, &tokenizer()).expect("strings")
    }

    /// Builds stop strings for tokens with the given bytes, whose ids count from 0.
    fn with_tokens(strings: &[&str], tokens: &[&[u8]]) -> StopStrings {
        let strings: Vec<Vec<u8>> = strings.iter().map(|text| text.as_bytes().to_vec()).collect();
        let longest = strings.iter().map(Vec::len).max().expect("one");
        let tokens = tokens.iter().map(|bytes| (*bytes).into()).collect();
        StopStrings { strings, longest, tokens }
    }

    fn completes(stop: &StopStrings, ids: &[u32]) -> bool {
        stop.is_completed_by_last(ids.iter().rev().copied())
    }

    /// Checks the examples in the documentation of `StopStringCriteria` in transformers.
    #[test]
    fn examples_of_transformers_hold() {
        let texts: [&[u8]; 11] = [
            b"st", b"op", b"stop", b"opera", b"sto", b"pper", b"las", b"topper", b"s", b"to",
            b"pped",
        ];
        let stop = with_tokens(&["stop"], &[&texts[..], &[b"at", b"tion"]].concat());
        for ids in [&[0, 1][..], &[2], &[0, 3], &[4, 5], &[6, 7], &[8, 9, 10]] {
            assert!(completes(&stop, ids), "{ids:?}");
            assert!(!completes(&stop, &ids[..ids.len() - 1]), "{ids:?}");
        }
        for ids in [&[2, 11][..], &[0, 1, 11], &[0, 3, 12], &[], &[99], &[2, 99]] {
            assert!(!completes(&stop, ids), "{ids:?}");
        }
    }

    #[test]
    fn the_first_prefix_whose_text_contains_the_string_completes_it() {
        let tokenizer = tokenizer();
        let text =
            "The answer is 42. — naïve café → 日本語 🙂, done.\n\nNext: the answer is 42 again.";
        let ids = tokenizer.encode(text, false).expect("encodes");
        for string in [
            "42.",
            ". ",
            "ï",
            "é →",
            "日本",
            "本",
            "🙂",
            "🙂, d",
            "\n\n",
            "\nN",
            "answer is 42 ",
            "?",
        ] {
            let stop = stop(&[string]);
            let first = (1..=ids.len()).find(|len| completes(&stop, &ids[..*len]));
            let has = |len: &usize| {
                tokenizer.decode(&ids[..*len], false).expect("decodes").contains(string)
            };
            assert_eq!(first, (1..=ids.len()).find(has), "{string:?}");
        }
        // With several strings, the first to occur.
        let both = stop(&["Next", "42."]);
        let first = (1..=ids.len()).find(|len| completes(&both, &ids[..*len]));
        let alone = stop(&["42."]);
        assert_eq!(first, (1..=ids.len()).find(|len| completes(&alone, &ids[..*len])));
    }

    #[test]
    fn both_byte_encodings_are_decoded() {
        assert_eq!(bytes_of_characters("ĠcafÃ©Ċ"), " café\n".as_bytes());
        assert_eq!(bytes_of_characters("<tool call>"), b"<tool call>");
        assert_eq!(
            [byte_of_token("<0x0A>"), byte_of_token("<0xA>"), byte_of_token("x")],
            [Some(10), None, None]
        );
        let all: Vec<u8> =
            (0..0x180).filter_map(char::from_u32).filter_map(byte_of_character).collect();
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..=u8::MAX).collect::<Vec<u8>>());
    }

    #[test]
    fn an_empty_string_is_refused() {
        let refused = StopStrings::new(&["a".to_owned(), String::new()], &tokenizer());
        assert!(refused.expect_err("refused").to_string().contains("stop string is empty"));
    }
}

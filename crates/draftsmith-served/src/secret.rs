//! The servers' bearer token, and the masking of the token in quoted text. All text from servers
//! and the HTTP library is quoted through this file: on one line, shortened, and without the token.

use ureq::http::HeaderValue;

/// The maximum numbers of characters in one quoted text and in a whole message.
const MOST_QUOTED: usize = 300;
const MOST_SAID: usize = 1000;
/// The maximum number of bytes of a text that are examined.
const MOST_READ: usize = 8192;
/// The maximum number of backslashes before an escaped character.
const MOST_SLASHES: usize = 8;
/// The text that replaces the token.
const MASK: &[u8] = b"***";
/// The minimum lengths of a token, and of its base64 form, that are masked. Shorter ones would
/// match by chance.
const LEAST_TOKEN: usize = 4;
const LEAST_BASE64: usize = 8;

/// A bearer token. The default is no token. The type must not implement `Debug`.
#[derive(Default)]
pub struct Secret {
    header: Option<HeaderValue>,
    /// The byte strings to mask: the token, and its base64 forms after 0, 1 and 2 other bytes.
    hidden: Vec<Vec<u8>>,
}

impl Secret {
    /// Creates the secret from a bearer token; `None` if the token is not a valid header value.
    pub fn new(token: &str) -> Option<Self> {
        let header = HeaderValue::from_str(&format!("Bearer {token}")).ok();
        let mut header = header.filter(|header| header.to_str().is_ok())?;
        header.set_sensitive(true);
        let mut hidden = vec![token.as_bytes().to_vec()];
        for shift in 0..3 {
            let standard = base64_core(token.as_bytes(), shift);
            let for_urls = standard.iter().map(|byte| match byte {
                b'+' => b'-',
                b'/' => b'_',
                byte => *byte,
            });
            hidden.extend([for_urls.collect(), standard]);
        }
        let is_plain = |hidden: &[u8]| hidden == token.as_bytes();
        let least = |hidden: &[u8]| if is_plain(hidden) { LEAST_TOKEN } else { LEAST_BASE64 };
        hidden.retain(|hidden| hidden.len() >= least(hidden));
        hidden.sort();
        hidden.dedup();
        Some(Self { header: Some(header), hidden })
    }

    /// Returns the value of the `authorization` header; `None` without a token.
    pub(super) fn header(&self) -> Option<&HeaderValue> {
        self.header.as_ref()
    }

    /// Returns whether a text contains the token.
    pub(super) fn is_in(&self, text: &str) -> bool {
        let has = |hidden: &Vec<u8>| text.as_bytes().windows(hidden.len()).any(|it| it == hidden);
        self.hidden.iter().any(has)
    }

    /// Puts a message on one line, shortens it and masks the token in it.
    pub(super) fn clean(&self, message: &str) -> String {
        self.masked(message, false, MOST_SAID)
    }

    /// Quotes the beginning of a server's text in backticks, with the token masked. If the text was
    /// cut off (`is_cut`), its end is also masked where it could be the beginning of the token.
    pub(super) fn quote(&self, said: &[u8], is_cut: bool) -> String {
        format!("`{}`", self.masked(&String::from_utf8_lossy(said), is_cut, MOST_QUOTED))
    }

    fn masked(&self, text: &str, is_cut: bool, most: usize) -> String {
        let read = &text[..text.floor_char_boundary(MOST_READ)];
        let is_cut = is_cut || read.len() < text.len();
        let words: Vec<&str> = read.split_whitespace().collect();
        let line: String = words.join(" ").chars().filter(|c| !c.is_control()).collect();
        let (mut rest, mut masked) = (line.as_bytes(), Vec::new());
        while let Some((first, after)) = rest.split_first() {
            let found = self.hidden.iter().filter_map(|hidden| length_of(rest, hidden, is_cut));
            match found.max() {
                Some(length) => {
                    masked.extend_from_slice(MASK);
                    rest = &rest[length..];
                }
                None => {
                    masked.push(*first);
                    rest = after;
                }
            }
        }
        let masked = String::from_utf8_lossy(&masked);
        match masked.char_indices().nth(most) {
            Some((end, _)) => format!("{}…", &masked[..end]),
            None => masked.into_owned(),
        }
    }
}

/// Returns the length in bytes of the prefix of `text` that spells `hidden`, where each byte may be
/// escaped; `None` if there is no such prefix.
fn length_of(text: &[u8], hidden: &[u8], is_cut: bool) -> Option<usize> {
    if text.starts_with(hidden) {
        return Some(hidden.len());
    }
    let mut rest = text;
    for byte in hidden {
        if rest.is_empty() {
            return is_cut.then_some(text.len());
        }
        match escaped_length(rest, *byte) {
            Some(length) => rest = &rest[length..],
            // The text was cut off within an escape.
            None if is_cut && rest.len() < 6 && b"\\%&".contains(&rest[0]) => {
                return Some(text.len());
            }
            None => return None,
        }
    }
    Some(text.len() - rest.len())
}

/// Returns the length in bytes of the prefix of `text` that spells `byte`, plain or escaped as in
/// JSON, URLs and HTML; `None` if there is no such prefix.
fn escaped_length(text: &[u8], byte: u8) -> Option<usize> {
    let is_next = |form: &[u8]| {
        text.get(..form.len())
            .is_some_and(|next| next.eq_ignore_ascii_case(form))
            .then_some(form.len())
    };
    let escape = || {
        // JSON within JSON has several backslashes.
        let num_slashes = text.iter().take(MOST_SLASHES).take_while(|byte| **byte == b'\\').count();
        let forms = match text[0] {
            b'\\' => vec![format!("u{byte:04x}"), char::from(byte).to_string()],
            b'%' => vec![format!("%{byte:02x}")],
            b'&' => {
                vec![format!("&#{byte};"), format!("&#x{byte:x};"), named_entity(byte).to_owned()]
            }
            _ => Vec::new(),
        };
        let after = &text[num_slashes..];
        forms.iter().filter(|form| !form.is_empty()).find_map(|form| {
            let form = form.as_bytes();
            let next = after.get(..form.len())?;
            next.eq_ignore_ascii_case(form).then_some(num_slashes + form.len())
        })
    };
    escape().or_else(|| is_next(&[byte]))
}

/// Returns the named HTML entity of a byte; empty if it has none.
fn named_entity(byte: u8) -> &'static str {
    match byte {
        b'&' => "&amp;",
        b'<' => "&lt;",
        b'>' => "&gt;",
        b'"' => "&quot;",
        _ => "",
    }
}

/// Returns those base64 characters that depend only on the text, if `shift` other bytes precede it.
fn base64_core(text: &[u8], shift: usize) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bit = |at: usize| usize::from(text[at / 8] >> (7 - at % 8) & 1);
    // The index of the first bit of the text at which a base64 character begins.
    let begin = (6 - 8 * shift % 6) % 6;
    let begins = (begin..).step_by(6).take_while(|begin| begin + 6 <= 8 * text.len());
    begins.map(|at| ALPHABET[(at..at + 6).fold(0, |all, at| 2 * all + bit(at))]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = r#"sk-a/b+c"d\e&f_0123456789"#;

    fn clean(text: &str) -> String {
        Secret::new(TOKEN).expect("a token").clean(text)
    }

    #[test]
    fn the_token_is_masked_in_every_form() {
        let json = serde_json::to_string(TOKEN).expect("JSON");
        let json = json.trim_matches('"');
        let slashes = json.replace('/', r"\/");
        let twice = serde_json::to_string(json).expect("JSON");
        let numbers = |form: fn(u8) -> String| TOKEN.bytes().map(form).collect::<String>();
        let forms = [
            TOKEN.to_owned(),
            json.to_owned(),
            slashes,
            twice.trim_matches('"').to_owned(),
            TOKEN.to_uppercase(),
            "sk-a%2Fb%2bc%22d%5Ce%26f_0123456789".to_owned(),
            "sk-a/b+c&quot;d\\e&amp;f_0123456789".to_owned(),
            numbers(|byte| format!("\\u{byte:04X}")),
            numbers(|byte| format!("%{byte:02x}")),
            numbers(|byte| format!("&#{byte};")),
        ];
        for form in forms {
            assert_eq!(clean(&format!("a {form}\n{form} b")), "a *** *** b", "{form}");
        }
    }

    #[test]
    fn the_token_is_masked_in_base64() {
        // printf %s '…' | base64
        let forms = [
            ("sk-0123456789abcdef", "c2stMDEyMzQ1Njc4OWFiY2RlZg=="),
            ("sk-0123456789abcdef", "QmVhcmVyIHNrLTAxMjM0NTY3ODlhYmNkZWY="),
            ("sk-0123456789abcdef", "eyJrIjoic2stMDEyMzQ1Njc4OWFiY2RlZiJ9"),
            ("sk-0123456789abcdef", "dTpzay0wMTIzNDU2Nzg5YWJjZGVmIQ=="),
            ("~~~???~~~???", "fn5+Pz8/fn5+Pz8/"),
            ("~~~???~~~???", "fn5-Pz8_fn5-Pz8_"),
        ];
        for (token, form) in forms {
            let cleaned = Secret::new(token).expect("a token").clean(&format!("a {form} b"));
            let rest: usize = cleaned.len() - "a *** b".len();
            assert!(cleaned.contains("***") && rest <= 14, "{form}: {cleaned}");
        }
    }

    #[test]
    fn a_token_that_the_end_cuts_is_masked() {
        let secret = Secret::new(TOKEN).expect("a token");
        let json = serde_json::to_string(TOKEN).expect("JSON");
        for form in [TOKEN, json.trim_matches('"'), "sk%2Da%2Fb%2Bc%22d%5Ce%26f"] {
            for end in 1..form.len() {
                let said = format!("it is {}", &form[..end]);
                assert_eq!(secret.quote(said.as_bytes(), true), "`it is ***`");
            }
        }
        assert_eq!(secret.quote(b"it is sk-a", false), "`it is sk-a`", "a whole text");
        // A mask is shorter than the token, so more of the text is shown.
        for num in 1..500 {
            let many = secret.clean(&TOKEN.repeat(num));
            assert!(many.chars().all(|c| "*…".contains(c)), "{many}");
        }
    }

    #[test]
    fn a_token_too_short_to_be_secret_is_not_masked() {
        let clean = |token: &str| Secret::new(token).expect("a token").clean("no model named no");
        assert_eq!(clean("no"), "no model named no");
        assert_eq!(clean("named"), "no model *** no");
    }

    #[test]
    fn a_quoted_text_is_one_short_line() {
        assert_eq!(Secret::default().clean("a\r\n\tb \u{1b}[31mc\u{7}"), "a b [31mc");
        let long = "é".repeat(10_000);
        assert_eq!(Secret::default().clean(&long).chars().count(), MOST_SAID + 1);
        assert_eq!(Secret::default().quote(long.as_bytes(), true).chars().count(), MOST_QUOTED + 3);
    }

    #[test]
    fn a_token_with_a_line_break_is_refused() {
        for token in ["one\ntwo", "one\r\nx-other: two", "one\0", "ключ"] {
            assert!(Secret::new(token).is_none());
        }
        assert!(Secret::new("Aa0-._~+/=").is_some());
    }
}

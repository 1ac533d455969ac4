//! The servers' bearer token, and the masking of the token in quoted text. All text from servers
//! and the HTTP library is quoted through this file: on one line, shortened, and without the token.

use ureq::http::HeaderValue;

/// The maximum numbers of characters in one quoted text and in a whole message.
const MOST_QUOTED: usize = 300;
const MOST_SAID: usize = 1000;
/// The maximum number of bytes of a text that are examined.
const MOST_READ: usize = 8192;
/// The text that replaces the token.
const MASK: &str = "***";
/// The minimum length of a token that is masked. A shorter one would match by chance.
const LEAST_TOKEN: usize = 4;

/// A bearer token. The default is no token. The type must not implement `Debug`.
#[derive(Default)]
pub struct Secret {
    header: Option<HeaderValue>,
    /// The text to mask: the token, or empty if it is absent or short.
    hidden: String,
}

impl Secret {
    /// Creates the secret from a bearer token; `None` if the token is not a valid header value.
    pub fn new(token: &str) -> Option<Self> {
        let header = HeaderValue::from_str(&format!("Bearer {token}")).ok();
        let mut header = header.filter(|header| header.to_str().is_ok())?;
        header.set_sensitive(true);
        let hidden = if token.len() < LEAST_TOKEN { "" } else { token };
        Some(Self { header: Some(header), hidden: hidden.to_owned() })
    }

    /// Returns the value of the `authorization` header; `None` without a token.
    pub(super) fn header(&self) -> Option<&HeaderValue> {
        self.header.as_ref()
    }

    /// Returns whether a text contains the token.
    pub(super) fn is_in(&self, text: &str) -> bool {
        !self.hidden.is_empty() && text.contains(&self.hidden)
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
        let mut masked = match self.hidden.as_str() {
            "" => line,
            hidden => line.replace(hidden, MASK),
        };
        // A token consists of visible ASCII characters.
        let begun = (1..self.hidden.len()).rev().map(|len| &self.hidden[..len]);
        if let Some(begun) = begun.into_iter().find(|begun| is_cut && masked.ends_with(begun)) {
            masked.replace_range(masked.len() - begun.len().., MASK);
        }
        match masked.char_indices().nth(most) {
            Some((end, _)) => format!("{}…", &masked[..end]),
            None => masked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = r#"sk-a/b+c"d\e&f_0123456789"#;

    fn clean(text: &str) -> String {
        Secret::new(TOKEN).expect("a token").clean(text)
    }

    #[test]
    fn the_token_is_masked_everywhere() {
        assert_eq!(clean(&format!("a {TOKEN}\n{TOKEN}{TOKEN} b")), "a *** ****** b");
        assert!(Secret::new(TOKEN).expect("a token").is_in(&format!("a{TOKEN}b")));
        assert!(!Secret::default().is_in(TOKEN));
    }

    #[test]
    fn a_token_that_the_end_cuts_is_masked() {
        let secret = Secret::new(TOKEN).expect("a token");
        for end in 1..TOKEN.len() {
            let said = format!("it is {}", &TOKEN[..end]);
            assert_eq!(secret.quote(said.as_bytes(), true), "`it is ***`");
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

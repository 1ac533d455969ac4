//! What a Rust file says of modules: its children, what it imports, and the paths and names that
//! its code has, without comments, texts and tests.
//!
//! A reader of tokens is enough: paths look the same wherever they stand, in macros too.

/// What a file says.
#[derive(Debug, Default)]
pub(crate) struct Source {
    /// Modules in files of their own.
    pub(crate) children: Vec<String>,
    pub(crate) imports: Vec<Import>,
    /// Paths in the code, of one segment or more.
    pub(crate) paths: Vec<Vec<String>>,
}

/// One name that a `use` brings in.
#[derive(Debug)]
pub(crate) struct Import {
    /// As it is called here; `*` for all.
    pub(crate) name: String,
    pub(crate) path: Vec<String>,
    /// Whether others see it here.
    pub(crate) is_public: bool,
}

impl Source {
    pub(crate) fn of(text: &str) -> Self {
        let tokens = without_tests(tokens(text));
        let mut source = Self::default();
        let mut at = 0;
        while at < tokens.len() {
            let word = tokens[at].as_str();
            let before = at.checked_sub(1).map_or("", |before| tokens[before].as_str());
            if word == "use" && before != "." {
                let is_public = before == "pub" || (before == ")" && is_restricted(&tokens[..at]));
                let end = at + tokens[at..].iter().position(|token| token == ";").expect("an end");
                read_use(&tokens[at + 1..end], &mut Vec::new(), is_public, &mut source.imports);
                at = end;
            } else if word == "mod" && tokens.get(at + 2).is_some_and(|next| next == ";") {
                source.children.push(tokens[at + 1].clone());
                at += 2;
            } else if is_word(word) && before != "." {
                let mut path = vec![word.to_owned()];
                while tokens.get(at + 1).is_some_and(|next| next == "::")
                    && tokens.get(at + 2).is_some_and(|next| is_word(next))
                {
                    path.push(tokens[at + 2].clone());
                    at += 2;
                }
                source.paths.push(path);
            }
            at += 1;
        }
        source
    }
}

/// Whether tokens end with `pub(crate)` or the like.
fn is_restricted(tokens: &[String]) -> bool {
    let open = tokens.iter().rposition(|token| token == "(");
    open.is_some_and(|open| open > 0 && tokens[open - 1] == "pub")
}

/// Reads `a::{b, c as d, self}` behind the segments of `prefix`.
fn read_use(tokens: &[String], prefix: &mut Vec<String>, is_public: bool, into: &mut Vec<Import>) {
    let depth = prefix.len();
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].as_str() {
            "::" => {}
            "{" => {
                let len = group_len(&tokens[at..]);
                for part in parts(&tokens[at + 1..at + len - 1]) {
                    read_use(part, prefix, is_public, into);
                }
                prefix.truncate(depth);
                return;
            }
            "as" => {
                let name = tokens[at + 1].clone();
                into.push(Import { name, path: prefix.clone(), is_public });
                prefix.truncate(depth);
                return;
            }
            // `a::{self}` is `a`.
            "self" if !prefix.is_empty() => {}
            word => prefix.push(word.to_owned()),
        }
        at += 1;
    }
    if let Some(name) = prefix.last() {
        into.push(Import { name: name.clone(), path: prefix.clone(), is_public });
    }
    prefix.truncate(depth);
}

/// What commas outside of braces part.
fn parts(tokens: &[String]) -> Vec<&[String]> {
    let (mut parts, mut begin, mut depth) = (Vec::new(), 0, 0);
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&tokens[begin..]);
    parts
}

/// The number of tokens from an opening bracket to the one that closes it.
fn group_len(tokens: &[String]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Takes out items behind `#[cfg(test)]` and `#[test]`.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at] == "#" && tokens.get(at + 1).is_some_and(|next| next == "[") {
            let len = 1 + group_len(&tokens[at + 1..]);
            let attribute = tokens[at + 2..at + len - 1].concat();
            at += len;
            if attribute == "cfg(test)" || attribute == "test" {
                at += item_len(&tokens[at..]);
            }
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// The number of tokens of an item: up to its `;` or the end of its braces.
fn item_len(tokens: &[String]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].as_str() {
            ";" => return at + 1,
            "{" => return at + group_len(&tokens[at..]),
            "(" | "[" => at += group_len(&tokens[at..]),
            _ => at += 1,
        }
    }
    at
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::` and single signs; comments, texts, characters, numbers and lifetimes are left out.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let at_text = |at: usize, sought: &str| {
        sought.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c))
    };
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        if at_text(at, "//") {
            at += chars[at..].iter().position(|c| *c == '\n').unwrap_or(chars.len() - at);
        } else if at_text(at, "/*") {
            let mut depth = 0;
            loop {
                if at_text(at, "/*") {
                    depth += 1;
                    at += 2;
                } else if at_text(at, "*/") {
                    depth -= 1;
                    at += 2;
                } else {
                    at += 1;
                }
                if depth == 0 || at >= chars.len() {
                    break;
                }
            }
        } else if let Some(end) = raw_text_end(&chars, at) {
            at = end;
        } else if c == '"' {
            at += 1;
            while at < chars.len() && chars[at] != '"' {
                at += if chars[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
        } else if c == '\'' {
            at += match (chars.get(at + 1), chars.get(at + 2)) {
                (Some('\\'), _) => {
                    let rest = &chars[at + 3..];
                    4 + rest.iter().position(|c| *c == '\'').unwrap_or(rest.len())
                }
                (Some(_), Some('\'')) => 3,
                // A lifetime: its name is no word of the code.
                _ => 1 + chars[at + 1..].iter().take_while(|c| is_part(**c)).count(),
            };
        } else if is_part(c) {
            let len = chars[at..].iter().take_while(|c| is_part(**c)).count();
            if !c.is_ascii_digit() {
                tokens.push(chars[at..at + len].iter().collect());
            }
            at += len;
        } else if at_text(at, "::") {
            tokens.push("::".to_owned());
            at += 2;
        } else {
            if !c.is_whitespace() {
                tokens.push(c.to_string());
            }
            at += 1;
        }
    }
    tokens
}

fn is_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where `r"…"`, `r#"…"#` or the like with a `b` before it ends, if one begins here.
fn raw_text_end(chars: &[char], at: usize) -> Option<usize> {
    if at > 0 && is_part(chars[at - 1]) {
        return None;
    }
    let mut open = at + usize::from(chars[at] == 'b');
    if chars.get(open) != Some(&'r') {
        return None;
    }
    open += 1;
    let num_marks = chars[open..].iter().take_while(|c| **c == '#').count();
    open += num_marks;
    if chars.get(open) != Some(&'"') {
        return None;
    }
    let closes = |end: usize| {
        chars[end] == '"' && chars[end + 1..].iter().take_while(|c| **c == '#').count() >= num_marks
    };
    let end = (open + 1..chars.len()).find(|end| closes(*end))?;
    Some(end + 1 + num_marks)
}

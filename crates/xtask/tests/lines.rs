//! No crate grows unnoticed: `lines.txt` lists the product lines of each crate and their characters.
//!
//! A product line holds code outside tests. Blank lines, comments and white space do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The share, and the numbers of lines and characters, by which a crate may be below its entry.
const SHARE: f64 = 0.01;
const LINES: usize = 25;
const CHARACTERS: usize = 750;

#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Size {
    lines: usize,
    characters: usize,
}

/// A source without comments and the contents of texts, which keeps its lines, and whether each line holds code.
struct Scanned {
    code: String,
    is_code: Vec<bool>,
}

impl Scanned {
    fn of(source: &str) -> Self {
        let (mut scanned, mut holds) = (Self { code: String::new(), is_code: Vec::new() }, false);
        let mut rest = source;
        while let Some(first) = rest.chars().next() {
            let (len, is_code, kept) = match token(rest) {
                Token::Comment(len) => (len, false, ""),
                Token::Text(len) => (len, true, "\"\""),
                Token::Other => {
                    (first.len_utf8(), !first.is_whitespace(), &rest[..first.len_utf8()])
                }
            };
            let (token, after) = rest.split_at(len);
            rest = after;
            holds |= is_code;
            if !kept.contains('\n') {
                scanned.code += kept;
            }
            for _ in token.matches('\n') {
                scanned.is_code.push(holds);
                scanned.code.push('\n');
                holds = is_code;
            }
        }
        scanned.is_code.push(holds);
        scanned
    }

    /// Returns which lines are in an item under `cfg(test)`, and the names of such modules in files of their own.
    fn tests(&self) -> (Vec<bool>, Vec<String>) {
        let lines: Vec<&str> = self.code.split('\n').collect();
        let (mut marks, mut names) = (vec![false; lines.len()], Vec::new());
        let is_test = |line: &str| {
            let line = line.trim_start();
            ["#[cfg(test", "#[cfg(all(test"].iter().any(|start| line.starts_with(start))
        };
        let mut at = 0;
        while at < lines.len() {
            let mut end = at;
            if is_test(lines[at]) {
                let attributes =
                    lines[at + 1..].iter().take_while(|line| line.trim().starts_with("#["));
                end = at + 1 + attributes.count();
                let module = lines[end].trim().strip_suffix(';');
                if let Some((before, name)) = module.and_then(|it| it.split_once("mod "))
                    && (before.is_empty() || before.starts_with("pub"))
                {
                    names.push(name.to_owned());
                } else {
                    end += item_len(&lines[end..]) - 1;
                }
                marks[at..=end.min(lines.len() - 1)].fill(true);
            }
            at = end + 1;
        }
        (marks, names)
    }
}

enum Token {
    /// A comment or a text, with its length in bytes.
    Comment(usize),
    Text(usize),
    Other,
}

/// Reads what a source begins with.
fn token(source: &str) -> Token {
    let after =
        |from: usize, end: &str| source[from..].find(end).map_or(source.len(), |at| from + at);
    if source.starts_with("//") {
        return Token::Comment(after(0, "\n"));
    }
    if source.starts_with("/*") {
        return Token::Comment(after(0, "*/") + 2);
    }
    let raw = source.strip_prefix('b').unwrap_or(source);
    if let Some(raw) = raw.strip_prefix('r')
        && let Some(quote) = raw.find('"')
        && raw[..quote].bytes().all(|byte| byte == b'#')
    {
        let begin = source.len() - raw.len() + quote + 1;
        let end = format!("\"{}", &raw[..quote]);
        return Token::Text(after(begin, &end) + end.len());
    }
    if source.starts_with('"') {
        let mut bytes = source.bytes().enumerate().skip(1);
        while let Some((at, byte)) = bytes.next() {
            match byte {
                b'\\' => drop(bytes.next()),
                b'"' => return Token::Text(at + 1),
                _ => {}
            }
        }
    }
    let mut chars = source.char_indices();
    match (chars.next(), chars.next(), chars.next()) {
        (Some((_, '\'')), Some((_, '\\')), Some(_)) => Token::Text(after(3, "'") + 1),
        (Some((_, '\'')), Some(_), Some((at, '\''))) => Token::Text(at + 1),
        _ => Token::Other,
    }
}

/// Counts the lines of the item that begins at the first of `lines`.
fn item_len(lines: &[&str]) -> usize {
    let (mut depth, mut is_open) = (0, false);
    for (nth, line) in lines.iter().enumerate() {
        depth += line.matches('{').count() as i64 - line.matches('}').count() as i64;
        is_open |= line.contains('{');
        if (is_open && depth <= 0) || (!is_open && line.contains(';')) {
            return nth + 1;
        }
    }
    lines.len()
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Measures the sources of a crate.
fn measured(src: &Path) -> Size {
    let mut paths = Vec::new();
    sources(src, &mut paths);
    let (mut files, mut tests) = (Vec::new(), BTreeSet::new());
    for path in paths {
        let source = fs::read_to_string(&path).expect("a source");
        let scanned = Scanned::of(&source);
        let (marks, names) = scanned.tests();
        let is_root = path.file_name().is_some_and(|name| name == "lib.rs" || name == "main.rs");
        let dir = if is_root {
            path.parent().expect("a file").to_owned()
        } else {
            path.with_extension("")
        };
        tests.extend(names.into_iter().map(|name| dir.join(name)));
        files.push((path, source, scanned, marks));
    }
    let is_test = |path: &Path| path.with_extension("").ancestors().any(|it| tests.contains(it));
    let mut size = Size::default();
    for (_, source, scanned, marks) in files.iter().filter(|(path, ..)| !is_test(path)) {
        for ((line, is_code), is_test) in source.split('\n').zip(&scanned.is_code).zip(marks) {
            if *is_code && !is_test {
                size.lines += 1;
                size.characters += line.chars().filter(|c| !c.is_whitespace()).count();
            }
        }
    }
    size
}

/// Lists what is wrong with the entries of a table: lines with a crate's name, lines, characters and the reason.
fn judge(table: &str, found: &BTreeMap<String, Size>) -> Vec<String> {
    let rows = table.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let entry = |line: &str| {
        let mut words = line.split_whitespace();
        let (name, lines, characters) = (words.next()?, words.next()?, words.next()?);
        let size = Size { lines: lines.parse().ok()?, characters: characters.parse().ok()? };
        words.next().map(|_| (name.to_owned(), size))
    };
    let mut wrong: Vec<String> = Vec::new();
    let mut entries = BTreeMap::new();
    for row in rows {
        match entry(row) {
            Some((name, size)) => drop(entries.insert(name, size)),
            None => wrong
                .push(format!("`{row}` is not a crate, its lines, its characters and the reason")),
        }
    }
    wrong.extend(
        entries
            .keys()
            .filter(|name| !found.contains_key(*name))
            .map(|name| format!("there is no crate `{name}`: remove its entry")),
    );
    for (name, size) in found {
        let Size { lines, characters } = *size;
        let Some(entry) = entries.get(name) else {
            wrong
                .push(format!("`{name}` has no entry: write `{name} {lines} {characters} REASON`"));
            continue;
        };
        let above = |found: usize, entry: usize| found.saturating_sub(entry);
        let [more_lines, more_characters] =
            [above(lines, entry.lines), above(characters, entry.characters)];
        let is_below = |found: usize, entry: usize, least: usize| {
            let below = above(entry, found);
            below > least && below as f64 > SHARE * entry as f64
        };
        if more_lines > 0 || more_characters > 0 {
            wrong.push(format!(
                "`{name}` has {more_lines} lines and {more_characters} characters more than its entry: take them out, or write \
                 `{name} {lines} {characters} REASON`"
            ));
        } else if is_below(lines, entry.lines, LINES)
            || is_below(characters, entry.characters, CHARACTERS)
        {
            wrong.push(format!("`{name}` shrank: write `{name} {lines} {characters} REASON`"));
        }
    }
    wrong
}

#[test]
fn no_crate_is_larger_than_its_entry() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let found = fs::read_dir(crates).unwrap().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        let src = entry.path().join("src");
        (name != "xtask" && src.is_dir()).then(|| (name, measured(&src)))
    });
    let wrong = judge(include_str!("lines.txt"), &found.collect());
    assert!(wrong.is_empty(), "crates/xtask/tests/lines.txt:\n{}", wrong.join("\n"));
}

#[test]
fn growth_and_stale_entries_are_named() {
    let size = |lines, characters| Size { lines, characters };
    let check = |table: &str, found: Size, expected: &str| {
        let wrong = judge(table, &BTreeMap::from([("a".to_owned(), found)]));
        match expected {
            "" => assert!(wrong.is_empty(), "{wrong:?}"),
            _ => assert!(wrong.len() == 1 && wrong[0].contains(expected), "{wrong:?}"),
        }
    };
    check("# crate\na 1000 30000 start\n", size(1000, 30_000), "");
    check("a 1000 30000 start", size(975, 29_500), "");
    check("a 1000 30000 start", size(1001, 30_000), "1 lines and 0 characters more");
    check("a 1000 30000 start", size(990, 30_007), "0 lines and 7 characters more");
    check("a 1000 30000 start", size(960, 29_500), "write `a 960 29500 REASON`");
    check("a 1000 30000 start", size(1000, 29_000), "write `a 1000 29000 REASON`");
    check("a 10000 300000 start", size(9_950, 299_000), "");
    check("", size(5, 100), "`a` has no entry: write `a 5 100 REASON`");
    check("a 5 100 start\nb 5 100 start", size(5, 100), "no crate `b`");
    check("a 5 100 start\nc 5 100", size(5, 100), "`c 5 100` is not");
}

#[test]
fn only_code_outside_tests_counts() {
    let dir = tempfile::tempdir().unwrap();
    let lib = "//! Docs.\n\n/* a\n comment */\nfn a() -> &'static str {\n    // why\n    \"two // lines\n    of text\" // end\n}\n\
               const QUOTE: char = '\"';\nconst RAW: &str = r#\"a \" b\"#;\n#[cfg(test)]\nmod tests;\n\
               #[cfg(test)]\nmod own {\n    fn b() {}\n}\nfn c() {}\n";
    fs::write(dir.path().join("lib.rs"), lib).unwrap();
    fs::write(dir.path().join("tests.rs"), "fn t() {}\n").unwrap();
    fs::create_dir(dir.path().join("tests")).unwrap();
    fs::write(dir.path().join("tests/more.rs"), "fn t() {}\n").unwrap();
    let counted = [
        "fn a() -> &'static str {",
        "\"two // lines",
        "of text\" // end",
        "}",
        "const QUOTE: char = '\"';",
        "const RAW: &str = r#\"a \" b\"#;",
        "fn c() {}",
    ];
    let characters = counted.concat().chars().filter(|c| !c.is_whitespace()).count();
    assert_eq!(measured(dir.path()), Size { lines: counted.len(), characters });
}

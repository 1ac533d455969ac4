//! Finds prompt files by path or pattern, opens them, and reports malformed records.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use draftsmith_data::{Malformed, Prompt, Prompts, SplitRange};
use glob::{MatchOptions, Pattern, glob_with};

use crate::watch::Watch;

/// Options that make patterns match as in shells.
const MATCHING: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// Options for reading prompt files.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// The split to read; `None` for all prompts.
    pub split: Option<SplitRange>,
    /// Whether a malformed record is an error; otherwise it is reported and skipped.
    pub is_strict: bool,
    /// Whether to keep token ids of prompts and answers if the file contains them.
    pub keeps_tokens: bool,
}

impl Reading {
    /// Opens a prompt file and iterates over its prompts of all splits.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn open(&self, path: &Path) -> Result<Prompts> {
        let mut prompts = Prompts::open(path)?;
        prompts.keeps_tokens = self.keeps_tokens;
        prompts.skips_malformed = !self.is_strict;
        Ok(prompts)
    }

    /// Returns whether a prompt is in the split.
    pub fn takes(&self, prompt: &Prompt) -> bool {
        self.split.as_ref().is_none_or(|split| split.contains(prompt))
    }
}

/// Lists the files that paths and patterns name. Files that match one pattern are sorted by name.
/// An existing path is never read as a pattern.
///
/// # Errors
/// If a pattern is malformed, matches no file, or goes through a directory that cannot be read.
pub fn files_of<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<Vec<PathBuf>> {
    let files = paths.into_iter().map(|path| files_of_one(path));
    Ok(files.collect::<Result<Vec<_>>>()?.concat())
}

fn files_of_one(path: &Path) -> Result<Vec<PathBuf>> {
    let shown = path.display();
    let text = path.to_str().filter(|text| text.contains(['*', '?', '[']));
    let Some(text) = text.filter(|_| !path.exists()) else { return Ok(vec![path.to_path_buf()]) };
    let found = glob_with(text, MATCHING).with_context(|| {
        format!("`{shown}` is neither a file nor a pattern of file names such as `parts/*.jsonl`")
    })?;
    let found = found.collect::<Result<Vec<_>, _>>();
    let mut files = found.with_context(|| format!("cannot read what `{shown}` matches"))?;
    files.retain(|path| path.is_file());
    ensure!(
        !files.is_empty(),
        "no file matches `{shown}`; hint: `*` matches any part of a name, `**` any directories; \
         `{}` names a file with these characters",
        Pattern::escape(text)
    );
    Ok(files)
}

/// Checks that files can be opened and have different names, with which their row ids begin.
///
/// # Errors
/// If a file cannot be opened, or two files have the same name.
pub fn check_files(paths: &[PathBuf]) -> Result<()> {
    let mut names = BTreeSet::new();
    for path in paths {
        let name = Prompts::open(path)?.source;
        ensure!(
            names.insert(name.clone()),
            "two prompt files are named `{name}`, the second is `{}`; hint: rename one, because rows \
             are named after files",
            path.display()
        );
    }
    Ok(())
}

/// Shows a note with the malformed records that were skipped in a file.
pub fn note_malformed(path: &Path, malformed: &Malformed, watch: &dyn Watch) {
    for (key, num) in &malformed.unrendered {
        let path = path.display();
        watch.note(format!("`{path}`: {num} records have `{key}`, which prompts leave out"));
    }
    if malformed.num_with_media > 0 {
        watch.note(format!(
            "`{}`: {} records have images or other media and are skipped; they would need a server that reads media and \
             gives its answers, and its hidden states for drafters that read them",
            path.display(),
            malformed.num_with_media
        ));
    }
    if malformed.num_records == 0 {
        return;
    }
    malformed.first.iter().for_each(|problem| watch.note(problem.to_string()));
    let (path, num) = (path.display(), malformed.num_records);
    watch.note(format!(
        "`{path}`: {num} malformed record{} skipped; hint: with a recipe, `--strict` fails at the first one",
        if num == 1 { "" } else { "s" }
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_files_in_order_and_existing_paths_are_not_patterns() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let root = dir.path();
        std::fs::create_dir_all(root.join("parts/deep.jsonl")).expect("made");
        for name in
            ["parts/b.jsonl", "parts/a.jsonl", "parts/.hidden.jsonl", "[1].jsonl", "1.jsonl"]
        {
            std::fs::write(root.join(name), "{}").expect("written");
        }
        let names = |patterns: &[&str]| {
            let paths: Vec<PathBuf> = patterns.iter().map(|pattern| root.join(pattern)).collect();
            let files = files_of(&paths).map_err(|error| format!("{error:#}"))?;
            let name =
                |file: &PathBuf| file.strip_prefix(root).expect("in it").display().to_string();
            Ok::<_, String>(files.iter().map(name).collect::<Vec<_>>())
        };
        let found = names(&["parts/*.jsonl", "1.jsonl"]).expect("found");
        assert_eq!(found, ["parts/a.jsonl", "parts/b.jsonl", "1.jsonl"]);
        assert_eq!(names(&["**/a.*"]).expect("found"), ["parts/a.jsonl"]);
        assert_eq!(names(&["[1].jsonl"]).expect("found"), ["[1].jsonl"]);
        assert_eq!(names(&["absent.jsonl"]).expect("no pattern"), ["absent.jsonl"]);
        let none = names(&["parts/*.parquet"]).expect_err("none");
        assert!(none.contains("no file matches `") && none.contains("parts/*.parquet`"), "{none}");
        assert!(names(&["parts/***"]).expect_err("no pattern").contains("neither a file nor"));
    }
}

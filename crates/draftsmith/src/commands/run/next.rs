//! The commands that follow a `run`, ready to paste: check what was trained, try it, and export it.

use std::path::Path;

use crate::recipe::Recipe;

/// The commands for the head and for each adapter of a recipe; empty if it trains neither.
pub(super) fn commands(recipe: &Recipe) -> String {
    let models = &recipe.models;
    let generate = |rest: String| {
        let target = quoted(&models.target);
        format!("draftsmith generate --target {target} {rest} --prompt TEXT")
    };
    let mut lines = Vec::new();
    if let (Some(_), Some(draft)) = (&recipe.head, &models.draft) {
        let head = quoted(&recipe.head_dir());
        lines.push(format!("draftsmith check {head}"));
        lines.push(generate(format!("--draft {} --head {head}", quoted(draft))));
        lines.push(format!("draftsmith export --for transformers {head} exported/draft"));
    }
    for (exit_layer, dir) in recipe.adapter_dirs() {
        let dir = quoted(&dir);
        lines.push(format!("draftsmith check {dir}"));
        lines.push(generate(format!("--adapter {dir}")));
        lines.push(format!("draftsmith export --for draft-model {dir} exported/exit-{exit_layer}"));
    }
    match lines.is_empty() {
        true => String::new(),
        false => format!("\nnext:\n  {}\n", lines.join("\n  ")),
    }
}

/// A path as one word of a POSIX shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./@+:".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_words_of_a_shell() {
        let quoted = |text: &str| quoted(Path::new(text));
        assert_eq!(quoted("checkpoints/tiny/head"), "checkpoints/tiny/head");
        assert_eq!(quoted("my models/it's"), "'my models/it'\\''s'");
    }

    #[test]
    fn a_recipe_that_trains_nothing_has_no_next_command() {
        let read = |text: &str| -> Recipe { toml::from_str(text).expect("a recipe") };
        let models = "name = 'a'\n[models]\ntarget = 't'\ndraft = 'd'\n";
        assert_eq!(commands(&read(models)), "");
        let text = commands(&read(&format!("{models}[head]\n[adapter]\nexit_layer = [1, 2]\n")));
        insta::assert_snapshot!(text, @r#"
        next:
          draftsmith check checkpoints/a/head
          draftsmith generate --target t --draft d --head checkpoints/a/head --prompt TEXT
          draftsmith export --for transformers checkpoints/a/head exported/draft
          draftsmith check checkpoints/a/adapter/exit-1
          draftsmith generate --target t --adapter checkpoints/a/adapter/exit-1 --prompt TEXT
          draftsmith export --for draft-model checkpoints/a/adapter/exit-1 exported/exit-1
          draftsmith check checkpoints/a/adapter/exit-2
          draftsmith generate --target t --adapter checkpoints/a/adapter/exit-2 --prompt TEXT
          draftsmith export --for draft-model checkpoints/a/adapter/exit-2 exported/exit-2
        "#);
    }
}

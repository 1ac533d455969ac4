//! Exports responses and labels in the format of the SpecDec++ authors' data files.
//!
//! A file is a JSON list with one dictionary per response. Its inner lists are strings in Python
//! syntax (`"[1, 2]"`), which the authors' code parses with `literal_eval`. The names of the two
//! log-probability columns contain the sizes of the authors' models.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use draftsmith_data::{
    DraftColumns, Incomplete, Provenance, ResponseRow, TextTokenizer, has_shards, read_dir,
    read_shard,
};
use draftsmith_files::write_whole_with;
use draftsmith_theory::acceptance_prob;
use draftsmith_train::{HeadTraining, TrainingInput};
use serde::Serialize;

use super::{ExportArguments, Written};

/// A response, with the keys of the authors' format in their order.
#[derive(Serialize)]
struct Item<'a> {
    /// Our row id, which the authors' scripts ignore.
    id: &'a str,
    prompt: String,
    continuation: String,
    /// The prompt's token ids.
    prefix: String,
    /// X, the response's tokens.
    tokens: String,
    /// Y, the draft's tokens.
    draft: String,
    /// log q(Y). The key names a 7B draft, but ours may have any size.
    log_p_7b: String,
    /// log p(Y). The key names a 70B target, but ours may have any size.
    log_p_70b: String,
    p_acc: String,
    /// Z, the training input of the first epoch, at the authors' mixing ratio.
    mixture: String,
    /// The labels of Z, with -100 at the target's tokens as in the authors' program.
    labels: String,
}

/// Returns whether the source is built data: a Parquet file, or a directory with shards.
pub(super) fn is_data(source: &Path) -> bool {
    has_shards(source) || source.extension().is_some_and(|extension| extension == "parquet")
}

/// Writes responses and labels for the SpecDec++ authors' scripts.
///
/// # Errors
/// If the data has no labels or another tokenizer, or the file exists or cannot be written.
pub(super) fn specdec_pp(
    ExportArguments { source, out, .. }: &ExportArguments,
    tokenizer: &TextTokenizer,
) -> Result<Written> {
    ensure!(
        !out.exists(),
        "`{}` already exists; hint: give another file, or remove it first",
        out.display()
    );
    let (rows, provenance) = if has_shards(source) {
        let data = read_dir(source, Incomplete::Allowed)?;
        (data.rows, data.provenance)
    } else {
        read_shard(source, None)?
    };
    ensure!(
        tokenizer.hash()? == provenance.tokenizer,
        "the tokenizer of the recipe's target differs from that of the data in `{}`; hint: give \
         the data's recipe with `--recipe FILE`",
        source.display()
    );
    let labelled = rows.iter().map(|row| {
        let draft = row.draft.as_ref().with_context(|| {
            format!(
                "row `{}` of `{}` has no labels; hint: build the data with a draft model in the recipe",
                row.id,
                source.display()
            )
        });
        Ok((row, draft?))
    });
    let labelled: Vec<(&ResponseRow, &DraftColumns)> = labelled.collect::<Result<_>>()?;
    write_whole_with(out, |file| {
        let mut write = |bytes: &[u8]| {
            file.write_all(bytes).with_context(|| format!("cannot write `{}`", out.display()))
        };
        for (nth, (row, draft)) in labelled.iter().enumerate() {
            write(if nth == 0 { b"[\n" } else { b",\n" })?;
            write(&serde_json::to_vec(&item(row, draft, provenance.seed, tokenizer)?)?)?;
        }
        write(b"\n]\n")
    })?;
    Ok(Written {
        what: format!("{} responses with labels for the SpecDec++ authors' scripts", rows.len()),
        ignored: ignored(&provenance),
        commands: Vec::new(),
    })
}

fn item<'a>(
    row: &'a ResponseRow,
    draft: &DraftColumns,
    seed: u64,
    tokenizer: &TextTokenizer,
) -> Result<Item<'a>> {
    let mixing_ratio = HeadTraining::default().mixing_ratio;
    let input = TrainingInput::of(row, usize::MAX, seed, mixing_ratio)?;
    let (mixture, labels) = input.map(|input| (input.token_ids, input.labels)).unwrap_or_default();
    let labels: Vec<f32> = labels.into_iter().map(|label| label.unwrap_or(-100.0)).collect();
    let p_acc = draft.target_log_prob.iter().zip(&draft.draft_log_prob);
    let p_acc: Vec<f32> = p_acc.map(|(p, q)| acceptance_prob(*p, *q)).collect();
    Ok(Item {
        id: &row.id,
        prompt: tokenizer.decode(&row.prompt_ids, true)?,
        continuation: tokenizer.decode(&row.response_ids, true)?,
        prefix: list(&row.prompt_ids),
        tokens: list(&row.response_ids),
        draft: list(&draft.draft_ids),
        log_p_7b: floats(&draft.draft_log_prob),
        log_p_70b: floats(&draft.target_log_prob),
        p_acc: floats(&p_acc),
        mixture: list(&mixture),
        labels: floats(&labels),
    })
}

/// Formats a list in Python syntax.
fn list<T: std::fmt::Display>(values: &[T]) -> String {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    format!("[{}]", values.join(", "))
}

/// Formats floats in the shortest form that parses back exactly. Python has no literal for
/// infinity, so we write a number that is too large for a float.
fn floats(values: &[f32]) -> String {
    let text = |value: &f32| match value {
        value if *value == f32::NEG_INFINITY => "-1e999".to_owned(),
        value => format!("{value:?}"),
    };
    list(&values.iter().map(text).collect::<Vec<_>>())
}

/// Lists the ways in which our data differs from what the authors' scripts assume, one sentence
/// each.
fn ignored(provenance: &Provenance) -> Vec<String> {
    let mut ignored = vec![
        "the prompts' messages: `prompt` is the text of the ids, including the template".to_owned(),
        "overlap, entropies and most probable tokens, which the authors' files lack".to_owned(),
    ];
    if !provenance.is_raw() {
        ignored.push(
            "the sampling settings: these labels are of the distributions that tokens were drawn from, \
             the authors' of the models' distributions at temperature 1"
                .to_owned(),
        );
    }
    ignored
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_follow_python_syntax_and_floats_round_trip() {
        assert_eq!(list(&[1u32, 20, 3]), "[1, 20, 3]");
        assert_eq!(list::<u32>(&[]), "[]");
        let values = [-0.0, 0.1f32, 1e-9, -87.336_55, f32::NEG_INFINITY];
        let text = floats(&values);
        assert_eq!(text, "[-0.0, 0.1, 1e-9, -87.33655, -1e999]");
        let inner = text.trim_matches(['[', ']']);
        let back: Vec<f32> = inner.split(", ").map(|value| value.parse().expect("one")).collect();
        assert_eq!(back, values);
    }
}

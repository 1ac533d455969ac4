//! Responses and labels in the form of the SpecDec++ authors' data files.
//!
//! Theirs is one JSON list with a dictionary a response. Its lists stand in it as text, as Python
//! prints them (`"[1, 2]"`), and their programs read them with `literal_eval`; the two columns of
//! log-probabilities bear the sizes of the models that they used.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    DraftColumns, Incomplete, Provenance, ResponseRow, TextTokenizer, has_shards, read_dir,
    read_shard,
};
use draftsmith_files::write_whole_with;
use draftsmith_theory::acceptance_prob;
use serde::Serialize;

use super::{Export, Written};

/// A response, with the authors' keys in the authors' order.
#[derive(Serialize)]
struct Item<'a> {
    /// Ours: theirs gives items numbers when it evaluates.
    id: &'a str,
    prompt: String,
    continuation: String,
    /// The prompt's ids.
    prefix: String,
    /// X.
    tokens: String,
    /// Y.
    draft: String,
    /// log q(Y), whatever the draft's size.
    log_p_7b: String,
    /// log p(Y), whatever the target's.
    log_p_70b: String,
    p_acc: String,
}

/// Whether responses are to be exported.
pub(super) fn is_data(source: &Path) -> bool {
    has_shards(source) || source.extension().is_some_and(|extension| extension == "parquet")
}

/// Writes responses and labels as the SpecDec++ authors' programs read theirs.
///
/// # Errors
/// If there are no labels, the models' tokenizer is another than the data's, or the file is there or
/// cannot be written.
pub(super) fn specdec_pp(
    Export { source, out, .. }: &Export<'_>,
    tokenizer: &TextTokenizer,
) -> Result<Written> {
    if out.exists() {
        bail!("`{}` is there already; hint: give another file, or remove it first", out.display());
    }
    let (rows, provenance) = if has_shards(source) {
        let data = read_dir(source, Incomplete::Allowed)?;
        (data.rows, data.provenance)
    } else {
        read_shard(source, None)?
    };
    if tokenizer.hash()? != provenance.tokenizer {
        bail!(
            "the recipe's target has another tokenizer than the data in `{}` was built with; hint: \
             give the data's own recipe with `--recipe FILE`",
            source.display()
        );
    }
    let labelled = rows.iter().map(|row| {
        let draft = row.draft.as_ref().with_context(|| {
            format!(
                "row `{}` of `{}` has no labels; hint: build the data with `models.draft`",
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
            write(&serde_json::to_vec(&item(row, draft, tokenizer)?)?)?;
        }
        write(b"\n]\n")
    })?;
    Ok(Written {
        what: format!("{} responses with labels for the SpecDec++ authors' programs", rows.len()),
        ignored: ignored(&provenance),
        commands: Vec::new(),
    })
}

fn item<'a>(
    row: &'a ResponseRow,
    draft: &DraftColumns,
    tokenizer: &TextTokenizer,
) -> Result<Item<'a>> {
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
    })
}

/// As Python prints a list.
fn list<T: std::fmt::Display>(values: &[T]) -> String {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    format!("[{}]", values.join(", "))
}

/// The same of floats, in as few digits as tell them apart. Python's literals have no infinity, but a
/// number that is too large is one.
fn floats(values: &[f32]) -> String {
    let text = |value: &f32| match value {
        value if *value == f32::NEG_INFINITY => "-1e999".to_owned(),
        value => format!("{value:?}"),
    };
    list(&values.iter().map(text).collect::<Vec<_>>())
}

/// What their programs take for granted and these data may not have.
fn ignored(provenance: &Provenance) -> Vec<String> {
    let mut ignored = vec![
        "the prompts' messages: `prompt` is the text of the ids, with its template".to_owned(),
        "overlap, entropies and most probable tokens, which their files do not have".to_owned(),
    ];
    if !provenance.is_raw() {
        ignored.push(
            "how tokens were chosen: labels are of the distributions as served, the authors' of the \
             models' own at temperature 1"
                .to_owned(),
        );
    }
    ignored
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_as_python_prints_them_and_floats_come_back() {
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

//! The split of rows into training and validation.

use std::sync::Arc;

use draftsmith_data::ResponseRow;
use draftsmith_theory::in_validation;

use crate::data::RowCounts;
use crate::error::Result;

/// The training rows and the validation rows, each in their original order.
pub(crate) struct SplitRows<T> {
    pub(crate) training: Vec<Arc<T>>,
    pub(crate) validation: Vec<Arc<T>>,
    pub(crate) num_unusable: usize,
}

impl<T> SplitRows<T> {
    pub(crate) fn counts(&self) -> RowCounts {
        RowCounts {
            num_training: self.training.len(),
            num_validation: self.validation.len(),
            num_unusable: self.num_unusable,
        }
    }

    /// Converts each row with `usable` and splits the results. A row for which it returns `None` is
    /// counted as unusable.
    ///
    /// # Errors
    /// If a row is invalid, or `usable` fails.
    pub(crate) fn new(
        rows: &[ResponseRow],
        validation_fraction: f64,
        usable: impl Fn(&ResponseRow) -> Result<Option<T>>,
    ) -> Result<Self> {
        let mut split = Self { training: Vec::new(), validation: Vec::new(), num_unusable: 0 };
        for row in rows {
            row.validate()?;
            match usable(row)?.map(Arc::new) {
                None => split.num_unusable += 1,
                Some(usable) if is_held_out(row, validation_fraction) => {
                    split.validation.push(usable);
                }
                Some(usable) => split.training.push(usable),
            }
        }
        Ok(split)
    }
}

/// Returns whether a row is held out for validation. The result depends only on the row's
/// conversation, so all turns of a conversation are on the same side of the split.
pub fn is_held_out(row: &ResponseRow, validation_fraction: f64) -> bool {
    in_validation(conversation(row), validation_fraction)
}

/// Returns whether a row is in a part of this size. Each salt gives a part that is independent of the
/// others and of [`is_held_out`].
pub(crate) fn in_part(row: &ResponseRow, share: f64, salt: usize) -> bool {
    in_validation(&format!("{}/{salt}", conversation(row)), share)
}

/// Returns a row's id without its turn: `source#n` for `source#n#turn`. A source's name may contain `#`.
fn conversation(row: &ResponseRow) -> &str {
    let start = match row.id.strip_prefix(&row.source) {
        Some(rest) if rest.starts_with('#') => row.source.len() + 1,
        _ => row.id.find('#').map_or(row.id.len(), |at| at + 1),
    };
    let turn = row.id[start..].find('#').map_or(row.id.len(), |at| start + at);
    &row.id[..turn]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::pair::response_row;

    #[test]
    fn turns_of_a_conversation_are_on_the_same_side() {
        let named = |id: &str, source: &str| {
            let mut row = response_row(id, &[1], &[2], &[3], &[0.5]);
            row.source = source.to_owned();
            row
        };
        for (id, source, expected) in [
            ("set#4", "set", "set#4"),
            ("set#4#1", "set", "set#4"),
            ("a#b#4", "a#b", "a#b#4"),
            ("a#b#4#2", "a#b", "a#b#4"),
            ("other#4#2", "set", "other#4"),
            ("bare", "set", "bare"),
        ] {
            assert_eq!(conversation(&named(id, source)), expected);
        }
        for n in 0..200 {
            let first = is_held_out(&named(&format!("set#{n}"), "set"), 0.3);
            assert_eq!(first, is_held_out(&named(&format!("set#{n}#1"), "set"), 0.3));
        }
    }

    #[test]
    fn invalid_rows_and_unknown_tokens_are_errors_that_name_the_row() {
        let message = |break_it: fn(&mut ResponseRow)| {
            let mut broken = response_row("set#3", &[1], &[2, 3], &[4, 5], &[0.5; 2]);
            break_it(&mut broken);
            let split = SplitRows::new(&[broken], 0.5, |row| Ok(Some(row.check_ids(6)?)));
            split.map(|split| split.counts().num_unusable).map_err(|error| error.to_string())
        };
        assert_eq!(message(|_| ()), Ok(0));
        let check = |break_it: fn(&mut ResponseRow), expected: &[&str]| {
            let message = message(break_it).unwrap_err();
            for part in expected {
                assert!(message.contains(part), "{message}");
            }
        };
        check(|r| r.response_ids[1] = 6, &["`set#3`", "`response_ids`", "token 6", "6 tokens"]);
        check(|r| r.draft.as_mut().unwrap().draft_ids[0] = 6, &["`draft_ids`", "token 6"]);
        check(|r| r.draft.as_mut().unwrap().draft_ids.push(1), &["`set#3`", "`draft_ids`"]);
        check(
            |r| r.draft.as_mut().unwrap().target_log_prob[1] = f32::NAN,
            &["`set#3`", "`target_log_prob` is NaN at 1"],
        );
    }
}

//! One assistant turn as training data. A row holds the target's response, the token that the draft
//! model would have drawn at each position, and the probabilities of both tokens in both models.
//!
//! Each value at position `i` of the response X is conditioned on the prompt and X before `i`
//! (teacher forcing). Log-probabilities are natural logarithms.

use crate::columns::{Cell, Column, ColumnPlace, Held, ValueRange, check_columns, column};
use crate::error::{DataError, Result};

/// The names of a row's optional parts, to which nullable columns belong.
pub(super) const DRAFT: &str = "the draft";
pub(super) const SERVER: &str = "a server";
pub(super) const WEIGHTS: &str = "the target's weights";

/// The columns of the file, in order.
pub(super) static COLUMNS: [Column<ResponseRow>; 17] = [
    column!(Text, id),
    column!(Text, source),
    column!(Ids, prompt_ids),
    column!(Ids, response_ids),
    column!(Floats(LogProb), response_target_log_prob),
    Column::optional(SERVER, column!(Floats(Prob), target_outside_mass)),
    Column::part_of(DRAFT, column!(Floats(LogProb), draft?.response_draft_log_prob)),
    Column::part_of(DRAFT, column!(Ids, draft?.draft_ids)),
    Column::part_of(DRAFT, column!(Floats(FiniteLogProb), draft?.draft_log_prob)),
    Column::part_of(DRAFT, column!(Floats(LogProb), draft?.target_log_prob)),
    Column::part_of(DRAFT, column!(Floats(Prob), draft?.overlap)),
    Column::part_of(DRAFT, column!(Floats(Entropy), draft?.draft_entropy)),
    Column::optional(WEIGHTS, column!(Floats(Entropy), draft?.draft_target_cross_entropy)),
    Column::part_of(DRAFT, column!(Ids, draft?.draft_top_ids)),
    Column::part_of(DRAFT, column!(Ids, draft?.target_top_ids)),
    Column::part_of(DRAFT, column!(Floats(FiniteLogProb), draft?.draft_top_log_prob)),
    Column::new("finish_reason", Cell::Name(|row| row.finish_reason.as_str(), ResponseRow::finish)),
];

/// The number of mantissa bits that stored floats keep.
const STORED_MANTISSA_BITS: u32 = 15;
/// The exponent of the power of two of which stored floats are multiples. It is the spacing of
/// floats from 8 to 16. Logits have this size, so a log-probability has no more precision.
const STORED_EXPONENT: i32 = -20;
/// The number of explicit mantissa bits of an `f32`.
const F32_MANTISSA_BITS: u32 = 23;

/// One response with its labels: a row of `responses-*.parquet`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResponseRow {
    /// The id `source#n`, or `source#n#turn` for a later turn.
    pub id: String,
    /// The name of the prompt set that holds the prompt.
    pub source: String,
    /// The tokens before the response, including the template, the system text and earlier turns.
    pub prompt_ids: Vec<u32>,
    /// The response X, including the end-of-sequence token if there is one.
    pub response_ids: Vec<u32>,
    /// The log-probability log p(Xᵢ) of the target after temperature and filters; may be −∞.
    pub response_target_log_prob: Vec<f32>,
    /// The upper bound, at each position, on the total variation distance between the target's
    /// recorded and true distributions. `None` unless a server returned only its most probable
    /// tokens.
    pub target_outside_mass: Option<Vec<f32>>,
    /// The draft's columns; `None` without a draft.
    pub draft: Option<DraftColumns>,
    /// The reason why the response ends.
    pub finish_reason: FinishReason,
}

/// The draft model's part of a [`ResponseRow`]. Every list has the length of `response_ids`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DraftColumns {
    /// The log-probability log q(Xᵢ) of the draft after temperature and filters; may be −∞.
    pub response_draft_log_prob: Vec<f32>,
    /// Yᵢ: the token that the draft drew at each position.
    pub draft_ids: Vec<u32>,
    /// The log-probability log q(Yᵢ) in the same draft distribution; finite, since Yᵢ was drawn.
    pub draft_log_prob: Vec<f32>,
    /// The log-probability log p(Yᵢ) of the target after temperature and filters; may be −∞.
    pub target_log_prob: Vec<f32>,
    /// The overlap Σ min(p, q) of the distributions after temperature and filters, in [0, 1].
    pub overlap: Vec<f32>,
    /// The entropy of the raw draft distribution (T = 1), in nats.
    pub draft_entropy: Vec<f32>,
    /// The cross-entropy −Σ q log p of the raw draft and the raw target (T = 1), in nats; `None`
    /// for served responses, because it needs all of the target's probabilities.
    pub draft_target_cross_entropy: Option<Vec<f32>>,
    /// The draft's most probable token at each position.
    pub draft_top_ids: Vec<u32>,
    /// The target's most probable token at each position.
    pub target_top_ids: Vec<u32>,
    /// The raw draft's log-probability (T = 1) of `draft_top_ids`.
    pub draft_top_log_prob: Vec<f32>,
}

/// The reason why a response ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token was produced.
    #[default]
    Eos,
    /// A stop string was completed.
    StopString,
    /// The limit of new tokens, or the model's context, was reached.
    Length,
}

impl FinishReason {
    /// Returns the name in files: `eos`, `stop_string` or `length`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::StopString => "stop_string",
            Self::Length => "length",
        }
    }

    /// Parses the name in files; `None` if no reason has this name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Eos, Self::StopString, Self::Length]
            .into_iter()
            .find(|reason| reason.as_str() == text)
    }
}

impl ResponseRow {
    /// Checks that prompt and response are not empty, that every list has the length of
    /// `response_ids`, and that numbers are in range: log-probabilities at most 0 (finite for
    /// tokens that were drawn or are the most probable), overlaps within \[0, 1\], entropies finite
    /// and at least 0. Training needs both prompt and response, because its loss mask is 0 at
    /// prompt tokens and 1 at response tokens.
    ///
    /// # Errors
    /// If a column is invalid. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        if self.response_ids.is_empty() {
            let problem = "is empty: the loss mask would be all 0, with nothing to learn";
            return Err(self.error("response_ids", problem.to_owned()));
        }
        if self.prompt_ids.is_empty() {
            let problem = "is empty: the loss mask would be all 1, with nothing to respond to";
            return Err(self.error("prompt_ids", problem.to_owned()));
        }
        let expected = self.response_ids.len();
        self.check(|column| column.length_problem(self, ("response_ids", expected)))?;
        self.check(|column| column.problem(self, expected))
    }

    /// Checks that every token that a model may read is in a vocabulary of `vocab_size` tokens.
    /// These are the tokens of the prompt, the response and the draft. The target's most probable
    /// tokens are only compared, so they are not checked.
    ///
    /// # Errors
    /// If a column has an unknown token. The error names the first one.
    pub fn check_ids(&self, vocab_size: usize) -> Result<()> {
        self.check(|column| match column.name {
            "target_top_ids" => None,
            _ => column.unknown_id(self, vocab_size),
        })
    }

    /// Checks that no column has a problem.
    fn check(&self, problem: impl Fn(&Column<Self>) -> Option<String>) -> Result<()> {
        check_columns(&COLUMNS, problem).map_err(|(column, problem)| self.error(column, problem))
    }

    fn error(&self, column: &'static str, problem: String) -> DataError {
        DataError::invalid(format!("row `{}`: column `{column}` {problem}", self.id))
    }

    /// Sets the finish reason from its name in files.
    fn finish(&mut self, reason: &str) -> Result<(), String> {
        self.finish_reason = FinishReason::parse(reason)
            .ok_or_else(|| format!("is `{reason}`, it must be `eos`, `stop_string` or `length`"))?;
        Ok(())
    }

    /// Applies [`round_stored`] to every float, so that the row equals the one that is read back.
    pub fn round_stored(&mut self) {
        COLUMNS.iter().for_each(|column| column.map_floats(self, round_stored));
    }
}

/// Rounds to 15 explicit mantissa bits and to a multiple of 2⁻²⁰, ties to even. The error is at
/// most 2⁻¹⁶ (1.5e-5) of the value or, below 2⁻⁵, at most 2⁻²¹ (4.8e-7). Infinities, zeros and NaN
/// are unchanged. Order and sign are kept, so log-probabilities stay at most 0 and overlaps within
/// [0, 1]. Rounding twice equals rounding once.
///
/// The low byte becomes 0. In small values, which are the most frequent, even more bits become 0.
/// Byte-stream-split collects these bytes, and a float takes at most two bytes on disk instead of
/// three.
pub fn round_stored(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    // Below this value, 15 bits of mantissa are finer than multiples of 2⁻²⁰.
    if value.abs() < 2_f32.powi(STORED_EXPONENT + STORED_MANTISSA_BITS as i32) {
        let unit = 2_f32.powi(STORED_EXPONENT);
        // Scaling by a power of two is exact.
        return (value / unit).round_ties_even() * unit;
    }
    let dropped = F32_MANTISSA_BITS - STORED_MANTISSA_BITS;
    let bits = value.to_bits();
    let below_half = (1 << (dropped - 1)) - 1;
    let odd = (bits >> dropped) & 1;
    // A carry out of the mantissa correctly increments the exponent.
    let rounded = (bits + below_half + odd) >> dropped << dropped;
    f32::from_bits(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(length: usize) -> ResponseRow {
        let floats = |value: f32| vec![value; length];
        let log_probs = || floats(-0.123_456_79);
        let ids = || vec![7; length];
        ResponseRow {
            id: "set#0".into(),
            source: "set".into(),
            prompt_ids: vec![1],
            response_ids: ids(),
            response_target_log_prob: log_probs(),
            target_outside_mass: Some(floats(0.25)),
            draft: Some(DraftColumns {
                response_draft_log_prob: log_probs(),
                draft_ids: ids(),
                draft_log_prob: log_probs(),
                target_log_prob: log_probs(),
                overlap: floats(0.123_456_79),
                draft_entropy: floats(0.123_456_79),
                draft_target_cross_entropy: Some(floats(0.123_456_79)),
                draft_top_ids: ids(),
                target_top_ids: ids(),
                draft_top_log_prob: log_probs(),
            }),
            finish_reason: FinishReason::Eos,
        }
    }

    #[test]
    fn validate_names_the_column_that_differs() {
        row(3).validate().unwrap();
        let check = |break_it: fn(&mut ResponseRow), column: &str| {
            let mut broken = row(3);
            break_it(&mut broken);
            let error = broken.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("row `set#0`: column `{column}` has")), "{error}");
        };
        check(
            |r| {
                r.response_target_log_prob.pop();
            },
            "response_target_log_prob",
        );
        check(|r| r.draft.as_mut().unwrap().draft_ids.push(1), "draft_ids");
        check(|r| r.draft.as_mut().unwrap().overlap.clear(), "overlap");
        check(|r| r.draft.as_mut().unwrap().draft_top_log_prob.clear(), "draft_top_log_prob");
    }

    #[test]
    fn rows_without_a_prompt_or_a_response_are_refused() {
        // The loss counts only response tokens.
        let mask = |row: &ResponseRow| {
            let counts = std::iter::repeat_n(false, row.prompt_ids.len());
            counts.chain(row.response_ids.iter().map(|_| true)).collect::<Vec<_>>()
        };
        let check = |row: &ResponseRow, expected: Option<&str>| {
            let error = row.validate().err().map(|error| error.to_string());
            let has_both = [true, false].iter().all(|counts| mask(row).contains(counts));
            assert_eq!(has_both, error.is_none());
            assert_eq!(error.as_deref(), expected);
        };
        check(&row(1), None);
        check(
            &row(0),
            Some(
                "row `set#0`: column `response_ids` is empty: the loss mask would be all 0, with \
                 nothing to learn",
            ),
        );
        let no_prompt = ResponseRow { prompt_ids: Vec::new(), ..row(2) };
        check(
            &no_prompt,
            Some(
                "row `set#0`: column `prompt_ids` is empty: the loss mask would be all 1, with \
                 nothing to respond to",
            ),
        );
    }

    #[test]
    fn validate_names_the_number_that_is_out_of_range() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let check = |column: &str, inside: &[f32], outside: &[f32]| {
            for (values, is_refused) in [(inside, false), (outside, true)] {
                for &value in values {
                    let mut broken = row(3);
                    let column = COLUMNS.iter().find(|known| known.name == column).unwrap();
                    column.map_floats(&mut broken, |_| value);
                    let found = broken.validate().map_err(|error| error.to_string());
                    let column = column.name;
                    let expected =
                        format!("row `set#0`: column `{column}` is {value} at 0, it must");
                    match found {
                        Ok(()) => assert!(!is_refused, "{column}: {value}"),
                        Err(error) => {
                            assert!(is_refused && error.starts_with(&expected), "{error}")
                        }
                    }
                }
            }
        };
        for column in ["response_target_log_prob", "response_draft_log_prob", "target_log_prob"] {
            check(column, &[0.0, -0.0, -88.0, -inf], &[1e-30, inf, nan]);
        }
        for column in ["draft_log_prob", "draft_top_log_prob"] {
            check(column, &[0.0, -88.0], &[1e-30, inf, -inf, nan]);
        }
        check("target_outside_mass", &[0.0, 1.0], &[-1e-30, 1.000_000_1, inf, nan]);
        check("overlap", &[0.0, 1.0], &[-1e-30, 1.000_000_1, inf, nan]);
        for column in ["draft_entropy", "draft_target_cross_entropy"] {
            check(column, &[0.0, 12.0], &[-1e-30, inf, -inf, nan]);
        }
    }

    #[test]
    fn unknown_tokens_are_named() {
        let check = |break_it: fn(&mut ResponseRow), expected: Option<&str>| {
            let mut broken = row(3);
            break_it(&mut broken);
            broken.check_ids(9).unwrap();
            let found = broken.check_ids(8).err().map(|error| error.to_string());
            let message = |column: &str| {
                format!(
                    "row `set#0`: column `{column}` has token 8 at 0, but the model that is to \
                     read it has 8 tokens"
                )
            };
            assert_eq!(found, expected.map(message));
        };
        check(|_| {}, None);
        check(|r| r.prompt_ids[0] = 8, Some("prompt_ids"));
        check(|r| r.response_ids[0] = 8, Some("response_ids"));
        check(|r| r.draft.as_mut().unwrap().draft_ids[0] = 8, Some("draft_ids"));
        check(|r| r.draft.as_mut().unwrap().draft_top_ids[0] = 8, Some("draft_top_ids"));
        check(|r| r.draft.as_mut().unwrap().target_top_ids[0] = 8, None);
    }

    #[test]
    fn rounding_is_near_idempotent_and_monotone() {
        let mut previous = f32::NEG_INFINITY;
        for step in 0..200_000_u32 {
            // Finer steps around 0.
            let value = (-20.0 + step as f32 * 1e-4 + 1.7e-7).powi(3) / 400.0;
            let rounded = round_stored(value);
            // Half a unit in the last kept place: 2^-16 of the value.
            let most = (value.abs() * 2_f32.powi(-16)).max(2_f32.powi(-21));
            assert!((rounded - value).abs() <= most, "{value}");
            assert_eq!((rounded * 2_f32.powi(20)).fract(), 0.0, "{value}");
            assert_eq!(round_stored(rounded), rounded);
            assert_eq!(rounded.to_bits() & 0xff, 0);
            assert!(rounded >= previous && rounded.is_sign_negative() == value.is_sign_negative());
            previous = rounded;
        }
    }

    #[test]
    fn rounding_keeps_special_values() {
        for value in [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(round_stored(value).to_bits(), value.to_bits());
        }
        assert!(round_stored(f32::NAN).is_nan());
        // The carry goes into the exponent.
        assert_eq!(round_stored(1.0 - f32::EPSILON), 1.0);
        // Ties go to even.
        assert_eq!(round_stored(f32::from_bits(0x3f80_0080)), f32::from_bits(0x3f80_0000));
        assert_eq!(round_stored(f32::from_bits(0x3f80_0180)), f32::from_bits(0x3f80_0200));
        let unit = 2_f32.powi(-20);
        assert_eq!([0.5, 1.5, 2.5].map(|times| round_stored(times * unit) / unit), [0.0, 2.0, 2.0]);
        // Below 2^-5 the spacing limits the precision, above it the mantissa.
        for value in [2_f32.powi(-5), 2_f32.powi(-5) - unit, 2_f32.powi(-5) + unit] {
            assert_eq!(round_stored(value + unit / 4.0), value);
        }
    }

    #[test]
    fn row_rounding_reaches_every_float() {
        let mut rounded = row(2);
        rounded.round_stored();
        let expected = round_stored(-0.123_456_79);
        assert_ne!(expected, -0.123_456_79);
        let found = std::cell::RefCell::new(Vec::new());
        for column in &COLUMNS {
            column.map_floats(&mut rounded, |value| {
                found.borrow_mut().push(value);
                value
            });
        }
        let found = found.into_inner();
        assert_eq!(found.len(), 9 * 2, "{found:?}");
        assert!(found.iter().all(|value| -value.abs() == expected || *value == 0.25), "{found:?}");
    }
}

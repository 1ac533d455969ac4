//! One assistant turn as training sees it: the target's response, what the draft would have drawn
//! at each of its positions, and what both models think of either.
//!
//! Every column stands at a position `i` of the response X and is conditioned on the prompt and
//! X before `i` (teacher forcing). Log-probabilities are natural logarithms.

use std::fmt;

use crate::error::DataError;
use crate::values::{Numbers, unknown_id};

/// Mantissa bits that stored floats keep.
const STORED_MANTISSA_BITS: u32 = 15;
/// Stored floats are multiples of 2 to the power of this: the spacing of floats from 8 to 16, as logits
/// are. What a log-probability has behind that is what rounding left of its logits.
const STORED_EXPONENT: i32 = -20;
/// Explicit mantissa bits of an `f32`.
const F32_MANTISSA_BITS: u32 = 23;

/// One response with its labels: a row of `responses-*.parquet`.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseRow {
    /// `source#n`, or `source#n#turn` for a later turn.
    pub id: String,
    /// The prompt set it came from.
    pub source: String,
    /// Everything before the response: template, system text and earlier turns included.
    pub prompt_ids: Vec<u32>,
    /// The response X; the end-of-sequence token included where it was produced.
    pub response_ids: Vec<u32>,
    /// log p(Xᵢ) of the target as served; −∞ allowed.
    pub response_target_log_prob: Vec<f32>,
    /// Of each position, how far the target's probabilities may be from the true ones, in total variation, where a
    /// server gave those of its most probable tokens alone; `None` where all are known.
    pub target_outside_mass: Option<Vec<f32>>,
    /// The draft's columns; `None` where no draft was given.
    pub draft: Option<DraftColumns>,
    /// Why the response ends.
    pub finish_reason: FinishReason,
}

/// The draft's side of a [`ResponseRow`]; every list has the length of `response_ids`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DraftColumns {
    /// log q(Xᵢ) of the draft as served; −∞ allowed.
    pub response_draft_log_prob: Vec<f32>,
    /// Yᵢ: the draft's own token at each position.
    pub draft_ids: Vec<u32>,
    /// log q(Yᵢ) of the draft as served; finite, since Yᵢ was drawn.
    pub draft_log_prob: Vec<f32>,
    /// log p(Yᵢ) of the target as served; −∞ allowed.
    pub target_log_prob: Vec<f32>,
    /// Σ min(p, q) of the distributions as served, in [0, 1].
    pub overlap: Vec<f32>,
    /// Entropy of the raw draft distribution (T = 1), in nats.
    pub draft_entropy: Vec<f32>,
    /// Cross-entropy −Σ q log p of the raw draft against the raw target (T = 1), in nats; `None` where a server
    /// gave the response, since it takes all of the target's probabilities.
    pub draft_target_cross_entropy: Option<Vec<f32>>,
    /// The draft's most probable token.
    pub draft_top_ids: Vec<u32>,
    /// The target's most probable token.
    pub target_top_ids: Vec<u32>,
    /// The raw draft's log-probability (T = 1) of `draft_top_ids`.
    pub draft_top_log_prob: Vec<f32>,
}

/// Why a response ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token was produced.
    Eos,
    /// A stop string was completed.
    StopString,
    /// The limit of new tokens, or the model's context, was reached.
    Length,
}

impl FinishReason {
    /// The text that stands in files: `eos`, `stop_string` or `length`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::StopString => "stop_string",
            Self::Length => "length",
        }
    }

    /// The reason that `text` names, if it names one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Eos, Self::StopString, Self::Length]
            .into_iter()
            .find(|reason| reason.as_str() == text)
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl ResponseRow {
    /// Checks that there is a prompt and a response, so that the row's loss mask, 0 at prompt tokens and 1
    /// at response tokens, is neither all 0, with nothing to learn, nor all 1, with nothing that the
    /// response answers; that every list has the length of `response_ids`, and that numbers are what they
    /// are said to be: log-probabilities at most 0 (finite, where a token was drawn or is the most
    /// probable), overlaps within \[0, 1\], entropies finite and at least 0.
    ///
    /// # Errors
    /// [`DataError::Row`] with the first column that breaks a rule.
    pub fn validate(&self) -> Result<(), DataError> {
        if self.response_ids.is_empty() {
            let problem =
                "is empty: the loss mask would be all 0, with nothing to learn".to_owned();
            return Err(self.error("response_ids", problem));
        }
        if self.prompt_ids.is_empty() {
            let problem =
                "is empty: the loss mask would be all 1, with nothing that is answered".to_owned();
            return Err(self.error("prompt_ids", problem));
        }
        let expected = self.response_ids.len();
        let draft = self.draft.as_ref();
        let lengths = self.numbers().map(|(column, _, values)| (column, values.len()));
        let ids = draft.into_iter().flat_map(DraftColumns::ids);
        let mut lengths = lengths.chain(ids.map(|(column, ids)| (column, ids.len())));
        if let Some((column, found)) = lengths.find(|&(_, found)| found != expected) {
            let problem = format!("has {found} values, `response_ids` has {expected}");
            return Err(self.error(column, problem));
        }
        for (column, numbers, values) in self.numbers() {
            if let Some(problem) = numbers.problem(values) {
                return Err(self.error(column, problem));
            }
        }
        Ok(())
    }

    /// Checks that a model of `vocab_size` tokens knows every token that it may be given: prompt,
    /// response, and the draft's own. The target's most probable ones are only compared.
    ///
    /// # Errors
    /// [`DataError::Row`] with the first column that has another.
    pub fn check_ids(&self, vocab_size: usize) -> Result<(), DataError> {
        let own = [("prompt_ids", &self.prompt_ids), ("response_ids", &self.response_ids)];
        let of_draft = self.draft.iter().flat_map(DraftColumns::ids);
        let of_draft = of_draft.filter(|(column, _)| *column != "target_top_ids");
        for (column, ids) in own.into_iter().chain(of_draft) {
            if let Some(problem) = unknown_id(ids, vocab_size) {
                return Err(self.error(column, problem));
            }
        }
        Ok(())
    }

    /// The lists of numbers that are there, by column.
    fn numbers(&self) -> impl Iterator<Item = (&'static str, Numbers, &Vec<f32>)> {
        let own = ("response_target_log_prob", Numbers::LogProb, &self.response_target_log_prob);
        let masses = self.target_outside_mass.iter();
        let masses = masses.map(|masses| ("target_outside_mass", Numbers::Prob, masses));
        std::iter::once(own).chain(masses).chain(self.draft.iter().flat_map(DraftColumns::numbers))
    }

    fn error(&self, column: &'static str, problem: String) -> DataError {
        DataError::Row { id: self.id.clone(), column, problem }
    }

    /// Applies [`round_stored`] to every float, so that the row in memory is the row that will be
    /// read back, and takes no more room on the disk than it should.
    pub fn round_stored(&mut self) {
        let draft = self.draft.iter_mut().flat_map(DraftColumns::floats_mut);
        let own = [&mut self.response_target_log_prob].into_iter();
        for values in own.chain(&mut self.target_outside_mass).chain(draft) {
            values.iter_mut().for_each(|value| *value = round_stored(*value));
        }
    }
}

impl DraftColumns {
    fn numbers(&self) -> impl Iterator<Item = (&'static str, Numbers, &Vec<f32>)> {
        let cross_entropy = self.draft_target_cross_entropy.iter();
        let cross_entropy =
            cross_entropy.map(|floats| ("draft_target_cross_entropy", Numbers::Entropy, floats));
        let others = [
            ("response_draft_log_prob", Numbers::LogProb, &self.response_draft_log_prob),
            ("draft_log_prob", Numbers::FiniteLogProb, &self.draft_log_prob),
            ("target_log_prob", Numbers::LogProb, &self.target_log_prob),
            ("overlap", Numbers::Prob, &self.overlap),
            ("draft_entropy", Numbers::Entropy, &self.draft_entropy),
            ("draft_top_log_prob", Numbers::FiniteLogProb, &self.draft_top_log_prob),
        ];
        others.into_iter().chain(cross_entropy)
    }

    fn ids(&self) -> [(&'static str, &Vec<u32>); 3] {
        [
            ("draft_ids", &self.draft_ids),
            ("draft_top_ids", &self.draft_top_ids),
            ("target_top_ids", &self.target_top_ids),
        ]
    }

    fn floats_mut(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        let others = [
            &mut self.response_draft_log_prob,
            &mut self.draft_log_prob,
            &mut self.target_log_prob,
            &mut self.overlap,
            &mut self.draft_entropy,
            &mut self.draft_top_log_prob,
        ];
        others.into_iter().chain(&mut self.draft_target_cross_entropy)
    }
}

/// Rounds to the nearest value with 15 explicit mantissa bits that is a multiple of 2⁻²⁰, ties to even:
/// an error of at most 2⁻¹⁶ (1.5e-5) of the value, or of 2⁻²¹ (4.8e-7) where that is more, as it is below
/// 2⁻⁵. Infinities, zeros and NaN stay; order and sign are kept, so a log-probability stays ≤ 0 and an
/// overlap within [0, 1]. Rounding again changes nothing.
///
/// The low byte of the result is zero, which byte-stream-split puts in a plane of its own that
/// compresses to nothing, and of small values, which are most, more: a float then takes two bytes or
/// less instead of three on the disk.
#[must_use]
pub fn round_stored(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    // From here on down, 15 bits of mantissa would be finer than the spacing.
    if value.abs() < 2_f32.powi(STORED_EXPONENT + STORED_MANTISSA_BITS as i32) {
        let unit = 2_f32.powi(STORED_EXPONENT);
        // Powers of two scale without an error.
        return (value / unit).round_ties_even() * unit;
    }
    let dropped = F32_MANTISSA_BITS - STORED_MANTISSA_BITS;
    let bits = value.to_bits();
    let below_half = (1 << (dropped - 1)) - 1;
    let odd = (bits >> dropped) & 1;
    // A carry out of the mantissa rightly raises the exponent; the sign is above it.
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
    fn a_row_is_told_that_has_nothing_to_learn_or_nothing_that_is_answered() {
        // A token of the sequence that training reads counts where it is the response's.
        let mask = |row: &ResponseRow| {
            let counts = std::iter::repeat_n(false, row.prompt_ids.len());
            counts.chain(row.response_ids.iter().map(|_| true)).collect::<Vec<_>>()
        };
        let check = |row: &ResponseRow, expected: Option<&str>| {
            let told = row.validate().err().map(|error| error.to_string());
            let has_both = [true, false].iter().all(|counts| mask(row).contains(counts));
            assert_eq!(has_both, told.is_none());
            assert_eq!(told.as_deref(), expected);
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
                 nothing that is answered",
            ),
        );
    }

    #[test]
    fn validate_names_the_number_that_cannot_be() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let check = |column: &str, may_be: &[f32], may_not_be: &[f32]| {
            for (values, is_refused) in [(may_be, false), (may_not_be, true)] {
                for &value in values {
                    let mut broken = row(3);
                    let names = broken.numbers().map(|(name, _, _)| name).collect::<Vec<_>>();
                    let place = names.iter().position(|name| *name == column).unwrap();
                    let draft = broken.draft.as_mut().unwrap().floats_mut();
                    let mut lists: Vec<&mut Vec<f32>> = vec![&mut broken.response_target_log_prob];
                    lists.extend(&mut broken.target_outside_mass);
                    lists.extend(draft);
                    lists[place][1] = value;
                    let found = broken.validate().map_err(|error| error.to_string());
                    let told = format!("row `set#0`: column `{column}` is {value} at 1, it must");
                    match found {
                        Ok(()) => assert!(!is_refused, "{column}: {value}"),
                        Err(error) => assert!(is_refused && error.starts_with(&told), "{error}"),
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
    fn tokens_that_a_model_does_not_know_are_named() {
        let check = |break_it: fn(&mut ResponseRow), expected: Option<&str>| {
            let mut broken = row(3);
            break_it(&mut broken);
            broken.check_ids(9).unwrap();
            let found = broken.check_ids(8).err().map(|error| error.to_string());
            let told = |column: &str| {
                format!(
                    "row `set#0`: column `{column}` has token 8 at 0, but the model that is to \
                     read it has 8 tokens"
                )
            };
            assert_eq!(found, expected.map(told));
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
            // Ever finer around 0.
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
        // Below 2^-5 the spacing decides, from there on the mantissa.
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
        assert!(rounded.response_target_log_prob.iter().all(|&v| v == expected));
        for values in rounded.draft.as_mut().unwrap().floats_mut() {
            assert!(values.iter().all(|value| -value.abs() == expected), "{values:?}");
        }
    }
}

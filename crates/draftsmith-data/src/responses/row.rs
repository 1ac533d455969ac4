//! One assistant turn as training sees it: the target's response, what the draft would have drawn
//! at each of its positions, and what both models think of either.
//!
//! Every column stands at a position `i` of the response X and is conditioned on the prompt and
//! X before `i` (teacher forcing). Log-probabilities are natural logarithms.

use std::fmt;

use crate::error::DataError;

/// Mantissa bits that stored floats keep.
const STORED_MANTISSA_BITS: u32 = 15;
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
    /// log q(Yᵢ) of the draft as served.
    pub draft_log_prob: Vec<f32>,
    /// log p(Yᵢ) of the target as served; −∞ allowed.
    pub target_log_prob: Vec<f32>,
    /// Σ min(p, q) of the distributions as served, in [0, 1].
    pub overlap: Vec<f32>,
    /// Entropy of the raw draft distribution (T = 1), in nats.
    pub draft_entropy: Vec<f32>,
    /// Cross-entropy −Σ q log p of the raw draft against the raw target (T = 1), in nats.
    pub draft_target_cross_entropy: Vec<f32>,
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
    /// The limit of new tokens, or the model's context, was reached.
    Length,
}

impl FinishReason {
    /// The text that stands in files: `eos` or `length`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::Length => "length",
        }
    }

    /// The reason that `text` names, if it names one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Eos, Self::Length].into_iter().find(|reason| reason.as_str() == text)
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl ResponseRow {
    /// Checks that every list has the length of `response_ids`.
    ///
    /// # Errors
    /// [`DataError::Row`] with the first column that has another length.
    pub fn validate(&self) -> Result<(), DataError> {
        let expected = self.response_ids.len();
        let mut lengths = vec![("response_target_log_prob", self.response_target_log_prob.len())];
        if let Some(draft) = &self.draft {
            lengths.extend(draft.lengths());
        }
        match lengths.into_iter().find(|&(_, found)| found != expected) {
            None => Ok(()),
            Some((column, found)) => Err(DataError::Row {
                id: self.id.clone(),
                column,
                problem: format!("has {found} values, `response_ids` has {expected}"),
            }),
        }
    }

    /// Applies [`round_stored`] to every float, so that the row in memory is the row that will be
    /// read back, and takes no more room on the disk than it should.
    pub fn round_stored(&mut self) {
        let draft = self.draft.iter_mut().flat_map(DraftColumns::floats_mut);
        for values in std::iter::once(&mut self.response_target_log_prob).chain(draft) {
            values.iter_mut().for_each(|value| *value = round_stored(*value));
        }
    }
}

impl DraftColumns {
    fn lengths(&self) -> [(&'static str, usize); 10] {
        [
            ("response_draft_log_prob", self.response_draft_log_prob.len()),
            ("draft_ids", self.draft_ids.len()),
            ("draft_log_prob", self.draft_log_prob.len()),
            ("target_log_prob", self.target_log_prob.len()),
            ("overlap", self.overlap.len()),
            ("draft_entropy", self.draft_entropy.len()),
            ("draft_target_cross_entropy", self.draft_target_cross_entropy.len()),
            ("draft_top_ids", self.draft_top_ids.len()),
            ("target_top_ids", self.target_top_ids.len()),
            ("draft_top_log_prob", self.draft_top_log_prob.len()),
        ]
    }

    fn floats_mut(&mut self) -> [&mut Vec<f32>; 7] {
        [
            &mut self.response_draft_log_prob,
            &mut self.draft_log_prob,
            &mut self.target_log_prob,
            &mut self.overlap,
            &mut self.draft_entropy,
            &mut self.draft_target_cross_entropy,
            &mut self.draft_top_log_prob,
        ]
    }
}

/// Rounds to the nearest value with 15 explicit mantissa bits, ties to even: a relative error of at
/// most 2⁻¹⁶, about 1.5e-5. Infinities, zeros and NaN stay; order and sign are kept, so a
/// log-probability stays ≤ 0 and an overlap within [0, 1]. Rounding again changes nothing.
///
/// The low byte of the result is zero, which byte-stream-split puts in a plane of its own that
/// compresses to nothing: a float then takes about two bytes instead of three on the disk.
#[must_use]
pub fn round_stored(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
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
        let floats = || vec![-0.123_456_79; length];
        let ids = || vec![7; length];
        ResponseRow {
            id: "set#0".into(),
            source: "set".into(),
            prompt_ids: vec![1],
            response_ids: ids(),
            response_target_log_prob: floats(),
            draft: Some(DraftColumns {
                response_draft_log_prob: floats(),
                draft_ids: ids(),
                draft_log_prob: floats(),
                target_log_prob: floats(),
                overlap: floats(),
                draft_entropy: floats(),
                draft_target_cross_entropy: floats(),
                draft_top_ids: ids(),
                target_top_ids: ids(),
                draft_top_log_prob: floats(),
            }),
            finish_reason: FinishReason::Eos,
        }
    }

    #[test]
    fn validate_names_the_column_that_differs() {
        row(0).validate().unwrap();
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
    fn rounding_is_near_idempotent_and_monotone() {
        let mut previous = f32::NEG_INFINITY;
        for step in 0..200_000_u32 {
            let value = -20.0 + step as f32 * 1e-4 + 1.7e-7;
            let rounded = round_stored(value);
            // Half a unit in the last kept place: 2^-16 of the value.
            assert!((rounded - value).abs() <= value.abs() * 2_f32.powi(-16), "{value}");
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
    }

    #[test]
    fn row_rounding_reaches_every_float() {
        let mut rounded = row(2);
        rounded.round_stored();
        let expected = round_stored(-0.123_456_79);
        assert_ne!(expected, -0.123_456_79);
        assert!(rounded.response_target_log_prob.iter().all(|&v| v == expected));
        for values in rounded.draft.as_mut().unwrap().floats_mut() {
            assert_eq!(*values, [expected; 2]);
        }
    }
}

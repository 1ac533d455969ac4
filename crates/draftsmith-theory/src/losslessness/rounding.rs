//! Rounding errors of logits, and the greedy mismatches that they excuse.
//!
//! A speculative target reads several tokens in a forward; plain decoding reads one. Both sum the
//! same products, but kernels sum them in an order that depends on the number of rows, so the sums
//! differ in the last place. In f32 this affects a choice only between logits that are almost
//! equal. In bf16, with 8 significant bits, logits between 16 and 32 are multiples of 1/8, and for
//! a few tokens in a hundred the two largest are equal or adjacent. Either choice is then a correct
//! one in that type.
//!
//! So a greedy mismatch is forgiven if both tokens' logits are almost equal to the largest: within
//! a relative 1e-5 in f32, or within 2 units in the last place in bf16. After a mismatch the texts
//! differ, so nothing after the first mismatch is compared. Forgiven mismatches are counted
//! wherever losslessness is reported, and speculative output is compared only with plain decoding
//! of the same type.

use serde::{Deserialize, Serialize};

/// The number type that a model computes in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// The 32-bit type, with 24 significant bits.
    #[default]
    F32,
    /// The 16-bit type bfloat16, with 8 significant bits.
    Bf16,
}

/// The maximum relative difference of two f32 logits in a tie: about 80 units in the last place.
/// The sums of a deep model differ by as much if the order of summation changes.
const F32_TIE: f32 = 1e-5;

/// The maximum difference of two bf16 logits in a tie, in units in the last place of the larger.
///
/// Rounding the LM head's product moves a logit by at most half a unit, and so the gap between two
/// logits by at most one unit. Rounding in the hidden states moves the gap by about as much again.
///
/// The value was measured with SmolLM2-135M (30 layers) at 280 tokens of two texts, by comparing
/// forwards of one row with forwards of 2, 5, 9 and 140 rows. Logits moved by up to 5 units, but
/// the gap between the two largest moved by at most 2, and in half of the cases not at all. The
/// argmax changed three times, at gaps of 0 or 1. The bench `gpu` repeats the measurement on any
/// device (`--rounding`).
const BF16_UNITS: f32 = 2.0;

impl Rounding {
    /// Returns whether this is f32, the default, which is omitted in files.
    pub fn is_f32(&self) -> bool {
        *self == Self::F32
    }

    /// Returns the type's name in files: `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the maximum gap of two tied logits, if `logit` is the one of larger magnitude.
    pub fn allowance(self, logit: f32) -> f32 {
        match self {
            Self::F32 => F32_TIE * logit.abs(),
            Self::Bf16 => BF16_UNITS * bf16_unit(logit),
        }
    }

    /// Describes [`Rounding::allowance`] in words: `1e-5` or `2 units in the last place of bf16`.
    pub fn tie_text(self) -> String {
        match self {
            Self::F32 => format!("{F32_TIE:e}"),
            Self::Bf16 => format!("{BF16_UNITS} units in the last place of bf16"),
        }
    }

    /// Returns whether greedy decoding may choose either of two tokens, because both logits equal
    /// the largest up to rounding.
    ///
    /// # Panics
    /// If a token is outside the vocabulary.
    pub fn is_tie(self, logits: &[f32], one: u32, other: u32) -> bool {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let least = logits[one as usize].min(logits[other as usize]);
        let gap = greatest - least;
        gap.is_finite() && gap <= self.allowance(greatest.abs().max(least.abs()))
    }
}

/// Returns the distance between adjacent bf16 numbers of this magnitude: 2⁻⁷ times the power of two
/// below it.
fn bf16_unit(logit: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let magnitude = logit.abs().max(f32::MIN_POSITIVE);
    f32::from_bits(magnitude.to_bits() & EXPONENT) / 128.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_units_are_the_distances_of_adjacent_numbers() {
        for (logit, unit) in [
            (1.0, 1.0 / 128.0),
            (1.99, 1.0 / 128.0),
            (-2.0, 1.0 / 64.0),
            (17.3, 0.125),
            (-31.9, 0.125),
            (32.0, 0.25),
            (0.75, 1.0 / 256.0),
        ] {
            assert_eq!(bf16_unit(logit), unit, "{logit}");
        }
        // Tiny but positive.
        assert!(bf16_unit(0.0) > 0.0 && bf16_unit(0.0) < 1e-38);
    }

    #[test]
    fn a_tie_needs_both_tokens_near_the_largest_logit() {
        use Rounding::{Bf16, F32};
        // The unit here is 1/8, so a quarter is two units.
        let near = [20.0, 19.75, 19.625, -40.0];
        for (rounding, logits, tokens, expected) in [
            (Bf16, &near[..], (0, 1), true),
            (Bf16, &near, (1, 0), true),
            (Bf16, &near, (0, 2), false),
            // Neither is the largest, and one of them is too far from it.
            (Bf16, &near, (1, 2), false),
            (Bf16, &near, (0, 3), false),
            // Both are close to a third, larger one.
            (Bf16, &[20.0, 19.875, 19.75], (1, 2), true),
            (F32, &near, (0, 1), false),
            (F32, &[20.0, 20.0], (0, 1), true),
            (F32, &[20.0, 20.000_1], (0, 1), true),
            (F32, &[20.0, 20.001], (0, 1), false),
            // The larger magnitude counts, even if signs differ.
            (Bf16, &[-16.0, -16.25], (0, 1), true),
            (Bf16, &[-16.0, -16.375], (0, 1), false),
            (Bf16, &[0.01, -0.01], (0, 1), false),
            (F32, &[0.0, 0.0], (0, 1), true),
            (Bf16, &[0.0, 0.0], (0, 1), true),
            (Bf16, &[3.0, f32::NEG_INFINITY], (0, 1), false),
        ] {
            let (one, other) = tokens;
            let found = rounding.is_tie(logits, one, other);
            assert_eq!(found, expected, "{rounding:?} of {logits:?}, tokens {tokens:?}");
        }
    }

    #[test]
    fn ties_in_f32_are_relative() {
        for scale in [1e-3_f32, 1.0, 100.0] {
            let logits = [scale, scale * (1.0 - 0.9e-5), scale * (1.0 - 1.2e-5)];
            assert!(Rounding::F32.is_tie(&logits, 0, 1), "{scale}");
            assert!(!Rounding::F32.is_tie(&logits, 0, 2), "{scale}");
        }
    }
}

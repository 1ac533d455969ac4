//! How far rounding may carry logits, and with it a greedy choice.
//!
//! A speculative target reads several tokens in a forward where plain decoding reads one. Both sum
//! the same products, but kernels sum in an order of their own for each number of rows, and sums
//! that are rounded differ in their last place. In f32, whose places are many, no choice depends on
//! it but between logits that are all but equal. In bf16, with its 8 significant bits, logits of 16
//! to 32 are multiples of 1/8, and the two best are equal, or neighbours, at a few places of a
//! hundred. There either choice is the target's own, in the type that it computes in.
//!
//! So a greedy mismatch is forgiven where both tokens' logits are that near to the greatest, and
//! counts everywhere else. Texts that parted lawfully say different things from there on: nothing
//! behind the first mismatch is compared.

/// The type whose rounding logits bear: that which their model computed in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Rounding {
    /// 24 significant bits.
    #[default]
    F32,
    /// 8 significant bits.
    Bf16,
}

/// How near two f32 logits must be for a tie, relative to the larger: some 80 units in the last
/// place, what the sums of a deep model's layers differ by in any order.
const F32_TIE: f32 = 1e-5;

/// How near two bf16 logits must be for a tie, in units in the last place of the larger.
///
/// Rounding the LM head's product moves a logit by half a unit at most, and so the gap of two by one;
/// hidden states that were rounded otherwise on their way move it as far again. Where one forward
/// puts the one token first and another forward the other, the gap in any forward is then no more
/// than these two units.
///
/// So it was measured with SmolLM2-135M, 30 layers, at 280 places of two texts, forwards of one row
/// against those of 2, 5, 9 and 140: each logit moved by up to 5 units, but the gap of the two best
/// by 2 at most, half of the time not at all, and the choice changed three times, where the gap was
/// 0 or 1. The bench `gpu` measures it on any device (`--rounding`).
const BF16_UNITS: f32 = 2.0;

impl Rounding {
    /// How far from the greatest logit another may be, when the larger in magnitude of both is
    /// `logit`, to have been the greatest in another forward.
    pub fn allowance(self, logit: f32) -> f32 {
        match self {
            Self::F32 => F32_TIE * logit.abs(),
            Self::Bf16 => BF16_UNITS * bf16_unit(logit),
        }
    }

    /// [`Rounding::allowance`] in words: `1e-5` or `2 units in the last place of bf16`.
    pub fn tie_text(self) -> String {
        match self {
            Self::F32 => format!("{F32_TIE:e}"),
            Self::Bf16 => format!("{BF16_UNITS} units in the last place of bf16"),
        }
    }

    /// Whether greedy decoding may take either of two tokens: both logits are the greatest but for
    /// rounding.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn is_tie(self, logits: &[f32], one: u32, other: u32) -> bool {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let least = logits[one as usize].min(logits[other as usize]);
        let gap = greatest - least;
        gap.is_finite() && gap <= self.allowance(greatest.abs().max(least.abs()))
    }
}

/// The distance between neighbouring bf16 numbers of this magnitude: 2⁻⁷ of the power of two below
/// it.
fn bf16_unit(logit: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let magnitude = logit.abs().max(f32::MIN_POSITIVE);
    f32::from_bits(magnitude.to_bits() & EXPONENT) / 128.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_units_are_the_distances_of_neighbours() {
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
        // Of no size at all: something, and next to nothing.
        assert!(bf16_unit(0.0) > 0.0 && bf16_unit(0.0) < 1e-38);
    }

    #[test]
    fn a_tie_is_of_both_tokens_with_the_greatest_logit() {
        use Rounding::{Bf16, F32};
        // The unit is 1/8 there, so that logits a quarter apart are two units apart.
        let near = [20.0, 19.75, 19.625, -40.0];
        for (rounding, logits, tokens, expected) in [
            (Bf16, &near[..], (0, 1), true),
            (Bf16, &near, (1, 0), true),
            (Bf16, &near, (0, 2), false),
            // Neither is the greatest, and one of them is too far from it.
            (Bf16, &near, (1, 2), false),
            (Bf16, &near, (0, 3), false),
            // Both are near enough to a third, which rounding has put before them.
            (Bf16, &[20.0, 19.875, 19.75], (1, 2), true),
            (F32, &near, (0, 1), false),
            (F32, &[20.0, 20.0], (0, 1), true),
            (F32, &[20.0, 20.000_1], (0, 1), true),
            (F32, &[20.0, 20.001], (0, 1), false),
            // The magnitude of the larger counts, where signs differ too.
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

    /// In f32 the tie is what it was before there was another type: 1e-5 of the larger magnitude.
    #[test]
    fn ties_in_f32_are_relative() {
        for scale in [1e-3_f32, 1.0, 100.0] {
            let logits = [scale, scale * (1.0 - 0.9e-5), scale * (1.0 - 1.2e-5)];
            assert!(Rounding::F32.is_tie(&logits, 0, 1), "{scale}");
            assert!(!Rounding::F32.is_tie(&logits, 0, 2), "{scale}");
        }
    }
}

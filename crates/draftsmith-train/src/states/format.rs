//! The number formats of stored hidden states.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The number format of stored hidden states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FeatureFormat {
    /// The half-precision float: 11 significant bits, for magnitudes up to 65,504.
    #[default]
    F16,
    /// The format bfloat16: 8 significant bits, for magnitudes of any size.
    Bf16,
    /// 8-bit integers. Each token has a scale that maps its largest absolute value to 127.
    Int8,
}

/// The size of a token's scale, in bytes.
const SCALE: usize = 4;
const LARGEST: f32 = 127.0;

impl FeatureFormat {
    /// Returns the largest number that the format can represent.
    pub fn largest(self) -> f32 {
        match self {
            Self::F16 => f16::MAX.to_f32(),
            Self::Bf16 | Self::Int8 => bf16::MAX.to_f32(),
        }
    }

    /// Returns the size of one token's state of `width` numbers, in bytes.
    pub fn bytes_per_state(self, width: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2 * width,
            Self::Int8 => SCALE + width,
        }
    }

    /// Encodes states of `width` numbers each. Returns `None` if a number is not finite or is too
    /// large for the format.
    pub(crate) fn encode(self, states: &[f32], width: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(states.len() / width * self.bytes_per_state(width));
        match self {
            Self::F16 => {
                let mut halves = vec![f16::ZERO; states.len()];
                halves.convert_from_f32_slice(states);
                for half in halves {
                    if !half.is_finite() {
                        return None;
                    }
                    bytes.extend_from_slice(&half.to_le_bytes());
                }
            }
            Self::Bf16 => {
                for value in states {
                    let rounded = bf16::from_f32(*value);
                    if !rounded.is_finite() {
                        return None;
                    }
                    bytes.extend_from_slice(&rounded.to_le_bytes());
                }
            }
            Self::Int8 => {
                for state in states.chunks_exact(width) {
                    let largest = state.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                    if state.iter().any(|x| !x.is_finite()) {
                        return None;
                    }
                    let scale = largest / LARGEST;
                    bytes.extend_from_slice(&scale.to_le_bytes());
                    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    // The inverse of a tiny scale is infinite; such numbers round to 0.
                    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
                    let rounded = |x: &f32| (x * inverse).round().clamp(-LARGEST, LARGEST) as i8;
                    bytes.extend(state.iter().map(|x| rounded(x) as u8));
                }
            }
        }
        Some(bytes)
    }

    /// Decodes states of `width` numbers each.
    pub(crate) fn decode(self, bytes: &[u8], width: usize) -> Vec<f32> {
        match self {
            Self::F16 => {
                let (halves, _) = bytes.as_chunks::<2>();
                let halves: Vec<f16> =
                    halves.iter().map(|half| f16::from_le_bytes(*half)).collect();
                let mut states = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut states);
                states
            }
            Self::Bf16 => {
                let (rounded, _) = bytes.as_chunks::<2>();
                rounded.iter().map(|value| bf16::from_le_bytes(*value).to_f32()).collect()
            }
            Self::Int8 => {
                let mut states = Vec::with_capacity(bytes.len());
                for state in bytes.chunks_exact(SCALE + width) {
                    let (scale, numbers) = state.split_at(SCALE);
                    let scale = f32::from_le_bytes(*scale.first_chunk().expect("there are four"));
                    states.extend(numbers.iter().map(|x| f32::from(*x as i8) * scale));
                }
                states
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_states_differ_only_by_rounding() {
        let width = 5;
        let states =
            [0.1_f32, -3.0, 7.25, 1e-3, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 40.0, -6e4, 3e4, 1.0, -2.0];
        for (format, bytes) in
            [(FeatureFormat::F16, 30), (FeatureFormat::Bf16, 30), (FeatureFormat::Int8, 27)]
        {
            let encoded = format.encode(&states, width).expect("it fits");
            assert_eq!(encoded.len(), bytes);
            let found = format.decode(&encoded, width);
            for (found, expected) in found.chunks(width).zip(states.chunks(width)) {
                let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                for (found, expected) in found.iter().zip(expected) {
                    // Half a step: 11 bits of the number, or 1/127 of the largest one.
                    let bound = match format {
                        FeatureFormat::F16 => expected.abs() / 2048.0 + 3e-8,
                        FeatureFormat::Bf16 => expected.abs() / 256.0,
                        FeatureFormat::Int8 => largest / 254.0 * 1.001,
                    };
                    assert!((found - expected).abs() <= bound, "{format:?} {found} {expected}");
                }
            }
            // A second round trip changes nothing.
            let again = format.decode(&format.encode(&found, width).expect("fits"), width);
            let is_close = |(one, other): (&f32, &f32)| (one - other).abs() <= 1e-6 * one.abs();
            assert!(found.iter().zip(&again).all(is_close));
        }
    }

    #[test]
    fn numbers_outside_the_format_are_refused() {
        for bad in [f32::NAN, f32::INFINITY, 7e4] {
            assert_eq!(FeatureFormat::F16.encode(&[1.0, bad], 2), None, "{bad}");
            let is_large = bad.is_finite();
            assert_eq!(FeatureFormat::Bf16.encode(&[1.0, bad], 2).is_some(), is_large, "{bad}");
        }
        assert_eq!(FeatureFormat::Int8.encode(&[1.0, f32::NAN], 2), None);
        assert!(FeatureFormat::Int8.encode(&[1.0, 7e4], 2).is_some());
        let tiny = FeatureFormat::Int8.encode(&[f32::MIN_POSITIVE, 0.0], 2).expect("it fits");
        assert!(FeatureFormat::Int8.decode(&tiny, 2).iter().all(|x| x.is_finite()));
    }
}

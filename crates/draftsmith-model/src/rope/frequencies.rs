//! The rotary frequency of each pair of channels, from `rope_theta` and the scaling.
//!
//! transformers computes frequencies in f32, mostly as `1 / theta^(2i / width)`. We compute in f64
//! and round once, which differs by at most one unit in the last place.

use crate::spec::{RopeConfig, RopeScaling};

/// Computes the angle in radians per position for each pair of the `width` rotated channels, and
/// the factor of cosines and sines.
pub(super) fn inverse_frequencies(config: &RopeConfig, width: usize) -> (Vec<f64>, f64) {
    let exponent = |pair: usize| 2.0 * pair as f64 / width as f64;
    let base = (0..width / 2).map(|pair| config.theta.powf(-exponent(pair)));
    match &config.scaling {
        // For dynamic scaling, the base grows only beyond the context.
        RopeScaling::None | RopeScaling::Dynamic { .. } => (base.collect(), 1.0),
        RopeScaling::Linear { factor } => (base.map(|f| f / factor).collect(), 1.0),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => {
            let stretched = |frequency: f64| {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                if wavelength > original / low_freq_factor {
                    return frequency / factor;
                }
                if wavelength < original / high_freq_factor {
                    return frequency;
                }
                let smooth = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            };
            (base.map(stretched).collect(), 1.0)
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
            original_max_position_embeddings: original,
        } => {
            // Finds the channel with this number of turns within the pre-training context.
            let channel_of = |turns: f64| {
                width as f64 * (original / (turns * 2.0 * std::f64::consts::PI)).ln()
                    / (2.0 * config.theta.ln())
            };
            let (mut low, mut high) = (channel_of(*beta_fast), channel_of(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(width as f64 - 1.0));
            if low == high {
                // transformers avoids a division by zero this way.
                high += 0.001;
            }
            let stretched = |(pair, frequency): (usize, f64)| {
                let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * divided + frequency * (1.0 - divided)
            };
            (base.enumerate().map(stretched).collect(), *attention_factor)
        }
        RopeScaling::LongRope { short_factor, attention_factor, .. } => {
            let divided = base.zip(short_factor).map(|(frequency, factor)| frequency / factor);
            (divided.collect(), *attention_factor)
        }
    }
}

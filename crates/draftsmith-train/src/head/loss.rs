//! The loss of SpecDec++: binary cross-entropy with soft labels and a weight for rejection.

use burn::tensor::{Tensor, activation::log_sigmoid};

/// [Σ w_rej (1 − y)(−log P(reject)) + y (−log P(accept))] / [w_rej Σ (1 − y) + Σ y] over the labels
/// of one batch, as in the authors' code (the paper prints the numerator). Nats.
///
/// The head's softmax over two logits equals a sigmoid of their difference.
///
/// # Shapes
/// - logit: `[labels]`, the logit of acceptance minus that of rejection; at least one
/// - labels: `[labels]`, acceptance probabilities; 0 for padding
/// - is_label: `[labels]`, 1 for a label, 0 for padding; `None` without padding
/// - output: `[1]`
pub(crate) fn weighted_bce(
    logit: Tensor<1>,
    labels: Tensor<1>,
    is_label: Option<Tensor<1>>,
    rejection_weight: f64,
) -> Tensor<1> {
    let mut rejected = (labels.clone().neg() + 1.0) * rejection_weight;
    if let Some(is_label) = is_label {
        rejected = rejected * is_label;
    }
    let log_likelihood =
        log_sigmoid(logit.clone()) * labels.clone() + log_sigmoid(logit.neg()) * rejected.clone();
    log_likelihood.sum().neg() / (rejected + labels).sum()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn loss(logits: &[f32], labels: &[f32], weight: f64) -> f32 {
        let device = Device::flex();
        let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, &device);
        weighted_bce(tensor(logits), tensor(labels), None, weight).into_scalar()
    }

    #[track_caller]
    fn close(found: f32, expected: f64) {
        // A few f32 roundings of numbers of this size.
        let off = (f64::from(found) - expected).abs();
        assert!(off < 1e-6 * expected.abs().max(1.0), "{found} != {expected}");
    }

    #[test]
    fn the_loss_equals_a_hand_computed_one() {
        // P(accept) is ½ at logit 0 and ¾ at ln 3; w = 6.
        // Row 1, y = 1: 1 · ln 2, weight 1. Row 2, y = 0: 6 · ln 4, weight 6.
        // Row 3, y = ¼ at ln 3: 6 · ¾ · ln 4 + ¼ · ln (4/3), weight 4.75.
        let ln3 = 3_f64.ln();
        let numerator =
            2_f64.ln() + 6.0 * 4_f64.ln() + 4.5 * 4_f64.ln() + 0.25 * (4.0_f64 / 3.0).ln();
        let denominator = 1.0 + 6.0 + 4.5 + 0.25;
        close(
            loss(&[0.0, ln3 as f32, ln3 as f32], &[1.0, 0.0, 0.25], 6.0),
            numerator / denominator,
        );
    }

    #[test]
    fn with_weight_1_the_loss_is_the_mean_cross_entropy() {
        let rows: [(f64, f64); 3] = [(0.3, 0.2), (-1.0, 0.9), (2.0, 0.5)];
        let mean = rows.iter().map(|(z, y)| {
            let accept = 1.0 / (1.0 + (-z).exp());
            -(y * accept.ln() + (1.0 - y) * (1.0 - accept).ln())
        });
        close(loss(&[0.3, -1.0, 2.0], &[0.2, 0.9, 0.5], 1.0), mean.sum::<f64>() / 3.0);
    }

    #[test]
    fn a_single_label_is_normalised_by_its_weight() {
        for weight in [1.0, 6.0, 12.0] {
            close(loss(&[0.0], &[0.0], weight), 2_f64.ln());
            close(loss(&[0.0], &[1.0], weight), 2_f64.ln());
        }
    }

    #[test]
    fn certain_wrong_predictions_have_a_finite_loss() {
        close(loss(&[200.0, -200.0], &[0.0, 1.0], 1.0), 200.0);
        close(loss(&[200.0, -200.0], &[1.0, 0.0], 1.0), 0.0);
    }

    #[test]
    fn the_gradient_is_the_weighted_difference() {
        // d loss / d z = [(w (1 − y) + y) σ(z) − y] / Σ weights.
        let device = Device::flex().autodiff();
        let (z, y, weight) = ([0.4_f64, -1.5, 3.0], [0.1_f64, 0.7, 1.0], 6.0);
        let logit = Tensor::<1>::from_floats(z.map(|v| v as f32), &device).require_grad();
        let labels = Tensor::<1>::from_floats(y.map(|v| v as f32), &Device::flex());
        let grads = weighted_bce(logit.clone(), labels, None, weight).backward();
        let found: Vec<f32> = logit.grad(&grads).unwrap().into_data().try_into_vec().unwrap();
        let weights: Vec<f64> = y.iter().map(|y| weight * (1.0 - y) + y).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..3 {
            let sigmoid = 1.0 / (1.0 + (-z[i]).exp());
            close(found[i], (weights[i] * sigmoid - y[i]) / total);
        }
    }
}

//! Attention over whole sequences, with a draft beginning at each position (EAGLE-3's training-time test, Li et
//! al. 2025, section 3.2).
//!
//! Step k, from 0, reads at position q what decoding reads there in a round that began k positions before: the
//! keys of step 0 up to position q − k, those of step i at position q − k + i for each i between, and its own.

use burn::tensor::{FloatDType, Tensor, activation::softmax};

use super::{Attention, AttentionForm, Positions, View, joined, mask_of, project};
use crate::rope::Reach;

/// Keys and values of the steps so far, `[batch, kv_heads, seq, head_dim]` each.
pub(crate) type StepKeys = Vec<[Tensor<4>; 2]>;

impl Attention {
    /// The next step, whose keys and values it adds to `steps`.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden · num_read]`, normed
    /// - output: `[batch, seq, hidden]`
    pub(crate) fn forward_step(
        &self,
        x: Tensor<3>,
        (reach, positions): (&Reach, &Positions),
        steps: &mut StepKeys,
    ) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let AttentionForm { num_heads, num_kv_heads, head_dim, scale, .. } = self.form;
        let View { rope, mask, is_fused } = &positions.views[self.form.reach];
        let q = self.normed(0, self.heads(&self.query, num_heads, x.clone()));
        let q = rope.rotate(q, scale).swap_dims(1, 2);
        let (dtype, device) = (FloatDType::from(q.dtype()), q.device());
        let new = self.keys_and_values(x, rope);
        steps.push(new.map(|x| x.swap_dims(1, 2)));
        let lag = steps.len() - 1;
        let groups = num_heads / num_kv_heads;
        let rows = groups * seq;
        let by_group = q.clone().reshape([batch, num_kv_heads, groups, seq, head_dim]);
        let q = q.reshape([batch, num_kv_heads, rows, head_dim]);
        let [first_keys, first_values] = steps[0].clone();
        let mut seen = q.matmul(first_keys.swap_dims(2, 3));
        let mask = match lag {
            0 if !is_fused => mask.clone(),
            _ => mask_of(reach, seq, lag, dtype, &device),
        };
        if let Some(mask) = mask {
            let scores = seen.reshape([batch, num_heads, seq, seq]) + mask;
            seen = scores.reshape([batch, num_kv_heads, rows, seq]);
        }
        // What one position of each later step adds to a row.
        let later = |nth: usize, step: usize| {
            let one = delayed(steps[step][nth].clone(), lag - step);
            one.unsqueeze_dim::<5>(2)
        };
        let of_steps = (1..=lag).map(|step| {
            let scores = (by_group.clone() * later(0, step)).sum_dim(4);
            scores.reshape([batch, num_kv_heads, rows, 1])
        });
        let scores: Vec<Tensor<4>> = [seen].into_iter().chain(of_steps).collect();
        let scores = if lag == 0 { scores[0].clone() } else { Tensor::cat(scores, 3) };
        let weights = softmax(scores.cast(FloatDType::F32), 3).cast(dtype);
        let mut mixed = weights.clone().narrow(3, 0, seq).matmul(first_values);
        for step in 1..=lag {
            let weight = weights.clone().narrow(3, seq + step - 1, 1);
            let weight = weight.reshape([batch, num_kv_heads, groups, seq, 1]);
            let more = weight * later(1, step);
            mixed = mixed + more.reshape([batch, num_kv_heads, rows, head_dim]);
        }
        let mixed = joined(mixed.reshape([batch, num_heads, seq, head_dim]));
        let output = project(&self.output, mixed);
        let [_, hidden] = output.dims();
        output.reshape([batch, seq, hidden])
    }
}

/// Each position's value moved to the `num`-th position after it, with zeros at the first `num`.
///
/// # Shapes
/// - x, output: `[batch, kv_heads, seq, head_dim]`
fn delayed(x: Tensor<4>, num: usize) -> Tensor<4> {
    if num == 0 {
        return x;
    }
    let [batch, heads, seq, width] = x.dims();
    let num = num.min(seq);
    let zeros = Tensor::zeros([batch, heads, num, width], (&x.device(), x.dtype()));
    Tensor::cat(vec![zeros, x.narrow(2, 0, seq - num)], 2)
}

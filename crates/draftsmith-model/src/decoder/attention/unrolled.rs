//! Attention over whole sequences in which a draft begins at some of the positions (EAGLE-3's
//! training-time test, Li et al. 2025, section 3.2).
//!
//! Step k, from 0, at position q attends to the same keys as decoding does in a round that began k
//! positions earlier. These are the known keys up to position q − k, and the key of step i at
//! position q − k + i for each step i up to k. The known keys are those of step 0 in EAGLE-3, which
//! then has no others, and those of contexts in a block drafter. In a layer with a window, keys as many
//! positions back as the window are hidden, as in servers: counted from the position of the step's row.
//!
//! Queries and the keys of later steps are needed only where drafts are trained. Products run over
//! rows: the positions of all sequences, one after another, without padding between them. Only the
//! scores of step 0's keys are padded.

use std::ops::Range;

use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

use super::{Attention, AttentionForm, weights_of};
use crate::buckets::Lengths;
use crate::decoder::rope::RopeWindow;
use crate::following::MASKED;
use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::Reach;

/// The positions at which the drafts of a batch begin, and the index tensors for their attention.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// The positions for which step 0 has keys, as rows of `[batch · seq]`. Shape: `[known]`.
    pub(crate) known: Tensor<1, Int>,
    /// The positions at which drafts begin, as rows of `[known]`. Shape: `[tokens]`.
    pub(crate) begun: Tensor<1, Int>,
    rope_of_known: RopeWindow,
    /// The rotation of the drafts' rows, which belongs to the position that they are given.
    rope_of_begun: RopeWindow,
    /// Each sequence's positions as rows of `[known]`, padded. Shape: `[batch · keys]`.
    keys: Tensor<1, Int>,
    /// Each sequence's drafts as rows of `[tokens]`, padded. Shape: `[batch · queries]`.
    queries: Tensor<1, Int>,
    /// For each draft, its row in `[batch · queries]`, the inverse of `queries`. Shape: `[tokens]`.
    tokens: Tensor<1, Int>,
    /// The numbers added to scores, `[batch, 1, steps − 1 + queries, keys]`. Row r is for query
    /// number r − (steps − 1).
    mask: Tensor<4>,
    /// In a layer with a window, its size, and the numbers added to the scores of known keys before it,
    /// `[batch, 1, queries, keys]`.
    window: Option<(usize, Tensor<4>)>,
    num_steps: usize,
    /// The padded numbers of sequences, queries and keys.
    dims: [usize; 3],
}

/// The plan of a batch's drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftPlan<'b> {
    /// The positions at which drafts begin, one range for each sequence.
    pub(crate) begun: &'b [Range<usize>],
    /// The number of positions of each sequence.
    pub(crate) seq: usize,
    /// The number of steps of each draft.
    pub(crate) num_steps: usize,
    /// The number of positions by which the rotation of a draft's rows is ahead of the known keys'.
    pub(crate) rows_ahead: usize,
    pub(crate) lengths: Lengths,
}

impl DraftPlan<'_> {
    /// Computes the numbers added to the scores of known keys, `[batch, queries, keys]`, that hide keys
    /// before the window of each query.
    fn before_window(&self, reach: &Reach, [num_queries, num_keys]: [usize; 2]) -> Vec<f32> {
        let firsts = self.begun.iter().flat_map(|begun| {
            let first = begun.start + self.rows_ahead;
            (0..num_queries).map(move |row| reach.first_seen(first + row))
        });
        let hidden = |first_seen: usize| {
            (0..num_keys).map(move |key| if key < first_seen { MASKED } else { 0.0 })
        };
        firsts.flat_map(hidden).collect()
    }
}

impl Drafts {
    /// Takes the rows of the positions for which step 0 has keys.
    ///
    /// # Shapes
    /// - x: `[batch, seq, width]`
    /// - output: `[known, width]`
    pub(crate) fn known_rows(&self, x: Tensor<3>) -> Tensor<2> {
        x.flatten::<2>(0, 1).select(0, self.known.clone())
    }

    /// Prepares the drafts of a plan. Positions after the last draft are not read.
    pub(crate) fn new(
        plan: DraftPlan<'_>,
        reach: &Reach,
        (dtype, device): (FloatDType, &Device),
    ) -> Self {
        let DraftPlan { begun, seq, num_steps, rows_ahead, lengths } = plan;
        let longest = |len: fn(&Range<usize>) -> usize| begun.iter().map(len).max().unwrap_or(0);
        let num_keys = lengths.padded(longest(|one| one.end)).min(seq);
        let num_queries = lengths.padded(longest(Range::len)).min(seq);
        let [mut known, mut places, mut keys, mut queries, mut tokens] =
            [(); 5].map(|()| Vec::new());
        let mut mask = Vec::new();
        for (row, begun) in begun.iter().enumerate() {
            let (first, first_token) = (known.len(), places.len());
            let num_known = if begun.is_empty() { 0 } else { begun.end };
            known.extend((0..num_known).map(|q| row * seq + q));
            places.extend(begun.clone().map(|q| first + q));
            tokens.extend((0..begun.len()).map(|query| row * num_queries + query));
            // Padding repeats the last entry; its results are not used.
            let padded = |start: usize, len: usize, all: usize| {
                (0..all).map(move |nth| start + nth.min(len.saturating_sub(1)))
            };
            keys.extend(padded(first, num_known, num_keys));
            queries.extend(padded(first_token, begun.len(), num_queries));
            for row in 0..num_steps - 1 + num_queries {
                let num_seen = (begun.start + row + 2).saturating_sub(num_steps);
                mask.extend((0..num_keys).map(|key| if key < num_seen { 0.0 } else { MASKED }));
            }
        }
        let rope = |positions: &dyn Fn(&Range<usize>) -> Range<usize>, num_rows: usize| {
            let runs = begun.iter().map(positions).filter(|positions| !positions.is_empty());
            let mut runs: Vec<PlacedRun> =
                runs.map(|at| PlacedRun { slot: 0, start: at.start, num_rows: at.len() }).collect();
            let used: usize = runs.iter().map(|run| run.num_rows).sum();
            runs.push(PlacedRun { slot: 0, start: 0, num_rows: lengths.padded(num_rows) - used });
            RopeWindow::new(&reach.rope, PlacedRows::new(&runs, &[]), dtype, device)
        };
        let of_known = |begun: &Range<usize>| if begun.is_empty() { 0..0 } else { 0..begun.end };
        let (num_known, num_tokens) = (known.len(), places.len());
        let rope_of_known = rope(&of_known, num_known);
        let rope_of_begun =
            rope(&|begun| begun.start + rows_ahead..begun.end + rows_ahead, num_tokens);
        for (rows, len) in
            [(&mut known, num_known), (&mut places, num_tokens), (&mut tokens, num_tokens)]
        {
            let last = rows.last().copied().unwrap_or(0);
            rows.resize(lengths.padded(len), last);
        }
        let indices = |rows: Vec<usize>, most: usize| {
            let rows: Vec<i32> =
                rows.into_iter().map(|row| row.min(most.saturating_sub(1)) as i32).collect();
            Tensor::<1, Int>::from_data(TensorData::from(rows.as_slice()), device)
        };
        let num_sequences = begun.len();
        let tensor = |mask: Vec<f32>, num_rows: usize| {
            let mask = TensorData::new(mask, [num_sequences, 1, num_rows, num_keys]);
            Tensor::<4>::from_data(mask, device).cast(dtype)
        };
        Self {
            known: indices(known, usize::MAX),
            begun: indices(places, usize::MAX),
            rope_of_known,
            rope_of_begun,
            keys: indices(keys, num_known),
            queries: indices(queries, num_tokens),
            tokens: indices(tokens, usize::MAX),
            mask: tensor(mask, num_steps - 1 + num_queries),
            window: reach.window.map(|size| {
                (size, tensor(plan.before_window(reach, [num_queries, num_keys]), num_queries))
            }),
            num_steps,
            dims: [num_sequences, num_queries, num_keys],
        }
    }
}

/// The attention of drafts over one batch, step by step. Queries attend to known keys and to the
/// keys of the same draft's steps.
pub(crate) struct DraftAttention<'a> {
    attention: &'a Attention,
    drafts: &'a Drafts,
    /// The transposed keys and the values of known positions: `[batch, kv_heads, head_dim, keys]`
    /// and `[batch, kv_heads, keys, head_dim]`.
    known: [Tensor<4>; 2],
    /// The keys and values of steps, `[tokens, kv_heads, 1, head_dim]` each.
    steps: Vec<[Tensor<4>; 2]>,
    /// The number of steps that are done.
    num_done: usize,
}

impl<'a> DraftAttention<'a> {
    /// Prepares the attention from the projections of known positions to keys and values,
    /// `[known, width]` each.
    pub(crate) fn new(
        attention: &'a Attention,
        drafts: &'a Drafts,
        [keys, values]: [Tensor<2>; 2],
    ) -> Self {
        let AttentionForm { num_kv_heads, head_dim, .. } = attention.form;
        let Drafts { keys: of_sequences, dims: [batch, _, num_keys], .. } = drafts;
        let keys = attention.rotated_keys(keys, &drafts.rope_of_known);
        let [num_known, width] = values.dims();
        let by_sequence = |rows: Tensor<2>| {
            let rows = rows.select(0, of_sequences.clone());
            rows.reshape([*batch, *num_keys, num_kv_heads, head_dim])
        };
        let known = [
            by_sequence(keys.reshape([num_known, width])).permute([0, 2, 3, 1]),
            by_sequence(values).swap_dims(1, 2),
        ];
        Self { attention, drafts, known, steps: Vec::new(), num_done: 0 }
    }

    /// Computes the next step from its projection to queries, and to keys and values if its rows
    /// are keys too.
    ///
    /// # Shapes
    /// - q, k, v: `[tokens, width]`
    /// - output: `[tokens, hidden]`
    pub(crate) fn step(&mut self, q: Tensor<2>, own: Option<[Tensor<2>; 2]>) -> Tensor<2> {
        let AttentionForm { num_heads, num_kv_heads, head_dim, scale, .. } = self.attention.form;
        let Drafts { rope_of_begun: rope, queries, tokens, mask, window, dims, .. } = self.drafts;
        let [batch, num_queries, num_keys] = *dims;
        let groups = num_heads / num_kv_heads;
        let lag = self.num_done;
        self.num_done += 1;
        let [num_tokens, _] = q.dims();
        let (dtype, by_group) =
            (FloatDType::from(q.dtype()), [num_tokens, num_kv_heads, groups, head_dim]);
        let q = self.attention.heads_of(q, num_heads);
        let q = rope.rotate(self.attention.normed(0, q), scale).reshape(by_group);
        if let Some([k, v]) = own {
            let shape = [num_tokens, num_kv_heads, 1, head_dim];
            let k = self.attention.rotated_keys(k, rope);
            self.steps.push([k.reshape(shape), v.reshape(shape)]);
        }
        let num_seen = self.steps.len().min(window.as_ref().map_or(usize::MAX, |(size, _)| *size));
        let own_steps = &self.steps[self.steps.len() - num_seen..];
        let num_own = own_steps.len();
        // These functions convert rows to sequences and back, with `width` numbers for each head of
        // queries.
        let rows = groups * num_queries;
        let to_sequences = |x: Tensor<4>, width: usize| {
            let x = x.reshape([num_tokens, num_heads * width]).select(0, queries.clone());
            let x = x.reshape([batch, num_queries, num_kv_heads, groups, width]);
            x.permute([0, 2, 3, 1, 4]).reshape([batch, num_kv_heads, rows, width])
        };
        let to_rows = |x: Tensor<4>, width: usize| {
            let x = x.reshape([batch, num_kv_heads, groups, num_queries, width]);
            let x = x.permute([0, 3, 1, 2, 4]).reshape([batch * num_queries, num_heads * width]);
            x.select(0, tokens.clone()).reshape([num_tokens, num_kv_heads, groups, width])
        };
        let [known_keys, known_values] = self.known.clone();
        let seen = to_sequences(q.clone(), head_dim).matmul(known_keys);
        let mut mask = mask.clone().narrow(2, self.drafts.num_steps - 1 - lag, num_queries);
        if let Some((_, before)) = window {
            mask = mask + before.clone();
        }
        let seen = seen.reshape([batch, num_heads, num_queries, num_keys]) + mask;
        let seen = seen.reshape([batch, num_kv_heads, rows, num_keys]);
        let own =
            |step: usize, nth: usize| delayed(own_steps[step][nth].clone(), num_own - 1 - step);
        let scores = (0..num_own).map(|step| (q.clone() * own(step, 0)).sum_dim(3));
        let scores: Vec<Tensor<4>> = scores.collect();
        let scores = match num_own {
            0 => seen,
            _ => Tensor::cat(vec![seen, to_sequences(Tensor::cat(scores, 3), num_own)], 3),
        };
        let weights = weights_of(scores).cast(dtype);
        let of_known = weights.clone().narrow(3, 0, num_keys).matmul(known_values);
        let mut mixed = to_rows(of_known, head_dim);
        if num_own > 0 {
            let weights = to_rows(weights.narrow(3, num_keys, num_own), num_own);
            for step in 0..num_own {
                mixed = mixed + weights.clone().narrow(3, step, 1) * own(step, 1);
            }
        }
        self.attention.output.forward(mixed.reshape([num_tokens, num_heads * head_dim]))
    }
}

/// A projection to queries, keys or values, divided into two halves: one reads embeddings, the
/// other reads features.
struct Divided {
    of_embedded: Tensor<2>,
    of_features: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Divided {
    fn new(linear: &Linear) -> Self {
        let weight = linear.weight.val();
        let half = weight.dims()[0] / 2;
        Self {
            of_embedded: weight.clone().narrow(0, 0, half),
            of_features: weight.narrow(0, half, half),
            bias: linear.bias.as_ref().map(|bias| bias.val()),
        }
    }

    /// Computes the part of the projection that reads embeddings, with the bias. It is the same in
    /// all steps.
    fn embedded(&self, rows: Tensor<2>) -> Tensor<2> {
        let share = rows.matmul(self.of_embedded.clone());
        match &self.bias {
            Some(bias) => share + bias.clone().unsqueeze(),
            None => share,
        }
    }

    fn features(&self, rows: Tensor<2>) -> Tensor<2> {
        rows.matmul(self.of_features.clone())
    }
}

/// The attention of a layer that reads embeddings and features, concatenated. The keys of step 0 are
/// known, and those of later steps belong to their drafts.
pub(crate) struct UnrolledAttention<'a> {
    /// The projections to queries, keys and values.
    projections: [Divided; 3],
    /// The parts of queries, keys and values that come from embeddings, `[tokens, width]` each.
    of_embedded: [Tensor<2>; 3],
    inner: DraftAttention<'a>,
}

impl<'a> UnrolledAttention<'a> {
    /// Prepares the attention.
    ///
    /// # Shapes
    /// - embedded, features: `[known, hidden]`, after their norms
    pub(crate) fn new(
        attention: &'a Attention,
        drafts: &'a Drafts,
        embedded: Tensor<2>,
        features: Tensor<2>,
    ) -> Self {
        let projections = [&attention.query, &attention.key, &attention.value].map(Divided::new);
        let [query, key, value] = &projections;
        let of_begun = |share: Tensor<2>| share.select(0, drafts.begun.clone());
        let of_query = query.embedded(of_begun(embedded.clone()));
        let [key_share, value_share] = [key, value].map(|it| it.embedded(embedded.clone()));
        let known = [
            key_share.clone() + key.features(features.clone()),
            value_share.clone() + value.features(features),
        ];
        let of_embedded = [of_query, of_begun(key_share), of_begun(value_share)];
        Self { projections, of_embedded, inner: DraftAttention::new(attention, drafts, known) }
    }

    /// Computes the next step: each token attends to the keys of step 0 and of the steps up to this
    /// one.
    ///
    /// # Shapes
    /// - features: `[tokens, hidden]`, after the norm
    /// - output: `[tokens, hidden]`
    pub(crate) fn step(&mut self, features: Tensor<2>) -> Tensor<2> {
        let projected = |nth: usize| {
            let share: Tensor<2> = self.of_embedded[nth].clone();
            share + self.projections[nth].features(features.clone())
        };
        let own = (self.inner.num_done > 0).then(|| [projected(1), projected(2)]);
        let query = projected(0);
        self.inner.step(query, own)
    }
}

impl Attention {
    /// Computes the attention of blocks. Row k of a block attends to the contexts before the block
    /// and to the block's rows up to its own.
    ///
    /// # Shapes
    /// - rows: `[steps · tokens, hidden]`, step by step, after the norm
    /// - contexts: `[known, hidden]`
    /// - output: `[steps · tokens, hidden]`
    pub(crate) fn of_blocks(
        &self,
        rows: Tensor<2>,
        contexts: Tensor<2>,
        drafts: &Drafts,
    ) -> Tensor<2> {
        let [num_rows, _] = rows.dims();
        let num_tokens = num_rows / drafts.num_steps;
        let known = [self.key.forward(contexts.clone()), self.value.forward(contexts)];
        let mut attending = DraftAttention::new(self, drafts, known);
        let projected = [&self.query, &self.key, &self.value].map(|it| it.forward(rows.clone()));
        let steps = (0..drafts.num_steps).map(|step| {
            let of_step = |all: Tensor<2>| all.narrow(0, step * num_tokens, num_tokens);
            let [q, k, v] = projected.clone().map(of_step);
            attending.step(q, Some([k, v]))
        });
        Tensor::cat(steps.collect(), 0)
    }

    /// Splits rows into heads, `[1, rows, heads, head_dim]`.
    fn heads_of(&self, rows: Tensor<2>, num_heads: usize) -> Tensor<4> {
        let [num_rows, _] = rows.dims();
        rows.reshape([1, num_rows, num_heads, self.form.head_dim])
    }

    fn rotated_keys(&self, rows: Tensor<2>, rope: &RopeWindow) -> Tensor<4> {
        rope.rotate(self.normed(1, self.heads_of(rows, self.form.num_kv_heads)), 1.0)
    }
}

/// Moves rows down by `num` and fills the first `num` rows with zeros. The first `num` rows of each
/// later sequence then come from another sequence; no trained step reads them.
pub(crate) fn delayed<const D: usize>(rows: Tensor<D>, num: usize) -> Tensor<D> {
    if num == 0 {
        return rows;
    }
    let num_rows = rows.dims()[0];
    let num = num.min(num_rows);
    let nothing = rows.clone().narrow(0, 0, num).zeros_like();
    Tensor::cat(vec![nothing, rows.narrow(0, 0, num_rows - num)], 0)
}

//! One model reading one sequence: token ids in, rows of logits out, with the cache between.
//!
//! A forward has one sync, where its logits come to the host, and none where it ran in host memory.
//! So a round of K candidates waits K + 1 times: after each draft step, which brings the acceptance
//! head's word along with the logits, and after the verification. What is read or rolled back only
//! for the cache waits for nothing.

#[cfg(test)]
mod counting;
#[cfg(test)]
pub(crate) mod tests;

use draftsmith_model::{CausalLm, KvCache, ModelError, Rows};

use crate::error::DecodeError;
use crate::features::Features;
use crate::round::Target;

/// Rows of logits over the vocabulary, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// Rows laid end to end, each `vocab_size` long.
    ///
    /// # Panics
    /// If the values do not make whole rows.
    pub fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        assert!(values.len().is_multiple_of(vocab_size), "logits come in whole rows");
        Self { values, vocab_size }
    }

    /// The number of rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// One row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// All rows in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

/// A model with the cache of the one sequence it is reading.
#[derive(Debug)]
pub struct ModelSession<'m> {
    model: &'m CausalLm,
    cache: KvCache,
    role: &'static str,
    /// Of a self-draft's target.
    exit: Option<EarlyExit>,
}

/// What a session needs on top whose shallow layers run ahead of its deep ones.
#[derive(Debug)]
struct EarlyExit {
    /// The number of shallow layers.
    layer: usize,
    /// What came out of them, of positions that the deep layers or the drafter have yet to read.
    features: Features,
    /// The drafter has read the features before this position.
    num_drafted_from: usize,
}

impl<'m> ModelSession<'m> {
    /// A session for sequences of up to `capacity` tokens; `role` is what errors call the model,
    /// `target` or `draft`. The model's own context bounds the capacity.
    pub fn new(model: &'m CausalLm, capacity: usize, role: &'static str) -> Self {
        let capacity = capacity.min(model.config().max_position_embeddings);
        let cache = model.new_cache(capacity, 1);
        Self { model, cache, role, exit: None }
    }

    /// A session for the target of a self-draft: the layers before `exit_layer` may run ahead, and
    /// what comes out of them, the features, is kept until the layers behind the exit and the
    /// drafter have read it.
    ///
    /// Other drafters, and none, work with it too, but nobody then reads the features: they take
    /// the room of one hidden state a token until the next sequence begins.
    ///
    /// # Panics
    /// Unless there are layers on both sides of the exit: adapters are checked against their target
    /// when they are loaded.
    pub fn with_exit(
        model: &'m CausalLm,
        exit_layer: usize,
        capacity: usize,
        role: &'static str,
    ) -> Self {
        let num_layers = model.config().num_hidden_layers;
        assert!((1..num_layers).contains(&exit_layer), "an exit lies between two layers");
        let exit = EarlyExit { layer: exit_layer, features: Features::new(0), num_drafted_from: 0 };
        Self { exit: Some(exit), ..Self::new(model, capacity, role) }
    }

    /// The model.
    pub fn model(&self) -> &'m CausalLm {
        self.model
    }

    /// What errors call the model.
    pub(crate) fn role(&self) -> &'static str {
        self.role
    }

    /// The number of tokens read and not truncated; the deep layers of a self-draft's target may
    /// have read fewer.
    pub fn num_read(&self) -> usize {
        self.cache.len(0, 0)
    }

    /// The number of tokens that all layers have read.
    pub(crate) fn num_read_by_all(&self) -> usize {
        self.cache.len(0, self.num_layers() - 1)
    }

    fn num_layers(&self) -> usize {
        self.model.config().num_hidden_layers
    }

    /// The number of tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.cache.truncate(0, len);
        if let Some(exit) = &mut self.exit {
            exit.features.truncate(len);
            exit.num_drafted_from = exit.num_drafted_from.min(len);
        }
    }

    /// Runs the layers before the exit on what they have not read of `tokens`, the whole sequence,
    /// and returns the features (hidden states at the exit layer) of all positions from `from` on,
    /// for the drafter: once it has them it may not ask for them again.
    ///
    /// # Panics
    /// If the session has no exit, or the features of `from` are no longer held.
    pub(crate) fn features(&mut self, tokens: &[u32], from: usize) -> Rows {
        self.read_shallow(&tokens[self.num_read()..]);
        let num_read_by_all = self.num_read_by_all();
        let exit = expect_exit(&mut self.exit);
        let features = exit.features.since(from);
        exit.num_drafted_from = tokens.len();
        exit.features.release_before(num_read_by_all);
        features
    }

    /// Runs the layers before the exit on new tokens and keeps what comes out.
    fn read_shallow(&mut self, new: &[u32]) {
        if new.is_empty() {
            return;
        }
        let hidden = self.model.embed_ids(new);
        let exit = expect_exit(&mut self.exit);
        let run = self.model.forward_layers(0..exit.layer, hidden, &mut self.cache);
        exit.features.push(run);
    }

    /// Runs the layers behind the exit on every position they have not read, in one forward, and
    /// returns the hidden states of those positions.
    fn read_deep(&mut self) -> Rows {
        let num_layers = self.num_layers();
        let (exit_layer, hidden) = self.features_of_unread();
        self.model.forward_layers(exit_layer..num_layers, hidden, &mut self.cache)
    }

    /// The exit layer, and its features at every position that the layers behind it have not read.
    fn features_of_unread(&mut self) -> (usize, Rows) {
        let from = self.num_read_by_all();
        let exit = expect_exit(&mut self.exit);
        let hidden = exit.features.since(from);
        // What is left is the last candidate's: should it be accepted, the drafter reads it then.
        exit.features.release_before(exit.num_drafted_from);
        (exit.layer, hidden)
    }

    /// Reads new tokens and returns the final hidden states, after the final norm, of the last
    /// `num_rows` tokens read.
    pub(crate) fn read(&mut self, new: &[u32], num_rows: usize) -> Rows {
        let hidden = if self.exit.is_some() {
            self.read_shallow(new);
            self.read_deep()
        } else {
            let hidden = self.model.embed_ids(new);
            self.model.forward_layers(0..self.num_layers(), hidden, &mut self.cache)
        };
        self.model.normed(hidden.last(num_rows))
    }

    /// Logits of normed hidden states, brought to the host: the one sync of a forward.
    pub(crate) fn logits_of(&self, normed: &Rows) -> Result<Logits, DecodeError> {
        let vocab_size = self.model.config().vocab_size;
        checked(self.model.logits(normed), vocab_size, self.role, self.num_read())
    }

    /// Checks that a prompt can be read with room for one more token.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<(), DecodeError> {
        check_fits(prompt, self.capacity(), self.role)?;
        let vocab_size = self.model.config().vocab_size;
        match prompt.iter().find(|id| **id as usize >= vocab_size) {
            Some(id) => Err(DecodeError::UnknownToken { id: *id, vocab_size, role: self.role }),
            None => Ok(()),
        }
    }

    /// The logits after each of `ids[from..]`, read from an empty cache in one forward: scoring
    /// of a text that is already there.
    ///
    /// # Errors
    /// If the text is longer than the context, has unknown tokens, or the model's logits are not
    /// finite.
    pub fn score(&mut self, ids: &[u32], from: usize) -> Result<Logits, DecodeError> {
        self.check_prompt(&ids[..ids.len().saturating_sub(1)])?;
        self.truncate(0);
        let normed = self.read(ids, ids.len() - from);
        self.logits_of(&normed)
    }
}

fn expect_exit(exit: &mut Option<EarlyExit>) -> &mut EarlyExit {
    exit.as_mut().expect("a self-draft's target has a session with an exit")
}

/// Checks that a prompt leaves room for one more token in a context.
pub(crate) fn check_fits(
    prompt: &[u32],
    context: usize,
    role: &'static str,
) -> Result<(), DecodeError> {
    if prompt.len() < context {
        return Ok(());
    }
    Err(DecodeError::PromptTooLong { prompt: prompt.len(), context, role })
}

/// Rows of logits, brought to the host: the one sync of a forward.
///
/// # Errors
/// If a logit is NaN or +∞, of which `role` is then told, or the device fails.
pub(crate) fn checked(
    logits: Rows,
    vocab_size: usize,
    role: &'static str,
    num_tokens: usize,
) -> Result<Logits, DecodeError> {
    let [values] = to_host([logits], role)?;
    check_logits(&values, role, num_tokens)?;
    Ok(Logits::new(values, vocab_size))
}

/// Checks that logits make a distribution: that none is NaN or +∞.
pub(crate) fn check_logits(
    logits: &[f32],
    role: &'static str,
    num_tokens: usize,
) -> Result<(), DecodeError> {
    // To the end whatever comes, so that it vectorises.
    let are_all_fine = logits.iter().fold(true, |fine, logit| fine & (*logit < f32::INFINITY));
    if are_all_fine { Ok(()) } else { Err(DecodeError::NotFinite { role, num_tokens }) }
}

/// Brings rows to the host: one sync, or none where they are there.
pub(crate) fn to_host<const N: usize>(
    rows: [Rows; N],
    role: &'static str,
) -> Result<[Vec<f32>; N], DecodeError> {
    Rows::to_host(rows).map_err(|error| {
        let message = match error {
            ModelError::Device(message) => message,
            other => other.to_string(),
        };
        DecodeError::Device { role, message }
    })
}

impl Target for ModelSession<'_> {
    fn begin(&mut self, prompt: &[u32]) -> Result<(), DecodeError> {
        self.check_prompt(prompt)?;
        self.truncate(0);
        let prefix = &prompt[..prompt.len() - 1];
        if prefix.is_empty() {
            return Ok(());
        }
        if self.exit.is_some() {
            self.read_shallow(prefix);
            let (exit_layer, hidden) = self.features_of_unread();
            self.model.fill_cache(exit_layer, hidden, &mut self.cache);
        } else {
            self.model.fill_cache(0, self.model.embed_ids(prefix), &mut self.cache);
        }
        Ok(())
    }

    fn logits(&mut self, tokens: &[u32], num_rows: usize) -> Result<Logits, DecodeError> {
        let new = &tokens[self.num_read()..];
        let normed = self.read(new, num_rows);
        self.logits_of(&normed)
    }

    fn roll_back(&mut self, len: usize) {
        self.truncate(len);
    }

    fn context(&self) -> usize {
        self.capacity()
    }
}

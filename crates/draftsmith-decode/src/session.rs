//! One model reading sequences, one in each slot: token ids in, rows of logits out, with the cache
//! between.
//!
//! A forward has one sync, where its logits come to the host, and none where it ran in host memory.
//! So a round of K candidates waits K + 1 times: after each draft step, which brings the acceptance
//! head's prediction along with the logits, and after the verification. What is read or rolled back only
//! for the cache waits for nothing.

#[cfg(test)]
mod counting;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::Range;

use draftsmith_model::{CausalLm, KvCache, ModelError, Rows};

use crate::error::DecodeError;
use crate::features::{Features, WantedFeatures};
use crate::logits::Logits;
use crate::target::{FirstLayers, Target, Verification};

/// A model with the cache of the sequences it is reading, one a slot.
#[derive(Debug)]
pub struct ModelSession<'m> {
    model: &'m CausalLm,
    cache: KvCache,
    role: &'static str,
    /// Of a self-draft's target.
    exit: Option<EarlyExit>,
    /// Of texts that began as known whole, by slot: after how many tokens the first final hidden state
    /// is, and all of them.
    along: Vec<Option<(usize, Rows)>>,
}

/// What a session needs on top whose shallow layers run ahead of its deep ones.
#[derive(Debug)]
struct EarlyExit {
    /// The number of shallow layers.
    layer: usize,
    /// What came out of them, by slot.
    slots: Vec<ExitFeatures>,
}

/// The features of one sequence.
#[derive(Debug)]
struct ExitFeatures {
    /// Of positions that the deep layers or the drafter have yet to read.
    features: Features,
    /// The drafter has read the features before this position.
    num_drafted_from: usize,
}

/// New tokens of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewTokens<'a> {
    pub(crate) slot: usize,
    pub(crate) ids: &'a [u32],
    /// How many of the last are asked for what comes out.
    pub(crate) num_rows: usize,
}

impl<'m> ModelSession<'m> {
    /// A session for one sequence of up to `capacity` tokens; `role` is what errors call the model,
    /// `target` or `draft`. The model's own context bounds the capacity.
    pub fn new(model: &'m CausalLm, capacity: usize, role: &'static str) -> Self {
        Self::with_slots(model, capacity, 1, role)
    }

    /// A session for `num_slots` sequences side by side, each of up to `capacity` tokens.
    pub fn with_slots(
        model: &'m CausalLm,
        capacity: usize,
        num_slots: usize,
        role: &'static str,
    ) -> Self {
        let capacity = capacity.min(model.shape().context);
        let cache = model.new_cache(capacity, num_slots);
        let along = vec![None; num_slots];
        Self { model, cache, role, exit: None, along }
    }

    /// From now on the session serves a self-draft behind `exit_layer` layers: those layers may run
    /// ahead, and what comes out of them, the features, is kept until the layers behind the exit
    /// and the drafter have read it. None serves any other drafter, and none at all.
    ///
    /// What was read is forgotten.
    ///
    /// # Panics
    /// Unless there are layers behind the exit: adapters are checked against their target when they
    /// are loaded.
    pub fn set_exit(&mut self, exit_layer: Option<usize>) {
        let num_slots = self.cache.num_slots();
        for slot in 0..num_slots {
            self.truncate(slot, 0);
        }
        self.exit = exit_layer.map(|layer| {
            assert!(layer < self.num_layers(), "an exit lies before a layer");
            let none = |_| ExitFeatures { features: Features::new(0), num_drafted_from: 0 };
            EarlyExit { layer, slots: (0..num_slots).map(none).collect() }
        });
    }

    /// The model.
    pub fn model(&self) -> &'m CausalLm {
        self.model
    }

    /// The number of tokens read in a slot and not truncated; the deep layers of a self-draft's
    /// target may have read fewer.
    pub(crate) fn num_read(&self, slot: usize) -> usize {
        match &self.exit {
            // There may be no layer before the exit whose keys would tell.
            Some(exit) => exit.slots[slot].features.end(),
            None => self.cache.len(slot, 0),
        }
    }

    /// The number of tokens that all layers have read.
    pub(crate) fn num_read_by_all(&self, slot: usize) -> usize {
        self.cache.len(slot, self.num_layers() - 1)
    }

    fn num_layers(&self) -> usize {
        self.model.shape().num_layers
    }

    /// The number of tokens there is room for in a slot.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets all tokens of a slot from position `len` on.
    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
        if let Some(exit) = &mut self.exit {
            let exit = &mut exit.slots[slot];
            exit.features.truncate(len);
            exit.num_drafted_from = exit.num_drafted_from.min(len);
        }
    }

    /// What is yet to be read of a sequence.
    fn unread<'a>(&self, one: &Verification<'a>) -> NewTokens<'a> {
        let ids = &one.tokens[self.num_read(one.slot)..];
        NewTokens { slot: one.slot, ids, num_rows: one.proposal.num_rows() }
    }

    /// Looks up new tokens, of each sequence in its slot; None where there are none.
    fn embed(&self, batch: &[NewTokens<'_>]) -> Option<Rows> {
        if let [NewTokens { slot, ids, .. }] = batch {
            return (!ids.is_empty()).then(|| self.model.embed_ids(ids).in_slot(*slot));
        }
        let runs: Vec<(usize, &[u32])> =
            batch.iter().filter(|new| !new.ids.is_empty()).map(|new| (new.slot, new.ids)).collect();
        (!runs.is_empty()).then(|| self.model.embed_runs(&runs))
    }

    /// Runs the layers before the exit on new tokens and keeps what comes out.
    fn read_shallow(&mut self, batch: &[NewTokens<'_>]) {
        let Some(hidden) = self.embed(batch) else { return };
        let exit = expect_exit(&mut self.exit);
        let features = self.model.forward_layers(0..exit.layer, hidden, &mut self.cache);
        let mut start = 0;
        for new in batch.iter().filter(|new| !new.ids.is_empty()) {
            let end = start + new.ids.len();
            exit.slots[new.slot].features.push(features.slice(start..end));
            start = end;
        }
    }

    /// The exit layer, and its features at every position of some slots that the layers behind it
    /// have not read.
    fn features_of_unread(&mut self, slots: impl Iterator<Item = usize>) -> (usize, Rows) {
        let last_layer = self.num_layers() - 1;
        let exit = expect_exit(&mut self.exit);
        let unread = slots.map(|slot| {
            let ExitFeatures { features, num_drafted_from } = &mut exit.slots[slot];
            let unread = features.since(self.cache.len(slot, last_layer));
            // What is left is the last candidate's: should it be accepted, the drafter reads it
            // then.
            features.release_before(*num_drafted_from);
            unread
        });
        let unread = Rows::cat(unread);
        (exit.layer, unread)
    }

    /// Reads new tokens, of each sequence in another slot, in one forward, and returns the final
    /// hidden states, after the final norm, of those that are asked for, one sequence's behind the
    /// other's.
    pub(crate) fn read(&mut self, batch: &[NewTokens<'_>]) -> Rows {
        let num_layers = self.num_layers();
        let hidden = if self.exit.is_some() {
            self.read_shallow(batch);
            let (exit_layer, hidden) = self.features_of_unread(batch.iter().map(|new| new.slot));
            self.model.forward_layers(exit_layer..num_layers, hidden, &mut self.cache)
        } else {
            let hidden = self.embed(batch).expect("there is something to read");
            self.model.forward_layers(0..num_layers, hidden, &mut self.cache)
        };
        self.model.normed(hidden.last_of_each(batch.iter().map(|new| new.num_rows)))
    }

    /// Logits of normed hidden states behind `num_tokens` tokens, brought to the host: the one sync
    /// of a forward.
    fn logits_of(&self, normed: &Rows, num_tokens: usize) -> Result<Logits, DecodeError> {
        let vocab_size = self.model.shape().vocab_size;
        checked(self.model.logits(normed), vocab_size, self.role, num_tokens)
    }

    /// Checks that a prompt can be read with room for one more token.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<(), DecodeError> {
        check_fits(prompt, self.capacity(), self.role)?;
        let vocab_size = self.model.shape().vocab_size;
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
        self.truncate(0, 0);
        let normed = self.read(&[NewTokens { slot: 0, ids, num_rows: ids.len() - from }]);
        self.logits_of(&normed, ids.len())
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

impl FirstLayers for ModelSession<'_> {
    /// Runs the layers before the exit on what they have not read of sequences, and keeps what the layers
    /// behind it have yet to read.
    ///
    /// # Panics
    /// If the session has no exit, or the features are no longer held.
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows {
        for one in wanted {
            self.cache.branch(one.slot, one.tokens.len() - one.parents.len(), one.parents);
        }
        let unread = wanted.iter().map(|one| {
            let ids = &one.tokens[self.num_read(one.slot)..];
            NewTokens { slot: one.slot, ids, num_rows: 0 }
        });
        self.read_shallow(&unread.collect::<Vec<_>>());
        Rows::cat(wanted.iter().map(|one| {
            let num_read_by_all = self.num_read_by_all(one.slot);
            let exit = &mut expect_exit(&mut self.exit).slots[one.slot];
            let features = exit.features.since(one.from);
            exit.num_drafted_from = one.tokens.len();
            exit.features.release_before(num_read_by_all);
            features
        }))
    }
}

impl Target for ModelSession<'_> {
    fn num_slots(&self) -> usize {
        self.cache.num_slots()
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.check_prompt(prompt)?;
        self.truncate(slot, 0);
        let ids = &prompt[..prompt.len() - 1];
        if ids.is_empty() {
            return Ok(());
        }
        let new = [NewTokens { slot, ids, num_rows: 0 }];
        let (first, hidden) = if self.exit.is_some() {
            self.read_shallow(&new);
            self.features_of_unread(std::iter::once(slot))
        } else {
            (0, self.model.embed_ids(ids).in_slot(slot))
        };
        self.model.fill_cache(first, hidden, &mut self.cache);
        Ok(())
    }

    /// Reads the text in one forward and keeps final hidden states, from which rows of logits, which are
    /// much longer, are made a few at a time.
    fn begin_along(
        &mut self,
        slot: usize,
        text: &[u32],
        prompt_len: usize,
    ) -> Result<(), DecodeError> {
        let ids = &text[..text.len() - 1];
        self.check_prompt(ids)?;
        self.truncate(slot, 0);
        let num_rows = text.len() - prompt_len;
        let normed = self.read(&[NewTokens { slot, ids, num_rows }]);
        self.along[slot] = Some((prompt_len, normed));
        self.commit(slot, prompt_len - 1, &[]);
        Ok(())
    }

    /// # Panics
    /// If the slot's sequence did not begin by [`Target::begin_along`].
    fn logits_along(
        &mut self,
        slot: usize,
        _text: &[u32],
        lens: Range<usize>,
    ) -> Result<Logits, DecodeError> {
        let (first, normed) = self.along[slot].as_ref().expect("the text was read");
        self.logits_of(&normed.slice(lens.start - first..lens.end - first), lens.start)
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError> {
        for one in batch.iter().filter(|one| !one.proposal.is_chain()) {
            let num_standing = one.tokens.len() - one.proposal.len();
            let parents: Vec<_> = one.proposal.nodes().iter().map(|node| node.parent).collect();
            self.cache.branch(one.slot, num_standing, &parents);
        }
        let num_tokens = batch.iter().map(|one| one.tokens.len()).max().unwrap_or(0);
        let normed = match batch {
            [one] => self.read(&[self.unread(one)]),
            _ => self.read(&batch.iter().map(|one| self.unread(one)).collect::<Vec<_>>()),
        };
        self.logits_of(&normed, num_tokens)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.cache.keep(slot, num_standing, path);
        if let Some(exit) = &mut self.exit {
            let ExitFeatures { features, num_drafted_from } = &mut exit.slots[slot];
            let is_drafted_from = |node: &&usize| num_standing + **node < *num_drafted_from;
            let num_drafted = path.iter().take_while(is_drafted_from).count();
            features.keep(num_standing, path);
            *num_drafted_from = (*num_drafted_from).min(num_standing + num_drafted);
        }
    }

    fn context(&self) -> usize {
        self.capacity()
    }
}

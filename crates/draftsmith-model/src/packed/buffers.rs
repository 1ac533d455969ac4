//! The memory that a session keeps between forwards: keys and values, and buffers.

use std::sync::Arc;

use super::storage::{F32Line, LINE};
use super::team::Team;
use super::weights::Threads;

/// The number of multiply-adds in a forward from which a team of threads pays off.
const TEAM_FORWARD: usize = 1 << 20;

/// The keys and values of one layer for one sequence. Clones share them until one is changed.
#[derive(Debug, Clone)]
pub(crate) struct PackedLayerCache {
    /// The keys: for each head, panels of 16 positions, each `[head_dim, 16]`.
    pub(super) keys: Arc<Vec<F32Line>>,
    /// The values: for each head, panels of 16 channels, each `[capacity, 16]`.
    pub(super) values: Arc<Vec<F32Line>>,
    pub(super) head_dim: usize,
    /// The number of positions with memory, a multiple of [`LINE`].
    pub(super) capacity: usize,
    /// The bits of each number that are kept; `None` for all.
    pub(crate) bits: Option<u32>,
}

/// Buffers that the layers of a forward share.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The queries, keys and values of the rows.
    pub(super) projected: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) wide: Vec<f32>,
    pub(super) narrow: Vec<f32>,
    /// The threads that may work on the products.
    pub(super) threads: Threads,
    /// The team of threads; `None` before the first forward that uses one.
    team: Option<Arc<Team>>,
    /// The state of two threads that share the rows of forwards.
    pub(super) sharing: Sharing,
    /// Buffers for forwards in blocks.
    pub(super) blocks: Blocks,
    pub(super) queries: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(super) mixed: Vec<f32>,
    pub(super) heads: Vec<f32>,
}

impl Scratch {
    /// Creates buffers for a forward on `threads`.
    pub(crate) fn with_threads(threads: Threads) -> Self {
        Self { threads, ..Self::default() }
    }

    /// Runs a forward of `num_products` multiply-adds, with a team if that pays off.
    pub(crate) fn in_team(&mut self, num_products: usize, forward: impl FnOnce(&mut Self)) {
        // Outside the pool, the other threads would start too late to help.
        let is_on_pool = rayon::current_thread_index().is_some();
        let may_share = is_on_pool && rayon::current_num_threads() >= 2;
        if !may_share || num_products < TEAM_FORWARD || !matches!(self.threads, Threads::All) {
            return forward(self);
        }
        let team = self.team.get_or_insert_default().clone();
        self.threads = Threads::Team(team.clone());
        team.run(|| forward(self));
        self.threads = Threads::All;
    }
}

impl PackedLayerCache {
    pub(crate) fn new(num_kv_heads: usize, head_dim: usize, capacity: usize) -> Self {
        let capacity = capacity.next_multiple_of(LINE);
        let empty = F32Line([0.0; LINE]);
        Self {
            keys: vec![empty; num_kv_heads * capacity / LINE * head_dim].into(),
            values: vec![empty; num_kv_heads * head_dim.div_ceil(LINE) * capacity].into(),
            head_dim,
            capacity,
            bits: None,
        }
    }

    /// Allocates memory for `capacity` tokens.
    pub(crate) fn grow(&mut self, capacity: usize) {
        let heads = self.keys.len() * LINE / (self.capacity * self.head_dim);
        let mut grown = Self { bits: self.bits, ..Self::new(heads, self.head_dim, capacity) };
        // With more capacity, each head gets more panels of keys, and each panel of values gets
        // more lines.
        let copy = |from: &[F32Line], to: &mut Vec<F32Line>, parts: usize| {
            let (width, to_width) = (from.len() / parts, to.len() / parts);
            for (from, to) in from.chunks_exact(width).zip(to.chunks_exact_mut(to_width)) {
                to[..width].copy_from_slice(from);
            }
        };
        let num_panels = heads * self.head_dim.div_ceil(LINE);
        copy(&self.keys, Arc::make_mut(&mut grown.keys), heads);
        copy(&self.values, Arc::make_mut(&mut grown.values), num_panels);
        *self = grown;
    }

    /// Copies every head's key and value from position `from` to `to`.
    pub(crate) fn copy(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        let width = self.capacity / LINE * self.head_dim;
        for panels in Arc::make_mut(&mut self.keys).chunks_exact_mut(width) {
            for channel in 0..self.head_dim {
                let key = panels[from / LINE * self.head_dim + channel].0[from % LINE];
                panels[to / LINE * self.head_dim + channel].0[to % LINE] = key;
            }
        }
        for panel in Arc::make_mut(&mut self.values).chunks_exact_mut(self.capacity) {
            panel[to] = panel[from];
        }
    }

    /// Writes one head's key and value at a position.
    #[inline(always)]
    pub(super) fn write(&mut self, head: usize, position: usize, key: &[f32], value: &[f32]) {
        match self.bits {
            None => self.put(head, position, key, value),
            Some(bits) => self.put(head, position, &rounded(key, bits), &rounded(value, bits)),
        }
    }

    #[inline(always)]
    fn put(&mut self, head: usize, position: usize, key: &[f32], value: &[f32]) {
        let panel = head * self.capacity / LINE + position / LINE;
        let lines = &mut Arc::make_mut(&mut self.keys)[panel * self.head_dim..][..key.len()];
        for channel in 0..key.len() {
            lines[channel].0[position % LINE] = key[channel];
        }
        let first = head * self.head_dim.div_ceil(LINE);
        let values = Arc::make_mut(&mut self.values);
        let (whole, rest) = value.as_chunks::<LINE>();
        let mut at = first * self.capacity + position;
        for value in whole {
            values[at].0 = *value;
            at += self.capacity;
        }
        if !rest.is_empty() {
            values[at].0[..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Rounds numbers to `bits` bits, with a scale for every 32, as quantised caches do.
fn rounded(values: &[f32], bits: u32) -> Vec<f32> {
    let most = ((1_u32 << (bits - 1)) - 1) as f32;
    let block = |values: &[f32]| {
        let scale = values.iter().fold(f32::MIN_POSITIVE, |most, it| most.max(it.abs())) / most;
        values.iter().map(|value| (value / scale).round() * scale).collect::<Vec<f32>>()
    };
    values.chunks(32).flat_map(block).collect()
}

/// Buffers for forwards in blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The buffers of each thread.
    pub(super) scratches: Vec<Scratch>,
    /// The queries, keys and values of each block.
    pub(super) projected: Vec<Vec<f32>>,
}

/// The state of two threads that share the forwards of a session.
///
/// If other processes keep the cores busy, the second thread can be suspended for longer than one
/// thread would need for the whole forward. The next forwards then use one thread.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// The buffers of each thread; `None` before the first shared forward.
    pub(super) halves: Option<Box<[Scratch; 2]>>,
    /// The number of forwards that one thread still runs before two threads try again.
    pub(super) num_to_wait: u32,
    /// The value of `num_to_wait` after the last delay.
    pub(super) last_wait: u32,
}

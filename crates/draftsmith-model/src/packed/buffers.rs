//! What a session keeps between forwards: keys and values, and buffers for the rows in hand.

use std::sync::Arc;

use super::storage::{LINE, Line};
use super::team::Team;
use super::weights::Threads;

/// Products of two numbers of a forward from which on other threads are worth their start.
const TEAM_FORWARD: usize = 1 << 20;

/// Keys and values of one layer for the sequence in one slot.
#[derive(Debug)]
pub(crate) struct PackedLayerCache {
    /// For each head panels of 16 positions, each `[head_dim, 16]`.
    pub(super) keys: Vec<Line>,
    /// For each head panels of 16 channels, each `[capacity, 16]`.
    pub(super) values: Vec<Line>,
    pub(super) head_dim: usize,
    /// A whole number of lines.
    pub(super) capacity: usize,
}

/// Buffers that the layers of a forward share.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Queries, keys and values.
    pub(super) projected: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) wide: Vec<f32>,
    pub(super) narrow: Vec<f32>,
    /// Who may work on the products.
    pub(super) threads: Threads,
    /// Those that may stand by.
    team: Option<Arc<Team>>,
    /// Whether two threads may share rows.
    pub(super) sharing: Sharing,
    /// What a forward over many rows needs for its blocks.
    pub(super) blocks: Blocks,
    pub(super) queries: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(super) mixed: Vec<f32>,
    pub(super) heads: Vec<f32>,
}

impl Scratch {
    /// Buffers for a forward that so many threads work on.
    pub(crate) fn with_threads(threads: Threads) -> Self {
        Self { threads, ..Self::default() }
    }

    /// Runs a forward that is so many products of two numbers, with threads that stand by if that is
    /// worth their start.
    pub(crate) fn in_team(&mut self, num_products: usize, forward: impl FnOnce(&mut Self)) {
        // From outside the pool the others start too late to help.
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
        let empty = Line([0.0; LINE]);
        Self {
            keys: vec![empty; num_kv_heads * capacity / LINE * head_dim],
            values: vec![empty; num_kv_heads * head_dim.div_ceil(LINE) * capacity],
            head_dim,
            capacity,
        }
    }

    /// Makes room for so many tokens, and keeps those that are there.
    pub(crate) fn grow(&mut self, capacity: usize) {
        let heads = self.keys.len() * LINE / (self.capacity * self.head_dim);
        let mut grown = Self::new(heads, self.head_dim, capacity);
        // Of each head panels of positions, of which there are more, and of each of its panels of
        // channels lines of positions, of which there are more.
        let copy = |from: &[Line], to: &mut [Line], parts: usize| {
            let (width, to_width) = (from.len() / parts, to.len() / parts);
            for (from, to) in from.chunks_exact(width).zip(to.chunks_exact_mut(to_width)) {
                to[..width].copy_from_slice(from);
            }
        };
        copy(&self.keys, &mut grown.keys, heads);
        copy(&self.values, &mut grown.values, heads * self.head_dim.div_ceil(LINE));
        *self = grown;
    }

    /// Writes the key and value of the token at `from` at `to` as well, of every head.
    pub(crate) fn copy(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        for panels in self.keys.chunks_exact_mut(self.capacity / LINE * self.head_dim) {
            for channel in 0..self.head_dim {
                let key = panels[from / LINE * self.head_dim + channel].0[from % LINE];
                panels[to / LINE * self.head_dim + channel].0[to % LINE] = key;
            }
        }
        for panel in self.values.chunks_exact_mut(self.capacity) {
            panel[to] = panel[from];
        }
    }

    /// Writes one head's key and value at a position.
    #[inline(always)]
    pub(super) fn write(&mut self, head: usize, position: usize, key: &[f32], value: &[f32]) {
        let panel = head * self.capacity / LINE + position / LINE;
        let (lines, key) = (&mut self.keys[panel * self.head_dim..][..key.len()], key);
        for channel in 0..key.len() {
            lines[channel].0[position % LINE] = key[channel];
        }
        let first = head * self.head_dim.div_ceil(LINE);
        let (whole, rest) = value.as_chunks::<LINE>();
        let mut at = first * self.capacity + position;
        for value in whole {
            self.values[at].0 = *value;
            at += self.capacity;
        }
        if !rest.is_empty() {
            self.values[at].0[..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Buffers of forwards over many rows.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Of each thread.
    pub(super) scratches: Vec<Scratch>,
    /// Queries, keys and values of each block.
    pub(super) projected: Vec<Vec<f32>>,
}

/// Whether and with what two threads share the forwards of a session.
///
/// Where other processes keep the cores busy, the second thread is put aside in the middle of its
/// half for longer than the whole forward takes one thread. One thread then runs some forwards
/// alone.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// The buffers of each thread, from the first shared forward on.
    pub(super) halves: Option<Box<[Scratch; 2]>>,
    /// Forwards that one thread runs before two try again.
    pub(super) num_to_wait: u32,
    /// So many they were when it was last held up.
    pub(super) last_wait: u32,
}

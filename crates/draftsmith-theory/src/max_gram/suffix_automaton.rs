//! The suffix automaton of a sequence, an index of all its substrings and of where they first end.
//! It grows and rolls back token by token.
//!
//! A state represents all substrings that end at the same positions. Its link leads to the state of
//! its longest suffix that also ends at other positions. So the link of the whole sequence's state
//! gives the longest suffix that occurs earlier. Growing takes amortised constant time (Blumer et
//! al., 1985).

use std::collections::HashMap;

/// The index of the empty string's state.
const ROOT: u32 = 0;
/// The index that stands for no state or no edge.
const NONE: u32 = u32::MAX;

/// A suffix of the sequence that occurs in the searched text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Match {
    pub(super) state: u32,
    pub(super) len: usize,
}

impl Match {
    /// The empty string.
    pub(super) const EMPTY: Self = Self { state: ROOT, len: 0 };
}

#[derive(Debug, Clone, Copy)]
struct Substrings {
    /// The length of the state's longest substring.
    len: u32,
    link: u32,
    /// The first position at which the state's substrings end, in tokens from the start.
    first_end: u32,
    /// The index of the state's last added edge, or [`NONE`].
    edges: u32,
}

#[derive(Debug, Clone, Copy)]
struct Edge {
    from: u32,
    token: u32,
    to: u32,
    /// The index of the edge that was added before this one to the same state, or [`NONE`].
    previous: u32,
}

/// The record by which the growth by one token can be undone.
#[derive(Debug, Clone, Copy)]
struct Growth {
    whole: u32,
    num_states: usize,
    num_edges: usize,
    num_redirected: usize,
    /// A state whose link changed, and its previous link.
    relinked: Option<(u32, u32)>,
}

/// An index of the substrings of a sequence.
#[derive(Debug, Clone)]
pub(super) struct SuffixAutomaton {
    states: Vec<Substrings>,
    edges: Vec<Edge>,
    edge_of: HashMap<(u32, u32), u32>,
    /// The state of the whole sequence.
    whole: u32,
    /// The undo records, one for each token.
    growths: Vec<Growth>,
    /// The edges that were redirected, each with its previous target state, in order of time.
    redirected: Vec<(u32, u32)>,
}

impl SuffixAutomaton {
    /// Creates the automaton of the empty sequence.
    pub(super) fn new() -> Self {
        Self {
            states: vec![Substrings { len: 0, link: NONE, first_end: 0, edges: NONE }],
            edges: Vec::new(),
            edge_of: HashMap::new(),
            whole: ROOT,
            growths: Vec::new(),
            redirected: Vec::new(),
        }
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.growths.len()
    }

    /// Appends a token.
    pub(super) fn push(&mut self, token: u32) {
        let mut growth = Growth {
            whole: self.whole,
            num_states: self.states.len(),
            num_edges: self.edges.len(),
            num_redirected: self.redirected.len(),
            relinked: None,
        };
        let len = self.states[self.whole as usize].len + 1;
        let new = self.add_state(Substrings { len, link: ROOT, first_end: len, edges: NONE });
        let mut at = self.whole;
        while at != NONE && !self.edge_of.contains_key(&(at, token)) {
            self.add_edge(at, token, new);
            at = self.states[at as usize].link;
        }
        if at != NONE {
            let next = self.edges[self.edge_of[&(at, token)] as usize].to;
            let len = self.states[at as usize].len + 1;
            self.states[new as usize].link = if self.states[next as usize].len == len {
                next
            } else {
                // The substrings of `next` up to this length now also end at the new token.
                let shorter =
                    self.add_state(Substrings { len, edges: NONE, ..self.states[next as usize] });
                self.copy_edges(next, shorter);
                self.redirect(at, token, next, shorter);
                let link = &mut self.states[next as usize].link;
                growth.relinked = Some((next, *link));
                *link = shorter;
                shorter
            };
        }
        self.whole = new;
        self.growths.push(growth);
    }

    /// Doubles the capacity, so that the next tokens do not allocate.
    pub(super) fn reserve(&mut self) {
        self.states.reserve(self.states.len());
        self.edges.reserve(self.edges.len());
        self.edge_of.reserve(self.edges.len());
        self.growths.reserve(self.growths.len());
        self.redirected.reserve(self.redirected.len());
    }

    /// Removes all tokens from position `len` on.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.growths.len() > len {
            let Some(growth) = self.growths.pop() else { return };
            for (edge, to) in self.redirected.drain(growth.num_redirected..).rev() {
                self.edges[edge as usize].to = to;
            }
            if let Some((state, link)) = growth.relinked {
                self.states[state as usize].link = link;
            }
            for Edge { from, token, previous, .. } in self.edges.drain(growth.num_edges..).rev() {
                self.edge_of.remove(&(from, token));
                self.states[from as usize].edges = previous;
            }
            self.states.truncate(growth.num_states);
            self.whole = growth.whole;
        }
    }

    /// Returns the longest suffix of the sequence that also occurs earlier, or the empty string.
    pub(super) fn repeated_suffix(&self) -> Match {
        self.shorter(self.whole).unwrap_or(Match::EMPTY)
    }

    /// Returns the longest suffix of a state's substrings that belongs to another state; None for
    /// the empty string.
    pub(super) fn shorter(&self, state: u32) -> Option<Match> {
        let state = self.states[state as usize].link;
        (state != NONE).then(|| Match { state, len: self.states[state as usize].len as usize })
    }

    /// Returns the state of a state's substrings followed by `token`; None if these never occur.
    pub(super) fn followed_by(&self, state: u32, token: u32) -> Option<u32> {
        self.edge_of.get(&(state, token)).map(|edge| self.edges[*edge as usize].to)
    }

    /// Returns the first position at which a state's substrings end, in tokens from the start.
    pub(super) fn first_end(&self, state: u32) -> usize {
        self.states[state as usize].first_end as usize
    }

    fn add_state(&mut self, state: Substrings) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    fn add_edge(&mut self, from: u32, token: u32, to: u32) {
        let edge = self.edges.len() as u32;
        let last = &mut self.states[from as usize].edges;
        self.edges.push(Edge { from, token, to, previous: *last });
        *last = edge;
        self.edge_of.insert((from, token), edge);
    }

    fn copy_edges(&mut self, from: u32, to: u32) {
        let mut edge = self.states[from as usize].edges;
        while edge != NONE {
            let Edge { token, to: next, previous, .. } = self.edges[edge as usize];
            self.add_edge(to, token, next);
            edge = previous;
        }
    }

    /// Redirects the edges of a state and of the states along its links from `old` to `new`.
    fn redirect(&mut self, mut state: u32, token: u32, old: u32, new: u32) {
        while state != NONE {
            let Some(edge) = self.edge_of.get(&(state, token)).copied() else { return };
            let to = &mut self.edges[edge as usize].to;
            if *to != old {
                return;
            }
            *to = new;
            self.redirected.push((edge, old));
            state = self.states[state as usize].link;
        }
    }
}

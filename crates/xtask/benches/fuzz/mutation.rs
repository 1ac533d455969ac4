//! Mutations of bytes and text: flipped bits, extreme numbers, cuts, copies, splices, and words of the format
//! in wrong places.
//!
//! `mutation/json.rs` changes values in a tree, `mutation/container.rs` the content of a frame: a safetensors
//! header, a Parquet footer, gzip.

mod container;
mod json;

use draftsmith_theory::SeededDraws;

/// The largest size that mutations other than repetitions grow an input to, in bytes.
const MOST_BYTES: usize = 1 << 16;
/// The largest size that repetitions grow an input to, in bytes.
const MOST_REPEATED_BYTES: usize = 1 << 20;

/// The layout of a seed, which decides which mutations apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    Json,
    JsonLines,
    Toml,
    Safetensors,
    Parquet,
    Gzip,
    State,
}

/// A valid input that mutations start from.
#[derive(Debug, Clone)]
pub(crate) struct Seed {
    pub(crate) bytes: Vec<u8>,
    pub(crate) form: Form,
}

impl Seed {
    pub(crate) fn new(form: Form, bytes: impl Into<Vec<u8>>) -> Self {
        Self { bytes: bytes.into(), form }
    }
}

/// The input with a number: the same for the same seed, valid inputs and dictionary.
pub(crate) fn input(
    reader: &str,
    seed: u64,
    number: u64,
    seeds: &[Seed],
    dictionary: &[&str],
) -> Vec<u8> {
    let draws = SeededDraws::new(seed, &["fuzz", reader, &number.to_string()]);
    let mut mutator = Mutator { draws, seeds, dictionary };
    let seed = &seeds[mutator.below(seeds.len())];
    // Inputs with few changes get far into a reader; inputs with many test its robustness.
    let num_changes = 1 << mutator.below(5);
    mutator.mutated(&seed.bytes, seed.form, num_changes)
}

/// Draws changes.
struct Mutator<'a> {
    draws: SeededDraws,
    seeds: &'a [Seed],
    dictionary: &'a [&'a str],
}

/// Numbers at the limits of formats and types.
const EDGES: [u64; 20] = [
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    32_767,
    65_535,
    65_536,
    2_147_483_647,
    2_147_483_648,
    4_294_967_295,
    4_294_967_296,
    9_007_199_254_740_993,
    9_223_372_036_854_775_807,
    18_446_744_073_709_551_615,
];

/// Numbers as text that no type or few types can hold.
const NUMBERS: [&str; 14] = [
    "-1",
    "-0",
    "-0.0",
    "0.5",
    "1e-320",
    "1e308",
    "1e400",
    "-1e400",
    "1e99999",
    "18446744073709551616",
    "-9223372036854775809",
    "0.1e1",
    "NaN",
    "inf",
];

impl Mutator<'_> {
    /// A number in 0..limit; 0 if `limit` is 0.
    fn below(&mut self, limit: usize) -> usize {
        ((self.draws.uniform() * limit as f64) as usize).min(limit.saturating_sub(1))
    }

    /// True with probability 1 in `chances`.
    fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    fn one_of<'t, T: ?Sized>(&mut self, all: &[&'t T]) -> &'t T {
        all[self.below(all.len())]
    }

    /// A range within `len` bytes, usually short.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        let most = if self.one_in(4) { len - start } else { (len - start).min(16) };
        start..start + self.below(most + 1)
    }

    fn mutated(&mut self, bytes: &[u8], form: Form, num_changes: usize) -> Vec<u8> {
        // Framed content is also changed within its frame.
        let as_form = !self.one_in(4);
        match form {
            Form::Json if as_form => self.json(bytes, num_changes),
            Form::JsonLines if as_form => self.json_lines(bytes, num_changes),
            Form::Toml if as_form => self.toml(bytes, num_changes),
            Form::Safetensors if as_form => self.safetensors(bytes, num_changes),
            Form::Parquet if as_form => self.parquet(bytes, num_changes),
            Form::Gzip if as_form => self.gzip(bytes, num_changes),
            Form::State if as_form => self.state(bytes, num_changes),
            _ => {
                let mut bytes = bytes.to_vec();
                (0..num_changes).for_each(|_| self.change(&mut bytes));
                bytes
            }
        }
    }

    /// One change of any kind, of bytes or of text.
    fn change(&mut self, bytes: &mut Vec<u8>) {
        match self.below(16) {
            0..=3 => self.change_in_place(bytes),
            4 | 5 => {
                let range = self.range(bytes.len());
                bytes.drain(range);
            }
            6 | 7 => {
                let copied = bytes[self.range(bytes.len())].to_vec();
                self.insert(bytes, &copied);
            }
            8 => {
                let len = self.below(bytes.len() + 1);
                bytes.truncate(len);
            }
            9 => {
                let other = &self.seeds[self.below(self.seeds.len())].bytes;
                let from = self.below(other.len() + 1);
                let at = self.below(bytes.len() + 1);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
                bytes.truncate(MOST_BYTES.max(other.len()));
            }
            10 => {
                let [one, other] = [self.range(bytes.len()), self.range(bytes.len())];
                let (one, other) =
                    if one.start < other.start { (one, other) } else { (other, one) };
                if one.end <= other.start {
                    let swapped = [
                        &bytes[..one.start],
                        &bytes[other.clone()],
                        &bytes[one.end..other.start],
                        &bytes[one],
                        &bytes[other.end..],
                    ];
                    *bytes = swapped.concat();
                }
            }
            11..=13 if !self.dictionary.is_empty() => {
                let word = self.one_of(self.dictionary).as_bytes();
                if self.one_in(2) {
                    let range = self.range(bytes.len());
                    bytes.splice(range, word.iter().copied());
                } else {
                    self.insert(bytes, word);
                }
            }
            14 => self.change_number(bytes),
            _ => self.repeat(bytes),
        }
    }

    /// A change that keeps the length.
    fn change_in_place(&mut self, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.below(bytes.len());
        match self.below(5) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = self.below(256) as u8,
            2 => {
                bytes[at] =
                    *self.one_of(&b"\0\xff\x7f\x80\"{}[]\\\n\t ,:0-9\xc0\xed\xef".each_ref())
            }
            3 => bytes[at] = bytes[at].wrapping_add(if self.one_in(2) { 1 } else { 255 }),
            _ => {
                let edge = EDGES[self.below(EDGES.len())];
                let edge = if self.one_in(4) { edge.wrapping_neg() } else { edge };
                let little = if self.one_in(2) { edge.to_le_bytes() } else { edge.to_be_bytes() };
                let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&little[..width]);
            }
        }
    }

    fn insert(&mut self, bytes: &mut Vec<u8>, inserted: &[u8]) {
        if bytes.len() + inserted.len() <= MOST_BYTES {
            let at = self.below(bytes.len() + 1);
            bytes.splice(at..at, inserted.iter().copied());
        }
    }

    /// Replaces a run of digits with another number.
    fn change_number(&mut self, bytes: &mut Vec<u8>) {
        let from = self.below(bytes.len() + 1);
        let Some(start) = bytes[from..].iter().position(u8::is_ascii_digit) else { return };
        let start = from + start;
        let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = self.number();
        bytes.splice(start..start + digits, number.into_bytes());
    }

    fn number(&mut self) -> String {
        if self.one_in(3) {
            self.one_of(&NUMBERS).to_owned()
        } else {
            EDGES[self.below(EDGES.len())].to_string()
        }
    }

    /// Repeats a short piece hundreds of times or much more often, which makes deep nesting.
    fn repeat(&mut self, bytes: &mut Vec<u8>) {
        let range = self.range(bytes.len());
        let range = range.start..range.end.min(range.start + 16);
        let piece = bytes[range.clone()].to_vec();
        if piece.is_empty() {
            return;
        }
        let most = if self.one_in(64) { MOST_REPEATED_BYTES } else { MOST_BYTES / 8 };
        let num_times = self.below(most / piece.len());
        bytes.splice(range, piece.repeat(num_times));
    }
}

//! Lengths on devices come in buckets. A device compiles and tunes kernels for each shape that it
//! meets first, and sequences have every length. So we pad to a few lengths: the rows of a forward
//! (1, 8, 16, 32, 64, then multiples of 64, coarser from 1,024), the keys of a cache (likewise,
//! from 256), and the rows and tokens of a batch. A step reads the bucket of its longest sequence,
//! not the cache's capacity.
//!
//! Padding changes no result: nobody reads the rows, masks give the keys probability 0, and losses
//! give the tokens weight 0. The CPU compiles nothing and does not pad.

use burn::tensor::Device;

/// Longer buckets are multiples of this at least, which suits kernels that read numbers in vectors
/// or blocks.
const SMALLEST_STEP: usize = 64;

/// The fewest rows except one: those of a verification of 7 candidates. A GPU computes them in the
/// time of one, because it waits for weights.
const FEWEST_ROWS: usize = 8;

/// The fewest keys: most prompts with the start of a response.
const FEWEST_KEYS: usize = 256;

/// The fewest numbers of a vector.
const FEWEST_NUMBERS: usize = 256;

/// Whether lengths are padded to buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// No padding.
    AsGiven,
    /// Padded to a few lengths.
    InBuckets,
}

impl Lengths {
    /// Chooses the policy for a device: no padding on the CPU, buckets elsewhere.
    pub fn on(device: &Device) -> Self {
        if device.clone().inner() == Device::flex() { Self::AsGiven } else { Self::InBuckets }
    }

    /// Returns the padded number of rows or tokens for `num_rows`.
    pub fn padded(self, num_rows: usize) -> usize {
        match self {
            Self::AsGiven => num_rows,
            Self::InBuckets => padded_rows(num_rows),
        }
    }

    /// Returns the padded length of a vector of `num` numbers. Below 256, burn compiles kernels for
    /// every length.
    pub fn padded_numbers(self, num: usize) -> usize {
        match self {
            Self::AsGiven => num,
            Self::InBuckets => padded(num, FEWEST_NUMBERS),
        }
    }

    /// Returns the padded number of rows for a batch of `num_rows`, which holds at most
    /// `batch_size`.
    pub fn padded_batch(self, num_rows: usize, batch_size: usize) -> usize {
        match self {
            Self::AsGiven => num_rows,
            Self::InBuckets => batch_size,
        }
    }
}

/// Returns the number of rows in the bucket of `num_rows`.
pub(crate) fn padded_rows(num_rows: usize) -> usize {
    if num_rows <= 1 { num_rows } else { padded(num_rows, FEWEST_ROWS) }
}

/// Returns the number of keys in the bucket of `num_keys`.
pub(crate) fn padded_keys(num_keys: usize) -> usize {
    padded(num_keys, FEWEST_KEYS)
}

/// Rounds up the number of sequences to compute side by side to a power of two.
pub(crate) fn padded_sequences(num_sequences: usize) -> usize {
    num_sequences.next_power_of_two()
}

/// Rounds up a length to a bucket, at least `fewest`. Buckets are powers of two up to the smallest
/// step, then eight to sixteen between a power of two and the next, in steps no smaller than that.
/// At most a ninth is padding.
fn padded(len: usize, fewest: usize) -> usize {
    let power = len.next_power_of_two();
    let bucket = match power <= SMALLEST_STEP {
        true => power,
        false => len.next_multiple_of((power / 16).max(SMALLEST_STEP)),
    };
    bucket.max(fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_long_enough_and_few() {
        for bucket in [padded_rows, padded_keys] {
            let mut found: Vec<usize> = (1..=65_536).map(bucket).collect();
            assert!(found.iter().zip(1..).all(|(bucket, len)| *bucket >= len));
            assert!(found.iter().zip(1..).skip(576).all(|(bucket, len)| *bucket * 8 <= len * 9));
            assert!(found.is_sorted() && found.iter().all(|len| bucket(*len) == *len));
            found.dedup();
            assert!(found.len() <= 77, "{}", found.len());
        }
        assert_eq!([0, 1, 2, 8, 9, 64, 65, 513].map(padded_rows), [0, 1, 8, 8, 16, 64, 128, 576]);
        assert_eq!([1, 256, 257, 1025].map(padded_keys), [256, 256, 320, 1152]);
        assert_eq!([1, 2, 3, 16].map(padded_sequences), [1, 2, 4, 16]);
    }

    #[test]
    fn the_cpu_does_not_pad() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let lengths = Lengths::on(&device);
            assert_eq!((lengths.padded(5), lengths.padded_batch(3, 8)), (5, 3));
        }
        assert_eq!(Lengths::InBuckets.padded_batch(3, 8), 8);
    }
}

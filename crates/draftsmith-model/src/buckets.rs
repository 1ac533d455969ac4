//! Padded lengths for devices. A device compiles and tunes kernels for each new shape, and
//! sequences have every length. So we pad to a few lengths, the buckets: the rows of a forward (1,
//! 8, 16, 32, 64, then multiples of 64, coarser from 1,024), the keys of a cache (likewise, from
//! 256), and the rows and tokens of a batch. A step reads the bucket of its longest sequence, not
//! the cache's capacity.
//!
//! Padding changes no result: padding rows are not read, masks give padding keys probability 0, and
//! losses give padding tokens weight 0. The CPU compiles nothing and does not pad.

use burn::tensor::Device;

/// The smallest distance between longer buckets, which are multiples of it. It suits kernels that
/// read numbers in vectors or blocks.
const SMALLEST_STEP: usize = 64;

/// The smallest bucket of rows, except a single row. It fits the verification of 7 candidates. A
/// GPU computes 8 rows in the time of one, because it waits for weights.
const FEWEST_ROWS: usize = 8;

/// The smallest bucket of keys. It fits most prompts with the start of a response.
const FEWEST_KEYS: usize = 256;

/// The smallest bucket for a vector of numbers.
const FEWEST_NUMBERS: usize = 256;

/// The policy for padding lengths to buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// Lengths are not padded.
    AsGiven,
    /// Lengths are padded to buckets.
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

    /// Returns the padded number of rows for a batch that has `num_rows` of at most `batch_size`
    /// rows.
    pub fn padded_batch(self, num_rows: usize, batch_size: usize) -> usize {
        match self {
            Self::AsGiven => num_rows,
            Self::InBuckets => batch_size,
        }
    }
}

/// Returns the bucket for `num_rows` rows.
pub(crate) fn padded_rows(num_rows: usize) -> usize {
    if num_rows <= 1 { num_rows } else { padded(num_rows, FEWEST_ROWS) }
}

/// Returns the bucket for `num_keys` keys.
pub(crate) fn padded_keys(num_keys: usize) -> usize {
    padded(num_keys, FEWEST_KEYS)
}

/// Rounds up the number of sequences to compute side by side to a power of two.
pub(crate) fn padded_sequences(num_sequences: usize) -> usize {
    num_sequences.next_power_of_two()
}

/// Rounds a length up to a bucket of at least `fewest`. Buckets are powers of two up to the
/// smallest step. Above it, there are eight to sixteen buckets between a power of two and the next,
/// at least the smallest step apart, and at most a ninth of a bucket is padding.
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

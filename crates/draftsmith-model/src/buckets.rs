//! Lengths on devices come in buckets: a device compiles kernels for shapes, and looks for the
//! fastest of them, the first time that it meets one. Sequences have every length there is; so what
//! they need is computed for a few lengths only, and what is added changes nothing: rows that nobody
//! reads, keys that masks hide.

use burn::tensor::Device;

/// Longer buckets are multiples of this at least: kernels that read several numbers at once, or
/// blocks of them, then serve them all.
const SMALLEST_STEP: usize = 64;

/// The fewest rows that are computed, if it is not one: those of a verification of 7 candidates. A
/// GPU that waits for weights computes them in the same time.
const FEWEST_ROWS: usize = 8;

/// The fewest keys that are looked at: most prompts with the beginning of a response.
const FEWEST_KEYS: usize = 256;

/// Which lengths are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// Those of what there is.
    AsGiven,
    /// Few, as this file has them.
    InBuckets,
}

impl Lengths {
    /// Those of a device: the CPU compiles nothing, and computes no padding.
    pub fn on(device: &Device) -> Self {
        if device.clone().inner() == Device::flex() { Self::AsGiven } else { Self::InBuckets }
    }

    /// How many rows are computed where there are `num_rows`, or tokens.
    pub fn padded(self, num_rows: usize) -> usize {
        match self {
            Self::AsGiven => num_rows,
            Self::InBuckets => padded_rows(num_rows),
        }
    }

    /// How many rows of a batch are computed where there are `num_rows`, at most `batch_size`.
    pub fn padded_batch(self, num_rows: usize, batch_size: usize) -> usize {
        match self {
            Self::AsGiven => num_rows,
            Self::InBuckets => batch_size,
        }
    }
}

/// How many rows are computed where there are `num_rows`.
pub(crate) fn padded_rows(num_rows: usize) -> usize {
    if num_rows <= 1 { num_rows } else { padded(num_rows, FEWEST_ROWS) }
}

/// How many keys are looked at where there are `num_keys`.
pub(crate) fn padded_keys(num_keys: usize) -> usize {
    padded(num_keys, FEWEST_KEYS)
}

/// How many sequences are computed side by side where there are so many.
pub(crate) fn padded_sequences(num_sequences: usize) -> usize {
    num_sequences.next_power_of_two()
}

/// Powers of two up to the smallest step; then eight to sixteen buckets between a power of two and
/// the next, so that a ninth at most is padding, in steps no smaller than that.
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
    fn buckets_hold_what_is_put_in_them_and_are_few() {
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
    fn the_cpu_computes_what_there_is() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let lengths = Lengths::on(&device);
            assert_eq!((lengths.padded(5), lengths.padded_batch(3, 8)), (5, 3));
        }
        assert_eq!(Lengths::InBuckets.padded_batch(3, 8), 8);
    }
}

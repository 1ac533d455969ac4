//! Training or validation: a property of a row's id, so that it survives reordering, resharding and
//! growth.

use sha2::{Digest, Sha256};

/// Whether the rows called `id` are held out for validation, as a `share` of all ids is.
///
/// Decided by the SHA-256 of the id alone: adding data moves no old row, and a larger share holds
/// out a superset. Rows that must not be parted, such as the turns of one conversation, are to be
/// asked for under one id.
///
/// # Panics
/// If `share` is not between 0 and 1.
pub fn in_validation(id: &str, share: f64) -> bool {
    assert!((0.0..=1.0).contains(&share), "share must lie between 0 and 1, not {share}");
    let digest: [u8; 32] = Sha256::digest(id.as_bytes()).into();
    let place = digest[..8].iter().fold(0u64, |place, byte| place << 8 | u64::from(*byte));
    // 53 bits: what an f64 holds exactly, so that a share of 1 holds out everything.
    ((place >> 11) as f64) < share * (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids() -> impl Iterator<Item = String> {
        (0..20_000).map(|n| format!("alpaca#{n}"))
    }

    #[test]
    fn the_share_held_out_is_the_share_asked_for() {
        let num_held_out = ids().filter(|id| in_validation(id, 0.05)).count();
        // Four standard deviations: 4 · √(20,000 · 0.05 · 0.95) = 123.
        assert!(num_held_out.abs_diff(1000) < 123, "{num_held_out}");
        assert!(ids().all(|id| in_validation(&id, 1.0) && !in_validation(&id, 0.0)));
    }

    #[test]
    fn a_larger_share_holds_out_a_superset() {
        assert!(ids().all(|id| in_validation(&id, 0.2) || !in_validation(&id, 0.1)));
    }

    #[test]
    fn the_split_never_moves() {
        // `printf abc | sha256sum` begins ba7816bf: 0xba7816bf / 2^32 = 0.7284.
        assert!(in_validation("abc", 0.729));
        assert!(!in_validation("abc", 0.728));
    }
}

//! The static trees whose shapes a recipe leaves to `tune`.

use anyhow::Result;
use draftsmith_theory::TreeShape;
use serde::Serialize;

use super::judged::Judged;
use crate::sweep::static_trees::{fastest_tree, judge_trees};
use crate::tuning::TunedTree;

/// A tree that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedTree {
    pub(crate) shape: TreeShape,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// The fastest static tree of the drafter with these models, and all that were tried.
///
/// # Errors
/// If none grows along the recordings.
pub(super) fn best(by: &Judged<'_>, models: String) -> Result<(TunedTree, Vec<TriedTree>)> {
    let judged = judge_trees(by.recordings, by.costs)?;
    let best = fastest_tree(&judged)?;
    let tried = judged.iter().map(|it| TriedTree { shape: it.shape, gain: by.gain(&it.spent) });
    let tuned = TunedTree {
        drafter: by.recordings.drafter,
        models,
        dtype: by.dtype,
        shape: best.shape,
        promise: by.promise(&best.spent, judged.len()),
    };
    Ok((tuned, tried.collect()))
}

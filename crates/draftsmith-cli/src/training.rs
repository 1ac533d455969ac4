//! Training of heads and adapters, shared by `train-head` and `train-adapter`.

pub(crate) mod adapter_outcome;
pub(crate) mod eagle3_outcome;
pub(crate) mod export_job;
pub(crate) mod head_outcome;
pub(crate) mod heads;
mod progress;
pub(crate) mod sweep;

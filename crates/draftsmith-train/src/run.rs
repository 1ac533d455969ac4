//! The training loop, the same for heads and adapters: epochs, members, devices, optimizer, and the
//! state from which a run resumes.

pub(crate) mod checkpoint;
pub(crate) mod clipping;
pub(crate) mod devices;
pub(crate) mod epochs;
pub(crate) mod fit;
pub(crate) mod member;
pub(crate) mod optimizer;
pub(crate) mod schedule;
pub(crate) mod stint;
pub(crate) mod trainer;

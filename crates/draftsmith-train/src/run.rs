//! The training loop, the same for heads and adapters: epochs, members, devices, optimizer, and the
//! state from which a run resumes.

pub(crate) mod burn_train;
pub(crate) mod checkpoint;
pub(crate) mod clipping;
pub(crate) mod devices;
pub(crate) mod epochs;
pub(crate) mod first_weights;
pub(crate) mod member;
pub(crate) mod optimizer;
pub(crate) mod progress;
pub(crate) mod schedule;
pub(crate) mod trained;
pub(crate) mod trainer;
pub(crate) mod training_run;

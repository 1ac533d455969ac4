//! What a training tells while it runs: a line a step, TensorBoard's files, burn-train's metrics,
//! and renderers.

pub(crate) mod event_file;
pub(crate) mod metrics;
pub mod renderer;
pub(crate) mod step_log;

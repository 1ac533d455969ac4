//! Responses of a target that servers run.

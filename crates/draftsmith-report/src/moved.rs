//! The modules of results, for the crate that they come from.

pub(crate) mod names;
pub(crate) mod report;
pub(crate) mod results;
pub(crate) mod statistics;
pub(crate) mod table;

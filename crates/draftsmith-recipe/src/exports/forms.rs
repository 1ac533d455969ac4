//! The forms in which other programs load heads and drafters.

pub mod draft_model;
pub mod eagle3;
pub mod foreign;
pub mod transformers;
pub mod vllm;

use std::path::Path;

use anyhow::Result;

use crate::workspace::Workspace;

/// A form that `export --for` writes.
#[derive(Debug)]
pub struct ExportForm {
    /// Its name on the command line.
    pub name: &'static str,
    /// Whether the export stops by a head, whose threshold may be given.
    pub stops_by_head: bool,
    /// Writes an export in this form.
    pub write: fn(&Exporting<'_>) -> Result<Written>,
}

impl ExportForm {
    /// Creates a form without a stop rule.
    pub const fn new(name: &'static str, write: fn(&Exporting<'_>) -> Result<Written>) -> Self {
        Self { name, stops_by_head: false, write }
    }

    /// Creates a form whose drafts stop by an acceptance head.
    pub const fn stopping(
        name: &'static str,
        write: fn(&Exporting<'_>) -> Result<Written>,
    ) -> Self {
        Self { name, stops_by_head: true, write }
    }
}

/// An export to write in another form.
pub struct Exporting<'a> {
    /// The export's directory.
    pub source: &'a Path,
    /// The directory to write.
    pub out: &'a Path,
    /// The threshold of a head that ends rounds; the tuned one if absent.
    pub stop_threshold: Option<f64>,
    /// Opens the models that the export was trained for.
    pub open: &'a dyn Fn() -> Result<Workspace>,
}

/// What was written.
#[derive(Debug)]
pub struct Written {
    /// A description of what was written.
    pub what: String,
    /// Properties of the source that the runtime cannot honour, one sentence each.
    pub ignored: Vec<String>,
    /// Commands that load it.
    pub commands: Vec<String>,
}

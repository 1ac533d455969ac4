//! Results of measurements, as files, terminal tables and HTML pages.
//!
//! Programs can read the results of `draftsmith evaluate` like this:
//!
//! ```no_run
//! # fn main() -> Result<(), draftsmith_report::ReportError> {
//! let rows = draftsmith_report::read_results("evaluation/results.json".as_ref())?;
//! print!("{}", draftsmith_report::render_table(&rows, Some(80), false));
//! for row in rows.iter().filter(|row| row.is_tuned) {
//!     println!("{}: {:?} times as fast as the target", row.label(), row.speedup);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`ResultRow::of`] makes rows from other measurements. [`results_to_json`] writes such rows, and
//! [`render_html`] shows them, and [`render_speed_svg`] draws them. The module `results` owns `results.json`, `summary.json`,
//! `replay.json` and the answers. `table` renders text for terminals, `report` renders HTML, and
//! `paper` fills in the tables of papers. This crate sees no models or tensors, measures nothing
//! and prints nothing.

mod error;
mod paper;
mod report;
mod results;
mod statistics;
mod table;
mod text;

pub use draftsmith_theory::{
    CostSource, DecodingName, DrafterName, ModelSummary, Road, rule_label,
};
pub use error::ReportError;
pub use paper::{
    Measured, PaperColumn, PaperRow, PaperSource, PaperTable, Published, render_papers,
};
pub use report::data::{DataPage, ShownRow, ShownToken, SourceFigures, render_data_html};
pub use report::lines::{Plot, PlotContent, PlotLine, bin_of, bins};
pub use report::{render_html, render_speed_svg};
pub use results::answers::{Answer, Choice, answers_to_jsonl};
pub use results::{
    ALL_CATEGORIES, Algorithm2, Conclusion, CostRatios, CostSummary, CurvePoint, DRAFTSMITH,
    DatasetSummary, DeployAdvice, EvaluationSummary, FilledBlock, FilledRow, FilledTable,
    GroupSummary, GroupVerdict, HeadOnSet, HeadOverOnline, HeadPredictions, HeadRace, JudgedHead,
    LEAST_PROMPTS, LogLosses, LookUps, MAX_FOREIGN_LOAD, MeasuredSetting, OracleResult,
    PromiseOutcome, PromiseSummary, Replay, ReplayGroup, ReplayRow, ResultRow, RuleReads,
    ServingWay, SharedThreshold, SpeedAtLength, TextRange, Version, acceptance_by_position,
    fastest_ways, in_order, read_results, results_to_json, serving_text, sort_rows,
    summary_to_json, tokens_per_second, waiting_time,
};
pub use statistics::{median_of, promise_interval, shown_interval};
pub use table::{
    RowPair, SweptHead, explained, pair_rows, plain_table, render_evaluation, render_head_race,
    render_pairs, render_predictions, render_replay_table, render_rules, render_sweep_table,
    render_table,
};
pub use text::{counted, duration_text, signed_percent, speed_text, times_text, wrapped};

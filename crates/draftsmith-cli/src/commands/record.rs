//! `record`: records each drafter's candidates along responses of the target.

use anyhow::Result;
use draftsmith_tune::record::{RecordedFile, record};

use crate::commands::StageJob;

/// Runs the stage record, and prints the list of recorded files.
pub(crate) fn run(job: StageJob<'_>) -> Result<Vec<RecordedFile>> {
    let StageJob { recipe, workspace, console } = job;
    let recorded = record(recipe, workspace, console)?;
    console.document(&recorded)?;
    for file in &recorded {
        let summary = &file.summary;
        let mut line = format!(
            "{}: {} responses, {} tokens",
            file.path.display(),
            summary.num_responses,
            summary.num_tokens
        );
        if let Some(share) = summary.share_accepted {
            line += &format!(", draft accepted at {:.1} %", share * 100.0);
        }
        if let Some(length) = summary.mean_rollout_length {
            line += &format!(", rollouts of {length:.1} tokens elsewhere");
        }
        if file.kept {
            line += " (there before)";
        }
        console.text(line + "\n")?;
    }
    Ok(recorded)
}

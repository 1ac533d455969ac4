//! Measures fixed lengths, writes `results.json` as `draftsmith evaluate` does, reads it and shows its table.

use draftsmith::report::{self, ResultRow, read_results};
use draftsmith::theory::{DrafterId, FixedLengthConfig, Trace};
use draftsmith::{Decoding, Device, Drafter, Generator, Message, Model, StopRuleConfig};
use std::error::Error;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");

/// The row of a rule on one prompt, and the target's row without one.
fn row(rule: Option<&StopRuleConfig>, plain: &Trace, trace: &Trace) -> ResultRow {
    let mut row = ResultRow::of(trace, &Decoding::GREEDY);
    (row.dataset, row.num_prompts) = ("sums".to_owned(), 1);
    row.speedup = Some(row.tokens_per_second / report::tokens_per_second(plain));
    let Some(rule) = rule else { return row };
    (row.drafter, row.stop_rule) = (DrafterId::DRAFT.into(), rule.name());
    row.setting = Some(rule.parameter());
    row
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let load = |name| Model::load(format!("{MODELS}/{name}"), &Device::flex());
    let (target, draft) = (load("target")?, load("draft")?);
    let question = [Message::user("What is 541 + 279?")];
    let plain = Generator::new(&target).generate(&question)?.trace;
    let mut rows = vec![row(None, &plain, &plain)];
    for candidate_length in [1, 2, 4] {
        let rule = StopRuleConfig::from(FixedLengthConfig { candidate_length });
        let generator = Generator::new(&target).with_drafter(Drafter::model(&draft))?;
        let generated = generator.with_rule(rule.clone()).generate(&question)?;
        rows.push(row(Some(&rule), &plain, &generated.trace));
    }
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("results.json");
    std::fs::write(&path, report::results_to_json(&rows)?)?;
    let read = read_results(&path)?;
    assert!(read.iter().zip(&rows).all(|(one, other)| one.counts == other.counts));
    print!("{}", report::render_table(&read, Some(80), false));
    Ok(())
}

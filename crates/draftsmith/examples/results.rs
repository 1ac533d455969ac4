//! Measures fixed lengths, writes `results.json` as `draftsmith evaluate` does, reads it and shows its table.

use std::error::Error;

use draftsmith::report::{self, DrafterName, ResultRow, RowContext, read_results};
use draftsmith::theory::{DrafterId, FixedLengthConfig, Trace};
use draftsmith::{Decoding, Device, Drafter, Generator, Message, Model, StopRuleConfig};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");

/// The row of a rule on one prompt, and the target's row without one.
fn row(rule: Option<&StopRuleConfig>, plain: &Trace, trace: &Trace) -> ResultRow {
    let drafter = rule.map_or(DrafterName::None, |_| DrafterId::DRAFT.into());
    let context = RowContext::new("sums", drafter, rule, Decoding::GREEDY);
    let plain = Some(report::tokens_per_second(plain));
    ResultRow::new(RowContext { plain_tokens_per_second: plain, ..context }, trace)
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
    assert!(read.iter().zip(&rows).all(|(one, other)| one.counts() == other.counts()));
    print!("{}", report::render_table(&read, Some(80), false));
    let fewest = read.iter().min_by_key(|row| row.num_target_forwards).ok_or("no rows")?;
    println!("fewest target forwards: {}", fewest.label());
    Ok(())
}

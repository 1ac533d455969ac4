//! Replays a stop rule of one's own along a recorded answer, then decodes with it: the counts are the same.

use std::error::Error;

use draftsmith::theory::{FixedLengthConfig, RoundEnd};
use draftsmith::{Bounds, Device, DraftSignals, Drafter, Generator, Message, Model, Rule};

/// Drafts one candidate more than the last round accepted.
struct OneMore(usize);

impl draftsmith::StopRule for OneMore {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: 8 }
    }
    fn begin_sequence(&mut self) {
        self.0 = 1;
    }
    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.0
    }
    fn end_round(&mut self, end: RoundEnd) {
        self.0 = end.num_accepted + 1;
    }
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");
    let load = |name| Model::load(format!("{MODELS}/{name}"), &Device::flex());
    let (target, draft) = (load("target")?, load("draft")?);
    let mut generator = Generator::new(&target).with_drafter(Drafter::model(&draft))?;
    let question = [Message::user("What is 541 + 279?")];
    let rows = generator.respond("sums", [&question])?;
    let recordings = generator.record(&rows, 8)?;
    let adaptive = recordings.replay_rule(&mut OneMore(1))?;
    let fixed = recordings.replay_counts(&FixedLengthConfig { candidate_length: 3 }.into())?;
    let decoded = generator.with_rule(Rule::custom(OneMore(1))).generate(&question)?;
    assert_eq!(adaptive, [decoded.counts()]);
    println!("discarded: {}, K = 3: {}", adaptive[0].num_discarded, fixed[0].num_discarded);
    Ok(())
}

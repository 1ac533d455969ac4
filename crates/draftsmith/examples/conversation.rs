//! Holds a conversation of two turns with a target, plainly and with a drafter, and compares the speeds. Arguments:
//! the directories of a target and of a drafter of any kind, such as an EAGLE-3 drafter. By default it uses the
//! embedded pair.

use std::error::Error;
use std::path::Path;

use draftsmith::{Device, Drafter, Generator, Message, Model};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let (target, drafter) = match &given[..] {
        [target, drafter] if Path::new(target).is_dir() => (target.clone(), drafter.clone()),
        _ => (format!("{MODELS}/target"), format!("{MODELS}/draft")),
    };
    let target = Model::load(target, &Device::flex())?;
    let mut plain = Generator::new(&target);
    let mut fast = Generator::new(&target).with_drafter(Drafter::open(drafter)?)?;
    let (mut slowly, mut quickly) = (plain.session(1024), fast.session(1024));
    let mut conversation = Vec::new();
    for question in ["What is 541 + 279?", "What is 18 + 64?"] {
        conversation.push(Message::user(question));
        let (expected, found) = (slowly.generate(&conversation)?, quickly.generate(&conversation)?);
        assert_eq!(found.token_ids, expected.token_ids);
        let seconds =
            |generated: &draftsmith::Generated| generated.trace.decode_time().as_secs_f64();
        let (rounds, speedup) =
            (found.counts().num_target_forwards, seconds(&expected) / seconds(&found));
        println!("{}\n{rounds} rounds, {speedup:.2} times as fast", found.text);
        conversation.push(Message::assistant(found.text));
    }
    Ok(())
}

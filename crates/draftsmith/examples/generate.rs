//! Answers a question with the target only and with a draft model: the same text from fewer target forwards.

use std::error::Error;
use std::ops::ControlFlow;

use draftsmith::{Device, Drafter, Generator, Message, Model, Rule, Sampling};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny");

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex();
    let target = Model::load(format!("{MODELS}/target"), &device)?;
    let draft = Model::load(format!("{MODELS}/draft"), &device)?;
    let question = [Message::user("What is 541 + 279?")];
    let plain = Generator::new(&target).generate(&question)?;

    let mut generator = Generator::new(&target)
        .with_drafter(Drafter::model(&draft))?
        .with_rule("confidence=0.4".parse::<Rule>()?);
    let fast = generator.stream(&question, |piece| {
        print!("{}", piece.text);
        ControlFlow::Continue(())
    })?;
    assert_eq!(fast.text, plain.text);
    let (plain, counts) = (plain.counts(), fast.counts());
    assert!(counts.num_target_forwards < plain.num_target_forwards);
    println!(
        "\n{} tokens in {} rounds instead of {}; {} of {} candidates accepted",
        counts.num_tokens,
        counts.num_target_forwards,
        plain.num_target_forwards,
        counts.num_accepted,
        counts.num_drafted
    );

    let sampling = Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() };
    let sampled = generator.with_decoding(sampling).with_seed(7).generate(&question)?;
    println!("sampled: {}", sampled.text);
    Ok(())
}

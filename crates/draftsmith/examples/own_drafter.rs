//! Drafts with an idea of one's own, a table of which token followed which, and replays it: the text is the target's.

use std::collections::HashMap;
use std::error::Error;

use draftsmith::decode::TextParts;
use draftsmith::theory::FixedLengthConfig;
use draftsmith::{Device, Drafter, Generator, Message, Model, StopRuleConfig};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny/target");
    let target = Model::load(TARGET, &Device::flex())?;
    let questions = ["What is 541 + 279?", "What is 25 + 38?", "What is 541 + 38?"];
    let chats = questions.map(|question| [Message::user(question)]);

    let mut plain = Generator::new(&target);
    let mut followed: HashMap<u32, u32> = HashMap::new();
    for chat in &chats[..2] {
        let answer = plain.generate(chat)?.token_ids;
        followed.extend(answer.windows(2).map(|pair| (pair[0], pair[1])));
    }
    let vocab_size = target.network().shape().vocab_size;
    let table = TextParts::new(move |tokens| {
        let mut logits = vec![0.0; vocab_size];
        let next = tokens.last().and_then(|last| followed.get(last));
        next.into_iter().for_each(|next| logits[*next as usize] = 8.0);
        logits
    });

    let rule: StopRuleConfig = FixedLengthConfig { candidate_length: 3 }.into();
    let mut generator = plain.with_drafter(Drafter::of_parts(table))?.with_rule(rule.clone());
    let rows = Generator::new(&target).respond("sums", [&chats[2]])?;
    let recordings = generator.record(&rows, 3)?;
    let answer = generator.generate(&chats[2])?;
    assert_eq!(answer.token_ids, rows[0].response_ids);
    assert_eq!(recordings.replay_counts(&rule)?, [answer.counts()]);
    println!("{}\n{:?}", answer.text, answer.counts());
    Ok(())
}

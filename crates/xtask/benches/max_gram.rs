//! How long prompt lookup takes to propose ten tokens and to read a prompt, by context length.
//!
//! ```text
//! cargo bench -p xtask --bench max_gram
//! ```
//!
//! The text is made up: 32,000 kinds of tokens with frequencies like 1/rank, and now and then a repeated
//! passage. A round reads the tokens accepted in the last one, looks up, proposes, and forgets rejected
//! tokens.

use std::time::{Duration, Instant};

use draftsmith_decode::{DraftRound, Drafter, MaxGramDraft};
use draftsmith_theory::{
    Decoding, DraftLimits, Draws, FixedLengthConfig, MaxGramConfig, Proposal, SearchedText,
    SeededDraws, StopRuleConfig,
};

const CONTEXTS: [usize; 4] = [512, 4096, 16_384, 65_536];
const NUM_ROUNDS: usize = 500;
const LENGTH: usize = 10;

fn main() {
    println!("searched  context  prompt ms  proposal us: median  99 %  most");
    for searched in [SearchedText::Sequence, SearchedText::Prompt] {
        for context in CONTEXTS {
            let (prompt_time, mut times) = run(searched, context);
            times.sort();
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            println!(
                "{searched:9?} {context:7} {:10.2} {:20.2} {:6.2} {:6.2}",
                prompt_time.as_secs_f64() * 1e3,
                micros(times[times.len() / 2]),
                micros(times[times.len() * 99 / 100]),
                micros(times[times.len() - 1]),
            );
        }
    }
}

/// The time to read a prompt, and that of each proposal after it.
fn run(searched: SearchedText, context: usize) -> (Duration, Vec<Duration>) {
    let mut draws = SeededDraws::new(0, &["max-gram"]);
    let text = text(context + 4 * NUM_ROUNDS, &mut draws);
    let mut drafter = MaxGramDraft::new(MaxGramConfig { searched, min_match: 1 }, None, 1);
    let rule = StopRuleConfig::from(FixedLengthConfig { candidate_length: LENGTH });
    let mut rule = rule.init().expect("a valid rule");
    let (mut tokens, mut proposal) = (text[..context].to_vec(), Proposal::default());
    let begun = Instant::now();
    drafter.begin(&mut (), 0, &tokens).expect("any prompt fits");
    let prompt_time = begun.elapsed();
    let times = (0..NUM_ROUNDS).map(|_| {
        let num_standing = tokens.len();
        let round = DraftRound {
            slot: 0,
            tokens: &mut tokens,
            proposal: &mut proposal,
            rule: &mut *rule,
            limits: DraftLimits { room: LENGTH, eos_token_ids: &[], text_end: None },
            decoding: &Decoding::GREEDY,
            draws: &mut draws,
        };
        let begun = Instant::now();
        drafter.propose(&mut (), &mut [round]).expect("a rule that reads nothing");
        let time = begun.elapsed();
        let proposed = &tokens[num_standing..];
        let num_accepted = proposed.iter().zip(&text[num_standing..]).take(3);
        let num_accepted = num_accepted.take_while(|(a, b)| a == b).count();
        tokens.truncate(num_standing);
        tokens.extend(&text[num_standing..num_standing + num_accepted + 1]);
        proposal.clear();
        let begun = Instant::now();
        Drafter::<()>::commit(&mut drafter, 0, num_standing, &[0, 1, 2][..num_accepted]);
        time + begun.elapsed()
    });
    (prompt_time, times.collect())
}

fn text(len: usize, draws: &mut SeededDraws) -> Vec<u32> {
    let mut text: Vec<u32> = Vec::with_capacity(len + 40);
    while text.len() < len {
        let num_known = text.len();
        if num_known > 100 && draws.bernoulli(0.02) {
            let from = (draws.uniform() * (num_known - 40) as f64) as usize;
            text.extend_from_within(from..from + 40);
        } else {
            // Rank r has a frequency of about 1/r.
            text.push((32_000f64.powf(draws.uniform()) - 1.0) as u32);
        }
    }
    text.truncate(len);
    text
}

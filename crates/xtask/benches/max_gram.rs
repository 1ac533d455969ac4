//! How long prompt lookup takes to propose ten tokens and to read a prompt, by context length and by
//! number of stored tokens.
//!
//! ```text
//! cargo bench -p xtask --bench max_gram
//! cargo bench -p xtask --bench max_gram -- --along TEXTS
//! ```
//! With `--along`, suffix look-ups of up to 16 candidates are counted along texts: a line `S IDS` is a
//! stored answer, a line `R IDS | IDS` a prompt and its response. Another program can count its own.
//!
//! The text is made up: 32,000 kinds of tokens with frequencies like 1/rank, and now and then a repeated
//! passage. Stored answers have 500 tokens each. A round reads the tokens accepted in the last one, looks up, proposes, and forgets rejected
//! tokens.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use draftsmith_decode::{DraftRound, Drafter, MaxGramDraft};
use draftsmith_theory::{
    Decoding, DraftLimits, Draws, FixedLengthConfig, MaxGram, MaxGramConfig, Proposal,
    SearchedText, SeededDraws, StopRuleConfig, StoredAnswers,
};

const CONTEXTS: [usize; 4] = [512, 4096, 16_384, 65_536];
/// The numbers of stored tokens.
const STORED: [usize; 3] = [100_000, 1_000_000, 10_000_000];
const NUM_ROUNDS: usize = 500;
const LENGTH: usize = 10;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|it| it != "--bench").collect();
    if let [_, texts] = &arguments[..] {
        return along(texts);
    }
    println!("searched    stored  context  prompt ms  proposal us: median  99 %  most");
    let of_one = [SearchedText::Sequence, SearchedText::Prompt, SearchedText::Answers];
    let all = of_one.map(|searched| (searched, 0)).into_iter();
    for (searched, num_stored) in all.chain(STORED.map(|num| (SearchedText::Answers, num))) {
        let begun = Instant::now();
        let tokens = text(num_stored, &mut SeededDraws::new(1, &["stored"]));
        let stored = StoredAnswers::build(tokens.chunks(500), |_| Ok::<_, Infallible>(()));
        let stored = stored.ok().filter(|_| num_stored > 0).map(Arc::new);
        if num_stored > 0 {
            println!("{num_stored} tokens indexed in {:.1} s", begun.elapsed().as_secs_f64());
        }
        for context in CONTEXTS {
            let (prompt_time, mut times) = run(searched, &stored, context);
            times.sort();
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            println!(
                "{:9} {num_stored:8} {context:8} {:10.2} {:20.2} {:6.2} {:6.2}",
                format!("{searched:?}"),
                prompt_time.as_secs_f64() * 1e3,
                micros(times[times.len() / 2]),
                micros(times[times.len() * 99 / 100]),
                micros(times[times.len() - 1]),
            );
        }
    }
}

/// The time to read a prompt, and that of each proposal after it.
fn run(
    searched: SearchedText,
    stored: &Option<Arc<StoredAnswers>>,
    context: usize,
) -> (Duration, Vec<Duration>) {
    let mut draws = SeededDraws::new(0, &["max-gram"]);
    let text = text(context + 4 * NUM_ROUNDS, &mut draws);
    let config = MaxGramConfig { searched, ..MaxGramConfig::default() };
    let mut drafter = MaxGramDraft::new(config, (None, stored.clone()), 1);
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

/// Prints every proposal along the texts of a file, and their counts.
fn along(path: &str) {
    let ids = |text: &str| -> Vec<u32> {
        text.split_whitespace().map(|id| id.parse().expect("an id")).collect()
    };
    let texts = std::fs::read_to_string(path).expect("a file of texts");
    let answers: Vec<Vec<u32>> =
        texts.lines().filter_map(|line| line.strip_prefix("S ")).map(ids).collect();
    let stored = StoredAnswers::build(answers.iter().map(|ids| &ids[..]), |_| Ok::<_, ()>(()));
    let config = MaxGramConfig { searched: SearchedText::Answers, ..MaxGramConfig::default() };
    let mut look_up = MaxGram::new(config, stored.ok().map(Arc::new));
    let (mut num_rounds, mut num_drafted, mut num_accepted) = (0, 0, 0);
    for (nth, line) in texts.lines().filter_map(|line| line.strip_prefix("R ")).enumerate() {
        let (mut text, response) =
            line.split_once(" |").map(|(prompt, rest)| (ids(prompt), ids(rest))).expect("a bar");
        look_up.begin(&text);
        let mut at = 0;
        while at < response.len() {
            let nodes = look_up.continuations(16.min(response.len() - at - 1)).nodes;
            let proposed: Vec<u32> = nodes.into_iter().map(|(token, _)| token).collect();
            let right =
                proposed.iter().zip(&response[at..]).take_while(|(one, other)| one == other);
            let accepted = right.count();
            let shown: String = proposed.iter().map(|id| format!(" {id}")).collect();
            println!("{nth} {at} :{shown}");
            num_rounds += 1;
            num_drafted += proposed.len();
            num_accepted += accepted;
            let end = response.len().min(at + accepted + 1);
            text.extend(&response[at..end]);
            look_up.read(&text);
            at = end;
        }
    }
    eprintln!("rounds {num_rounds} drafted {num_drafted} accepted {num_accepted}");
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

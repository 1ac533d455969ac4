//! Answers in the format of Spec-Bench's evaluation scripts, with a JSON line for each prompt. The
//! `evaluate` command decodes and writes the file.

use draftsmith_theory::Trace;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Result;

/// The answer to one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The prompt's id with its type in the prompt file, so that answers can be joined with questions.
    pub question_id: Value,
    /// The prompt's category.
    pub category: String,
    /// The id `model_id#question_id`. Spec-Bench draws a random id, while ours is reproducible.
    pub answer_id: String,
    /// The models and the setting.
    pub model_id: String,
    /// The answers, one for each seed.
    pub choices: Vec<Choice>,
    /// The Unix time in seconds, which is always 0 so that files are reproducible.
    pub tstamp: f64,
}

/// One answer to all turns of a prompt.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Choice {
    /// The index of the answer, from 0.
    pub index: usize,
    /// The text of the answer in each turn.
    pub turns: Vec<String>,
    /// The number of target forwards in each turn.
    pub decoding_steps: Vec<usize>,
    /// The number of new tokens in each turn.
    pub new_tokens: Vec<usize>,
    /// The seconds of each turn, including prefill.
    pub wall_time: Vec<f64>,
    /// The number of tokens from each target forward, over all turns; the sum is that of
    /// `new_tokens`.
    pub accept_lengths: Vec<usize>,
}

impl Answer {
    /// Creates an answer with the id `model_id#question_id`.
    pub fn new(
        question_id: Value,
        category: impl Into<String>,
        model_id: impl Into<String>,
        choices: Vec<Choice>,
    ) -> Self {
        let model_id = model_id.into();
        let id = question_id.as_str().map_or_else(|| question_id.to_string(), str::to_owned);
        let answer_id = format!("{model_id}#{id}");
        Self { question_id, category: category.into(), answer_id, model_id, choices, tstamp: 0.0 }
    }
}

impl Choice {
    /// Adds a turn with the text and trace of its decoding.
    pub fn push_turn(&mut self, text: impl Into<String>, trace: &Trace) {
        self.turns.push(text.into());
        self.decoding_steps.push(trace.rounds.len());
        self.new_tokens.push(trace.num_tokens);
        self.wall_time.push((trace.prefill_time + trace.decode_time()).as_secs_f64());
        self.accept_lengths.extend(accept_lengths(trace));
    }
}

/// Yields the number of tokens of each round, without those cut off at the end, so that the mean is
/// the compression rate.
fn accept_lengths(trace: &Trace) -> impl Iterator<Item = usize> {
    trace.rounds.iter().scan(trace.num_tokens, |left, round| {
        let kept = round.num_tokens().min(*left);
        *left -= kept;
        Some(kept)
    })
}

/// Formats answers as the text of an answers file, with one JSON object per line.
///
/// # Errors
/// Never in practice, because answers are always valid JSON.
pub fn answers_to_jsonl(answers: &[Answer]) -> Result<String> {
    let mut text = String::new();
    for answer in answers {
        text += &serde_json::to_string(answer)?;
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use draftsmith_theory::{DrafterId, Forwards, Round};

    use super::*;

    /// Builds rounds that accept as given, with `num_cut` tokens cut off the last.
    fn trace(accepted: &[usize], num_cut: usize) -> Trace {
        let rounds: Vec<Round> = accepted
            .iter()
            .map(|&num_accepted| Round {
                num_drafted: 4,
                depth: 4,
                forwards: Forwards::of(DrafterId::DRAFT, 4),
                num_accepted,
                draft_time: Duration::from_millis(125),
                verify_time: Duration::from_millis(250),
            })
            .collect();
        let num_tokens = rounds.iter().map(Round::num_tokens).sum::<usize>() - num_cut;
        Trace { rounds, num_tokens, prefill_time: Duration::from_millis(250) }
    }

    #[test]
    fn lines_match_spec_benchs_format() {
        let mut choice = Choice::default();
        choice.push_turn("Aloha.\n", &trace(&[3, 0], 0));
        choice.push_turn("Again.", &trace(&[1, 4], 2));
        let answers = [
            Answer::new(81.into(), "writing", "tiny-h0.7", vec![choice]),
            Answer::new("gsm8k#4".into(), "all", "tiny-h0.7", vec![]),
        ];
        let text = answers_to_jsonl(&answers).expect("answers are JSON");
        insta::assert_snapshot!(text, @r#"
        {"question_id":81,"category":"writing","answer_id":"tiny-h0.7#81","model_id":"tiny-h0.7","choices":[{"index":0,"turns":["Aloha.\n","Again."],"decoding_steps":[2,2],"new_tokens":[5,5],"wall_time":[1.0,1.0],"accept_lengths":[4,1,2,3]}],"tstamp":0.0}
        {"question_id":"gsm8k#4","category":"all","answer_id":"tiny-h0.7#gsm8k#4","model_id":"tiny-h0.7","choices":[],"tstamp":0.0}
        "#);
        let back: Vec<Answer> =
            text.lines().map(|line| serde_json::from_str(line).expect("an answer")).collect();
        assert_eq!(back, answers);
    }

    #[test]
    fn accept_lengths_sum_to_the_tokens_kept() {
        for (accepted, num_cut, expected) in [
            (&[2, 0, 4][..], 0, &[3, 1, 5][..]),
            (&[2, 0, 4], 4, &[3, 1, 1]),
            (&[2, 0, 4], 5, &[3, 1, 0]),
            (&[], 0, &[]),
        ] {
            let trace = trace(accepted, num_cut);
            assert_eq!(accept_lengths(&trace).collect::<Vec<_>>(), expected);
        }
    }
}

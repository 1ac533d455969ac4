//! `--show`: marks each token by its origin, and lists the rounds.
//!
//! Accepted candidates are unmarked (green on colour terminals). A token that replaces a rejected
//! candidate is shown as `[corrected]` (yellow), and a token after a round without a rejection as
//! `<bonus>` (blue).

use draftsmith_decode::RoundTokens;
use draftsmith_report::plain_table;
use draftsmith_theory::Round;

/// The origin of an output token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextOrigin {
    /// A candidate that the target accepted.
    Accepted,
    /// The target's token in place of a rejected candidate.
    Corrected,
    /// The target's token after a round whose candidates were all accepted.
    Bonus,
}

/// The meaning of the marks.
pub(super) const LEGEND: &str = "accepted candidates unmarked, [corrected] tokens, <bonus> tokens";

/// Returns the origin of each token that a round keeps, in order.
pub(super) fn origins(round: &RoundTokens<'_>) -> Vec<TextOrigin> {
    let own = if round.num_accepted < round.num_drafted {
        TextOrigin::Corrected
    } else {
        TextOrigin::Bonus
    };
    let origin = |index| if index < round.num_accepted { TextOrigin::Accepted } else { own };
    (0..round.kept.len()).map(origin).collect()
}

/// Adds brackets to a token's text according to its origin, and a colour if `colour` is true.
pub(super) fn marked(text: &str, origin: TextOrigin, colour: bool) -> String {
    let (open, close, code) = match origin {
        TextOrigin::Accepted => ("", "", 32),
        TextOrigin::Corrected => ("[", "]", 33),
        TextOrigin::Bonus => ("<", ">", 34),
    };
    // White space stays outside the brackets, so that the text keeps its line breaks.
    let core = text.trim();
    let (before, after) = match text.find(core) {
        Some(start) if !core.is_empty() => (&text[..start], &text[start + core.len()..]),
        _ => (text, ""),
    };
    if core.is_empty() {
        return text.to_owned();
    }
    if colour {
        format!("{before}\u{1b}[{code}m{open}{core}{close}\u{1b}[0m{after}")
    } else {
        format!("{before}{open}{core}{close}{after}")
    }
}

/// Formats a table of rounds: candidates, accepted candidates, tokens, and times in milliseconds.
pub(super) fn table(rounds: &[Round]) -> String {
    let heading = ["round", "drafted", "accepted", "tokens", "draft ms", "verify ms"];
    let rows = rounds.iter().enumerate().map(|(number, round)| {
        let millis = |time: std::time::Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
        [
            (number + 1).to_string(),
            round.num_drafted.to_string(),
            round.num_accepted.to_string(),
            round.num_tokens().to_string(),
            millis(round.draft_time),
            millis(round.verify_time),
        ]
    });
    plain_table(heading, rows, 0..heading.len(), (0, 2), None) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_round_is_the_targets_own() {
        let round = |kept, num_drafted, num_accepted| RoundTokens {
            kept,
            num_drafted,
            num_accepted,
            logits: &[],
        };
        use TextOrigin::{Accepted, Bonus, Corrected};
        assert_eq!(origins(&round(&[1, 2, 3], 4, 2)), [Accepted, Accepted, Corrected]);
        assert_eq!(origins(&round(&[1, 2], 1, 1)), [Accepted, Bonus]);
        assert_eq!(origins(&round(&[1], 3, 0)), [Corrected]);
        // The limit cut the round, so the target's own token is missing.
        assert_eq!(origins(&round(&[1, 2], 3, 3)), [Accepted, Accepted]);
    }

    #[test]
    fn marks_keep_the_text_and_its_white_space() {
        assert_eq!(marked(" word", TextOrigin::Accepted, false), " word");
        assert_eq!(marked(" word", TextOrigin::Corrected, false), " [word]");
        assert_eq!(marked(".\n", TextOrigin::Bonus, false), "<.>\n");
        assert_eq!(marked("\n", TextOrigin::Bonus, true), "\n");
        assert_eq!(marked(" x", TextOrigin::Bonus, true), " \u{1b}[34m<x>\u{1b}[0m");
    }

    #[test]
    fn the_table_has_a_line_a_round() {
        let round = Round { num_drafted: 4, num_accepted: 2, ..Round::default() };
        let table = table(&[round, round]);
        assert_eq!(table.lines().count(), 3);
        assert!(table.lines().all(|line| line.len() <= 80), "{table}");
        assert_eq!(
            table.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(),
            ["1", "4", "2", "3", "0.00", "0.00"]
        );
    }
}

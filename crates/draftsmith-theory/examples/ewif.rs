//! `ewif`: expected walltime improvement (EWIF) over the target alone if candidates are accepted
//! independently, by the closed forms of Leviathan et al. (2023) and CS-Drafting (Chen et al. 2023).
//!
//! Without arguments it prints CS-Drafting's Table 1. α is the chance that a candidate is accepted, c the
//! time of a draft forward over that of a target forward, and K the number of candidates a round:
//!
//! ```text
//! ewif ALPHA C K                       one draft (Leviathan et al., Theorem 3.8)
//! ewif ALPHA C K ALPHA C K …           drafts that take turns (horizontal cascade, Theorem 4.5)
//! ewif --vertical ALPHA C N ALPHA C K  N steps of a draft, each reviewing K candidates of a second
//!                                      one (vertical cascade, Theorem 4.3); the second α is the chance
//!                                      that the first draft accepts
//! ```

use std::process::ExitCode;

use draftsmith_theory::{
    DraftProfile, horizontal_cascade_improvement, vertical_cascade_improvement,
};

const USAGE: &str = "usage: ewif [ALPHA C K]... | ewif --vertical ALPHA C N ALPHA C K";

/// A draft, and its candidates in a round.
type Draft = (DraftProfile, usize);

/// The rows of Table 1: FLAN-T5-small, FLAN-T5-base, and both in turn, for FLAN-T5-XXL. The paper does
/// not print α and c. These α are what Leviathan et al. measured for greedy T5; c is about the draft's
/// share of the target's parameters.
const TABLE_1: [(&str, f64, f64, [[usize; 2]; 3]); 2] = [
    ("CNNDM", 0.73, 0.65, [[0, 9], [8, 0], [5, 3]]),
    ("ENDE", 0.80, 0.75, [[0, 12], [11, 0], [5, 8]]),
];
const BASE_COST: f64 = 0.022;
const SMALL_COST: f64 = 0.0069;

fn table_1() -> String {
    let mut text = format!("{:<8} {:<12} {:>5} {:>6}\n", "dataset", "drafts", "K", "EWIF");
    for (dataset, base_alpha, small_alpha, rows) in TABLE_1 {
        for [base, small] in rows {
            let drafts = [
                (DraftProfile { acceptance_prob: base_alpha, cost_ratio: BASE_COST }, base),
                (DraftProfile { acceptance_prob: small_alpha, cost_ratio: SMALL_COST }, small),
            ];
            let (name, lengths) = match (base, small) {
                (0, small) => ("small", small.to_string()),
                (base, 0) => ("base", base.to_string()),
                _ => ("base, small", format!("{base}, {small}")),
            };
            let improvement = horizontal(&drafts);
            text += &format!("{dataset:<8} {name:<12} {lengths:>5} {improvement:>6.2}\n");
        }
    }
    text
}

/// Computes the EWIF of drafts that take turns.
fn horizontal(drafts: &[Draft]) -> f64 {
    let all = drafts.iter().flat_map(|(draft, length)| std::iter::repeat_n(*draft, *length));
    horizontal_cascade_improvement(all)
}

fn drafts(arguments: &[String]) -> Option<Vec<Draft>> {
    let (triples, rest) = arguments.as_chunks::<3>();
    let draft = |[alpha, cost, length]: &[String; 3]| -> Option<Draft> {
        let (acceptance_prob, cost_ratio) = (alpha.parse().ok()?, cost.parse().ok()?);
        let is_valid = (0.0..=1.0).contains(&acceptance_prob) && cost_ratio >= 0.0;
        is_valid.then_some((DraftProfile { acceptance_prob, cost_ratio }, length.parse().ok()?))
    };
    if rest.is_empty() { triples.iter().map(draft).collect() } else { None }
}

/// Answers the arguments; None if they are not as [`USAGE`] says.
fn answer(arguments: &[String]) -> Option<String> {
    match arguments {
        [] => Some(table_1()),
        [flag, rest @ ..] if flag == "--vertical" => {
            let [(outer, num_steps), (inner, length)] = drafts(rest)?[..] else { return None };
            Some(format!("{:.4}\n", vertical_cascade_improvement(outer, inner, num_steps, length)))
        }
        _ => Some(format!("{:.4}\n", horizontal(&drafts(arguments)?))),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match answer(&arguments) {
        Some(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        None => {
            eprintln!("{USAGE}");
            ExitCode::FAILURE
        }
    }
}

#[test]
fn table_1_is_printed_to_the_digit() {
    // Chen et al. (2023), Table 1.
    let published = [["9", "2.65"], ["8", "2.96"], ["5, 3", "3.03"]].into_iter().chain([
        ["12", "3.61"],
        ["11", "3.75"],
        ["5, 8", "3.93"],
    ]);
    let table = table_1();
    assert_eq!(table.lines().count(), 1 + 6);
    for (line, [lengths, improvement]) in table.lines().skip(1).zip(published) {
        assert!(line.ends_with(&format!(" {lengths:>5} {improvement:>6}")), "{line}");
    }
}

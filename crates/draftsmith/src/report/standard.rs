//! Drafters at standard costs: what each yields a round and is worth apart from this machine's kernels,
//! at which costs trees and cascades pay, and what CS-Drafting's formulas expect of drafters.

use minijinja::{Value, context};

use super::text::{gain, label, number, percent, sentence_case, times};
use crate::results::{
    CascadeForm, DrafterName, ExpectedRound, Group, GroupSummary, WORTH, WorthAt, against_chains,
};

/// A row for each drafter and tree at its fastest setting; None where nothing was drafted.
pub(super) fn table(group: &Group<'_>) -> Option<Vec<Value>> {
    let row = |drafter: DrafterName| {
        let rows = group.pooled().filter(|row| row.drafter == drafter);
        let best = rows.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
        let at = |position: usize| {
            let share = best.unconditional_acceptance.get(position - 1);
            number(share.copied().unwrap_or(f64::NAN), 2)
        };
        Some(context! {
            drafter => label(best),
            tokens_per_round => number(best.tokens_per_round(), 2),
            accepted => [at(1), at(2), at(4), at(8)],
            by_size => times(best.improvement_by_size),
            by_time => times(best.improvement_by_time),
            speedup => times(best.speedup),
        })
    };
    let rows: Vec<Value> = group.drafters().into_iter().filter_map(row).collect();
    (!rows.is_empty()).then_some(rows)
}

/// The best tree or cascade beside the best chain, for all prompts and for each category; None where
/// only one of the two was measured.
pub(super) fn beside_chains(group: &Group<'_>) -> Option<Value> {
    let rows: Vec<Value> = against_chains(group)
        .iter()
        .map(|it| {
            context! {
                category => it.category,
                chain => label(it.chain),
                other => label(it.other),
                gain => gain(1.0 + it.gain),
                free_rows => gain(1.0 + it.gain_with_free_rows),
                worth => costs(it.worth),
            }
        })
        .collect();
    (!rows.is_empty()).then(|| context! { rows, worth => percent(WORTH) })
}

fn costs(worth: WorthAt) -> String {
    match worth {
        WorthAt::RowCosts(from, to) if from == 0.0 && to >= 1.0 => "whatever a row takes".into(),
        WorthAt::RowCosts(0.0, to) => format!("a row takes {} or less", percent(to)),
        WorthAt::RowCosts(from, to) if to >= 1.0 => {
            format!("a row takes {} or more", percent(from))
        }
        WorthAt::RowCosts(from, to) => {
            format!("a row takes {} to {}", percent(from), percent(to))
        }
        WorthAt::DraftCosts(times) => {
            format!("rows are free, drafts {}\u{d7} as dear", number(times, 2))
        }
        WorthAt::Nowhere => "at no costs tried".into(),
    }
}

/// The formulas' best rounds, the best of each costs first.
pub(super) fn expected(known: &GroupSummary) -> Vec<Value> {
    let mut rounds: Vec<&ExpectedRound> = known.expected.iter().collect();
    rounds.sort_by(|a, b| {
        let costs = a.costs.text().cmp(b.costs.text());
        costs.then(b.improvement.total_cmp(&a.improvement))
    });
    let list = |numbers: &[f64], decimals| {
        numbers.iter().map(|value| number(*value, decimals)).collect::<Vec<_>>().join(", ")
    };
    let row = |round: &&ExpectedRound| {
        let ExpectedRound { drafters, lengths, .. } = round;
        let names: Vec<String> = drafters.iter().map(|id| id.text()).collect();
        let lengths: Vec<String> = lengths.iter().map(usize::to_string).collect();
        let (names, how) = match (round.form, &drafters[..]) {
            (CascadeForm::Vertical, _) => {
                (names.join(" reviews "), format!("{} steps of {}", lengths[0], lengths[1]))
            }
            (CascadeForm::Horizontal, [_]) => (names.concat(), format!("K = {}", lengths[0])),
            (CascadeForm::Horizontal, _) => (names.join(", then "), lengths.join(" and ")),
        };
        context! {
            drafters => sentence_case(&names),
            costs => round.costs.text(),
            acceptance => list(&round.acceptance_probs, 2),
            cost_ratios => list(&round.cost_ratios, 3),
            how,
            improvement => times(Some(round.improvement)),
        }
    };
    rounds.iter().map(row).collect()
}

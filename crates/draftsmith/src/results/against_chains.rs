//! Whether trees and cascades are worth it: the best of them beside the best chain of one drafter, at
//! this machine's costs and at others.
//!
//! What a setting takes a token is a number of target forwards, further rows of those, and draft
//! forwards. The counts were measured; what rows and draft forwards cost may differ elsewhere, and
//! each side then goes by the setting that is best there.

use draftsmith_theory::DrafterId;

use super::group::fastest;
use super::{ALL_CATEGORIES, DrafterName, Group, ResultRow};

/// What trees and cascades are asked to gain.
pub(crate) const WORTH: f64 = 0.1;
/// Costs of a row that are tried: thousandths of a target forward, up to a whole one.
const ROW_COSTS: u32 = 1000;
/// How far draft forwards are made cheaper and dearer: 4 doublings either way, in sixteenths.
const DRAFT_COSTS: i32 = 4 * 16;

/// The best tree or cascade beside the best chain, for the prompts of a category or all.
#[derive(Debug)]
pub(crate) struct AgainstChains<'a> {
    /// See [`ResultRow::category`].
    pub(crate) category: &'a str,
    /// The fastest chain here.
    pub(crate) chain: &'a ResultRow,
    /// The fastest tree, cascade, or drafter behind look-ups, here.
    pub(crate) other: &'a ResultRow,
    /// Its tokens a second over the chain's, less 1.
    pub(crate) gain: f64,
    /// The same of the best ones if further rows cost nothing and draft forwards what they do here.
    pub(crate) gain_with_free_rows: f64,
    /// Where the best one would gain a tenth.
    pub(crate) worth: WorthAt,
}

/// At which costs something is worth it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum WorthAt {
    /// Where a further row takes from one to the other of these shares of a target forward, and draft
    /// forwards what they take here. The second is 1 where it was not tried further.
    RowCosts(f64, f64),
    /// Where rows cost nothing and draft forwards so many times what they take here: the nearest.
    DraftCosts(f64),
    /// At none that was tried.
    Nowhere,
}

/// What a token takes: target forwards, further rows, and draft forwards in units of target forwards.
#[derive(Debug, Clone, Copy)]
struct Taken {
    is_chain: bool,
    forwards: f64,
    rows: f64,
    drafting: f64,
}

impl Taken {
    fn of(row: &ResultRow) -> Option<Self> {
        let tokens = row.num_tokens as f64;
        let forwards = row.num_target_forwards as f64 / tokens;
        Some(Self {
            is_chain: is_chain(row.drafter)?,
            forwards,
            rows: row.num_drafted as f64 / tokens,
            drafting: 1.0 / row.improvement_by_time? - forwards,
        })
    }

    fn at(&self, row_cost: f64, draft_cost: f64) -> f64 {
        self.forwards + row_cost * self.rows + draft_cost * self.drafting
    }
}

/// Whether a drafter proposes chains by itself; None for the target alone.
fn is_chain(drafter: DrafterName) -> Option<bool> {
    match drafter {
        DrafterName::None => None,
        DrafterName::Of(id) => {
            Some(!matches!(id, DrafterId::Cascade { .. } | DrafterId::Merged { .. }))
        }
        DrafterName::Tree(..) | DrafterName::After(..) => Some(false),
    }
}

/// All prompts of a group, then each category; of those for which both sides were measured.
pub(crate) fn against_chains<'a>(group: &Group<'a>) -> Vec<AgainstChains<'a>> {
    let categories = [ALL_CATEGORIES].into_iter().chain(group.categories());
    categories.filter_map(|category| of_category(category, group)).collect()
}

fn of_category<'a>(category: &'a str, group: &Group<'a>) -> Option<AgainstChains<'a>> {
    let rows = || group.of_category(category);
    let best =
        |chains: bool| fastest(rows().filter(move |row| is_chain(row.drafter) == Some(chains)));
    let (chain, other) = (best(true)?, best(false)?);
    let taken: Vec<Taken> = rows().filter_map(Taken::of).collect();
    let gain_at = |row_cost: f64, draft_cost: f64| {
        let least = |chains: bool| {
            let of_side = taken.iter().filter(|taken| taken.is_chain == chains);
            of_side.map(|taken| taken.at(row_cost, draft_cost)).fold(f64::INFINITY, f64::min)
        };
        least(true) / least(false) - 1.0
    };
    Some(AgainstChains {
        category,
        chain,
        other,
        gain: other.tokens_per_second / chain.tokens_per_second - 1.0,
        gain_with_free_rows: gain_at(0.0, 1.0),
        worth: worth_at(gain_at),
    })
}

fn worth_at(gain_at: impl Fn(f64, f64) -> f64) -> WorthAt {
    let cost = |step: u32| f64::from(step) / f64::from(ROW_COSTS);
    let is_worth = |step: &u32| gain_at(cost(*step), 1.0) >= WORTH;
    if let Some(first) = (0..=ROW_COSTS).find(is_worth) {
        let last = (first..=ROW_COSTS).take_while(is_worth).last().unwrap_or(first);
        return WorthAt::RowCosts(cost(first), cost(last));
    }
    let scale = |step: i32| 2_f64.powf(f64::from(step) / 16.0);
    // The nearest first, cheaper ones ahead of dearer ones.
    let nearest = (1..=DRAFT_COSTS).flat_map(|step| [-step, step]);
    let found = nearest.map(scale).find(|scale| gain_at(0.0, *scale) >= WORTH);
    found.map_or(WorthAt::Nowhere, WorthAt::DraftCosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain and something else, each told as forwards, rows and drafting of a token.
    fn found(chain: [f64; 3], other: [f64; 3]) -> WorthAt {
        let at = |[forwards, rows, drafting]: [f64; 3], row_cost: f64, draft_cost: f64| {
            Taken { is_chain: true, forwards, rows, drafting }.at(row_cost, draft_cost)
        };
        worth_at(|rows, drafts| at(chain, rows, drafts) / at(other, rows, drafts) - 1.0)
    }

    #[test]
    fn costs_are_found_at_which_the_gain_is_a_tenth() {
        // 0.5 + r over 0.4 + 2 r is 1.1 at r = 0.05.
        let WorthAt::RowCosts(from, to) = found([0.5, 1.0, 0.0], [0.4, 2.0, 0.0]) else {
            panic!("it is worth it with free rows")
        };
        assert!(from == 0.0 && (0.049..=0.05).contains(&to), "{from} to {to}");
        // Fewer rows: the dearer they are, the better; 0.5 + r over 0.5 + 0.5 r is 1.1 at r = 0.111.
        let WorthAt::RowCosts(from, to) = found([0.5, 1.0, 0.0], [0.5, 0.5, 0.0]) else {
            panic!("it is worth it with dear rows")
        };
        assert!((0.111..=0.112).contains(&from) && to == 1.0, "{from} to {to}");
        // Less drafting and as many rows: 0.5 + 0.1 s over 0.5 + 0.02 s is 1.1 at s = 0.641; and more of it.
        let WorthAt::RowCosts(from, to) = found([0.5, 0.0, 0.1], [0.5, 0.0, 0.02]) else {
            panic!("it is worth it here")
        };
        assert_eq!((from, to), (0.0, 1.0));
        let WorthAt::DraftCosts(times) = found([0.5, 0.0, 0.1], [0.5, 0.0, 0.06]) else {
            panic!("it would be, were drafting dearer")
        };
        // 0.5 + 0.1 s over 0.5 + 0.06 s is 1.1 at s = 1.47; a sixteenth of a doubling is 4 %.
        assert!((1.47..1.54).contains(&times), "{times}");
        assert_eq!(found([0.5, 1.0, 0.1], [0.5, 1.0, 0.1]), WorthAt::Nowhere);
    }

    #[test]
    fn only_what_one_drafter_proposes_by_itself_is_a_chain() {
        let shape = "2x1x3".parse().expect("it is a shape");
        let first = "2x4".parse().expect("it is a look-up");
        let names = [
            (DrafterName::None, None),
            (DrafterName::Of(DrafterId::Draft), Some(true)),
            (DrafterName::Of(DrafterId::MaxGram), Some(true)),
            (DrafterName::Of(DrafterId::SelfDraft { exit_layer: 1 }), Some(true)),
            (DrafterName::Tree(DrafterId::Draft, shape), Some(false)),
            (DrafterName::After(first, DrafterId::Draft), Some(false)),
            (DrafterName::Of("cascade_1".parse().expect("it is a name")), Some(false)),
        ];
        for (name, expected) in names {
            assert_eq!(is_chain(name), expected, "{name}");
        }
    }
}

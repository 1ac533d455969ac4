//! Branching at the leading node (CS-Drafting with tree attention, of which the paper tells settings
//! and no code was published): other first tokens beside the chain's, each with what is looked up behind
//! it.
//!
//! The siblings take no draft forward: they are of the distribution that the chain's first token was
//! drawn from, the most probable others where that was certain, and otherwise drawn without
//! replacement. They are as many whatever was drawn, unless the distribution has no more tokens. What is
//! looked up behind one depends on the text up to it alone.

use draftsmith_theory::{Children, DrafterId, DrawnFrom, Node};

use crate::drafter::DraftRound;
use crate::max_gram::MaxGramDraft;

/// Adds up to `num` siblings of a proposed chain's first token to a round's proposal, each with up to
/// `num_behind` looked-up tokens. They come behind the chain, which drafters have read.
pub(super) fn branch(
    mut siblings: Children,
    [num, num_behind]: [usize; 2],
    mut lookup: Option<&mut MaxGramDraft<'_>>,
    round: &mut DraftRound<'_>,
) {
    let DraftRound { slot, tokens, proposal, limits, draws, .. } = round;
    let num_standing = tokens.len() - proposal.len();
    let mut proposed = tokens.split_off(num_standing);
    for rank in 1..=num {
        let Some((token_id, drawn_from, _)) = siblings.next(*draws) else { break };
        let mut last = proposal.push(Node { parent: None, token_id, drawn_from, rank });
        tokens.push(token_id);
        if let Some(lookup) = &mut lookup
            && num_behind > 0
            && !limits.is_end(tokens)
        {
            // It has read the chain, or the sibling before.
            lookup.forget(*slot, num_standing);
            let found = lookup.look_up(*slot, tokens, num_behind, limits.eos_token_ids);
            proposal.forwards.add(DrafterId::MaxGram, found.len());
            for token_id in found {
                let (parent, drawn_from) = (Some(last), DrawnFrom::OneHot);
                last = proposal.push(Node { parent, token_id, drawn_from, rank: 0 });
            }
        }
        proposed.extend(tokens.drain(num_standing..));
    }
    tokens.append(&mut proposed);
}

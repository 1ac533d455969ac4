//! Branching at the leading node: other first tokens beside the chain's, each followed by look-ups. It is
//! CS-Drafting with tree attention, for which the paper gives settings and no code was published.
//!
//! The siblings need no draft forward. They come from the distribution of the chain's first token: the
//! next most probable tokens if that one was chosen greedily, otherwise tokens drawn without
//! replacement. Their number does not depend on what was drawn, unless the distribution runs out of
//! tokens. The look-ups after a sibling depend only on the text up to it.

use draftsmith_theory::{Children, DrafterId, DrawnFrom, Node};

use crate::drafter::DraftRound;
use crate::max_gram::MaxGramDraft;

/// Adds up to `num` siblings of a chain's first token to a round's proposal, each with up to `num_after`
/// looked-up tokens. They come after the chain, since drafters have read the chain.
pub(super) fn branch(
    mut siblings: Children,
    [num, num_after]: [usize; 2],
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
            && num_after > 0
            && !limits.is_end(tokens)
        {
            // It has read the chain, or the sibling before.
            lookup.forget(*slot, num_standing);
            let found = lookup.look_up(*slot, tokens, num_after, limits.eos_token_ids);
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

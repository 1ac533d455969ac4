//! Look-ups before models: greedy output is plain greedy output.

use draftsmith_theory::DrafterId;

use super::*;
use crate::lookup_first::LookupFirstDraft;

#[test]
fn greedy_output_with_look_ups_first_is_plain_greedy_output_in_every_family() {
    let mut num_rounds = [0; 2];
    for name in FAMILIES {
        let model = target_of(name);
        let exit_layer = exit_layer_of(&model);
        let name = format!("lookup-{name}");
        let adapter = adapter(&model, AdapterArchitecture::Attention, exit_layer, 0.02, &name);
        for (prompt, max_new_tokens) in prompts().iter().zip([3, 40, 40, 80]) {
            let limits = Limits::new(max_new_tokens, vec![]);
            let context = prompt.len() + 44;
            let session = &mut ModelSession::new(&model, context, "target");
            let plain = greedy_plain(session, prompt, &limits);
            let mut session = session_with_exit(&model, exit_layer, context);
            let mut self_draft = SelfDraft::new(&model, &adapter, exit_layer, None, context, 1);
            let mut separate = SeparateDraft::new(&model, None, 96, context, 1);
            for first in ["1x2", "2x4", "3x9"] {
                let first = first.parse().expect("one");
                let rule = &mut FixedLengthConfig { candidate_length: 2 };
                let drafter = &mut LookupFirstDraft::new(&mut self_draft, (first, None), 1);
                let found = greedy(&mut session, drafter, rule, prompt, &limits);
                assert_eq!(found.token_ids, plain.token_ids, "{name} {first}");
                for round in &found.trace.rounds {
                    let looked_up = |(drafter, _)| drafter == DrafterId::LOOK_UP;
                    let of = usize::from(round.forwards.iter().any(looked_up));
                    num_rounds[of] += usize::from(round.num_accepted > 0);
                }
                let drafter = &mut LookupFirstDraft::new(&mut separate, (first, None), 1);
                let found = greedy(&mut session, drafter, rule, prompt, &limits);
                assert_eq!(found.token_ids, plain.token_ids, "{name} {first}");
            }
        }
    }
    assert!(num_rounds.iter().all(|num| *num > 20), "{num_rounds:?}");
}

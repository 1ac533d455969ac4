//! Cascades of models, with and without siblings of the first token: greedy output is plain greedy
//! output.

use draftsmith_theory::{DrafterId, MaxGramConfig};

use super::*;
use crate::cascade::{Cascade, CascadeConfig};
use crate::max_gram::MaxGramDraft;

#[test]
fn greedy_output_of_cascades_is_plain_greedy_output_in_every_family() {
    for name in FAMILIES {
        let model = target_of(name);
        let exit_layer = exit_layer_of(&model);
        let name = format!("cascade-{name}");
        let own = adapter(&model, AdapterArchitecture::Attention, exit_layer, 0.02, &name);
        for (prompt, max_new_tokens) in prompts().iter().zip([3, 40, 40, 80]) {
            let limits = Limits::new(max_new_tokens, vec![]);
            let context = prompt.len() + 44;
            let session = &mut ModelSession::new(&model, context, "target");
            let plain = greedy_plain(session, prompt, &limits);
            let mut session = session_with_exit(&model, exit_layer, context);
            for (lengths, num_first_tokens) in [
                (vec![vec![1, 3], vec![0, 1]], 1),
                (vec![vec![1, 3], vec![0, 1]], 8),
                (vec![vec![2, 0], vec![0, 3]], 1),
                (vec![vec![2, 1, 2], vec![0, 1, 1], vec![0, 0, 1]], 1),
                (vec![vec![2, 1, 2], vec![0, 1, 1], vec![0, 0, 1]], 8),
            ] {
                let self_draft = SelfDraft::new(&model, &own, exit_layer, None, context, 1);
                let separate = SeparateDraft::new(&model, None, 96, context, 1);
                let mut models: Vec<Box<dyn StepDrafter<ModelSession<'_>> + '_>> =
                    vec![Box::new(self_draft)];
                if lengths.len() > 2 {
                    models.push(Box::new(separate));
                }
                let message = format!("{name} {lengths:?} {num_first_tokens}");
                let config = CascadeConfig { num_first_tokens, ..CascadeConfig::new(lengths) };
                let lookup = MaxGramDraft::new(MaxGramConfig::default(), (None, None), 1);
                let id = DrafterId::named("cascade");
                let drafter = &mut Cascade::new(id, config, models, Some(Box::new(lookup)));
                let rule = &mut FixedLengthConfig { candidate_length: 9 };
                let found = greedy(&mut session, drafter, rule, prompt, &limits);
                assert_eq!(found.token_ids, plain.token_ids, "{message}");
            }
        }
    }
}

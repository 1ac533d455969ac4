//! Heads draft from the target's last state, and leave its greedy output unchanged in every family.

use std::path::Path;

use burn::tensor::Device;
use draftsmith_model::{CausalLm, MedusaConfig};
use draftsmith_theory::{FixedLengthConfig, SeededDraws, SignalNeeds, StopRuleConfig};

use super::*;
use crate::drafter::Drafter;
use crate::round_draft::RoundDraft;
use crate::sequence::Limits;
use crate::session::ModelSession;
use crate::session::tests::{draft_one, greedy, greedy_plain, tensor_of};
use crate::target::{Target, TargetLayers};
use crate::tree_draft::TreeDraft;

const CAPACITY: usize = 64;

/// Heads that begin as the target's LM head, with random biases.
fn heads_of(target: &CausalLm, num_heads: usize, has_lm_heads: bool) -> Medusa {
    let mut draws = SeededDraws::new(4, &["heads"]);
    let config = MedusaConfig::new(target.shape(), num_heads);
    let vocab_size = config.vocab_size.filter(|_| has_lm_heads);
    let config = MedusaConfig { vocab_size, ..config };
    config.init_from(&Device::flex(), || draws.uniform()).with_heads_of(target)
}

fn session(target: &CausalLm) -> ModelSession<'_> {
    let mut session = ModelSession::new(target, CAPACITY, "target");
    session.set_layers(&TargetLayers::kept(&[target.shape().num_layers]));
    session
}

#[test]
fn greedy_output_of_chains_and_trees_is_plain_greedy_output_in_every_family() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let dirs =
        std::fs::read_dir(fixtures).expect("it lists").map(|entry| entry.expect("it lists").path());
    let is_model = |dir: &std::path::PathBuf| {
        dir.join("expected.safetensors").exists() && dir.join("config.json").exists()
    };
    let limits = &Limits::new(40, Vec::new());
    let (mut num_families, mut accepted) = (0, [0; 2]);
    for dir in dirs.filter(is_model) {
        let target = CausalLm::from_model_dir(&dir, &Device::flex()).expect("the fixture loads");
        let layers = [target.shape().num_layers];
        num_families += 1;
        for (has_lm_heads, prompt) in [(true, &[3, 9, 27][..]), (false, &[5])] {
            let plain =
                greedy_plain(&mut ModelSession::new(&target, CAPACITY, "target"), prompt, limits);
            let network = heads_of(&target, 4, has_lm_heads);
            for (nth, shape) in [None, Some("10x64x59")].into_iter().enumerate() {
                let mut session = session(&target);
                let mut drafter = RoundDraft::new((&target, &network), &layers, CAPACITY, 1);
                let rule: StopRuleConfig = FixedLengthConfig { candidate_length: 9 }.into();
                let rule = &mut *rule.init().expect("valid");
                let found = match shape {
                    None => greedy(&mut session, &mut drafter, rule, prompt, limits),
                    Some(shape) => {
                        let mut tree =
                            TreeDraft::new(&mut drafter, shape.parse().expect("a shape"));
                        greedy(&mut session, &mut tree, rule, prompt, limits)
                    }
                };
                assert_eq!(found.token_ids, plain.token_ids, "{dir:?} {shape:?}");
                for round in &found.trace.rounds {
                    assert!(round.num_draft_forwards() <= 1, "one forward drafts a round");
                    assert!(
                        shape.is_some() || round.num_drafted <= 4,
                        "one candidate for each head"
                    );
                }
                accepted[nth] += found.trace.counts().num_accepted;
            }
        }
    }
    assert!(num_families >= 13, "{num_families}");
    assert!(accepted[0] > 20 && 2 * accepted[1] > 3 * accepted[0], "{accepted:?}");
}

#[test]
fn each_candidate_is_drawn_from_the_head_of_its_number_at_the_last_token_but_one() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen3-bf16");
    let target = CausalLm::from_model_dir(&fixture, &Device::flex()).expect("the fixture loads");
    let (network, num_layers) = (heads_of(&target, 3, true), target.shape().num_layers);
    let layers = [num_layers];
    let text = [7, 8, 9, 10, 11];
    let mut session = session(&target);
    let mut drafter = RoundDraft::new((&target, &network), &layers, CAPACITY, 1);
    for len in 2..=text.len() {
        let prompt = &text[..len];
        session.begin(0, prompt).expect("it fits");
        Drafter::begin(&mut drafter, &mut session, 0, prompt).expect("it fits");
        session.begin_round(0, len);
        let states = target.exit_states(tensor_of(prompt, &target), num_layers);
        let rows = Rows::from(states).slice(len - 2..len - 1);
        let expected = network.logits(rows, 3, &target);
        let mut tokens = prompt.to_vec();
        // A cascade may ask for a fourth candidate, which comes from the last head.
        for (number, head) in [0, 1, 2, 2].into_iter().enumerate() {
            let row =
                draft_one(&mut drafter, &mut session, &tokens, number, SignalNeeds::default());
            let [of_head] = to_host([expected[head].clone()], ROLE).expect("on the host");
            for (found, expected) in row.logits().iter().zip(&of_head) {
                // The session reads tokens one by one, which rounds otherwise.
                assert!((found - expected).abs() < 1e-4, "{len} {number}: {found} for {expected}");
            }
            tokens.push(50 + number as u32);
        }
    }
}

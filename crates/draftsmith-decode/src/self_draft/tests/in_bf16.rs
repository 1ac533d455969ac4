//! Models of every family in bf16: speculative output is plain output, except for ties that rounding breaks
//! the other way. A forward over several rows may round differently from a forward over one.

use draftsmith_model::AcceptanceHeadConfig;
use draftsmith_theory::{RejectionThresholdConfig, Rounding, StopRuleConfig};

use super::*;

const EXIT_LAYER: usize = 1;
const CONTEXT: usize = 96;

fn in_bf16(name: &str) -> CausalLm {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    let loaded = CausalLm::load(&dir, WeightDtype::Bf16, None, &Device::flex());
    loaded.expect("the fixture loads")
}

/// Writes a random adapter and reads it in bf16.
fn adapter_in_bf16(target: &CausalLm) -> Adapter {
    let device = Device::flex();
    device.seed(3);
    let dir = std::env::temp_dir().join(format!("draftsmith-bf16-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    let config = config_of(target, AdapterArchitecture::Attention, EXIT_LAYER);
    config.init(&device).write_dir(&dir, &config).expect("written");
    let read = Adapter::from_dir(&dir, target.shape(), WeightDtype::Bf16, &device);
    std::fs::remove_dir_all(&dir).expect("removed");
    read.expect("reads").1
}

/// The counts of generations, by how their greedy output compares with plain decoding.
#[derive(Debug, Default)]
struct Tally {
    num_same: usize,
    num_ties: usize,
    num_different: usize,
    num_accepted: usize,
}

impl Tally {
    /// Counts a generation as the same as plain decoding, as a tie at the first difference, or as different.
    fn add(&mut self, model: &CausalLm, prompt: &[u32], plain: &[u32], found: &Generation) {
        self.num_accepted += found.trace.counts().num_accepted;
        let mut pairs = plain.iter().zip(&found.token_ids);
        let Some(at) = pairs.position(|(a, b)| a != b) else {
            assert_eq!(plain, found.token_ids);
            self.num_same += 1;
            return;
        };
        let ids = [prompt, &plain[..at]].concat();
        let logits = ModelSession::new(model, CONTEXT, "target").score(&ids, ids.len() - 1);
        let logits = logits.expect("finite");
        let is_tie = Rounding::Bf16.is_tie(logits.row(0), plain[at], found.token_ids[at]);
        *(if is_tie { &mut self.num_ties } else { &mut self.num_different }) += 1;
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_except_for_ties_in_every_family() {
    let device = Device::flex();
    let limits = Limits::new(32, vec![]);
    let mut tally = Tally::default();
    for name in FAMILIES {
        let model = in_bf16(name);
        let adapter = adapter_in_bf16(&model);
        let head = AcceptanceHeadConfig::new(model.shape().hidden_size, 1, true).init(&device);
        let plain_session = &mut ModelSession::new(&model, CONTEXT, "target");
        let mut session = session_with_exit(&model, EXIT_LAYER, CONTEXT);
        let mut self_draft = SelfDraft::new(&model, &adapter, EXIT_LAYER, Some(&head), CONTEXT, 1);
        let vocab_size = model.shape().vocab_size;
        // The target as its own draft.
        let mut separate = SeparateDraft::new(&model, Some(&head), vocab_size, CONTEXT, 1);
        let bounds = Bounds { min: 1, max: 6 };
        let mut fixed = FixedLengthConfig { candidate_length: 4 };
        let threshold =
            RejectionThresholdConfig { stop_threshold: 0.7, without_lag: false, bounds };
        let mut threshold = StopRuleConfig::from(threshold).init().expect("valid settings");
        for prompt in prompts().iter().skip(2) {
            let plain = greedy_plain(plain_session, prompt, &limits).token_ids;
            for rule in [&mut fixed as &mut dyn StopRule, &mut *threshold] {
                let found = greedy(&mut session, &mut self_draft, rule, prompt, &limits);
                tally.add(&model, prompt, &plain, &found);
                let found = greedy(&mut session, &mut separate, rule, prompt, &limits);
                tally.add(&model, prompt, &plain, &found);
            }
        }
    }
    let Tally { num_same, num_ties, num_different, num_accepted } = tally;
    assert_eq!((num_same + num_ties, num_different), (FAMILIES.len() * 2 * 4, 0));
    // Ties are the exception, and candidates were accepted.
    assert!(
        num_same > 5 * num_ties && num_accepted > 100,
        "{num_same}, {num_ties}, {num_accepted}"
    );
}

/// A target that rounds several rows differently from one, as GPUs do: it moves each logit up, down or not
/// at all.
struct Uneven<'m> {
    session: ModelSession<'m>,
    /// The size of a move, relative to the tolerance.
    share: f32,
}

impl Target for Uneven<'_> {
    fn num_slots(&self) -> usize {
        self.session.num_slots()
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.session.begin(slot, prompt)
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        let logits = self.session.verify(batch)?;
        if logits.num_rows() == 1 {
            return Ok(logits);
        }
        let num_tokens = batch[0].tokens.len().to_string();
        let mut draws = SeededDraws::new(1, &["uneven", &num_tokens]);
        let mut moved = |logit: f32| {
            let step = (3.0 * draws.uniform()).floor() as f32 - 1.0;
            logit + step * self.share * Rounding::Bf16.allowance(logit)
        };
        let rows: Vec<&[f32]> = logits.rows().collect();
        let values = rows.concat().into_iter().map(&mut moved).collect();
        Ok(Logits::new(values, rows[0].len()))
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.session.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.session.context()
    }
}

#[test]
fn rounding_of_rows_side_by_side_is_forgiven_and_larger_differences_are_not() {
    let limits = Limits::new(32, vec![]);
    let mut rule = FixedLengthConfig { candidate_length: 4 };
    // If each logit moves by half the tolerance, gaps move by up to the whole tolerance.
    for (share, is_rounding) in [(0.5, true), (3.0, false)] {
        let mut tally = Tally::default();
        for name in FAMILIES {
            let model = in_bf16(name);
            let vocab_size = model.shape().vocab_size;
            let mut drafter = SeparateDraft::new(&model, None, vocab_size, CONTEXT, 1);
            let session = ModelSession::new(&model, CONTEXT, "target");
            let mut target = Uneven { session, share };
            for prompt in prompts() {
                let plain = greedy_plain(&mut target, &prompt, &limits).token_ids;
                let found = greedy(&mut target, &mut drafter, &mut rule, &prompt, &limits);
                tally.add(&model, &prompt, &plain, &found);
            }
        }
        let Tally { num_ties, num_different, .. } = tally;
        assert_eq!(num_different == 0, is_rounding, "{tally:?}");
        assert!(num_ties > 0, "{tally:?}");
    }
}

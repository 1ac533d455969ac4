//! Exactness with real networks in place of tables: a drafter of every kind, alone and inside every
//! composite drafter, preserves the target's distribution.
//!
//! The networks are tiny, random and packed in host memory, where no row of a chain depends on the rows beside
//! it, bit for bit. So plain decoding and verifications compute the same probabilities, and sums of their
//! products agree to the tolerance of tables. In a tree, siblings lie between the keys of a path, so attention
//! adds up its values in another grouping, and f32 rounds them differently.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, BlockDrafter, BlockDrafterConfig,
    CachedNetwork, CausalLm, ConfidenceHead, Eagle, Eagle3, Eagle3Config, EagleConfig, HeadForm,
    HeadInput, HeadReads, KvCache, Medusa, MedusaConfig, ModelConfig, ModelShape, Rows, StateNorms,
    StepNetwork, WeightDtype,
};
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Decoding, DrafterId, Draws, FixedLengthConfig,
    HeuristicConfig, Lenience, LookupFirst, MaxGramConfig, RejectionThresholdConfig, Sampling,
    SearchedText, SeededDraws, StopRule, StopRuleConfig, SuffixSettings, distribution_of,
    enumerate,
};

use super::assert_same_distribution;
use super::cascade::{lenient, matrix};
use super::max_gram::stored;
use super::tables::{Asked, StopMap};
use crate::block_draft::BlockDraftParts;
use crate::cascade::{CascadeConfig, CascadeParts};
use crate::decode::{decode_many, decode_on, decode_plain, decode_speculative};
use crate::drafter::Drafter;
use crate::lookup_first::LookupFirstDraft;
use crate::max_gram::LookUpParts;
use crate::medusa_draft::MedusaDraftParts;
use crate::merged::MergedParts;
use crate::registry::{DrafterParts, Drafters, NamedParts, Sizes};
use crate::self_draft::SelfDraftParts;
use crate::separate_draft::DraftModelParts;
use crate::sequence::{Generation, Limits, Request};
use crate::session::ModelSession;
use crate::session::tests::go_on;
use crate::state_draft::StateDraftParts;
use crate::tree_draft::TreeDraft;

/// The largest relative difference of a probability in trees: f32 rounds logits near 0.1 by some 1e-8, and the
/// temperature of 0.05 makes twenty times that of each.
const TREE_ROUNDING: f64 = 1e-6;

const CAPACITY: usize = 48;
const WIDTH: usize = 8;
const LOOKUP: &str = "look";
/// A look-up that searches stored answers.
const ANSWERS: &str = "answers";
const BRANCHING: DrafterId = DrafterId::named("branching");
const MERGED: DrafterId = DrafterId::named("merged");
/// Draft models whose matrices have fewer and more rows than the target's.
const PADDED: [&str; 2] = ["fewer-rows", "more-rows"];
/// Drafters of each kind with a model, a second one of the kind that reads the target's states, and a second block
/// drafter: fill-in and bidirectional, as those of others.
const STEPPING: [&str; 8] =
    ["model", "adapter", "eagle", "eagle1", "other", "block", "dflash", "medusa"];

/// A network that reads one state of the target.
#[derive(Debug)]
struct OneState(Eagle3);

impl CachedNetwork for OneState {
    fn context(&self) -> usize {
        self.0.context()
    }

    fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        self.0.new_cache(capacity, num_slots)
    }

    fn no_output(&self, target: &CausalLm, slot: usize) -> Rows {
        self.0.no_output(target, slot)
    }
}

impl StepNetwork for OneState {
    fn features(&self, target: &CausalLm, states: &[Rows]) -> Rows {
        let [state] = states else { panic!("one state") };
        self.0.features(target, &[state.clone(), state.clone(), state.clone()])
    }

    fn forward_cached(&self, embedded: Rows, features: Rows, cache: &mut KvCache) -> Rows {
        self.0.forward_cached(embedded, features, cache)
    }

    fn normed(&self, outputs: Rows) -> Rows {
        self.0.normed(outputs)
    }
}

/// A target and drafters of every kind.
struct Networks {
    target: CausalLm,
    drafters: Vec<NamedParts>,
}

/// Fills a temporary directory with `write`, and returns what `read` makes of it.
fn from_files<R>(name: &str, write: impl FnOnce(&Path), read: impl FnOnce(&Path) -> R) -> R {
    let dir = format!("draftsmith-networks-{name}-{}", std::process::id());
    let dir: PathBuf = std::env::temp_dir().join(dir);
    std::fs::create_dir_all(&dir).expect("created");
    write(&dir);
    let found = read(&dir);
    std::fs::remove_dir_all(&dir).expect("removed");
    found
}

fn model(config: &ModelConfig, name: &str) -> CausalLm {
    let device = Device::flex();
    let write = |dir: &Path| {
        config.init(&device).write_model_dir(dir, WeightDtype::F32).expect("written");
    };
    from_files(name, write, |dir| CausalLm::from_model_dir(dir, &device).expect("reads"))
}

fn head(reads: &HeadReads, name: &str) -> AcceptanceHead {
    let device = Device::flex();
    let config = AcceptanceHeadConfig::new(WIDTH, 1, true).with_reads(reads.clone());
    let write = |dir: &Path| config.init(&device).write_dir(dir, &config).expect("written");
    from_files(name, write, |dir| AcceptanceHead::from_dir(dir, WIDTH, &device).expect("reads").1)
}

fn named(name: &'static str, parts: impl DrafterParts + 'static) -> NamedParts {
    NamedParts { id: DrafterId::named(name), parts: Arc::new(parts) }
}

impl Networks {
    /// Initialises networks from a seed, which must be unique to the test. Their heads read `reads`.
    fn new(seed: u64, vocab_size: usize, reads: &HeadReads) -> Self {
        let device = &Device::flex();
        device.seed(seed);
        let config = |num_layers, vocab_size| {
            let shape = ModelShape {
                vocab_size,
                hidden_size: WIDTH,
                num_layers,
                num_heads: 2,
                num_kv_heads: 1,
                head_dim: 4,
                context: CAPACITY,
                bos_token_id: None,
                eos_token_ids: Vec::new(),
            };
            ModelConfig::llama(shape, 16)
        };
        let of_target = config(4, vocab_size);
        let of = |what: &str| format!("{seed}-{what}");
        let target = model(&of_target, &of("target"));
        let head = |what: &str| Some(head(reads, &of(&format!("head-{what}"))));
        let of_adapter = AdapterConfig::new(&of_target, 1).expect("an exit");
        let adapter = from_files(
            &of("adapter"),
            |dir| of_adapter.init(device).write_dir(dir, &of_adapter).expect("written"),
            |dir| {
                Adapter::from_dir(dir, &of_target.shape, WeightDtype::F32, device).expect("reads").1
            },
        );
        // The other one has a Qwen 3's layer with a window, and EAGLE-3.1's norms.
        let eagle = |name: &'static str| {
            let own = Eagle3Config::new(&of_target).with(|it| {
                it.target_layers = vec![0, 2, 4];
                if name == "other" {
                    it.add_head_norms();
                    it.set_window(Some(3));
                    (it.state_norms, it.norm_output) = (StateNorms::OfEach, true);
                }
            });
            let read =
                |dir: &Path| Eagle3::from_dir(dir, &of_target.shape, WeightDtype::F32, device);
            from_files(
                &of(name),
                |dir| own.init(device).write_dir(dir, &own).expect("written"),
                |dir| read(dir).expect("reads").1,
            )
        };
        let own = EagleConfig::new(&of_target).with(|it| it.has_bias = true);
        let eagle1 = from_files(
            &of("eagle1"),
            |dir| own.init(device).write_dir(dir, &own).expect("written"),
            |dir| {
                Eagle::from_dir(dir, &of_target.shape, WeightDtype::F32, device).expect("reads").1
            },
        );
        let eagle1 = StateDraftParts { network: eagle1, layers: vec![4], head: None };
        let eagle3 =
            StateDraftParts { network: eagle("eagle"), layers: vec![0, 2, 4], head: head("eagle") };
        let other = StateDraftParts {
            network: OneState(eagle("other")),
            layers: vec![3],
            head: head("other"),
        };
        let block = |name: &str, is_ours: bool| {
            let own = BlockDrafterConfig::new(&of_target, 2, 0).with(|it| {
                it.block_size = 3;
                it.is_anchor_first = is_ours;
                it.is_causal = is_ours;
                it.markov_rank = if is_ours { 2 } else { 0 };
                it.confidence = ConfidenceHead::OfRowAndToken;
                it.target_layers = vec![1, 4];
                it.set_window((!is_ours).then_some(4));
                if let Some(window) = &mut it.model.spec.window {
                    window.layers[1] = false;
                }
            });
            let read = |dir: &Path| {
                BlockDrafter::from_dir(dir, &of_target.shape, WeightDtype::F32, device)
            };
            let network = from_files(
                &of(name),
                |dir| own.init(device).write_dir(dir, &own).expect("written"),
                |dir| read(dir).expect("reads").1,
            );
            BlockDraftParts { network, layers: own.target_layers }
        };
        let (own_block, dflash) = (block("block", true), block("dflash", false));
        let of_medusa = MedusaConfig::new(&of_target.shape, 3);
        let mut drawn = SeededDraws::new(seed, &["medusa"]);
        let medusa = from_files(
            &of("medusa"),
            |dir| {
                let drawn = of_medusa.init_from(device, || drawn.uniform());
                drawn.write_dir(dir, &of_medusa).expect("written");
            },
            |dir| {
                Medusa::from_dir(dir, &of_target.shape, WeightDtype::F32, device).expect("reads").1
            },
        );
        let draft = |name: &'static str, vocab_size| {
            let model = model(&config(2, vocab_size), &of(name));
            named(name, DraftModelParts { model, head: head(name) })
        };
        let drafters = vec![
            draft("model", vocab_size),
            draft(PADDED[0], vocab_size - 1),
            draft(PADDED[1], vocab_size + 2),
            named("adapter", SelfDraftParts { exit_layer: 1, adapter, head: head("adapter") }),
            named("eagle", eagle3),
            named("eagle1", eagle1),
            named("other", other),
            named("block", own_block),
            named("dflash", dflash),
            named("medusa", MedusaDraftParts { network: medusa, layers: vec![4] }),
            named(LOOKUP, look_up(SearchedText::Sequence)),
            named(ANSWERS, look_up(SearchedText::Answers)),
        ];
        Self { target, drafters }
    }

    fn of(&self, names: &[&str]) -> Vec<NamedParts> {
        let of = |name: &&str| self.drafters.iter().find(|it| it.id.as_str() == *name);
        names.iter().map(|name| of(name).expect("one has the name").clone()).collect()
    }

    fn cascade(&self, names: &[&str], config: CascadeConfig) -> NamedParts {
        named("cascade", CascadeParts { config, drafters: self.of(names) })
    }

    /// Builds a cascade with exact review and no stop rules.
    fn plain_cascade<const N: usize>(
        &self,
        names: [&str; N],
        lengths: [[usize; N]; N],
    ) -> NamedParts {
        self.cascade(&names, CascadeConfig::new(matrix(lengths)))
    }

    /// Builds a cascade with two first tokens.
    fn branching_cascade<const N: usize>(
        &self,
        names: [&str; N],
        lengths: [[usize; N]; N],
    ) -> NamedParts {
        let config = CascadeConfig { num_first_tokens: 2, ..CascadeConfig::new(matrix(lengths)) };
        NamedParts { id: BRANCHING, ..self.cascade(&names, config) }
    }

    fn merged(&self, names: &[&str], lookup: Option<LookupFirst>) -> NamedParts {
        named("merged", MergedParts { drafters: self.of(names), lookup, answers: Some(stored()) })
    }

    fn session(&self) -> ModelSession<'_> {
        ModelSession::new(&self.target, CAPACITY, "target")
    }

    fn built<'m>(&'m self, drafter: &'m NamedParts, num_slots: usize) -> Drafters<'m> {
        Drafters::new([drafter], Sizes { target: &self.target, capacity: CAPACITY, num_slots })
    }
}

/// The prompt and the settings of one decoding run.
#[derive(Clone, Copy)]
struct Text<'a> {
    prompt: &'a [u32],
    decoding: Decoding,
    limits: &'a Limits,
}

impl<'a> Text<'a> {
    fn plain(self, networks: &Networks, draws: &mut dyn Draws) -> Generation {
        let Text { prompt, decoding, limits } = self;
        let target = &mut networks.session();
        decode_plain(target, &decoding, prompt, limits, draws, &mut go_on).expect("decodes")
    }

    fn request(self, rule: &'a mut dyn StopRule, draws: &'a mut dyn Draws) -> Request<'a> {
        let Text { prompt, decoding, limits } = self;
        Request { prompt, decoding, limits, rule: Some(rule), draws }
    }
}

/// The wrapper around a drafter: none, a tree or prompt lookup.
#[derive(Clone, Copy)]
enum Around {
    Nothing,
    Tree(&'static str),
    LookUps(&'static str),
}

/// Decodes a text with a drafter.
fn decode<'m>(
    drafters: &mut Drafters<'m>,
    drafter: &NamedParts,
    around: Around,
    request: Request<'_>,
) -> Generation {
    let (target, drafter) = drafters.drafting(drafter.id).expect("it was built");
    let run = |drafter: &mut dyn Drafter<ModelSession<'m>>| {
        decode_speculative(target, drafter, request, &mut go_on).expect("decodes")
    };
    match around {
        Around::Nothing => run(&mut &mut *drafter),
        Around::Tree(shape) => {
            let drafter = drafter.by_steps().expect("it drafts step by step");
            run(&mut TreeDraft::new(drafter, shape.parse().expect("a shape")))
        }
        Around::LookUps(first) => {
            let first = (first.parse().expect("look-ups"), Some(&stored()));
            run(&mut LookupFirstDraft::new(drafter, first, 1))
        }
    }
}

/// Compares a drafter's distribution with the target's.
fn assert_exact(
    networks: &Networks,
    drafter: &NamedParts,
    around: Around,
    (text, expected): (Text<'_>, &BTreeMap<Vec<u32>, f64>),
    rule: &dyn Fn() -> Box<dyn StopRule>,
) {
    let mut drafters = networks.built(drafter, 1);
    let found = distribution_of(enumerate(|draws| {
        let rule = &mut *rule();
        decode(&mut drafters, drafter, around, text.request(rule, draws)).token_ids
    }));
    if matches!(around, Around::Tree(_)) || [BRANCHING, MERGED].contains(&drafter.id) {
        assert!(found.keys().eq(expected.keys()), "{drafter:?}");
        for (tokens, prob) in expected {
            let difference = (found[tokens] - prob).abs();
            assert!(difference <= TREE_ROUNDING * prob, "{tokens:?}: {} for {prob}", found[tokens]);
        }
    } else {
        assert_same_distribution(&found, expected);
    }
}

fn fixed(candidate_length: usize) -> Box<dyn StopRule> {
    StopRuleConfig::from(FixedLengthConfig { candidate_length }).init().expect("a length")
}

/// Calls `check` for two texts with the target's distribution of each: one that may end early, and a longer one
/// with two possible tokens at each place. The networks' logits are near each other, so the temperature is low.
fn for_texts(networks: &Networks, mut check: impl FnMut((Text<'_>, &BTreeMap<Vec<u32>, f64>))) {
    let sampling = Sampling { temperature: 0.05, ..Sampling::default() };
    let narrow = Sampling { top_k: Some(2), ..sampling };
    for (sampling, limits) in
        [(sampling, Limits::new(3, vec![1])), (narrow, Limits::new(4, Vec::new()))]
    {
        let decoding = Decoding::sampled(sampling);
        let text = Text { prompt: &[2, 0, 2], decoding, limits: &limits };
        let expected = distribution_of(enumerate(|draws| text.plain(networks, draws).token_ids));
        check((text, &expected));
    }
}

fn look_up(searched: SearchedText) -> LookUpParts {
    let config = MaxGramConfig { searched, ..MaxGramConfig::default() };
    LookUpParts { config, bigrams: None, answers: Some(stored()) }
}

/// Builds cascades and merged trees with each kind of drafter in each place.
fn composites(networks: &Networks) -> Vec<NamedParts> {
    let mut all = Vec::new();
    for model in STEPPING {
        for lengths in [[[3, 0], [0, 0]], [[2, 0], [0, 2]], [[1, 2], [0, 1]]] {
            all.push(networks.plain_cascade([model, LOOKUP], lengths));
        }
        all.push(networks.branching_cascade([model, LOOKUP], [[1, 2], [0, 1]]));
    }
    for pair in [
        ["eagle", "model"],
        ["model", "eagle"],
        ["adapter", "eagle"],
        ["eagle", "adapter"],
        ["eagle", "other"],
        ["eagle1", "model"],
        ["adapter", "eagle1"],
        ["model", "adapter"],
        ["block", "model"],
        ["model", "block"],
        ["adapter", "dflash"],
        ["block", "eagle"],
        ["medusa", "model"],
        ["eagle", "medusa"],
    ] {
        for lengths in [[[2, 0], [0, 2]], [[1, 1], [0, 0]], [[1, 1], [0, 2]]] {
            all.push(networks.plain_cascade(pair, lengths));
        }
        all.push(networks.branching_cascade(pair, [[1, 1], [0, 1]]));
    }
    for three in [["adapter", "eagle", LOOKUP], ["eagle", "model", ANSWERS]] {
        for lengths in [[[1, 1, 1], [0, 1, 1], [0, 0, 1]], [[2, 0, 0], [0, 1, 0], [0, 0, 2]]] {
            all.push(networks.plain_cascade(three, lengths));
        }
        all.push(networks.branching_cascade(three, [[1, 1, 1], [0, 1, 1], [0, 0, 1]]));
    }
    let lookup = Some(LookupFirst::new(1, 2));
    let in_answers = lookup.map(|first| LookupFirst { answers: true, ..first });
    all.push(networks.merged(&["adapter", "eagle"], in_answers));
    let LookUpParts { mut config, .. } = look_up(SearchedText::Answers);
    config.suffix = SuffixSettings { tree: true, factor: 4.0, ..config.suffix };
    all.push(named("branches", LookUpParts { config, ..look_up(SearchedText::Answers) }));
    all.push(networks.merged(&["model", "eagle"], lookup));
    all.push(networks.merged(&["eagle", "other"], None));
    all.push(networks.merged(&["adapter", "block"], lookup));
    all.push(networks.merged(&["dflash", "block"], None));
    all.push(networks.merged(&["adapter", "medusa"], lookup));
    all
}

#[test]
fn greedy_output_of_every_composite_of_networks_is_the_targets() {
    let mut num_accepted = 0;
    for seed in 0..4 {
        let networks = &Networks::new(seed, 5, &HeadReads::default());
        for (prompt, max_new_tokens) in [(&[2, 3, 4, 2, 3][..], 24), (&[3], 12)] {
            let limits = &Limits::new(max_new_tokens, vec![1]);
            let text = Text { prompt, decoding: Decoding::GREEDY, limits };
            let unused = &mut SeededDraws::new(0, &["unused"]);
            let plain = text.plain(networks, unused).token_ids;
            let assert_plain = |drafter: &NamedParts, around| {
                // The heuristic asks for one candidate until one is accepted: drafters after the first lag behind.
                let bounds = Bounds { min: 1, max: 4 };
                let heuristic = HeuristicConfig { initial_length: 1, bounds };
                let heuristic = StopRuleConfig::Heuristic(heuristic).init().expect("valid");
                let rules = [fixed(4), heuristic];
                let drafters = &mut networks.built(drafter, 1);
                let accepted = rules.map(|mut rule| {
                    let unused = &mut SeededDraws::new(0, &["unused"]);
                    let request = text.request(&mut *rule, unused);
                    let found = decode(drafters, drafter, around, request);
                    assert_eq!(found.token_ids, plain, "{drafter:?}");
                    found.trace.counts().num_accepted
                });
                accepted.iter().sum::<usize>()
            };
            for drafter in composites(networks) {
                num_accepted += assert_plain(&drafter, Around::Nothing);
                num_accepted += assert_plain(&drafter, Around::LookUps("2x2"));
            }
            for drafter in networks.of(&STEPPING) {
                for around in [Around::Nothing, Around::Tree("3-1x9x99"), Around::LookUps("1x2")] {
                    num_accepted += assert_plain(&drafter, around);
                }
            }
        }
    }
    assert!(num_accepted > 500, "{num_accepted}");
}

#[test]
fn networks_of_every_kind_alone_in_trees_and_after_look_ups_leave_the_targets_distribution() {
    let networks = &Networks::new(10, 3, &HeadReads::default());
    let every_second = Asked::EverySecondRound { skips: false };
    for_texts(networks, |text| {
        for drafter in networks.of(&STEPPING) {
            for around in [
                Around::Nothing,
                Around::Tree("2x1x9"),
                Around::Tree("2x2x3-drawn"),
                Around::LookUps("1x2"),
                Around::LookUps("answers:1x2"),
            ] {
                for bits in [0, 0b011, 0b110] {
                    for asked in [Asked::AfterDraw, Asked::BeforeDraw, every_second] {
                        let map = StopMap { asked, ..StopMap::new(3, 2, bits) };
                        let rule = || Box::new(map.clone()) as Box<dyn StopRule>;
                        assert_exact(networks, &drafter, around, text, &rule);
                    }
                }
            }
        }
    });
}

#[test]
fn models_with_other_padding_leave_the_targets_distribution_and_draft_only_its_tokens() {
    // The target gives its last token, which the model with fewer rows lacks, as often as others.
    for (form, seed) in [(HeadForm::Candidate, 40), (HeadForm::LookAhead, 41)] {
        let networks = &Networks::new(seed, 3, &HeadReads::new(form, &[HeadInput::Entropy]));
        let mut composites = Vec::new();
        for model in PADDED {
            for pair in [["eagle", model], [model, "adapter"], [model, LOOKUP], [model, ANSWERS]] {
                composites.push(networks.plain_cascade(pair, [[1, 1], [0, 2]]));
                composites.push(networks.branching_cascade(pair, [[1, 1], [0, 1]]));
            }
            composites.push(networks.merged(&[model, "eagle"], None));
        }
        composites.push(networks.plain_cascade(PADDED, [[2, 0], [0, 2]]));
        for_texts(networks, |text| {
            let (_, expected) = text;
            assert!(expected.keys().any(|tokens| tokens.contains(&2)), "it gives the last token");
            for drafter in networks.of(&PADDED) {
                for around in [
                    Around::Nothing,
                    Around::Tree("2x1x9"),
                    Around::Tree("2x2x3-drawn"),
                    Around::LookUps("1x2"),
                ] {
                    for rule in chain_rules() {
                        let rule = || rule.init().expect("valid");
                        assert_exact(networks, &drafter, around, text, &rule);
                    }
                }
            }
            for drafter in &composites {
                assert_exact(networks, drafter, Around::Nothing, text, &|| fixed(9));
            }
        });
    }
}

#[test]
fn composites_of_networks_leave_the_targets_distribution() {
    let networks = &Networks::new(11, 3, &HeadReads::default());
    for_texts(networks, |text| {
        for drafter in composites(networks) {
            assert_exact(networks, &drafter, Around::Nothing, text, &|| fixed(9));
        }
    });
}

/// Returns rules that sometimes end a chain: by its length, by confidences and by heads.
fn chain_rules() -> Vec<StopRuleConfig> {
    let bounds = Bounds { min: 1, max: 3 };
    let confident = |before_draw| {
        StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold: 0.345,
            before_draw,
            bounds: Bounds { min: usize::from(!before_draw), ..bounds },
        })
    };
    let rejecting = |without_lag| {
        StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: 0.5,
            without_lag,
            bounds,
        })
    };
    let fixed = FixedLengthConfig { candidate_length: 1 }.into();
    vec![fixed, confident(false), confident(true), rejecting(false), rejecting(true)]
}

#[test]
fn chains_of_networks_that_rules_end_leave_the_targets_distribution() {
    for (seed, form) in [(12, HeadForm::Candidate), (13, HeadForm::LookAhead)] {
        let networks = &Networks::new(seed, 3, &HeadReads::new(form, &[HeadInput::Entropy]));
        for_texts(networks, |text| {
            for rule in chain_rules() {
                for pair in [
                    ["eagle", "model"],
                    ["adapter", "eagle"],
                    ["model", "other"],
                    ["block", "model"],
                ] {
                    for lenience in [Lenience::NONE, lenient(3.0)] {
                        let rules = vec![Some(rule.clone()); 2];
                        let lengths = matrix([[2, 0], [0, 2]]);
                        let config =
                            CascadeConfig { lenience, rules, ..CascadeConfig::new(lengths) };
                        let drafter = networks.cascade(&pair, config);
                        assert_exact(networks, &drafter, Around::Nothing, text, &|| fixed(9));
                    }
                }
            }
        });
    }
}

#[test]
fn composites_of_networks_side_by_side_give_the_targets_greedy_output() {
    let networks = &Networks::new(20, 5, &HeadReads::default());
    let limits = &Limits::new(16, vec![1]);
    let prompts: [&[u32]; 4] = [&[2, 3, 2, 3], &[4], &[3, 3, 2], &[2, 4, 2]];
    let unused = || SeededDraws::new(0, &["unused"]);
    let text = |prompt| Text { prompt, decoding: Decoding::GREEDY, limits };
    let plain = prompts.map(|prompt| text(prompt).plain(networks, &mut unused()).token_ids);
    for named in composites(networks) {
        let mut drafters = networks.built(&named, 2);
        let (target, drafter) = drafters.drafting(named.id).expect("it was built");
        let mut own: Vec<_> = prompts.iter().map(|_| (fixed(4), unused())).collect();
        let requests = prompts.iter().zip(&mut own);
        let requests =
            requests.map(|(prompt, (rule, draws))| text(prompt).request(&mut **rule, draws));
        let found = decode_many(target, drafter, requests, &mut |_, round| go_on(round));
        let found = found.expect("decodes").into_iter().map(|one| one.token_ids);
        assert!(found.eq(plain.iter().cloned()), "{named:?}");
    }
}

#[test]
fn conversations_of_every_drafter_go_on_with_the_targets_greedy_output() {
    let networks = &Networks::new(30, 5, &HeadReads::default());
    let limits = &Limits::new(7, vec![1]);
    let unused = || SeededDraws::new(0, &["unused"]);
    let alone = networks.of(&[&STEPPING[..], &[LOOKUP, ANSWERS]].concat());
    for named in alone.into_iter().chain(composites(networks)) {
        let mut drafters = networks.built(&named, 1);
        let (mut so_far, mut num_kept) = (Vec::new(), 0);
        for added in [&[2, 3, 2, 3][..], &[4, 3], &[2], &[3, 4, 2, 3, 4]] {
            so_far.extend_from_slice(added);
            let text = Text { prompt: &so_far, decoding: Decoding::GREEDY, limits };
            let plain = text.plain(networks, &mut unused()).token_ids;
            let (rule, draws) = (&mut *fixed(3), &mut unused());
            let (target, drafter) = drafters.drafting(named.id).expect("it was built");
            let num_read = if num_kept > 0 { target.num_read_by_all(0) } else { 0 };
            assert!(num_read + 2 >= num_kept, "the turns before are in the cache");
            let request = text.request(rule, draws);
            let found = decode_on(target, drafter, request, num_kept, &mut go_on);
            assert_eq!(found.expect("decodes").token_ids, plain, "{named:?}");
            so_far.extend_from_slice(&plain);
            num_kept = so_far.len();
        }
    }
}

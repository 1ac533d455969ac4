//! Timed decoding of prompts under one setting, in batches, and measurement of the load from other
//! programs.

use anyhow::{Context, Result};
use draftsmith_data::Prompt;
use draftsmith_decode::Generation;
use draftsmith_theory::{Decoding, SeededDraws, StopRuleConfig, Trace};
use serde::{Deserialize, Serialize};

use super::settings::Setting;
use crate::agreement::{Agreement, compare};
use crate::conversation::{Turn, answer_batched};
use crate::decoders::{Decoders, PromptToDecode};
use draftsmith_recipe::pair::Pair;

/// The result of decoding one prompt under one setting.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PromptRun {
    /// The index of the prompt in its dataset.
    pub(super) prompt: usize,
    /// The merged trace of all turns.
    pub(super) trace: Trace,
    /// The answers, one per turn.
    pub(super) turns: Vec<AnsweredTurn>,
    /// The texts of the answers.
    pub(super) texts: Vec<String>,
    /// The comparison with plain decoding; `Same` until they have been compared.
    #[serde(skip, default = "same")]
    pub(super) agreement: Agreement,
}

fn same() -> Agreement {
    Agreement::Same
}

/// One answer with its trace.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct AnsweredTurn {
    pub(super) trace: Trace,
    token_ids: Vec<u32>,
    prompt_ids: Vec<u32>,
}

/// The loaded models, with which any setting can be run on any prompt.
pub(super) struct Bench<'m> {
    pub(super) pair: &'m Pair,
    pub(super) decoders: Decoders<'m>,
    pub(super) seed: u64,
}

impl Bench<'_> {
    /// Runs every setting once on a prompt, with few tokens and without recording times. The first
    /// forwards of a process are slow, because they touch memory pages and select kernels.
    pub(super) fn warm_up(
        &mut self,
        prompt: &Prompt,
        decoding: &Decoding,
        settings: &[Setting],
    ) -> Result<()> {
        let most = std::mem::replace(&mut self.decoders.limits.max_new_tokens, 16);
        for setting in settings {
            self.run(0, &[prompt], decoding, setting)?;
        }
        self.decoders.limits.max_new_tokens = most;
        Ok(())
    }

    /// Answers all turns of the prompts as a batch. Each turn follows the setting's own earlier
    /// answers. `first` is the index of the first prompt in its dataset. The time of a shared
    /// forward is split among the prompts.
    pub(super) fn run(
        &mut self,
        first: usize,
        prompts: &[&Prompt],
        decoding: &Decoding,
        setting: &Setting,
    ) -> Result<Vec<PromptRun>> {
        let pair = self.pair;
        let answered = answer_batched(
            &pair.text,
            prompts,
            |answered: &AnsweredTurn| &answered.token_ids,
            |turns| self.generate(turns, decoding, setting),
        )?;
        let measured = answered.into_iter().enumerate().map(|(nth, (turns, texts))| {
            let trace = Trace::merge(turns.iter().map(|turn| &turn.trace));
            PromptRun { prompt: first + nth, trace, turns, texts, agreement: Agreement::Same }
        });
        Ok(measured.collect())
    }

    fn generate(
        &mut self,
        turns: Vec<(usize, Turn)>,
        decoding: &Decoding,
        setting: &Setting,
    ) -> Result<Vec<AnsweredTurn>> {
        let seed = self.seed;
        let name = setting.name();
        let draws = |turn: &Turn| SeededDraws::new(seed, &[&turn.id, "evaluate", &name]);
        let mut draws: Vec<SeededDraws> = turns.iter().map(|(_, turn)| draws(turn)).collect();
        let rule = |_| setting.rule.as_ref().map(StopRuleConfig::init).transpose();
        let mut rules = turns.iter().map(rule).collect::<Result<Vec<_>, _>>()?;
        let to_decode =
            turns.iter().zip(&mut draws).zip(&mut rules).map(|((turn, draws), rule)| {
                let rule = rule.as_mut().map(|rule| &mut **rule as _);
                PromptToDecode { prompt_ids: &turn.1.prompt_ids, rule, draws }
            });
        let named = || {
            let ids: Vec<String> = turns.iter().map(|(_, turn)| format!("`{}`", turn.id)).collect();
            format!("prompt {}", ids.join(", "))
        };
        let generations =
            self.decoders.decode_many(setting.drafter, decoding, to_decode).with_context(named)?;
        let answered = turns.into_iter().zip(generations).map(|((_, turn), generation)| {
            let Generation { token_ids, trace, .. } = generation;
            AnsweredTurn { trace, token_ids, prompt_ids: turn.prompt_ids }
        });
        Ok(answered.collect())
    }

    /// Compares greedy answers with the plain answers, turn by turn up to the first difference.
    pub(super) fn compare(
        &mut self,
        decoding: &Decoding,
        plain: &PromptRun,
        other: &PromptRun,
    ) -> Result<Agreement> {
        for (plain, other) in plain.turns.iter().zip(&other.turns) {
            let (prompt_ids, plain) = (&plain.prompt_ids, &plain.token_ids);
            match compare(&mut self.decoders, decoding, prompt_ids, plain, &other.token_ids)? {
                Agreement::Same => {}
                apart => return Ok(apart),
            }
        }
        Ok(Agreement::Same)
    }
}

//! Running the settings over prompts, side by side: for each prompt every setting in turn, so that
//! a slow minute of the machine falls on all of them alike.

use anyhow::Result;
use draftsmith_data::Prompt;
use draftsmith_decode::Generation;
use draftsmith_theory::{Decoding, SeededDraws, Trace};

use super::settings::Setting;
use crate::agreement::{Agreement, compare};
use crate::conversation::{Turn, answer_turns};
use crate::decoders::Decoders;
use crate::exports::Exports;
use crate::pair::Pair;

/// One prompt under one setting.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    /// Where the prompt stands in its dataset.
    pub(super) prompt: usize,
    /// All turns as one.
    pub(super) trace: Trace,
    /// The answers, a turn each.
    pub(super) turns: Vec<Answered>,
    /// Their texts.
    pub(super) texts: Vec<String>,
    /// How they compare with plain decoding's, where they were compared; else the same.
    pub(super) agreement: Agreement,
}

/// One answer.
#[derive(Debug, Clone)]
pub(super) struct Answered {
    pub(super) trace: Trace,
    token_ids: Vec<u32>,
    prompt_ids: Vec<u32>,
}

/// The models, ready to run any setting on any prompt.
pub(super) struct Bench<'m> {
    pair: &'m Pair,
    decoders: Decoders<'m>,
    seed: u64,
}

impl<'m> Bench<'m> {
    pub(super) fn new(
        pair: &'m Pair,
        exports: &'m Exports,
        max_new_tokens: usize,
        seed: u64,
    ) -> Self {
        Self { pair, decoders: Decoders::new(pair, exports, max_new_tokens), seed }
    }

    /// Runs every setting once on a prompt, untimed and short: the first forwards of a process
    /// touch pages and pick kernels.
    pub(super) fn warm_up(
        &mut self,
        prompt: &Prompt,
        decoding: &Decoding,
        settings: &[Setting],
    ) -> Result<()> {
        let most = std::mem::replace(&mut self.decoders.limits.max_new_tokens, 16);
        for setting in settings {
            self.run(0, prompt, decoding, setting)?;
        }
        self.decoders.limits.max_new_tokens = most;
        Ok(())
    }

    /// Answers all turns of a prompt, each fed with the setting's own earlier answers.
    pub(super) fn run(
        &mut self,
        number: usize,
        prompt: &Prompt,
        decoding: &Decoding,
        setting: &Setting,
    ) -> Result<Measured> {
        let pair = self.pair;
        let (turns, texts) = answer_turns(
            pair,
            prompt,
            |answered: &Answered| &answered.token_ids,
            |turn| {
                let Turn { id, prompt_ids, .. } = turn;
                let Generation { token_ids, trace, .. } =
                    self.generate(&id, &prompt_ids, decoding, setting)?;
                Ok(Answered { trace, token_ids, prompt_ids })
            },
        )?;
        let trace = Trace::merge(turns.iter().map(|turn| &turn.trace));
        Ok(Measured { prompt: number, trace, turns, texts, agreement: Agreement::Same })
    }

    fn generate(
        &mut self,
        id: &str,
        prompt_ids: &[u32],
        decoding: &Decoding,
        setting: &Setting,
    ) -> Result<Generation> {
        let mut draws = SeededDraws::new(self.seed, &[id, "evaluate", &setting.name()]);
        match &setting.rule {
            None => self.decoders.decode_plain(decoding, prompt_ids, &mut draws),
            Some(rule) => {
                let rule = &mut *rule.init()?;
                self.decoders.decode(setting.drafter, rule, decoding, prompt_ids, &mut draws)
            }
        }
    }

    /// Compares greedy answers with plain decoding's, turn by turn, up to the first difference.
    pub(super) fn compare(&mut self, plain: &Measured, other: &Measured) -> Result<Agreement> {
        for (plain, other) in plain.turns.iter().zip(&other.turns) {
            let (prompt_ids, plain) = (&plain.prompt_ids, &plain.token_ids);
            match compare(&mut self.decoders, prompt_ids, plain, &other.token_ids)? {
                Agreement::Same => {}
                apart => return Ok(apart),
            }
        }
        Ok(Agreement::Same)
    }
}

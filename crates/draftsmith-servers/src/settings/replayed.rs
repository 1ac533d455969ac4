//! Replays recorded responses under server settings, and counts rounds and tokens by prompt.

use anyhow::Result;
use draftsmith_theory::{DraftedBy, Drafting, Recordings, RoundLengths, RoundTable, Work};

/// Replays each response under a setting, and counts its rounds by number of candidates.
fn rounds(drafting: Drafting, recordings: &Recordings) -> Result<Vec<RoundLengths>> {
    match drafting.looked_up(recordings) {
        Some(rounds) => Ok(rounds),
        None => Ok(recordings.round_lengths(&drafting.rule(recordings.head))?),
    }
}

/// The rounds of each prompt, under each setting.
pub(super) struct Replayed {
    by_setting: Vec<(Drafting, Vec<RoundLengths>)>,
    prompt_tokens: Vec<usize>,
    /// The number of tokens of each response, without the first token.
    later_tokens: Vec<usize>,
}

impl Replayed {
    pub(super) fn new(recordings: &Recordings, settings: &[Drafting]) -> Result<Self> {
        // A server's first token comes from the prefill, and is never speculated.
        let recordings = recordings.after_first_token();
        let rounds = |setting: &Drafting| Ok((*setting, rounds(*setting, &recordings)?));
        Ok(Self {
            by_setting: settings.iter().map(rounds).collect::<Result<_>>()?,
            prompt_tokens: recordings.responses.iter().map(|it| it.prompt.len() - 1).collect(),
            later_tokens: recordings.responses.iter().map(|it| it.places.len()).collect(),
        })
    }

    pub(super) fn num_prompts(&self) -> usize {
        self.prompt_tokens.len()
    }

    /// Returns the indices of all prompts.
    pub(super) fn all(&self) -> Vec<usize> {
        (0..self.num_prompts()).collect()
    }

    fn rounds(&self, setting: Drafting) -> Option<&[RoundLengths]> {
        let found = self.by_setting.iter().find(|(it, _)| *it == setting);
        found.map(|(_, rounds)| rounds.as_slice())
    }

    /// Sums the tokens and rounds of the prompts at these indices, which may repeat. Without a
    /// setting, every token takes a round.
    fn work(&self, setting: Option<Drafting>, some: &[usize]) -> Option<Work> {
        let sum = |of: &dyn Fn(usize) -> usize| some.iter().map(|at| of(*at)).sum::<usize>() as f64;
        let later = sum(&|at| self.later_tokens[at]);
        let rounds = match setting {
            None => later,
            Some(setting) => {
                let rounds = self.rounds(setting)?;
                sum(&|at| rounds[at].by_length.iter().sum())
            }
        };
        let prompt_tokens = sum(&|at| self.prompt_tokens[at]);
        Some(Work { prompt_tokens, tokens: later + some.len() as f64, rounds })
    }

    pub(super) fn tokens_per_round(&self, setting: Drafting, some: &[usize]) -> f64 {
        let work = self.work(Some(setting), some);
        work.map_or(f64::NAN, |work| work.tokens_per_round(some.len() as f64))
    }

    /// Computes the tokens per second of `batch_size` concurrent requests under a setting; `None`
    /// if the costs do not cover it.
    pub(super) fn throughput(
        &self,
        table: &RoundTable,
        batch_size: f64,
        setting: Option<Drafting>,
        some: &[usize],
    ) -> Option<f64> {
        let work = self.work(setting, some)?;
        let Some(setting) = setting else {
            let seconds = table.seconds(batch_size, 0)?;
            return Some(table.throughput(batch_size, 0, seconds, &work));
        };
        let num_candidates = setting.num_candidates;
        let (seconds, of_server) = if setting.num_matched.is_some() {
            (table.mixed_seconds(batch_size, &self.shares(setting, some)?, DraftedBy::LookUp)?, 0)
        } else if setting.least_prob > 0.0 {
            let source = DraftedBy::Drafter { most: num_candidates };
            let shares = self.shares(setting, some)?;
            (table.mixed_seconds(batch_size, &shares, source)?, num_candidates)
        } else {
            (table.seconds(batch_size, num_candidates)?, num_candidates)
        };
        Some(table.throughput(batch_size, of_server, seconds, &work))
    }

    /// Computes the share of rounds with each number of candidates, from 0.
    fn shares(&self, setting: Drafting, some: &[usize]) -> Option<Vec<f64>> {
        let rounds = self.rounds(setting)?;
        let mut shares = vec![0.0; setting.num_candidates + 1];
        for at in some {
            for (length, num) in rounds[*at].by_length.iter().enumerate() {
                shares[length] += *num as f64;
            }
        }
        let total: f64 = shares.iter().sum();
        shares.iter_mut().for_each(|share| *share /= total);
        Some(shares)
    }
}

//! The decoding flags of commands without a recipe.

use anyhow::Result;
use clap::{ArgGroup, Args};
use draftsmith_theory::{Decoding, Sampling};

use draftsmith_recipe::{Ends, decoding};

/// Flags of commands that decode without a recipe.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("decoding").args(["greedy", "temperature"]))]
pub(crate) struct DecodingArguments {
    /// Take the most probable token (the default).
    #[arg(long)]
    greedy: bool,
    /// Sample at this temperature; 0 is greedy.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample from this much probability.
    #[arg(long, value_name = "P", requires = "temperature", default_value_t = 1.0)]
    top_p: f64,
    /// Sample from the K most probable tokens.
    #[arg(long, value_name = "K", requires = "temperature")]
    top_k: Option<usize>,
    /// Sample from tokens above this share of the top.
    #[arg(long, value_name = "P", requires = "temperature")]
    min_p: Option<f64>,
    /// Penalty of repeated tokens.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f64,
}

impl DecodingArguments {
    /// Builds the decoding settings that the flags give; greedy without `--temperature`.
    ///
    /// # Errors
    /// If a value is out of range.
    pub(crate) fn decoding(&self) -> Result<Decoding> {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        let temperature = temperature.unwrap_or(0.0);
        let decoding =
            decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty);
        decoding.validate()?;
        Ok(decoding)
    }
}

/// What ends answers, as flags.
#[derive(Debug, Args)]
pub(crate) struct EndArguments {
    /// Tokens that end answers, as in `2,5`.
    #[arg(long = "eos-token-id", value_name = "ID", value_delimiter = ',')]
    eos_token_ids: Option<Vec<u32>>,
    /// Text that ends an answer; may be repeated.
    #[arg(long = "stop-string", value_name = "TEXT")]
    stop_strings: Vec<String>,
}

impl EndArguments {
    pub(crate) fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, only_answers: true }
    }

    /// Returns the end tokens and stop strings given by flags. Without such flags, returns
    /// `others`.
    pub(crate) fn or(&self, others: Ends) -> Ends {
        let is_given = self.eos_token_ids.is_some() || !self.stop_strings.is_empty();
        match is_given || (others.eos_token_ids.is_none() && others.stop_strings.is_empty()) {
            true => self.ends(),
            false => others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_is_greedy() {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(decoding(sampling), Decoding::GREEDY);
    }
}

//! What ends an answer: end tokens and stop strings.

use clap::Args;
use draftsmith_data::StopStrings;
use draftsmith_theory::TextEnd;

/// End tokens and stop strings that the user chose.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ends {
    /// End tokens that replace the target's.
    pub(crate) eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer.
    pub(crate) stop_strings: Vec<String>,
    /// Whether these apply only to answers, so that heads and adapters may have been trained with others.
    pub(crate) of_answers_alone: bool,
}

/// The provenance keys of both.
const KEYS: [&str; 2] = ["eos_token_ids", "stop_strings"];

impl Ends {
    /// Whether an export may have been trained with another value of this provenance key.
    pub(crate) fn leave_open(&self, key: &str) -> bool {
        let are_chosen = self.eos_token_ids.is_some() || !self.stop_strings.is_empty();
        self.of_answers_alone && are_chosen && KEYS.contains(&key)
    }
}

/// The flags of commands that decode without a recipe.
#[derive(Debug, Args)]
pub(crate) struct EndArguments {
    /// A token that ends the answer, replacing those in the target's files; separate several with commas.
    #[arg(long = "eos-token-id", value_name = "ID", value_delimiter = ',')]
    eos_token_ids: Option<Vec<u32>>,
    /// End the answer with the token that completes this string; may be repeated.
    #[arg(long = "stop-string", value_name = "TEXT")]
    stop_strings: Vec<String>,
}

impl EndArguments {
    pub(crate) fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, of_answers_alone: true }
    }
}

/// Stop strings as decoding checks them.
#[derive(Debug)]
pub(crate) struct StopText(pub(crate) StopStrings);

impl TextEnd for StopText {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.0.is_completed_by_last(last_first)
    }
}

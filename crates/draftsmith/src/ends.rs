//! What ends an answer: tokens, the target's own or others, and strings.

use clap::Args;
use draftsmith_data::StopStrings;
use draftsmith_theory::TextEnd;

/// What was chosen to end answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ends {
    /// End tokens instead of the target's own.
    pub(crate) eos_token_ids: Option<Vec<u32>>,
    /// Strings behind which answers end.
    pub(crate) stop_strings: Vec<String>,
    /// Whether they were chosen for answers alone, whatever heads and adapters were trained under.
    pub(crate) of_answers_alone: bool,
}

/// What provenance calls both.
const KEYS: [&str; 2] = ["eos_token_ids", "stop_strings"];

impl Ends {
    /// Whether an export may have been trained under another value of a key of provenance.
    pub(crate) fn leave_open(&self, key: &str) -> bool {
        let are_chosen = self.eos_token_ids.is_some() || !self.stop_strings.is_empty();
        self.of_answers_alone && are_chosen && KEYS.contains(&key)
    }
}

/// Flags of commands that decode without a recipe.
#[derive(Debug, Args)]
pub(crate) struct EndArguments {
    /// A token that ends the answer, instead of those that the target's files name; several, with
    /// commas between.
    #[arg(long = "eos-token-id", value_name = "ID", value_delimiter = ',')]
    eos_token_ids: Option<Vec<u32>>,
    /// End the answer with the token that completes this string, which may be given several times.
    #[arg(long = "stop-string", value_name = "TEXT")]
    stop_strings: Vec<String>,
}

impl EndArguments {
    /// What they say.
    pub(crate) fn ends(&self) -> Ends {
        let (eos_token_ids, stop_strings) = (self.eos_token_ids.clone(), self.stop_strings.clone());
        Ends { eos_token_ids, stop_strings, of_answers_alone: true }
    }
}

/// Stop strings, as decoding asks for them.
#[derive(Debug)]
pub(crate) struct StopText(pub(crate) StopStrings);

impl TextEnd for StopText {
    fn is_reached(&self, last_first: &mut dyn Iterator<Item = u32>) -> bool {
        self.0.is_completed_by_last(last_first)
    }
}

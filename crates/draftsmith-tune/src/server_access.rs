//! A recipe's servers: their token from the environment, prompts turn by turn, and notes for the user.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use draftsmith_served::{
    Listener, Secret, Served, ServedError, ServedTurn, ServerRecipe, TargetSettings, Wait,
};
use draftsmith_theory::Decoding;
use indicatif::HumanDuration;

use crate::conversation::{SetPrompt, next_turn};
use draftsmith_recipe::text_side::TextSide;
use draftsmith_recipe::watch::Progress;
use draftsmith_recipe::watch::{Interrupted, Watch};
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{DataRecipe, Recipe};

/// A wait for servers that is worth a line.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// A recipe's servers, and the journal of their responses.
#[derive(Clone)]
pub struct ServerAccess<'a> {
    /// The servers.
    pub server: &'a ServerRecipe,
    /// The seed of random draws.
    pub seed: u64,
    /// The journal of responses.
    pub journal: PathBuf,
}

impl<'a> ServerAccess<'a> {
    /// Reads the servers and the path of their journal from a recipe, without opening either.
    ///
    /// # Errors
    /// If the recipe has none.
    pub fn of(recipe: &'a Recipe) -> Result<Self> {
        let server = recipe.data.as_ref().and_then(DataRecipe::served_by);
        Ok(Self {
            server: server.context("`data.responses` is `server`")?,
            seed: recipe.seed,
            journal: recipe.data_dir().join("served.jsonl"),
        })
    }

    /// Opens the target that the servers run, with the responses in the journal.
    ///
    /// # Errors
    /// If the bearer token is not set, or the journal cannot be read.
    pub fn open(
        &self,
        workspace: &Workspace,
        decoding: Decoding,
        max_new_tokens: usize,
        watch: &dyn Watch,
    ) -> Result<Served> {
        let read = |name| read_token(name, "data.server.api_key_env");
        let secret = self.server.api_key_env.as_deref().map(read).transpose()?;
        let TextSide { tokenizer, eos_token_ids, text_end, context, .. } =
            workspace.text_side()?.clone();
        let target = TargetSettings {
            tokenizer,
            eos_token_ids,
            stop_strings: workspace.text.ends.stop_strings.clone(),
            text_end: text_end.map(|end| end as _),
            vocab_size: workspace.models.target_shape()?.vocab_size,
            context,
            decoding,
            max_new_tokens,
            seed: self.seed,
        };
        let served = Served::open(self.server, secret.unwrap_or_default(), target, &self.journal)?;
        if served.num_broken() > 0 {
            watch.note(format!(
                "{} lines of `{}` cannot be read; their responses are requested again",
                served.num_broken(),
                self.journal.display()
            ));
        }
        Ok(served)
    }
}

/// Reads the bearer token from an environment variable, which the key or flag `named_by` names.
///
/// # Errors
/// If it is not set, or not a token.
pub fn read_token(variable: &str, named_by: &str) -> Result<Secret> {
    let token = std::env::var(variable).ok().map(|token| token.trim().to_owned());
    let named = format!("the environment variable `{variable}`, which `{named_by}` names,");
    let token = token
        .filter(|token| !token.is_empty())
        .with_context(|| format!("{named} is not set; hint: set it to the servers' token"))?;
    Secret::new(&token).with_context(|| {
        format!(
            "{named} has a character that no HTTP header can have, such as a line break; hint: set it \
             to the servers' token and nothing else"
        )
    })
}

/// Requests all responses that the journal lacks. `progress` counts completed prompts.
///
/// # Errors
/// If a prompt cannot be read or does not fit, the servers or the journal fail, or the job is interrupted.
pub fn ask_servers<'p>(
    served: &mut Served,
    all: impl IntoIterator<Item = Result<Cow<'p, SetPrompt>>>,
    text: &TextSide,
    watch: &dyn Watch,
    progress: &Progress,
) -> Result<()> {
    let next = |prompt: &Cow<'_, SetPrompt>, texts: &[String]| next_served(text, prompt, texts);
    served.answer(all, next, &Asking { watch, progress }).map_err(
        |error: anyhow::Error| match error.downcast_ref() {
            Some(ServedError::Interrupted) => Interrupted.into(),
            _ => error,
        },
    )
}

/// Builds a prompt's turn after the answered ones, whose answers are `texts`. `None` if all turns that fit the
/// context are answered.
fn next_served(
    text: &TextSide,
    prompt: &SetPrompt,
    texts: &[String],
) -> Result<Option<ServedTurn>> {
    Ok(match prompt {
        SetPrompt::Conversation(prompt) if texts.len() < prompt.turns.len() => {
            let turn = next_turn(text, prompt, texts)?;
            turn.map(|turn| ServedTurn { id: turn.id, prompt_ids: turn.prompt_ids })
        }
        SetPrompt::HeldOut { id, prompt_ids } if texts.is_empty() => {
            Some(ServedTurn { id: id.clone(), prompt_ids: prompt_ids.clone() })
        }
        _ => None,
    })
}

/// A job that asks servers.
pub struct Asking<'a> {
    /// Hears of waits and interrupts the job.
    pub watch: &'a dyn Watch,
    /// Counts what is answered.
    pub progress: &'a Progress,
}

impl Listener for Asking<'_> {
    fn is_interrupted(&self) -> bool {
        self.watch.is_interrupted()
    }

    fn advance(&self) {
        self.progress.advance(1);
    }

    fn note(&self, line: &str) {
        self.progress.print(line);
    }

    fn wait(&self, wait: Option<Wait>) {
        let Some(Wait { why, length, requested }) = wait else {
            self.progress.message("");
            return;
        };
        self.progress.message(format!("waiting {} for the servers", HumanDuration(length)));
        if length >= LONG_WAIT || requested.is_some() {
            let requested = requested.map_or_else(String::new, |requested| {
                format!(
                    " and requested a wait of {}, more than `data.server.timeout_s`",
                    HumanDuration(requested)
                )
            });
            self.progress.print(&format!(
                "{why}{requested}; the next request follows in {}",
                HumanDuration(length)
            ));
        }
    }
}

//! Access to a recipe's servers: reads their bearer token from the environment, requests responses
//! turn by turn, and reports to the user.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use draftsmith_served::{
    Listener, Secret, Served, ServedError, ServedTurn, ServerHints, ServerRecipe, TargetSettings,
    Wait,
};
use draftsmith_theory::Decoding;
use indicatif::HumanDuration;

use crate::conversation::{SetPrompt, next_turn};
use draftsmith_recipe::{Bar, DataRecipe, Interrupted, Recipe, TextSide, Watch, Workspace};

/// The minimum wait for servers that is reported in a separate line.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// A recipe's servers, and the journal of their responses.
#[derive(Clone)]
pub struct ServerAccess<'a> {
    /// The servers' settings.
    pub server: &'a ServerRecipe,
    /// The seed of random draws.
    pub seed: u64,
    /// The path of the journal of responses.
    pub journal: PathBuf,
    /// The hints for failed requests.
    pub hints: ServerHints,
}

impl<'a> ServerAccess<'a> {
    /// Returns the servers and the path of their journal from a recipe, without opening either.
    ///
    /// # Errors
    /// If the recipe has no servers.
    pub fn of(recipe: &'a Recipe) -> Result<Self> {
        let server = recipe.data.as_ref().and_then(DataRecipe::served_by);
        Ok(Self {
            server: server.context("`data.responses` is `server`")?,
            seed: recipe.seed,
            journal: recipe.data_dir().join("served.jsonl"),
            hints: ServerHints::OF_RECIPE,
        })
    }

    /// Opens the journal, and prepares the client for the target on the servers.
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
        let secret = recipe_token(self.server)?;
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
        let journal = &self.journal;
        let served = Served::open(self.server, secret, target, journal, self.hints)?;
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

/// Reads the bearer token of a recipe's servers from the environment. It is empty if the recipe names
/// no variable.
///
/// # Errors
/// If the variable is not set, or its value is not a valid token.
pub(crate) fn recipe_token(server: &ServerRecipe) -> Result<Secret> {
    let read = |name| read_token(name, "data.server.api_key_env");
    Ok(server.api_key_env.as_deref().map(read).transpose()?.unwrap_or_default())
}

/// Reads the bearer token from the environment variable `variable`. `named_by` is the key or flag
/// that names the variable, for error messages.
///
/// # Errors
/// If the variable is not set, or its value is not a valid token.
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
    progress: &dyn Bar,
) -> Result<()> {
    let next = |prompt: &Cow<'_, SetPrompt>, texts: &[String]| next_served(text, prompt, texts);
    served.answer(all, next, &Asking { watch, progress, is_told: AtomicBool::default() }).map_err(
        |error: anyhow::Error| match error.downcast_ref() {
            Some(ServedError::Interrupted) => Interrupted.into(),
            _ => error,
        },
    )
}

/// Builds the turn of a prompt that follows the answers `texts`; `None` if all turns that fit the
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

/// A listener that reports requests to servers to the user.
pub struct Asking<'a> {
    /// The interface that shows long waits to the user and reports interrupts.
    pub watch: &'a dyn Watch,
    /// The progress, which counts complete prompts.
    pub progress: &'a dyn Bar,
    /// Whether the user was told that a server may not be started.
    pub is_told: AtomicBool,
}

impl Listener for Asking<'_> {
    fn is_interrupted(&self) -> bool {
        self.watch.is_interrupted()
    }

    fn advance(&self) {
        self.progress.advance(1.0);
    }

    fn note(&self, line: &str) {
        self.progress.print(line);
    }

    fn wait(&self, wait: Option<Wait>) {
        let Some(Wait { why, until, requested }) = wait else {
            self.progress.message("");
            return;
        };
        let length = until.saturating_duration_since(Instant::now());
        self.progress.message(&format!("waiting {} for the servers", HumanDuration(length)));
        if why.contains("refuses connections") && !self.is_told.swap(true, Ordering::Relaxed) {
            self.progress.print(&format!(
                "{why}; hint: start it (`draftsmith server states RECIPE` prints the command of a server that gives \
                 hidden states); this job goes on once it answers"
            ));
        }
        if length >= LONG_WAIT || requested.is_some() {
            let requested = requested.map_or_else(String::new, |requested| {
                format!(
                    " and requested a wait of {}, more than the timeout",
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

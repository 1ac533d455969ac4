//! Prints tokens as they are decoded.

use std::ops::ControlFlow;

use anyhow::Result;
use draftsmith_data::TextStream;
use draftsmith_decode::RoundTokens;
use draftsmith_recipe::Watch;

use super::show::{marked, origins};
use crate::console::Console;

/// A printer that shows tokens as they are decoded, and stops decoding on Ctrl-C or if nobody reads
/// the output.
pub(super) struct Printer<'a> {
    pub(super) console: &'a Console,
    pub(super) stream: TextStream<'a>,
    /// Whether tokens are marked by their origin.
    pub(super) is_marked: bool,
    /// The error that stopped printing, if any.
    pub(super) failure: Option<anyhow::Error>,
}

impl Printer<'_> {
    pub(super) fn observe(&mut self, round: &RoundTokens<'_>) -> ControlFlow<()> {
        let Self { console, .. } = self;
        if console.is_interrupted() || console.is_reader_gone() {
            return ControlFlow::Break(());
        }
        if !console.json
            && let Err(error) = self.print(round)
        {
            self.failure = Some(error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn print(&mut self, round: &RoundTokens<'_>) -> Result<()> {
        for (id, origin) in round.kept.iter().zip(origins(round)) {
            let Some(text) = self.stream.push(*id)? else { continue };
            match self.is_marked {
                true => self.console.text(marked(&text, origin, self.console.colour()))?,
                false => self.console.text(text)?,
            }
        }
        Ok(())
    }

    /// Prints the rest of the text.
    pub(super) fn finish(self) -> Result<()> {
        if let Some(error) = self.failure {
            return Err(error);
        }
        if let Some(rest) = self.stream.finish()? {
            self.console.text(rest)?;
        }
        self.console.text("\n")
    }
}

//! How often the tokens of a cascade's drafters stand along recorded responses, by who reviews them.

use anyhow::{Context, Result};
use draftsmith_theory::{
    CascadeAcceptance, Decoding, DrafterId, DrafterSays, Lenience, LookUps, Recording, Recordings,
    TargetSays, TokenChoice,
};

use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::results::DrafterName;

/// Whose tokens are judged, and how.
pub(super) struct Judging<'j> {
    /// From the largest on.
    pub(super) drafters: &'j [DrafterId],
    /// Of all reviewers but the target.
    pub(super) lenience: Lenience,
    pub(super) decoding: Decoding,
    pub(super) look_ups: LookUps<'j>,
}

impl Judging<'_> {
    /// What stands along each response: models read it as they draft, and the target at once.
    ///
    /// # Errors
    /// If a model fails, a drafter is not there, or Ctrl-C is met.
    pub(super) fn along(
        &self,
        recordings: &Recordings,
        decoders: &mut Decoders<'_>,
        console: &Console,
    ) -> Result<Vec<CascadeAcceptance>> {
        let of_response = |response| {
            if console.is_interrupted() {
                return Err(Interrupted.into());
            }
            self.along_response(recordings, response, decoders)
        };
        recordings.responses.iter().map(of_response).collect()
    }

    fn along_response(
        &self,
        recordings: &Recordings,
        response: &Recording,
        decoders: &mut Decoders<'_>,
    ) -> Result<CascadeAcceptance> {
        let places = response.drafted_places().iter();
        let tokens: Vec<u32> = places.map(|place| place.candidate.token_id).collect();
        if tokens.is_empty() {
            return Ok(CascadeAcceptance::default());
        }
        let text = [&response.prompt[..], &tokens].concat();
        let standing = |place: usize| text[..response.prompt.len() + place].iter().copied();
        let penalised = |(place, logits): (usize, Vec<f32>)| match self.decoding.is_penalised() {
            true => self.decoding.penalised(&logits, standing(place)).into_owned(),
            false => logits,
        };
        let mut said: Vec<std::vec::IntoIter<DrafterSays>> = Vec::new();
        for drafter in self.drafters {
            let by_place: Vec<DrafterSays> = if *drafter == DrafterId::MaxGram {
                let found = recordings.first_looked_up(response, self.look_ups);
                found.into_iter().map(DrafterSays::LookedUp).collect()
            } else {
                let name = DrafterName::Of(*drafter);
                let rows = decoders.draft_logits(name, &response.prompt, &tokens)?;
                let rows = rows.into_iter().enumerate();
                rows.map(|row| DrafterSays::Logits(penalised(row))).collect()
            };
            said.push(by_place.into_iter());
        }
        let read = &text[..text.len() - 1];
        let rows = match self.decoding.choice {
            TokenChoice::Greedy => None,
            TokenChoice::Sampled(sampling) => {
                Some((sampling, decoders.score(read, response.prompt.len() - 1)?))
            }
        };
        let mut acceptance = CascadeAcceptance::default();
        for (place, token) in tokens.iter().enumerate() {
            let target = match &rows {
                None => TargetSays::Token(*token),
                Some((sampling, rows)) => {
                    let row = self.decoding.penalised(rows.row(place), standing(place));
                    TargetSays::Probs(sampling.probs(&row))
                }
            };
            let said = said.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>();
            let said = said.context("a drafter says something at each place")?;
            acceptance.add_place(&target, &said, self.decoding.choice, self.lenience);
        }
        Ok(acceptance)
    }
}

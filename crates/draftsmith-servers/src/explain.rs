//! `explain`: finds out why a running server accepts as many of a drafter's candidates as it does.
//!
//! The server answers prompts one at a time, so that its counters tell what it accepted of each answer.
//! We compute what the drafter should have had accepted of exactly these answers: as it was trained, and
//! under each known way in which servers misread files. The reading that fits is named. Only the drafter
//! is computed, along hidden states of the target, which runs here or on servers that give its states.

mod counts;
mod expected;
mod measured;
mod misreadings;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use draftsmith_model::{CausalLm, WeightDtype};
use draftsmith_recipe::{Interrupted, Recipe, Watch, Workspace};
use draftsmith_served::Secret;
use draftsmith_theory::{FixedLengthConfig, LookupFirst, Recordings};
use draftsmith_tune::recorder::{StatesText, known_states};
use draftsmith_tune::served_states::{StatesServer, served_layers};
use rayon::prelude::*;
use serde::Serialize;

use self::counts::{Expected, LEAST_SCALE, ReadingFit, causes, scale_of};
use self::expected::{Along, Expecting, replayed};
use self::measured::{CountedAnswer, ask_each};
pub use self::misreadings::Misreading;
use self::misreadings::{ALL, DrafterReading, MISREADINGS, MisreadDrafter};
use crate::certify::encoded_prompts;
use crate::doctor::{Diagnosis, Severity, diagnose, recipe_of};

/// The relative size of random errors that imitate a server's rounding to bf16 in all layers.
const BF16: f32 = 1.0 / 128.0;
/// The share of other tokens from which on answers are those of another model.
const OTHER_MODEL: f64 = 0.5;
/// The share of other tokens that rounding explains.
const ROUNDED: f64 = 0.005;
/// The share of other tokens that the drafter proposed from which on the server accepted them wrongly.
const PROPOSED: f64 = 0.8;

/// The difference in accepted candidates per round that tells readings apart.
const APART: f64 = 0.1;

/// What to explain.
pub struct ExplainSettings {
    /// The server's URL, up to `/v1`.
    pub url: String,
    /// The model's name on the server; by default the first in its list.
    pub model: Option<String>,
    /// A function that reads the server's API key. It is called for every client.
    pub secret: Box<dyn Fn() -> Result<Secret>>,
    /// The directory of the drafter, with the files that the server loads or was exported from.
    pub drafter: PathBuf,
    /// The target's directory.
    pub target: PathBuf,
    /// The directory of the target's tokenizer; the target's if absent.
    pub tokenizer: Option<PathBuf>,
    /// A recipe whose servers give the target's hidden states; `None` to run the target here.
    pub states: Option<Recipe>,
    /// The chat template that replaces the target's.
    pub chat_template: Option<String>,
    /// The prompt file.
    pub prompts: PathBuf,
    /// The maximum number of prompts, spread evenly.
    pub num_prompts: usize,
    /// The maximum number of tokens in an answer.
    pub max_new_tokens: usize,
    /// The number of candidates per round that the server was asked for; `None` to take what it drafts.
    pub num_candidates: Option<usize>,
    /// The maximum wait for an answer.
    pub timeout: Duration,
    /// The dtype that models compute in.
    pub dtype: WeightDtype,
}

/// Why a server accepts as many candidates as it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Explanation {
    /// The server computes the drafter as it was trained.
    AsTrained,
    /// The server misreads the drafter in one of the ways in `causes`.
    Misread,
    /// The server's answers are not the target's.
    OtherAnswers,
    /// Nothing known explains the counts.
    Unknown,
}

/// The explanation of a server's acceptance.
#[derive(Debug, Serialize)]
pub struct Explained {
    /// The explanation in one sentence.
    pub sentence: String,
    /// The kind of explanation.
    pub explanation: Explanation,
    /// The ways of misreading that explain the counts, the most probable first.
    pub causes: Vec<Cause>,
    /// The number of answers.
    pub num_prompts: usize,
    /// The tokens in all answers.
    pub num_tokens: usize,
    /// The tokens of the answers that are clearly not the target's most probable ones.
    pub num_other_tokens: usize,
    /// The most candidates per round.
    pub num_candidates: usize,
    /// Whether the server changes its number of candidates.
    pub changes_candidates: bool,
    /// The candidates that the server accepted per round.
    pub measured: f64,
    /// The candidates per round that would be accepted of the drafter as trained.
    pub as_trained: f64,
    /// The deviation of an answer's counts that rounding explains, in candidates.
    pub rounding: f64,
    /// The shares of rounds that accepted the candidate at each position.
    pub positions: Vec<ComparedRow>,
    /// The accepted candidates of each answer.
    pub prompts: Vec<ComparedRow>,
    /// What else is known: of a drafter that is weak as trained, and of readings that were not tried.
    pub notes: Vec<String>,
}

/// A way of misreading that explains a server's counts.
#[derive(Debug, Clone, Serialize)]
pub struct Cause {
    /// The name, what the server does, and what to do.
    #[serde(flatten)]
    pub misreading: &'static Misreading,
    /// The candidates per round that are then accepted.
    pub expected: f64,
    /// The number of prompts whose counts agree with this, and not with the drafter as trained.
    pub num_prompts: usize,
    /// The log-likelihood, in nats.
    pub log_likelihood: f64,
}

/// Counts or shares as expected and as measured.
#[derive(Debug, Clone, Serialize)]
pub struct ComparedRow {
    /// What is expected of the drafter as trained.
    pub as_trained: f64,
    /// What is expected under the first cause; null without one.
    pub cause: Option<f64>,
    /// What the server counted; null if it does not count it.
    pub measured: Option<f64>,
}

/// The number of candidates in a server's rounds.
#[derive(Debug, Clone)]
struct RoundSizes {
    most: usize,
    /// The mean number in each answer, if it changes.
    means: Option<Vec<f64>>,
}

impl RoundSizes {
    /// Finds the number of candidates by the server's counts. The last rounds of an answer may have fewer.
    fn of(answers: &[CountedAnswer], asked: Option<usize>) -> Result<Self> {
        // A last round without a token of the target's own is missing in the rounds that follow from others.
        let rounds = |it: &CountedAnswer| it.measured.num_rounds.unwrap_or(it.counts()[1] + 1.0);
        let drafted = answers.iter().map(|it| it.measured.num_drafted.map(|num| [num, rounds(it)]));
        let Some(drafted) = drafted.collect::<Option<Vec<[f64; 2]>>>() else {
            let most = asked.context(
                "the server does not tell how many candidates it drafts; hint: give their number with `--candidates`",
            )?;
            return Ok(Self { most, means: None });
        };
        let mean = |[drafted, rounds]: &[f64; 2]| drafted / rounds.max(1.0);
        let most = drafted.iter().map(|it| mean(it).ceil()).fold(1.0, f64::max);
        let num_full =
            drafted.iter().filter(|[drafted, rounds]| *drafted >= most * (rounds - 2.0)).count();
        let is_constant = 5 * num_full >= 4 * drafted.len();
        let means = (!is_constant).then(|| drafted.iter().map(mean).collect());
        Ok(Self { most: most as usize, means })
    }

    /// Replays recordings with these numbers of candidates.
    fn expected(&self, recordings: &Recordings) -> Result<Vec<Expected>> {
        let full = replayed(recordings, self.most)?;
        let Some(means) = &self.means else { return Ok(full) };
        let pairs = full.iter().zip(means);
        Ok(pairs.map(|(full, mean)| full.by_share(mean / self.most as f64)).collect())
    }
}

/// Explains a server's acceptance.
///
/// # Errors
/// If a file or the server cannot be read, the server counts nothing or does not speculate, or its
/// answers are another model's.
pub fn explain(
    settings: &ExplainSettings,
    device: &Device,
    watch: &dyn Watch,
) -> Result<Explained> {
    let Diagnosis { form, findings, .. } = diagnose(&settings.drafter, &settings.target)?;
    let findings = findings.into_iter().filter(|it| it.severity != Severity::Note);
    let findings: Vec<String> = findings.map(|it| format!("`{}`", it.name)).collect();
    let findings = (!findings.is_empty()).then(|| {
        format!("`draftsmith server doctor` finds in the files: {}.", findings.join(", "))
    });
    let kind = form.kind.filter(|kind| ALL.contains(kind));
    let kind = kind.with_context(|| {
        format!(
            "{} is not explained; hint: give a draft model, an EAGLE-3 or a block drafter",
            form.text
        )
    })?;
    let mut own = recipe_of(form, &settings.drafter, &settings.target)?;
    own.models.chat_template.clone_from(&settings.chat_template);
    own.models.tokenizer.clone_from(&settings.tokenizer);
    let recipe = settings.states.as_ref().unwrap_or(&own);
    let served_as = recipe.target_elsewhere().map(|server| &*server.model);
    let mut workspace = recipe.open(served_as, settings.dtype, vec![device.clone()], watch)?;
    workspace.takes_others = true;
    let text = workspace.text_side()?;
    let target = workspace.models.target_config()?;
    let mut drafter = MisreadDrafter::read(kind, &settings.drafter, target)?;
    let prompts = encoded_prompts(&settings.prompts, settings.num_prompts, text, watch)?;
    let answers = ask_each(settings, (text, target.shape.vocab_size), prompts, watch)?;
    let sizes = RoundSizes::of(&answers, settings.num_candidates)?;
    drafter.num_candidates = sizes.most;
    let ends = workspace.models.target_of_adapters(workspace.models.dtype)?;
    let along = states_along(recipe, &workspace, (ends, &drafter), &answers, watch)?;
    let expecting = Expecting {
        workspace: &workspace,
        ends,
        drafter: &drafter,
        answers: &answers,
        along: &along,
        max_length: sizes.most.max(settings.num_candidates.unwrap_or(0)),
        watch,
    };
    Explaining { expecting, sizes, asked: settings.num_candidates, findings }.explained()
}

/// Gets the target's states along the answers, by running it here or from servers.
///
/// # Errors
/// If the target cannot be run, or a server's states are not the target's.
fn states_along(
    recipe: &Recipe,
    workspace: &Workspace,
    (ends, drafter): (&CausalLm, &MisreadDrafter),
    answers: &[CountedAnswer],
    watch: &dyn Watch,
) -> Result<Vec<Along>> {
    let wanted = drafter.all_layers();
    if recipe.target_elsewhere().is_none() {
        return answers.par_iter().map(|answer| Along::of(ends, &wanted, answer)).collect();
    }
    let (server, stored) = served_layers(recipe, workspace)?;
    let layers: Vec<usize> = wanted.into_iter().filter(|it| stored.contains(it)).collect();
    if let Some(missing) = drafter.layers.iter().find(|it| !layers.contains(it)) {
        bail!(
            "the recipe's servers do not store the states after layer {missing}, which the drafter reads; hint: name the \
             drafter in the recipe, and start the server as `draftsmith server states` says"
        );
    }
    let server = StatesServer::open((server, stored), f32::INFINITY, workspace, ends, watch)?;
    let text = |answer: &CountedAnswer| {
        let whole = [&answer.prompt_ids[..], &answer.ids].concat();
        StatesText { ids: whole[..whole.len() - 1].to_vec(), first: answer.prompt_ids.len() - 1 }
    };
    let texts: Vec<StatesText> = answers.iter().map(text).collect();
    let given = known_states(&server, &layers, &texts)?.into_iter().zip(answers);
    given
        .map(|((known, last), answer)| Along::of_served(ends, known.layers, last, answer))
        .collect()
}

/// What explains a server's counts.
struct Explaining<'a> {
    expecting: Expecting<'a>,
    sizes: RoundSizes,
    /// The number of candidates that the server was asked for.
    asked: Option<usize>,
    /// What `doctor` finds in the files.
    findings: Option<String>,
}

/// A misreading with the counts that it would give, and how these fit the server's.
struct Tried {
    misreading: &'static Misreading,
    recordings: Recordings,
    expected: Vec<Expected>,
    fit: ReadingFit,
}

impl Tried {
    fn cause(&self, trained: &ReadingFit) -> Cause {
        Cause {
            misreading: self.misreading,
            expected: per_round(self.expected.iter().map(|it| it.within)),
            num_prompts: self.fit.num_only(trained),
            log_likelihood: self.fit.log_likelihood(),
        }
    }
}

impl Explaining<'_> {
    fn explained(&self) -> Result<Explained> {
        let Expecting { answers, along, drafter, .. } = self.expecting;
        let recordings = self.expecting.recordings(&drafter.as_trained(), 0)?;
        let recordings = recordings.context("the states that the drafter reads are known")?;
        let trained = self.sizes.expected(&recordings)?;
        let num_other_tokens = along.iter().map(|it| it.others.len()).sum::<usize>();
        let num_tokens = answers.iter().map(|it| it.ids.len()).sum::<usize>();
        let share = num_other_tokens as f64 / num_tokens as f64;
        ensure!(
            share < OTHER_MODEL,
            "{num_other_tokens} of {num_tokens} tokens of the server's greedy answers are not those of the target `{}`: \
             it runs another model; hint: give that model's directory as `--target`",
            self.expecting.workspace.models.target_dir().display()
        );
        let rounding = self.rounding(&trained)?;
        let fit = ReadingFit::of(&trained, answers, rounding);
        let has_others = share > ROUNDED && num_other_tokens > 2;
        let (tried, mut notes) = match fit.is_fit() || has_others {
            true => (Vec::new(), Vec::new()),
            false => self.try_all(rounding)?,
        };
        let named = causes(&fit, tried.iter().map(|it| &it.fit));
        let named: Vec<&Tried> = named.into_iter().map(|number| &tried[number]).collect();
        let causes: Vec<Cause> = named.iter().map(|it| it.cause(&fit)).collect();
        let explanation = match (has_others, fit.is_fit(), named.is_empty()) {
            (true, ..) => Explanation::OtherAnswers,
            (_, true, _) => Explanation::AsTrained,
            (.., false) => Explanation::Misread,
            (.., true) => Explanation::Unknown,
        };
        let measured = per_round(answers.iter().map(CountedAnswer::counts));
        let as_trained = per_round(trained.iter().map(|it| it.within));
        let counts = format!("as trained {as_trained:.2}, measured {measured:.2}");
        let sentence = match explanation {
            Explanation::AsTrained => format!(
                "As trained: expected {as_trained:.2} accepted per round, measured {measured:.2}."
            ),
            Explanation::Misread => misread_sentence(&causes, &counts, answers.len()),
            Explanation::OtherAnswers => {
                self.other_answers(&recordings, num_other_tokens, num_tokens)
            }
            Explanation::Unknown => format!(
                "No known way of misreading the drafter explains what the server accepts per round: {counts}{}.",
                closest(tried.iter().map(|it| it.cause(&fit)))
            ),
        };
        let first = named.first().map(|it| &*it.expected);
        let positions = positions(&trained, first, answers);
        let other_length = self.asked.filter(|asked| *asked != self.sizes.most);
        notes.extend(other_length.map(|asked| {
            let most = self.sizes.most;
            format!("The server drafts {most} candidates per round, and not {asked}: check its flag and its log.")
        }));
        if explanation == Explanation::AsTrained
            && let Some(weakness) = weakness(&positions)
        {
            notes.extend([weakness, self.by_length(&trained), self.look_ups(&recordings)?]);
        }
        if let [one, other, ..] = named[..] {
            notes.push(self.told_apart(one, other)?);
        }
        notes.extend(self.findings.clone());
        Ok(Explained {
            sentence,
            explanation,
            causes,
            num_prompts: answers.len(),
            num_tokens,
            num_other_tokens,
            num_candidates: self.sizes.most,
            changes_candidates: self.sizes.means.is_some(),
            measured,
            as_trained,
            rounding,
            positions,
            prompts: prompts(&trained, first, answers),
            notes,
        })
    }

    /// Computes what a reading would have had accepted; `None` if it reads states that are not known.
    fn expected(
        &self,
        reading: &DrafterReading,
        seed: u64,
    ) -> Result<Option<(Recordings, Vec<Expected>)>> {
        let recordings = self.expecting.recordings(reading, seed)?;
        let of = |recordings: Recordings| {
            let expected = self.sizes.expected(&recordings)?;
            Ok((recordings, expected))
        };
        recordings.map(of).transpose()
    }

    /// Says how to tell apart two readings that predict the same: with another number of candidates, or
    /// with longer or shorter texts.
    fn told_apart(&self, one: &Tried, other: &Tried) -> Result<String> {
        let accepted = |it: &Tried, num: usize| {
            anyhow::Ok(per_round(replayed(&it.recordings, num)?.iter().map(|it| it.within)))
        };
        let at = |num: usize| anyhow::Ok((num, [accepted(one, num)?, accepted(other, num)?]));
        let others = (1..=one.recordings.max_length).filter(|num| *num != self.sizes.most);
        let all = others.map(at).collect::<Result<Vec<_>>>()?;
        let difference = |(_, [one, other]): &(usize, [f64; 2])| (one - other).abs();
        let best = all.into_iter().max_by(|a, b| difference(a).total_cmp(&difference(b)));
        if let Some((num, [one, other])) = best.filter(|it| difference(it) >= APART) {
            return Ok(format!(
                "With {num} candidates per round, the first cause predicts {one:.2} accepted and the second {other:.2}: \
                 start the server with that many."
            ));
        }
        let answers = one.expected.iter().zip(&other.expected);
        let differences = answers.map(|(one, other)| [one.within, other.within].map(|it| it[0]));
        let differences: Vec<f64> = differences.map(|[one, other]| (one - other).abs()).collect();
        let (middle, [short, long]) = self.by_halves(|at| [differences[at], 1.0]);
        Ok(match short.max(long) >= LEAST_SCALE {
            true if long > short => format!(
                "Both causes differ most on long texts: choose prompts that have more than {middle} tokens with their \
                 answers."
            ),
            true => format!("Both causes differ most on texts of less than {middle} tokens."),
            false => "On these prompts both causes predict the same: give more and longer prompts."
                .to_owned(),
        })
    }

    /// Sums ratios over the answers with the shorter texts, and over those with the longer ones. Also
    /// returns the length that divides them.
    fn by_halves(&self, ratio: impl Fn(usize) -> [f64; 2]) -> (usize, [f64; 2]) {
        let answers = self.expecting.answers;
        let len = |at: &usize| answers[*at].prompt_ids.len() + answers[*at].ids.len();
        let mut order: Vec<usize> = (0..answers.len()).collect();
        order.sort_by_key(len);
        let middle = order.len() / 2;
        let halves = [&order[..middle], &order[middle..]];
        (len(&order[middle]), halves.map(|half| per_round(half.iter().map(|at| ratio(*at)))))
    }

    fn by_length(&self, trained: &[Expected]) -> String {
        let (middle, [short, long]) = self.by_halves(|at| trained[at].within);
        format!(
            "Expected per round: {short:.2} accepted in texts of less than {middle} tokens (prompt and answer), and \
             {long:.2} in longer ones."
        )
    }

    /// Says what prompt lookup before the drafter would change.
    fn look_ups(&self, recordings: &Recordings) -> Result<String> {
        let num_candidates = self.sizes.most;
        let after = recordings.after_first_token();
        let after = after.with_look_ups(LookupFirst::new(2, num_candidates));
        let rule = FixedLengthConfig { candidate_length: num_candidates }.into();
        let rounds = after.trace(&rule)?.rounds;
        let with = per_round(rounds.iter().map(|round| [round.num_accepted as f64, 1.0]));
        Ok(format!("With prompt lookup before the drafter, {with:.2} would be accepted per round."))
    }

    /// Measures the deviation of a server that only rounds.
    fn rounding(&self, trained: &[Expected]) -> Result<f64> {
        let place = tempfile::tempdir().context("cannot make a temporary directory")?;
        let noisy = self.expecting.drafter.with_noise(BF16, place.path())?;
        let (_, noisy) = self.expected(&noisy, 0)?.context("the same states are known")?;
        Ok(scale_of(trained, &noisy, self.expecting.answers))
    }

    /// Computes what each misreading would have had accepted. Also names those that cannot be computed.
    fn try_all(&self, rounding: f64) -> Result<(Vec<Tried>, Vec<String>)> {
        let Expecting { answers, drafter, ends, watch, .. } = self.expecting;
        let (mut tried, mut untried) = (Vec::new(), Vec::new());
        let progress = watch.bar("explain", "readings", MISREADINGS.len() as u64);
        for misreading in &MISREADINGS {
            let place = tempfile::tempdir().context("cannot make a temporary directory")?;
            let reading = drafter.misread(misreading, ends, place.path())?;
            progress.advance(1.0);
            let Some(reading) = reading else { continue };
            match self.expected(&reading, 0) {
                Ok(Some((recordings, expected))) => {
                    // Other draws have as much effect on the server's counts as on ours.
                    let again = reading.is_drawn.then(|| self.expected(&reading, 1)).transpose()?;
                    let again = again.flatten().map(|(_, expected)| expected);
                    let drawn = again.map(|again| scale_of(&expected, &again, answers));
                    let fit = ReadingFit::of(&expected, answers, drawn.unwrap_or(rounding));
                    tried.push(Tried { misreading, recordings, expected, fit });
                }
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Ok(None) | Err(_) => untried.push(format!("`{}`", misreading.name)),
            }
        }
        progress.finish();
        let note =
            format!("Not tried, because it cannot be computed here: {}.", untried.join(", "));
        Ok((tried, Vec::from_iter((!untried.is_empty()).then_some(note))))
    }

    /// Says why answers may not be the target's.
    fn other_answers(
        &self,
        recordings: &Recordings,
        num_other: usize,
        num_tokens: usize,
    ) -> String {
        let Expecting { answers, along, .. } = self.expecting;
        let places =
            recordings.responses.iter().map(|it| &it.places).zip(answers.iter().zip(along));
        let num_proposed: usize = places
            .map(|(places, (answer, along))| {
                let is_proposed = |at: &&usize| places[**at].drafted().token_id == answer.ids[**at];
                along.others.iter().filter(is_proposed).count()
            })
            .sum();
        let why = match num_proposed as f64 >= PROPOSED * num_other as f64 {
            true => {
                "the drafter proposes them, so the server accepts what its target would not draw"
            }
            false => {
                "its target is probably another checkpoint, or quantised, or the server is at fault"
            }
        };
        format!(
            "{num_other} of {num_tokens} tokens of the server's greedy answers are not the target's: {why}; `draftsmith \
             server certify` tests it."
        )
    }
}

fn per_round(counts: impl Iterator<Item = [f64; 2]>) -> f64 {
    let [accepted, rounds] = counts.fold([0.0; 2], |sum, it| [sum[0] + it[0], sum[1] + it[1]]);
    accepted / rounds.max(1.0)
}

/// Compares the shares of rounds that accept the candidate at each position.
fn positions(
    trained: &[Expected],
    cause: Option<&[Expected]>,
    answers: &[CountedAnswer],
) -> Vec<ComparedRow> {
    let at = |counts: &[f64], position: usize| counts.get(position).copied().unwrap_or(0.0);
    let expected = |all: &[Expected], position: usize| {
        per_round(all.iter().map(|it| [at(&it.within_by_position, position), it.within[1]]))
    };
    let measured = |position: usize| {
        per_round(answers.iter().map(|it| [at(&it.measured.by_position, position), it.counts()[1]]))
    };
    let is_counted = answers.iter().any(|it| !it.measured.by_position.is_empty());
    let num = trained.iter().map(|it| it.within_by_position.len()).max().unwrap_or(0);
    let row = |position: usize| ComparedRow {
        as_trained: expected(trained, position),
        cause: cause.map(|cause| expected(cause, position)),
        measured: is_counted.then(|| measured(position)),
    };
    (0..num).map(row).collect()
}

/// Compares the accepted candidates of each answer.
fn prompts(
    trained: &[Expected],
    cause: Option<&[Expected]>,
    answers: &[CountedAnswer],
) -> Vec<ComparedRow> {
    let row = |(nth, answer): (usize, &CountedAnswer)| ComparedRow {
        as_trained: trained[nth].within[0],
        cause: cause.map(|cause| cause[nth].within[0]),
        measured: Some(answer.counts()[0]),
    };
    answers.iter().enumerate().map(row).collect()
}

fn misread_sentence(causes: &[Cause], counts: &str, num_prompts: usize) -> String {
    let whats: Vec<&str> = causes.iter().map(|cause| cause.misreading.what).collect();
    let same = if causes.len() > 1 { ", which predict the same here" } else { "" };
    let Cause { expected, num_prompts: num, .. } = &causes[0];
    format!(
        "The server probably {}{same}: expected {expected:.2} accepted per round, {counts}; {num} of {num_prompts} prompts \
         agree only with that.",
        whats.join(", or ")
    )
}

fn closest(causes: impl Iterator<Item = Cause>) -> String {
    let closest = causes.max_by(|one, other| one.log_likelihood.total_cmp(&other.log_likelihood));
    closest.map_or_else(String::new, |it| {
        format!("; the closest would be that it {}, with {:.2}", it.misreading.what, it.expected)
    })
}

/// Says where a drafter is weak that the server reads as trained.
fn weakness(positions: &[ComparedRow]) -> Option<String> {
    let shares: Vec<f64> = positions.iter().map(|it| it.as_trained).collect();
    let enough = shares.iter().take_while(|share| **share >= 0.1).count().max(1);
    let why = match *shares.first()? < 0.5 {
        true => {
            "most first candidates are rejected, so it needs more training on answers to prompts like these"
        }
        false => {
            "first candidates are accepted and later ones are not, so it needs training with more steps"
        }
    };
    let fewer = (enough < shares.len()).then(|| {
        format!("; position {} gains less than a tenth of a token, so draft {enough}", enough + 1)
    });
    (2.0 * shares.iter().sum::<f64>() < shares.len() as f64).then(|| {
        format!(
            "The drafter itself is weak on these prompts: {why}{}. `draftsmith survey` says what other settings and \
             look-ups would gain.",
            fewer.unwrap_or_default()
        )
    })
}

/// Names the command that says why a server accepts less of a drafter than expected; `None` for a kind of
/// drafter that it does not know.
pub fn explain_hint(kind: Option<&str>, drafter: &str, target: &str) -> Option<String> {
    ALL.contains(&kind?).then(|| {
        format!(
            "If a server accepts less, `draftsmith server explain --server URL --target {target} --prompts FILE {drafter}` \
             says why."
        )
    })
}

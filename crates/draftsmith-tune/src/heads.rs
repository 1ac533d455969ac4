//! The choice of the acceptance head of a sweep that decodes fastest (SpecDec++, §4.3). Every head
//! predicts along the recordings of its drafter, and the stop rules that read the head are
//! replayed.
//!
//! The fastest head on the validation prompts is copied into `head/`, and the recordings get its predictions.
//! Each head is then judged on the test prompts of every source, with the setting that was best on the
//! validation prompts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use draftsmith_files::{parse_json, read_bytes, read_file, write_whole};
use draftsmith_model::{AcceptanceHead, DrafterModel, Rows};
use draftsmith_report::{
    Algorithm2, CurvePoint, DecodingName, DrafterName, HeadOnSet, HeadRace, JudgedHead,
    SharedThreshold, SweptHead, median_of,
};
use draftsmith_theory::{
    Counts, DrafterId, Estimate, HeadTiming, Recording, Recordings, StopRuleConfig, StopRuleName,
    TimedCounts, least_by, seconds_per_token,
};
use draftsmith_train::{HeadTraining, predictions_along};
use rayon::prelude::*;
use serde_json::Value;

use crate::costs::Costs;
use crate::judging::{gain, speedup};
use crate::rollouts::{PromptSet, RecordedSet, RolloutFiles, RolloutKey};
use crate::sweep::{RuleChoice, best_fixed, best_unread, cheapest, settings};
use crate::tuner::Tuner;
use crate::tuning::TuningFile;
use draftsmith_recipe::exports::{HeadExport, head_within, read_model_head};
use draftsmith_recipe::{Recipe, Watch, Workspace};

/// The number of timings of a head over one row, of which the median is used.
const NUM_TIMED: usize = 51;

/// Returns the path of `sweep.json`, which lists the heads of a drafter's sweep.
pub fn sweep_path(recipe: &Recipe, id: DrafterId) -> PathBuf {
    recipe.sweep_dir(id).join("sweep.json")
}

/// Copies a head of a sweep into `head/`, where the other stages read it.
///
/// # Errors
/// If a file cannot be read or written.
pub fn install_head(
    recipe: &Recipe,
    id: DrafterId,
    workspace: &Workspace,
    from: &Path,
) -> Result<()> {
    let dir = head_within(&recipe.export_dir(id));
    workspace.artifacts.forget(&dir);
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create `{}`", dir.display()))?;
    // `config.json` comes last, because it marks a complete head.
    for name in ["scores.json", "model.safetensors", "config.json"] {
        write_whole(&dir.join(name), read_file(&from.join(name))?)?;
    }
    recipe.write_of(id, &dir)
}

/// Compares the heads of a recipe's sweep, copies the fastest into `head/` and writes
/// `tuning/heads.json`. Returns `None` without a sweep.
///
/// # Errors
/// If a head or recording is missing or belongs to other models.
pub fn choose_head(
    recipe: &Recipe,
    workspace: &Workspace,
    time_limit: Option<Duration>,
    watch: &dyn Watch,
) -> Result<Option<HeadRace>> {
    let swept = recipe.trained_head().filter(|(_, settings)| settings.sweep.is_some());
    let Some((id, training)) = swept else { return Ok(None) };
    let (_, evaluate) = recipe.need_tuning("tune")?;
    let drafter = DrafterName::Of(id);
    let files = RolloutFiles::of(recipe, workspace)?;
    // The recipe may exclude the drafter from tuning.
    let Some(now) = files.head_dir(drafter) else { return Ok(None) };
    let now = read_model_head(now, id, None, workspace)?;
    let rows = swept_heads(recipe, id, training)?;
    let read = |row: &SweptHead| read_model_head(&row.dir, id, None, workspace);
    let heads = rows.iter().map(read).collect::<Result<Vec<HeadExport>>>()?;
    let loading = recipe.loading(id, workspace);
    let draft = loading.drafter().kind.frozen(&loading, workspace.models.dtype)?;
    let loaded = recipe.load_drafters(workspace, false)?;
    let mut tuner = Tuner::new((recipe, workspace), &loaded, &files, time_limit, watch)?;
    let mut race = HeadComparison {
        id,
        draft,
        heads: &heads,
        seed: recipe.seed,
        plain: Vec::new(),
        fixed: Vec::new(),
        runs: heads.iter().map(|_| HeadRun::default()).collect(),
        recorded: Vec::new(),
    };
    let sets = evaluate.decodings.iter().map(|decoding| {
        let read = |set| files.read(RolloutKey { drafter, set, decoding: *decoding });
        Ok([read(PromptSet::Validation)?, read(PromptSet::Test)?])
    });
    let sets = sets.collect::<Result<Vec<[RecordedSet; 2]>>>()?;
    let validation: Vec<&Recordings> = sets.iter().map(|[set, _]| &set.recordings).collect();
    let (source, costs) = tuner.costs(&validation, &evaluate.decodings)?;
    for ((decoding, sets), measured) in evaluate.decodings.iter().zip(sets).zip(costs) {
        let extra: Vec<f64> = match source.is_machine() {
            true => race.extra_seconds(&now.head)?,
            false => vec![0.0; heads.len()],
        };
        watch.note(format!("tune: comparing {} heads, {}", heads.len(), decoding.text()));
        race.run(*decoding, sets, &measured.costs, &extra)?;
    }
    let fastest = race.fastest();
    let is_new = fingerprint(&now) != fingerprint(&heads[fastest]);
    if is_new {
        install_head(recipe, id, workspace, &rows[fastest].dir)?;
    }
    // This computes the hash of the head that is in `head/` now.
    let files = RolloutFiles::of(recipe, workspace)?;
    for (key, set) in race.recordings_of(fastest).filter(|_| is_new) {
        files.write(key, &set)?;
    }
    let (lost_by_kl, heads) = race.judged(&rows, fastest);
    let race = HeadRace {
        drafter,
        cost_source: source,
        head_hash: files.head_hash(drafter).context("it is there")?.to_owned(),
        lost_by_kl,
        heads,
    };
    TuningFile::HEADS.write(recipe, &race)?;
    Ok(Some(race))
}

/// Reads the entries of the recipe's sweep, with the current paths of the heads' directories.
fn swept_heads(recipe: &Recipe, id: DrafterId, training: &HeadTraining) -> Result<Vec<SweptHead>> {
    let path = sweep_path(recipe, id);
    let hint =
        || format!("there is no sweep in `{}`; hint: run `draftsmith train-head`", path.display());
    let rows: Vec<SweptHead> = parse_json(&path, &read_bytes(&path).with_context(hint)?)?;
    let find = |settings: HeadTraining| {
        let name = settings.name();
        let row = rows.iter().find(|row| row.name == name).cloned();
        let row = row.with_context(|| {
            format!(
                "`{}` lacks the head `{name}`; hint: run `draftsmith train-head`",
                path.display()
            )
        })?;
        Ok(SweptHead { dir: recipe.sweep_dir(id).join(&name), ..row })
    };
    training.passes().into_iter().flatten().map(find).collect()
}

fn fingerprint(head: &HeadExport) -> Option<&Value> {
    head.config.training.get("fingerprint")
}

/// The heads of a sweep, and their results so far.
struct HeadComparison<'a> {
    id: DrafterId,
    draft: DrafterModel,
    heads: &'a [HeadExport],
    seed: u64,
    /// The costs of plain decoding over the validation prompts of all ways of decoding. `fixed` has
    /// those of the best fixed lengths.
    plain: Vec<TimedCounts>,
    fixed: Vec<TimedCounts>,
    runs: Vec<HeadRun>,
    /// The recorded sets, each with one list of predictions per head.
    recorded: Vec<(RolloutKey, RecordedSet, Vec<Vec<f32>>)>,
}

/// The results of one head.
#[derive(Default)]
struct HeadRun {
    /// The costs of the best rule that reads the head, over the same prompts as [`HeadComparison::fixed`].
    spent: Vec<TimedCounts>,
    sets: Vec<HeadOnSet>,
}

impl HeadComparison<'_> {
    /// Measures for each head the additional seconds per candidate compared with `now`, the head
    /// with which the costs were measured.
    fn extra_seconds(&self, now: &AcceptanceHead) -> Result<Vec<f64>> {
        let now = self.seconds_of(now)?;
        let extra = |head: &HeadExport| Ok(self.seconds_of(&head.head)? - now);
        self.heads.iter().map(extra).collect()
    }

    fn seconds_of(&self, head: &AcceptanceHead) -> Result<f64> {
        let hidden = self.draft.embed_ids(&[0]);
        let of_embedding = head.reads().looks_ahead().then(|| head.of_embedding(&hidden));
        let scalars = vec![0.0; head.reads().num_scalars()];
        let mut seconds = Vec::with_capacity(NUM_TIMED);
        for _ in 0..NUM_TIMED {
            let begun = Instant::now();
            let [_] =
                Rows::to_host([head.acceptance_logits(&hidden, of_embedding.as_ref(), &scalars)])?;
            seconds.push(begun.elapsed().as_secs_f64());
        }
        median_of(seconds).context("there are timings")
    }

    /// Replays the rules that read each head over the recordings of validation and test prompts.
    fn run(
        &mut self,
        decoding: DecodingName,
        [validation, test]: [RecordedSet; 2],
        costs: &Costs,
        extra: &[f64],
    ) -> Result<()> {
        let heads: Vec<&AcceptanceHead> = self.heads.iter().map(|head| &head.head).collect();
        let timing = self.timing();
        let predicted =
            |set: &RecordedSet| predictions_along(&self.draft, &heads, &set.recordings, None);
        let (on_validation, on_test) = (predicted(&validation)?, predicted(&test)?);
        let fixed = best_fixed(&best_unread(&validation.recordings, costs)?)?.clone();
        self.plain.extend(validation.recordings.plain(&costs.rounds));
        self.fixed.extend(fixed.replay(&validation.recordings, costs)?);
        let fixed_on_test = best_fixed_of_each(&test, costs)?;
        for nth in 0..self.heads.len() {
            let head_seconds = (costs.head_seconds + extra[nth]).max(0.0);
            let costs = Costs { head_seconds, ..costs.clone() };
            let own = validation.recordings.with_head(timing, &on_validation[nth]);
            let tried = reading(&own).into_par_iter();
            let tried = tried.map(|config| RuleChoice::of(config, &own, &costs));
            let tried = tried.collect::<Result<Vec<_>>>()?;
            let best = cheapest(&tried)?;
            let is_algorithm_2 = |it: &&RuleChoice| it.name == StopRuleName::RejectionThreshold;
            let algorithm_2 = cheapest(tried.iter().filter(is_algorithm_2)).ok();
            self.runs[nth].spent.extend(best.replay(&own, &costs)?);
            let set = RecordedSet {
                ids: test.ids.clone(),
                recordings: test.recordings.with_head(timing, &on_test[nth]),
            };
            for ((dataset, test), fixed) in set.by_source().into_iter().zip(&fixed_on_test) {
                let rules = (best, algorithm_2);
                let judged = judge((decoding, dataset), (&test, &costs), rules, fixed, self.seed)?;
                self.runs[nth].sets.push(judged);
            }
        }
        let drafter = DrafterName::Of(self.id);
        let key = |set| RolloutKey { drafter, set, decoding };
        self.recorded.push((key(PromptSet::Validation), validation, on_validation));
        self.recorded.push((key(PromptSet::Test), test, on_test));
        Ok(())
    }

    fn timing(&self) -> HeadTiming {
        let looks_ahead = self.heads.first().is_some_and(|head| head.head.reads().looks_ahead());
        HeadTiming::of_reader(looks_ahead)
    }

    /// Returns the index of the head with the fewest seconds per token on the validation prompts.
    fn fastest(&self) -> usize {
        let seconds = |nth: &usize| seconds_per_token(&self.runs[*nth].spent);
        least_by(0..self.runs.len(), seconds).unwrap_or(0)
    }

    /// Iterates over the recorded sets, with the predictions of head `nth` and the ids of the
    /// prompts.
    fn recordings_of(
        &self,
        nth: usize,
    ) -> impl Iterator<Item = (RolloutKey, Vec<(String, Recording)>)> {
        let timing = self.timing();
        self.recorded.iter().map(move |(key, set, predicted)| {
            let responses = set.recordings.with_head(timing, &predicted[nth]).responses;
            (*key, set.ids.iter().cloned().zip(responses).collect())
        })
    }

    /// Returns the results of all heads in the order of the sweep, after [`HeadRace::lost_by_kl`].
    fn judged(&self, rows: &[SweptHead], fastest: usize) -> (Option<Estimate>, Vec<JudgedHead>) {
        let kl = |nth: &usize| rows[*nth].scores.comparable_kl();
        let lowest = least_by(0..rows.len(), kl).unwrap_or(0);
        let best_on = |set: usize| {
            let curves = self.runs.iter().flat_map(|run| &run.sets[set].curve);
            curves.map(|at| at.speedup).fold(f64::NEG_INFINITY, f64::max)
        };
        let heads = rows.iter().enumerate().map(|(nth, row)| {
            let HeadRun { spent, sets } = &self.runs[nth];
            let shares = sets
                .iter()
                .enumerate()
                .filter_map(|(nth, set)| Some(set.algorithm_2?.speedup.value / best_on(nth)));
            JudgedHead {
                name: row.name.clone(),
                num_layers: row.num_layers,
                rejection_weight: row.rejection_weight,
                mixing_ratio: row.mixing_ratio,
                kl: row.scores.comparable_kl(),
                is_chosen: nth == fastest,
                has_lowest_kl: nth == lowest,
                speedup: speedup(&self.plain, spent, 1, self.seed).value,
                gain: gain(&self.fixed, spent, 1, self.seed),
                least_share: shares.fold(f64::INFINITY, f64::min),
                shared_threshold: shared_threshold(sets, best_on),
                sets: sets.clone(),
            }
        });
        let [best, of_kl] = [fastest, lowest].map(|nth| &self.runs[nth].spent);
        let lost = (lowest != fastest).then(|| gain(best, of_kl, 1, self.seed));
        (lost, heads.collect())
    }
}

/// Finds the threshold of Algorithm 2 with the largest [`SharedThreshold::least_share`]. `best_on`
/// returns the speed of the fastest head and threshold on a set by its index. Returns `None`
/// without thresholds.
fn shared_threshold(sets: &[HeadOnSet], best_on: impl Fn(usize) -> f64) -> Option<SharedThreshold> {
    let at = |(nth, point): (usize, &CurvePoint)| {
        let shares = sets.iter().enumerate().map(|(set, it)| it.curve[nth].speedup / best_on(set));
        let least_share = shares.fold(f64::INFINITY, f64::min);
        SharedThreshold { threshold: point.threshold, least_share }
    };
    let all = sets.first()?.curve.iter().enumerate().map(at);
    all.max_by(|one, other| one.least_share.total_cmp(&other.least_share))
}

/// Replays the best fixed length of each source on its own prompts, as in SpecDec++'s Table 1.
fn best_fixed_of_each(set: &RecordedSet, costs: &Costs) -> Result<Vec<Vec<TimedCounts>>> {
    let best_of =
        |(_, test): (_, Recordings)| best_fixed(&best_unread(&test, costs)?)?.replay(&test, costs);
    set.by_source().into_iter().map(best_of).collect()
}

/// Lists the settings of rules that read the head and whose maximum candidate length is the
/// recorded one.
fn reading(recordings: &Recordings) -> Vec<StopRuleConfig> {
    let max_length = recordings.max_length;
    let is_longest = |config: &StopRuleConfig| {
        config.needs().acceptance_prob
            && config.init().is_ok_and(|rule| rule.bounds().max == max_length)
    };
    settings(max_length, recordings.head).into_iter().filter(is_longest).collect()
}

/// Compares the rule that was best on the validation prompts, and the best one of Algorithm 2, on the
/// test prompts of one source, whose recordings have the head's predictions. The baseline is the best
/// fixed length of this source, whose times are `fixed`. Also computes the curve of Algorithm 2 over
/// thresholds.
fn judge(
    (decoding, dataset): (DecodingName, &str),
    (test, costs): (&Recordings, &Costs),
    (best, algorithm_2): (&RuleChoice, Option<&RuleChoice>),
    fixed: &[TimedCounts],
    seed: u64,
) -> Result<HeadOnSet> {
    let plain = test.plain(&costs.rounds);
    let plain_seconds = seconds_per_token(&plain);
    let judged = |choice: &RuleChoice| -> Result<[Estimate; 2]> {
        let own = choice.replay(test, costs)?;
        Ok([speedup(&plain, &own, 1, seed), gain(fixed, &own, 1, seed)])
    };
    let [of_best, gain] = judged(best)?;
    let algorithm_2 = algorithm_2.map(|choice| {
        let [speedup, gain] = judged(choice)?;
        anyhow::Ok(Algorithm2 { threshold: choice.config.parameter(), speedup, gain })
    });
    let is_algorithm_2 =
        |config: &StopRuleConfig| config.name() == StopRuleName::RejectionThreshold;
    let curve = reading(test).into_par_iter().filter(is_algorithm_2).map(|config| {
        let spent = test.replay(&config, &costs.of_rule(&config))?;
        let counts: Counts = spent.iter().map(|it| it.counts).sum();
        Ok(CurvePoint {
            threshold: config.parameter(),
            discard_rate: counts.discard_rate(),
            verification_rate: counts.verification_rate(),
            speedup: plain_seconds / seconds_per_token(&spent),
        })
    });
    Ok(HeadOnSet {
        decoding,
        dataset: dataset.to_owned(),
        config: best.config.clone(),
        speedup: of_best,
        gain,
        algorithm_2: algorithm_2.transpose()?,
        curve: curve.collect::<Result<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::FixedLengthConfig;

    use super::*;
    use crate::judging::tests::recordings;

    fn fixed(candidate_length: usize) -> RuleChoice {
        let config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        RuleChoice { lookup_first: None, name: config.name(), config, seconds_per_token: 0.0 }
    }

    #[test]
    fn gains_are_over_the_best_fixed_length_of_the_same_source() {
        let [often, seldom] = [0.95, 0.3].map(|accepted| recordings([20, 40], accepted, ["h", ""]));
        let ids = ["often", "seldom"].map(|name| (0..20).map(move |nth| format!("{name}#{nth}")));
        let responses = [often.responses, seldom.responses.clone()].concat();
        let recordings = Recordings { responses, ..seldom };
        let set = RecordedSet { ids: ids.into_iter().flatten().collect(), recordings };
        let costs = &Costs::paper(set.recordings.drafter);
        let best_fixed = best_fixed_of_each(&set, costs).expect("replays");
        let judged: Vec<HeadOnSet> = (set.by_source().into_iter().zip(&best_fixed))
            .map(|((dataset, test), best_fixed)| {
                let rules = (&fixed(8), Some(&fixed(1)));
                judge((DecodingName::Sampled, dataset), (&test, costs), rules, best_fixed, 1)
                    .expect("replays")
            })
            .collect();
        assert_eq!([&*judged[0].dataset, &judged[1].dataset], ["often", "seldom"]);
        // Eight candidates are best where they are often accepted, one where they seldom are.
        let of = |it: &HeadOnSet| [it.gain, it.algorithm_2.expect("it was given").gain];
        let gains: Vec<[f64; 2]> = judged.iter().map(|it| of(it).map(|gain| gain.value)).collect();
        assert_eq!([gains[0][0], gains[1][1]], [0.0, 0.0]);
        assert!(gains[0][1] < -0.1 && gains[1][0] < -0.1, "{gains:?}");
    }

    #[test]
    fn one_threshold_is_chosen_for_all_sets_by_its_lowest_share() {
        let nothing = Estimate { value: 0.0, low: 0.0, high: 0.0 };
        let set = |speeds: [f64; 3]| HeadOnSet {
            decoding: DecodingName::Sampled,
            dataset: String::new(),
            config: fixed(1).config,
            speedup: nothing,
            gain: nothing,
            algorithm_2: None,
            curve: (1..)
                .zip(speeds)
                .map(|(nth, speedup)| CurvePoint {
                    threshold: f64::from(nth) / 10.0,
                    discard_rate: 0.0,
                    verification_rate: 1.0,
                    speedup,
                })
                .collect(),
        };
        // Another head reaches 2.0 and 2.5.
        let found =
            shared_threshold(&[set([2.0, 1.8, 1.0]), set([1.0, 2.0, 2.4])], |set| [2.0, 2.5][set]);
        assert_eq!(found, Some(SharedThreshold { threshold: 0.2, least_share: 0.8 }));
        assert_eq!(shared_threshold(&[], |_| 1.0), None);
    }
}

//! The lessons of self-drafts: batches of rows with the frozen target's hidden states, and the
//! losses that compare a drafter's predictions with the target's.
//!
//! Adapters, EAGLE-3 and block drafters learn from the same batches (`batches`), which contain the
//! hidden states that they read. The states are computed, or stored on the disk (`stored`). The
//! target is never part of a learner, so checkpoints contain only drafters.

pub(crate) mod batches;
pub(crate) mod distillation;
pub(crate) mod rows;
pub(crate) mod settings;
pub(crate) mod stored;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use draftsmith_data::ResponseRow;
use draftsmith_model::{CausalLm, DraftVocabulary, Lengths};
use serde::{Deserialize, Serialize};

use self::batches::{FrozenTarget, LessonSource};
use self::rows::LessonRow;
use self::settings::LessonSettings;
use self::stored::StoredStates;
use crate::data::Loaders;
use crate::data::split::SplitRows;
use crate::error::{Result, Section, TrainError};
use crate::run::devices::PerDevice;
use crate::states::{FeatureDir, Features, StateFiles};

/// The teacher of a self-draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Teaching {
    /// The target's distribution at each token.
    Target,
    /// The next token of the response. A token outside the draft vocabulary adds nothing to the
    /// loss.
    Response,
}

/// The inputs that the training of a self-draft reads from the target and the rows, and the
/// settings for reading them.
pub(crate) struct Lessons {
    pub(crate) section: Section,
    /// The kind of the drafters, for listeners.
    pub(crate) label: &'static str,
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    pub(crate) layers: Vec<usize>,
    /// Whether the drafter reads token embeddings, each with the hidden state of the position
    /// before. If not, the target's logit soft cap also applies to its own LM head.
    pub(crate) reads_tokens: bool,
    /// The tokens that the drafters of `initial` may draft; `None` if there are none, or they draft all.
    pub(crate) initial_vocabulary: Option<DraftVocabulary>,
    pub(crate) settings: LessonSettings,
}

/// The loaders of a training, with the draft vocabulary and the stored hidden states.
pub(crate) struct Sources {
    pub(crate) loaders: Loaders<LessonSource>,
    /// The draft vocabulary, and the fraction of the validation rows' response tokens in it. `None`
    /// if all tokens may be drafted.
    pub(crate) vocabulary: Option<(DraftVocabulary, f64)>,
    /// The hidden states on the disk; `None` if they are not stored.
    pub(crate) stored: Option<Arc<StoredStates>>,
}

/// Opens the files of hidden states for all rows, if the settings ask for them. States that servers
/// give are requested here.
///
/// # Errors
/// If a file cannot be opened, or the servers fail.
fn open_states(
    lessons: &Lessons,
    mut rows: Vec<&LessonRow>,
    width: usize,
    place: Option<&FeatureDir<'_>>,
) -> Result<Option<Arc<StoredStates>>> {
    let has_source = place.is_some_and(|place| place.source.is_some());
    if lessons.settings.features == Features::Server && !has_source {
        return Err(TrainError::States(format!(
            "`{}.features` is `server`, and no server gives hidden states",
            lessons.section
        )));
    }
    let (Features::Cache | Features::Server, Some(place)) = (lessons.settings.features, place)
    else {
        return Ok(None);
    };
    let files = StateFiles::new(place.clone(), lessons.settings.features_format);
    // Rows are sorted, so that the file does not depend on the split.
    rows.sort_by(|one, other| one.id.cmp(&other.id));
    let wanted = (&lessons.layers[..], lessons.settings.teacher);
    Ok(Some(Arc::new(StoredStates::open(files, wanted, width, &rows)?)))
}

/// Splits the rows and makes the loaders of both sides. If the settings ask for it, chooses a draft
/// vocabulary from the training rows, and stores hidden states in `place`. `targets` have no
/// autodiff.
pub(crate) fn prepare(
    targets: &PerDevice<CausalLm>,
    rows: &[ResponseRow],
    lessons: &Lessons,
    seed: u64,
    place: Option<&FeatureDir<'_>>,
) -> Result<Sources> {
    let target = targets.first();
    let max_len = lessons.settings.max_len.min(target.shape().context);
    let vocab_size = target.shape().vocab_size;
    let optimizer = &lessons.settings.optimizer;
    let first = usize::from(lessons.reads_tokens);
    let split = SplitRows::new(rows, optimizer.validation_fraction, |row| {
        row.check_ids(vocab_size)?;
        Ok(LessonRow::new(row, first, max_len))
    })?;
    let counts = split.counts();
    if counts.num_training == 0 || counts.num_validation == 0 {
        let fraction = optimizer.validation_fraction;
        let settings = format!("`{}.optimizer.validation_fraction` = {fraction}", lessons.section);
        let nums = [counts.num_training, counts.num_validation, counts.num_unusable, rows.len()];
        return Err(TrainError::too_few_rows(nums, max_len, &settings));
    }

    let lengths = Lengths::on(&targets.first().device());
    let initial = lessons.initial_vocabulary.as_ref();
    let size = lessons.settings.draft_vocabulary.or(initial.map(|initial| initial.ids().len()));
    let vocabulary = size.map(|size| {
        let counts = |rows: &[Arc<LessonRow>]| {
            let mut counts = vec![0_u64; vocab_size];
            for id in rows.iter().flat_map(|row| row.predicted()) {
                counts[*id as usize] += 1;
            }
            counts
        };
        let always = initial.map_or(&*target.shape().eos_token_ids, DraftVocabulary::ids);
        let chosen = DraftVocabulary::most_frequent(&counts(&split.training), size, always);
        let vocabulary = initial.map_or(chosen.clone(), |initial| initial.with_tokens_of(&chosen));
        let coverage = vocabulary.coverage(&counts(&split.validation));
        (vocabulary, coverage)
    });
    let narrowed = vocabulary.as_ref().map(|(vocabulary, _)| vocabulary);
    let targets = targets.clone().map(|target| {
        let frozen = FrozenTarget::new(target, narrowed);
        if lessons.reads_tokens { frozen.with_uncapped_students() } else { frozen }
    });
    let width = target.shape().hidden_size;
    let all = split.training.iter().chain(&split.validation).map(AsRef::as_ref);
    let stored = open_states(lessons, all.collect(), width, place)?;
    let room = Arc::new(AtomicUsize::new(lessons.settings.cache_mib.saturating_mul(1 << 20)));
    let source = |rows| LessonSource {
        targets: targets.clone(),
        exit_layers: lessons.layers.clone(),
        reads_tokens: lessons.reads_tokens,
        teaching: lessons.settings.teacher,
        rows,
        batch_size: optimizer.batch_size,
        lengths,
        room: room.clone(),
        stored: stored.clone(),
    };
    let (training_rows, validation_rows) = (source(split.training), source(split.validation));
    let (settings, num_epochs) = (optimizer.batches(seed), optimizer.num_epochs);
    let loaders = Loaders::new(training_rows, validation_rows, settings, num_epochs, counts);
    Ok(Sources { loaders, vocabulary, stored })
}

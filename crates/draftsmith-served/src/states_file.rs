//! The file in which vLLM's `ExampleHiddenStatesConnector` stores the hidden states of a request:
//! safetensors with `hidden_states`, `[tokens, layers, width]`, and `token_ids`, `[tokens]`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use draftsmith_files::{if_present, in_bytes};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::Value;

use crate::settings::StatesRecipe;

/// The greatest length of a header.
const MOST_HEADER: u64 = 1 << 16;
/// The bytes of a token's id in the file.
const ID_BYTES: u64 = 8;
/// The pause between two looks at a lock.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) const NO_STATES: &str =
    "start vLLM 0.31 or newer as `draftsmith server states RECIPE` prints";
const NOT_SHARED: &str = "each server writes into its own directory of `data.server.states.dirs`, which this machine \
                          must share and whose files (mode 0600) this user must be able to read";
const STATES: &str = "hidden_states";
const IDS: &str = "token_ids";

/// The number format of a server's hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum StatesDtype {
    /// bfloat16.
    #[serde(rename = "BF16")]
    Bf16,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

impl StatesDtype {
    /// Returns the number of bytes per value.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let halves = || bytes.as_chunks::<2>().0.iter();
        match self {
            Self::Bf16 => halves().map(|it| bf16::from_le_bytes(*it).to_f32()).collect(),
            Self::F16 => halves().map(|it| f16::from_le_bytes(*it).to_f32()).collect(),
            Self::F32 => {
                bytes.as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
            }
        }
    }
}

/// What the file of a request must contain.
pub(crate) struct StatesPlan<'a> {
    pub(crate) ids: &'a [u32],
    pub(crate) num_layers: usize,
    pub(crate) width: usize,
}

/// The reason why a file gives no states.
pub(crate) struct Untaken {
    pub(crate) what: String,
    pub(crate) hint: &'static str,
}

impl Untaken {
    /// Describes a file that is not there, or cannot be read or deleted here.
    pub(crate) fn unreadable(what: String) -> Self {
        Self { what, hint: NOT_SHARED }
    }

    /// Describes a file that contains something else than was asked for.
    fn foreign(what: String) -> Self {
        Self { what, hint: NO_STATES }
    }

    /// Names the file.
    pub(crate) fn of(path: &Path) -> impl Fn(Self) -> Self {
        |Self { what, hint }| {
            let what = format!("with the states in `{}`: {what}", path.display());
            Self { what, hint }
        }
    }
}

#[derive(Deserialize)]
struct TensorPlace {
    dtype: Value,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl StatesPlan<'_> {
    /// Reads the file at `path` when the server has finished it, and deletes it with its lock. Waits
    /// at most `timeout`. Returns the states by layer, their format and the length of the file.
    ///
    /// # Errors
    /// If the file is not as planned, with a description. It is then left in place.
    pub(crate) fn take(
        &self,
        path: &Path,
        timeout: Duration,
    ) -> Result<(Vec<Vec<f32>>, StatesDtype, u64), Untaken> {
        let (mut file, lock) = open_whole(path, timeout)?;
        let metadata = file.metadata();
        let num_bytes = metadata.map_err(|error| Untaken::unreadable(error.to_string()))?.len();
        let (layers, dtype) = self.read(&mut file, num_bytes).map_err(Untaken::foreign)?;
        drop((file, lock));
        delete(path)?;
        Ok((layers, dtype, num_bytes))
    }

    /// Reads an open file of `num_bytes`.
    fn read(
        &self,
        file: &mut File,
        num_bytes: u64,
    ) -> Result<(Vec<Vec<f32>>, StatesDtype), String> {
        let (num_tokens, num_values) =
            (self.ids.len(), self.ids.len() * self.num_layers * self.width);
        let most = 8 + MOST_HEADER + num_values as u64 * 4 + ID_BYTES * num_tokens as u64;
        if num_bytes > most {
            return Err(format!(
                "it has {}, and {num_tokens} tokens of {} states take at most {}",
                in_bytes(num_bytes),
                self.num_layers,
                in_bytes(most)
            ));
        }
        let mut read = |num: u64| {
            let mut bytes = Vec::new();
            file.by_ref().take(num).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
            if bytes.len() as u64 == num { Ok(bytes) } else { Err("it is cut short".to_owned()) }
        };
        let header_len = u64::from_le_bytes(read(8)?.try_into().expect("eight were read"));
        if header_len > MOST_HEADER {
            return Err(format!("its header has {header_len} bytes"));
        }
        let header = read(header_len)?;
        let mut header: BTreeMap<String, Value> = serde_json::from_slice(&header)
            .map_err(|error| format!("its header is not safetensors': {error}"))?;
        header.remove("__metadata__");
        let mut place = |name: &str| -> Result<TensorPlace, String> {
            let place = header.remove(name).ok_or_else(|| format!("it has no tensor `{name}`"))?;
            serde_json::from_value(place).map_err(|error| format!("`{name}` is malformed: {error}"))
        };
        let (states, ids) = (place(STATES)?, place(IDS)?);
        if let Some(name) = header.keys().next() {
            return Err(format!("it has the further tensor `{}`", name.escape_debug()));
        }
        let dtype: StatesDtype = serde_json::from_value(states.dtype.clone()).map_err(|_| {
            format!("`{STATES}` has the type {}, expected BF16, F16 or F32", states.dtype)
        })?;
        let expected = [num_tokens, self.num_layers, self.width].map(|size| size as u64);
        if states.shape != expected {
            return Err(format!(
                "`{STATES}` has the shape {:?}, expected {expected:?}",
                states.shape
            ));
        }
        if ids.dtype != "I64" || ids.shape != expected[..1] {
            return Err(format!(
                "`{IDS}` is {} of {:?}, expected I64 of {:?}",
                ids.dtype,
                ids.shape,
                &expected[..1]
            ));
        }
        let lens = [num_values as u64 * dtype.num_bytes() as u64, ID_BYTES * num_tokens as u64];
        let ends = |first: u64, second: u64| [[0, first], [first, first + second]];
        let is_states_first = states.data_offsets[0] == 0;
        let [first, second] = if is_states_first { [&states, &ids] } else { [&ids, &states] };
        let [first_len, second_len] = if is_states_first { lens } else { [lens[1], lens[0]] };
        if [first.data_offsets, second.data_offsets] != ends(first_len, second_len) {
            return Err("its tensors do not lie one after the other".to_owned());
        }
        if num_bytes != 8 + header_len + lens[0] + lens[1] {
            return Err(format!(
                "it has {num_bytes} bytes, and its header describes {}",
                8 + header_len + lens[0] + lens[1]
            ));
        }
        let [first, second] = [read(first_len)?, read(second_len)?];
        let (states, ids) = if is_states_first { (first, second) } else { (second, first) };
        let found = ids.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id));
        if let Some(at) = found.zip(self.ids).position(|(found, sent)| found != i64::from(*sent)) {
            return Err(format!("its token {at} is not the one that was sent"));
        }
        Ok((self.by_layer(&dtype.decode(&states)), dtype))
    }

    /// Sorts `[tokens, layers, width]` by layer.
    fn by_layer(&self, states: &[f32]) -> Vec<Vec<f32>> {
        let layers = 0..self.num_layers;
        let of_layer = |layer: usize| {
            let tokens = states.chunks_exact(self.num_layers * self.width);
            tokens
                .flat_map(|all| all.chunks_exact(self.width).nth(layer))
                .flatten()
                .copied()
                .collect()
        };
        layers.map(of_layer).collect()
    }
}

/// Deletes the file of hidden states that a server wrote beside a response. It writes one for every
/// request, and leaves the deleting to its clients. `place` has the server's number and its name for the file.
///
/// # Errors
/// If the file is not in the server's directory, or cannot be deleted.
pub(crate) fn discard(
    states: &StatesRecipe,
    place: (usize, &str),
    timeout: Duration,
) -> Result<(), Untaken> {
    let path = &states.local_path(place).map_err(Untaken::unreadable)?;
    open_whole(path, timeout).and_then(|_| delete(path)).map_err(Untaken::of(path))
}

/// Lists the files of a directory that belong to requests whose names begin with `name`.
pub(crate) fn files_of(dir: &Path, name: &str) -> Vec<PathBuf> {
    let begin = format!("cmpl-{name}-");
    let found = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let own = found.filter_map(|path| {
        let name = path.file_name()?.to_str()?;
        let own = name.strip_suffix(".lock").unwrap_or(name);
        own.starts_with(&begin).then(|| path.with_file_name(own))
    });
    own.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Deletes a file with its lock. Returns false if the server holds it, or it cannot be deleted.
pub(crate) fn is_deleted(path: &Path) -> bool {
    wait_for_lock(&lock_path(path), Duration::ZERO).is_ok() && delete(path).is_ok()
}

fn lock_path(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.lock", path.display()))
}

/// Opens a file when the server has finished it. Returns it with its lock.
fn open_whole(path: &Path, timeout: Duration) -> Result<(File, Option<File>), Untaken> {
    let lock = wait_for_lock(&lock_path(path), timeout).map_err(Untaken::unreadable)?;
    let file = open_plain(path).map_err(Untaken::unreadable)?;
    let no_file = "the server released the lock and wrote no file; its log says why";
    Ok((file.ok_or_else(|| Untaken::unreadable(no_file.to_owned()))?, lock))
}

/// Deletes a file and its lock.
fn delete(path: &Path) -> Result<(), Untaken> {
    for path in [path, &lock_path(path)] {
        if_present(fs::remove_file(path)).map_err(|error| {
            Untaken::unreadable(format!("`{}` cannot be deleted: {error}", path.display()))
        })?;
    }
    Ok(())
}

/// Waits until the server releases the lock of its file, and returns a shared lock. Returns `None`
/// without a lock.
fn wait_for_lock(path: &Path, timeout: Duration) -> Result<Option<File>, String> {
    let begun = Instant::now();
    let Some(lock) = open_plain(path)? else { return Ok(None) };
    loop {
        match lock.try_lock_shared() {
            Ok(()) => return Ok(Some(lock)),
            Err(TryLockError::WouldBlock) if begun.elapsed() < timeout => std::thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(format!("`{}` stayed locked for {timeout:?}", path.display()));
            }
            Err(TryLockError::Error(error)) => {
                return Err(format!("`{}` cannot be locked: {error}", path.display()));
            }
        }
    }
}

/// Opens a regular file that is not a link; `None` if there is none.
fn open_plain(path: &Path) -> Result<Option<File>, String> {
    let cannot = |error: std::io::Error| format!("`{}` cannot be read: {error}", path.display());
    let Some(named) = if_present(fs::symlink_metadata(path)).map_err(cannot)? else {
        return Ok(None);
    };
    if !named.is_file() {
        return Err(format!("`{}` is not a regular file", path.display()));
    }
    let file = File::open(path).map_err(cannot)?;
    // What was opened may have replaced what was looked at.
    let is_same = is_same_file(&named, &file.metadata().map_err(cannot)?);
    if is_same { Ok(Some(file)) } else { Err(format!("`{}` was replaced", path.display())) }
}

#[cfg(unix)]
fn is_same_file(named: &fs::Metadata, open: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (named.dev(), named.ino()) == (open.dev(), open.ino())
}

#[cfg(not(unix))]
fn is_same_file(_named: &fs::Metadata, _open: &fs::Metadata) -> bool {
    true
}

//! The outputs of earlier stages: built data, heads, adapters and file hashes. Each is read once
//! and cached, until the stage that rewrites it calls [`Artifacts::forget`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail};
use draftsmith_data::{DataError, DataSet, Incomplete, PromptFile, hash_file, read_dir};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, DrafterDir, WeightDtype,
    hash_export,
};

use super::models::Models;
use crate::prompt_files::files_of;
use crate::watch::Watch;

/// A cache of built data, heads, adapters and file hashes.
#[derive(Default)]
pub struct Artifacts {
    /// Whether missing data shards are an error.
    pub incomplete_data: Incomplete,
    file_hashes: Cache<String>,
    data: Cache<Arc<DataSet>>,
    heads: Cache<(AcceptanceHeadConfig, AcceptanceHead)>,
    adapters: Cache<(AdapterConfig, Adapter)>,
    pub(crate) watch: Box<dyn Watch>,
}

/// Cached values by the path of their file or directory.
type Cache<T> = Mutex<BTreeMap<PathBuf, T>>;

impl Artifacts {
    /// Reads the rows of the built data in a directory. Missing shards are an error unless
    /// [`Artifacts::incomplete_data`] allows them.
    ///
    /// # Errors
    /// If there are no shards, or a shard is missing, broken or misnamed.
    pub fn data(&self, dir: &Path) -> Result<Arc<DataSet>> {
        get_or_insert(&self.data, dir, || {
            self.watch.reads(&format!("rows in {}", dir.display()));
            match read_dir(dir, self.incomplete_data) {
                Err(error @ DataError::MissingShards(_)) => bail!(
                    "{error}; hint: run `draftsmith build-data` with this recipe to its end, or give \
                     `--incomplete-data` to use the shards built so far"
                ),
                read => Ok(Arc::new(read?)),
            }
        })
    }

    /// Returns the names and hashes of the prompt files that paths and patterns match.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn prompt_files(&self, paths: &[PathBuf]) -> Result<Vec<PromptFile>> {
        let file = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(PromptFile { name, hash: self.file_hash(path)? })
        };
        files_of(paths)?.iter().map(file).collect()
    }

    pub(super) fn file_hash(&self, path: &Path) -> Result<String> {
        get_or_insert(&self.file_hashes, path, || {
            self.watch.reads(&format!("hash of {}", path.display()));
            Ok(hash_file(path)?)
        })
    }

    /// Reads the acceptance head in a directory, for a drafter with this hidden size.
    ///
    /// # Errors
    /// If the head is missing, broken, or for another hidden size.
    pub fn head(
        &self,
        models: &Models,
        dir: &Path,
        hidden_size: usize,
    ) -> Result<(AcceptanceHeadConfig, AcceptanceHead)> {
        get_or_insert(&self.heads, dir, || {
            self.watch.reads(&format!("head {}", dir.display()));
            Ok(AcceptanceHead::from_dir(dir, hidden_size, models.device())?)
        })
    }

    /// Reads the adapter in a directory for computing in `dtype`. Caches it only in the models'
    /// dtype.
    ///
    /// # Errors
    /// If the adapter is missing, broken, or for a target of another shape.
    pub fn adapter_in(
        &self,
        models: &Models,
        dir: &DrafterDir,
        dtype: WeightDtype,
    ) -> Result<(AdapterConfig, Adapter)> {
        let read = || {
            self.watch.reads(&format!("adapter {}, {dtype:?}", dir.display()));
            Ok(Adapter::from_dir(dir, models.target_shape()?, dtype, models.device())?)
        };
        if dtype == models.dtype { get_or_insert(&self.adapters, dir, read) } else { read() }
    }

    /// Hashes the weights of a head or an adapter together with its `shape`. The rest of its
    /// `config.json`, such as a tuned rule, is not hashed because it does not affect rollouts.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn export_hash(&self, dir: &Path, shape: &str) -> Result<String> {
        hash_export(dir, shape, |path| self.file_hash(path))
    }

    /// Hashes an adapter's weights and exit layer. Acceptance heads identify adapters by this hash.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn adapter_hash(&self, dir: &Path, config: &AdapterConfig) -> Result<String> {
        self.export_hash(dir, &config.exit_layer().to_string())
    }

    /// Removes everything from the cache that was read from `dir`, before `dir` is rewritten.
    pub fn forget(&self, dir: &Path) {
        forget_within(&self.file_hashes, dir);
        forget_within(&self.data, dir);
        forget_within(&self.heads, dir);
        forget_within(&self.adapters, dir);
    }
}

const HELD: &str = "nobody panics while holding it";

/// Returns the cached value for a path. If there is none, calls `read` and caches the result.
fn get_or_insert<T: Clone>(
    cache: &Cache<T>,
    path: &Path,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(found) = cache.lock().expect(HELD).get(path) {
        return Ok(found.clone());
    }
    let read = read()?;
    cache.lock().expect(HELD).insert(path.to_path_buf(), read.clone());
    Ok(read)
}

fn forget_within<T>(cache: &Cache<T>, dir: &Path) {
    cache.lock().expect(HELD).retain(|path, _| !path.starts_with(dir));
}

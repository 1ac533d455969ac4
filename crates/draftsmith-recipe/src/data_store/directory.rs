//! A directory as a store, for instance one that machines share.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_files::{write_new, write_whole};

use super::{Objects, Put};

/// Stores each object as a file in this directory, which need not exist yet.
pub(super) struct Directory(pub(super) PathBuf);

impl Objects for Directory {
    fn list(&self) -> Result<BTreeMap<String, u64>> {
        let cannot = || format!("cannot read `{}`", self.0.display());
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries.with_context(cannot)?,
        };
        let mut objects = BTreeMap::new();
        for entry in entries {
            let entry = entry.with_context(cannot)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // Skip temporary files and files removed meanwhile.
            if let Ok(metadata) = entry.metadata()
                && metadata.is_file()
                && !name.ends_with(".tmp")
            {
                objects.insert(name, metadata.len());
            }
        }
        Ok(objects)
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.0.join(name);
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read.map(Some).with_context(|| format!("cannot read `{}`", path.display())),
        }
    }

    fn put(&self, name: &str, bytes: &[u8], put: Put) -> Result<bool> {
        let path = self.0.join(name);
        match put {
            Put::New => Ok(write_new(&path, bytes)?),
            Put::Over => {
                write_whole(&path, bytes)?;
                Ok(true)
            }
        }
    }

    fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.0.join(name));
    }
}

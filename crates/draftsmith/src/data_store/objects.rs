//! What is asked of a store.

use std::collections::BTreeMap;

use anyhow::Result;

/// Where an object may be put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// Where there is none.
    New,
    /// Over whatever is there.
    Over,
}

/// Objects under names, whole or absent.
pub(super) trait Objects: Send + Sync {
    /// The names and sizes of what is there.
    ///
    /// # Errors
    /// If it cannot be read.
    fn list(&self) -> Result<BTreeMap<String, u64>>;

    /// What an object holds; nothing if there is none.
    ///
    /// # Errors
    /// If it cannot be read.
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Puts an object; false where there is one, and it was to be new. Of several that put a new one at
    /// once, one does.
    ///
    /// # Errors
    /// If it cannot be written.
    fn put(&self, name: &str, bytes: &[u8], put: Put) -> Result<bool>;

    /// Removes an object, if there is one.
    ///
    /// # Errors
    /// If it cannot be removed.
    fn remove(&self, name: &str) -> Result<()>;
}

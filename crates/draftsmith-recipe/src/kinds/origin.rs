//! The origin of a head or drafter: trained by this recipe, or read from a directory.

use std::path::{Path, PathBuf};

use draftsmith_files::{Notation, plain_problem};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The origin of an export: the keys of its training, or its directory in the only key `path`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "toml::Table", into = "toml::Table")]
#[serde(bound = "T: Serialize + DeserializeOwned + Clone")]
pub enum Origin<T> {
    /// The settings of a training that this recipe runs.
    Training(Box<T>),
    /// The directory of a trained export.
    Path(PathBuf),
}

impl<T> Origin<T> {
    /// Returns the training settings; `None` if the export is read from a directory.
    pub fn training(&self) -> Option<&T> {
        match self {
            Self::Training(training) => Some(training),
            Self::Path(_) => None,
        }
    }

    /// Returns the export's directory; `None` if this recipe trains the export.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Training(_) => None,
            Self::Path(path) => Some(path),
        }
    }
}

impl<T: DeserializeOwned> TryFrom<toml::Table> for Origin<T> {
    type Error = String;

    fn try_from(mut table: toml::Table) -> Result<Self, String> {
        match table.remove("path") {
            None => read_keys(table).map(|training| Self::Training(Box::new(training))),
            Some(toml::Value::String(path)) if table.is_empty() => Ok(Self::Path(path.into())),
            Some(toml::Value::String(_)) => {
                Err("`path` names a trained export, which has no other keys here".to_owned())
            }
            Some(_) => Err("`path` is not a string".to_owned()),
        }
    }
}

impl<T: Serialize + Clone> From<Origin<T>> for toml::Table {
    fn from(origin: Origin<T>) -> Self {
        match origin {
            Origin::Training(training) => Self::try_from(training).expect("settings are TOML"),
            Origin::Path(path) => {
                Self::from_iter([("path".to_owned(), path.display().to_string().into())])
            }
        }
    }
}

/// Parses a part of a recipe. Error messages name the key.
pub(crate) fn read_keys<T: DeserializeOwned>(keys: impl Into<toml::Value>) -> Result<T, String> {
    serde_path_to_error::deserialize(keys.into()).map_err(|error| {
        let (path, message) = (error.path().to_string(), error.inner().message());
        let problem = plain_problem(message, Notation::Toml);
        match (path.as_str(), problem == message) {
            (".", _) => problem,
            (key, true) => format!("`{key}`: {problem}"),
            (key, false) => format!("`{key}` {problem}"),
        }
    })
}

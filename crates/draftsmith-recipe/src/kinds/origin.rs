//! The origin of a head or drafter: trained by this recipe, or read from a directory.

use draftsmith_files::parse_toml;
use draftsmith_model::DrafterDir;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The origin of an export: the keys of its training, or its directory in the key `path`, beside which
/// only `ignored_keys` is possible.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "toml::Table", into = "toml::Table")]
#[serde(bound = "T: Serialize + DeserializeOwned + Clone")]
pub enum Origin<T> {
    /// The settings of a training that this recipe runs.
    Training(Box<T>),
    /// The directory of a trained export.
    Path(DrafterDir),
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
    pub fn path(&self) -> Option<&DrafterDir> {
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
            None => parse_toml(table).map(|training| Self::Training(Box::new(training))),
            Some(toml::Value::String(path)) if table.keys().all(|key| key == IGNORED_KEYS) => {
                let ignored = table.remove(IGNORED_KEYS).map(parse_toml).transpose();
                let ignored = ignored.map_err(|problem| format!("`{IGNORED_KEYS}` {problem}"))?;
                Ok(Self::Path(DrafterDir {
                    path: path.into(),
                    ignored_keys: ignored.unwrap_or_default(),
                }))
            }
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
            Origin::Path(dir) => given_dir("path", dir),
        }
    }
}

/// The key for the keys of a drafter's `config.json` that are ignored.
const IGNORED_KEYS: &str = "ignored_keys";

/// Writes a directory under the key `key`, with the keys that are ignored in it.
pub(super) fn given_dir(key: &str, dir: DrafterDir) -> toml::Table {
    let path = (key.to_owned(), dir.path.display().to_string().into());
    let ignored =
        (!dir.ignored_keys.is_empty()).then(|| (IGNORED_KEYS.to_owned(), dir.ignored_keys.into()));
    [path].into_iter().chain(ignored).collect()
}

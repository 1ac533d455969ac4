//! S3, Google Cloud Storage and Azure. Credentials and endpoints come from environment variables
//! (`AWS_…`, `GOOGLE_…`, `AZURE_…`) and are never written to a file.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use futures::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, PutMode, parse_url_opts};
use tokio::runtime::{Builder, Runtime};
use url::Url;

use super::{Objects, Put};

/// Prefixes of the environment variables that configure stores.
const VARIABLES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];
const SCHEMES: [&str; 5] = ["s3", "s3a", "gs", "az", "abfss"];

/// The objects of a bucket under a prefix.
pub(super) struct Cloud {
    url: String,
    store: Box<dyn ObjectStore>,
    prefix: Key,
    runtime: Runtime,
}

impl Cloud {
    /// Opens the store at a URL, without a request yet.
    ///
    /// # Errors
    /// If the URL or the environment's settings are invalid.
    pub(super) fn open(url: &str) -> Result<Self> {
        let parsed = Url::parse(url)?;
        if !SCHEMES.contains(&parsed.scheme()) {
            anyhow::bail!("unknown kind of store `{}`", parsed.scheme());
        }
        let is_setting = |key: &String| {
            VARIABLES.iter().any(|prefix| key.to_ascii_uppercase().starts_with(prefix))
        };
        let settings = std::env::vars().filter(|(key, _)| is_setting(key));
        let settings = settings.map(|(key, value)| (key.to_ascii_lowercase(), value));
        let (store, prefix) = parse_url_opts(&parsed, settings)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { url: url.to_owned(), store, prefix, runtime })
    }

    fn key(&self, name: &str) -> Key {
        self.prefix.child(name)
    }
}

impl Objects for Cloud {
    fn list(&self) -> Result<BTreeMap<String, u64>> {
        let listed = self.runtime.block_on(self.store.list(Some(&self.prefix)).try_collect());
        let listed: Vec<ObjectMeta> =
            listed.with_context(|| format!("cannot list `{}`", self.url))?;
        let named = listed.into_iter().filter_map(|object| {
            let name = object.location.filename()?.to_owned();
            (self.key(&name) == object.location).then_some((name, object.size))
        });
        Ok(named.collect())
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(name);
        match self.runtime.block_on(async { self.store.get(&key).await?.bytes().await }) {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read `{}/{name}`", self.url)),
        }
    }

    fn put(&self, name: &str, bytes: &[u8], put: Put) -> Result<bool> {
        let mode = match put {
            Put::New => PutMode::Create,
            Put::Over => PutMode::Overwrite,
        };
        let payload = bytes.to_vec().into();
        match self.runtime.block_on(self.store.put_opts(&self.key(name), payload, mode.into())) {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot write `{}/{name}`", self.url)),
        }
    }

    fn remove(&self, name: &str) {
        let _ = self.runtime.block_on(self.store.delete(&self.key(name)));
    }
}

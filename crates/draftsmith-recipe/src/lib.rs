//! Reads recipes and loads what they name: models, drafters, exports, prompts and data.
//!
//! ```no_run
//! use draftsmith_recipe::{Overrides, Recipe};
//!
//! let recipe = Recipe::read("recipes/tiny.toml".as_ref(), &Overrides::default())?;
//! println!("{} has {} drafters", recipe.name, recipe.drafters.iter().count());
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! This crate measures nothing and prints nothing. It reports progress through a [`watch::Watch`].

pub mod built_data;
pub mod device;
pub mod exports;
pub mod hub;
pub mod kinds;
pub mod out_dir;
pub mod pair;
pub mod prompt_files;
pub mod prompts;
mod recipe;
pub mod text_side;
pub mod watch;
pub mod workspace;

pub use self::recipe::*;

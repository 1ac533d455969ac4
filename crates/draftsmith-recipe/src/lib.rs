//! Recipes, and what they name: models, drafters by kind, exports, prompts and data, loaded.
//!
//! ```no_run
//! use draftsmith_recipe::{Overrides, Recipe};
//!
//! let recipe = Recipe::read("recipes/tiny.toml".as_ref(), &Overrides::default())?;
//! println!("{} has {} drafters", recipe.name, recipe.drafters.iter().count());
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! This crate measures nothing and prints nothing; a [`watch::Watch`] shows what happens.

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

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

pub mod answer_files;
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
mod tool_calls;
pub mod watch;
pub mod workspace;

pub use built_data::changes_text;
pub use device::{DeviceChoice, DtypeSource, KernelWatch, NumKernels, on_pool, require_dtype};
pub use exports::servers::{
    AS_DRAFT_MODEL, AS_EAGLE3, Runtime, ServedDrafter, ServerFlags, quoted, served_path,
};
pub use exports::tuned::{Tuned, TunedRule};
pub use exports::{ExportEntry, HeadExport, found_adapter_head, head_within};
pub use kinds::loaded::{LoadedDrafter, LoadedDrafters, Loading, check_known};
pub use kinds::origin::Origin;
pub use kinds::{
    DrafterKind, DrafterRecipe, DrafterRecipes, KindEntry, Kinds, NOTHING_DRAFTS, Role, names_text,
};
pub use out_dir::OutDir;
pub use pair::{LabelModels, Pair};
pub use prompt_files::Reading;
pub use prompts::for_data::{choose_prompts, num_known, prompts_in_data};
pub use prompts::{Dataset, PromptChoice, read_sources, spread};
pub use recipe::*;
pub use text_side::{Ends, TextSide};
pub use watch::{Bar, Interrupted, Silent, Watch};
pub use workspace::Workspace;

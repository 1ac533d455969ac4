//! Exports an EAGLE-3 drafter in the subset of the format that vLLM, SGLang and llama.cpp share.

use anyhow::Result;
use draftsmith_model::{Eagle3, Eagle3Config};

use super::{Exporting, Written};
use crate::exports::servers::AS_EAGLE3;
use crate::out_dir::OutDir;

/// Writes the drafter in the source directory without its training record. Reading the drafter
/// first checks that it is complete.
pub(crate) fn export(export: &Exporting<'_>) -> Result<Written> {
    let (Exporting { source, out, .. }, workspace) = (export, (export.open)()?);
    let models = &workspace.models;
    let (config, drafter) =
        Eagle3::from_dir(source, models.target_shape()?, models.dtype, models.device())?;
    let config = Eagle3Config { target_hash: None, training: serde_json::Map::default(), ..config };
    let dir = OutDir::begin(out)?;
    drafter.write_dir(dir.path(), &config)?;
    dir.finish()?;
    let num_steps = 3;
    let (vllm, sglang) = (AS_EAGLE3.vllm_method, AS_EAGLE3.sglang_algorithm);
    let llama_cpp = AS_EAGLE3.llama_cpp_type;
    let (target, out) = (models.target_dir().display(), out.display());
    let mut ignored = Vec::new();
    if config.norm_before_residual {
        ignored.push(
            "`norm_before_residual`, in SGLang: its drafts are accepted less there".to_owned(),
        );
    }
    Ok(Written {
        what: format!(
            "an EAGLE-3 drafter with {} parameters that drafts {} tokens",
            config.num_parameters(),
            config.num_draft_tokens()
        ),
        ignored,
        commands: vec![
            format!(
                "vLLM: vllm serve {target} --speculative-config '{{\"method\": \"{vllm}\", \"model\": \"{out}\", \
                 \"num_speculative_tokens\": {num_steps}}}'"
            ),
            format!(
                "llama.cpp: convert_hf_to_gguf.py {out} --target-model-dir {target} --outfile draft.gguf, then \
                 llama-server -m target.gguf -md draft.gguf --spec-type {llama_cpp} --spec-draft-n-max {num_steps}"
            ),
            format!(
                "SGLang: --speculative-algorithm {sglang} --speculative-draft-model-path {out} \
                 --speculative-num-steps {num_steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
                num_steps + 1
            ),
        ],
    })
}

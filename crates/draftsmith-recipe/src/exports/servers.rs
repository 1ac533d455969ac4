//! The settings that make inference servers draft with a drafter.
//!
//! Names are taken from vLLM 0.33 (`SpeculativeConfig`), SGLang 0.5.23 (`server_args`) and
//! llama.cpp b11434 (`common/arg.cpp`).

/// One drafter method's names and peculiarities in each server.
#[derive(Debug)]
pub struct ServerFlags {
    /// The value of `method` in vLLM's speculative config.
    pub vllm_method: &'static str,
    /// A caveat about vLLM's table of candidate numbers by batch size; `None` if there is none.
    pub vllm_note: Option<&'static str>,
    /// The value of SGLang's `--speculative-algorithm`.
    pub sglang_algorithm: &'static str,
    /// Whether SGLang accepts a table that sets the number of candidates by batch size.
    pub sglang_adapts: bool,
    /// The value of llama.cpp's `--spec-type`.
    pub llama_cpp_type: &'static str,
    /// A flag that llama.cpp needs for several requests at once, with the reason; `None` if none.
    pub llama_cpp_several: Option<(&'static str, &'static str)>,
}

/// The settings for a separate draft model. Adapters can be exported as one too.
pub static AS_DRAFT_MODEL: ServerFlags = ServerFlags {
    vllm_method: "draft_model",
    vllm_note: Some(
        "vLLM's second runner drafts the greatest number with a draft model and cuts the rest, so smaller \
         numbers save less than these figures.",
    ),
    sglang_algorithm: "STANDALONE",
    sglang_adapts: false,
    llama_cpp_type: "draft-simple",
    llama_cpp_several: None,
};

/// The settings for an EAGLE-3 drafter.
pub static AS_EAGLE3: ServerFlags = ServerFlags {
    vllm_method: "eagle3",
    vllm_note: None,
    sglang_algorithm: "EAGLE3",
    sglang_adapts: true,
    llama_cpp_type: "draft-eagle3",
    llama_cpp_several: Some((
        " --no-spec-draft-backend-sampling",
        "By default the drafter samples in the backend. llama.cpp b11434 then mixes the candidates of \
         several requests up: 1.24 tokens per round instead of 1.74 with four.",
    )),
};

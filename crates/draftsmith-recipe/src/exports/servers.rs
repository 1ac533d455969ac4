//! How servers are told to draft with a drafter.
//!
//! Names are from vLLM 0.33 (`SpeculativeConfig`), SGLang 0.5.23 (`server_args`) and llama.cpp b11434
//! (`common/arg.cpp`).

/// The names by which servers know a class of drafters, and what differs between the classes there.
#[derive(Debug)]
pub struct ServerFlags {
    /// vLLM's `method`.
    pub vllm_method: &'static str,
    /// A note on vLLM's table of numbers of candidates; `None` if it works as it reads.
    pub vllm_note: Option<&'static str>,
    /// SGLang's `--speculative-algorithm`.
    pub sglang_algorithm: &'static str,
    /// Whether SGLang takes a table of numbers of candidates by batch size.
    pub sglang_adapts: bool,
    /// llama.cpp's `--spec-type`.
    pub llama_cpp_type: &'static str,
    /// A flag that llama.cpp needs for several requests, and the reason; `None` if it needs none.
    pub llama_cpp_several: Option<(&'static str, &'static str)>,
}

/// A model of its own, as which adapters are exported too.
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

/// An EAGLE-3 drafter.
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

//! Both layouts of `config.json` read alike, written files read back, and errors name the key.

use super::*;
use crate::spec::Activation;

const SIZES: &str = r#""vocab_size":64,"hidden_size":32,
    "intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4"#;

fn read_json_object(text: &str) -> Result<ModelConfig> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("config.json"), text).expect("written");
    ModelConfig::from_model_dir(dir.path())
}

fn read(extra: &str) -> Result<ModelConfig> {
    read_json_object(&format!(r#"{{"model_type":"llama",{SIZES}{extra}}}"#))
}

#[test]
fn both_layouts_of_rope_read_alike() {
    let four = read(r#","rope_theta":500000.0,"torch_dtype":"float16""#).expect("reads");
    let five = read(
        r#","rope_parameters":{"rope_theta":500000.0,"rope_type":"default"},"dtype":"float16""#,
    )
    .expect("reads");
    assert_eq!(four, five);
    assert_eq!(four.spec.rope.theta, 500_000.0);
    assert_eq!(four.shape.head_dim, 8);
    assert_eq!(four.shape.num_kv_heads, 4);
}

#[test]
fn a_written_config_reads_back() {
    for extra in [
        r#","rope_parameters":{"rope_theta":1e4,"rope_type":"llama3","factor":8.0,
            "low_freq_factor":1.0,"high_freq_factor":4.0,
            "original_max_position_embeddings":8192},"eos_token_id":[2,3]"#,
        r#","rope_scaling":{"type":"linear","factor":2.0},"eos_token_id":2,"bos_token_id":1"#,
        r#","attention_bias":true,"tie_word_embeddings":true,"rms_norm_eps":0.001"#,
        r#","mlp_bias":true"#,
        "",
    ] {
        let config = read(extra).expect("reads");
        let written = read_json_object(&config.to_json("float32").to_string());
        assert_eq!(written.expect("reads back"), config);
    }
}

#[test]
fn an_error_of_a_bad_value_names_file_and_key() {
    for (extra, key) in [
        (r#","num_key_value_heads":3"#, "num_key_value_heads"),
        (r#","num_key_value_heads":0"#, "num_key_value_heads"),
        (r#","head_dim":7"#, "head_dim"),
        (r#","hidden_act":"relu""#, "hidden_act"),
        (r#","rope_scaling":{"type":"mrope","factor":2.0}"#, "rope_type"),
        (r#","rope_scaling":{"type":"dynamic"}"#, "factor"),
        (r#","rope_scaling":{"type":"yarn","factor":-1.0}"#, "factor"),
        (r#","rope_scaling":{"type":"longrope","short_factor":[1.0]}"#, "short_factor"),
        (r#","partial_rotary_factor":0.2"#, "partial_rotary_factor"),
        (r#","quantization_config":{"quant_method":"awq"}"#, "quantization_config"),
        (r#","use_bidirectional_attention":true"#, "use_bidirectional_attention"),
        (r#","rms_norm_eps":0.0"#, "rms_norm_eps"),
        (r#","num_hidden_layers":100000"#, "num_hidden_layers"),
        (r#","rope_scaling":{"type":"linear"}"#, "factor"),
        (r#","max_position_embeddings":99999999999999"#, "max_position_embeddings"),
    ] {
        let message = read(extra).expect_err("refused").to_string();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    let message = read(r#","vocab_size":"#).expect_err("refused").to_string();
    assert!(message.contains("config.json"), "{message}");
}

#[test]
fn an_unknown_model_type_causes_an_error_that_lists_the_supported_ones() {
    let of = |model_type: &str| read_json_object(&format!("{{{model_type}{SIZES}}}"));
    for known in Architecture::ALL {
        let model_type = format!(r#""model_type":"{}","#, known.model_type());
        assert_eq!(of(&model_type).expect("reads").architecture, known);
    }
    assert_eq!(of("").expect("reads").architecture, Architecture::Llama);
    // The family is checked before the other keys, which are another family's.
    let refused = read_json_object(r#"{"model_type":"gpt2","n_embd":8}"#);
    let message = refused.expect_err("refused").to_string();
    let known = "one of `llama`, `mistral`, `qwen2`, `qwen3`, `phi3`, `gemma2`, `gemma3_text`, \
                 `gpt_neox`";
    for part in ["config.json", "`model_type`", "`gpt2`", known] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn the_embedded_models_configs_are_written_byte_for_byte() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny");
    for name in ["target", "draft", "draft-small"] {
        let dir = models.join(name);
        let file = std::fs::read_to_string(dir.join("config.json")).expect("it is committed");
        let config = ModelConfig::from_model_dir(&dir).expect("reads");
        assert_eq!(format!("{:#}\n", config.to_json("bfloat16")), file, "{name}");
    }
}

/// Published configurations in the layout of transformers 4, without the keys that do not matter
/// here.
const PUBLISHED: [(&str, &str); 9] = [
    (
        "mistral",
        r#""head_dim":8,"num_key_value_heads":2,"sliding_window":4096,"rope_theta":10000.0,
        "rms_norm_eps":1e-05,"max_position_embeddings":32768"#,
    ),
    (
        "qwen2",
        r#""num_key_value_heads":2,"sliding_window":32768,"max_window_layers":21,
        "use_sliding_window":false,"rope_theta":1000000.0,"tie_word_embeddings":true"#,
    ),
    (
        "qwen2",
        r#""num_key_value_heads":2,"sliding_window":64,"max_window_layers":1,
        "use_sliding_window":true,"rope_scaling":{"type":"yarn","factor":4.0,
        "original_max_position_embeddings":32768}"#,
    ),
    (
        "qwen3",
        r#""head_dim":128,"num_key_value_heads":2,"attention_bias":false,"sliding_window":null,
        "use_sliding_window":false,"rope_theta":1000000,"rope_scaling":null"#,
    ),
    (
        "phi3",
        r#""sliding_window":262144,"max_position_embeddings":131072,"partial_rotary_factor":0.75,
        "original_max_position_embeddings":4096,
        "rope_scaling":{"type":"longrope","short_factor":[1.0,1.5,2.0],"long_factor":[1,2,9.5]}"#,
    ),
    (
        "gemma2",
        r#""head_dim":256,"num_key_value_heads":2,"hidden_act":"gelu_pytorch_tanh",
        "hidden_activation":"gelu_pytorch_tanh","attn_logit_softcapping":50.0,
        "final_logit_softcapping":30.0,"query_pre_attn_scalar":144,"sliding_window":4096"#,
    ),
    (
        "gemma3_text",
        r#""head_dim":256,"num_key_value_heads":1,"hidden_activation":"gelu_pytorch_tanh",
        "attn_logit_softcapping":null,"final_logit_softcapping":null,"query_pre_attn_scalar":256,
        "rope_local_base_freq":10000,"rope_theta":1000000,"rope_scaling":null,
        "sliding_window":512,"sliding_window_pattern":2"#,
    ),
    (
        "gpt_neox",
        r#""hidden_act":"gelu","rotary_pct":0.25,"rotary_emb_base":10000,
        "use_parallel_residual":true,"layer_norm_eps":1e-05"#,
    ),
    (
        "gpt_neox",
        r#""hidden_act":"gelu_fast","rotary_pct":1.0,"use_parallel_residual":false,
        "attention_bias":false,"layer_norm_eps":1e-05,"tie_word_embeddings":true"#,
    ),
];

fn published(nth: usize) -> ModelConfig {
    let (model_type, extra) = PUBLISHED[nth];
    let text = format!(r#"{{"model_type":"{model_type}",{SIZES},{extra}}}"#);
    read_json_object(&text).expect("reads")
}

#[test]
fn every_familys_written_config_reads_back() {
    for (nth, (model_type, _)) in PUBLISHED.into_iter().enumerate() {
        let config = published(nth);
        let written = config.to_json("bfloat16");
        let read = read_json_object(&written.to_string()).expect("reads back");
        assert_eq!(read, config, "{model_type}");
        assert_eq!(read.to_json("bfloat16"), written);
    }
}

#[test]
fn each_familys_keys_and_defaults_are_read() {
    let [mistral, qwen2, windowed, qwen3, phi3, gemma2, gemma3, pythia, serial] =
        std::array::from_fn(published);
    let window = |config: &ModelConfig| {
        let window = config.spec.window.as_ref();
        window.map(|window| (window.size, window.layers.clone()))
    };
    assert_eq!(window(&mistral), Some((4096, vec![true, true])));
    assert_eq!(window(&qwen2), None, "it is set but not used");
    assert_eq!(window(&windowed), Some((64, vec![false, true])));
    assert_eq!(window(&qwen3), None);
    assert_eq!(window(&gemma2), Some((4096, vec![true, false])));
    assert_eq!(window(&gemma3), Some((512, vec![true, false])));
    assert!(qwen2.spec.attention.qkv_bias && !qwen2.spec.attention.output_bias);
    assert_eq!((qwen3.shape.head_dim, gemma2.shape.head_dim), (128, 256));
    let RopeScaling::Yarn { factor, attention_factor, beta_fast, .. } = windowed.spec.rope.scaling
    else {
        panic!("it is scaled")
    };
    assert_eq!((factor, beta_fast), (4.0, 32.0));
    assert!((attention_factor - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-12);
    let written = windowed.to_json("float32");
    assert_eq!(written["rope_parameters"].get("attention_factor"), None, "it is the default");
    // Phi-3 reads only as far as the short factors apply.
    assert_eq!((phi3.shape.context, phi3.spec.rope.width), (4096, Some(6)));
    let RopeScaling::LongRope { attention_factor, .. } = phi3.spec.rope.scaling else {
        panic!("it is scaled")
    };
    assert!((attention_factor - (1.0 + 32.0_f64.ln() / 4096.0_f64.ln()).sqrt()).abs() < 1e-12);
    assert!(gemma2.spec.tie_word_embeddings && gemma3.spec.tie_word_embeddings);
    assert_eq!(
        (gemma2.spec.attention.soft_cap, gemma2.spec.logit_soft_cap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!((gemma3.spec.attention.soft_cap, gemma3.spec.logit_soft_cap), (None, None));
    let local = gemma3.spec.window.as_ref().and_then(|window| window.rope.as_ref());
    assert_eq!((gemma3.spec.rope.theta, local.expect("a separate rotation").theta), (1e6, 1e4));
    assert_eq!((pythia.spec.rope.width, serial.spec.rope.width), (Some(2), None));
    assert!(pythia.spec.is_parallel && !serial.spec.is_parallel);
    assert!(pythia.spec.attention.output_bias && !serial.spec.attention.output_bias);
    assert_eq!(serial.spec.mlp.activation, Activation::GeluTanh);
}

#[test]
fn an_unsupported_value_is_refused_with_its_key() {
    for (model_type, extra, key) in [
        ("gemma3_text", r#""attn_logit_softcapping":50.0"#, "attn_logit_softcapping"),
        ("gemma3_text", r#""sliding_window_pattern":0"#, "sliding_window_pattern"),
        ("gemma3_text", r#""use_bidirectional_attention":true"#, "use_bidirectional_attention"),
        ("gemma2", r#""layer_types":["full_attention"]"#, "layer_types"),
        ("gemma2", r#""layer_types":["full_attention","chunked_attention"]"#, "layer_types"),
        ("gemma2", r#""final_logit_softcapping":-1.0"#, "final_logit_softcapping"),
        ("mistral", r#""sliding_window":0"#, "sliding_window"),
        ("gpt_neox", r#""rotary_pct":0.01"#, "partial_rotary_factor"),
        ("gpt_neox", r#""layer_norm_eps":0.0"#, "layer_norm_eps"),
        ("phi3", r#""rope_scaling":{"type":"su","short_factor":[1.0]}"#, "short_factor"),
    ] {
        let text = format!(r#"{{"model_type":"{model_type}",{SIZES},{extra}}}"#);
        let message = read_json_object(&text).expect_err("refused").to_string();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
}

#[test]
fn the_older_rope_key_beside_the_newer_one_counts_or_is_refused() {
    const PLAIN: &str = r#","rope_parameters":{"rope_theta":5e5,"rope_type":"default"}"#;
    const YARN: &str = r#""rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32"#;
    let alone = read(&format!(r#","rope_theta":5e5,"rope_scaling":{{{YARN}}}"#)).expect("reads");
    assert!(matches!(alone.spec.rope.scaling, crate::spec::RopeScaling::Yarn { .. }));
    let both = read(&format!(r#"{PLAIN},"rope_scaling":{{{YARN}}}"#)).expect("reads");
    assert_eq!(both, alone, "transformers computes YaRN");
    let same =
        format!(r#","rope_parameters":{{"rope_theta":5e5,{YARN}}},"rope_scaling":{{{YARN}}}"#);
    assert_eq!(read(&same).expect("reads"), alone);
    assert_eq!(
        read(&format!(r#"{PLAIN},"rope_scaling":null"#)).expect("reads"),
        read(PLAIN).unwrap()
    );
    let other = same.replacen("\"factor\":4.0", "\"factor\":8.0", 1);
    let message = read(&other).expect_err("refused").to_string();
    assert!(message.contains("rope_scaling") && message.contains("rope_parameters"), "{message}");
    // A length that was read as an integer is written as one.
    let written = alone.to_json("float32").to_string();
    assert!(written.contains(r#""original_max_position_embeddings":32}"#), "{written}");
    assert!(written.contains(r#""factor":4.0"#), "{written}");
}

#[test]
fn layer_types_of_another_number_of_layers_are_refused() {
    for family in ["qwen2", "qwen3"] {
        for types in [r#"["sliding_attention"]"#, "[]"] {
            let text = format!(
                r#"{{"model_type":"{family}",{SIZES},"use_sliding_window":true,"sliding_window":8,
                "layer_types":{types}}}"#
            );
            let message = read_json_object(&text).expect_err("refused").to_string();
            assert!(message.contains("layer_types") && message.contains("expected 2"), "{message}");
        }
    }
}

//! Both layouts of `config.json` read alike, what is written reads back, and what cannot be read
//! says why.

use super::*;
use crate::weights::pretty;

const SIZES: &str = r#""vocab_size":64,"hidden_size":32,
    "intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4"#;

fn read_json_object(text: &str) -> Result<ModelConfig, ModelError> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("config.json"), text).expect("written");
    ModelConfig::from_model_dir(dir.path())
}

fn read(extra: &str) -> Result<ModelConfig, ModelError> {
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
fn what_is_written_reads_back() {
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
fn bad_values_name_file_and_key() {
    for (extra, key) in [
        (r#","num_key_value_heads":3"#, "num_key_value_heads"),
        (r#","num_key_value_heads":0"#, "num_key_value_heads"),
        (r#","head_dim":7"#, "head_dim"),
        (r#","hidden_act":"gelu""#, "hidden_act"),
        (r#","rope_scaling":{"type":"yarn","factor":2.0}"#, "rope_type"),
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
fn an_unknown_architecture_is_told_which_are_known() {
    let of = |model_type: &str| read_json_object(&format!("{{{model_type}{SIZES}}}"));
    for known in Architecture::ALL {
        let model_type = format!(r#""model_type":"{}","#, known.model_type());
        assert_eq!(of(&model_type).expect("reads").architecture, known);
    }
    assert_eq!(of("").expect("reads").architecture, Architecture::Llama);
    // Before its other keys are looked at: they are another family's.
    let refused = read_json_object(r#"{"model_type":"gpt_neox","n_embd":8}"#);
    let message = refused.expect_err("refused").to_string();
    for part in ["config.json", "`model_type`", "`gpt_neox`", "can be read: `llama`"] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn the_embedded_models_are_written_as_they_stand() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny");
    for name in ["target", "draft", "draft-small"] {
        let dir = models.join(name);
        let file = std::fs::read_to_string(dir.join("config.json")).expect("it is committed");
        let config = ModelConfig::from_model_dir(&dir).expect("reads");
        assert_eq!(pretty(&config.to_json("bfloat16")), file, "{name}");
    }
}

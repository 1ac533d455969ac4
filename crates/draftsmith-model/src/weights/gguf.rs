//! Finds the tensors of a model in a GGUF file, under the names and in the form that a Hugging Face
//! checkpoint has. llama.cpp's converter stores some tensors in another form, which reading undoes.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;

use super::quantised::QuantType;
use super::stored::{Place, RowSwap, StoredFormat, StoredTensor};
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, GgufTensor};
use crate::spec::{DecoderSpec, NormForm};

/// The names of types in ggml that we cannot read but files often have.
const UNREAD: [(u64, &str); 6] =
    [(10, "Q2_K"), (11, "Q3_K"), (20, "IQ4_NL"), (21, "IQ3_S"), (23, "IQ4_XS"), (39, "MXFP4")];

/// Reads the tensors of a file by name.
///
/// # Errors
/// If the file cannot be read, a tensor is outside the file or of a type that we cannot read, or the
/// file has no model of a supported family.
pub(super) fn tensors_of(path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let gguf = Gguf::read(path)?;
    let config = ModelConfig::from_gguf(&gguf)?;
    let num_bytes = path.metadata().map_err(|e| ModelError::io("read", path, e))?.len();
    let (mut tensors, mut num_left) = (BTreeMap::new(), num_bytes);
    for (own, tensor) in &gguf.tensors {
        // The configuration has the factors of the rotary embedding.
        if own.starts_with("rope_f") {
            continue;
        }
        let name = hugging_face_name(&config.spec, own);
        let mut stored = stored(&gguf, own, tensor, num_bytes)?;
        let len = stored.shape.iter().product::<usize>() / stored.format.block_len();
        let len = (len * stored.format.block_bytes()) as u64;
        num_left = num_left
            .checked_sub(len)
            .ok_or_else(|| gguf.broken(format!("tensor `{own}` overlaps others")))?;
        stored.swap = row_swap(&config, own);
        if let Some(swap) = stored.swap
            && stored.shape.first().is_none_or(|rows| !rows.is_multiple_of(swap.num_rows()))
        {
            let problem = format!("has shape {:?}, which does not match its heads", stored.shape);
            return Err(gguf.broken(format!("tensor `{own}` {problem}")));
        }
        let is_norm = own.ends_with("norm.weight");
        if is_norm && config.spec.norm.form == NormForm::RmsPlusOne {
            stored.offset = -1.0;
        }
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(gguf.broken(format!("it has two tensors for `{name}`, one is `{own}`")));
        }
    }
    Ok(tensors)
}

/// Checks a tensor's place in the file.
fn stored(gguf: &Gguf, name: &str, tensor: &GgufTensor, num_bytes: u64) -> Result<StoredTensor> {
    let fail = |problem: String| gguf.broken(format!("tensor `{name}` {problem}"));
    let format = format_of(tensor.kind).ok_or_else(|| {
        let known = UNREAD.iter().find(|(kind, _)| *kind == tensor.kind);
        let kind = known.map_or_else(|| format!("type {}", tensor.kind), |it| it.1.to_owned());
        ModelError::Dtype(format!(
            "`{}`: tensor `{name}` is stored as {kind}, expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, \
             Q4_K, Q5_K or Q6_K; hint: quantise the model again with `llama-quantize`, for example to Q4_K_M",
            gguf.path.display()
        ))
    })?;
    let shape = tensor.shape.iter().rev().map(|size| usize::try_from(*size));
    let shape: Vec<usize> = shape.collect::<Result<_, _>>().map_err(|e| fail(e.to_string()))?;
    let len = shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    let start = gguf.data_start.checked_add(tensor.offset);
    let end = len
        .and_then(|len| (len / format.block_len()).checked_mul(format.block_bytes()))
        .and_then(|len| start?.checked_add(len as u64));
    let (Some(start), true) = (start, end.is_some_and(|end| end <= num_bytes)) else {
        let shown = &tensor.shape;
        return Err(fail(format!(
            "of shape {shown:?} ends after the end of the file, which has {num_bytes} bytes"
        )));
    };
    let is_whole = shape.last().copied().unwrap_or(1).is_multiple_of(format.block_len());
    if !is_whole || (shape.len() < 2 && format.block_len() > 1) {
        let problem = format!("of shape {:?} has rows that are not whole blocks", tensor.shape);
        return Err(fail(problem));
    }
    Ok(StoredTensor { format, shape, place: Place::At(start), swap: None, offset: 0.0 })
}

/// Returns the number format of a type in ggml; `None` if we do not read it.
fn format_of(kind: u64) -> Option<StoredFormat> {
    Some(match kind {
        0 => StoredFormat::Plain(Dtype::F32),
        1 => StoredFormat::Plain(Dtype::F16),
        30 => StoredFormat::Plain(Dtype::BF16),
        _ => StoredFormat::Quantised(QuantType::of_ggml(kind)?),
    })
}

/// Returns a tensor's name in a Hugging Face checkpoint. A tensor of a layer that we do not know
/// stays one, so that the model is refused.
fn hugging_face_name(spec: &DecoderSpec, own: &str) -> String {
    let (attention, mlp, names) = (&spec.attention.names, &spec.mlp.names, &spec.names);
    let Some((stem, end)) = own.rsplit_once('.') else { return own.to_owned() };
    let mut parts = stem.splitn(3, '.');
    let (Some("blk"), Some(layer), Some(part)) = (parts.next(), parts.next(), parts.next()) else {
        let name = match stem {
            "token_embd" => names.embedding,
            "output_norm" => names.norm,
            "output" => names.lm_head,
            _ => stem,
        };
        return format!("{name}.{end}");
    };
    let are_one = attention.query == attention.key;
    let gate = mlp.gate.filter(|gate| *gate != mlp.up);
    let [query_norm, key_norm] = attention.head_norms.map_or([None; 2], |it| it.map(Some));
    let name = match part {
        "attn_norm" => Some(attention.norm),
        "attn_qkv" if are_one => Some(attention.query),
        "attn_q" if !are_one => Some(attention.query),
        "attn_k" if !are_one => Some(attention.key),
        "attn_v" if !are_one => Some(attention.value),
        "attn_q_norm" => query_norm,
        "attn_k_norm" => key_norm,
        "attn_output" => Some(attention.output),
        "post_attention_norm" => attention.post_norm,
        "ffn_norm" => Some(mlp.norm),
        "ffn_gate" => gate,
        "ffn_up" => Some(mlp.up),
        "ffn_down" => Some(mlp.down),
        "post_ffw_norm" => mlp.post_norm,
        _ => None,
    };
    format!("{}.{layer}.{}.{end}", names.layers, name.unwrap_or(part))
}

/// Returns the order of a tensor's rows if it differs from that of a Hugging Face checkpoint.
fn row_swap(config: &ModelConfig, own: &str) -> Option<RowSwap> {
    let shape = &config.shape;
    let part = own.strip_prefix("blk.")?.split('.').nth(1)?;
    match part {
        // In a Llama's file, channels that are rotated together are neighbours.
        "attn_q" | "attn_k" if config.architecture.has_gguf_pairs() => {
            Some(RowSwap { outer: 2, inner: shape.head_dim / 2, strip: 1 })
        }
        // The file has all queries, all keys, and then all values.
        "attn_qkv" if config.spec.attention.names.is_by_head => {
            Some(RowSwap { outer: shape.num_heads, inner: 3, strip: shape.head_dim })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::fixture;
    use crate::weights::StoredRows;

    #[test]
    fn every_format_is_widened_to_the_bits_of_ggml() {
        let path = fixture("quantised.gguf");
        let gguf = Gguf::read(&path).expect("reads");
        assert_eq!(gguf.tokens().expect("reads"), ["a", "b", "é"]);
        assert_eq!(gguf.own("attention.layer_norm_rms_epsilon"), Some(&serde_json::json!(1e-5)));
        let num_bytes = path.metadata().expect("a file").len();
        let file = std::fs::File::open(&path).expect("opens");
        let rows = |name: &str| {
            let stored = stored(&gguf, name, &gguf.tensors[name], num_bytes).expect("in the file");
            assert_eq!(stored.shape, [2, 256]);
            let (mut values, mut bytes) = (Vec::new(), stored.open(&file).expect("opens"));
            let each = |_, rows: StoredRows<'_>| rows.widen_into(&mut values);
            stored.read_rows(&mut bytes, &path, name, 0..2, each).expect("reads");
            (stored.format.to_string(), values)
        };
        let names = gguf.tensors.keys().filter_map(|name| name.strip_suffix(".weight"));
        let names: Vec<&str> = names.collect();
        assert_eq!(names.len(), 8);
        for name in names {
            let (format, found) = rows(&format!("{name}.weight"));
            assert_eq!(format, name);
            let (_, expected) = rows(&format!("{name}.expected"));
            let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "{name}");
        }
    }
}

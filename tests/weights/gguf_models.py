"""GGUF files of golden models, made as llama.cpp's converter makes them."""

import gguf
import golden_models
import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def permute(weight, heads):
    """llama.cpp's LlamaModel.permute: from halves side by side to pairs."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors(config):
    """Golden tensors under llama.cpp's names and in its form."""
    family = config["model_type"]
    names = LAYER | {
        "post_attention_layernorm": "post_attention_norm" if "gemma" in family else "ffn_norm"
    }
    found = {}
    for name, array in golden_models.tensors(golden_models.GOLDEN / config["name"]).items():
        if "gemma" in family and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if family == "llama" and "q_proj" in name:
            array = permute(array, config["num_attention_heads"])
        if family == "llama" and "k_proj" in name:
            array = permute(array, config["num_key_value_heads"])
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            if "experts" not in part:
                found[f"blk.{layer}.{names[part]}.{kind}"] = array
                continue
            _, _, expert, part = part.split(".")
            stacked = found.setdefault(
                f"blk.{layer}.{names['mlp.' + part]}_exps.{kind}", [None] * config["num_experts"]
            )
            stacked[int(expert)] = array
        else:
            outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            found[outer.get(name[: -len(".weight")], "output") + ".weight"] = array
    return {name: np.stack(a) if isinstance(a, list) else a for name, a in found.items()}


def rope_freqs(config):
    """The divisors that llama.cpp's LlamaModel.generate_extra_tensors makes of llama3 scaling."""
    s, divisors = config["rope_scaling"], []
    for i in range(0, config["head_dim"], 2):
        length = 2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        if length < s["original_max_position_embeddings"] / s["high_freq_factor"]:
            divisors.append(1)
        elif length > s["original_max_position_embeddings"] / s["low_freq_factor"]:
            divisors.append(s["factor"])
        else:
            smooth = s["original_max_position_embeddings"] / length - s["low_freq_factor"]
            smooth /= s["high_freq_factor"] - s["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / s["factor"] + smooth))
    return np.array(divisors, np.float32)


def write(path, name, quantised="F32", edit=lambda writer, tensors: None):
    """The GGUF file of a golden model; matrices are quantised; `edit` may change it before."""
    config = golden_models.config(name) | {"name": name}
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {i}" for i in range(320)])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "gemma" in arch:
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    found = tensors(config)
    if arch == "llama" and config["rope_scaling"]:
        found["rope_freqs.weight"] = rope_freqs(config)
    edit(writer, found)
    kind = gguf.GGMLQuantizationType[quantised]
    for tensor, array in found.items():
        if array.ndim == 1 or quantised == "F32":
            writer.add_tensor(tensor, array)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

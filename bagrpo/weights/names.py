"""One table of tensor names for all formats, and how a file's matrices become our arrays.

Our parameters are stacked over layers and keep the input axes first (`models/params.py`); files
have a tensor per layer, [out, in]. So each of our parameters is, in a file, one tensor per layer
(and per expert in Hugging Face's spelling), whose rows are our last axes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax

from bagrpo.models.family import Architecture
from bagrpo.models.params import Spec, specs

Spelling = Literal["hf", "gguf"]


@dataclasses.dataclass(frozen=True)
class Name:
    """How files call a parameter: `{i}` is the layer, `{e}` the expert."""

    hf: str
    gguf: str
    outs: int = 0
    """How many of our last axes are a file's rows; 0: the file has our axes in our order."""
    rotary: bool = False
    """Its rows are heads that are rotated; GGUF files of llama interleave their halves."""


@dataclasses.dataclass(frozen=True)
class Stacked:
    """One of our parameters, and the tensors of a file that it is made of."""

    path: str
    """In our nested dict, e.g. `blocks/q`."""
    spec: Spec
    outs: int
    layers: int
    """0 for a parameter that is not stacked over layers."""
    experts: int
    """0 for a parameter without experts."""
    tensors: tuple[tuple[str, ...], ...]
    """Names for each layer: one, or one for each expert."""
    shape: tuple[int, ...]
    """Of each of these tensors."""
    interleaved: bool
    """Whether each head's rows alternate between its two halves."""
    shifted: bool
    """Whether the file holds our numbers plus 1."""

    @property
    def vector(self) -> bool:
        """Norms and biases: few numbers, read whole by everyone."""
        return len(self.shape) == 1


def table(arch: Architecture) -> dict[str, Name]:
    """The names of each of an architecture's parameters by path."""
    names = dict(_NAMES)
    if arch.post_norms:
        names["blocks/mlp_norm"] = _layer("pre_feedforward_layernorm.weight", "ffn_norm.weight")
    if arch.experts:
        for ours, hf in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            names[f"blocks/{ours}"] = _layer(
                f"mlp.experts.{{e}}.{hf}.weight", f"ffn_{ours}_exps.weight", outs=1
            )
    return {path: names[path] for path, _ in flat(specs(arch))}


def stacks(arch: Architecture, spelling: Spelling) -> list[Stacked]:
    """All parameters and what they are made of in a file of this spelling."""
    names, gguf = table(arch), spelling == "gguf"
    return [_stacked(arch, path, spec, names[path], gguf) for path, spec in flat(specs(arch))]


def _stacked(arch: Architecture, path: str, spec: Spec, name: Name, gguf: bool) -> Stacked:
    layers = arch.layers if path.startswith("blocks/") else 0
    experts = arch.experts if "{e}" in name.hf else 0
    template = name.gguf if gguf else name.hf
    apart = "{e}" in template
    parts = range(experts) if apart else range(1)
    inner = spec.shape[bool(layers) + bool(experts) :]
    if name.outs:
        shape = math.prod(inner[-name.outs :]), math.prod(inner[: -name.outs])
    else:
        shape = inner if path == "embed" else (math.prod(inner),)
    return Stacked(
        path,
        spec,
        name.outs,
        layers,
        experts,
        tensors=tuple(tuple(template.format(i=i, e=e) for e in parts) for i in range(layers or 1)),
        shape=(experts, *shape) if experts and not apart else shape,
        interleaved=gguf and name.rotary and arch.family == "llama",
        shifted=gguf and arch.unit_norms and path.endswith("norm"),
    )


def check(
    stacked: list[Stacked], found: Mapping[str, tuple[int, ...]], tied: bool, address: str
) -> None:
    """Whether a file has exactly the tensors that are needed.

    Args:
        stacked: what is needed.
        found: names and shapes of the file's tensors.
        tied: whether the output head is the embedding; a head in the file is then ignored, since
            transformers ignores it too.
        address: of the file, for messages.

    Raises:
        ValueError: naming the first tensor that is missing, has another shape, or is too many.
    """
    needed = {name: s.shape for s in stacked for names in s.tensors for name in names}
    for name, shape in needed.items():
        if name not in found:
            raise ValueError(
                f"tensor {name!r} of shape {shape} is missing in {address}; download it again, or "
                "correct its config.json"
            )
        if found[name] != shape:
            raise ValueError(
                f"tensor {name!r} in {address} has shape {found[name]} where its configuration "
                f"needs {shape}; download it again, or correct its config.json"
            )
    ignored = _IGNORED + (r"lm_head\.weight",) * tied
    for name in sorted(set(found) - set(needed)):
        if not any(re.fullmatch(pattern, name) for pattern in ignored):
            raise ValueError(
                f"tensor {name!r} of shape {found[name]} in {address} is not part of the model "
                "that its configuration describes; remove it, or correct config.json"
            )


def flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaves of a nested dict with their paths, in the order of jax."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield "/".join(part.key for part in path), leaf


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict whose leaves have these paths."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def _layer(hf: str, gguf: str, outs: int = 0, rotary: bool = False) -> Name:
    return Name(f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", outs, rotary)


_IGNORED = (r".*rotary_emb\.inv_freq", r"rope_freqs\.weight")
"""Derived from the configuration (the second becomes part of it, see `gguf_config`)."""

_NAMES = {
    "embed": Name("model.embed_tokens.weight", "token_embd.weight"),
    "norm": Name("model.norm.weight", "output_norm.weight"),
    "head": Name("lm_head.weight", "output.weight", outs=1),
    "blocks/attn_norm": _layer("input_layernorm.weight", "attn_norm.weight"),
    "blocks/q": _layer("self_attn.q_proj.weight", "attn_q.weight", outs=2, rotary=True),
    "blocks/k": _layer("self_attn.k_proj.weight", "attn_k.weight", outs=2, rotary=True),
    "blocks/v": _layer("self_attn.v_proj.weight", "attn_v.weight", outs=2),
    "blocks/o": _layer("self_attn.o_proj.weight", "attn_output.weight", outs=1),
    "blocks/q_bias": _layer("self_attn.q_proj.bias", "attn_q.bias"),
    "blocks/k_bias": _layer("self_attn.k_proj.bias", "attn_k.bias"),
    "blocks/v_bias": _layer("self_attn.v_proj.bias", "attn_v.bias"),
    "blocks/q_norm": _layer("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "blocks/k_norm": _layer("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "blocks/mlp_norm": _layer("post_attention_layernorm.weight", "ffn_norm.weight"),
    "blocks/post_attn_norm": _layer(
        "post_attention_layernorm.weight", "post_attention_norm.weight"
    ),
    "blocks/post_mlp_norm": _layer("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    "blocks/router": _layer("mlp.gate.weight", "ffn_gate_inp.weight", outs=1),
    "blocks/gate": _layer("mlp.gate_proj.weight", "ffn_gate.weight", outs=1),
    "blocks/up": _layer("mlp.up_proj.weight", "ffn_up.weight", outs=1),
    "blocks/down": _layer("mlp.down_proj.weight", "ffn_down.weight", outs=1),
}

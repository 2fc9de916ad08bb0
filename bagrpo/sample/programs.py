"""Every program of the sampler, compiled ahead for each shape it can meet.

A program is known by its kind and its sizes, and compiled once, when `compile` asks for all of them
or else when it is first needed. What varies from call to call is an argument, never a constant.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bagrpo import sharding
from bagrpo.config import SampleConfig
from bagrpo.models import params as model_params
from bagrpo.models.decoder import Cache, Compute
from bagrpo.models.family import Architecture
from bagrpo.sample import decode, slots
from bagrpo.sample.draw import Shape
from bagrpo.sample.request import MAX_EOS
from bagrpo.sharding import ROWS

Key = tuple[Any, ...]
"""Kind of a program and its sizes, e.g. ("decode", 64, 192)."""

_SHORTEST_CACHE, _SHORTEST_PROMPT, _FEWEST_SLOTS = 256, 128, 8
"""Where the default buckets stop to halve: below, a program more saves less than it costs."""


class Programs:
    """The compiled programs of one model on one mesh."""

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        *,
        compute: Compute,
        config: SampleConfig,
        max_prompt: int,
        max_response: int,
    ):
        """Work out the shapes; nothing is compiled yet. See `engine.Engine` for the arguments."""
        self.arch, self.mesh, self.compute = arch, mesh, compute
        self.steps, self.refill = config.steps, config.refill
        self.shards = shards = sharding.row_shards(mesh)
        """Devices that rows are split over."""
        self.slots = _up_to(
            config.slot_buckets or _halves(config.slots, max(_FEWEST_SLOTS, config.slots // 4)),
            multiple=shards,
        )
        """Numbers of rows, rising."""
        longest = max_prompt + max_response - 1  # the last token is never fed
        self.positions = _covering(
            config.cache_buckets or _halves(longest, _SHORTEST_CACHE), longest, "cache_buckets"
        )
        """Cache positions of a row, rising."""
        self.prompts = _covering(
            config.prompt_buckets or _halves(max_prompt, _SHORTEST_PROMPT),
            max_prompt,
            "prompt_buckets",
        )
        """Positions of a prefilled prompt, rising."""
        share = shards if shards <= config.prefill else mesh.shape["fsdp"]
        self.prefill_rows = -(-config.prefill // share) * share
        """Prompts of one prefill. Each device holds all of them, so that they must not grow with
        the slice: where they are fewer than the devices, each part of `data` computes them all."""
        self._prefill_parts = shards // share
        self._heads = "tensor" if arch.kv_heads % mesh.shape["tensor"] == 0 else None
        self._whole = sharding.replicated(mesh)
        self._rows = sharding.row_sharding(mesh)
        self._compiled: dict[Key, Any] = {}
        ends, layers = parted(self._weight_shardings())
        self._layer = jax.jit(self._layer_of, out_shardings=layers[0])
        self._ends = jax.jit(self._ends_of, out_shardings=ends)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def keys(self) -> list[Key]:
        """All programs that a run can need, those that take longest to compile first."""
        pairs = [(B, S) for B in self.slots for S in self.positions]
        keys: list[Key] = [("decode", *pair) for pair in pairs]
        keys += [("prefill", T) for T in self.prompts]
        keys += [("enter", *pair, T) for pair in pairs for T in self.prompts]
        keys += [("gather", *pair, to) for pair in pairs for to in _below(self.slots, pair[0])]
        keys += [
            ("stretch", *pair, to) for pair in pairs for to in _beside(self.positions, pair[1])
        ]
        return keys + [("empty", B) for B in self.slots]

    def compile(self) -> dict[str, int]:
        """Compile whatever is not, several at a time.

        Returns:
            Bytes on each device of every program, by name: arguments, results and scratch.
        """
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            programs = list(pool.map(self._program, self.keys()))
        return {
            " ".join(map(str, key)): _bytes(program)
            for key, program in zip(self.keys(), programs, strict=True)
        }

    def run(self, key: Key, *arguments: Any) -> Any:
        """What the program returns, compiled now if it wasn't before."""
        return self._program(key)(*arguments)

    def _program(self, key: Key) -> Any:
        if key not in self._compiled:
            self._compiled[key] = self.lower(key).compile()
        return self._compiled[key]

    def lower(self, key: Key) -> jax.stages.Lowered:
        """A program before it is compiled."""
        kind, *sizes = key
        with jax.set_mesh(self.mesh):
            function, arguments, where, out, donated = _KINDS[kind](self, *sizes)
            jitted = jax.jit(
                function, in_shardings=where, out_shardings=out, donate_argnums=donated
            )
            return jitted.lower(*arguments)

    def separate(self, params: model_params.Params) -> model_params.Params:
        """The trainer's parameters with one dict a layer, laid out for sampling.

        A layer at a time, because one program would hold several of them in two layouts.
        """
        ends, blocks = parted(params)
        layers = [self._layer(blocks, np.int32(index)) for index in range(self.arch.layers)]
        return {**self._ends(ends), "blocks": tuple(layers)}

    def lower_separate(
        self, params: model_params.Params, part: Literal["layer", "ends"]
    ) -> jax.stages.Lowered:
        """What `separate` runs for a layer, or for what is beside them, before it is compiled."""
        ends, blocks = parted(params)
        if part == "layer":
            return self._layer.lower(blocks, np.int32(0))
        return self._ends.lower(ends)

    def _layer_of(self, blocks: model_params.Params, index: jax.Array) -> model_params.Params:
        layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), blocks)
        return self._cast(layer, model_params.specs(self.arch)["blocks"])

    def _ends_of(self, ends: model_params.Params) -> model_params.Params:
        return self._cast(ends, parted(model_params.specs(self.arch))[0])

    def _cast(self, params: model_params.Params, specs: model_params.Params) -> model_params.Params:
        # Norms are computed in float32, from weights as precise as the trainer's.
        def cast(spec: model_params.Spec, x: jax.Array) -> jax.Array:
            return x.astype("float32" if spec.axes[-1] == "norm" else self.compute.dtype)

        return jax.tree.map(cast, specs, params)

    def _weight_shardings(self) -> model_params.Params:
        specs = model_params.specs(self.arch)
        stacked = sharding.param_shardings(specs, self.mesh, sharding.SAMPLE)
        layer = jax.tree.map(
            lambda place: NamedSharding(self.mesh, PartitionSpec(*place.spec[1:])),
            stacked["blocks"],
        )
        return {**stacked, "blocks": (layer,) * self.arch.layers}

    def abstract_weights(self) -> model_params.Params:
        """Shapes, dtypes and places of what `separate` makes."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(self.separate, model_params.abstract(self.arch)),
            self._weight_shardings(),
        )

    def _abstract_slots(self, B: int, S: int) -> slots.Slots:
        return jax.eval_shape(lambda: slots.empty(self.arch, B, S, self.compute.dtype))

    def _slot_shardings(self) -> slots.Slots:
        rows: Any = self._rows
        cache = self._cache_shardings(ROWS)
        if sharding.attention(self.mesh) == "splash":  # a TPU, which writes whole lines of H
            place: Any = cache.k_BKHS[0]
            orders = (0, 3, 1, 2), (0, 2, 1, 3)
            k, v = ((Format(Layout(order), place),) * self.arch.layers for order in orders)
            cache = Cache(cast(Any, k), cast(Any, v), cache.position_BS)
        return slots.Slots(cache, rows, rows, rows, rows)

    def _cache_shardings(self, axis: Any) -> Cache:
        layer: Any = NamedSharding(self.mesh, PartitionSpec(axis, self._heads))
        place: Any = NamedSharding(self.mesh, PartitionSpec(axis))
        return Cache((layer,) * self.arch.layers, (layer,) * self.arch.layers, place)

    def _empty(self, B: int):
        function = functools.partial(
            slots.empty, self.arch, B, self.positions[0], self.compute.dtype
        )
        return function, (), (), self._slot_shardings(), ()

    def _prefill(self, T: int):
        P = self.prefill_rows
        arguments = (self.abstract_weights(), _abstract(P, T), _abstract(P))
        where = (self._weight_shardings(), self._whole, self._whole)
        return self._prefilled, arguments, where, self._cache_shardings(None), ()

    def _prefilled(self, weights: Any, tokens_PT: jax.Array, length_P: jax.Array) -> Cache:
        """The prompts' cache, whole along the mesh's row axes."""
        parts = self._prefill_parts
        prefill = functools.partial(decode.prefill, arch=self.arch, compute=self.compute)
        if parts == 1:
            return prefill(weights, tokens_PT, length_P)
        cache = prefill(weights, jnp.tile(tokens_PT, (parts, 1)), jnp.tile(length_P, parts))

        def whole(x: jax.Array, heads: str | None = None) -> jax.Array:
            part: Any = jax.shard_map(
                lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
                in_specs=PartitionSpec(ROWS, heads),
                out_specs=PartitionSpec(None, heads),
                check_vma=False,
            )
            return part(x)

        k, v = (tuple(whole(x, self._heads) for x in xs) for xs in (cache.k_BKHS, cache.v_BKSH))
        return Cache(k, v, whole(cache.position_BS))

    def _enter(self, B: int, S: int, T: int):
        prefill, arguments, *_ = self._prefill(T)
        prefilled = jax.eval_shape(prefill, *arguments)
        ints, unsigned = _abstract(B), _abstract(B, dtype=jnp.uint32)
        entrants = slots.Entrants(_abstract(), ints, ints, ints, ints, ints, unsigned, unsigned)
        arguments = (
            self._abstract_slots(B, S),
            prefilled,
            entrants,
            _abstract(3, dtype=jnp.uint32),
        )
        place = self._slot_shardings()
        where = (place, self._cache_shardings(None), self._whole, self._whole)
        return functools.partial(slots.enter, heads=self._heads), arguments, where, place, 0

    def _gather(self, B: int, S: int, to: int):
        place = self._slot_shardings()
        arguments = (self._abstract_slots(B, S), _abstract(to))
        return slots.gather, arguments, (place, self._whole), place, ()

    def _stretch(self, B: int, S: int, to: int):
        place = self._slot_shardings()
        function = functools.partial(slots.stretch, positions=to)
        return function, (self._abstract_slots(B, S),), (place,), place, ()

    def _decode(self, B: int, S: int):
        function = functools.partial(
            decode.decode, arch=self.arch, compute=self.compute, steps=self.steps
        )
        real = _abstract(dtype=jnp.float32)
        limits = decode.Limits(_abstract(MAX_EOS), _abstract(B, dtype=jnp.bool), _abstract())
        arguments = (
            self.abstract_weights(),
            self._abstract_slots(B, S),
            Shape(real, _abstract(), real, real),
            limits,
        )
        place = self._slot_shardings()
        where = (self._weight_shardings(), place, self._whole, self._whole)
        return function, arguments, where, (place, self._whole), 1


def _abstract(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def parted(tree: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What is beside the layers, and those."""
    return {name: part for name, part in tree.items() if name != "blocks"}, tree["blocks"]


def _halves(longest: int, shortest: int) -> list[int]:
    """`longest`, its half, and so on while that is not below `shortest`; rising."""
    sizes = [longest]
    while -(-sizes[-1] // 2) >= shortest:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]


def _up_to(sizes: Any, *, multiple: int) -> tuple[int, ...]:
    """Each rounded up to a multiple, without repetition."""
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def _covering(sizes: Any, longest: int, name: str) -> tuple[int, ...]:
    """The sizes, rounded up to what vector units like, if they hold the longest.

    Raises:
        ValueError: if they don't.
    """
    if sizes[-1] < longest:
        raise ValueError(
            f"sample.{name} = {list(sizes)} do not hold {longest} tokens, which the longest "
            f"prompt and response need; the last must be {longest} or more"
        )
    return _up_to(sizes, multiple=16)


def _below(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The next smaller size, if there is one."""
    return sizes[: sizes.index(size)][-1:]


def _beside(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The next smaller and the next larger size, where there are such."""
    return _below(sizes, size) + sizes[sizes.index(size) + 1 :][:1]


def _bytes(program: Any) -> int:
    used = program.memory_analysis()
    return (
        used.argument_size_in_bytes
        + used.output_size_in_bytes
        + used.temp_size_in_bytes
        - used.alias_size_in_bytes
    )


_KINDS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "decode": Programs._decode,
    "prefill": Programs._prefill,
    "enter": Programs._enter,
    "gather": Programs._gather,
    "stretch": Programs._stretch,
    "empty": Programs._empty,
}
"""What makes a program of each kind: function, abstract arguments, shardings in and out, donated
arguments."""

"""Compiles what a run's loop calls, for devices that need not be there, and measures each program.

The functions and their shapes are the trainer's and the sampler's own, so what fits here fits
there. No weights are read: arguments are shapes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bagrpo.config import RunConfig
from bagrpo.models import flops
from bagrpo.models import params as model_params
from bagrpo.models.family import Architecture
from bagrpo.plan.cost import Cost, cost
from bagrpo.sample.programs import parted
from bagrpo.train.assemble import Shape, shapes
from bagrpo.train.setup import batch_fields, make_engine, make_trainer, needs_logps, samples

FASTEST_COMPILATION = {"optimization_level": 9, "memory_fitting_level": 9}
"""Compiler options (9 is its lowest effort, O0): the same program, some per cent of memory apart,
compiled in a third of the time."""


@dataclasses.dataclass
class Program:
    """One compiled function of the loop, on each device unless it says otherwise."""

    kind: str
    """gradient, logps, update, decode, prefill, or another of the sampler's."""
    size: str
    arguments: int = 0
    """Bytes."""
    scratch: int = 0
    """Bytes: temporaries, and results that do not take an argument's place."""
    beside: int = 0
    """Bytes that the loop holds at the same time without giving them to this program."""
    useful: float = 0.0
    """FLOPs of the model for what the program does when every row is full."""
    least_links: float = 0.0
    """Bytes that must come from other devices: parameters, gradients, activations over `tensor`."""
    cost: Cost | None = None
    """None if it was not compiled to the end."""
    error: str | None = None
    """Why not: the compiler's words on what does not fit."""
    turns: int = 1
    """Tokens of each row that one run of decode samples; the costs are those of all of them."""
    shape: Any = None
    """Of gradient and logps: `assemble.Shape`; of the sampler's programs: their sizes."""

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.kind} {self.size}".strip()

    @property
    def total(self) -> int:
        """Bytes that are held while it runs."""
        return self.arguments + self.scratch + self.beside


@dataclasses.dataclass(frozen=True)
class Resident:
    """Bytes on each device of what the loop holds."""

    params: int
    moments: int
    reference: int


class Planner:
    """The loop's functions for one mesh."""

    def __init__(self, config: RunConfig, arch: Architecture, mesh: Mesh):
        """Nothing is compiled yet.

        Args:
            config: of the run.
            arch: of its model.
            mesh: from `sharding.make_mesh`.

        Raises:
            ValueError: if a dimension does not divide over the mesh.
        """
        self.config, self.arch, self.mesh = config, arch, mesh
        self.trainer = make_trainer(config, arch, mesh)
        self.engine = make_engine(config, arch, mesh, None) if samples(config) else None
        held = self.trainer.abstract
        params = _bytes(held.params)
        self.resident = Resident(
            params, _bytes(held.opt_state), params if config.algorithm.kl.coef else 0
        )

    def compile(self, *, largest: bool = False, thorough: bool = False) -> Iterator[Program]:
        """Every program, one after another as it is done.

        Args:
            largest: only the largest shape of each function.
            thorough: optimise as for a run, instead of as `FASTEST_COMPILATION` says.
        """
        options = None if thorough or not _is_tpu(self.mesh) else FASTEST_COMPILATION
        for program, lower in [*self._trainer(largest), *self._sampler(largest)]:
            _measure(program, lower, options)
            yield program

    def _trainer(self, largest: bool) -> Iterator[tuple[Program, Callable[[], Any]]]:
        config, held = self.config, self.resident
        wanted = shapes(config.batch, self.trainer.row_shards)
        by_size = {(s.rows, s.positions, s.response): s for s in wanted}
        most = max(wanted, key=lambda shape: (shape.positions, shape.tokens))
        calls = self.trainer.calls(fields=batch_fields(config), logps=needs_logps(config))
        for name, arguments in calls:
            if name == "zeros":
                continue
            program = Program(name, "", beside=held.reference)
            if name in ("gradient", "logps"):
                tokens, mask = _tokens(name, arguments)
                shape = by_size[(*tokens.shape, mask.shape[1])]
                if largest and shape != most:
                    continue
                program.size = f"{shape.rows} x {shape.prompt} + {shape.response}"
                program.shape = shape
                program.beside += held.moments
                passes = 3 if name == "gradient" else 1
                program.useful = passes * self._forward(shape) / self.mesh.size
                program.least_links = self._least_links(passes, shape)
            yield program, lambda n=name, a=arguments: self.trainer.lower(n, *a)

    def _sampler(self, largest: bool) -> Iterator[tuple[Program, Callable[[], Any]]]:
        if self.engine is None:
            return
        programs, held = self.engine.programs, self.resident
        state = held.params + held.moments + held.reference
        params, sampled = self.trainer.abstract.params, programs.abstract_weights()
        weights = _bytes(sampled)
        (ends_in, blocks), (ends, layers) = parted(params), parted(sampled)
        yield (
            Program("load", "layer", beside=state + weights - _bytes((blocks, layers[0]))),
            lambda: programs.lower_separate(params, "layer"),
        )
        yield (
            Program("load", "ends", beside=state + weights - _bytes((ends_in, ends))),
            lambda: programs.lower_separate(params, "ends"),
        )
        caches = self._cache(programs.slots[-1], programs.positions[-1])
        prompts = self._cache(programs.prefill_rows, programs.prompts[-1], split=False)
        for key in self._keys(largest):
            kind, *sizes = key
            program = Program(kind, " x ".join(map(str, sizes)), shape=tuple(sizes))
            if kind == "decode":
                program.beside, program.turns = state + prompts, programs.steps
                program.useful = programs.steps * self._token(*sizes) / self.mesh.size
            elif kind == "prefill":
                read = flops.rollout(self.arch, sizes[0], [1])
                program.beside = state + caches
                program.useful = programs.prefill_rows * read / self.mesh.size
            else:
                program.beside = state + weights
            yield program, lambda k=key: programs.lower(k)

    def _keys(self, largest: bool) -> list[Any]:
        """The sampler's programs, without those that do less of the same.

        Fewer slots do the same as all of them, and of what only copies the largest is enough.
        """
        assert self.engine is not None
        programs, kinds = self.engine.programs, {}
        for key in programs.keys():  # noqa: SIM118 - no dict
            kinds.setdefault(key[0], []).append(key)
        decodes = [key for key in kinds["decode"] if key[1] == programs.slots[-1]]
        copies = [max(kinds[kind]) for kind in ("enter", "gather", "stretch") if kind in kinds]
        if largest:
            return [max(decodes), max(kinds["prefill"]), *copies]
        return [*decodes, *kinds["prefill"], *copies]

    def _forward(self, shape: Shape) -> float:
        """Useful FLOPs of all devices for a full micro-batch."""
        packs = shape.rows // shape.share
        return packs * flops.forward(
            self.arch, shape.prompt, [shape.response] * shape.share, share=shape.share
        )

    def _token(self, rows: int, positions: int) -> float:
        """Useful FLOPs of all devices for one more token in each of these rows."""
        arch = self.arch
        seen = flops.attention(arch, positions - 1, positions)
        return rows * (flops.position(arch) + flops.head(arch) + seen)

    def _least_links(self, passes: int, shape: Shape) -> float:
        """Gathers of the parameters for each pass over them, one reduction of the gradients, and
        in each layer two sums of activations over `tensor`, two more of their gradients."""
        arch, size = self.arch, np.dtype(self.config.model.dtype).itemsize
        shards, tensor = self.mesh.shape["fsdp"], self.mesh.shape["tensor"]
        held = model_params.count(arch) / tensor * size
        if not arch.tied:  # the table of embeddings need not move
            held -= arch.vocab * arch.embed / tensor * size
        activations = shape.tokens / self.trainer.row_shards * arch.embed * size
        sums = arch.layers * (4 if passes == 3 else 2)
        gathered = passes * held * (shards - 1) / shards
        return gathered + sums * activations * 2 * (tensor - 1) / tensor

    def _cache(self, rows: int, positions: int, *, split: bool = True) -> int:
        """Bytes on each device of a cache whose rows are split over the devices, or whole."""
        arch, tensor = self.arch, self.mesh.shape["tensor"]
        heads = arch.kv_heads // (tensor if arch.kv_heads % tensor == 0 else 1)
        rows = -(-rows // self.trainer.row_shards) if split else rows
        size = np.dtype(self.config.model.dtype).itemsize
        return 2 * arch.layers * rows * positions * heads * arch.head_dim * size


def _tokens(name: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    if name == "gradient":
        return arguments[2].tokens_BT, arguments[2].mask_BR
    tokens, _, mask = arguments[1]
    return tokens, mask


def _is_tpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "tpu"


def _bytes(tree: Any) -> int:
    """On each device, of abstract arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def _measure(program: Program, lower: Callable[[], Any], options: Any) -> None:
    """Compiles, and fills in what is known then."""
    try:
        compiled = lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program.error, program.scratch = _explained(str(error))
        return
    memory = compiled.memory_analysis()
    program.arguments = memory.argument_size_in_bytes
    program.scratch = (
        memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    program.cost = cost(compiled.as_text(), turns=program.turns)


def _explained(text: str) -> tuple[str, int]:
    """The compiler's complaint in short, its largest buffers included, and the bytes it names."""
    used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)", text)
    bytes_ = int(float(used[1]) * 1024 ** " KMGT".index(used[2] or " ")) if used else 0
    buffers = re.findall(
        r"Size: ([\d.]+[KMGT]?).*?\n\s*Operator: (.*?)\n\s*Shape: (\S+)", text, re.S
    )
    lines = [text.split("\n", 1)[0].removeprefix("RESOURCE_EXHAUSTED: ")]
    for size, operator, shape in buffers[:4]:
        named = re.search(r'op_name="([^"]*)"', operator)
        lines.append(f"{size} {shape} {named[1] if named else operator}")
    return "\n".join(lines), bytes_

"""Plans a run for a slice: what fits, what a step takes, and which mesh suits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from bagrpo import sharding
from bagrpo.config import MeshConfig, RunConfig
from bagrpo.models.family import Architecture
from bagrpo.plan import chips
from bagrpo.plan.chips import Chip
from bagrpo.plan.estimate import Step, step
from bagrpo.plan.programs import Planner, Program

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Plan:
    """What was found out about a run on a slice."""

    topology: str
    config: RunConfig
    chip: Chip | None
    """None for CPUs, about which nothing is published."""
    mesh: dict[str, int]
    programs: list[Program]
    step: Step | None
    """None where something does not fit, and for CPUs."""
    thorough: bool = False
    """Whether the compiler optimised as for a run; only then do its own estimates mean much."""

    @property
    def devices(self) -> int:
        """Chips of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether every program was compiled and finds room beside what the loop holds."""
        return all(self.has_room(program) for program in self.programs)

    def has_room(self, program: Program) -> bool:
        """Whether a program fits."""
        if program.error:
            return False
        return self.chip is None or program.total <= self.chip.hbm_bytes


def plan(
    config: RunConfig,
    arch: Architecture,
    topology: str,
    *,
    largest: bool = False,
    thorough: bool = False,
    response: int | None = None,
) -> Plan:
    """Compiles a run's programs for a slice, and estimates a step.

    Args:
        config: of the run.
        arch: of its model.
        topology: `v5e-16` and the like, or `cpu:8`.
        largest: only the largest shape of each program.
        thorough: let the compiler optimise as for a run, see `programs.FASTEST_COMPILATION`.
        response: tokens of the responses that the step is estimated for; by default the most.

    Raises:
        ValueError: for a slice that does not exist, without the TPU compiler, if the model does not
            divide over the mesh, or if `response` is longer than the run allows.
    """
    length = response or config.batch.max_response
    if length > config.batch.max_response:
        raise ValueError(
            f"--response {length} is longer than batch.max_response = {config.batch.max_response}; "
            "raise that, or give fewer tokens"
        )
    chip, devices = _devices(topology)
    mesh = sharding.make_mesh(config.mesh, devices)
    planner = Planner(config, arch, mesh)
    programs = []
    for program in planner.compile(largest=largest, thorough=thorough):
        log.info("%s: compiled %s", topology, program.name)
        programs.append(program)
    found = Plan(topology, config, chip, dict(mesh.shape), programs, None, thorough)
    if chip is not None and found.fits:
        found.step = step(programs, config, arch, chip, devices=mesh.size, response=length)
    return found


def search(
    config: RunConfig,
    arch: Architecture,
    topology: str,
    *,
    thorough: bool = False,
    response: int | None = None,
) -> list[Plan]:
    """Plans for all meshes that divide, and for other micro-batches on the best; best first.

    Only the largest shape of each program is compiled. See `plan` for the arguments.
    """
    one = functools.partial(
        plan, arch=arch, topology=topology, largest=True, thorough=thorough, response=response
    )
    _, devices = _devices(topology)
    found = []
    for mesh in meshes(arch, len(devices)):
        log.info("%s: trying %s", topology, mesh)
        tried = config.model_copy(update={"mesh": mesh})
        try:
            found.append(one(tried))
        except ValueError as error:
            log.info("%s: left out, %s", topology, error)
    found.sort(key=_rank)
    if found:
        best = found[0].config
        for tokens in (best.batch.microbatch_tokens * 2, best.batch.microbatch_tokens // 2):
            log.info("%s: trying batch.microbatch_tokens=%d", topology, tokens)
            batch = best.batch.model_copy(update={"microbatch_tokens": tokens})
            tried = best.model_copy(update={"batch": batch})
            found.append(one(tried))
    return sorted(found, key=_rank)


def meshes(arch: Architecture, devices: int) -> Iterator[MeshConfig]:
    """Those whose `tensor` divides heads, feed-forward and vocabulary, the rest being `fsdp`."""
    for tensor in range(1, min(devices, arch.heads) + 1):
        wide = arch.experts or arch.ffw
        if devices % tensor or any(n % tensor for n in (arch.heads, wide, arch.vocab)):
            continue
        if arch.kv_heads % tensor and tensor % arch.kv_heads:
            continue
        if arch.embed % (devices // tensor) == 0:
            yield MeshConfig(data=1, fsdp=devices // tensor, tensor=tensor)


def _rank(found: Plan) -> tuple[float, float]:
    """What fits first, by time; then what needs least."""
    seconds = math.inf if found.step is None else found.step.seconds
    return seconds, max(program.total for program in found.programs)


def _devices(topology: str) -> tuple[Chip | None, Sequence[Any]]:
    kind, _, count = topology.partition(":")
    if kind == "cpu" and count.isdecimal() and int(count):
        devices = jax.devices("cpu")
        if len(devices) < int(count):
            raise ValueError(
                f"{topology} needs {count} CPU devices and there are {len(devices)}; set "
                f"JAX_NUM_CPU_DEVICES={count} in the environment"
            )
        return None, devices[: int(count)]
    wanted = chips.parse(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"planning for {topology} takes the TPU compiler, a package for Linux on x86-64 that "
            "needs no TPU: plan with launch/local.sh, which installs it, or: "
            "pip install 'bagrpo[tpu]'"
        )
    options: dict[str, Any] = {}
    if wanted.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores as one device, as JAX has them
    if wanted.slices > 1:
        options["num_slices"] = wanted.slices
    if wanted.shape == (1, 1):
        options["chips_per_host_bounds"] = (1, 1, 1)
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=wanted.compiler_name, **options
    )
    return wanted.chip, described.devices

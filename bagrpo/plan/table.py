"""A plan as tables, and as values that JSON can hold."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.table

from bagrpo.plan.estimate import times
from bagrpo.plan.plan import Plan
from bagrpo.plan.programs import Program


def show(console: rich.console.Console, plan: Plan) -> None:
    """Prints everything about a plan."""
    console.print(_title(plan), style="bold")
    console.print(_memory(plan))
    for program in plan.programs:
        if program.error:
            console.print(
                f"{program.name} does not fit: {program.error}", markup=False, soft_wrap=True
            )
    if plan.chip is not None:
        console.print(_speed(plan))
    for line in _summary(plan):
        console.print(line, markup=False, soft_wrap=True)


def ranking(plans: list[Plan]) -> rich.table.Table:
    """What a search tried, best first."""
    made = rich.table.Table()
    for name in ("data", "fsdp", "tensor", "microbatch_tokens", "fullest GiB", "step s", "MFU"):
        made.add_column(name, justify="right")
    for plan in plans:
        summary = values(plan)["step"]
        made.add_row(
            *[str(size) for size in plan.mesh.values()],
            str(plan.config.batch.microbatch_tokens),
            _gib(max(program.total for program in plan.programs)),
            f"{summary['seconds']:.1f}" if summary else "does not fit",
            f"{summary['mfu']:.0%}" if summary else "",
        )
    return made


def values(plan: Plan) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "topology": plan.topology,
        "mesh": plan.mesh,
        "fits": plan.fits,
        "programs": [_values(plan, program) for program in plan.programs],
        "step": _step(plan),
    }


def _values(plan: Plan, program: Program) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": program.name,
        "fits": plan.has_room(program),
        "argument_bytes": program.arguments,
        "scratch_bytes": program.scratch,
        "beside_bytes": program.beside,
        "total_bytes": program.total,
        "useful_flops": program.useful,
        "error": program.error,
    }
    if program.cost is not None:
        cost = program.cost
        found |= {
            "compiled_flops": cost.flops,
            "moved_bytes": cost.bytes,
            "collective_bytes": dict(cost.collectives),
            "least_collective_bytes": program.least_links,
        }
        if plan.chip is not None:
            limits = times(program, plan.chip)
            found |= {"roofline_seconds": limits.roofline, "bound": limits.bound}
            if plan.thorough:
                found["compiler_seconds"] = cost.cycles / plan.chip.hertz
    return found


def _step(plan: Plan) -> dict[str, Any] | None:
    step, chip = plan.step, plan.chip
    if step is None or chip is None:
        return None
    return {
        "seconds": step.seconds,
        "rollout_seconds": step.rollout,
        "update_seconds": step.update,
        "prompt_tokens": step.prompt,
        "response_tokens": step.response,
        "tokens_per_second_and_chip": step.tokens / step.seconds / plan.devices,
        "mfu": step.useful / step.seconds / chip.flops,
        "chip_hours_per_1000_steps": step.seconds * plan.devices / 3.6,
    }


def _title(plan: Plan) -> str:
    mesh = ", ".join(f"{name} {size}" for name, size in plan.mesh.items())
    return f"{plan.topology}: {plan.devices} devices ({mesh})"


def _memory(plan: Plan) -> rich.table.Table:
    limit = "" if plan.chip is None else f" of {plan.chip.hbm_bytes / 2**30:g}"
    made = rich.table.Table(title=f"GiB of each device{limit}", title_justify="left")
    made.add_column("program")
    for name in ("arguments", "scratch", "held beside", "total", "fits"):
        made.add_column(name, justify="right")
    for program in plan.programs:
        made.add_row(
            program.name,
            _gib(program.arguments),
            _gib(program.scratch),
            _gib(program.beside),
            _gib(program.total),
            "yes" if plan.has_room(program) else "NO",
        )
    return made


def _speed(plan: Plan) -> rich.table.Table:
    assert plan.chip is not None
    made = rich.table.Table(
        title="one run on each device (decode: all its tokens)", title_justify="left"
    )
    made.add_column("program")
    columns = ("useful TFLOP", "compiled / useful", "GB moved", "GB collectives", "/ least")
    timing = ("roofline ms", "bound by", *(["compiler ms"] if plan.thorough else []))
    for name in (*columns, *timing):
        made.add_column(name, justify="right")
    for program in plan.programs:
        if program.cost is None:
            continue
        cost, limits = program.cost, times(program, plan.chip)
        useful, least = program.useful, program.least_links
        made.add_row(
            program.name,
            f"{useful / 1e12:.3g}" if useful else "",
            f"{cost.flops / useful:.2f}" if useful else "",
            f"{cost.bytes / 1e9:.2f}",
            f"{cost.links / 1e9:.2f}",
            f"{cost.links / least:.2f}" if least else "",
            f"{limits.roofline * 1e3:.2f}",
            limits.bound,
            *([f"{cost.cycles / plan.chip.hertz * 1e3:.2f}"] if plan.thorough else []),
        )
    return made


def _summary(plan: Plan) -> list[str]:
    lines = []
    links: dict[str, float] = {}
    for program in plan.programs:
        if program.kind == "gradient" and program.cost is not None:
            links = program.cost.collectives  # of the largest, which is the last
    if links:
        kinds = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in sorted(links.items()))
        lines.append(f"GB of the last gradient's collectives: {kinds}")
    step = _step(plan)
    if step is None:
        if not plan.fits:
            lines.append(
                "It does not fit. Lower batch.microbatch_tokens, model.logit_tokens or "
                "sample.slots, raise mesh.tensor, or take more chips; --search tries meshes."
            )
        return lines
    return [
        *lines,
        f"A step, if every prompt has {step['prompt_tokens']} and every response "
        f"{step['response_tokens']} tokens: {step['seconds']:.1f} s (rollout "
        f"{step['rollout_seconds']:.1f}, update {step['update_seconds']:.1f}), "
        f"{step['tokens_per_second_and_chip']:.0f} tokens/s per chip, MFU {step['mfu']:.1%}, "
        f"{step['chip_hours_per_1000_steps']:.0f} chip-hours per 1,000 steps.",
        "Exact: memory, FLOPs and collectives, as compiled. Estimates: bytes moved, and all times: "
        "the slowest of compute, memory and links at published peaks, which a run does not reach. "
        "Links are those within a slice, also where several are joined.",
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"

"""Dynamic sampling (DAPO, arXiv:2503.14476): train on groups that teach something.

A group whose samples are all right or all wrong has no advantage under a group baseline.
`Collector` keeps the others until a batch is full, asking for bounded rounds of further problems.
It judges by correctness: that a shaped reward differs within a group is no reason to keep it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

from bagrpo.records import Rollout

log = logging.getLogger(__name__)

Group = Sequence[Rollout]
"""All rollouts of one problem."""


@dataclasses.dataclass
class Collector:
    """Collects the groups of one batch, round by round.

    The loop samples `missing` or more problems, hands their groups to `add`, and goes on until
    `done`; then `groups` is the batch. Groups beyond a full batch are discarded and counted: kept
    for the next step they would have been sampled from an older policy, and a resumed run would
    have to restore them.
    """

    wanted: int
    """Groups in a full batch."""
    max_rounds: int
    groups: list[Group] = dataclasses.field(default_factory=list)
    """Kept, in the order in which they came."""
    rounds: int = 0
    all_correct: int = 0
    """Groups dropped because every sample was right."""
    all_wrong: int = 0
    unscored: int = 0
    """Groups dropped because no sample has a reward."""
    surplus: int = 0
    """Mixed groups discarded because the batch was full."""

    def __post_init__(self) -> None:
        """Refuses a batch that nothing could fill."""
        if self.wanted < 1 or self.max_rounds < 1:
            raise ValueError(
                f"{self.wanted} groups in {self.max_rounds} rounds; both must be at least 1"
            )

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return self.wanted - len(self.groups)

    @property
    def done(self) -> bool:
        """Whether the batch is full or the rounds are used up."""
        return self.missing == 0 or self.rounds == self.max_rounds

    def add(self, groups: Sequence[Group]) -> None:
        """Takes the groups of a round; warns when it was the last and the batch isn't full.

        Raises:
            ValueError: the collector is done already, or a group is no group: fewer than two
                samples, or of different problems.
        """
        if self.done:
            raise ValueError(f"the batch is done after {self.rounds} rounds; begin a new Collector")
        for group in groups:
            self._sort(group)
        self.rounds += 1
        if self.done and self.missing:
            log.warning(
                "%d of %d groups after %d rounds of dynamic sampling (dropped: %d all right, %d "
                "all wrong, %d without a reward): %s",
                len(self.groups),
                self.wanted,
                self.rounds,
                self.all_correct,
                self.all_wrong,
                self.unscored,
                "training on a partial batch" if self.groups else "nothing to train on",
            )

    def _sort(self, group: Group) -> None:
        problems = {rollout.problem.id for rollout in group}
        if len(group) < 2 or len(problems) != 1:
            raise ValueError(
                f"a group of {len(group)} samples of problems {sorted(problems)}; dynamic sampling "
                f"needs two or more samples of one problem"
            )
        # A reward of nan says that the check failed: the sample is neither right nor wrong.
        scored = [r.verdict.correct for r in group if not math.isnan(r.verdict.reward)]
        if not scored:
            self.unscored += 1
        elif all(scored):
            self.all_correct += 1
        elif not any(scored):
            self.all_wrong += 1
        elif self.missing == 0:
            self.surplus += 1
        else:
            self.groups.append(group)

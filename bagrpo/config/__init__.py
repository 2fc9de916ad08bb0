"""Typed, frozen run configuration: YAML files overridden by dotted `key=value` pairs.

Every section is a pydantic model that refuses unknown keys. A module below `train` is given its
own section only, never the whole run's. `settings` reads, writes and compares sections. Nothing
here loads jax.
"""

from __future__ import annotations

from bagrpo.config.data import ArithmeticSource as ArithmeticSource
from bagrpo.config.data import DataConfig as DataConfig
from bagrpo.config.data import FileSource as FileSource
from bagrpo.config.data import GymSource as GymSource
from bagrpo.config.data import ProblemSource as ProblemSource
from bagrpo.config.data import PromptConfig as PromptConfig
from bagrpo.config.data import SourceConfig as SourceConfig
from bagrpo.config.data import Turn as Turn
from bagrpo.config.evaluation import EvalConfig as EvalConfig
from bagrpo.config.run import CheckpointConfig as CheckpointConfig
from bagrpo.config.run import ReportConfig as ReportConfig
from bagrpo.config.sampling import SampleConfig as SampleConfig
from bagrpo.config.section import Positive
from bagrpo.config.section import Section as Section
from bagrpo.config.settings import difference as difference
from bagrpo.config.settings import dump as dump
from bagrpo.config.settings import load as load
from bagrpo.config.training import AlgorithmConfig as AlgorithmConfig
from bagrpo.config.training import BatchConfig as BatchConfig
from bagrpo.config.training import ClipConfig as ClipConfig
from bagrpo.config.training import CorrectionConfig as CorrectionConfig
from bagrpo.config.training import KLConfig as KLConfig
from bagrpo.config.training import MeshConfig as MeshConfig
from bagrpo.config.training import ModelConfig as ModelConfig
from bagrpo.config.training import OptimizerConfig as OptimizerConfig
from bagrpo.config.training import RandomModelConfig as RandomModelConfig
from bagrpo.config.verification import FormatReward as FormatReward
from bagrpo.config.verification import FunctionReward as FunctionReward
from bagrpo.config.verification import OverlongReward as OverlongReward
from bagrpo.config.verification import SandboxConfig as SandboxConfig
from bagrpo.config.verification import VerifyConfig as VerifyConfig


class RunConfig(Section):
    """All settings of a run."""

    folder: str | None = None
    """Where the run is written: settings, metrics, rollouts, checkpoints. By default `runs/` and
    the name of the configuration's file. What is there already is resumed."""
    seed: int = 0
    """Keys all randomness of the run."""
    steps: Positive = 100
    """Rollout batches; each makes `batch.minibatches * batch.epochs` updates."""
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    sample: SampleConfig = SampleConfig()
    verify: VerifyConfig = VerifyConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

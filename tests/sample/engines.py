"""Engines around the golden models, and what each completion must be, computed without a cache."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bagrpo.config import MeshConfig, SampleConfig
from bagrpo.models.decoder import Compute, forward, logits
from bagrpo.models.logprob import response_logps
from bagrpo.sample.engine import Engine
from bagrpo.sample.request import Request
from bagrpo.sharding import make_mesh
from bagrpo.text.tokenizer import Tokenizer
from bagrpo.weights.load import load

FOLDER = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.name for path in FOLDER.iterdir())
MAX_PROMPT, MAX_RESPONSE = 24, 16


def mesh_of(data, fsdp, tensor):
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)


@functools.cache
def model(name, mesh=(1, 1, 1)):
    return load(str(FOLDER / name), mesh_of(*mesh))


@functools.cache
def engine(name="qwen2", *, mesh=(1, 1, 1), dtype="float32", text=False, **shapes):
    """One for each set of arguments, so that tests share compiled programs."""
    arch, params = model(name, mesh)
    made = Engine(
        arch,
        mesh_of(*mesh),
        compute_dtype=dtype,
        config=SampleConfig(**{"slots": 4, "prefill": 2, "steps": 5, **shapes}),
        max_prompt=MAX_PROMPT,
        max_response=MAX_RESPONSE,
        tokenizer=tokenizer(arch.vocab) if text else None,
        eos_ids=(),
    )
    made.load(params)
    return made


def tokenizer(vocab):
    """Spells with as many characters as make `vocab` ids with the three special ones."""
    return Tokenizer.characters([chr(ord("一") + i) for i in range(vocab - 3)])


def requests(count=5, samples=2, vocab=320):
    """Ragged prompts, of 1 token and of as many as are allowed among them."""
    made = []
    for i in range(count):
        random = np.random.default_rng(i)
        length = {0: 1, 1: MAX_PROMPT}.get(i, random.integers(1, MAX_PROMPT + 1))
        made.append(Request(random.integers(0, vocab, length).tolist(), 1000 + 7 * i, samples))
    return made


def generate(engine, requests, sampling, *, seed=0, step=3, **options):
    """Completions by (problem, sample); each comes exactly once."""
    found = {}
    for r, g, completion in engine.generate(requests, sampling, seed=seed, step=step, **options):
        key = requests[r].problem, g
        assert key not in found
        found[key] = completion
    assert len(found) == sum(request.samples for request in requests)
    return found


def tokens(completions):
    return {key: completion.tokens for key, completion in completions.items()}


@functools.partial(jax.jit, static_argnums=1)
def next_logits(params, arch, tokens_1T, length):
    place_1T = jnp.arange(tokens_1T.shape[1], dtype=jnp.int32)[None]
    place_1T = jnp.where(place_1T < length, place_1T, -1)
    hidden_1TD, _ = forward(params, arch, tokens_1T, place_1T, compute=Compute())
    return logits(params, arch, hidden_1TD[:, length - 1, None])[0, 0]


def alone(name, prompt, steps=MAX_RESPONSE):
    """Greedy ids after a prompt, each from the whole text so far."""
    arch, params = model(name)
    text = list(prompt)
    for _ in range(steps):
        row_1T = np.zeros((1, MAX_PROMPT + MAX_RESPONSE), np.int32)
        row_1T[0, : len(text)] = text
        text.append(int(next_logits(params, arch, row_1T, np.int32(len(text))).argmax()))
    return text[len(prompt) :]


@functools.partial(jax.jit, static_argnums=(1, 6))
def trainer_logps(params, arch, tokens_BT, prompt_B, mask_BR, temperature, dtype):
    return response_logps(
        params,
        arch,
        tokens_BT,
        prompt_B,
        mask_BR,
        temperature=temperature,
        compute=Compute(dtype=dtype),
    )[0]


def recomputed(name, requests, completions, temperature, dtype="float32"):
    """The trainer's log-probs of all sampled tokens, beside the sampler's: two flat arrays."""
    arch, params = model(name)
    prompts = {request.problem: request.prompt for request in requests}
    B, T = len(completions), MAX_PROMPT + MAX_RESPONSE
    tokens_BT, mask_BR = np.zeros((B, T), np.int32), np.zeros((B, MAX_RESPONSE), bool)
    prompt_B = np.array([len(prompts[problem]) for problem, _ in completions], np.int32)
    for b, ((problem, _), completion) in enumerate(completions.items()):
        row = [*prompts[problem], *completion.tokens]
        tokens_BT[b, : len(row)] = row
        mask_BR[b, : len(completion.tokens)] = True
    logp_BR = trainer_logps(
        params, arch, tokens_BT, prompt_B, mask_BR, np.float32(temperature), dtype
    )
    recorded = np.concatenate([completion.logps for completion in completions.values()])
    return np.asarray(logp_BR)[mask_BR], recorded

"""One of two processes that sample together; run by `test_processes`.

Arguments: process number, coordinator's address, file for the completions as JSON.
"""

import json
import sys
from pathlib import Path

import jax
from engines import engine, generate, requests

from bagrpo.sample.request import Sampling

number, coordinator, out = sys.argv[1:]
jax.distributed.initialize(coordinator, num_processes=2, process_id=int(number))
shared = engine("qwen2", mesh=(2, 2, 2), slots=8, text=True)
shared.compile()
found = generate(shared, requests(), Sampling(temperature=1.3, stop=("一",)))
rows = [[*key, list(c.tokens), c.text, c.finish] for key, c in found.items()]
Path(out).write_text(json.dumps(rows))

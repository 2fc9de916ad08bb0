"""One of two processes that sample together; run by `test_sampling_hosts`.

Argument: folder for the completions, as JSON in a file named after the process.
"""

import json
import sys
from pathlib import Path

import jax
from engines import engine, generate, requests

from bagrpo import distributed
from bagrpo.sample.request import Sampling

distributed.initialize()
shared = engine("qwen2", mesh=(2, 2, 2), slots=8, text=True)
shared.compile()
found = generate(shared, requests(), Sampling(temperature=1.3, stop=("一",)))
rows = [[*key, list(c.tokens), c.text, c.finish] for key, c in found.items()]
Path(sys.argv[1], str(jax.process_index())).write_text(json.dumps(rows))
distributed.finish()

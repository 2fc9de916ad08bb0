"""One of several processes, of which one ends before the others; run by `test_distributed`.

Arguments: how it ends, its number, and what the others do meanwhile.
"""

import os
import signal
import sys
import time

import jax

from bagrpo import distributed

how, victim, others = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.initialize()
distributed.gather_objects([])
if jax.process_index() == victim:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raised":
        raise ValueError("no such file: data.jsonl")
    elif how == "told":
        distributed.fail("no such file: data.jsonl")
    sys.exit(2)
elif others == "sleep":
    time.sleep(100)
distributed.gather_objects([])  # Waits for the one that is gone.
raise AssertionError("not reached")

import json
from pathlib import Path

import processes
from engines import engine, generate, requests

from bagrpo.sample.request import Sampling


def test_two_processes_sample_together_what_one_device_does(tmp_path):
    processes.run(Path(__file__).parent / "two_processes.py", tmp_path, timeout=240)
    completions = generate(engine(text=True), requests(), Sampling(temperature=1.3, stop=("一",)))
    want = {key: [list(c.tokens), c.text, c.finish] for key, c in completions.items()}
    for number in range(2):
        rows = json.loads((tmp_path / str(number)).read_text())
        assert {(problem, sample): rest for problem, sample, *rest in rows} == want

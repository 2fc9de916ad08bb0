"""Runs one program that a model wrote, inside the sandbox; started by `sandbox.run`.

Reads a job from one file descriptor, puts limits on its own process, and runs the program: as a
script, or against the tests of HumanEval's form. The job's secret goes to another descriptor when
the end was reached, so neither what a program prints nor how it exits can pass for that.

Its text is given to a bare interpreter, so it imports nothing of this package.
"""

import json
import os
import resource
import sys
import types


def main() -> None:
    """Runs the job of descriptor argv[1] and reports on descriptor argv[2]."""
    source, report = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(source, encoding="utf-8") as file:
        job = json.load(file)
    for name, value in job["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if user := job["user"]:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    sys.argv[:] = ["program.py"]
    secret = job.pop("secret").encode()
    # Under tests a program is a module, so that its own `if __name__ == "__main__"` stays out.
    module = types.ModuleType("program" if job["test"] else "__main__")
    sys.modules[module.__name__] = module
    scope = module.__dict__
    exec(compile(job["program"], "program.py", "exec"), scope)
    if job["test"]:
        # The tests come last and in the same scope, so a program can't replace `check`.
        exec(compile(job["test"], "test.py", "exec"), scope)
        scope["check"](scope[job["entry_point"]])
    os.write(report, secret)


main()

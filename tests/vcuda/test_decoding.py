"""Decoders are made by one thread at a time: two would end the process."""

import subprocess
import sys

from tests.cluster.supervisor import ROOT

# Kinds that share what they consist of, and threads that meet them at once. Without the lock 100 of 100 runs crashed.
CROWD = """
import sys, threading
from msgspec import defstruct
from vcuda.decoding import decoder_for
sys.setswitchinterval(1e-6)
def kinds():
    inner = [defstruct(f"Inner{n}", [("name", str)]) for n in range(30)]
    shared = defstruct("Shared", [(f"f{n}", kind) for n, kind in enumerate(inner)])
    return [defstruct(f"Outer{n}", [("shared", shared)]) for n in range(4)]
body = b'{"shared": {' + b", ".join(b'"f%d": {"name": "a"}' % n for n in range(30)) + b"}}"
for _ in range(200):
    made, begin = kinds(), threading.Barrier(4)
    def meet(kind):
        begin.wait()
        assert decoder_for(kind).decode(body).shared.f29.name == "a"
    threads = [threading.Thread(target=meet, args=(kind,)) for kind in made]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_that_meet_types_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CROWD], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

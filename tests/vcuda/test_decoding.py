"""Decoders are created by one thread at a time: two would crash the process."""

import subprocess
import sys

from tests.cluster.supervisor import ROOT

# Threads that create decoders of types with common parts at the same moment. Without the lock 100 of 100 runs crashed.
RACE = """
import sys, threading
from msgspec import defstruct
from vcuda.decoding import decoder_for
sys.setswitchinterval(1e-6)
def new_types():
    inner = [defstruct(f"Inner{n}", [("name", str)]) for n in range(30)]
    shared = defstruct("Shared", [(f"f{n}", kind) for n, kind in enumerate(inner)])
    return [defstruct(f"Outer{n}", [("shared", shared)]) for n in range(4)]
body = b'{"shared": {' + b", ".join(b'"f%d": {"name": "a"}' % n for n in range(30)) + b"}}"
for _ in range(200):
    types, barrier = new_types(), threading.Barrier(4)
    def decode(kind):
        barrier.wait()
        assert decoder_for(kind).decode(body).shared.f29.name == "a"
    threads = [threading.Thread(target=decode, args=(kind,)) for kind in types]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_threads_may_need_decoders_at_the_same_moment() -> None:
    process = subprocess.run([sys.executable, "-c", RACE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")

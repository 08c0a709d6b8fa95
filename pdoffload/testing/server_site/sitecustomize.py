"""Run by every Python process of a server that `pdoffload.testing.serving` starts: waiting sleeps.

vLLM's engine and workers wait for each other by `os.sched_yield` in a loop, hundreds of thousands of calls a
second. Where they share a CPU or two with everything else, as here, that is worse than slow: on Linux 6.18 in
a virtual machine the CPU's timer was seen to stand still meanwhile, so that nothing else ran on it, for 1 to
50 s at a time, with peers lost and requests timed out for no reason of their own. A sleep of 0.1 ms instead:
no such stall in the same load, and the requests took half as long.
"""

import os
import time

_PAUSE_S = 0.0001


def _pause() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _pause

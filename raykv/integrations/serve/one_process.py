"""A vLLM executor whose only worker runs in the engine's process."""

import os
import threading
from typing import Final

from tqdm.auto import tqdm
from vllm.v1.executor.uniproc_executor import UniProcExecutor

NICENESS: Final = 10
"""An engine on CPU computes for seconds at a time. The servers, routers and nodes on the same cores answer within
milliseconds, so they come first."""


class OneProcessExecutor(UniProcExecutor):
    """vLLM's executor without worker processes. It leaves nothing in /dev/shm, even when it is killed."""

    def _init_executor(self) -> None:
        os.nice(NICENESS)  # of this thread and those that it starts: the engine's
        # tqdm's default lock is a named semaphore in /dev/shm. In one process a thread lock is enough.
        tqdm.set_lock(threading.RLock())
        super()._init_executor()

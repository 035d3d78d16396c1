"""A vLLM executor whose only worker runs in the engine's process."""

import threading

from tqdm.auto import tqdm
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):
    """vLLM's executor without worker processes. It leaves nothing in /dev/shm, even when it is killed."""

    def _init_executor(self) -> None:
        # tqdm's default lock is a named semaphore in /dev/shm. In one process a thread lock is enough.
        tqdm.set_lock(threading.RLock())
        super()._init_executor()

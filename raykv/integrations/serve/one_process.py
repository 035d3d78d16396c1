"""A vLLM engine with its only worker in its own process."""

import threading

from tqdm.auto import tqdm
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):
    """vLLM's executor without worker processes, that leaves nothing in /dev/shm even when it is killed."""

    def _init_executor(self) -> None:
        # By default, progress bars share a named semaphore with child processes, of which there are none here.
        tqdm.set_lock(threading.RLock())
        super()._init_executor()

"""Ray, Ray Serve and a pool on this machine, for benchmarks of whole deployments."""

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from benchmarks.machine import cpu_flags
from deployments.demo import DRIVER_SETTINGS
from deployments.local_ray import LocalRay

HOST: Final = "127.0.0.1"
DTYPE: Final = "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"
"""The type of weights and KV. CPUs without instructions for bfloat16 compute it several times slower."""
EXPORTS: Final = {"RAY_metrics_report_interval_ms": "2000"}
"""Some fifteen processes of Ray export metrics this often, on the cores of the router. Ray's default is 10 s."""


@contextmanager
def ray_serve(resources: Sequence[Mapping[str, float]], *, cpus: int, pool: str, pool_nbytes: int) -> Iterator[int]:
    """Run Ray nodes with these resources, a raykv pool on them, and an HTTP server. Yields the server's port.

    A SIGTERM ends the benchmark as an exception, so that nothing is left behind.
    """
    os.environ.update(DRIVER_SETTINGS | EXPORTS)
    with ExitStack() as stack:
        nodes = stack.enter_context(LocalRay(resources, cpus=cpus))
        import ray
        from ray import serve

        from raykv import cluster
        from raykv.integrations.serve import backend

        ray.init(address=nodes.address, log_to_driver=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # `ray.init` sets a handler, too
        stack.callback(ray.shutdown)
        stack.callback(cluster.stop, pool)
        cluster.start(name=pool, storage={"arena_nbytes": pool_nbytes})
        backend.register()
        stack.callback(serve.shutdown)
        port = _free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
        yield port


def openai_client(port: int, app: str, *, timeout_s: float = 600.0) -> Any:
    """Return an OpenAI client of one app, which does not try again."""
    import openai

    url = f"http://{HOST}:{port}/{app}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])

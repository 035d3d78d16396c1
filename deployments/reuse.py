"""Measures how much KV the engines of a deployment reused, from the metrics that Ray exports on every Ray node."""

import re
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

POLL_S = 0.2
READ_TIMEOUT_S = 10.0
SAMPLE = re.compile(r"^ray_vllm_(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Reuse:
    """How much was loaded from the pool instead of computed.

    Attributes:
        tokens: Number of tokens, by (address of the loading Ray node, address of the holder, path).
        nbytes: Number of bytes, by path.
        answers: Number of requests that engines finished. The prefill and the decode of a request count separately.
    """

    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    answers: int = 0

    def __sub__(self, earlier: "Reuse") -> "Reuse":
        return Reuse(self.tokens - earlier.tokens, self.nbytes - earlier.nbytes, self.answers - earlier.answers)


class ReuseMeter:
    """Reads the metrics, and returns by how much they have increased since the last call."""

    def __init__(self, pool: str) -> None:
        """Read the metrics for the first time. `pool` is the name of the raykv cluster."""
        import ray

        from raykv.cluster import status

        self._endpoints = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
        nodes = status(pool)["nodes"].values()
        self._address_of = {node["node_id"]: node["address"].rpartition(":")[0] for node in nodes}
        self._last = self._read()

    def next(self, *, answers: int, timeout_s: float = 30.0) -> Reuse:
        """Wait until engines have finished `answers` more requests, and return what was reused since the last call.

        Raises:
            TimeoutError: Fewer requests were finished in time, or Ray has not exported their metrics.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            now = self._read()
            since = now - self._last
            if since.answers >= answers:
                self._last = now
                return since
            if time.monotonic() > until_s:
                raise TimeoutError(f"the engines' figures are missing after {timeout_s} s: {since}")
            time.sleep(POLL_S)

    def _read(self) -> Reuse:
        total = Reuse()
        for endpoint in self._endpoints:
            with urllib.request.urlopen(f"{endpoint}/metrics", timeout=READ_TIMEOUT_S) as response:
                text = response.read().decode()
            for sample in SAMPLE.finditer(text):
                labels: dict[str, str] = dict(LABEL.findall(sample["labels"]))
                value = int(float(sample["value"]))
                match sample["name"]:
                    case "raykv_loaded_tokens_total":
                        holder = self._address_of.get(labels["holder"], labels["holder"])
                        total.tokens[labels["NodeAddress"], holder, labels["path"]] += value
                    case "raykv_loaded_bytes_total":
                        total.nbytes[labels["path"]] += value
                    case "request_success_total":
                        total.answers += value
        return total

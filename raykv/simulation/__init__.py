"""A whole cluster in one thread: the real directory, ring, location indexes, heat and choice of holders, without bytes.

workload = hot_root(requests_per_s=64, seconds=60, sessions=400, documents=100, nbytes=4 << 20, seed=1)
cluster = Cluster(workload, 16, seed=1)
cluster.play(workload.requests)
cluster.run(60.0)
print(cluster.counters.skew(16), cluster.holders(0))
"""

from raykv.simulation.cluster import Cluster
from raykv.simulation.counters import Counters
from raykv.simulation.network import Network
from raykv.simulation.workload import Chunks, Request, Workload, hot_root, of_trace, replay

__all__ = ["Chunks", "Cluster", "Counters", "Network", "Request", "Workload", "hot_root", "of_trace", "replay"]

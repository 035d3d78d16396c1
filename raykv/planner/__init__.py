"""The capacity planner: replays a trace with any eviction policy and any size of cache.

Belady's optimal policy gives an upper bound of the hits.

records = plan(read_trace("trace.jsonl"), sizes=["5%", "64 GiB"], policies=["leaf_lru", "belady"])
print(as_table(records))
"""

from raykv.planner.records import ModelShape, Record, as_csv, as_json, as_table, plan
from raykv.planner.trace import Request, Trace, parse_trace, read_trace

__all__ = [
    "ModelShape",
    "Record",
    "Request",
    "Trace",
    "as_csv",
    "as_json",
    "as_table",
    "parse_trace",
    "plan",
    "read_trace",
]

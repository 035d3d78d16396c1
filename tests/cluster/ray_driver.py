"""A Ray driver on the host of the directory: it starts, describes and stops the raykv cluster of a test."""

import os
from collections.abc import Mapping
from typing import Any

import ray

import raykv.cluster
from raykv.cluster.membership import NAMESPACE, directory_name
from tests.chaos.children import fields_of_child, serve

START_S = 180.0


def main() -> None:
    fields = fields_of_child()
    name: str = fields["config"]["name"]
    hosts: Mapping[str, str] = {address: host for host, address in fields["addresses"].items()}
    ray.init(address=f"{fields['head']}:{fields['port']}", _node_ip_address=fields["head"], log_to_driver=False)

    def host_of(address: str) -> str:
        return hosts[address.rpartition(":")[0]]

    def start() -> dict[str, Any]:
        """Wait until every Ray node has its raykv node. Returns, by host, the node's id and its address there."""
        nodes = raykv.cluster.start(timeout_s=START_S, **fields["config"])["nodes"].values()
        return {host_of(node["address"]): [node["node_id"], node["local_address"]] for node in nodes}

    def view() -> dict[str, Any]:
        """Return the directory's view."""
        directory = ray.get_actor(directory_name(name), namespace=NAMESPACE)
        now = ray.get(directory.describe.remote())["view"]
        return {"epoch": now.epoch, "members": {host_of(each.address): each.incarnation for each in now.members}}

    def secret() -> str:
        return raykv.cluster.control.secret(name)

    def stop() -> bool:
        return raykv.cluster.stop(name)

    serve({"start": start, "view": view, "secret": secret, "stop": stop})
    os._exit(0)


if __name__ == "__main__":
    main()

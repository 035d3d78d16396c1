"""Runs vLLM's own tests of KV connectors on RayKVConnector: `make test-vllm`."""

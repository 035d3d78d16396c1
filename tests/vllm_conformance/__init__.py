"""Runs vLLM's own tests of KV connectors with RayKVConnector in place of their connectors: `make test-vllm`."""

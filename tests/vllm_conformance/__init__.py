"""Runs vLLM's own tests of KV connectors with RayKVConnector in the place of their connectors: `make test-vllm`."""

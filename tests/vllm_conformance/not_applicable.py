"""vLLM's tests that do not apply to RayKVConnector, each with the reason. Paths begin at tests/v1/kv_connector."""

OTHER = "it tests the inside of another connector"
SERVERS = "it is run by scripts that start servers with GPUs"
HOLDS = (
    "it tests a hand-off that holds the blocks of a finished request until a peer has read them, or that names the "
    "peer's blocks; raykv holds no block, because the chunks lie in a node's memory"
)
FAIL = "it sets kv_load_failure_policy='fail', which RayKVConnector refuses"
SYNC = "its loads end within the step; RayKVConnector loads between steps only"
WHOLE = (
    "it counts the blocks or tokens of a load of the whole prompt; raykv loads whole chunks and leaves the last token "
    "to the engine"
)
NO_STATE = "it sets mamba_cache_mode='none', which RayKVConnector refuses, because no state of it can be reused"
FILES = "it needs a model of the hub, and reads the files that ExampleConnector writes"

NOT_APPLICABLE = {
    "mooncake_integration/*.py": SERVERS,
    "nixl_integration/*.py": SERVERS,
    "extract_hidden_states_integration/*.py": "it reads hidden states, not KV, of a model with a plugin of its own",
    "unit/offloading_connector/test_*.py": OTHER,
    "unit/test_decode_bench_connector.py": OTHER,
    "unit/test_flexkv_connector.py": OTHER,
    "unit/test_hf3fs_*.py": OTHER,
    "unit/test_hidden_states_connector.py": OTHER,
    "unit/test_hisparse_*.py": OTHER,
    "unit/test_lmcache_*.py": OTHER,
    "unit/test_mooncake_connector*.py": OTHER,
    "unit/test_mooncake_stats.py": OTHER,
    "unit/test_mooncake_store_connector.py": OTHER,
    "unit/test_mooncake_store_coordinator.py": OTHER,
    "unit/test_mooncake_store_layout.py": OTHER,
    "unit/test_mooncake_store_scheduler.py": OTHER,
    "unit/test_mooncake_store_worker.py": OTHER,
    "unit/test_moriio_*.py": OTHER,
    "unit/test_nixl_*.py": OTHER,
    "unit/test_offloading_connector.py": "it needs models of the hub and a GPU",
    "unit/test_simple_cpu_offload_*.py": OTHER,
    "unit/test_bidirectional_kv_transfer.py": HOLDS,
    "unit/test_cache_pollution_prevention.py::*": FAIL,
    "unit/test_error_propagation.py::*": FAIL,
    "unit/test_example_connector.py::*": FILES,
    "unit/test_invalid_blocks_correctness.py::test_sync_fail_*": FAIL,
    "unit/test_invalid_blocks_correctness.py::test_sync_recompute_*": SYNC,
    "unit/test_kv_load_failure_recovery.py::test_failed_receive_completion_honors_failure_policy[fail]": FAIL,
    "unit/test_kv_load_failure_recovery.py::test_sync_load_failure*": SYNC,
    "unit/test_mooncake_store_hma_e2e.py::test_chunked_token_database_*": OTHER,
    "unit/test_mooncake_store_hma_e2e.py::test_offload_syncs_event_before_put": (
        "it waits for a GPU's event; raykv's event is `Layout.fence`, and there is none on CPU"
    ),
    "unit/test_mooncake_store_hma_e2e.py::test_sub_block_partial_tail_offload_covers_smaller_group_blocks": (
        "Mooncake saves the small blocks before a state together with it; raykv saves each in the step that fills it"
    ),
    "unit/test_multi_connector.py::test_multi_example_connector_consistency": FILES,
    "unit/test_multi_connector.py::test_multi_connector_mixed_hma_disables_hybrid_kv_cache": "it needs a GPU",
    "unit/test_multi_connector.py::TestMultiConnectorStats::test_build_kv_connector_stats_reconstructs_*": OTHER,
    "unit/test_multi_connector.py::TestMultiConnectorStats::test_build_kv_connector_stats_with_multiple_*": OTHER,
    "unit/test_multi_connector.py::TestMultiConnectorStats::test_build_kv_connector_stats_skips_*": OTHER,
    "unit/test_remote_decode_lifecycle.py::*": HOLDS,
    "unit/test_remote_prefill_lifecycle.py::test_basic_lifecycle": WHOLE,
    "unit/test_remote_prefill_lifecycle.py::test_full_block_prompt": WHOLE,
    "unit/test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_*[multiple-groups]": WHOLE,
    "unit/test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_*[different-block-sizes]": WHOLE,
    "unit/test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching": (
        "its second request has the same prompt and must be computed; raykv finds that prompt for every request"
    ),
    "unit/test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": NO_STATE,
    "unit/test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_*[none-128-18]": NO_STATE,
}

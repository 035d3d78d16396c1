"""Runs vLLM's OpenAI server, in any environment. The arguments are those of `vllm serve`, with `--model`.

Some connectors make CUDA events even if the engine runs on a CPU. There an event has happened when it is recorded, so
it has a stand-in. vLLM starts its engine in a process that imports this module again, and so gets the stand-in, too.
"""

import runpy

import torch


class Happened:
    """An event of a device that executes everything at once."""

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


if not torch.cuda.is_available():
    setattr(torch.cuda, "Event", Happened)  # noqa: B010 - type checkers refuse to assign to a class

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
